"""What a model costs, in closed form: parameters, trainable scalars, stored bytes and FLOPs, always reported apart.

FLOPs count a multiply-add as two, include QKᵀ and AV (which FLOP counters drop under sdpa), and leave out softmax,
norms and embeddings' look-ups. The papers count linear layers only; `paper_flops_ratio` reproduces that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from compressor.methods import Options


@dataclass(frozen=True)
class LayerShape:
    """The widths of one block that pruning changes."""

    heads: int
    head_size: int
    neurons: int

    @property
    def width(self) -> int:
        """Rows of query, key and value."""
        return self.heads * self.head_size

    def matrix(self, module: str, hidden: int) -> tuple[int, int]:
        """(out, in) of one matrix in the anatomy's words."""
        sizes = {"output": (hidden, self.width), "ffn_in": (self.neurons, hidden), "ffn_out": (hidden, self.neurons)}
        return sizes.get(module, (self.width, hidden))


@dataclass(frozen=True)
class ModelShape:
    """A model as its cost sees it. `other` counts every parameter outside the blocks' linear layers, task head included;
    `head_macs` are the multiply-adds a row spends in pooler and classifier."""

    hidden: int
    layers: tuple[LayerShape, ...]
    other: int
    head: int
    head_macs: int

    @property
    def parameters(self) -> int:
        """Every parameter, task head included."""
        blocks = sum(4 * self.hidden * s.width + 3 * s.width + self.hidden for s in self.layers)
        ffn = sum(2 * self.hidden * s.neurons + s.neurons + self.hidden for s in self.layers)
        return self.other + blocks + ffn

    def linear_macs(self) -> int:
        """Multiply-adds of the blocks' linear layers for one token."""
        return sum(self.hidden * (4 * s.width + 2 * s.neurons) for s in self.layers)

    def flops(self, length: int, batch: int = 1) -> int:
        """FLOPs of one forward pass over `batch` rows of `length` tokens."""
        attention = sum(2 * length * length * s.width for s in self.layers)
        return 2 * batch * (length * self.linear_macs() + attention + self.head_macs)

    def pruned(self, heads: Sequence[int], neurons: Sequence[int]) -> ModelShape:
        """The same model with so many heads and neurons left in each layer."""
        layers = tuple(replace(s, heads=h, neurons=n) for s, h, n in zip(self.layers, heads, neurons, strict=True))
        return replace(self, layers=layers)


def shape_of(model: nn.Module) -> ModelShape:
    """The shape of a live model (chains do not count)."""
    from torch import nn

    from compressor.anatomy import layers_of
    from compressor.deltas import Delta
    from compressor.models import head_names

    layers = layers_of(model)
    inside = {id(layer.linear(name)) for layer in layers for name in layer.row.modules}
    deltas = {id(p) for module in model.modules() if isinstance(module, Delta) for p in module.parameters()}
    blocks = {id(p) for module in model.modules() if id(module) in inside for p in module.parameters()}
    outside = [module for module in model.modules() if isinstance(module, nn.Linear) and id(module) not in inside]
    parameters = dict(model.named_parameters())
    return ModelShape(
        hidden=model.config.hidden_size,
        layers=tuple(LayerShape(layer.heads, layer.head_size, layer.neurons) for layer in layers),
        other=sum(p.numel() for p in parameters.values() if id(p) not in blocks | deltas),
        head=sum(parameters[name].numel() for name in head_names(model)),
        head_macs=sum(linear.in_features * linear.out_features for linear in outside),
    )


def shape_of_folder(folder: Path, label_names: list[str]) -> ModelShape:
    """The shape of a pretrained folder with a classification head, from config.json alone (built on meta)."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(folder, num_labels=len(label_names))
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    prefix = f"{model.base_model_prefix}."
    model.head_parameter_names = frozenset(name for name, _ in model.named_parameters() if not name.startswith(prefix))
    return shape_of(model)


def delta_macs(shape: ModelShape, modules: Sequence[str], rank: int, places: int) -> int:
    """Multiply-adds of unmerged deltas for one token: r (m + n) + N per matrix."""
    matrices = [s.matrix(name, shape.hidden) for s in shape.layers for name in modules]
    return sum(rank * (out + into) + places for out, into in matrices)


def paper_flops_ratio(shape: ModelShape, dense: ModelShape, modules: Sequence[str], rank: int, places: int) -> float:
    """DSEE table 6's FLOPs: linear layers of the encoder with the delta unmerged, over the dense ones without it."""
    return (shape.linear_macs() + delta_macs(shape, modules, rank, places)) / dense.linear_macs()


def human_bytes(count: float) -> str:
    """1536 -> '1.5 KB' (powers of 1000)."""
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


@dataclass(frozen=True)
class Trained:
    """What a training stage trains: a method's options, and `places` per matrix in the modules of Ω (`omega_modules`)."""

    method: str
    options: Options
    places: int = 0
    omega_modules: tuple[str, ...] = ()

    def count(self, shape: ModelShape) -> int:
        """The closed form of its trainable parameters in a model of `shape`, task head apart."""
        from compressor.methods import method

        row = method(self.method)
        if row.trains_base:
            return shape.parameters - shape.head
        matrices = [(name, layer.matrix(name, shape.hidden)) for layer in shape.layers for name in self.options.modules]
        return sum(
            row.count(out, into, self.options, self.places if row.uses_omega and name in self.omega_modules else 0)
            for name, (out, into) in matrices
        )


@dataclass(frozen=True)
class Plan:
    """The account that `--dry-run` keeps while it walks the stages: nothing is trained, everything is closed form."""

    dense: ModelShape
    shape: ModelShape
    places: int = 0
    modules: tuple[str, ...] = ()
    trainable: tuple[tuple[str, int], ...] = ()
    trained: tuple[Trained, ...] = ()
    """Every training stage whose deltas are there, which `recover: {method: same}` goes on with."""
    length: int = 128

    @classmethod
    def start(cls, base_folder: Path, task) -> Plan:
        """The account of the dense model, before any stage."""
        from compressor.tasks.reading import read_task

        shape = shape_of_folder(base_folder, read_task(task).label_names)
        return cls(shape, shape, length=task.max_length)

    def rows(self) -> list[tuple[str, str, str]]:
        """(what, before, after) for the table."""
        dense, shape, length = self.dense, self.shape, self.length
        trainable = [
            (f"trainable in {stage} (head {self.dense.head:,} apart)", f"{dense.parameters:,}", f"{count:,}")
            for stage, count in self.trainable
        ]
        return [
            *trainable,
            ("parameters", f"{dense.parameters:,}", f"{shape.parameters:,}"),
            ("stored weights, fp32", human_bytes(4 * dense.parameters), human_bytes(4 * shape.parameters)),
            (f"GFLOPs of a row of {length} tokens", f"{dense.flops(length) / 1e9:.3f}", f"{shape.flops(length) / 1e9:.3f}"),
        ]
