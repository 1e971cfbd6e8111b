"""A live model under changing deltas: which base it stands on, a delta file put on it in place of another, another task head.

`apply` changes a model in memory, so that one base can serve many tasks; `load` also takes a folder or a hub id.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor, nn

from compressor.compression import Origin, compression_of
from compressor.deltas.inserts import inserts_of, take_out
from compressor.deltas.links import chains, detach, plain_name
from compressor.errors import UserError
from compressor.models.build import DRAWN_HEADS, GENERATIVE, auto_class_of, build, head_names, name_outputs
from compressor.models.reference import Reference, resolve
from compressor.pruning.surgery import kept_of, restore_kept
from compressor.storage.changes import match_type, restore
from compressor.storage.delta_file import DAMAGED, DeltaFile, buffer_of, read
from compressor.storage.task_files import SHARED
from compressor.tasks.task_kind import set_problem_type


def remember(model: nn.Module, reference: str, sha256: str) -> nn.Module:
    """Record on `model`, whose base weights are unchanged, which base it was built from. Returns the model."""
    compression_of(model).origin = Origin(reference, sha256, _base_parameters(model))
    return model


def _base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter of the pretrained base under its plain name, whatever is attached to it."""
    plain = {plain_name(name): parameter for name, parameter in model.named_parameters()}
    return {name: parameter for name, parameter in plain.items() if name and name not in head_names(model)}


def origin_of(model: nn.Module) -> Origin:
    """The base of a live model. Raises UserError E311 where it is unknown, or its weights have been replaced."""

    origin, fix = compression_of(model).origin, "Give the base's folder, or a model of compressor.load"
    if origin is None:
        raise UserError("E311", "the live model does not say which base it was built from", fix)
    now = _base_parameters(model)
    same = origin.parameters.keys() == now.keys() and all(origin.parameters[name]() is now[name] for name in now)
    if compression_of(model).weights_moved or not same:
        raise UserError("E311", "the live model was merged, copied or fully tuned: its base is gone", fix)
    return origin


def strip(model: nn.Module) -> None:
    """Remove every delta and every inserted module, in place. The base is left bit for bit; the task head stays."""
    for _, owner, name in list(chains(model)):
        detach(owner, name)
    for owner in [module for module in model.modules() if inserts_of(module)]:
        take_out(model, owner)


def check_head(model: nn.Module, head: dict[str, Tensor] | None, label_names: Sequence[str]) -> None:
    """Raises UserError E311 where `head` does not fit the model (other names, or other sizes except the number of classes),
    or where it is None and the model's head is for other labels, or the base's own head should answer and is gone.
    """
    fix = "Load it on its own base's folder"
    if head is None:
        compression = compression_of(model)
        if compression.head_set and list(label_names) == compression.own_labels:
            raise UserError("E311", "the delta has no task head, and another task's has replaced the base's own", fix)
        names = [model.config.id2label[number] for number in range(model.config.num_labels)]
        if list(label_names) != names:
            what = f"the delta has no task head and labels {_first_of(label_names)}, the model's head is for {_first_of(names)}"
            raise UserError("E311", what, "Write the delta with its head")
        return
    if head.keys() != head_names(model):
        odd = sorted(head.keys() ^ head_names(model))[:3]
        raise UserError("E311", f"another task head: {', '.join(odd)}", fix)
    # a hidden layer of the head may be as wide as there are classes
    last = next((name for name in reversed([*dict(model.named_parameters())]) if name in head), "").rpartition(".")[0]
    for name, tensor in head.items():
        shape = model.get_parameter(name).shape
        expected = (len(label_names), *shape[1:]) if name.rpartition(".")[0] == last else tuple(shape)
        if tuple(tensor.shape) != expected:
            raise UserError("E311", f"{name} is {tuple(tensor.shape)}, the model wants {tuple(expected)}", fix)


def _first_of(names: Sequence[str]) -> str:
    """The first few of many names, separated by commas."""
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def set_head(model: nn.Module, head: dict[str, Tensor], label_names: Sequence[str]) -> None:
    """Replace the task head of `model`, also by one for another number of classes. Call `check_head` first."""
    compression_of(model).head_set = True
    for name, tensor in head.items():
        path, _, leaf = name.rpartition(".")
        owner, parameter = model.get_submodule(path), model.get_parameter(name)
        setattr(owner, leaf, nn.Parameter(tensor.to(parameter), requires_grad=parameter.requires_grad))
        if isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape
    name_outputs(model.config, label_names)
    if hasattr(model, "num_labels"):
        model.num_labels = len(label_names)


