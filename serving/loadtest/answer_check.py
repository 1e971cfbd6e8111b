"""Whether the answers under load are those that the same rows get alone, or those that a run expects."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from compressor.errors import CheckError, UserError
from serving.answer_bounds import IN_BATCHES, TOLERANCE
from serving.loadtest.request_pools import CONNECTION
from serving.loadtest.senders import TIMED_OUT, Record
from serving.loadtest.traffic import Outputs, Traffic, outputs_of

EQUAL = 1e-4
"""Largest difference, relative to the row's largest value (1 at least), of an answer that counts as equal."""
FEW = 0.05
"""Share of the answers that may be of another text (label, tags, place) without one wrong number: where two classes are all but
equal, the order of a sum decides."""


@dataclass(frozen=True)
class Checked:
    """Answers by how they compare: `near` are those between EQUAL and `bound`, or of another text beside such numbers."""

    answers: int = 0
    near: int = 0
    wrong: int = 0
    changed: int = 0
    unchecked: int = 0
    max_difference: float = 0.0
    bound: float = IN_BATCHES


def first_answers(record: Record, traffic: Traffic) -> list[Outputs]:
    """The answers of a pass over all rows of the traffic. Raises UserError E748 for a row that the server refuses, or does not
    answer as Triton does, although it comes alone."""
    found = {row: outputs_if_any(body, header) for row, header, body in record.answers}
    if odd := [row for row, outputs in found.items() if outputs is None]:
        what = "what comes back for a row that comes alone is not an answer of Triton"
        raise UserError("E748", what, "See what answers there, such as a proxy", traffic.name_of(odd[0]))
    if error := next((error for error in record.errors if error), None):
        if error.startswith((TIMED_OUT, CONNECTION)):
            what, fix = "a row that comes alone is not answered", "See the server's log; for a slow model raise --timeout"
        else:
            what = "the server refuses a row that comes alone"
            fix = "Remove that row, or test with rows that the model takes"
        where = traffic.name_of(record.errors.index(error))
        raise UserError("E748", f"{what} ({record.reason or error})", fix, where)
    return [found[row] for row in range(len(traffic)) if row in found]


def outputs_if_any(body: bytes, header: int) -> Outputs | None:
    """The outputs in an answer; None where it is not Triton's, such as a page of a proxy, or cut."""
    try:
        return outputs_of(body, header)
    except Exception:  # a body may be anything, and each is another type of tritonclient's, json's, numpy's or protobuf's
        return None


def require_recorded(recorded: Sequence[Outputs], found: Sequence[Outputs], alone: float = TOLERANCE) -> None:
    """Raises CheckError E750 where rows that come alone are not answered as when the model was deployed, but for `alone`."""
    verdicts = [compared(*pair, alone) for pair in zip(recorded, found, strict=False)]
    odd = [(number, worst) for number, (verdict, worst) in enumerate(verdicts) if verdict in ("wrong", "changed")]
    if odd:
        what = f"{len(odd)} of {len(verdicts)} rows are not answered as recorded (row {odd[0][0]} differs by {odd[0][1]:.3g})"
        raise CheckError("E750", what, "Test the model that the run deployed, or give other rows with --texts")


def check_answers(expected: Sequence[Outputs], records: Iterable[Record], bound: float = IN_BATCHES) -> Checked:
    """Compare every different answer of each row with the expected one; a difference of more than `bound` is wrong, and so is
    what is not an answer of Triton."""
    counts, worst, unchecked = dict.fromkeys(("equal", "near", "wrong", "changed"), 0), 0.0, 0
    for record in records:
        unchecked += record.unchecked
        for (row, header, body), count in record.answers.items():
            verdict, difference = compared(expected[row], outputs_if_any(body, header) or {}, bound)
            counts[verdict] += count
            worst = max(worst, difference)
    checked = {key: counts[key] for key in ("near", "wrong", "changed")}
    return Checked(sum(counts.values()), **checked, unchecked=unchecked, max_difference=worst, bound=bound)


def compared(expected: Outputs, found: Outputs, bound: float) -> tuple[str, float]:
    """'equal', 'near', 'wrong' (measured numbers beyond `bound`, shapes, kinds of values, outputs) or 'changed' (texts or
    integers alone, such as the place of an answer), and the largest relative difference."""
    if expected.keys() != found.keys() or any(form(expected[name]) != form(found[name]) for name in expected):
        return "wrong", np.inf
    numbers = [name for name in expected if expected[name].dtype.kind == "f"]
    worst = max((difference(expected[name], found[name]) for name in numbers), default=0.0)
    same_others = all((expected[name] == found[name]).all() for name in expected.keys() - set(numbers))
    if worst > bound:
        return "wrong", worst
    if worst > EQUAL:
        return "near", worst
    return ("equal" if same_others else "changed"), worst


def form(output: np.ndarray) -> tuple[str, tuple[int, ...]]:
    """The kind of an output's values, such as numbers or texts, and its shape."""
    return output.dtype.kind, output.shape


def difference(expected: np.ndarray, found: np.ndarray) -> float:
    """Largest absolute difference over the largest expected absolute value, which counts as 1 at least; inf for what is not
    finite."""
    if not expected.size:
        return 0.0
    scale = max(1.0, float(np.abs(expected).max()))
    worst = float(np.abs(found.astype(np.float64) - expected).max()) / scale
    return worst if np.isfinite(worst) else np.inf
