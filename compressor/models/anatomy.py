"""The layers of a live model under the same names for every architecture, located by the rows of `architectures.py`.

The rest of the package uses `layer.matrix("query")` and never a module path. Only this file reads or writes head counts,
because after pruning they differ between layers and `config.num_attention_heads` is no longer correct.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compressor.compression import compression_of
from compressor.deltas.kinds.mask import Mask, WeightMask
from compressor.deltas.links import WHOLE, Change, Delta, Place, attach, chain, delta_of, original, plain_name, tied_owners
from compressor.errors import UserError
from compressor.models.architectures import Architecture, Blocks, row_of
from compressor.models.modules import EVERYTHING, MODULES, REST, STRUCTURES


@dataclass(frozen=True)
class Matrix:
    """One weight of a block in (out, in) layout, however it is stored. `path` is unique in the model: the owner's path,
    with `[query]` behind it where the matrix is a part of a fused weight.

    A tensor of a change (A, B, down, ...) is one, too, and so is any other parameter of the base (a bias, an embedding):
    `tensor` is its name in the owner, and it has the shape it has. `tied` are (owner, name) of further uses of one parameter.
    """

    name: str
    path: str
    owner: nn.Module
    place: Place
    tensor: str = "weight"
    tied: tuple[tuple[nn.Module, str], ...] = ()

    @property
    def weight(self) -> Tensor:
        """The matrix (out, in), with the chain applied."""
        return self.place.read(getattr(self.owner, self.tensor))

    @property
    def original(self) -> Tensor:
        """The matrix (out, in), before the chain is applied."""
        return self.place.read(original(self.owner, self.tensor))

    @property
    def used(self) -> Tensor:
        """W (out, in) as every delta finds it: the original, with zeros where a mask hides W alone."""
        mask = self.weight_mask
        return self.original if mask is None else mask.change(self.original)

    @property
    def delta(self) -> Tensor:
        """ΔW (out, in) of the matrix's chain."""
        return delta_of(self.owner, self.place, self.tensor)

    @property
    def mask(self) -> Mask | None:
        """The matrix's mask over W + ΔW; None where there is none."""
        return next((mask for mask in self._masks if mask.masks), None)

    @property
    def unmasked(self) -> int:
        """Number of entries in which a change has an effect: all that no mask over W + ΔW hides."""
        mask = self.mask
        return self.original.numel() if mask is None or mask.keep.is_meta else int(mask.keep.sum())

    @property
    def weight_mask(self) -> WeightMask | None:
        """The matrix's mask over W alone; None where there is none."""
        return next((mask for mask in self._masks if mask.first), None)

    @property
    def _masks(self) -> Iterator[Mask]:
        links = chain(self.owner, self.tensor)
        return (link for link in links if isinstance(link, Mask) and link.place == self.place)

    def attach(self, link: Delta) -> None:
        """Add a delta or a mask made for this matrix to the chain of the weight that holds it."""
        link.place = self.place
        for owner, tensor in ((self.owner, self.tensor), *self.tied):
            attach(owner, link, tensor)


