"""Models on disk: the compact state between stages, and the merged checkpoint that a pipeline produces.

A *state* holds what differs from the pretrained base: kept heads and neurons, deltas, the task head (and all weights
only after full tuning). A *checkpoint* holds every weight, in the shapes that are left, with transformers'
`per_layer_config` in config.json. Both are safetensors and JSON, and load strictly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig

from compressor.compression import compression_of
from compressor.deltas.links import chains, plain_name
from compressor.errors import UserError
from compressor.models import auto
from compressor.models.anatomy import row_of_model
from compressor.models.architectures import COMPRESSED
from compressor.models.build import AUTO_CLASSES, SEQUENCES, build, class_facts, head_names, require_labels, task_head
from compressor.models.files.config_file import check_config
from compressor.models.files.damage import Damage, door, fix_of_format, read_json, reading_by_library
from compressor.models.files.model_folder import CONFIG, COPIED, GENERATION, TOKENIZER_FILES, files_to_copy
from compressor.models.files.weight_files import check_finite, read_header
from compressor.models.loaded_config import plain_outputs
from compressor.models.reference import resolve
from compressor.models.row_file import row_entry, row_in, use_stored_row
from compressor.models.tied import untie
from compressor.pruning.sizes import per_layer_configs
from compressor.pruning.surgery import kept_of, restore_kept
from compressor.storage.changes import describe_changes, match_type, restore, restore_masks
from compressor.storage.live import remember
from compressor.tasks.task_kind import set_problem_type
from compressor.tensor_file import write_tensors
from compressor.text_files import from_home

STATE_FILE = "state.json"
FORMAT, READABLE = 4, (2, 3, 4)
"""Format of state.json, and the formats that can be read. Format 2 has no masks over weights, format 3 no token-level heads."""
DAMAGED = "The folder is damaged: create it again"
WEIGHTS, WITH_INSERTS, INSERTS_FILE = "model.safetensors", "model_with_inserts.safetensors", "inserts.json"


def save_state(model: nn.Module, folder: Path, *, base: str, base_sha256: str, label_names: list[str], kind: str = "") -> None:
    """Write state.json, head.safetensors, changes.safetensors, and weights.safetensors if the base weights were trained.

    `base` is the reference the user wrote; its sha256 is checked on loading. `kind` is that of the task, if its head does not
    tell it.
    """
    folder = Path(folder)
    require_labels(model, label_names)
    folder.mkdir(parents=True, exist_ok=True)
    changes, tensors = describe_changes(model)
    weights = _plain_weights(model)
    head = {name: weights.pop(name) for name in sorted(head_names(model))}
    write_tensors(head, folder / "head.safetensors")
    write_tensors(tensors, folder / "changes.safetensors")
    if compression_of(model).weights_moved:
        write_tensors(weights, folder / "weights.safetensors")
    description = {
        "format": FORMAT,
        "base": {"reference": base, "sha256": base_sha256},
        "labels": list(label_names),
        **({"kind": kind} if kind else {}),
        **class_facts(model),
        "weights_moved": compression_of(model).weights_moved,
        "kept": kept_of(model),
        "changes": changes,
    }
    (folder / STATE_FILE).write_text(json.dumps(description, indent=1, sort_keys=True) + "\n")


def _plain_weights(model: nn.Module) -> dict[str, Tensor]:
    """State dict without the changes: original weights under their plain names, tied weights once."""
    result, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in seen:  # tied to one before
            continue
        seen.add(id(tensor))
        if plain := plain_name(name):
            result[plain] = tensor.detach().contiguous()
    return result


def load_state(folder: Path, base_folder: Path, *, changes: bool = True, seed: int = 0) -> nn.Module:
    """Rebuild the model that `save_state` stored, chains attached, in its floating-point type, in eval mode. Raises
    UserError E305 if it is damaged.

    With `changes=False`: the pretrained base in the same pruned shapes and under the same masks, without deltas or tuned
    weights. torch's random state is afterwards set from `seed`.
    """
    description = read_description(folder)
    head, tensors = (_read_tensors(folder / f"{name}.safetensors") for name in ("head", "changes"))
    weights = _read_tensors(folder / "weights.safetensors") if changes and description["weights_moved"] else {}
    model = build(base_folder, description["labels"], seed, description["auto_class"])
    match_type(model, {**weights, **head, **tensors})
    set_problem_type(model.config, description.get("kind", ""))
    with door("E305", "the state", str(folder)), reading_by_library(f"has a {STATE_FILE} that does not fit its base", DAMAGED):
        with _sizes_damaged():
            restore_kept(model, description["kept"])
        if not changes:
            restore_masks(model, description["changes"], tensors)
            return model
    _load_strictly(model, head, set(head_names(model)), folder)
    compression_of(model).head_set = True
    if description["weights_moved"]:
        _load_strictly(model, weights, set(_plain_weights(model)) - head_names(model), folder)
        compression_of(model).weights_moved = True
    _restore_strictly(model, description["changes"], tensors, folder)
    return model.eval()


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file. Raises UserError E305 when it is missing, damaged, or contains non-finite numbers."""
    with door("E305", "the folder", str(path.parent)), reading_by_library(f"has a {path.name} that cannot be read", DAMAGED):
        check_finite(path, read_header(path))
        return load_file(path)


