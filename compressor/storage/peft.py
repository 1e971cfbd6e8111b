"""Adapter folders of the library peft, without the library: LoRA and Super-Tuning are read and written.

Super-Tuning (arXiv 2607.09287) is peft's name for values on a sparse support plus an optional LoRA, so that it holds what
selective tuning and DSEE train. Its support has a size that follows from one ratio: shorter ones are filled up with zeros.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.compression import compression_of
from compressor.errors import UserError
from compressor.models.hub import GENERATES, SEQUENCES, TOKENS

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compressor.deltas.kinds.low_rank import LowRank
    from compressor.deltas.kinds.sparse import Sparse

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."

TASK_TYPES = {SEQUENCES: "SEQ_CLS", TOKENS: "TOKEN_CLS", GENERATES: "CAUSAL_LM"}
"""peft's words for what a task head answers."""

UNDERSTOOD = frozenset(
    [
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "init_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "lora_dropout",
        "megatron_core",
        "modules_to_save",
        "peft_type",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "save_precomputed_indices",
        "select_top",
        "sparsity",
        "target_modules",
        "task_type",
        "use_rslora",
    ]
)
"""Keys of a config that are followed here, or that say nothing about what a trained adapter computes."""

DEFAULTS = {"bias": ("none",), "init_lora_weights": (True, "gaussian")}
"""Values that, beside false, empty and null, mean the plain method. Other starts than these change the base's weights."""


TENSORS = {
    "LORA": re.compile(r".*\.lora_[AB]\.weight"),
    "SUPERTUNING": re.compile(r".*\.supertuning_(indices|values|lora_[AB]\.weight)"),
}
"""Formats that are read, and the names of their tensors."""


