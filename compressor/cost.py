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

    from compressor.anatomy import Layer
    from compressor.methods import Options


@dataclass(frozen=True)
class LayerShape:
    """The widths of one block that pruning changes, and the matrices that it has."""

    heads: int
    head_size: int
    neurons: int
    key_value_heads: int | None = None
    """Fewer than `heads` where several query heads share one; None: as many."""
    modules: tuple[str, ...] = ("query", "key", "value", "output", "ffn_in", "ffn_out")
    biased: bool = True
    """The matrices have a bias each."""

    @property
    def width(self) -> int:
        """Rows of query."""
        return self.heads * self.head_size

    def matrix(self, module: str, hidden: int) -> tuple[int, int]:
        """(out, in) of one matrix in the anatomy's words."""
        word = module.removeprefix("cross_")
        if word in ("key", "value"):
            return (self.key_value_heads or self.heads) * self.head_size, hidden
        sizes = {"query": (self.width, hidden), "output": (hidden, self.width), "ffn_out": (hidden, self.neurons)}
        return sizes.get(word, (self.neurons, hidden))


@dataclass(frozen=True)
class ModelShape:
    """A model as its cost sees it. `other` counts every parameter outside the blocks' linear layers, task head included;
    `head_macs` are the multiply-adds a row spends in pooler and classifier; `other_biases` the biases of the norms."""

    hidden: int
    layers: tuple[LayerShape, ...]
    other: int
    head: int
    head_macs: int
    other_biases: int = 0

    def matrices(self, modules: Sequence[str] | None = None) -> list[tuple[str, int, int]]:
        """(module, out, in) of every matrix of the blocks that `modules` name; of all by default."""
        return [
            (name, *layer.matrix(name, self.hidden))
            for layer in self.layers
            for name in layer.modules
            if modules is None or name in modules
        ]

    @property
    def biases(self) -> int:
        """Every bias of the base, its pooler's apart."""
        blocks = (layer.matrix(name, self.hidden)[0] for layer in self.layers if layer.biased for name in layer.modules)
        return self.other_biases + sum(blocks)

    @property
    def parameters(self) -> int:
        """Every parameter, task head included."""
        return self.other + self.linear_macs() + self.biases - self.other_biases

    def linear_macs(self) -> int:
        """Multiply-adds of the blocks' linear layers for one token."""
        return sum(out * into for _, out, into in self.matrices())

    def flops(self, length: int, batch: int = 1) -> int:
        """FLOPs of one forward pass over `batch` rows of `length` tokens."""
        attention = sum(2 * length * length * s.width for s in self.layers)
        return 2 * batch * (length * self.linear_macs() + attention + self.head_macs)

    def pruned(self, heads: Sequence[int], neurons: Sequence[int]) -> ModelShape:
        """The same model with so many heads and neurons left in each layer."""
        layers = tuple(
            replace(s, heads=h, key_value_heads=h, neurons=n) for s, h, n in zip(self.layers, heads, neurons, strict=True)
        )
        return replace(self, layers=layers)


def shape_of(model: nn.Module) -> ModelShape:
    """The shape of a live model (what was added to it does not count)."""
    from torch import nn

    from compressor.anatomy import biases_of, layers_of
    from compressor.deltas import Change, original
    from compressor.models import head_names

    layers = layers_of(model)
    inside = {id(layer.linear(name)) for layer in layers for name in layer.names}
    added = {id(p) for module in model.modules() if isinstance(module, Change) for p in module.parameters()}
    blocks = {id(p) for module in model.modules() if id(module) in inside for p in module.parameters()}
    outside = [module for module in model.modules() if isinstance(module, nn.Linear) and id(module) not in inside]
    parameters = dict(model.named_parameters())
    return ModelShape(
        hidden=model.config.hidden_size,
        layers=tuple(_layer_shape(layer) for layer in layers),
        other=sum(p.numel() for p in parameters.values() if id(p) not in blocks | added),
        head=sum(parameters[name].numel() for name in head_names(model)),
        head_macs=sum(linear.in_features * linear.out_features for linear in outside),
        other_biases=sum(original(owner, "bias").numel() for owner in biases_of(model) if id(owner) not in inside),
    )


