"""A tuned task in one small file: every change of a base, and the task head, without the base (docs/deltas.md).

`write` and `read` are the format; `apply` puts a file on a live model in place of what it carries, so that one base in memory
serves many tasks; `load` begins with a folder or a hub id.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.compression import compression_of
from compressor.errors import UserError
from compressor.models.hub import AUTO_CLASSES, GENERATES, SEQUENCES, auto_class_facts, auto_class_of
from compressor.storage.bits import Stored
from compressor.storage.layout import accounts, compact, expand, slots

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compressor.compression import Kept
    from compressor.models.hub import Reference

FORMAT, READABLE = 3, (1, 2, 3)
"""Format 1 knows no masks over weights, format 2 no heads on tokens."""
KEY = "compress_delta"
"""The only metadata key, because safetensors writes several in any order; its value is the description."""

HEADER_LIMIT = 4096
"""Bytes, safetensors' length field included. A longer description becomes a tensor of its own."""


@dataclass(frozen=True)
class DeltaFile:
    """What a delta file holds, ready for `storage.restore(model, changes, tensors)`."""

    base: str
    """The reference that the user wrote; `base_sha256` tells whether another one is the same model."""
    base_sha256: str
    labels: list[str]
    kept: Kept
    layout: dict[str, Any]
    """The changes as the file describes them, see layout.py."""
    own: dict[str, Tensor]
    """The tensors of the changes that lie in this file."""
    head: dict[str, Tensor] | None
    """None where it was left out; empty where all of the head is the base's."""
    sha256: str
    """Over what is written in the file and every tensor."""
    auto_class: str = SEQUENCES
    """Of the model that it was tuned in."""
    shared: DeltaFile | None = None
    """The file beside it that holds what this task shares with others."""

    @property
    def changes(self) -> dict[str, Any]:
        """All changes of the task, as `storage.describe` gives them."""
        own = expand(self.layout)
        return own if self.shared is None else {**self.shared.changes, "tasks": own["tasks"]}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Their tensors, those of the shared file too."""
        return self.own if self.shared is None else {**self.shared.own, **self.own}


def write(
    model: nn.Module, path: Path | str, *, base: str, base_sha256: str, label_names: Sequence[str], head: bool = True
) -> None:
    """Write every change of `model`, and its task head, to `path`; whole or not at all.

    Raises UserError E312 where a delta cannot hold what was done to the model.
    """
    from compressor.models.hub import head_names
    from compressor.pruning.surgery import kept_of

    changes, tensors = changes_of(model)
    heads = {name: model.get_parameter(name).detach() for name in sorted(head_names(model))} if head else None
    facts = {"base": base, "base_sha256": base_sha256, "labels": list(label_names), **auto_class_facts(model)}
    save(path, facts, changes, tensors, heads, kept=kept_of(model))


def save(
    path: Path | str,
    facts: Mapping[str, Any],
    changes: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    heads: Mapping[str, Tensor] | None,
    *,
    kept: Kept | None = None,
) -> str:
    """Write one file of `facts` (base, base_sha256, labels, and whatever else the description says) and changes as
    `storage.describe` gives them; whole or not at all. Returns its checksum, `DeltaFile.sha256`.
    """
    from safetensors.torch import save as serialize

    from compressor.storage.changes import pack_kept

    layout = compact(changes, {name: (_buffer(t), tuple(t.shape)) for name, t in tensors.items() if _buffer(t) != "masks"})
    kept, kept_bits = pack_kept(kept or {})
    flat = {**_flatten(layout, tensors), **kept_bits}
    if heads:
        flat["head"] = _concatenate(heads.values())
    description = {
        "format": FORMAT,
        **facts,
        "kept": kept,
        "changes": layout,
        "head": None if heads is None else {name: list(tensor.shape) for name, tensor in heads.items()},
    }
    sha256 = _digest(description, flat)
    text = _text({**description, "sha256": sha256})
    data = serialize(flat, {KEY: text})
    if header_size(data) > HEADER_LIMIT:
        data = serialize({**flat, "description": _bytes(text)}, {KEY: ""})
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(data)
    beside.replace(path)
    return sha256


def changes_of(model: nn.Module) -> tuple[dict, dict[str, Tensor]]:
    """`storage.describe`, or UserError E312 where a delta cannot hold what was done to the model."""
    from compressor.storage.changes import describe

    mend = "Store its state, or merge it to a checkpoint"
    if compression_of(model).weights_moved:
        raise UserError("E312", "full tuning moved the base's own weights: that is no delta", mend)
    changes, tensors = describe(model)
    if not tensors:
        raise UserError("E312", "nothing was added to this model (or it was merged)", "Tune it first")
    if len({tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}) > 1:
        raise UserError("E312", "the changes have several floating types", "Bring the model to one")
    return changes, tensors


def _buffer(tensor: Tensor) -> str:
    if tensor.is_floating_point():
        return "values"
    return "masks" if tensor.element_size() == 1 else "indices"


def _flatten(layout: Mapping, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors one behind another, by buffer; masks bit by bit, so that only the last byte is not full."""
    import torch

    from compressor.storage.changes import pack, unpack

    parts: dict[str, list[Tensor]] = {}
    for slot in slots(layout):
        tensor = tensors[slot.name]
        parts.setdefault(slot.buffer, []).append(unpack(tensor, slot.shape).flatten() if slot.buffer == "masks" else tensor)
    flat = {buffer: _concatenate(pieces) for buffer, pieces in parts.items()}
    return {buffer: pack(whole) if whole.dtype == torch.bool else whole for buffer, whole in flat.items()}