class Layer:
    """One transformer block, located by its row. `needed`: other blocks depend on its attention, so it must keep that."""

    def __init__(self, row: Architecture, blocks: Blocks, module: nn.Module, path: str, needed: bool):
        self.row, self.blocks, self.module, self.path = row, blocks, module, path
        self.needed = needed
        self.attention = module.get_submodule(blocks.attention)
        self.parts = blocks.parts_in(module)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the modules that this block has, in the order of `MODULES`."""
        return tuple(name for name in MODULES if name in self.parts)

    def linear(self, name: str) -> nn.Module:
        """The layer (nn.Linear, or GPT-2's Conv1D) that holds the matrix of module `name`."""
        return self.module.get_submodule(self.parts[name].path)

    def linear_path(self, name: str) -> str:
        """Full path of that layer below the whole model, as in `state_dict()`."""
        return f"{self.path}.{self.parts[name].path}"

    def matrix(self, name: str) -> Matrix:
        """The matrix of module `name`."""
        part, owner = self.parts[name], self.linear(name)
        path = self.linear_path(name)
        if part.of == 1:
            return Matrix(name, path, owner, Place(transposed=True) if self.row.transposed else WHOLE)
        size = original(owner, "weight").shape[1 if self.row.transposed else 0] // part.of
        rows = (part.index * size, (part.index + 1) * size)
        return Matrix(name, f"{path}[{name}]", owner, Place(rows=rows, transposed=self.row.transposed))

    @property
    def head_size(self) -> int:
        return getattr(self.attention, self.blocks.head_size)

    @property
    def structures(self) -> tuple[str, ...]:
        """The structures (heads, neurons) that this block was created with, even where no unit is left."""
        return tuple(self.blocks.homes)

    def units(self, structure: str) -> int:
        """Number of removable units left of a structure: heads (grouped by shared key and value head) or neurons."""
        span = STRUCTURES[structure]
        if span.rows[0] not in self.parts:
            return 0
        if not span.in_attention:
            return self.matrix(span.rows[0]).original.shape[0]
        return self.matrix(span.rows[1]).original.shape[0] // self.head_size

    def spread(self, name: str, units: Tensor) -> Tensor:
        """Indices of `units` (sorted int64) of a structure in the matrix `name`: rows, or columns for an output matrix."""
        structure, span = next((key, span) for key, span in STRUCTURES.items() if name in (*span.rows, span.columns))
        shape = self.matrix(name).original.shape
        each = shape[1 if name == span.columns else 0] // self.units(structure)
        return (units[:, None] * each + torch.arange(each, device=units.device)).flatten()

    @property
    def heads(self) -> int:
        """Number of query heads."""
        return self.matrix("query").original.shape[0] // self.head_size if "query" in self.parts else 0

    @property
    def key_value_heads(self) -> int:
        """Number of key/value heads, smaller than `heads` where several query heads share one."""
        return self.units("heads")

    @property
    def neurons(self) -> int:
        return self.units("neurons")

    def home(self, structure: str) -> nn.Module:
        """The module that is removed when no unit of a structure is left; for heads, the attention."""
        return self.module.get_submodule(self.blocks.homes[structure])

    @property
    def compared_positions(self) -> int:
        """Number of relative positions that DeBERTa compares with queries and keys, in both directions; 0 elsewhere."""
        if not getattr(self.attention, "relative_attention", False):
            return 0
        return 2 * self.attention.pos_ebd_size * len(self.attention.pos_att_type)

    @property
    def uncompared_positions(self) -> int:
        """Number of relative positions that DeBERTa projects and compares with nothing: by `query` and `key` it projects those
        of both kinds, whichever it compares (`pos_att_type`); 0 elsewhere."""
        attention = self.attention
        if not (getattr(attention, "relative_attention", False) and attention.share_att_key):
            return 0
        return 4 * attention.pos_ebd_size - self.compared_positions

    @property
    def norm_after_ffn(self) -> nn.Module:
        """The norm of the sum of the FFN's output and input. Raises UserError E407 where the row names none."""
        if self.blocks.ffn_norm is None:
            what = f"the row of architecture '{self.row.model_type}' names no norm behind the FFN, which such adapters read"
            raise UserError("E407", what, "Use placement: pfeiffer or houlsby")
        return self.module.get_submodule(self.blocks.ffn_norm)

    def token_mask(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The mask (batch, length), among a model's inputs, of the real tokens whose states this block computes."""
        in_decoder = self.row.has_decoder and self.blocks == self.row.stacks[1]
        mask = inputs.get("decoder_attention_mask") if in_decoder else None
        return inputs["attention_mask"] if mask is None else mask

    def write_heads(self, structure: str) -> None:
        """Update the head count of an attention after its weights were pruned."""
        attention = self.home(structure)
        width = self.matrix(STRUCTURES[structure].rows[0]).original.shape[0]
        for name in self.blocks.heads_attributes:
            setattr(attention, name, width // self.head_size)
        for name in self.blocks.width_attributes:
            setattr(attention, name, width)


def row_of_model(model: nn.Module) -> Architecture:
    """The architecture row of a live model. Raises UserError E301."""
    return row_of(model.config.model_type)


def layers_of(model: nn.Module) -> list[Layer]:
    """The blocks of a live model (with or without a task head), in order.

    Raises UserError E301, and E317 where there are not as many as config.json says: blocks that share one module cannot be
    changed one by one.
    """
    row, base = row_of_model(model), model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    convolution = getattr(getattr(base, "encoder", None), "conv", None) is not None  # DeBERTa-v2 xlarge: behind its first block
    layers = [
        Layer(row, blocks, module, f"{prefix}{blocks.layers}.{index}", not index and (row.first_block_bias or convolution))
        for blocks in row.stacks
        for index, module in enumerate(base.get_submodule(blocks.layers))
    ]
    _check_blocks(model, row, layers)
    return layers


def _check_blocks(model: nn.Module, row: Architecture, layers: list[Layer]) -> None:
    kept = compression_of(model).kept
    expected = len(kept) if kept else sum(dense_blocks(model, blocks) for blocks in row.stacks)
    if len({id(layer.module) for layer in layers}) != expected:
        what = f"'{model.config.model_type}' runs {expected} blocks by its config.json but has {len(layers)} of its own"
        raise UserError("E317", what, "Blocks that share their weights cannot be changed one by one: use another architecture")


def dense_blocks(model: nn.Module, blocks: Blocks) -> int:
    """Number of blocks in the dense stack, according to the config."""
    return model.config.num_decoder_layers if "cross_heads" in blocks.homes else model.config.num_hidden_layers


def matrices_of(model: nn.Module, modules: Collection[str]) -> list[Matrix]:
    """Every matrix of the blocks that `modules` names, block by block; behind them what REST means.

    Raises UserError E302 for a module that no block has (not if all modules are requested), and E301.
    """
    layers = layers_of(model)
    absent = [name for name in modules if name != REST and not any(name in layer.parts for layer in layers)]
    if absent and not set(modules) >= set(MODULES):
        what = f"architecture '{model.config.model_type}' has no {absent[0]}"
        raise UserError("E302", what, f"It has {', '.join(layers[-1].names)}")
    matrices = [layer.matrix(name) for layer in layers for name in layer.names if name in modules]
    return [*matrices, *(rest_of(model, layers) if REST in modules else ())]


def rest_of(model: nn.Module, layers: Sequence[Layer]) -> list[Matrix]:
    """Every parameter of the base that is not a matrix of its blocks: embeddings, norms, biases, a tied one once.

    Not its pooler, nor the task head.
    """
    inside = {id(original(layer.linear(name), "weight")) for layer in layers for name in layer.names}
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    outside, tied = compression_of(model).head_parameters or (), tied_owners(model)
    result = []
    for path, parameter in model.named_parameters():
        name = plain_name(path)
        if name is None or id(parameter) in inside or name in outside or name.startswith(f"{prefix}pooler."):
            continue
        path, _, tensor = name.rpartition(".")
        owner, others = model.get_submodule(path), tied.get(id(parameter), ())[1:]
        if not isinstance(owner, Change):
            result.append(Matrix(REST, name, owner, WHOLE, tensor, tuple(others)))
    return result


def modules_of(model: nn.Module, modules: Collection[str]) -> list[str]:
    """Those of `modules` that some block has, in the order of `MODULES`: the meaning of `all` in this model. REST is last."""
    names = {REST, *(name for layer in layers_of(model) for name in layer.names)}
    return [name for name in EVERYTHING if name in modules and name in names]


def biases_of(model: nn.Module) -> list[nn.Module]:
    """Every module of the base (or of one block) that has a bias, except its pooler."""
    return [
        module
        for path, module in getattr(model, "base_model", model).named_modules()
        if isinstance(getattr(module, "bias", None), Tensor)
        and not path.startswith("pooler")
        and not isinstance(module, Change)
    ]


def layers_outside(model: nn.Module, layers: Sequence[Layer]) -> Iterator[tuple[nn.Module, bool]]:
    """Every linear layer and convolution outside the blocks, and whether it is of the base, where it computes every token: a
    projection of the embeddings, a convolution behind the first block. Its pooler and the task head may compute one a row."""
    inside = {id(module) for layer in layers for module in layer.module.modules()}
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Conv1d) and id(module) not in inside:
            yield module, path.startswith(prefix) and not path.startswith(f"{prefix}pooler.")
