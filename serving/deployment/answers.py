"""Recorded answers of a deployed model: requests with the outputs that were proven when it was deployed, beside its files.

ANSWERS_FILE in a version folder holds them as the Open Inference Protocol has them in JSON, so that any server of the model can
be checked against them, without the run, its data or its runtime.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import UserError
from compressor.tasks.metrics import concordance
from export.parity.bounds import ROUNDING_SHARE
from serving.answer_bounds import TOLERANCE

ANSWERS_FILE = "answers.json"
FLOATS = ("FP16", "FP32", "FP64")

Tensors = list[dict[str, Any]]
"""Tensors of a request or a response: name, shape, datatype and data, flat."""


@dataclass(frozen=True)
class Answer:
    """One request and its outputs; `generated`: of a model that generates, which is asked for all of its text at once."""

    inputs: Tensors
    outputs: Tensors
    generated: bool = False


def tensor(name: str, values: np.ndarray, datatype: str) -> dict[str, Any]:
    """An array as JSON data; texts are `object` arrays with datatype BYTES."""
    return {"name": name, "shape": list(values.shape), "datatype": datatype, "data": values.ravel().tolist()}


def write_answers(version: Path, answers: Sequence[Answer]) -> None:
    """Write ANSWERS_FILE into a version folder."""
    stored = {"answers": [vars(answer) for answer in answers]}
    (version / ANSWERS_FILE).write_text(json.dumps(stored), encoding="utf-8")


def read_answers(version: Path) -> list[Answer]:
    """The recorded answers of a version folder. Raises UserError E754 where there are none or they cannot be read."""
    path = version / ANSWERS_FILE
    try:
        return [Answer(**answer) for answer in json.loads(path.read_text(encoding="utf-8"))["answers"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        fix = "Run the pipeline's deploy stage again; what another command wrote, such as delta stack, is not deployed"
        raise UserError("E754", f"no recorded answers ({error})", fix, str(path)) from error


def differences(
    answers: Sequence[Answer],
    asked: Callable[[Answer], Tensors],
    tolerance: float = TOLERANCE,
    times: int = 1,
    least_concordance: float = 0.0,
) -> list[str]:
    """What differs from the record, a line a request; [] where nothing does.

    `asked` gives the outputs now, or raises. A request whose answer differs is asked `times` times, because each time other
    rows may share its batch; the last difference counts. Numbers that are all within `tolerance` must also have a concordance
    of `least_concordance`, unless rounding alone explains their differences: else every request differs."""
    found, given = [], []
    for number, answer in enumerate(answers, 1):
        for _ in range(times):
            outputs = asked(answer)
            if not (difference := _difference(answer.outputs, outputs, tolerance)):
                break
        given.append(outputs)
        if difference:
            found.append(f"request {number}: {difference}")
    if found or not least_concordance:
        return found
    recorded = _numbers([answer.outputs for answer in answers], answers)
    agreement = _concordance(recorded, _numbers(given, answers), ROUNDING_SHARE * tolerance)
    what = f"the numbers of all requests have a concordance of {agreement:.3g} with the record, {least_concordance:g} is needed"
    return [] if agreement >= least_concordance else [what] * len(answers)


def _numbers(outputs: Sequence[Tensors], answers: Sequence[Answer]) -> np.ndarray:
    """All floating-point outputs, in the order of the record."""
    values = []
    for answer, tensors in zip(answers, outputs, strict=True):
        found = {output["name"]: output["data"] for output in tensors}
        values += [number for output in answer.outputs if output["datatype"] in FLOATS for number in found[output["name"]]]
    return np.array(values, dtype=float)


def _concordance(recorded: np.ndarray, given: np.ndarray, rounding: float) -> float:
    """1 where every difference is within `rounding`, and where one number alone was recorded, which has no concordance."""
    rounded = (np.abs(given - recorded) <= rounding * np.maximum(1, np.abs(recorded))).all()
    if rounded or not np.ptp(recorded):
        return 1.0
    return concordance(recorded[:, None], given[:, None])


def _difference(recorded: Tensors, given: Tensors, tolerance: float) -> str:
    found = {output["name"]: output for output in given}
    for output in recorded:
        name, other = output["name"], found.get(output["name"])
        if other is None:
            return f"no output {name}"
        if other["shape"] != output["shape"] or other["datatype"] != output["datatype"]:
            return f"{name} is {other['datatype']} {other['shape']}, recorded {output['datatype']} {output['shape']}"
        if output["datatype"] not in FLOATS:
            if other["data"] != output["data"]:
                return f"{name} is {other['data']!r:.60}, recorded {output['data']!r:.60}"
            continue
        expected, values = np.array(output["data"], dtype=float), np.array(other["data"], dtype=float)
        error = np.abs(values - expected) / np.maximum(1, np.abs(expected))
        if not (error <= tolerance).all():  # also where it is not a number
            return f"{name} differs by {error.max():.3g}, allowed {tolerance:g}"
    return ""
