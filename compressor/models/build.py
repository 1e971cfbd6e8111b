"""The live model of a pretrained folder with a task head: built, its outputs named, its Auto class and its head told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.compression import compression_of
from compressor.errors import UserError
from compressor.models.architectures import row_of
from compressor.models.files.damage import Damage, Lacking, door, read_json, reading_by_library
from compressor.models.files.model_folder import CONFIG, GENERATION
from compressor.models.files.weight_files import FLOATS, INDEX, WEIGHTS, StoredTensor, stored_tensors, weight_names
from compressor.models.loaded_config import check_activations, plain_outputs
from compressor.models.row_file import row_entry, row_in
from compressor.models.special_tokens import padding_id, start_id
from compressor.models.tasks_table import HEAD_TASKS, require_head, task_of_class
from compressor.models.tied import stored_apart, untie
from compressor.text_files import from_home

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

AUTO_CLASSES = SEQUENCES, TOKENS, GENERATES, TEXT2TEXT = tuple(task.auto_class for task in HEAD_TASKS)
"""The Auto classes of the models that are trained here: a task head that answers once a row, one that does at every token, and
no head but the pretrained one, which says the next token: in a decoder, or in one behind an encoder."""
GENERATIVE = (GENERATES, TEXT2TEXT)
"""Those whose outputs are scores of a vocabulary."""


def build(folder: Path, label_names: list[str], seed: int = 0, auto_class: str = SEQUENCES) -> nn.Module:
    """The pretrained model of `folder` with a task head (of `auto_class`), one output per label, in float32 and eval mode.

    The head is drawn from `seed`, whatever `folder` holds; only one whose labels are exactly `label_names` is kept, and the
    part before the classes that a base which is no classifier has (ModernBERT).
    `model.compression` tells which, and `head_names(model)` which parameters it has. Raises UserError E303 without the folder;
    E304 when the file lacks tensors of the base: they would be random; E309 as `weightless_model`.
    """
    import torch

    folder = from_home(folder)
    if not folder.is_dir():
        fix = "Give the folder of a model; that of a package or of the hub is found by compressor.models.reference.resolve"
        raise UserError("E303", "no such folder", fix, str(folder))
    empty = weightless_model(folder, label_names, auto_class)
    origin, tensors = _stored_head(folder, empty)
    torch.manual_seed(seed)
    with door("E304", "the folder", str(folder)), reading_by_library("holds weights that transformers cannot load"):
        model, loading = type(empty).from_pretrained(
            folder if tensors is None else None,
            config=empty.config,
            dtype=torch.float32,
            ignore_mismatched_sizes=False,
            output_loading_info=True,
            state_dict=tensors,
            local_files_only=True,
            trust_remote_code=False,
        )
    outside = task_head(model)
    missing = set(loading["missing_keys"]) - outside
    broken = sorted(name for name in missing if not name.startswith(f"{model.base_model_prefix}.pooler."))
    if broken:
        raise UserError("E304", f"the folder {_lacking(broken)}", "Give a complete model folder", str(folder))
    compression_of(model).head_parameters = frozenset(outside | missing)
    compression_of(model).head_origin = origin
    compression_of(model).own_labels = _own_labels(folder, type(empty).__name__) if origin in ("kept", "replaced") else None
    return model.eval()


def _own_labels(folder: Path, architecture: str) -> list[str] | None:
    """The labels of the task head that `folder` holds; None for one of another architecture."""
    config = config_of(folder)
    return [config.id2label[number] for number in sorted(config.id2label)] if config.architectures == [architecture] else None


HEAD_ORIGINS = {
    "fresh": "a fresh task head: the base has none",
    "own": "the pretrained language-model head is kept as part of the base",
    "kept": "the base's own task head is kept: it has exactly this task's labels",
    "replaced": "the base's own task head is for other labels or another task: a fresh one is trained instead",
}
"""Where the task head of a model comes from, in words."""
DRAWN_HEADS = ("fresh", "replaced")
"""Those with random weights."""


def head_origin(folder: Path, label_names: list[str], auto_class: str = SEQUENCES) -> str:
    """Where the task head of `build` would come from: a word of HEAD_ORIGINS. Raises UserError E304, E309."""
    return _stored_head(folder, weightless_model(folder, label_names, auto_class))[0]


def _stored_head(folder: Path, empty: nn.Module) -> tuple[str, dict[str, Tensor] | None]:
    """Decide about a task head stored in `folder`: (a word of HEAD_ORIGINS, the tensors without the head if it is dropped).

    `empty` is the model of the task. transformers would take any head whose shapes fit, one for other labels or of another
    kind of task too.
    """
    from safetensors.torch import load_file

    expected = {name: tuple(empty.get_parameter(name).shape) for name in task_head(empty)}
    if not expected:
        return "own", None
    with door("E304", "the folder", str(folder)):
        files, stored = [folder / name for name in weight_names(folder)], stored_tensors(folder)
    shapes = {name: stored[name].shape for name in expected.keys() & stored.keys()}
    config = config_of(folder)
    classifies = any(name.endswith("Classification") for name in config.architectures or ())
    # a head of another kind may have other names: transformers leaves it out; a ModernBERT's is pretrained up to the classes
    in_part = not classifies and shapes.keys() < expected.keys() and all(shapes[name] == expected[name] for name in shapes)
    if not shapes or in_part:
        return "replaced" if classifies else "fresh", None
    same_labels = config.id2label == empty.config.id2label
    if shapes == expected and same_labels and config.architectures == [type(empty).__name__]:
        return "kept", None
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items() if name not in expected}
    return "replaced", tensors


def weightless_model(folder: Path, label_names: list[str], auto_class: str = SEQUENCES) -> nn.Module:
    """The weightless (meta) model of a pretrained folder with a task head of one output per label, from config.json alone.

    Weights that lie beside it are held against the model by their headers. Raises UserError E309 where the architecture has no
    such head, E304 where transformers makes no model of this config, or the weights do not fit it.
    """
    import torch
    import transformers

    config = config_of(folder)
    row = row_of(config.model_type)
    require_head(row, auto_class, folder)
    name_outputs(config, label_names)
    # a decoder's head looks for the last token that is not padding, by this key
    config.pad_token_id = padding_id(config, folder)
    if row.has_decoder:  # a T5 that classifies makes its decoder's inputs itself
        config.decoder_start_token_id = start_id(config, config.pad_token_id)
    with door("E304", "the folder", str(folder)):
        with reading_by_library("has a config.json from which no model can be built"), torch.device("meta"):
            model = getattr(transformers, auto_class).from_config(config, trust_remote_code=False)
        stored = stored_tensors(folder) if any((folder / name).is_file() for name in (WEIGHTS, INDEX)) else None
        untie(model, stored_apart(model, folder, stored or {}))
        compression_of(model).head_parameters = task_head(model)
        if stored is not None:
            check_shapes(model, stored)
            compression_of(model).head_parameters |= _fresh_pooler(model, stored)
    return model


def config_of(folder: Path) -> PretrainedConfig:
    """Load config.json with transformers; no code of the folder runs. Raises UserError E304."""
    from transformers import AutoConfig

    with door("E304", "the folder", str(folder)), reading_by_library("has a config.json that transformers cannot read"):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        check_activations(config)
    return plain_outputs(config)


def check_shapes(model: nn.Module, stored: Mapping[str, StoredTensor]) -> None:
    """Hold a weightless (meta) model against a file's tensors: what it has of the base is of the model's shape and a float,
    and no tensor of the base is missing. `model.compression.head_parameters` says what is no base. Raises Damage.
    """
    head = compression_of(model).head_parameters
    base = {name: parameter for name, parameter in model.named_parameters() if name not in head}
    prefix, tied = f"{model.base_model_prefix}.", getattr(model, "all_tied_weights_keys", None) or {}
    ignored = {*tied, *tied.values()} | {name for name in base if name.startswith(f"{prefix}pooler.")}
    # LayerNorm's names in files of 2019
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    missing = []
    for name, parameter in base.items():
        bare = name.removeprefix(prefix)
        ending = ".".join(bare.rsplit(".", 2)[-2:])
        names = [bare, bare.removesuffix(ending) + old[ending]] if ending in old else [bare]
        key = next((full for short in names for full in (prefix + short, short) if full in stored), None)
        if key is None:
            missing += [] if name in ignored else [name]
            continue
        tensor = stored[key]
        if tensor.shape != tuple(parameter.shape):
            what = f"has a {key} of shape {list(tensor.shape)}, by its config.json it is {list(parameter.shape)}"
            raise Damage(what, "Give the config.json that belongs to the weights")
        if tensor.dtype not in FLOATS:
            raise Damage(f"has a {key} of type {tensor.dtype}", "Give the model in full precision")
    if missing:
        raise Lacking(_lacking(missing), "Give a complete model folder")


def _lacking(missing: Sequence[str]) -> str:
    return f"lacks {len(missing)} tensors of the base, e.g. {', '.join(sorted(missing)[:3])}"


def task_head(model: nn.Module) -> frozenset[str]:
    """Parameters that the Auto class created beside the pretrained base; none where the head was pretrained, too."""
    if auto_class_of(model) in GENERATIVE:
        return frozenset()
    prefix = f"{model.base_model_prefix}."
    return frozenset(name for name, _ in model.named_parameters() if not name.startswith(prefix))


def _fresh_pooler(model: nn.Module, stored: Mapping[str, StoredTensor]) -> frozenset[str]:
    """Parameters of the base's pooler that its file lacks: `build` draws them, so they are of the task head."""
    prefix = f"{model.base_model_prefix}."
    names = {name for name, _ in model.named_parameters() if name.startswith(f"{prefix}pooler.")}
    return frozenset(name for name in names if stored.keys().isdisjoint((name, name.removeprefix(prefix))))