def read_description(folder: Path) -> dict:
    """Read state.json. Raises UserError E305 when it is damaged or of another format."""
    with door("E305", "the state", str(folder)):
        description = read_json(folder / STATE_FILE)
        if "format" not in description:
            raise Damage(f"has a {STATE_FILE} without a format", DAMAGED)
    number = description["format"]
    if number not in READABLE:
        what = f"{STATE_FILE} has format {number}, this version reads {FORMAT}"
        raise UserError("E305", what, fix_of_format(number, FORMAT), str(folder))
    if description.setdefault("auto_class", SEQUENCES) not in AUTO_CLASSES:
        what = f"{STATE_FILE} names the Auto class {description['auto_class']!r:.60}"
        raise UserError("E305", what, f"Here it is {' or '.join(AUTO_CLASSES)}", str(folder))
    with door("E305", "the state", str(folder)):
        _check_description(description)
        use_stored_row(description)
    return description


def _check_description(description: dict) -> None:
    """Check that every key of state.json is present and has the right type. Raises Damage."""
    base, labels = description.get("base"), description.get("labels")
    sound = {
        "base": isinstance(base, dict) and all(isinstance(base.get(key), str) for key in ("reference", "sha256")),
        "labels": isinstance(labels, list) and all(isinstance(label, str) for label in labels),
        "weights_moved": isinstance(description.get("weights_moved"), bool),
        "kind": isinstance(description.get("kind", ""), str),
        **{key: isinstance(description.get(key), dict) for key in ("kept", "changes")},
    }
    if wrong := [key for key, well in sound.items() if not well]:
        raise Damage(f"has a {STATE_FILE} in which {', '.join(wrong)} is missing or of another type", DAMAGED)


def _restore_strictly(model: nn.Module, description: dict, tensors: dict[str, Tensor], folder: Path) -> None:
    """Attach the recorded changes; every tensor must be used and none may be missing. Raises UserError E305."""
    try:
        restore(model, description, tensors)
        same = describe_changes(model)[1].keys() == tensors.keys()
    except Exception:  # a damaged description can fail in any of the functions that read it
        same = False
    if not same:
        fix = "The folder is damaged or mixed up"
        raise UserError("E305", "the recorded changes and their tensors do not fit together", fix, str(folder)) from None


