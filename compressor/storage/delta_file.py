"""A tuned task in one small file: every change of a base, and the task head, without the base (see docs/deltas.md).

`write` and `read` implement the format; `compressor.storage.live` attaches a file to a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch import Tensor, nn

from compressor.compression import Kept, compression_of
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.registry import KINDS
from compressor.errors import UserError
from compressor.models.build import AUTO_CLASSES, SEQUENCES, class_facts, head_names, require_labels
from compressor.models.files.damage import door, fix_of_format
from compressor.models.files.weight_files import DELTA as KEY
from compressor.models.files.weight_files import not_finite
from compressor.models.row_file import use_stored_row
from compressor.pruning.surgery import kept_of
from compressor.storage.bits import StoredBits
from compressor.storage.changes import describe_changes, pack, pack_kept, unpack, unpack_kept
from compressor.storage.description import check
from compressor.storage.layout import accounts, compact, expand, slots

FORMAT, READABLE = 3, (1, 2, 3)
"""Current format, and the formats that can be read. Format 1 has no masks over weights, format 2 no token-level heads."""
HEADER_LIMIT = 4096
"""Largest header in bytes, with safetensors' length field. A longer description is stored as a tensor."""


@dataclass(frozen=True)
class DeltaFile:
    """Contents of a delta file, ready for `storage.restore(model, changes, tensors)`."""

    base: str
    """The base model as the user named it; `base_sha256` identifies it."""
    base_sha256: str
    labels: list[str]
    kept: Kept
    layout: dict[str, Any]
    """The changes as the file describes them, see layout.py."""
    stored: dict[str, Tensor]
    """The tensors of the changes stored in this file."""
    head: dict[str, Tensor] | None
    """None if it was left out; empty if the head is the base's own."""
    sha256: str
    """Checksum over the description and every tensor."""
    auto_class: str = SEQUENCES
    """Auto class of the tuned model."""
    kind: str = ""
    """The kind of task, where the task head does not tell it."""
    shared: DeltaFile | None = None
    """The file in the same folder with what this task shares with others."""
    tasks: Sequence[str] = ()
    """In such a shared file the names of the tasks; empty in one of an earlier version."""

    @property
    def changes(self) -> dict[str, Any]:
        """All changes of the task, as returned by `storage.describe`."""
        expanded = expand(self.layout)
        return expanded if self.shared is None else {**self.shared.changes, "tasks": expanded["tasks"]}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors of these changes, including those of the shared file."""
        return self.stored if self.shared is None else {**self.shared.stored, **self.stored}


def write(
    model: nn.Module,
    path: Path | str,
    *,
    base: str,
    base_sha256: str,
    label_names: Sequence[str],
    head: bool = True,
    kind: str = "",
) -> None:
    """Write every change of `model`, and its task head, to `path`, atomically. `kind` is that of the task, if its head does not
    tell it.

    Raises UserError E312 if the changes of the model cannot be stored as a delta; ValueError for labels that are not the
    model's outputs.
    """
    require_labels(model, label_names)
    changes, tensors = changes_of(model)
    heads = {name: model.get_parameter(name).detach() for name in sorted(head_names(model))} if head else None
    facts = {"base": base, "base_sha256": base_sha256, "labels": list(label_names), **class_facts(model)}
    facts |= {"kind": kind} if kind else {}
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
    """Write `facts` (base, base_sha256, labels, and other entries of the description) and changes, as returned by
    `storage.describe`, to one file, atomically. Returns its checksum, `DeltaFile.sha256`.

    Raises UserError E312 for more than a description can hold, such as too many labels: `read` would refuse the file.
    """
    layout = compact(changes, {name: (buffer_of(t), tuple(t.shape)) for name, t in tensors.items() if buffer_of(t) != "masks"})
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
    _require_readable(description)
    sha256 = _digest(description, flat)
    text = _text({**description, "sha256": sha256})
    data = serialize(flat, {KEY: text})  # one metadata key: safetensors writes several in any order
    if header_size(data) > HEADER_LIMIT:
        data = serialize({**flat, "description": _bytes(text)}, {KEY: ""})
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(data)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    return sha256


def _require_readable(description: Mapping) -> None:
    """Raises UserError E312 for a description that `read` would refuse."""
    try:
        check(json.loads(_text(description)))
        return
    except ValidationError as error:
        fault = error.errors()[0]
        what = f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}"
    except ValueError as error:
        what = str(error)
    raise UserError("E312", f"a delta file cannot describe it ({what})", "Store its state, or merge it to a checkpoint")


def changes_of(model: nn.Module) -> tuple[dict, dict[str, Tensor]]:
    """`storage.describe`; raises UserError E312 where a delta file cannot represent what was done to the model."""
    fix = "Store its state, or merge it to a checkpoint"
    if compression_of(model).weights_moved:
        raise UserError("E312", "full tuning or a merge changed the base's own weights: there is no delta to store", fix)
    changes, tensors = describe_changes(model)
    if not tensors:
        raise UserError("E312", "nothing was added to this model (or it was merged)", "Tune it first")
    if len({tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}) > 1:
        raise UserError("E312", "the changes have several floating-point types", "Convert the model to one")
    return changes, tensors


def buffer_of(tensor: Tensor) -> str:
    """Which of `layout.BUFFERS` a tensor lies in."""
    if tensor.is_floating_point():
        return "values"
    return "masks" if tensor.element_size() == 1 else "indices"


def _flatten(layout: Mapping, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate the tensors by buffer; masks are packed bit by bit, so that only the last byte is padded."""
    parts: dict[str, list[Tensor]] = {}
    for slot in slots(layout):
        tensor = tensors[slot.name]
        parts.setdefault(slot.buffer, []).append(unpack(tensor, slot.shape).flatten() if slot.buffer == "masks" else tensor)
    flat = {buffer: _concatenate(pieces) for buffer, pieces in parts.items()}
    return {buffer: pack(joined) if joined.dtype == torch.bool else joined for buffer, joined in flat.items()}


