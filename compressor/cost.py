"""Cost of a model in closed form: parameters, trainable scalars, stored bytes and FLOPs, always reported separately.

FLOPs count a multiply-add as two, include QKᵀ and AV (which FLOP counters miss under sdpa), and omit softmax, norms, products
with a mask and embedding look-ups. Adapters and prefixes stay in a model, so they are part of every figure. The papers count
linear layers only; `paper_flops_ratio` reproduces that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from compressor.errors import UserError
from compressor.models.build import TEXT2TEXT, TOKENS, auto_class_of, head_names
from compressor.models.modules import STRUCTURES

if TYPE_CHECKING:
    from torch import nn

    from compressor.models.anatomy import Layer


@dataclass(frozen=True)
class Inserted:
    """An adapter or a prefix of one block; it cannot be merged. `size`: adapter's bottleneck width b, or prefix's length l.

    `prototype` names the tensors that blocks share, each through its own mask if `masked` (ProPETL); None: they are not shared.
    """

    kind: str
    size: int
    prototype: str | None = None
    masked: bool = False


@dataclass(frozen=True)
class InsertFormulas:
    """The closed forms of one kind of insert of size b or l, hidden size d, key matrices of k rows."""

    plural: str
    scalars: Callable[[int, int, int], tuple[int, int]]
    """(size, d, k) -> number of entries in its matrices, which may be masked, and in its vectors."""
    token_macs: Callable[[int, int], int] = lambda size, hidden: 0
    """(size, d) -> multiply-adds for one token."""
    in_attention: bool = False
    """Its size is a number of further positions that every token attends to; pruned with the heads, it goes with the last."""


ADAPTERS = InsertFormulas("adapters", lambda b, d, k: (2 * b * d, b + d), token_macs=lambda b, d: 2 * b * d)

INSERTS = {
    **dict.fromkeys(("adapter", "norm_adapter", "parallel_adapter"), ADAPTERS),
    "prefix": InsertFormulas("prefixes", lambda length, d, k: (2 * length * k, 0), in_attention=True),
}
"""Formulas of every kind of `compressor.deltas.inserts.Insert`."""


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one block: the widths that pruning changes, its matrices, and its adapters and prefixes."""

    heads: int
    head_size: int
    neurons: int
    key_value_heads: int | None = None
    """Fewer than `heads` where several query heads share one; None: as many."""
    modules: tuple[str, ...] = ("query", "key", "value", "output", "ffn_in", "ffn_out")
    biased: bool | tuple[str, ...] = True
    """Whether the matrices have biases; where only some of them do, their modules."""
    cross_heads: int | None = None
    """Heads of a decoder's cross-attention; None: as many as `heads`."""
    other: int = 0
    """Parameters other than the matrices and their biases: those of norms."""
    other_biases: int = 0
    """Biases among them."""
    attention_other: int = 0
    """The part of `other` inside the attention, removed with its last head: norms of queries and keys."""
    positions: int = 0
    """Relative positions p with projected queries and keys (DeBERTa), over both directions."""
    uncompared: int = 0
    """More of them that are projected all the same, and compared with nothing."""
    inserts: tuple[Inserted, ...] = ()
    needed: bool = False
    """Whether other blocks need its attention."""
    emptied: int = 0
    """Sublayers of which only the outgoing bias is left (counted here by `with_units`; in a live model part of `other`)."""

    def has_bias(self, module: str) -> bool:
        """Whether the matrix of a module has a bias: in a Llama or a Qwen2 those of the attention may, and others not."""
        return module in self.biased if isinstance(self.biased, tuple) else self.biased

    @property
    def width(self) -> int:
        """Number of rows of the query matrix."""
        return self.heads * self.head_size

    @property
    def cross_width(self) -> int:
        """Number of rows of the cross_query matrix; 0 without cross-attention."""
        heads = self.heads if self.cross_heads is None else self.cross_heads
        return heads * self.head_size if "cross_query" in self.modules else 0

    def units(self, structure: str) -> int:
        """Number of removable units (heads or neurons) of a structure."""
        if structure == "neurons":
            return self.neurons
        if structure == "cross_heads":
            return self.cross_width // self.head_size
        return self.heads if self.key_value_heads is None else self.key_value_heads

    def with_units(self, structure: str, units: int) -> LayerShape:
        """The same block with `units` units of a structure left; with 0, the sublayer outputs its output bias alone."""
        before = self.units(structure)
        if units == before:
            return self
        if structure == "neurons":
            shape = replace(self, neurons=units)
        elif structure == "cross_heads":
            shape = replace(self, cross_heads=units)
        else:
            # a prefix that loses heads shares no more: it keeps its masked part of the prototype; without heads it is removed
            inside = [insert for insert in self.inserts if INSERTS[insert.kind].in_attention and units]
            alone = [Inserted(insert.kind, insert.size) for insert in inside]
            behind = [insert for insert in self.inserts if not INSERTS[insert.kind].in_attention]
            shape = replace(self, heads=self.heads * units // before, key_value_heads=units, inserts=(*behind, *alone))
        if units:
            return shape
        gone = {*STRUCTURES[structure].rows, STRUCTURES[structure].columns}
        inside = self.attention_other if structure == "heads" else 0
        return replace(
            shape,
            modules=tuple(name for name in self.modules if name not in gone),
            other=self.other - inside,
            attention_other=self.attention_other - inside,
            emptied=self.emptied + self.has_bias(STRUCTURES[structure].columns),
        )

    @property
    def prefix_length(self) -> int:
        """Positions that its inserts add to its attention."""
        return sum(insert.size for insert in self.inserts if INSERTS[insert.kind].in_attention)

    def scalars(self, insert: Inserted, hidden: int) -> tuple[int, int]:
        """(entries of matrices, of vectors) of one insert."""
        return INSERTS[insert.kind].scalars(insert.size, hidden, self.matrix("key", hidden)[0])

    def matrix(self, module: str, hidden: int) -> tuple[int, int]:
        """Shape (out, in) of one matrix, by its module name (query, ffn_in, ...)."""
        if module == "cross_output":
            return hidden, self.cross_width
        if module.startswith("cross_"):
            return self.cross_width, hidden
        if module in ("key", "value"):
            return self.units("heads") * self.head_size, hidden
        sizes = {"query": (self.width, hidden), "output": (hidden, self.width), "ffn_out": (hidden, self.neurons)}
        return sizes.get(module, (self.neurons, hidden))


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model, from which its cost follows. `other` counts every parameter outside the blocks' linear layers, task
    head included; `head_macs` are multiply-adds per row in pooler and classifier, `token_macs` per token outside blocks,
    of a head that reads every token, of a projection of the embeddings; `other_biases` are the biases of the norms."""

    hidden: int
    layers: tuple[LayerShape, ...]
    other: int
    head: int
    head_macs: int
    other_biases: int = 0
    token_macs: int = 0
    pooler: int = 0
    """Parameters of the base's own pooler, a part of `other`."""

    @property
    def rest(self) -> int:
        """Number of parameters of the base outside the blocks' matrices and its pooler: embeddings, norms, biases."""
        return self.other + self.biases - self.other_biases - self.head - self.pooler

    def matrices(self, modules: Sequence[str] | None = None) -> list[tuple[str, int, int]]:
        """(module, out, in) of every matrix of the blocks that `modules` names; of all matrices by default."""
        return [
            (name, *layer.matrix(name, self.hidden))
            for layer in self.layers
            for name in layer.modules
            if modules is None or name in modules
        ]

    @property
    def biases(self) -> int:
        """Number of bias parameters of the base, without its pooler."""
        matrices = ((layer, name) for layer in self.layers for name in layer.modules if layer.has_bias(name))
        inside = sum(layer.matrix(name, self.hidden)[0] for layer, name in matrices)
        return self.other_biases + inside + sum(layer.emptied * self.hidden for layer in self.layers)

    @property
    def bare(self) -> ModelShape:
        """The same model without its adapters and prefixes."""
        return replace(self, layers=tuple(replace(layer, inserts=()) for layer in self.layers))

    @property
    def inserted(self) -> int:
        """Parameters of adapters and prefixes: 2 b d + b + d and 2 l · key rows each; a shared prototype counts once."""
        sizes, prototypes = 0, {}
        for layer in self.layers:
            for insert in layer.inserts:
                size = sum(layer.scalars(insert, self.hidden))
                if insert.prototype is None:
                    sizes += size
                else:
                    prototypes[insert.prototype] = size
        return sizes + sum(prototypes.values())

    @property
    def inserted_kinds(self) -> str:
        """'adapters', 'prefixes' or both; '' where nothing was inserted."""
        kinds = {insert.kind for layer in self.layers for insert in layer.inserts}
        return " and ".join(dict.fromkeys(formulas.plural for kind, formulas in INSERTS.items() if kind in kinds))

    @property
    def mask_entries(self) -> int:
        """Bits of the masks over shared prototypes (ProPETL): one per entry of the prototype's matrices, in every block."""
        masked = [(layer, insert) for layer in self.layers for insert in layer.inserts if insert.masked]
        return sum(layer.scalars(insert, self.hidden)[0] for layer, insert in masked)

    @property
    def parameters(self) -> int:
        """Number of all parameters, including task head, adapters and prefixes; masks are not parameters."""
        return self.other + self.linear_macs() + self.biases - self.other_biases + self.inserted

    @property
    def bytes(self) -> int:
        """Bytes of a float32 checkpoint: 4 per parameter, and one bit per mask entry."""
        return 4 * self.parameters + (self.mask_entries + 7) // 8

    def linear_macs(self) -> int:
        """Multiply-adds of the blocks' linear layers for one token."""
        return sum(rows * columns for _, rows, columns in self.matrices())

    def insert_macs(self) -> int:
        """Multiply-adds of the inserts for one token, what they do inside attention apart: Σ 2 b d of adapters."""
        inserts = [insert for layer in self.layers for insert in layer.inserts]
        return sum(INSERTS[insert.kind].token_macs(insert.size, self.hidden) for insert in inserts)

    @property
    def read_weights(self) -> int:
        """Entries of the matrices that every pass reads whole: of blocks, inserts and head, but not of looked-up embeddings."""
        return self.linear_macs() + self.insert_macs() + self.head_macs + self.token_macs

    def attention_macs(self, length: int) -> int:
        """Multiply-adds Σ 2 n (n + l) w of QKᵀ and AV for `length` n, w the rows of query, and n p w of relative positions;
        cross-attention has no prefix."""
        self_attention = sum(s.width * (2 * (length + s.prefix_length) + s.positions) for s in self.layers)
        return length * (self_attention + sum(2 * length * s.cross_width for s in self.layers))

    def flops(self, length: int, batch: int = 1, *, stored: bool = False) -> int:
        """FLOPs of a pass over `batch` rows of `length` tokens; `stored`: positions are constants, not projected once."""
        tokens = length * (self.linear_macs() + self.insert_macs() + self.token_macs)
        projected = 0 if stored else self.hidden * sum((s.positions + s.uncompared) * s.width for s in self.layers)
        return 2 * (batch * (tokens + self.attention_macs(length) + self.head_macs) + projected)

    def unread_flops(self, length: int) -> int:
        """The part of a row's FLOPs that a file saves where the head reads the first token alone: all but keys and values, of
        the last block at the other tokens; where that has no head left, of the block before it, too, and so on."""
        unread, first = 0, max((place for place, layer in enumerate(self.layers) if layer.width), default=0)
        for layer in self.layers[first:]:
            matrices = sum(math.prod(layer.matrix(name, self.hidden)) for name in layer.modules if name not in ("key", "value"))
            adapters = sum(INSERTS[insert.kind].token_macs(insert.size, self.hidden) for insert in layer.inserts)
            unread += matrices + adapters + layer.width * (2 * (length + layer.prefix_length) + layer.positions)
        return 2 * (length - 1) * unread

    def with_inserts(self, added: Sequence[tuple[Inserted, ...]]) -> ModelShape:
        """The same model with more adapters and prefixes, layer by layer."""
        layers = (replace(s, inserts=s.inserts + more) for s, more in zip(self.layers, added, strict=True))
        return replace(self, layers=tuple(layers))

    def with_units(self, structure: str, units: Sequence[int]) -> ModelShape:
        """The same model with `units[i]` units of a structure left in block i."""
        layers = tuple(layer.with_units(structure, count) for layer, count in zip(self.layers, units, strict=True))
        gone = sum(before.other - after.other for before, after in zip(self.layers, layers, strict=True))
        return replace(self, layers=layers, other=self.other - gone)

    def without(self, blocks: Collection[int]) -> ModelShape:
        """The same model without the blocks at these indices."""
        gone = [self.layers[place] for place in blocks]
        return replace(
            self,
            layers=tuple(layer for place, layer in enumerate(self.layers) if place not in blocks),
            other=self.other - sum(layer.other for layer in gone),
            other_biases=self.other_biases - sum(layer.other_biases for layer in gone),
        )


def shape_of(model: nn.Module) -> ModelShape:
    """Shape of a live model as it will be after merging: deltas do not count, adapters and prefixes do."""
    from compressor.deltas.links import Change, original
    from compressor.models.anatomy import biases_of, layers_of, layers_outside, row_of_model
    from compressor.models.normalized import normalized

    layers = layers_of(model)
    inside = {id(layer.linear(name)) for layer in layers for name in layer.names}
    added = {id(p) for module in model.modules() if isinstance(module, Change) for p in module.parameters()}
    blocks = {id(p) for module in model.modules() if id(module) in inside for p in module.parameters()}
    every_token = row_of_model(model).head_on_tokens or auto_class_of(model) in (TOKENS, TEXT2TEXT)
    macs = {True: 0, False: 0}
    for module, of_tokens in layers_outside(model, layers):
        macs[every_token or of_tokens] += original(module).numel()
    parameters, heads = dict(model.named_parameters()), head_names(model)
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    return ModelShape(
        hidden=normalized(model.config).hidden_size,
        layers=tuple(_layer_shape(layer) for layer in layers),
        other=sum(p.numel() for p in parameters.values() if id(p) not in blocks | added),
        head=sum(parameters[name].numel() for name in heads),
        head_macs=macs[False],
        other_biases=sum(original(owner, "bias").numel() for owner in biases_of(model) if id(owner) not in inside),
        token_macs=macs[True],
        pooler=sum(p.numel() for name, p in parameters.items() if name.startswith(f"{prefix}pooler.") and name not in heads),
    )


def _layer_shape(layer: Layer) -> LayerShape:
    from compressor.deltas.links import Change, original
    from compressor.models.anatomy import biases_of

    linears = {layer.linear(name) for name in layer.names}
    apart = (module for module in layer.module.modules() if module in linears or isinstance(module, Change))
    elsewhere = {id(p) for module in apart for p in module.parameters()}
    attention = layer.home("heads")
    biased = tuple(name for name in layer.names if getattr(layer.linear(name), "bias", None) is not None)
    return LayerShape(
        heads=layer.heads,
        head_size=layer.head_size,
        neurons=layer.neurons,
        key_value_heads=layer.key_value_heads,
        cross_heads=layer.units("cross_heads") if "cross_heads" in layer.structures else None,
        modules=layer.names,
        biased=biased if 0 < len(biased) < len(layer.names) else bool(biased),
        other=sum(p.numel() for p in layer.module.parameters() if id(p) not in elsewhere),
        other_biases=sum(original(owner, "bias").numel() for owner in biases_of(layer.module) if owner not in linears),
        attention_other=sum(p.numel() for p in attention.parameters() if id(p) not in elsewhere) if layer.heads else 0,
        positions=layer.compared_positions,
        uncompared=layer.uncompared_positions,
        inserts=_inserts_of(layer),
        needed=layer.needed,
    )


def added_by(group: str, model: nn.Module) -> list[tuple[Inserted, ...]]:
    """The adapters and prefixes that stage `group` added to a live model, layer by layer."""
    from compressor.models.anatomy import layers_of

    return [_inserts_of(layer, group) for layer in layers_of(model)]


def _inserts_of(layer: Layer, group: str | None = None) -> tuple[Inserted, ...]:
    from compressor.deltas.inserts import Insert

    inserts = [module for module in layer.module.modules() if isinstance(module, Insert) and group in (None, module.group)]
    return tuple(Inserted(insert.kind, insert.size, insert.prototype_name, insert.source.masked) for insert in inserts)


def paper_flops_ratio(shape: ModelShape, dense: ModelShape, delta_macs: int) -> float:
    """FLOPs ratio of DSEE table 6: encoder linear layers with adapters and deltas, over the dense layers without them.

    `delta_macs`: multiply-adds of the unmerged deltas for one token, Σ r (m + n) + |Ω|.
    """
    return (shape.linear_macs() + shape.insert_macs() + delta_macs) / dense.linear_macs()


def human_bytes(count: float) -> str:
    """Format a number of bytes: 1536 -> '1.5 KB' (powers of 1000)."""
    for unit, digits in (("B", 0), ("KB", 1), ("MB", 1)):
        if round(count, digits) < 1000:
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def share(budget: int | float, size: int) -> int:
    """Number of entries that a budget takes of `size`: a count, or a fraction in (0, 1), rounded down as in the papers.

    The share is taken as written: 0.29 of 100 is 29, although 0.29 * 100 is slightly less in floating point.
    """
    return int(Fraction(str(budget)) * size) if isinstance(budget, float) else budget


def spendable(budget: int | float, size: int) -> int:
    """`share`, required to be at least 1 and at most `size`. Raises UserError E401."""
    count = share(budget, size)
    if not 0 < count <= size:
        raise UserError("E401", f"budget {budget} is {count:,} of {size:,} positions", "Give another budget")
    return count
