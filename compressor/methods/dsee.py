"""DSEE (Chen et al. 2023, section 3.2): W + (alpha / rank) · B A + P_Ω(S), Ω chosen beforehand by the stage `select`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.methods import Method, Options, lora, selective
from compressor.selection.score_names import SCOPES, SCORES

if TYPE_CHECKING:
    from torch import nn


def attach_both(model: nn.Module, options: Options) -> None:
    """Add a LowRank link to every chosen matrix, and a Sparse one where Ω has entries."""
    lora.attach_low_rank(model, options)
    selective.attach_sparse(model, options)


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: Σ r (m + n) + |Ω| (DSEE table 1)."""
    return lora.count(shape, options, places) + places


METHOD = Method(
    name="dsee",
    summary="low-rank update plus sparse values on the positions that RPCA chose",
    formula="r(m+n) per matrix + |Ω|",
    attach=attach_both,
    count=count,
    learning_rate=1e-3,
    source="Chen et al. 2023 (DSEE), section 3.2",
    reads=("modules", "rank", "alpha"),
    low_rank=True,
    uses_omega=True,
    scores=tuple(SCORES),
    strategies=("static",),
    scopes=SCOPES,
)
