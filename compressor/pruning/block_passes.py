"""Forward passes that stop inside a block: inputs and outputs of a sublayer, and the hidden states that it is added to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from compressor.errors import UserError
from compressor.models.anatomy import Layer, layers_of
from compressor.models.modules import STRUCTURES
from compressor.pruning.emptied import constant_of

FIT = 1e-4
"""Largest deviation of a token's sum that is taken for one of rounding, relative to the token's largest entry: another token's
may be thousands of times larger."""

MOST_KEPT = 2**30
"""Largest number of bytes of hidden states that are kept of one model; above it, every pass starts at the embeddings."""

Inputs = Mapping[str, Tensor]
Stream = Literal["start", "running", "input"]
"""Where the hidden states are that a sublayer's output is added to: the block's input, that plus the outputs of the block's
earlier sublayers, or the sublayer's own input."""


@dataclass(frozen=True)
class Seen:
    """One batch at one sublayer, (tokens, width) each and without padding: the input of its outgoing matrix, the output, and
    the stream (zeros where it is unknown)."""

    inputs: Tensor
    output: Tensor
    stream: Tensor


class _Stop(Exception):
    """Ends a forward pass where all is seen."""


def require_finite(what: str, *sums: Tensor) -> None:
    """Raise UserError E521 unless sums over training rows are finite; `what` was summed."""
    if not all(total.isfinite().all() for total in sums):
        raise UserError("E521", f"{what} on training rows are not finite", "Tune again with a lower learning rate")


def outgoing_of(layer: Layer, structure: str) -> nn.Module:
    """The layer that computes a sublayer's output, or the constant that replaced it when its last unit was removed."""
    name = STRUCTURES[structure].columns
    return layer.linear(name) if name in layer.parts else constant_of(layer, structure)


