"""The two sides of a comparison: what each says of the same rows, the record of both, and a graph that does not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from compressor.errors import CheckError
from compressor.memory_faults import memory_fault
from compressor.tasks.data import Data, TokenRows
from compressor.tasks.features import length_of, pad
from export.parity.compare import Batches, ParityResult, Unlabelled, compare, failure
from export.runtimes.sessions import failures


@dataclass(frozen=True)
class Outputs:
    """Predictions of one side of a comparison: logits (predictions, outputs) of all rows, of some of them in other batches,
    and, for the checks that need no labels, of more rows."""

    logits: np.ndarray
    batches: Batches
    more: np.ndarray | None = None


def compare_outputs(
    hop: str, kind: str, reference: Outputs, candidate: Outputs, rows: TokenRows, unlabelled: Unlabelled | None = None
) -> ParityResult:
    """The record of one comparison; nothing is raised."""
    options = {"batches": (reference.batches, candidate.batches), "unlabelled": unlabelled or Unlabelled()}
    return compare(hop, kind, reference.logits, candidate.logits, rows.labels, task=rows.kind, **options)


def require_file(result: ParityResult, suspect: Callable[[], str]) -> None:
    """Raises CheckError E610 where a file that no run made failed its comparison; only then `suspect` finds the layer."""
    if not result.passed:
        raise failure(result, suspect(), "Leave that precision out, or add --no-fuse")


@contextmanager
def runs(hop: str) -> Iterator[None]:
    """A graph that refuses an input fails its check. Raises CheckError E611 with the runtime's reason, UserError E908 where the
    memory is used up."""
    try:
        yield
    except failures() as error:
        if fault := memory_fault(error):
            raise fault from error
        reason = " ".join(str(error).split(" : ", 3)[-1].split())[-200:].strip(" .")
        fix = "A graph must take any number of rows and tokens; export the model again"
        raise CheckError("E611", f"{hop}: the graph does not run ({reason})", fix) from error


def telling_rows(result: ParityResult, rows: TokenRows, data: Data) -> dict[str, Any]:
    """The worst row and the longest one, padded: the input for a search for the layer."""
    longest = max(range(len(rows)), key=lambda row: length_of(rows.tokens[row]))
    return pad([rows.tokens[result.worst_row], rows.tokens[longest]], data.pad_id)