def apply(model: nn.Module, path: Path | str) -> nn.Module:
    """Apply the task in `path` to a live model, replacing its current task; returns the model, in eval mode.

    The base is not changed: without the delta its weights are bit-identical. Everything is checked before anything is changed.
    Raises UserError E310, E316 (file), E306 (another base), E311 (base gone, other shapes, another head).
    """
    delta = read(path)
    _check_task(delta, path)
    if origin_of(model).sha256 != delta.base_sha256:
        raise _other_base(origin_of(model).reference, delta)
    if kept_of(model) != delta.kept:
        what = "the live model has other heads and neurons than the delta was tuned on"
        raise UserError("E311", what, _on_its_base(delta), str(path))
    _check_type(model, delta, path)
    if delta.head is not None and auto_class_of(model) != delta.auto_class:
        what = f"the live model is of {auto_class_of(model)}, the delta was tuned in one of {delta.auto_class}"
        raise UserError("E311", what, _on_its_base(delta), str(path))
    check_head(model, delta.head, delta.labels)
    strip(model)
    return _put_on(model, delta, path)


def _check_task(delta: DeltaFile, path: Path | str) -> None:
    # a task that generates has no labels either, but an empty head; files of earlier versions do not name their tasks
    unnamed = not delta.labels and (delta.auto_class not in GENERATIVE or (delta.head is None and Path(path).name == SHARED))
    if delta.tasks or unnamed:
        raise UserError(
            "E316",
            "this is the file that the tasks share, not one of the tasks",
            "Give one of the task files beside it",
            str(path),
        )


def _on_its_base(delta: DeltaFile) -> str:
    """The fix where a delta does not fit the live model."""
    return f"Load it on the base's folder: load(base='{delta.base}', delta=...)"


def _other_base(reference: str, delta: DeltaFile) -> UserError:
    what = f"base '{reference}' is not the one this was tuned on ('{delta.base}', sha256 {delta.base_sha256[:12]})"
    return UserError("E306", what, "Give the same base: load(base=..., delta=...)")


def _check_type(model: nn.Module, delta: DeltaFile, path: Path | str) -> None:
    tensors, own = delta.tensors.values(), str(model.dtype).removeprefix("torch.")
    types = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.is_floating_point()}
    if not types <= {own}:
        what = f"the delta is {' and '.join(sorted(types))}, the model {own}"
        raise UserError("E311", what, _on_its_base(delta), str(path))


def _put_on(model: nn.Module, delta: DeltaFile, path: Path | str) -> nn.Module:
    """Restore the changes and the head on a base without changes; if they do not fit, the base stays without changes."""
    tensors = {name: t if buffer_of(t) == "masks" else t.to(model.device) for name, t in delta.tensors.items()}
    try:
        restore(model, delta.changes, tensors)
    except DAMAGED as error:
        strip(model)
        raise _misfit(error, path) from None
    if delta.head is not None:
        set_head(model, delta.head, delta.labels)
    # without a head too: the live model, or the base, may have been of another kind
    name_outputs(model.config, delta.labels)
    set_problem_type(model.config, delta.kind)
    return model.eval()


def _misfit(error: Exception, path: Path | str) -> UserError:
    return UserError("E311", f"the changes do not fit the model ({error!s:.200})", "Create the delta again", str(path))


def load(base: nn.Module | Path | str | None, path: Path | str) -> nn.Module:
    """The model of a delta file on `base`: a live model, a folder, a hub id, or None for the reference in the file.

    Raises UserError E310, E316, E306, E311 and, for a folder or hub id, E303 and E304. TypeError for any other base.
    """
    if isinstance(base, nn.Module):
        return apply(base, path)
    return load_on(read(path), base, path)


def load_on(delta: DeltaFile, base: Path | str | None, path: Path | str, *, answers: bool = True) -> nn.Module:
    """The model of a delta that is already read, built from a folder or a hub id, in the type of the delta's numbers. Raises as
    `load`; with `answers` false it may be without a task head, for its weights alone."""
    _check_task(delta, path)
    resolved = base_of(delta, base, path)
    model = match_type(build(resolved.folder, delta.labels, auto_class=delta.auto_class), delta.tensors)
    _check_type(model, delta, path)
    try:
        restore_kept(model, delta.kept)
    except DAMAGED as error:
        raise _misfit(error, path) from None
    check_head(model, delta.head, delta.labels)
    if answers and delta.head is None and compression_of(model).head_origin in DRAWN_HEADS:
        what = "the delta has no task head, and the base none for these labels: its answers would be random"
        raise UserError("E311", what, "Write the delta with its head, or apply it to the live model that has one", str(path))
    return _put_on(remember(model, resolved.reference, resolved.sha256), delta, path)


def base_of(delta: DeltaFile, base: Path | str | None, path: Path | str) -> Reference:
    """Resolve `base`, or else the base that the file at `path` refers to. Raises UserError E303, E306."""
    try:
        resolved = resolve(str(base or delta.base))
    except UserError as error:
        if base or error.code != "E303" or delta.base.startswith("package:"):  # a package's says how to install it
            raise
        what = f"the base that it names is not here: {error.what}"
        raise UserError("E303", what, "Give the base: --base, or load(base=...)", str(path)) from error
    if resolved.sha256 != delta.base_sha256:
        raise _other_base(resolved.reference, delta)
    return resolved