class BlockPasses:
    """Passes of one model over fixed batches, sublayer after sublayer in the order of the computation.

    The states in front of the current block are kept, so that earlier blocks are computed once. They are not where a block
    returns more than its states (T5's position bias), in models of two stacks, and above MOST_KEPT bytes.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Inputs]):
        self.model, self.layers = model.eval(), layers_of(model)
        device = next(model.parameters()).device
        self.batches = [{key: value.to(device) for key, value in inputs.items()} for inputs in batches]
        self._start, self._kept = 0, {}
        self._keeping = len({id(layer.blocks) for layer in self.layers}) == 1

    @contextmanager
    def at(self, place: int, structure: str, stream: Stream | None) -> Iterator[Callable[[int], Seen]]:
        """Context with a function of a batch's number: what the sublayer `structure` of block `place` sees on that batch.

        Sublayers must be visited in order, and weights of earlier blocks must not change once a later one was visited.
        """
        layer, found = self.layers[place], {}
        outgoing = outgoing_of(layer, structure)
        hooks = _watch(layer, structure, found)
        hooks.append(outgoing.register_forward_hook(_stop_at(found), prepend=True))
        if place > self._start and self._keeping:
            hooks.append(self.layers[place - 1].module.register_forward_hook(lambda *call: found.update(block=call[-1])))
        skipped = [layer.module for layer in self.layers[: self._start]]

        @torch.no_grad()
        def see(batch: int) -> Seen:
            found.clear()
            for module in skipped:
                module.forward = lambda *arguments, **keywords: self._kept[batch]
            with suppress(_Stop):
                self.model(**self.batches[batch])
            if "block" in found and self._keeping:
                self._keep(batch, found["block"])
            real = layer.token_mask(self.batches[batch]).bool().flatten()
            states = found[stream] if stream else torch.zeros_like(found["output"])
            # an FFN may get the tokens of all rows in one axis (OPT)
            return Seen(*(each.flatten(end_dim=-2)[real] for each in (found["inputs"], found["output"], states)))

        try:
            yield see
        finally:
            for hook in hooks:
                hook.remove()
            for module in skipped:
                del module.forward
        if self._keeping:
            self._start = place

    def _keep(self, batch: int, output: Any) -> None:
        """Keep what a block returned, or give up keeping."""
        self._kept[batch] = output
        if self._start:  # these replace those of an earlier block, which were as large
            return
        several = isinstance(output, tuple) and any(part is not None for part in output[1:])
        states = map(_states, self._kept.values())
        if several or sum(state.numel() * state.element_size() for state in states) > MOST_KEPT:
            self._keeping, self._kept = False, {}


def streams_of(dense: nn.Module, place: int, inputs: Inputs) -> dict[str, Stream | None]:
    """Where each sublayer of a block finds the stream that it adds to; None where no candidate fits.

    Tried out on one batch: the right one is that whose sum with the sublayer's output is nearest to the input of a later module
    of the block (its LayerNorm), or to the block's own output.
    """
    layer, result = layers_of(dense)[place], {}
    device = next(dense.parameters()).device
    for structure in layer.structures:
        found: dict[str, Any] = {"later": []}
        hooks = _watch(layer, structure, found)
        hooks.append(outgoing_of(layer, structure).register_forward_hook(_note(found)))
        hooks += [module.register_forward_pre_hook(_collect(found)) for module in layer.module.modules()]
        hooks.append(layer.module.register_forward_hook(lambda *call, found=found: found["later"].append(_states(call[-1]))))
        with torch.no_grad():
            dense.eval()(**{key: value.to(device) for key, value in inputs.items()})
        for hook in hooks:
            hook.remove()
        deviations = {kind: _deviation(found, kind) for kind in ("start", "running", "input")}
        nearest = min(deviations, key=deviations.__getitem__)
        result[structure] = nearest if deviations[nearest] <= FIT else None
    return result


def _watch(layer: Layer, structure: str, found: dict[str, Any]) -> list:
    """Hooks that put the block's input, the outputs of the block's earlier sublayers and this one's input into `found`."""

    def start(block: nn.Module, arguments: tuple, keywords: dict) -> None:
        found["start"] = arguments[0] if arguments else keywords["hidden_states"]
        found["running"] = found["start"]

    def add(module: nn.Module, arguments: tuple, output: Tensor) -> None:
        found["running"] = found["running"] + output

    first = STRUCTURES[structure].rows[0]
    entry = layer.linear(first) if first in layer.parts else outgoing_of(layer, structure)
    hooks = [layer.module.register_forward_pre_hook(start, with_kwargs=True)]
    hooks.append(entry.register_forward_pre_hook(lambda module, arguments: found.update(input=arguments[0])))
    for name in layer.structures[: layer.structures.index(structure)]:
        hooks.append(outgoing_of(layer, name).register_forward_hook(add))
    return hooks


def _stop_at(found: dict[str, Any]) -> Callable:
    def hook(module: nn.Module, arguments: tuple, output: Tensor) -> None:
        found.update(inputs=arguments[0], output=output)
        raise _Stop

    return hook


def _note(found: dict[str, Any]) -> Callable:
    def hook(module: nn.Module, arguments: tuple, output: Tensor) -> None:
        found["output"] = output

    return hook


def _collect(found: dict[str, Any]) -> Callable:
    def hook(module: nn.Module, arguments: tuple) -> None:
        if "output" in found and arguments and isinstance(arguments[0], Tensor):
            found["later"].append(arguments[0])

    return hook


def _states(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _deviation(found: dict[str, Any], kind: Stream) -> float:
    """The largest deviation of a token's sum with this stream from what a later module gets, relative to its largest entry."""
    stream, output = found[kind], found["output"]
    if stream.numel() != output.numel():
        return math.inf
    total = stream + output.view_as(stream)
    scale = total.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(total.dtype).tiny)
    same = (later.reshape_as(total) for later in found["later"] if later.numel() == total.numel())
    largest = (float(((later - total) / scale).abs().max()) for later in same)
    return min((one for one in largest if math.isfinite(one)), default=math.inf)
