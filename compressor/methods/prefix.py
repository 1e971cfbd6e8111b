"""Prefix tuning (Li and Liang 2021): trained keys and values prepended to those of the input in every self-attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape
from compressor.errors import UserError
from compressor.methods import Method, Options

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor, nn

    from compressor.deltas.sources import Network, Reparametrized


def attentions(model: nn.Module) -> Iterator[tuple[nn.Module, Tensor]]:
    """(attention, its key matrix) of every block that has heads. Raises UserError E407 where prefixes are not supported."""
    from compressor.deltas.kinds.prefix import use_prefixes
    from compressor.models.anatomy import layers_of, row_of_model

    if not row_of_model(model).prefixes:
        what = f"prefixes cannot join the attention of architecture '{model.config.model_type}'"
        raise UserError("E407", what, "Use another method, e.g. adapter or lora")
    use_prefixes(model)
    for layer in layers_of(model):
        if "key" in layer.names:  # not where pruning has left no head
            yield layer.attention, layer.matrix("key").original


INNER = 512
"""Inner width of the reparametrizing network, as in the authors' table-to-text setting."""


def attach_prefixes(model: nn.Module, options: Options) -> None:
    """Insert a prefix into every attention; if they are reparametrized, one network computes them all."""
    from compressor.deltas.inserts import insert
    from compressor.deltas.kinds.prefix import Prefix
    from compressor.deltas.sources import PlainTensors

    shared = None
    for attention, key in attentions(model):
        if options.reparametrize:
            shared = shared or network(key, options.length)
            source = through_network(shared, key)
        else:
            source = PlainTensors(Prefix.tensors(key, options.length))
        insert(attention, Prefix(source, options.group))


def network(key: Tensor, length: int) -> Network:
    """A newly initialized network behind prefixes of `length`; `key` is a key matrix (out, in)."""
    from compressor.deltas.sources import Network

    return Network(key, length, key.shape[1], INNER)


def through_network(shared: Network, key: Tensor) -> Reparametrized:
    """Keys and values of one attention, with the key matrix `key` (out, in), as functions of a network."""
    from compressor.deltas.sources import Reparametrized

    return Reparametrized(shared, {"keys": key.shape[0], "values": key.shape[0]})


def network_size(shape: ModelShape, length: int, keys: Sequence[int]) -> int:
    """Parameters of a network behind the prefixes of attentions with `keys` rows in their key matrices:
    l in + m in + m, and for each of them 2 (m d + d)."""
    return length * shape.hidden + INNER * shape.hidden + INNER + sum(2 * (INNER * rows + rows) for rows in keys)


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: Σ 2 l d over the blocks, d the rows of the key matrix (out, in).

    Reparametrized: the network's l in + m in + m, and for every block the last layers' 2 (m d + d).
    """
    keys = [rows for _, rows, _ in shape.matrices(("key",))]
    if not options.reparametrize:
        return sum(2 * options.length * rows for rows in keys)
    return network_size(shape, options.length, keys)


METHOD = Method(
    name="prefix",
    summary="trained keys and values before those of the input",
    formula="2ld per block (reparametrized: lh + mh + m, and 2(m+1)d per block)",
    attach=attach_prefixes,
    count=count,
    learning_rate=1e-2,
    source="Li and Liang 2021, sections 4.2 and 4.3",
    reads=("length", "reparametrize"),
    mergeable=False,
    # the network's weights change every key and value at once: at 3e-3 MiniLM learns nothing
    rates={"reparametrize": 1e-3},
)
