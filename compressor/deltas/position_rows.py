"""DeBERTa's projections of relative positions when each row of a batch has its own weights."""

from __future__ import annotations

from torch import Tensor, nn


def has_position_rows(module: nn.Module) -> bool:
    """Whether a module is an attention that projects positions once for all rows and repeats the result for each row."""
    return hasattr(module, "disentangled_attention_bias")


def use_position_rows(attention: nn.Module) -> None:
    """Let an attention use projections of positions with or without a row for each row of the batch, in place."""
    bias_of, split, heads = attention.disentangled_attention_bias, attention.transpose_for_scores, attention.num_attention_heads

    def bias_of_rows(query: Tensor, *arguments) -> Tensor:
        # it repeats the projections `query rows / heads` times: as many heads as rows, and nothing is repeated
        rows = query.size(0) // heads
        attention.transpose_for_scores = lambda x, _: split(x.expand(rows, -1, -1), heads)
        attention.num_attention_heads = query.size(0)
        try:
            return bias_of(query, *arguments)
        finally:
            attention.num_attention_heads = heads
            del attention.transpose_for_scores

    attention.disentangled_attention_bias = bias_of_rows
