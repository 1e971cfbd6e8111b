"""Whether a model's head reads the first token of a row alone, as most heads that classify do."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from compressor.models.anatomy import layers_of, row_of_model

ROWS, TOKENS = 2, 4
"""Rows and tokens of the pass that finds out."""


def reads_first_token(model: nn.Module) -> bool:
    """Whether the logits depend on the last block's output at the first token alone, by their gradient there.

    A file then computes the rest of that block for this token only (`export.graph.rewrites.read_tokens`); PyTorch computes it
    for every token. Models whose head reads another token, or that have a decoder, are told without a pass.
    """
    row = row_of_model(model)
    if not row.bidirectional or row.has_decoder:
        return False
    seen: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: tuple, output: Tensor | tuple) -> Tensor | tuple:
        states = output[0] if isinstance(output, tuple) else output
        seen.append(states.detach().requires_grad_())
        return (seen[-1], *output[1:]) if isinstance(output, tuple) else seen[-1]

    handle = layers_of(model)[-1].module.register_forward_hook(keep)
    try:
        # words and no padding, of which a model may know nothing
        ids = torch.arange(2, 2 + TOKENS, device=model.device).expand(ROWS, -1)
        with torch.enable_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
            gradient = torch.autograd.grad(logits.sum(), seen[-1])[0]
    finally:
        handle.remove()
    read = gradient.flatten(2).ne(0).any(dim=-1).any(dim=0)
    return bool(read[0]) and not bool(read[1:].any())
