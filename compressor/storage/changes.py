"""Changes as JSON and tensors: deltas, inserted modules, prototypes once each, masks with one bit per entry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from compressor.compression import Kept
from compressor.deltas.inserts import insert, inserts_of
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.links import Change, Delta, Place, attach, chain, chains, original, tied_owners
from compressor.deltas.registry import KINDS, PROTOTYPES
from compressor.deltas.sources import Masked, PlainTensors, Prototype, Shared, masks_of

Tensors = dict[str, Tensor]


def pack(mask: Tensor) -> Tensor:
    """Pack a mask of any shape into ⌈entries / 8⌉ bytes, first entry in the highest bit."""
    return torch.from_numpy(np.packbits(mask.detach().cpu().bool().flatten().numpy()))


def unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Reverse of `pack`: a boolean tensor of `shape`. Raises ValueError for a wrong number of bytes."""
    count = int(np.prod(shape))
    if packed.numel() != (count + 7) // 8:
        raise ValueError(f"{packed.numel()} bytes for {count} mask entries")
    return torch.from_numpy(np.unpackbits(packed.numpy(), count=count)).bool().view(*shape)


def pack_kept(kept: Kept) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Pack the units that pruning kept as bits: for every block the units of each structure in turn; 1 is kept."""
    if not kept:
        return {}, {}
    structures = next(iter(kept.values()))
    sizes = {name: 1 + max((unit for row in kept.values() for unit in row[name]), default=-1) for name in structures}
    bits = torch.zeros(len(kept), sum(sizes.values()), dtype=torch.bool)
    for block, row in zip(bits, kept.values(), strict=True):
        for name, part in zip(sizes, block.split(list(sizes.values())), strict=True):
            part[row[name]] = True
    return {"blocks": list(kept), "sizes": sizes}, {"kept": pack(bits)}


def unpack_kept(description: Mapping, bits: Tensor | None) -> Kept:
    """Reverse of `pack_kept`."""
    if not description:
        return {}
    blocks, sizes = description["blocks"], description["sizes"]
    rows = unpack(bits, (len(blocks), sum(sizes.values())))
    return {
        block: {name: part.nonzero().flatten().tolist() for name, part in zip(sizes, row.split([*sizes.values()]), strict=True)}
        for block, row in zip(blocks, rows, strict=True)
    }


def describe_changes(model: nn.Module) -> tuple[dict, Tensors]:
    """Everything that was added to `model`: (description for JSON, tensors by name). `restore` is the reverse."""
    description: dict = {"links": {}, "inserts": {}, "prototypes": {}}
    tensors: Tensors = {}
    for key, section, changes in _changes(model):
        description[section][key] = []
        for index, change in enumerate(changes):
            settings, stored = record(change)
            description[section][key].append(settings)
            tensors |= {f"{section}|{key}|{index}|{name}": tensor for name, tensor in stored.items()}
    for prototype in prototypes_of(model):
        description["prototypes"][prototype.name] = prototype.settings()
        tensors |= {f"prototypes|{prototype.name}|{name}": _plain(tensor) for name, tensor in prototype.to_tensors().items()}
    for view in _hybrids_of(model):
        shapes, packed = _packed(masks_of(view.task, view.names))
        description.setdefault("tasks", {})[view.prototype.name] = {"combine": view.combine, "masks": shapes}
        tensors |= {f"tasks|{view.prototype.name}|{name}": bits for name, bits in packed.items()}
    return description, tensors


def _changes(model: nn.Module) -> Iterator[tuple[str, str, list[Change]]]:
    """(path, section of the description, changes at that path), in the order of the model."""
    seen: set[Change] = set()
    for path, owner, name in chains(model):
        links = chain(owner, name)
        # values on a change's own tensors are stored merged into them, a tied parameter's links once
        if isinstance(owner, PlainTensors) or seen.issuperset(links):
            continue
        seen |= set(links)
        yield f"{path}.{name}", "links", links
    for path, owner in model.named_modules():
        if inserts_of(owner):
            yield path, "inserts", inserts_of(owner)


def prototypes_of(model: nn.Module) -> list[Prototype]:
    """Every prototype of the model, each once."""
    return [module for module in model.modules() if isinstance(module, Prototype)]


def _hybrids_of(model: nn.Module) -> list[Masked]:
    """One masked view of every prototype that has task masks, too: all its views share those."""
    views = [module for module in model.modules() if isinstance(module, Masked) and module.task is not None]
    return list({view.prototype.name: view for view in views}.values())


def _packed(masks: Mapping[str, Tensor]) -> tuple[dict[str, list[int]], Tensors]:
    """(shapes, packed bits) of boolean masks."""
    return {name: list(mask.shape) for name, mask in masks.items()}, {name: pack(mask) for name, mask in masks.items()}


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()


def record(change: Change) -> tuple[dict, Tensors]:
    """One change as (settings, tensors). For a masked prototype only the masks: the prototype is stored once."""
    change = change.settled()
    settings, tensors = change.settings(), change.to_tensors()
    if change.prototype_name is not None:
        settings["prototype"] = change.prototype_name
    shapes, packed = _packed({name: tensor for name, tensor in tensors.items() if tensor.dtype == torch.bool})
    if shapes:
        settings["masks"] = shapes
    return settings, {name: packed[name] if name in packed else _plain(tensor) for name, tensor in tensors.items()}


def shared_of(description: Mapping, tensors: Tensors) -> dict[str, Shared]:
    """The prototypes recorded by `describe`, by name. Raises KeyError where a tensor is missing."""
    result = {}
    for name, settings in description["prototypes"].items():
        kind = PROTOTYPES[settings.get("kind", Prototype.kind)]
        options = {key: value for key, value in settings.items() if key != "kind"}
        result[name] = shared = Shared(kind.from_tensors(name, select(tensors, f"prototypes|{name}|"), **options))
        if task := description.get("tasks", {}).get(name):
            masks = shared.fixed(_unpacked(task["masks"], select(tensors, f"tasks|{name}|")))
            result[name] = Shared(shared.prototype, masks, task["combine"])
    return result


def _unpacked(shapes: Mapping[str, tuple[int, ...]], tensors: Tensors) -> Tensors:
    """`tensors`, with those named in `shapes` unpacked to boolean masks."""
    return {**tensors, **{name: unpack(tensors[name], shape) for name, shape in shapes.items()}}


def rebuild(settings: dict, tensors: Tensors, prototypes: Mapping[str, Shared]) -> Change:
    """Rebuild the change that `record` stored. Masks become fixed: their scores are not stored."""
    settings = dict(settings)
    kind, tensors = KINDS[settings.pop("kind")], _unpacked(settings.pop("masks", {}), tensors)
    rows, transposed = settings.pop("rows", None), settings.pop("transposed", False)
    shared = prototypes[settings.pop("prototype")] if "prototype" in settings else None
    change = kind.from_tensors(tensors, shared, **settings)
    if isinstance(change, Delta):
        change.place = Place(tuple(rows) if rows else None, transposed)
    return change


def match_type(model: nn.Module, tensors: Tensors) -> nn.Module:
    """Convert the parameters of `model`, in place, to the floating-point type of `tensors`, which were trained on a base of it;
    they stay where there is none, or several. Buffers, such as rotary frequencies, stay as in transformers' own loading."""
    types = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(types) == 1:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(*types)
    return model


