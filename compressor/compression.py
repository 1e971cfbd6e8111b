"""State of a live model besides its weights, in one object: units left by pruning, task head, base, tasks.

Torch-free. A deep copy of the model gets its own copy; it is not a module and not part of the state dict.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

Kept = dict[str, dict[str, list[int]]]
"""Block of the dense model (a JSON key) -> original indices left of each structure; {} when nothing was removed. A block that
is missing was removed as a whole."""


class Origin:
    """The base a model was built from, and its parameters at that time: a merged model no longer has that base."""

    def __init__(self, reference: str, sha256: str, parameters: dict[str, nn.Parameter]):
        self.reference, self.sha256 = reference, sha256
        self.parameters = {name: weakref.ref(parameter) for name, parameter in parameters.items()}

    def __reduce__(self):
        # a copy of the model has other parameters, and weak references cannot be pickled
        return Origin, (self.reference, self.sha256, {})


class Tasks:
    """The tasks of a model: their names, which one is active, and the modules of their heads by path.

    Each module's `each` lists its version for every task, in the order of the names.
    """

    def __init__(self, names: Sequence[str]):
        self.names, self.active = tuple(names), 0
        self.heads: dict[str, nn.Module] = {}

    def choose(self, name: str) -> None:
        """Make the task called `name` the active one."""
        self.active = self.names.index(name)

    def head(self, name: str) -> dict[str, Tensor]:
        """The head of one task, under the parameter names of a model with that task alone."""
        number = self.names.index(name)
        named = {path: module.each[number].named_parameters() for path, module in self.heads.items()}
        return dict(sorted((f"{path}.{leaf}", tensor.detach()) for path, leaves in named.items() for leaf, tensor in leaves))


@dataclass
class Compression:
    """The state of one model. Code that changes the model must update it."""

    kept: Kept = field(default_factory=dict)
    """Indices that pruning kept."""
    weights_moved: bool = False
    """The pretrained weights themselves were (or are about to be) trained, or deltas were merged into them: a state must hold
    them."""
    head_parameters: frozenset[str] | None = None
    """Names of the task head's parameters; None for a model that was not built here."""
    head_origin: str | None = None
    """Where the task head comes from, a key of `compressor.models.build.HEAD_ORIGINS`."""
    own_labels: list[str] | None = None
    """The labels that the base's own task head is for; None without one of this kind."""
    head_set: bool = False
    """A task head was loaded, or set, in the place of the one that the model was built with."""
    origin: Origin | None = None
    """The base it was built from, if known."""
    tasks: Tasks | None = None
    """The tasks of a model that has a head for each of many."""
    plain_attention: str | None = None
    """transformers' name of the attention implementation before prefixes were added."""


def compression_of(model: nn.Module) -> Compression:
    """The `Compression` of a live model, created at first use."""
    if not hasattr(model, "compression"):
        model.compression = Compression()
    return model.compression
