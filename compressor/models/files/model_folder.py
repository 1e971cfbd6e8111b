"""Validation of model folders: their contents are checked once, before anything is built or written.

Needs no torch: config.json, the tokenizer's files, and every safetensors file with all its numbers. What only transformers can
check (a model of this config, the shapes of its tensors) is in `compressor.models.build.weightless_model`. Faults raise a
UserError: E304 for a pretrained folder, E305 for a checkpoint or a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from compressor.inside import is_inside
from compressor.models.architectures import COMPRESSED, row_of
from compressor.models.files.config_file import check_config, check_layers
from compressor.models.files.damage import Damage, door, read_json, reading_by_library, shown
from compressor.models.files.weight_files import check_weights, stored_tensors
from compressor.text_files import is_unicode

CONFIG = "config.json"

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
"""Tokenizer files copied into a checkpoint, so that rows are tokenized as in training."""
GENERATION = "generation_config.json"
"""Copied, too: it may name more tokens that end a text than config.json."""
CHAT = "chat_template.jinja"
"""Copied, too, for whoever asks the merged model in conversations."""
COPIED = (GENERATION, CHAT)
"""What goes with a merged model beside its tokenizer, and is no part of the base's sha256."""

TRIAL = ("a good film, 1\u00bd \u4e2d", "zq\U0001f600")
"""Two test texts, with words outside any vocabulary."""


def files_to_copy(folder: Path, names: Iterable[str]) -> list[Path]:
    """Those of the files that a model's folder has, for the folder of a model that is made from it. Raises UserError E304 for a
    link out of the folder."""
    with door("E304", "the folder", str(folder)):
        return _own_files(folder, names)


def _own_files(folder: Path, names: Iterable[str]) -> list[Path]:
    """Those of the files that the folder has. Raises Damage for a link out of it: a copy would publish what it leads to."""
    files = [path for name in names if (path := folder / name).is_file()]
    for path in files:
        if not is_inside(path, folder):
            raise Damage(
                f"has a {path.name} that is a link out of it",
                "Copy the file itself into the folder (cp -L); a package, install it with copies",
            )
    return files


def check_tokenizer(folder: Path, config: Mapping[str, Any]) -> None:
    """Check that tokenizer.json loads and fits the embedding, that the other files are JSON objects, and that no file which a
    merge copies is a link out of the folder. Raises Damage."""
    _own_files(folder, (*TOKENIZER_FILES, *COPIED))
    for name in (*TOKENIZER_FILES, GENERATION):
        if name.endswith(".json") and name != "tokenizer.json" and (folder / name).is_file():
            read_json(folder / name)
    with reading_by_library("has a tokenizer.json that cannot be read"):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        words = tokenizer.get_vocab(with_added_tokens=True)
    if not words:
        raise Damage("has a tokenizer.json without a vocabulary")
    with reading_by_library("has a tokenizer.json that cannot read a text"):
        tokenizer.encode(TRIAL[0])
        tokenizer.encode(*TRIAL)
    most, (last, number) = config.get("vocab_size"), max(words.items(), key=lambda item: item[1])
    if isinstance(most, int) and number >= most:
        what = f"has a token {number} ({shown(last)}) in its tokenizer.json, where its config.json says vocab_size: {most}"
        raise Damage(what, "Give the tokenizer that the model was trained with")


def check_pretrained(folder: Path, *, needs_row: bool = True) -> None:
    """Check a dense pretrained folder. With `needs_row`, its architecture must have a row.

    Raises Damage; UserError E301 for an architecture without a row.
    """
    if not (folder / CONFIG).is_file():
        raise Damage(f"has no {CONFIG}", _where_config_is(folder))
    if not is_unicode(folder):
        fix = "Rename the folder of that path which is not, or copy the model elsewhere"
        raise Damage(f"is at {folder}, a path that is not UTF-8: its files cannot be opened there", fix)
    tensors = stored_tensors(folder)
    if not (folder / "tokenizer.json").is_file():
        raise Damage("has no tokenizer.json", "Save its fast tokenizer beside the weights")
    config = read_json(folder / CONFIG)
    if config.get("per_layer_config") or str(config.get("model_type")).startswith(COMPRESSED):
        raise Damage("is pruned already", "Start from the dense model")
    if (folder / "adapter_config.json").is_file():
        fix = "Merge it with peft, or give the base alone"
        raise Damage("is a peft adapter (adapter_config.json): transformers would read another base", fix)
    check_config(config, has_row=False)
    if needs_row:
        row = row_of(config["model_type"])
        check_config(config, has_row=True)
        if row.head_on_end and type(config.get("eos_token_id", 1)) is not int:
            what = f"says eos_token_id: {shown(config['eos_token_id'])} in its config.json"
            raise Damage(what, "Its task head reads the state of one token: name that")
    check_layers(config, tensors)
    check_tokenizer(folder, config)
    check_weights(folder)


def _where_config_is(folder: Path) -> str:
    """Hint where config.json is missing: the subfolder that has one, if any."""
    below = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
    if not below:
        return "Give the folder that holds config.json"
    return f"Did you mean its folder '{'model' if 'model' in below else below[0]}', which has one? Add it to the path"
