"""The parity check of each conversion of a model: run by stages before they publish, and by `compress verify` afterwards."""

from __future__ import annotations

from torch import nn

from compressor.tasks.data import Data, TokenRows
from compressor.tasks.features import Forward, torch_forward
from export.parity.compare import ParityResult, in_other_batches, require
from export.parity.sides import Outputs, compare_outputs, telling_rows
from export.parity.suspects import suspect_module
from pipelines.engine.stage import Workspace
from pipelines.stages.loading import predict_rows

ALIGNMENT = 64
"""Bytes of which the addresses of PyTorch's own allocations on a CPU are multiples."""


def outputs_of(
    forward: Forward,
    rows: TokenRows,
    data: Data,
    workspace: Workspace,
    description: str,
    most: int | None = None,
    more: TokenRows | None = None,
) -> Outputs:
    """Compute the predictions of a model, with a progress bar; `most` is the largest batch, by default that of the data, and
    `more` are rows beside those that are compared."""
    most = most or data.batch_size
    logits = predict_rows(forward, rows, data, workspace, description, most)
    joined = None if more is None else predict_rows(forward, more, data, workspace, f"{description}, training rows", most)
    return Outputs(logits, in_other_batches(forward, rows.tokens, data.pad_id, most, rows.labels), joined)


def compare_modules(
    hop: str, kind: str, reference: nn.Module, candidate: nn.Module, rows: TokenRows, data: Data, workspace: Workspace
) -> ParityResult:
    """Compare two PyTorch models on `rows`, also in other batches. Raises CheckError E610 with the block where they diverge."""
    rows, most = _no_row_alone(rows, data.batch_size)
    for model in (reference, candidate):
        _align(model)
    forwards = [torch_forward(model, accelerate=False) for model in (reference, candidate)]
    sides = [outputs_of(forward, rows, data, workspace, hop, most) for forward in forwards]
    result = compare_outputs(hop, kind, *sides, rows)
    workspace.proven(result.to_json())
    require(result, lambda: suspect_module(reference, candidate, telling_rows(result, rows, data)))
    return result


def _align(model: nn.Module) -> None:
    """Put each matrix of one row, as the head of a regression, where an allocated one would begin: the last bits of its
    products depend on where in memory it is, and one of a loaded file lies anywhere."""
    for matrix in model.parameters():
        if matrix.device.type == "cpu" and matrix.shape[:1] == (1,) and matrix.data_ptr() % ALIGNMENT:
            matrix.data = matrix.data.clone()


def _no_row_alone(rows: TokenRows, most: int) -> tuple[TokenRows, int]:
    """The rows, a single one twice, and the largest batch size up to `most` that leaves none alone in the last batch: the last
    bits of a row that is alone depend on where in memory the weights are (`BIT_EXACT_TOLERANCE`)."""
    if len(rows) == 1:
        rows = rows.at([0, 0])
    return rows, next((size for size in range(most, 1, -1) if len(rows) % size != 1), most)
