"""Comparison of two delta files, without their base: what each changes, by how much, and how much they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.deltas.links import Change, Delta
from compressor.storage.changes import rebuild, select, shared_of
from compressor.storage.delta_file import DeltaFile
from compressor.storage.layout import SECTIONS


@dataclass(frozen=True)
class Comparison:
    """Comparison of one matrix (or inserted module) in both files; None where a figure is undefined.

    `jaccard` is |Ω ∩ Ω'| / |Ω ∪ Ω'| of the supports, or of the masks' ones if both mask a prototype of the same shapes.
    """

    place: str
    kinds: tuple[str, str]
    """Kind of change in each file, `-` if it does not change the matrix."""
    norms: tuple[float, float]
    """Frobenius norm of ΔW; for an inserted module, of its tensors."""
    cosine: float | None
    jaccard: float | None
    reason: str = ""
    """Why there is no cosine; empty if there is one."""


Pieces = list[Tensor | tuple[Tensor, Tensor]]

BASES_APART = "of different bases"
PRUNED_APART = "pruned in two ways (or one of them not at all), so their entries are not of the same units"
SIZED_APART = "of other sizes"
UNCHANGED = "{} changes nothing there"
DIVIDED_APART = "one changes parts of a fused weight, the other all of it"
TURNED_APART = "one has it transposed: a fully tuned Conv1D weight in a file of an earlier version"


def _pieces(changes: list[Change]) -> Pieces:
    """Each change as a flat tensor, or as (indices, values); empty where it is no part of what tuning changed."""
    nothing = torch.empty(0, dtype=torch.int64), torch.empty(0)
    with torch.no_grad():
        entries = [change.entries() if change.tuned else nothing for change in changes]
    return [values if places is None else (places, values) for places, values in entries]


def _effects(delta: DeltaFile) -> dict[str, list[Change]]:
    """The changes of every matrix (parts of a fused weight separately) or inserted module."""
    changes, result = delta.changes, {}
    prototypes = shared_of(changes, delta.tensors)
    for section in SECTIONS:
        for path, records in changes[section].items():
            for number, settings in enumerate(records):
                rows, second = settings.get("rows"), section == "inserts" and number
                place = path + (f"[{rows[0]}:{rows[1]}]" if rows else "") + (f"#{number + 1}" if second else "")
                change = rebuild(settings, select(delta.tensors, f"{section}|{path}|{number}|"), prototypes)
                result.setdefault(place, []).append(change)
    return result


def compare_deltas(first: DeltaFile, second: DeltaFile) -> list[Comparison]:
    """Compare everything that either of two files changes, in the order of the first, then of the second."""
    mine, others = _effects(first), _effects(second)
    alike, forms = first.kept == second.kept, (_forms(mine), _forms(others))
    rows = []
    for place in {**mine, **others}:
        a, b = (side.get(_path(place)) for side in forms)
        divided = a is not None and b is not None and a != b
        # entries of other matrices, or of other units of them, are not the same entries
        reasons = {BASES_APART: first.base_sha256 != second.base_sha256, PRUNED_APART: not alike, DIVIDED_APART: divided}
        apart = next((reason for reason, holds in reasons.items() if holds), "")
        rows.append(_compare(place, mine.get(place, []), others.get(place, []), apart))
    return rows


def _path(place: str) -> str:
    """The path of the whole weight of which a place may be a part."""
    return place.partition("[")[0]


def _tunes(change: Change) -> bool:
    return change.tuned and not change.masks


def _forms(effects: Mapping[str, list[Change]]) -> dict[str, set[bool]]:
    """Path of every weight that tuning changed -> whether in parts, as a whole, or both."""
    forms: dict[str, set[bool]] = {}
    for place, changes in effects.items():
        if any(map(_tunes, changes)):
            forms.setdefault(_path(place), set()).add("[" in place)
    return forms


def _compare(place: str, mine: list[Change], other: list[Change], apart: str) -> Comparison:
    """Compare one place; `apart` is a reason against a cosine that is known beforehand."""
    pieces = _together(_pieces(mine), _pieces(other))
    size = max(_size(piece) for side in pieces for piece in side)
    a, b = _sum(pieces[0], size), _sum(pieces[1], size)
    norms = float(a.norm()), float(b.norm())
    kinds = tuple("+".join(change.kind for change in changes) or "-" for changes in (mine, other))
    if not apart and len({len(piece) for side in pieces for piece in side if not isinstance(piece, tuple)}) > 1:
        apart = SIZED_APART  # inserted modules of different widths
    if not apart and len({link.place.transposed for link in (*mine, *other) if isinstance(link, Delta) and _tunes(link)}) > 1:
        apart = TURNED_APART
    if apart:
        return Comparison(place, kinds, norms, None, None, apart)
    jaccard = _jaccard(_support_of(mine), _support_of(other))
    if not all(norms):
        still = " and ".join(name for name, norm in zip("AB", norms, strict=True) if not norm)
        return Comparison(place, kinds, norms, None, jaccard, UNCHANGED.format(still))
    return Comparison(place, kinds, norms, float(a @ b) / (norms[0] * norms[1]), jaccard)


def _together(mine: Pieces, other: Pieces) -> tuple[Pieces, Pieces]:
    """Renumber indices without gaps if every change is sparse, so that memory does not depend on the largest index."""
    places = [piece[0] for piece in (*mine, *other) if isinstance(piece, tuple)]
    if len(places) < len(mine) + len(other):
        return mine, other
    distinct = torch.cat([indices.long() for indices in places]).unique()
    return tuple([(torch.searchsorted(distinct, at.long()), values) for at, values in pieces] for pieces in (mine, other))


def _size(piece: Tensor | tuple[Tensor, Tensor]) -> int:
    """Length of a change as a flat tensor; a sparse change ends with its last index."""
    if isinstance(piece, tuple):
        return int(piece[0][-1]) + 1 if len(piece[0]) else 0
    return len(piece)


def _sum(pieces: list[Tensor | tuple[Tensor, Tensor]], size: int) -> Tensor:
    """ΔW of a chain, flat, float64, zero-padded to `size`."""
    vector = torch.zeros(size, dtype=torch.float64)
    for piece in pieces:
        if isinstance(piece, tuple):
            vector.index_add_(0, piece[0], piece[1].double())
        else:
            vector[: len(piece)] += piece
    return vector


Support = tuple[tuple, Tensor]
"""What the indices of a support count, and these: flat, unique."""


def _support_of(changes: list[Change]) -> Support | None:
    """The joined support of all changes that have one; None where none has, or not all index the same: the matrix, or the
    masked tensors of one prototype."""
    limited = [change for change in changes if change.support() is not None]
    spaces = {(change.prototype_name, _masked(change)) for change in limited}
    if len(spaces) != 1:
        return None
    ((_, masked),) = spaces
    return masked, torch.cat([change.support() for change in limited]).unique()


def _masked(change: Change) -> tuple:
    """(name, shape) of every tensor that its masks cover; empty without masks, where indices are of the matrix."""
    tensors = change.to_tensors()
    return tuple((name, tensor.shape) for name, tensor in tensors.items() if tensor.dtype == torch.bool)


def _jaccard(mine: Support | None, other: Support | None) -> float | None:
    if mine is None or other is None or mine[0] != other[0]:
        return None
    a, b = mine[1], other[1]
    both = int(torch.isin(a, b).sum())
    union = len(a) + len(b) - both
    return both / union if union else None
