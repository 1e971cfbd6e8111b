"""The deltas of a model as an adapter folder that stock peft loads: LoRA, or Super-Tuning where some are sparse."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.compression import compression_of
from compressor.deltas.inserts import has_inserts
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import chain, chains, original
from compressor.errors import UserError
from compressor.models.build import GENERATIVE, auto_class_of, head_names
from compressor.pruning.surgery import kept_of
from compressor.storage.peft.read import CONFIG, PREFIX, TASK_TYPES, WEIGHTS
from compressor.tensor_file import write_tensors


@dataclass
class _Changed:
    """One layer and the links attached to its weight."""

    path: str
    owner: nn.Module
    low_rank: list[LowRank] = field(default_factory=list)
    sparse: list[Sparse] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the whole stored weight."""
        shape = tuple(original(self.owner).shape)
        return shape if isinstance(self.owner, nn.Linear) else shape[::-1]

    @property
    def rank(self) -> int:
        return sum(len(link.A) for link in self.low_rank)

    def factors(self, scale: float, rank: int) -> tuple[Tensor, Tensor]:
        """A (rank, in) and B (out, rank) of all low-rank links together, for one `scale`; missing ranks are filled with 0."""
        like, (out_features, in_features) = next(self.owner.parameters()), self.shape
        A, B, row = like.new_zeros(rank, in_features), like.new_zeros(out_features, rank), 0
        with torch.no_grad():
            for link in self.low_rank:
                ranks = slice(row, row + len(link.A))
                rows = slice(*link.place.rows) if link.place.rows else slice(None)
                A[ranks], B[rows, ranks] = link.A, link.B if link.scale == scale else link.B * (link.scale / scale)
                row = ranks.stop
        return A, B

    def support(self, size: int) -> tuple[Tensor, Tensor]:
        """Flat indices int32 and values of all sparse links together, padded to `size` with zeros at index 0."""
        like = next(self.owner.parameters())
        indices, values = torch.zeros(size, dtype=torch.int32, device=like.device), like.new_zeros(size)
        if self.sparse:
            # indices in a part of a fused weight are relative to the part's first row
            starts = [(link.place.rows or (0,))[0] * self.shape[1] for link in self.sparse]
            omega = torch.cat([link.omega + start for link, start in zip(self.sparse, starts, strict=True)])
            stored = torch.cat([link.values for link in self.sparse])
            indices[: len(omega)], values[: len(stored)] = omega, stored.detach()
        return indices, values