def _concatenate(pieces) -> Tensor:
    import torch

    return torch.cat([piece.flatten().cpu() for piece in pieces])


def _text(description: Mapping) -> str:
    return json.dumps(description, separators=(",", ":"))


def _bytes(text: str) -> Tensor:
    import torch

    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _digest(description: Mapping, flat: Mapping[str, Tensor]) -> str:
    """sha256 over the description and every tensor but the one that may hold it."""
    import torch

    whole = hashlib.sha256(_text(description).encode())
    for name in sorted(flat):
        whole.update(name.encode())
        whole.update(flat[name].contiguous().view(torch.uint8).numpy())
    return whole.hexdigest()


def header_size(data: bytes) -> int:
    """Bytes before the first tensor of a safetensors file, of which `data` holds at least the first eight."""
    return 8 + int.from_bytes(data[:8], "little")


def read(path: Path | str) -> DeltaFile:
    """The delta in `path`, whole and checked: every byte is described, and the checksum holds.

    Raises UserError E310 for a missing, damaged, cut or foreign file, and for another format; E316 where what the task
    shares with others is not beside it.
    """
    return _read(path, alone=False)


DAMAGED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError, MemoryError)
"""What code that trusts a description raises where it must not; a JSON nested too deeply is a RuntimeError, too."""


def damaged(path: Path | str) -> UserError:
    """The error of a file whose description does not hold."""
    return UserError("E310", "its description and its tensors do not fit together", "Make it again", str(path))


def _read(path: Path | str, alone: bool) -> DeltaFile:
    """`read`; a file that is shared stands `alone`: it names no other."""
    from safetensors import SafetensorError, safe_open

    place = str(path)
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise UserError("E310", "not a regular file", "Name the .safetensors file", place)
    try:
        with safe_open(path, "pt") as stream:
            metadata = stream.metadata() or {}
            flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except OSError as error:
        raise UserError("E310", f"cannot be read ({error.strerror or 'no such file'})", "Check the path", place) from None
    except (SafetensorError, *DAMAGED) as error:
        raise UserError("E310", f"damaged or no delta file ({error})", "Make it again, or copy it again", place) from None
    if KEY not in metadata:
        raise UserError("E310", "a safetensors file, but no delta", "`compress delta convert` makes one", place)
    try:
        return _parse(metadata[KEY], flat, place, alone)
    except DAMAGED:
        raise damaged(place) from None


