"""A peft adapter that was read, on a live model: its parts become the links that they are here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import WHOLE, Place, attach, original, tied_owners
from compressor.deltas.sources import PlainTensors
from compressor.errors import UserError
from compressor.models.build import head_names
from compressor.models.files.weight_files import weight_names
from compressor.storage.live import check_head, set_head
from compressor.storage.peft.read import AdapterFolder, unsupported

GROUP = "peft"
"""The group of an adapter's links."""


def attach_adapter(model: nn.Module, adapter: AdapterFolder, *, base: Path | None = None) -> None:
    """Attach a peft adapter to a live model, in place, with its task head if it has one; in the model's floating type.

    An adapter may hold a part of the task head, the one that was trained: the rest is read from `base`, the folder of the
    model's base. Raises UserError E313 where the adapter does not fit the model, changes a weight that another layer has, too,
    or holds whole weights outside the task head; and where the base's files lack the rest of that.
    """
    links, tied = [], tied_owners(model)
    for target in adapter.targets:
        owner = _layer(model, target, adapter.folder)
        if id(original(owner)) in tied:  # peft changes this layer alone, and here both have one weight and one delta
            what = f"the base has the weight of {target} in another layer, too"
            raise UserError("E313", what, "Train the adapter without this layer", str(adapter.folder))
        made = _super_links(adapter, target, owner) if adapter.is_sparse else [_lora_link(adapter, target, owner)]
        links += [(owner, link) for link in made]
    if head := _whole_head(model, adapter, base):
        set_head(model, head, list(model.config.id2label.values()))
    for owner, link in links:
        attach(owner, link)


def _whole_head(model: nn.Module, adapter: AdapterFolder, base: Path | None) -> dict[str, Tensor]:
    """The adapter's task head by the model's names, with what it leaves to the base; {} where it has none. Raises UserError
    E313."""
    head = {_path(model, name): tensor for name, tensor in adapter.head.items()}
    names, place = head_names(model), str(adapter.folder)
    if not head:
        return {}
    if odd := sorted(head.keys() - names):
        what = f"it holds whole weights that are no part of the task head: {', '.join(odd[:3])}"
        raise UserError("E313", what, "Merge it with peft, or give the base it was trained on", place)
    head |= _left_to_the_base(model, names - head.keys(), base)
    if lacking := sorted({name.rpartition(".")[0] for name in names - head.keys()}):
        what = f"parts of the task head are neither in it nor in the base's files: {', '.join(lacking)}"
        fix = "Give the base it was trained on, or train it with them in modules_to_save"
        raise UserError("E313", what, fix, place)
    try:
        check_head(model, head, list(model.config.id2label.values()))
    except UserError as error:
        raise UserError("E313", error.what, "Give the base it was trained on", place) from None
    return head


def _left_to_the_base(model: nn.Module, names: frozenset[str], base: Path | None) -> dict[str, Tensor]:
    """Those of the parameters `names` that the files of `base` hold in the model's shapes. The model may have others: `build`
    draws a head anew where the base's is for other labels."""
    found: dict[str, Tensor] = {}
    for file in weight_names(base) if names and base is not None else ():
        with safe_open(base / file, "pt") as stream:
            found |= {name: stream.get_tensor(name) for name in names.intersection(stream.keys())}
    return {name: tensor for name, tensor in found.items() if tensor.shape == model.get_parameter(name).shape}


def _lora_link(adapter: AdapterFolder, target: str, owner: nn.Module) -> LowRank:
    place, rank = WHOLE if isinstance(owner, nn.Linear) else Place(transposed=True), adapter.rank(target)
    link = _low_rank(adapter, target, owner, place.read(owner.weight).shape, "lora", rank, adapter.scale(target, rank))
    link.place = place
    return link


def _super_links(adapter: AdapterFolder, target: str, owner: nn.Module) -> list[LowRank | Sparse]:
    """The sparse link of one layer, and the low-rank link where the adapter has one."""
    shape, rank = owner.weight.shape, adapter.config.get("r")
    if not isinstance(owner, nn.Linear):
        raise _unfit(adapter, target)
    omega, values = _support_of(adapter, target, owner.weight.numel())
    links = [Sparse(omega, values.to(owner.weight), GROUP)] if len(omega) else []
    if rank:
        scale = adapter.config.get("lora_alpha", 2 * rank) / rank
        links.append(_low_rank(adapter, target, owner, shape, "supertuning_lora", rank, scale))
    return links


def _support_of(adapter: AdapterFolder, target: str, size: int) -> tuple[Tensor, Tensor]:
    """Sorted flat indices and their values. Values of a duplicate index are summed, which is what peft computes; index 0 is
    left out where its value is 0, because supports are padded with it."""
    indices, values = (adapter.tensors.get(f"{target}.supertuning_{part}") for part in ("indices", "values"))
    if indices is None:
        raise unsupported(adapter.folder, "save_precomputed_indices: false")
    if indices.dim() != 1 or indices.shape != values.shape or indices.is_floating_point():
        raise _unfit(adapter, target)
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise _unfit(adapter, target)
    omega, where = indices.long().unique(return_inverse=True)
    sums = values.new_zeros(len(omega)).index_add(0, where, values)
    kept = (omega != 0) | (sums != 0)
    return omega[kept].to(torch.int32), sums[kept]


def _low_rank(
    adapter: AdapterFolder,
    target: str,
    owner: nn.Module,
    shape: Sequence[int],
    words: str,
    rank: int,
    scale: float,
) -> LowRank:
    A, B = (adapter.tensors.get(f"{target}.{words}_{letter}.weight") for letter in "AB")
    if A is None or B is None or (A.shape, B.shape) != ((rank, shape[1]), (shape[0], rank)):
        raise _unfit(adapter, target)
    return LowRank(PlainTensors({"A": A.to(owner.weight), "B": B.to(owner.weight)}), scale, GROUP)


def _unfit(adapter: AdapterFolder, target: str) -> UserError:
    return UserError("E313", f"the sizes of {target} do not fit", "Give the base it was trained on", str(adapter.folder))


def _path(model: nn.Module, path: str) -> str:
    """The path in a model with a task head, for an adapter that may have been trained without one."""
    prefix = f"{model.base_model_prefix}."
    paths = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    return prefix + path if path not in paths and prefix + path in paths else path


def _layer(model: nn.Module, target: str, folder: Path) -> nn.Module:
    path = _path(model, target)
    owner = dict(model.named_modules()).get(path)
    if not isinstance(owner, nn.Linear | Conv1D) or f"{path}.weight" in head_names(model):
        raise UserError("E313", f"the base has no linear layer {target}", "Give the base it was trained on", str(folder))
    return owner
