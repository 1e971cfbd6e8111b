"""How far a right answer may be from the one that the same row had before."""

from __future__ import annotations

from pathlib import Path

from export.parity.bounds import BOUNDS
from export.runtimes.runtime import Runtime
from export.runtimes.runtime_registry import RUNTIMES
from serving.backends.door import VERSION_FILE
from serving.layout.version_file import read_version

TOLERANCE = 1e-3
"""Of a row that comes alone: largest |difference| of a number, times max(1, |before|), as much as another processor may round
differently in fp32."""
IN_HALF = {"fp16": BOUNDS["fp16"].difference, "bf16": BOUNDS["bf16"].difference}
"""The same in half precision, alone and beside others: what it may change of the model's outputs. On a CPU, too, a row that is
padded to another length rounds otherwise: 1.5e-3 of 1,800 probabilities in bf16, 4.9e-3 of their logits."""
IN_BATCHES = 0.7
"""Of a row beside others, in a file of dynamic int8, whose scales depend on the whole batch: 0.46 was seen in 23,000 answers. A
larger difference is a wrong answer."""


def tolerance_alone(version: Path) -> float:
    """The bound for the answers of a version's folder to a row that comes alone. Raises UserError E728 where its facts are
    invalid."""
    return IN_HALF.get(_computed_in(version)[1], TOLERANCE)


def tolerance_in_batches(version: Path) -> float:
    """The same while other clients' rows share its batches. Raises UserError E728."""
    row, precision = _computed_in(version)
    dynamic = row is not None and precision == "int8" and not row.calibrated
    return IN_BATCHES if dynamic else tolerance_alone(version)


def least_concordance(version: Path) -> float:
    """The concordance that a version's numbers must have with the record: those of a regression have any scale, and the mean
    in place of each may be within the bound of half precision; 0 where none is asked. Raises UserError E728."""
    precision = _computed_in(version)[1]
    is_number = precision in IN_HALF and read_version(version).task == "regression"
    return BOUNDS[precision].agreement["regression"] if is_number else 0.0


def _computed_in(version: Path) -> tuple[Runtime | None, str]:
    """The runtime, None where it is not known, and the precision. A model of unknown use, which no batch is made of, has
    neither."""
    if not (version / VERSION_FILE).exists():
        return None, ""
    facts = read_version(version)
    return RUNTIMES.get(facts.runtime), facts.precision