def _concatenate(pieces) -> Tensor:
    return torch.cat([piece.flatten().cpu() for piece in pieces])


def _text(description: Mapping) -> str:
    return json.dumps(description, separators=(",", ":"))


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _digest(description: Mapping, flat: Mapping[str, Tensor]) -> str:
    """sha256 over the description and every tensor in `flat`."""
    digest = hashlib.sha256(_text(description).encode())
    for name in sorted(flat):
        digest.update(name.encode())
        digest.update(flat[name].contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def header_size(data: bytes) -> int:
    """Number of bytes before the first tensor of a safetensors file; `data` has at least the first eight bytes."""
    return 8 + int.from_bytes(data[:8], "little")


def read(path: Path | str) -> DeltaFile:
    """Read the delta file `path` and check it: every byte is described, and the checksum matches.

    Raises UserError E310 for a missing, damaged, truncated or foreign file, and for another format; E316 if the file shared
    with other tasks is missing.
    """
    return _read(path, alone=False)


DAMAGED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError, MemoryError)
"""Exceptions of code that reads an invalid description; JSON nested too deeply raises RuntimeError."""


def damaged(path: Path | str) -> UserError:
    """The error for a file whose description does not fit its tensors."""
    return UserError("E310", "its description and its tensors do not fit together", "Create it again", str(path))


def _read(path: Path | str, alone: bool) -> DeltaFile:
    """`read`; with `alone` for a shared file, which must not refer to another file."""
    place = str(path)
    if os.path.exists(path) and not os.path.isfile(path):  # reading a pipe would block
        raise UserError("E310", "not a regular file", "Name the .safetensors file", place)
    try:
        with safe_open(path, "pt") as stream:
            metadata = stream.metadata() or {}
            flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    except OSError as error:
        raise UserError("E310", f"cannot be read ({error.strerror or 'no such file'})", "Check the path", place) from None
    except (SafetensorError, *DAMAGED) as error:
        raise UserError("E310", f"damaged, or not a delta file ({error})", "Create it again, or copy it again", place) from None
    if KEY not in metadata:
        raise UserError("E310", "a safetensors file, but not a delta", "`compress delta convert` makes one", place)
    try:
        return _parse(metadata[KEY], flat, place, alone)
    except DAMAGED:
        raise damaged(place) from None


