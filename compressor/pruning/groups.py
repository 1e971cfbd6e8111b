"""torch-pruning groups built from the anatomy: everything that is removed with some units of one structure of a block.

No dependency graph is traced. The anatomy names every matrix that a unit spans, and each becomes one item of a
`torch_pruning.Group`, so fused weights, GPT-2's Conv1D, shared key and value heads and T5's cross-attention are handled alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch_pruning.dependency import Dependency, Group, Node
from torch_pruning.pruner.function import BasePruningFunc

from compressor.deltas.links import attach, detach, original
from compressor.models.anatomy import Layer, Matrix
from compressor.models.modules import STRUCTURES


class ChainedLinearPruner(BasePruningFunc):
    """Prunes an nn.Linear or Conv1D that holds one or several of a block's matrices, and the chains of deltas on it.

    `matrices` are those in `owner` of one structure. Each delta and mask shrinks with the matrix that it was made for.
    """

    TARGET_MODULES = None  # torch-pruning's signature: any class of layer

    def __init__(self, layer: Layer, matrices: Sequence[Matrix]):
        super().__init__()
        self.layer, self.matrices = layer, matrices

    def prune_out_channels(self, owner: nn.Module, idxs: Sequence[int]) -> nn.Module:
        """Remove output rows `idxs` of the whole owner, and their biases."""
        return self._prune(owner, idxs, out_channels=True)

    def prune_in_channels(self, owner: nn.Module, idxs: Sequence[int]) -> nn.Module:
        """Remove input columns `idxs`; the bias stays."""
        return self._prune(owner, idxs, out_channels=False)

    def get_out_channels(self, owner: nn.Module) -> int:
        return original(owner).shape[self._axis(out_channels=True)]

    def get_in_channels(self, owner: nn.Module) -> int:
        return original(owner).shape[self._axis(out_channels=False)]

    def _axis(self, *, out_channels: bool) -> int:
        """Axis of the stored tensor to prune: Conv1D stores (in, out)."""
        return int(out_channels == self.layer.row.transposed)

    def _prune(self, owner: nn.Module, idxs: Sequence[int], *, out_channels: bool) -> nn.Module:
        shapes = {matrix.place: tuple(matrix.original.shape) for matrix in self.matrices}
        names = {matrix.place: matrix.name for matrix in self.matrices}
        stored = tuple(original(owner).shape)
        total = self.get_out_channels(owner) if out_channels else self.get_in_channels(owner)
        links, bias_links = detach(owner), detach(owner, "bias") if original(owner, "bias") is not None else []
        keep = complement(idxs, total)
        self._keep(owner, "weight", keep, self._axis(out_channels=out_channels))
        if out_channels and owner.bias is not None:
            self._keep(owner, "bias", keep, 0)
            bias_links = [_shrunk(link, (total,), keep, keep) for link in bias_links]
        for name in ("out_features", "nf") if out_channels else ("in_features", "nx"):
            if hasattr(owner, name):
                setattr(owner, name, len(keep))
        for link in links:
            if link.place not in names:  # of the whole of a fused weight, as adapters of other tools are
                whole = stored[::-1] if link.place.transposed else stored
                upright = link.place.transposed == self.layer.row.transposed  # (out, in)
                kept = _kept_of(whole, None, keep, out_channels=out_channels == upright)
                cut = _shrunk(link, whole, *kept)
                cut.place = link.place
                attach(owner, cut)
                continue
            rows, columns = _kept_of(shapes[link.place], link.place.rows, keep, out_channels=out_channels)
            # the position of a part of a fused weight has changed: the anatomy reads it again
            self.layer.matrix(names[link.place]).attach(_shrunk(link, shapes[link.place], rows, columns))
        for link in bias_links:
            attach(owner, link, "bias")
        return owner

    def _keep(self, owner: nn.Module, name: str, keep: Tensor, axis: int) -> None:
        before = getattr(owner, name)
        after = self._prune_parameter_and_grad(before, keep.tolist(), axis)
        # torch-pruning's new parameter always requires gradients
        setattr(owner, name, nn.Parameter(after.detach(), requires_grad=before.requires_grad))


def _kept_of(
    shape: tuple[int, int], place: tuple[int, int] | None, keep: Tensor, *, out_channels: bool
) -> tuple[Tensor, Tensor]:
    """Rows and columns left of a matrix (out, in), output rows `place` (None: all) of a weight, if `keep` of it is left."""
    if not out_channels:
        return torch.arange(shape[0]), keep
    start, stop = place or (0, shape[0])
    return keep[(keep >= start) & (keep < stop)] - start, torch.arange(shape[1])


def _shrunk(link: nn.Module, shape: tuple[int, ...], rows: Tensor, columns: Tensor) -> nn.Module:
    cut = link.cut(shape, rows, columns)
    # either all tensors of a link are trained, or none
    return cut.requires_grad_(any(parameter.requires_grad for parameter in link.parameters()))


def group_of(layer: Layer, structure: str, units: Sequence[int]) -> Group:
    """The torch-pruning Group that removes `units` (indices among the current ones) of one structure of a block.

    Its first item is the root: rows of query (cross_query, ffn_in). It is not part of a graph: `prune(record_history=False)`.
    """
    span, gone = STRUCTURES[structure], torch.tensor(units)
    owners: dict[nn.Module, list[Matrix]] = {}
    for name in (*span.rows, span.columns):
        if name in layer.parts:
            owners.setdefault(layer.linear(name), []).append(layer.matrix(name))
    group, root = Group(), None
    for owner, matrices in owners.items():
        pruner, out_channels = ChainedLinearPruner(layer, matrices), matrices[0].name != span.columns
        # torch-pruning sets the dimension on the handler's object, so this must be a bound method
        handler = pruner.prune_out_channels if out_channels else pruner.prune_in_channels
        node = Node(owner, None, matrices[0].path)
        root = root or (handler, node)
        group.add_dep(Dependency(root[0], handler, root[1], node), _channels(layer, matrices, gone, out_channels=out_channels))
    return group


def _channels(layer: Layer, matrices: Sequence[Matrix], units: Tensor, *, out_channels: bool) -> list[int]:
    """Indices of units in the weight that holds `matrices`: its rows (`out_channels`), or its columns."""
    starts = [matrix.place.rows[0] if out_channels and matrix.place.rows else 0 for matrix in matrices]
    return sorted(
        start + channel
        for start, matrix in zip(starts, matrices, strict=True)
        for channel in layer.spread(matrix.name, units).tolist()
    )


def complement(gone: Sequence[int], total: int) -> Tensor:
    """Sorted indices of 0..total-1 that are not in `gone`."""
    keep = torch.ones(total, dtype=torch.bool)
    keep[list(gone)] = False
    return keep.nonzero().flatten()