def _parse(text: str, flat: dict[str, Tensor], place: str, alone: bool) -> DeltaFile:
    from compressor.storage.changes import unpack_kept
    from compressor.storage.description import check

    if not text:
        text = bytes(flat.pop("description").numpy()).decode()
    description = json.loads(text)
    if description["format"] not in READABLE:
        what = f"format {description['format']!r:.60}, this version reads {FORMAT}"
        raise UserError("E310", what, "Make it again with this version", place)
    sha256 = description.pop("sha256")
    if sha256 != _digest(description, flat):
        raise UserError("E310", "the checksum does not hold", "Copy it again, or make it again", place)
    auto_class = description.get("auto_class", SEQUENCES)
    if auto_class not in AUTO_CLASSES:
        raise UserError("E310", f"the Auto class {auto_class!r:.60}", f"Here it is {' or '.join(AUTO_CLASSES)}", place)
    check(description)
    if alone and "shared" in description:
        raise UserError("E310", "what tasks share names another file that it shares", "Make the task files again", place)
    head = description["head"]
    kept = unpack_kept(description["kept"], flat.pop("kept", None))
    if head:
        head = _cut(flat.pop("head"), head)
    return DeltaFile(
        base=description["base"],
        base_sha256=description["base_sha256"],
        labels=description["labels"],
        kept=kept,
        layout=description["changes"],
        own=_unflatten(description["changes"], flat),
        head=head,
        sha256=sha256,
        auto_class=auto_class,
        shared=_read_shared(description["shared"], place) if "shared" in description else None,
    )


def _read_shared(reference: Mapping[str, str], place: str) -> DeltaFile:
    """The file that a task file names, from its own folder. Raises UserError E316 where it is missing or another one."""
    path = Path(place).with_name(Path(reference["file"]).name)
    mend = "Keep the task files of one training in one folder, with the file they share"
    if not path.is_file():
        raise UserError("E316", f"the file it shares with other tasks, '{path.name}', is not beside it", mend, place)
    shared = _read(path, alone=True)
    if shared.sha256 != reference["sha256"]:
        raise UserError("E316", f"'{path.name}' beside it is of another training", mend, place)
    return shared