def _parse(text: str, flat: dict[str, Tensor], place: str, alone: bool) -> DeltaFile:
    if not text:
        text = bytes(flat.pop("description").numpy()).decode()
    description = json.loads(text)
    if description["format"] not in READABLE:
        what = f"format {description['format']!r:.60}, this version reads {FORMAT}"
        raise UserError("E310", what, fix_of_format(description["format"], FORMAT), place)
    sha256 = description.pop("sha256")
    if sha256 != _digest(description, flat):
        raise UserError("E310", "the checksum does not match", "Copy it again, or create it again", place)
    if broken := not_finite(flat):
        raise UserError("E310", f"'{broken}' has NaN or infinite numbers", "Train it again", place)
    auto_class = description.get("auto_class", SEQUENCES)
    if auto_class not in AUTO_CLASSES:
        raise UserError("E310", f"the Auto class {auto_class!r:.60}", f"Here it is {' or '.join(AUTO_CLASSES)}", place)
    check(description)
    with door("E310", "the delta", place):
        use_stored_row(description)
    if alone and "shared" in description:
        raise UserError("E310", "the file that the tasks share names another shared file", "Create the task files again", place)
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
        stored=_unflatten(description["changes"], flat),
        head=head,
        sha256=sha256,
        auto_class=auto_class,
        kind=description.get("kind", ""),
        shared=_read_shared(description["shared"], place) if "shared" in description else None,
        tasks=description.get("tasks", ()),
    )


def _read_shared(reference: Mapping[str, str], place: str) -> DeltaFile:
    """Read the shared file that a task file names, from the same folder. Raises UserError E316 if it is missing or another."""
    path = Path(place).with_name(Path(reference["file"]).name)
    fix = "Keep the task files of one training in one folder, with the file they share"
    if not path.is_file():
        raise UserError("E316", f"the file it shares with other tasks, '{path.name}', is not beside it", fix, place)
    shared = _read(path, alone=True)
    if shared.sha256 != reference["sha256"]:
        raise UserError("E316", f"'{path.name}' beside it is of another training", fix, place)
    return shared


def _cut(joined: Tensor, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Reverse of `_concatenate`. Raises RuntimeError where the sizes do not add up."""
    pieces = joined.split([math.prod(shape) for shape in shapes.values()])
    return {name: piece.view(*shape).clone() for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}


def _unflatten(layout: Mapping, flat: dict[str, Tensor]) -> dict[str, Tensor]:
    """Reverse of `_flatten`: tensors by their names in `storage.describe`."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for slot in slots(layout):
        shapes.setdefault(slot.buffer, {})[slot.name] = slot.shape
    if shapes.keys() != flat.keys():
        raise ValueError("other buffers than described")
    tensors: dict[str, Tensor] = {}
    for buffer, joined in flat.items():
        if buffer == "masks":
            count = sum(math.prod(shape) for shape in shapes[buffer].values())
            joined = unpack(joined, (count,))
        pieces = _cut(joined, shapes[buffer])
        tensors |= {name: pack(piece) for name, piece in pieces.items()} if buffer == "masks" else pieces
    return tensors


def stored(delta: DeltaFile) -> StoredBits:
    """Size of the file without head and header, in the papers' units (ProPETL section 4.3)."""
    held = list(accounts(delta.layout))
    chosen = {kind for kind, cls in KINDS.items() if issubclass(cls, Mask)}
    learned = sum(row.mask_entries for row in held if row.kind not in chosen)
    pruned = sum(row.mask_entries for row in held if row.kind in chosen)
    fixed = {kind for kind, cls in KINDS.items() if not cls.tuned}
    untrained = sum(row.scalars for row in held if row.kind in fixed)
    width = max((8 * tensor.element_size() for tensor in delta.stored.values() if tensor.is_floating_point()), default=32)
    scalars = sum(row.scalars for row in held) - untrained
    return StoredBits(scalars, sum(row.indices for row in held), learned, width, pruned, untrained)
