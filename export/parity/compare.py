"""Parity checks: logits before and after each conversion, compared on real rows (bounds: export/parity/bounds.py).

Where precision is reduced by design (int8), no single difference is bounded. A file is then refused for a *significant* fault:
a loss of the metric beyond chance, label changes beyond those by rounding, or outputs that change more than by rounding to
that precision in PyTorch. docs/export.md lists how often a loss is detected by number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from compressor.errors import CheckError
from compressor.json_numbers import without_infinity
from compressor.tasks.features import Forward, length_of, predictions_of
from compressor.tasks.kinds.classification import KIND as CLASSIFICATION
from compressor.tasks.metrics import few_rows_move, margin_noise, output_distance, paired_changes
from compressor.tasks.predictions import rows_of
from compressor.tasks.task_kind import TaskKind
from export.parity.bounds import BIT_EXACT_TOLERANCE, BOUNDS, ROUNDING_SHARE, Bound, row_of

Batches = dict[str, np.ndarray]
"""Logits (predictions, classes) of some rows in several batch compositions, by the name of the composition."""

FINITE = "finite logits"
"""Bound of a comparison with outputs that are not finite."""
RESAMPLES = 1000
MORE_ROWS = 128
"""Number of rows that are also compared in other batches."""
ONE_SIDED, NINE_OF_TEN = 1.645, 1.282
"""Normal quantiles of .95 and .9."""


@dataclass(frozen=True)
class Loss:
    """Loss of the gating metric by a conversion, positive where it gets worse, in the metric's unit (.01 is a point).

    `at_least` and `at_most` are its one-sided 95 % bounds (paired bootstrap over rows). `allowed` is the bound, and `resolved`
    the smallest true loss that so many rows would refuse 9 times out of 10. `unit` is "points", or "nats a token".
    """

    found: float
    at_least: float
    at_most: float
    allowed: float
    resolved: float
    unit: str = "points"

    @property
    def too_large(self) -> bool:
        """Whether a loss above the allowed one is shown."""
        # 1e-9: a loss of exactly one point must not fail by rounding
        return self.at_least > self.allowed + 1e-9

    @property
    def small_enough(self) -> bool:
        """Whether a loss within the allowed one is shown."""
        return self.at_most <= self.allowed + 1e-9

    def in_words(self, loss: float) -> str:
        """Format a loss: '1.0 points'."""
        return f"{100 * loss:.1f} points" if self.unit == "points" else f"{loss:.2f} {self.unit}"

    @property
    def shown(self) -> str:
        """Format as '-0.25 points, 90 % interval -0.88 to +0.38': the change, so a loss is negative."""
        scale = 100 if self.unit == "points" else 1
        change, low, high = (0.0 - scale * loss for loss in (self.found, self.at_most, self.at_least))
        return f"{change:+.2f} {self.unit}, 90 % interval {low:+.2f} to {high:+.2f}"


@dataclass(frozen=True)
class Unlabelled:
    """Outputs (predictions, outputs) for the checks that need no labels, in addition to those of the validation rows.

    `reference` and `candidate` are the two models' on more rows, or nothing; `rounded` are those of the reference with its
    matrices rounded to the precision in PyTorch, on the validation rows and then on these, or None if unknown. `static`: the
    candidate uses calibrated ranges and also rounds products of activations, which `rounded` does not model.
    """

    reference: np.ndarray | None = None
    candidate: np.ndarray | None = None
    rounded: np.ndarray | None = None
    static: bool = False


@dataclass(frozen=True)
class ParityResult:
    """One comparison. `worst_row` is the row with the largest excess over the bound; `metric_*` are the task metric,
    `agreement` is defined by the kind of task: the share of rows with the same label, or the concordance of numbers.

    `metric_interval` is the 95 % paired bootstrap interval of metric(candidate) - metric(reference). `batches` has the largest
    |Δlogit| of the rows that were compared in other batches, `agreement_in_batches` their agreement, `failed_batches` those of
    them beyond the bound.

    Where no difference is bounded: `loss` of the metric; `agreement_beyond_noise`, which ignores labels that rounding alone may
    change; `distance` of the outputs (`metrics.output_distance`) and `rounding`, that of rounding alone in PyTorch, both on the
    `answers` predictions of validation rows and of added training rows. `failed` names the failed checks: difference, metric,
    agreement, rounding, batches. `gated` is False for a baseline, which need not pass.
    """

    hop: str
    kind: str
    rows: int
    max_difference: float
    mean_difference: float
    agreement: float
    metric_reference: float
    metric_candidate: float
    metric_interval: tuple[float, float]
    worst_row: int
    bound: str
    passed: bool
    batches: dict[str, float]
    agreement_in_batches: dict[str, float]
    failed_batches: tuple[str, ...]
    failed: tuple[str, ...] = ()
    loss: Loss | None = None
    agreement_beyond_noise: float | None = None
    distance: float | None = None
    rounding: float | None = None
    answers: int = 0
    gated: bool = True

    @property
    def verdict(self) -> str:
        """passed, refused, or not shown: the rows show neither a loss above the allowed one nor one within it. A file that is
        only compared with is "beyond its bound" instead of refused."""
        if not self.passed:
            return "refused" if self.gated else "beyond its bound"
        return "not shown" if self.loss is not None and not self.loss.small_enough else "passed"

    @property
    def has_figures(self) -> bool:
        """Whether outputs of one shape, all finite, were compared: otherwise agreement and metrics are 0 and say nothing."""
        return bool(np.isfinite(self.max_difference))

    @property
    def inconclusive(self) -> str:
        """Sentence about a loss that is shown neither way, with the loss that so many rows can resolve; otherwise empty."""
        if self.verdict != "not shown":
            return ""
        return (
            f"{self.hop} passes, but {self.rows:,} rows cannot rule out a loss of more than "
            f"{self.loss.in_words(self.loss.allowed)} ({self.loss.shown}); they would detect a loss of "
            f"{self.loss.in_words(self.loss.resolved)} 9 times out of 10"
        )

    def to_json(self) -> dict[str, Any]:
        """The entry in an artifact's metadata, as JSON data; a difference from outputs that are not finite, or of another
        shape, is None."""
        return without_infinity({**asdict(self), "verdict": self.verdict, "told": self.inconclusive})


def compare(
    hop: str,
    kind: str,
    reference: np.ndarray,
    candidate: np.ndarray,
    labels: np.ndarray,
    *,
    task: TaskKind = CLASSIFICATION,
    batches: tuple[Batches, Batches] = ({}, {}),
    unlabelled: Unlabelled = Unlabelled(),
) -> ParityResult:
    """Compare outputs (predictions, outputs) by the bound of a kind of conversion (`row_of`). Another shape or a NaN fails.

    `batches` are the same two models on some of the rows in other batches (`in_other_batches` of each): the same bound holds
    there, except for the metric; and an agreement may be less by the sampling error of so few predictions. `unlabelled` is
    for the checks of a precision that need no labels.
    """
    kind = row_of(kind, task)
    bound, others = BOUNDS[kind], {name: (batches[0][name], theirs) for name, theirs in batches[1].items()}
    loose = replace(bound, difference=BIT_EXACT_TOLERANCE) if bound.difference == 0.0 else bound
    if reference.shape != candidate.shape or not len(reference):
        return _incomparable(hop, kind, labels, f"shape {reference.shape}, got {candidate.shape}")
    rows = rows_of(labels)
    if not (np.isfinite(reference).all() and np.isfinite(candidate).all()):
        broken = ~(np.isfinite(reference) & np.isfinite(candidate)).all(axis=1)
        return _incomparable(hop, kind, labels, FINITE, worst_row=int(rows[broken.argmax()]))
    reference, candidate = reference.astype(np.float64), candidate.astype(np.float64)
    difference = np.abs(candidate - reference)
    (ours, targets), (theirs, _) = (task.metric_inputs(outputs, labels) for outputs in (reference, candidate))
    before, after = (task.output_metric.value(predicted, targets) for predicted in (ours, theirs))
    if bound.difference is None:
        facts, failed, noise = _of_a_precision(bound, reference, candidate, unlabelled, task)
        facts["loss"] = loss = loss_of(bound, task, ours, theirs, targets)
        failed += ("metric",) * loss.too_large
        within = partial(_agrees, bound, task, noise)
    else:
        within = partial(_is_alike, loose, task)
        beyond = "agreement" if _is_near(bound, reference, candidate) else "difference"
        facts, failed = {}, () if _is_alike(bound, task, reference, candidate) else (beyond,)
    failed_batches = tuple(name for name, pair in others.items() if not within(*pair))
    failed += ("batches",) * bool(failed_batches)
    return ParityResult(
        hop=hop,
        kind=kind,
        rows=len(labels),
        max_difference=float(difference.max()),
        mean_difference=float(difference.mean()),
        agreement=task.agreement.measure(reference, candidate),
        metric_reference=before,
        metric_candidate=after,
        metric_interval=task.change(theirs, ours, targets, resamples=RESAMPLES),
        worst_row=int(rows[(difference / _scale(bound, reference)).max(axis=1).argmax()]),
        bound=in_words(bound, task, rounding=unlabelled.rounded is not None),
        passed=not failed,
        batches={name: float(np.abs(values - other).max()) for name, (values, other) in others.items()},
        agreement_in_batches={name: task.agreement.measure(*pair) for name, pair in others.items()},
        failed_batches=failed_batches,
        failed=failed,
        **facts,
    )


def _scale(bound: Bound, reference: np.ndarray) -> np.ndarray | float:
    scale = np.maximum(1.0, np.abs(reference)) if bound.relative else 1.0
    return scale.max(axis=-1, keepdims=True) if bound.of_row else scale


def _is_near(bound: Bound, reference: np.ndarray, candidate: np.ndarray) -> bool:
    """Whether every difference is within the bound; False for a NaN."""
    return bool((np.abs(candidate - reference) <= bound.difference * _scale(bound, reference)).all())


def _is_alike(bound: Bound, task: TaskKind, reference: np.ndarray, candidate: np.ndarray) -> bool:
    """Whether every difference is within the bound and, beyond what rounding explains, the agreement that it requires of this
    kind of task holds; False for a NaN. One number for all rows, as that of a single row is, has no agreement."""
    if not _is_near(bound, reference, candidate):
        return False
    rounding = replace(bound, difference=ROUNDING_SHARE * bound.difference)
    enough = task.name not in bound.agreement or not np.ptp(reference) or _is_near(rounding, reference, candidate)
    return enough or _agrees(bound, task, 0.0, reference, candidate)


def _agrees(bound: Bound, task: TaskKind, noise: float, reference: np.ndarray, candidate: np.ndarray) -> bool:
    """Whether outputs agree as far as the kind of conversion requires, less the sampling error; False for a NaN."""
    least = bound.agreement[task.name]
    enough = least - task.agreement.chance(least, len(reference))
    return bool(np.isfinite(candidate).all()) and task.agreement.beyond(reference, candidate, noise) >= enough


def _of_a_precision(
    bound: Bound, reference: np.ndarray, candidate: np.ndarray, unlabelled: Unlabelled, task: TaskKind
) -> tuple[dict[str, Any], tuple[str, ...], float]:
    """Checks that need no labels: (facts for the record, checks that refuse, the margin noise of rounding alone)."""
    if unlabelled.reference is not None:
        reference = np.concatenate([reference, unlabelled.reference])
        candidate = np.concatenate([candidate, unlabelled.candidate])
    distance = partial(output_distance, softmax=task.agreement.softmax)
    facts = {"answers": len(reference), "distance": distance(reference, candidate)}
    noise, failed = 0.0, ()
    if (rounded := unlabelled.rounded) is not None:
        noise = margin_noise(reference, rounded) if reference.shape[1] > 1 else 0.0
        facts["rounding"] = distance(reference, rounded)
        allowed = max(bound.rounding * facts["rounding"], bound.static * unlabelled.static)
        failed = ("rounding",) * (facts["distance"] > allowed)
    facts["agreement_beyond_noise"] = task.agreement.beyond(reference, candidate, noise)
    return facts, failed + ("agreement",) * (not _agrees(bound, task, noise, reference, candidate)), noise


def loss_of(bound: Bound, task: TaskKind, ours: np.ndarray, theirs: np.ndarray, labels: np.ndarray) -> Loss:
    """Loss of the gating metric of the candidate (`theirs`) against the reference (`ours`), both `TaskKind.metric_inputs`."""
    value, rows = task.gate.value, len(labels)
    ours, theirs = map(task.decided, (ours, theirs))
    loss = value(ours, labels) - value(theirs, labels)
    losses = -paired_changes(value, theirs, ours, labels, resamples=RESAMPLES, resampled=task.gate.resampled)
    at_least, at_most = (float(edge) for edge in np.percentile(losses, [5, 95]))
    # where 3 / N of all rows get worse, none of N rows does in 5 % of samples: a few that turn without harm show no more.
    # A share of the rows is no loss of a correlation, nor of a likelihood in nats
    unseen = 1 - 0.05 ** (1 / rows)
    if at_most < unseen and not task.gate.by_degree and few_rows_move(value, theirs, ours, labels):
        at_most = unseen
    resolved = resolved_loss(bound.metric_loss, float(losses.std()), rows)
    return Loss(loss, at_least, at_most, bound.metric_loss, resolved, unit_of(task))


def unit_of(task: TaskKind) -> str:
    """Unit of a loss of the gating metric."""
    return "nats a token" if task.generates else "points"


def resolved_loss(allowed: float, error: float, rows: int) -> float:
    """The smallest true loss that is refused 9 times out of 10, given the standard error of the measured loss.

    A larger loss flips more rows, which widens the error.
    """
    loss = allowed
    for _ in range(20):
        loss = allowed + (ONE_SIDED + NINE_OF_TEN) * float(np.sqrt(error**2 + loss / rows))
    return loss


def in_other_batches(
    forward: Forward,
    rows: Sequence[dict[str, list[int]]],
    pad_id: int,
    most: int = 32,
    labels: np.ndarray | None = None,
) -> Batches:
    """Outputs of a model on up to MORE_ROWS of `rows`, in batches of 1 and in batches of `most` with short and long rows.

    The batches of `compressor.tasks.features.predict` have rows of similar length: they contain little padding, and cannot
    detect a graph that is correct for one batch size only, or that mixes the rows of a batch. `labels` as there.
    """
    order = sorted(range(len(rows)), key=lambda row: length_of(rows[row]))
    chosen = [order[place] for place in np.linspace(0, len(order) - 1, min(MORE_ROWS, len(order))).astype(int)]
    groups = -(-len(chosen) // most)
    # every groups-th row of the sorted ones: each batch has all lengths
    mixed = [chosen[start::groups] for start in range(groups)]
    made = {"batch 1": [[row] for row in chosen], f"batch {most}, mixed lengths": mixed}
    # copied after each pass: the outputs of all passes may not fit into memory
    return {
        name: np.concatenate([part.copy() for batch in each for part in predictions_of(forward, rows, batch, pad_id, labels)])
        for name, each in made.items()
    }


def in_words(bound: Bound, task: TaskKind, *, rounding: bool = True) -> str:
    """A bound in words, for a kind of task, with that of `rounding` or without."""
    agrees = f"{task.agreement.words} {bound.agreement[task.name]:.0%}" if task.name in bound.agreement else ""
    if bound.difference is None:
        most = bound.metric_loss
        loss = f"{most:g} {unit_of(task)}" if task.generates else f"{100 * most:.1f} points of {task.metric.name}"
        words = f"{agrees} but for chance, no loss of more than {loss} is shown"
        return f"{words}, rounding explains what moves" if rounding else words
    if bound.difference == 0.0:
        return "equal bit for bit"
    scale = " x max(1, largest |logit| of the row)" if bound.of_row else " x max(1, |logit|)" if bound.relative else ""
    return f"|Δlogit| <= {bound.difference:g}{scale}{f', {agrees} beyond rounding' if agrees else ''}"


def _incomparable(hop: str, kind: str, labels: np.ndarray, bound: str, worst_row: int = 0) -> ParityResult:
    """The failed result of a comparison that is impossible."""
    infinite, none = float("inf"), (0.0, 0.0)
    figures = (infinite, infinite, 0.0, 0.0, 0.0, none)
    return ParityResult(hop, kind, len(labels), *figures, worst_row, bound, False, {}, {}, (), ("difference",))


def why_refused(result: ParityResult) -> str:
    """The finding of each check that refuses, in one line."""
    if not result.has_figures:
        if result.bound == FINITE:
            return f"outputs that are not finite, first in row {result.worst_row} of {result.rows}"
        return "outputs of another shape" if result.rows else "no rows"
    turned = result.agreement_beyond_noise
    beyond = "" if turned is None else f", {turned:.1%} beyond what rounding turns"
    of = {
        "difference": f"|Δlogit| {result.max_difference:.3g}, agreement {result.agreement:.1%}, metric "
        f"{result.metric_reference:.4f} -> {result.metric_candidate:.4f}, worst row {result.worst_row} of {result.rows}",
        "metric": f"a loss is shown: {result.loss.shown}" if result.loss else "",
        "agreement": f"agreement {result.agreement:.1%}{beyond}",
        "rounding": f"outputs move {(result.distance or 0) / (result.rounding or 1):.1f} times as far as rounding moves them",
        "batches": "; ".join(
            f"{name}: |Δlogit| {result.batches[name]:.3g}, agreement {result.agreement_in_batches[name]:.1%}"
            for name in result.failed_batches
        ),
    }
    return "; ".join(of[name] for name in result.failed)


def failure(
    result: ParityResult,
    suspect: str = "",
    fix: str = "Nothing of this stage was published; `compress report RUN` shows every comparison up to here",
) -> CheckError:
    """E610 with the conversion, the figures and, if known, the suspected layer; `fix` is by default that of a run's stage."""
    where = f"; suspected: {suspect}" if suspect else ""
    return CheckError(
        "E610",
        f"{result.hop}: not the same function (allowed: {result.bound}; found: {why_refused(result)}{where})",
        fix,
    )


def require(result: ParityResult, suspect: Callable[[], str] = lambda: "") -> None:
    """Raises CheckError E610 when the comparison failed; only then `suspect` is called to find the layer."""
    if not result.passed:
        raise failure(result, suspect())