def head_names(model: nn.Module) -> frozenset[str]:
    """Names of the task head's parameters: as `build` found them, or those of a model that transformers built (`task_head`)."""
    compression = compression_of(model)
    if compression.head_parameters is None:
        compression.head_parameters = task_head(model)
    return compression.head_parameters


def name_outputs(config: PretrainedConfig, label_names: Sequence[str]) -> None:
    """Set one output per name in `config`. A single output is a regression: else transformers would apply a sigmoid to it."""
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: index for index, name in enumerate(label_names)}
    config.problem_type = "regression" if len(label_names) == 1 else None


def require_labels(model: nn.Module, label_names: Sequence[str]) -> None:
    """Raises ValueError where labels are not as many different names as a model has outputs; texts have none."""
    if auto_class_of(model) in GENERATIVE:
        return
    names, outputs = [] if isinstance(label_names, str) else list(label_names), model.config.num_labels
    if len(names) != outputs or len(set(names)) != outputs or not all(isinstance(name, str) for name in names):
        raise ValueError(f"label_names are {label_names!r:.80}: the model has {outputs} outputs, each with a name of its own")


def auto_class_of(model: nn.Module) -> str:
    """The word of AUTO_CLASSES for the task of a live model's class; SEQUENCES for any other model."""
    task = task_of_class(type(model))
    return task.auto_class if task is not None else SEQUENCES


def class_facts(model: nn.Module) -> dict[str, Any]:
    """The entries by which a file on `model` records its Auto class (none for SEQUENCES, the default), and its architecture's
    row where that is not built in."""
    name = auto_class_of(model)
    return {**({} if name == SEQUENCES else {"auto_class": name}), **row_entry(model.config.model_type)}


def end_id(folder: Path) -> int | None:
    """Id of the end-of-sentence token that the task head of the model in `folder` reads; None where it does not."""
    with door("E304", "the folder", str(folder)):
        row = row_in(read_json(folder / CONFIG))
    return config_of(folder).eos_token_id if row.head_on_end else None


def further_ends(folder: Path) -> list[int]:
    """The tokens that end a text by the folder's generation_config.json, if they are others than by its config; no part of the
    base's digest: a delta fits it whatever ends a text. Raises UserError E304."""
    if not (folder / GENERATION).is_file():
        return []
    with door("E304", "the folder", str(folder)):
        ends = [read_json(folder / GENERATION).get("eos_token_id"), config_of(folder).eos_token_id]
    said, known = ({end} if isinstance(end, int) else set(end or ()) for end in ends)
    return sorted(said) if said != known else []
