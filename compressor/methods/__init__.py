"""Tuning methods: each composes deltas and a selection, and says by a closed form what it trains.

A new method is one file here with a `METHOD` and one word in `NAMES`; the shared test harness then covers it. Importing this
package and its rows loads no torch: pipeline files are checked, and methods listed, without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressor.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compressor.anatomy import Layer

NAMES = ("dsee", "lora", "selective", "full")


@dataclass(frozen=True)
class Options:
    """What a method may read. `omega` maps a matrix's path to its Ω (sorted flat int32); empty: no sparse part."""

    modules: tuple[str, ...]
    rank: int = 16
    alpha: float = 32.0
    group: str = "tune"
    omega: Mapping[str, Tensor] | None = None


@dataclass(frozen=True)
class Method:
    """A row of the table. `attach(layer, module name, options)` adds the links of one matrix.

    `count(out, in, options, places)` is the closed form of its trainable parameters for one matrix; `trains_base` means
    the pretrained weights themselves move.
    """

    name: str
    summary: str
    formula: str
    attach: Callable[[Layer, str, Options], None]
    count: Callable[[int, int, Options, int], int]
    learning_rate: float
    """Default peak rate."""
    source: str
    """Paper and section."""
    uses_rank: bool = False
    uses_omega: bool = False
    trains_base: bool = False
    mergeable: bool = True


def method(name: str) -> Method:
    """The method called `name`. Raises UserError E402."""
    if name not in NAMES:
        raise UserError("E402", f"unknown method '{name}'", f"Methods: {', '.join(NAMES)}")
    return importlib.import_module(f"compressor.methods.{name}").METHOD


def apply(model: nn.Module, name: str, options: Options) -> None:
    """Freeze the base, attach the method's links to every block and leave exactly its parameters trainable.

    Poolers of the base stay frozen; the task head is set trainable by `set_trainable`.
    """
    from compressor.anatomy import layers_of

    chosen = method(name)
    for layer in layers_of(model):
        for module in options.modules:
            chosen.attach(layer, module, options)
    set_trainable(model, base=chosen.trains_base, groups=(options.group,))


def set_trainable(model: nn.Module, *, base: bool, groups: Collection[str]) -> None:
    """requires_grad for the task head, the links of `groups` and, with `base`, the whole base; for nothing else."""
    from compressor.deltas import Delta
    from compressor.models import head_names

    head = head_names(model)
    model.weights_moved = base or weights_moved(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(base or name in head)
    for module in model.modules():
        if isinstance(module, Delta):
            module.requires_grad_(module.group in groups)


def weights_moved(model: nn.Module) -> bool:
    """Whether the pretrained weights themselves were (or are about to be) trained, so that a state must hold them."""
    return getattr(model, "weights_moved", False)


def trainable_counts(model: nn.Module) -> dict[str, int]:
    """Trainable scalars of a live model: {"head": task head, "body": everything else}."""
    from compressor.models import head_names

    head = head_names(model)
    counts = {"head": 0, "body": 0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            counts["head" if name in head else "body"] += parameter.numel()
    return counts