def _layer_shape(layer: Layer) -> LayerShape:
    biased = getattr(layer.linear("ffn_out"), "bias", None) is not None
    return LayerShape(layer.heads, layer.head_size, layer.neurons, layer.key_value_heads, layer.names, biased)


def hollow(folder: Path, label_names: list[str]) -> nn.Module:
    """The model of a pretrained folder with a classification head, without weights: from config.json alone, on meta."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.from_pretrained(folder, num_labels=len(label_names))
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    prefix = f"{model.base_model_prefix}."
    model.head_parameter_names = frozenset(name for name, _ in model.named_parameters() if not name.startswith(prefix))
    return model


def delta_macs(shape: ModelShape, modules: Sequence[str], rank: int, places: int) -> int:
    """Multiply-adds of unmerged deltas for one token: Σ r (m + n) + |Ω|."""
    return sum(rank * (out + into) for _, out, into in shape.matrices(modules)) + places


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
class Places:
    """How many places of Ω a select chooses, in closed form: `count` a matrix, a layer or in all, or a share of them."""

    modules: tuple[str, ...]
    scope: str = "matrix"
    count: int | None = None
    ratio: float | None = None

    @classmethod
    def of_budget(cls, modules: tuple[str, ...], budget: int | float) -> Places:
        """A count, or a share in (0, 1), over all matrices of `modules`."""
        return cls(modules, "global", **({"ratio": budget} if isinstance(budget, float) else {"count": budget}))

    def total(self, shape: ModelShape) -> int:
        """|Ω| in a model of `shape`. A share is rounded down in each scope, as the papers do."""
        sizes = {
            "matrix": [out * into for _, out, into in shape.matrices(self.modules)],
            "layer": [
                sum(out * into for _, out, into in replace(shape, layers=(layer,)).matrices(self.modules))
                for layer in shape.layers
            ],
        }
        scopes = sizes.get(self.scope) or [sum(sizes["matrix"])]
        return sum(self.of(size) for size in scopes)

    def of(self, size: int) -> int:
        """The places chosen among `size`."""
        return self.count if self.count is not None else int(self.ratio * size)


@dataclass(frozen=True)
class Trained:
    """What a training stage trains: a method's options, and the places of Ω where it uses them."""

    method: str
    options: Options
    places: Places | None = None

    def count(self, shape: ModelShape) -> int:
        """The closed form of its trainable parameters in a model of `shape`, task head apart."""
        from compressor.methods import method

        row = method(self.method)
        return row.count(shape, self.options, self.places.total(shape) if row.uses_omega and self.places else 0)

    def kept(self, shape: ModelShape) -> int:
        """What of that is left when training is over, for a later stage to go on with."""
        from compressor.methods import method

        row = method(self.method)
        return row.kept(shape, self.options) if row.kept else self.count(shape)


@dataclass(frozen=True)
class Plan:
    """The account that `--dry-run` keeps while it walks the stages: nothing is trained, everything is closed form."""

    dense: ModelShape
    shape: ModelShape
    model: nn.Module
    """Hollow, in the dense shapes: stages try on it what they will do, so that what has no place is told early."""
    places: Places | None = None
    """Of the last select."""
    trainable: tuple[tuple[str, int], ...] = ()
    trained: tuple[Trained, ...] = ()
    """Every training stage whose deltas are there, which `recover: {method: same}` goes on with."""
    length: int = 128

    @classmethod
    def start(cls, base_folder: Path, task) -> Plan:
        """The account of the dense model, before any stage."""
        from compressor.tasks.reading import read_task

        model = hollow(base_folder, read_task(task).label_names)
        shape = shape_of(model)
        return cls(shape, shape, model, length=task.max_length)

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
