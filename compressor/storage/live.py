"""A live model under changing deltas: which base it stands on, everything off again, another task head on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compressor.compression import Origin, compression_of
from compressor.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn


def remember(model: nn.Module, reference: str, sha256: str) -> nn.Module:
    """Note on `model`, whose base weights are untouched, which base it was built from. Returns the model."""
    compression_of(model).origin = Origin(reference, sha256, _base_parameters(model))
    return model


def _base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter of the pretrained base under its plain name, whatever is attached to it."""
    from compressor.deltas.links import plain_name
    from compressor.models.hub import head_names

    plain = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    return {name: parameter for name, parameter in plain.items() if name and name not in head_names(model)}


def origin_of(model: nn.Module) -> Origin:
    """The base under a live model. Raises UserError E311 where it is unknown, or its weights are no longer there."""

    origin, mend = compression_of(model).origin, "Give the base's folder, or a model of compressor.load"
    if origin is None:
        raise UserError("E311", "the live model does not say which base it was built from", mend)
    now = _base_parameters(model)
    same = origin.parameters.keys() == now.keys() and all(origin.parameters[name]() is now[name] for name in now)
    if compression_of(model).weights_moved or not same:
        raise UserError("E311", "the live model was merged, copied or fully tuned: its base is gone", mend)
    return origin


def strip(model: nn.Module) -> None:
    """Take every delta and every inserted module off, in place. The base is left bit for bit; the task head stays."""
    from compressor.deltas.inserts import inserts_of, take_out
    from compressor.deltas.links import chains, detach

    for _, owner, name in list(chains(model)):
        detach(owner, name)
    for owner in [module for module in model.modules() if inserts_of(module)]:
        take_out(model, owner)


def check_head(model: nn.Module, head: dict[str, Tensor] | None, label_names: Sequence[str]) -> None:
    """Raises UserError E311 where `head` cannot become the model's: other names, or sizes beside the number of classes; and
    where there is none, and the model's is of other labels.
    """
    from compressor.models.hub import head_names

    mend = "Load it on its own base's folder"
    if head is None:
        there = [model.config.id2label[number] for number in range(model.config.num_labels)]
        if list(label_names) != there:
            what = f"the delta has no task head and labels {_told(label_names)}, the model's head is for {_told(there)}"
            raise UserError("E311", what, "Write the delta with its head")
        return
    if head.keys() != head_names(model):
        odd = sorted(head.keys() ^ head_names(model))[:3]
        raise UserError("E311", f"another task head: {', '.join(odd)}", mend)
    for name, tensor in head.items():
        there = model.get_parameter(name).shape
        expected = (len(label_names), *there[1:]) if there[0] == model.config.num_labels else tuple(there)
        if tuple(tensor.shape) != expected:
            raise UserError("E311", f"{name} is {tuple(tensor.shape)}, the model wants {tuple(expected)}", mend)


def _told(names: Sequence[str]) -> str:
    """The first few of many."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def set_head(model: nn.Module, head: dict[str, Tensor], label_names: Sequence[str]) -> None:
    """Give `model` another task head, of another number of classes too. `check_head` was asked before."""
    from torch import nn

    from compressor.models.hub import name_outputs

    for name, tensor in head.items():
        path, _, leaf = name.rpartition(".")
        owner, there = model.get_submodule(path), model.get_parameter(name)
        setattr(owner, leaf, nn.Parameter(tensor.to(there), requires_grad=there.requires_grad))
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape
    name_outputs(model.config, label_names)
    if hasattr(model, "num_labels"):
        model.num_labels = len(label_names)