def _load_strictly(model: nn.Module, tensors: dict[str, Tensor], expected: set[str], folder: Path) -> None:
    """Copy `tensors` into the model; names and shapes must match exactly. Raises UserError E305."""
    _require_names(tensors, expected, folder)
    state = model.state_dict()
    for name, tensor in tensors.items():
        if state[name].shape != tensor.shape:
            raise UserError(
                "E305",
                f"{name} is {tuple(tensor.shape)}, the config says {tuple(state[name].shape)}",
                "The folder is damaged or mixed up",
                str(folder),
            )
        state[name].copy_(tensor)


def _require_names(tensors: Mapping[str, Tensor], expected: set[str], folder: Path) -> None:
    """Raise UserError E305 where a folder lacks tensors of a model, or has others."""
    if odd := sorted(set(tensors) ^ expected)[:3]:
        raise UserError(
            "E305", f"tensors missing or unexpected: {', '.join(odd)}", "The folder is damaged or mixed up", str(folder)
        )


def save_checkpoint(model: nn.Module, folder: Path, tokenizer_folder: Path) -> None:
    """Write the merged `model` (no chains) as config.json, model.safetensors, the tokenizer's files and generation_config.json.

    A pruned model's config.json has a model type of its own (compressor.models.auto) and carries `per_layer_config` with the
    head count and FFN width of every block, so a stock `from_pretrained` fails loudly instead of loading something else.
    Adapters and prefixes, which cannot be merged, are described in inserts.json; all tensors are then in a file that no
    `from_pretrained` finds. A checkpoint that `folder` has is replaced. Raises UserError E303 where there is no
    `tokenizer_folder`, E304 for a link out of it; ValueError for a model with chains, and for the folder of a state, which
    `load` would read instead.
    """
    folder, tokenizer_folder = Path(folder), Path(tokenizer_folder)
    if tokenizer_folder != folder and not tokenizer_folder.is_dir():
        raise UserError("E303", "no such folder", "Give the folder of the tokenizer", str(tokenizer_folder))
    if any(chains(model)):
        raise ValueError("merge the model before saving a checkpoint")
    if (folder / STATE_FILE).exists():
        raise ValueError(f"{folder} has a {STATE_FILE}: save the checkpoint into another folder")
    copied = [] if tokenizer_folder == folder else files_to_copy(tokenizer_folder, (*TOKENIZER_FILES, *COPIED))
    folder.mkdir(parents=True, exist_ok=True)
    changes, inserted = describe_changes(model)
    weights_file = WITH_INSERTS if inserted else WEIGHTS
    write_tensors({**_plain_weights(model), **inserted}, folder / weights_file, {"format": "pt"})
    if inserted:
        (folder / INSERTS_FILE).write_text(json.dumps(changes, indent=1, sort_keys=True) + "\n")
    for name in (WEIGHTS,) if inserted else (WITH_INSERTS, INSERTS_FILE):  # of a checkpoint that this one replaces
        (folder / name).unlink(missing_ok=True)
    write_config(model, folder)
    if not tokenizer_folder.samefile(folder):
        for name in COPIED:
            (folder / name).unlink(missing_ok=True)
        for path in copied:
            shutil.copyfile(path, folder / path.name)