def _cut(whole: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """`_concatenate` reversed. Raises RuntimeError where the sizes do not add up."""
    pieces = whole.split([math.prod(shape) for shape in shapes.values()])
    return {name: piece.view(*shape).clone() for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _unflatten(layout: Mapping, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """`_flatten` reversed: tensors by their names in `storage.describe`."""
    from compressor.storage.changes import pack, unpack

    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for slot in slots(layout):
        shapes.setdefault(slot.buffer, {})[slot.name] = slot.shape
    if shapes.keys() != flat.keys():
        raise ValueError("other buffers than described")
    tensors: dict[str, Tensor] = {}
    for buffer, whole in flat.items():
        if buffer == "masks":
            count = sum(math.prod(shape) for shape in shapes[buffer].values())
            whole = unpack(whole, (count,))
        pieces = _cut(whole, shapes[buffer])
        tensors |= {name: pack(piece) for name, piece in pieces.items()} if buffer == "masks" else pieces
    return tensors


def stored(delta: DeltaFile) -> Stored:
    """What the file holds beside head and header, in the papers' units (ProPETL section 4.3)."""
    held = list(accounts(delta.layout))
    learned = sum(row.mask_entries for row in held if row.kind != "mask")
    pruned = sum(row.mask_entries for row in held if row.kind == "mask")
    width = max((8 * tensor.element_size() for tensor in delta.own.values() if tensor.is_floating_point()), default=32)
    return Stored(sum(row.scalars for row in held), sum(row.indices for row in held), learned, width, pruned)


def apply(model: nn.Module, path: Path | str) -> nn.Module:
    """Put the task in `path` on a live model in place of any that it carries; returns the model, in eval mode.

    The base is not touched: without the delta its weights are bit for bit what they were. Everything is checked before anything
    is changed. Raises UserError E310, E316 (file), E306 (another base), E311 (base gone, other shapes, another head).
    """
    from compressor.pruning.surgery import kept_of
    from compressor.storage.live import check_head, origin_of, strip

    delta = read(path)
    _check_task(delta, path)
    if origin_of(model).sha256 != delta.base_sha256:
        raise _other_base(origin_of(model).reference, delta)
    if kept_of(model) != delta.kept:
        mend = f"Load it on the base's folder: load(base='{delta.base}', delta=...)"
        raise UserError("E311", "the live model has other heads and neurons than the delta was tuned on", mend, str(path))
    _check_type(model, delta, path)
    if delta.head is not None and auto_class_of(model) != delta.auto_class:
        what = f"the live model is of {auto_class_of(model)}, the delta was tuned in one of {delta.auto_class}"
        raise UserError("E311", what, f"Load it on the base's folder: load(base='{delta.base}', delta=...)", str(path))
    check_head(model, delta.head, delta.labels)
    strip(model)
    return _put_on(model, delta, path)


def _check_task(delta: DeltaFile, path: Path | str) -> None:
    if not delta.labels and delta.auto_class != GENERATES:
        raise UserError("E316", "holds what tasks share, and no task", "Give one of the task files beside it", str(path))


def _other_base(reference: str, delta: DeltaFile) -> UserError:
    what = f"base '{reference}' is not the one this was tuned on ('{delta.base}', sha256 {delta.base_sha256[:12]})"
    return UserError("E306", what, "Give the same base: load(base=..., delta=...)")


def _check_type(model: nn.Module, delta: DeltaFile, path: Path | str) -> None:
    kinds = {tensor.dtype for tensor in delta.tensors.values() if tensor.is_floating_point()}
    if not kinds <= {model.dtype}:
        what = f"the delta is {str(*kinds).removeprefix('torch.')}, the live model {str(model.dtype).removeprefix('torch.')}"
        raise UserError("E311", what, "Bring the model to the delta's type", str(path))


def _put_on(model: nn.Module, delta: DeltaFile, path: Path | str) -> nn.Module:
    """Restore the changes and the head on a bare base; what does not fit leaves it bare."""
    from compressor.storage.changes import restore
    from compressor.storage.live import set_head, strip

    tensors = {name: t if _buffer(t) == "masks" else t.to(model.device) for name, t in delta.tensors.items()}
    try:
        restore(model, delta.changes, tensors)
    except DAMAGED as error:
        strip(model)
        raise _misfit(error, path) from None
    if delta.head is not None:
        set_head(model, delta.head, delta.labels)
    return model.eval()


def _misfit(error: Exception, path: Path | str) -> UserError:
    return UserError("E311", f"the changes do not fit the model ({error!s:.200})", "Make the delta again", str(path))


def load(base: nn.Module | Path | str | None, path: Path | str) -> nn.Module:
    """The model of a delta file on `base`: a live model, a folder, a hub id, or None for the reference in the file.

    Raises UserError E310, E316, E306, E311 and, for a folder or hub id, E303 and E304.
    """
    from torch import nn

    if isinstance(base, nn.Module):
        return apply(base, path)
    return load_on(read(path), base, path)


def load_on(delta: DeltaFile, base: Path | str | None, path: Path | str) -> nn.Module:
    """The model of a delta that was read, built from a folder or a hub id. Raises as `load`."""
    from compressor.models.hub import build
    from compressor.pruning.surgery import restore_kept
    from compressor.storage.live import check_head, remember

    _check_task(delta, path)
    found = base_of(delta, base)
    model = build(found.folder, delta.labels, auto_class=delta.auto_class)
    try:
        restore_kept(model, delta.kept)
    except DAMAGED as error:
        raise _misfit(error, path) from None
    check_head(model, delta.head, delta.labels)
    return _put_on(remember(model, found.reference, found.sha256), delta, path)


def base_of(delta: DeltaFile, base: Path | str | None) -> Reference:
    """The base that `base`, or else the file, refers to. Raises UserError E303, E306."""
    from compressor.models.hub import resolve

    found = resolve(str(base or delta.base))
    if found.sha256 != delta.base_sha256:
        raise _other_base(found.reference, delta)
    return found