def restore(model: nn.Module, description: dict, tensors: Tensors) -> None:
    """Attach and insert everything that `describe` recorded, in place. Raises KeyError where a tensor is missing, ValueError
    if one has another size or type."""
    prototypes, tied = shared_of(description, tensors), tied_owners(model)
    for key, changes in description["links"].items():
        for index, settings in enumerate(changes):
            _restore_link(model, key, rebuild(settings, select(tensors, f"links|{key}|{index}|"), prototypes), tied)
    for path, changes in description["inserts"].items():
        for index, settings in enumerate(changes):
            change = rebuild(settings, select(tensors, f"inserts|{path}|{index}|"), prototypes)
            insert(model.get_submodule(path), change)
            change.enter(model)


def restore_masks(model: nn.Module, description: dict, tensors: Tensors) -> None:
    """Attach only the masks over weights that `describe` recorded, in place. Raises as `restore`."""
    for key, changes in description["links"].items():
        for index, settings in enumerate(changes):
            if issubclass(KINDS[settings["kind"]], Mask):
                _restore_link(model, key, rebuild(settings, select(tensors, f"links|{key}|{index}|"), {}), {})


def _restore_link(model: nn.Module, key: str, link: Delta, tied: Mapping[int, list[tuple[nn.Module, str]]]) -> None:
    path, name = key.rsplit(".", 1)
    owner = model.get_submodule(path)
    stored = original(owner, name)
    if not link.fits(stored):
        raise ValueError(f"{key}: its change has another size or type")
    for user, tensor in tied.get(id(stored), [(owner, name)]):
        attach(user, link.to(stored.device), tensor, check=False)  # many links: computing every weight would be slow


def select(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