@dataclass(frozen=True)
class AdapterFolder:
    """A folder that stock peft wrote: its config, and its tensors without peft's prefix."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def targets(self) -> list[str]:
        """Paths of the adapted layers."""
        ending = ".supertuning_values" if self.is_sparse else ".lora_A.weight"
        return [name.removesuffix(ending) for name in self.tensors if name.endswith(ending)]

    @property
    def is_sparse(self) -> bool:
        """Whether it is Super-Tuning, and no LoRA alone."""
        return self.config["peft_type"] == "SUPERTUNING"

    @property
    def head(self) -> dict[str, Tensor]:
        """What `modules_to_save` kept: whole tensors of the model."""
        return {name: tensor for name, tensor in self.tensors.items() if not TENSORS[self.config["peft_type"]].fullmatch(name)}

    @property
    def classes(self) -> int | None:
        """Rows of the task head's last matrix; None where the folder has no head."""
        sizes = [len(tensor) for name, tensor in self.head.items() if re.search(r"(classifier|score|out_proj)\.weight$", name)]
        return sizes[0] if sizes else None

    @property
    def auto_class(self) -> str:
        """Whose task head the model has that it was trained in; SEQUENCES where it does not say."""
        told = {name: auto_class for auto_class, name in TASK_TYPES.items()}
        return told.get(self.config.get("task_type"), SEQUENCES)

    def scale(self, target: str, rank: int) -> float:
        """alpha / r, or alpha / √r (rsLoRA)."""
        alpha = _by_pattern(self.config.get("alpha_pattern"), target, self.config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def rank(self, target: str) -> int:
        return _by_pattern(self.config.get("rank_pattern"), target, self.config["r"])


def _by_pattern(pattern: Mapping[str, Any] | None, target: str, default: Any) -> Any:
    """peft's rule: the first key that, as a regular expression, is the end of the path."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", target):
            return value
    return default


def read_adapter(folder: Path | str) -> AdapterFolder:
    """A LoRA or Super-Tuning folder of stock peft.

    Raises UserError E313 for any other kind, and for options that change what it computes.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    folder = Path(folder)
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    except OSError:
        mend = f"Give a folder with {CONFIG} and {WEIGHTS}; pickled weights are not read"
        raise UserError("E313", "no peft adapter here", mend, str(folder)) from None
    except (ValueError, SafetensorError):
        raise UserError("E313", "the adapter cannot be read", "The folder is damaged", str(folder)) from None
    if config.get("peft_type") not in TENSORS:
        raise _strange(folder, f"peft_type {config.get('peft_type')}")
    for key, value in config.items():
        if key not in UNDERSTOOD and value and value not in DEFAULTS.get(key, ()):
            raise _strange(folder, f"{key}: {json.dumps(value)}")
    known = TENSORS[config["peft_type"]]
    odd = [name for name in tensors if re.search(r"\.(lora|supertuning)_", name) and not known.fullmatch(name)]
    if odd or not all(name.startswith(PREFIX) for name in tensors):
        raise _strange(folder, f"tensor {next(iter(odd), next(iter(tensors), 'none'))}")
    return AdapterFolder(folder, config, {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})


def _strange(folder: Path, what: str) -> UserError:
    mend = "Plain LoRA is, with rsLoRA and patterns, and Super-Tuning with its indices; merge it with peft"
    return UserError("E313", f"'{what}' is not understood", mend, str(folder))


def attach_adapter(model: nn.Module, adapter: AdapterFolder, group: str = "peft") -> None:
    """Attach a peft adapter to a live model, in place, its task head too if it has one; in the model's own floating type.

    Raises UserError E313 where the adapter does not fit the model.
    """
    from compressor.deltas.links import attach
    from compressor.storage.live import check_head, set_head

    links = []
    for target in adapter.targets:
        owner = _layer(model, target, adapter.folder)
        made = _super_links(adapter, target, owner, group) if adapter.is_sparse else [_lora_link(adapter, target, owner, group)]
        links += [(owner, link) for link in made]
    labels = list(model.config.id2label.values())
    head = {_path(model, name): tensor for name, tensor in adapter.head.items()}
    if head:
        check_head(model, head, labels)
        set_head(model, head, labels)
    for owner, link in links:
        attach(owner, link)


def _lora_link(adapter: AdapterFolder, target: str, owner: nn.Module, group: str) -> LowRank:
    from torch import nn

    from compressor.deltas.links import WHOLE, Place

    place, rank = WHOLE if isinstance(owner, nn.Linear) else Place(transposed=True), adapter.rank(target)
    link = _low_rank(adapter, target, owner, place.read(owner.weight).shape, "lora", rank, adapter.scale(target, rank), group)
    link.place = place
    return link


def _super_links(adapter: AdapterFolder, target: str, owner: nn.Module, group: str) -> list[LowRank | Sparse]:
    """The sparse part of one layer, and the low-rank part where the adapter has one."""
    from torch import nn

    from compressor.deltas.kinds.sparse import Sparse

    shape, rank = owner.weight.shape, adapter.config.get("r")
    if not isinstance(owner, nn.Linear):
        raise _unfit(adapter, target)
    omega, values = _support_of(adapter, target, owner.weight.numel())
    links = [Sparse(omega, values.to(owner.weight), group)] if len(omega) else []
    if rank:
        scale = adapter.config.get("lora_alpha", 2 * rank) / rank
        links.append(_low_rank(adapter, target, owner, shape, "supertuning_lora", rank, scale, group))
    return links


def _support_of(adapter: AdapterFolder, target: str, size: int) -> tuple[Tensor, Tensor]:
    """Sorted flat indices and their values. A place that stands there twice has the sum, which is what peft computes; place 0
    is left out where its value is 0, for that is what fills a support up."""
    import torch

    indices, values = (adapter.tensors.get(f"{target}.supertuning_{part}") for part in ("indices", "values"))
    if indices is None:
        raise _strange(adapter.folder, "save_precomputed_indices: false")
    inside = len(indices) == 0 or 0 <= int(indices.min()) <= int(indices.max()) < size
    if indices.shape != values.shape or indices.dim() != 1 or not inside:
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
    group: str,
) -> LowRank:
    from compressor.deltas.kinds.low_rank import LowRank
    from compressor.deltas.sources import Own

    A, B = (adapter.tensors.get(f"{target}.{words}_{letter}.weight") for letter in "AB")
    if A is None or B is None or (A.shape, B.shape) != ((rank, shape[1]), (shape[0], rank)):
        raise _unfit(adapter, target)
    return LowRank(Own({"A": A.to(owner.weight), "B": B.to(owner.weight)}), scale, group)


def _unfit(adapter: AdapterFolder, target: str) -> UserError:
    return UserError("E313", f"the sizes of {target} do not fit", "Give the base it was trained on", str(adapter.folder))


def _path(model: nn.Module, path: str) -> str:
    """The path in a model with a task head, for an adapter that may have been trained without one."""
    prefix = f"{model.base_model_prefix}."
    there = {name for name, _ in model.named_modules()} | {name for name, _ in model.named_parameters()}
    return prefix + path if path not in there and prefix + path in there else path


def _layer(model: nn.Module, target: str, folder: Path) -> nn.Module:
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from compressor.models.hub import head_names

    path = _path(model, target)
    owner = dict(model.named_modules()).get(path)
    if not isinstance(owner, nn.Linear | Conv1D) or f"{path}.weight" in head_names(model):
        raise UserError("E313", f"the base has no linear layer {target}", "Give the base it was trained on", str(folder))
    return owner


