"""Tied parameters, and those that a folder stores apart though transformers ties them."""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.models.files.weight_files import StoredTensor, weight_names

if TYPE_CHECKING:
    from torch import Tensor, nn


def untie(model: nn.Module, stored: Container[str]) -> None:
    """Untie every parameter of a model that is in `stored` beside its source.

    transformers ties the head of every T5 to its embeddings, whatever the config sets: Flan-T5's is another matrix.
    """
    from torch import nn

    for name, source in list(model.all_tied_weights_keys.items()):
        if name in stored and source in stored:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, nn.Parameter(model.get_parameter(name).clone()))
            del model.all_tied_weights_keys[name]


def stored_apart(model: nn.Module, folder: Path, stored: Mapping[str, StoredTensor]) -> frozenset[str]:
    """The tied parameters of `model` that the folder's files hold with other values than their sources, and these sources:
    transformers does not tie them when it loads the files."""
    import torch

    both = [pair for pair in model.all_tied_weights_keys.items() if pair[0] in stored and pair[1] in stored]
    apart = [pair for pair in both if not torch.equal(*_of_one_type(_read(folder, pair[0]), _read(folder, pair[1])))]
    return frozenset(name for pair in apart for name in pair)


def _read(folder: Path, name: str) -> Tensor:
    from safetensors import safe_open

    for file in weight_names(folder):
        with safe_open(folder / file, "pt") as tensors:
            names = tensors.keys()
            if name in names:
                return tensors.get_tensor(name)
    raise KeyError(name)


def _of_one_type(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return (one, other) if one.dtype == other.dtype else (one.float(), other.float())