def write_config(model: nn.Module, folder: Path) -> None:
    """Write the config.json of a merged model, with its labels and the sizes that are left."""
    config = model.config.to_dict()
    config["architectures"] = [type(model).__name__]
    if sizes := per_layer_configs(model):
        stock = type(model).__name__.removeprefix("Compressed")
        identity = {"model_type": COMPRESSED + row_of_model(model).model_type, "architectures": [f"Compressed{stock}"]}
        config |= {**sizes, **identity}
    config |= row_entry(row_of_model(model).model_type)
    config.pop("_name_or_path", None)
    (folder / CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(folder: Path | str, *, base: Path | str | None = None) -> nn.Module:
    """Load the model stored in `folder`, in eval mode: a checkpoint, or a state on top of `base`.

    `base` defaults to the reference recorded in the state. Raises UserError E305 (damaged), E306 (another base), E303.
    """
    folder = from_home(folder)
    if not folder.is_dir():
        fix = "Give the folder of a run, or one with config.json and model.safetensors; others: compressor.models.build.build"
        raise UserError("E305", "no such folder", fix, str(folder))
    if (folder / STATE_FILE).is_file():
        recorded = read_description(folder)["base"]
        resolved = resolve(str(base or recorded["reference"]))
        if resolved.sha256 != recorded["sha256"]:
            raise UserError(
                "E306",
                f"base '{resolved.reference}' is not the one this was tuned on",
                "Give the same base: load(folder, base=...)",
            )
        return remember(load_state(folder, resolved.folder), resolved.reference, resolved.sha256)
    if not (folder / "config.json").is_file() or not any((folder / name).is_file() for name in (WEIGHTS, WITH_INSERTS)):
        raise UserError("E305", "no model in this folder", "Give a folder with config.json and model.safetensors", str(folder))
    return _load_checkpoint(folder)


def _load_checkpoint(folder: Path) -> nn.Module:
    """Build the model in its recorded sizes on the meta device, then fill it strictly from the file."""
    inserts = folder / INSERTS_FILE
    tensors = _read_tensors(folder / (WITH_INSERTS if inserts.is_file() else WEIGHTS))
    inserted = {name: tensors.pop(name) for name in list(tensors) if "|" in name}
    with door("E305", "the checkpoint", str(folder)):
        changes = read_json(inserts) if inserts.is_file() else None
        with reading_by_library(f"has a {CONFIG} from which no model can be built", DAMAGED), torch.device("meta"):
            model = _on_meta(folder)
            untie(model, tensors)
    _require_names(tensors, set(_plain_weights(model)), folder)
    try:
        # not strict: tied weights are stored once; every other name was compared above
        model.load_state_dict(tensors, strict=False, assign=True)
        model.tie_weights(recompute_mapping=False)
    except RuntimeError as error:
        reason = str(error).splitlines()[-1].strip()
        raise UserError("E305", f"sizes disagree ({reason})", "The folder is damaged", str(folder)) from None
    _refill_buffers(model, folder)
    if changes is not None:
        _restore_strictly(model, changes, inserted, folder)
    if model.can_generate() and (folder / GENERATION).is_file():
        with (
            door("E305", "the checkpoint", str(folder)),
            reading_by_library(f"has a {GENERATION} that cannot be read", DAMAGED),
        ):
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    compression_of(model).head_parameters = task_head(model)
    return model.eval()


def _on_meta(folder: Path) -> nn.Module:
    """The weightless (meta) model of a checkpoint's config.json, in its pruned sizes. Raises Damage."""

    raw = read_json(folder / CONFIG)
    check_config(raw, has_row=False)
    auto.register(row_in(raw).model_type)
    check_config(raw, has_row=True)
    config = plain_outputs(AutoConfig.for_model(raw.pop("model_type"), **raw))
    made = auto.class_for(config)
    with _sizes_damaged():
        return made.from_config(config, dtype=torch.float32, trust_remote_code=False)


@contextmanager
def _sizes_damaged() -> Iterator[None]:
    """Report sizes that do not fit the base as a damaged model (Damage), not as a pipeline file's mistake (E501)."""
    try:
        yield
    except UserError as error:
        raise Damage(f"has sizes that its base does not allow ({error.what})", DAMAGED) from None


def _refill_buffers(model: nn.Module, folder: Path) -> None:
    """Fill the buffers that are not in the file (position ids, rotary frequencies): meta tensors have no values. They are those
    of another model of the same config.json, of which only the parameters are on meta."""
    from accelerate import init_empty_weights

    if not any(buffer.is_meta for buffer in model.buffers()):
        return
    with init_empty_weights(include_buffers=False):
        fresh = _on_meta(folder)
    for path, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:
                module.register_buffer(name, fresh.get_submodule(path).get_buffer(name), persistent=False)