@dataclass
class _Changed:
    """One layer and what is attached to its weight."""

    path: str
    owner: nn.Module
    low_rank: list[LowRank] = field(default_factory=list)
    sparse: list[Sparse] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the whole stored weight."""
        from torch import nn

        from compressor.deltas.links import original

        shape = tuple(original(self.owner).shape)
        return shape if isinstance(self.owner, nn.Linear) else shape[::-1]

    @property
    def rank(self) -> int:
        return sum(len(link.A) for link in self.low_rank)

    def factors(self, scale: float, rank: int) -> tuple[Tensor, Tensor]:
        """A (rank, in) and B (out, rank) of all low-rank links together, for one `scale`; ranks that are not there are 0."""
        import torch

        like, (out, into) = next(self.owner.parameters()), self.shape
        A, B, row = like.new_zeros(rank, into), like.new_zeros(out, rank), 0
        with torch.no_grad():
            for link in self.low_rank:
                own = slice(row, row + len(link.A))
                rows = slice(*link.place.rows) if link.place.rows else slice(None)
                A[own], B[rows, own] = link.A, link.B if link.scale == scale else link.B * (link.scale / scale)
                row = own.stop
        return A, B

    def support(self, size: int) -> tuple[Tensor, Tensor]:
        """Flat indices int32 and values of all sparse links together, filled up to `size` with zeros on place 0."""
        import torch

        like = next(self.owner.parameters())
        indices, values = torch.zeros(size, dtype=torch.int32, device=like.device), like.new_zeros(size)
        if self.sparse:
            # of a part of a fused weight the places are counted from the part's first row
            starts = [(link.place.rows or (0,))[0] * self.shape[1] for link in self.sparse]
            omega = torch.cat([link.omega + start for link, start in zip(self.sparse, starts, strict=True)])
            own = torch.cat([link.values for link in self.sparse])
            indices[: len(omega)], values[: len(own)] = omega, own.detach()
        return indices, values


def write_peft(model: nn.Module, folder: Path | str, *, base: str, head: bool = True) -> str:
    """Write the deltas and the task head of `model` so that stock peft loads them; returns peft's name of the format.

    LoRA where all changes are of low rank (parts of a fused weight become one LoRA of their ranks together), Super-Tuning
    where some are sparse. `base` is a hub id or a folder: what transformers can load. Raises UserError E314 for what peft has
    no form for.
    """
    from safetensors.torch import save_file

    from compressor.models.hub import auto_class_of, head_names

    changed, folder = _changed_layers(model), Path(folder)
    sparse = any(layer.sparse for layer in changed)
    config, tensors = (_supertuning if sparse else _lora)(changed)
    heads = head_names(model) if head else ()
    tensors |= {name: model.get_parameter(name).detach() for name in heads}
    config |= {
        "peft_type": "SUPERTUNING" if sparse else "LORA",
        "task_type": TASK_TYPES[auto_class_of(model)] if head else None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "target_modules": [layer.path for layer in changed],
        "modules_to_save": _modules_of(model, heads) or None,
        "lora_dropout": 0.0,
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file({PREFIX + name: t.cpu().contiguous() for name, t in tensors.items()}, folder / WEIGHTS, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return config["peft_type"]


def _changed_layers(model: nn.Module) -> list[_Changed]:
    from compressor.deltas.inserts import has_inserts
    from compressor.deltas.kinds.low_rank import LowRank
    from compressor.deltas.links import chain, chains
    from compressor.pruning.surgery import kept_of

    if kept_of(model) or compression_of(model).weights_moved:
        raise _unheld("a pruned base" if kept_of(model) else "a base that full tuning moved")
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


def _unheld(what: str) -> UserError:
    return UserError("E314", f"peft has no format for {what}", "Store a delta file, or merge to a checkpoint")


def _modules_of(model: nn.Module, names: Iterable[str]) -> list[str]:
    """The outermost modules that hold the task head: `classifier`, or `bert.pooler` where the base came without one."""
    depth = {name: 2 if name.startswith(f"{model.base_model_prefix}.") else 1 for name in names}
    return sorted({".".join(name.split(".")[: depth[name]]) for name in names})


def _common_scale(changed: list[_Changed]) -> float:
    """The scale of all low-rank links, or 1 where they differ."""
    scales = {link.scale for layer in changed for link in layer.low_rank}
    return scales.pop() if len(scales) == 1 else 1.0


def _lora(changed: list[_Changed]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from torch import nn

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
    from torch import nn

    if not all(isinstance(layer.owner, nn.Linear) for layer in changed):
        raise _unheld("sparse changes of layers that are no nn.Linear (GPT-2's Conv1D)")
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
    """How many values Super-Tuning has for a matrix of `size` entries, rounded as peft rounds."""
    return int(size * (1 - sparsity))


def common_sparsity(counts: Iterable[tuple[int, int]]) -> float:
    """The largest ratio at which every matrix of (places, size) has room for its places, and for one: peft asks for that."""
    counts = list(counts)
    sparsity = 1 - max(max(places, 1) / size for places, size in counts)
    if sparsity < 0:
        raise _unheld("more places than the matrix has")
    while any(support_size(size, sparsity) < max(places, 1) for places, size in counts):
        sparsity = math.nextafter(sparsity, 0)
    return sparsity