def write_peft(model: nn.Module, folder: Path | str, *, base: str, head: bool = True) -> str:
    """Write the deltas and the task head of `model` so that stock peft loads them; returns peft's name of the format.

    LoRA where all changes are of low rank (parts of a fused weight become one LoRA of their ranks together), Super-Tuning
    where some are sparse. `base` is a hub id or a folder: what transformers can load. Raises UserError E314 for changes that
    peft has no format for.
    """

    changed, folder = changed_layers(model), Path(folder)
    sparse = any(layer.sparse for layer in changed)
    config, tensors = (_supertuning if sparse else _lora)(changed)
    heads, auto_class = head_names(model) if head else (), auto_class_of(model)
    # with a task type, peft expects the task's head in the folder; a model that generates has none
    named = head or auto_class in GENERATIVE
    mapping = {"base_model_class": type(model).__name__, "parent_library": type(model).__module__}
    tensors |= {name: model.get_parameter(name).detach() for name in heads}
    config |= {
        "peft_type": "SUPERTUNING" if sparse else "LORA",
        "task_type": TASK_TYPES[auto_class] if named else None,
        "auto_mapping": None if named else mapping,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": [layer.path for layer in changed],
        "modules_to_save": _modules_of(model, heads) or None,
        "lora_dropout": 0.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors({PREFIX + name: t.cpu().contiguous() for name, t in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return config["peft_type"]


def changed_layers(model: nn.Module) -> list[_Changed]:
    """The layers that were changed, with their links. Raises UserError E314 for changes that peft has no format for."""
    if kept_of(model) or compression_of(model).weights_moved:
        raise _unheld("a pruned base" if kept_of(model) else "a base that full tuning or a merge changed")
    if has_inserts(model):
        raise _unheld("adapters and prefixes")
    result = []
    for path, owner, name in chains(model):
        layer = _Changed(path, owner)
        for link in chain(owner, name):
            held = link.to_peft() if name == "weight" else None
            if held is None:
                raise _unheld(f"the change of {path}.{name}")
            (layer.low_rank if isinstance(held, LowRank) else layer.sparse).append(held)
        result.append(layer)
    if not result:
        raise UserError("E314", "nothing was added to this model (or it was merged)", "Tune it first")
    return result


def _unheld(feature: str) -> UserError:
    return UserError("E314", f"peft has no format for {feature}", "Store a delta file, or merge to a checkpoint")


def _modules_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The outermost modules that hold the task head: `classifier`, or `bert.pooler` where the base came without one."""
    depth = {name: 2 if name.startswith(f"{model.base_model_prefix}.") else 1 for name in names}
    return sorted({".".join(name.split(".")[: depth[name]]) for name in names})


def _common_scale(changed: list[_Changed]) -> float:
    """The scale of all low-rank links, or 1 where they differ."""
    scales = {link.scale for layer in changed for link in layer.low_rank}
    return scales.pop() if len(scales) == 1 else 1.0


def _lora(changed: list[_Changed]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    scale, ranks = _common_scale(changed), {layer.path: layer.rank for layer in changed}
    most = max(ranks.values())
    odd = {re.escape(path): rank for path, rank in ranks.items() if rank != most}
    config = {
        "r": most,
        "lora_alpha": scale * most,
        "rank_pattern": odd,
        "alpha_pattern": {path: scale * rank for path, rank in odd.items()},
        "fan_in_fan_out": not all(isinstance(layer.owner, nn.Linear) for layer in changed),
        "bias": "none",
    }
    tensors = {}
    for layer in changed:
        tensors[f"{layer.path}.lora_A.weight"], tensors[f"{layer.path}.lora_B.weight"] = layer.factors(scale, layer.rank)
    return config, tensors


def _supertuning(changed: list[_Changed]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not all(isinstance(layer.owner, nn.Linear) for layer in changed):
        raise _unheld("sparse changes of layers that are not nn.Linear (GPT-2's Conv1D)")
    counts = [(sum(len(link.omega) for link in layer.sparse), math.prod(layer.shape)) for layer in changed]
    sparsity = common_sparsity(counts)
    scale, rank = _common_scale(changed), max(layer.rank for layer in changed)
    config: dict[str, Any] = {"sparsity": sparsity, "save_precomputed_indices": True}
    config |= {"r": rank, "lora_alpha": scale * rank} if rank else {}
    tensors = {}
    for layer, (_, size) in zip(changed, counts, strict=True):
        indices, values = layer.support(support_size(size, sparsity))
        tensors |= {f"{layer.path}.supertuning_indices": indices, f"{layer.path}.supertuning_values": values}
        if rank:
            A, B = layer.factors(scale, rank)
            tensors |= {f"{layer.path}.supertuning_lora_A.weight": A, f"{layer.path}.supertuning_lora_B.weight": B}
    return config, tensors


def support_size(size: int, sparsity: float) -> int:
    """Number of values that Super-Tuning stores for a matrix of `size` entries, rounded as peft rounds."""
    return int(size * (1 - sparsity))


def common_sparsity(counts: Iterable[tuple[int, int]]) -> float:
    """The largest ratio at which every matrix of (entries, size) has room for its entries and for at least one, as in peft."""
    counts = list(counts)
    sparsity = 1 - max(max(places, 1) / size for places, size in counts)
    if sparsity < 0:
        raise _unheld("more positions than the matrix has")
    while any(support_size(size, sparsity) < max(places, 1) for places, size in counts):
        sparsity = math.nextafter(sparsity, 0)
    return sparsity
