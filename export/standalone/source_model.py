"""Loading any model that can be exported, by its reference, with random rows to run it on."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from compressor.checkpoint import INSERTS_FILE, STATE_FILE, load, read_description
from compressor.compression import compression_of
from compressor.deltas.links import merge_all
from compressor.errors import UserError
from compressor.models.architectures import ARCHITECTURES, COMPRESSED, added_row, row_of
from compressor.models.auto import HEADS, class_for
from compressor.models.build import check_shapes, task_head
from compressor.models.files.damage import Damage, Lacking, door, read_json, reading_by_library
from compressor.models.files.model_folder import CONFIG, check_pretrained
from compressor.models.files.weight_files import INDEX, WEIGHTS, stored_tensors
from compressor.models.loaded_config import plain_outputs
from compressor.models.reference import find_folder
from compressor.models.special_tokens import padding_id, tokenizer_of
from compressor.models.tasks_table import BY_AUTO_CLASS
from compressor.pruning.sizes import BY_STACK
from compressor.pruning.weights import require_zeros_kept

ROWS, MAX_LENGTH = 128, 128
"""Number of random rows that are compared, and tokens of the longest."""

LEEWAY = 2**24
"""Parameters that a model may have beyond twice those of its files before the files are taken for another model's."""

UNBOUNDED = sys.maxsize
"""Tokens of a row of a model whose positions have no end."""

Row = dict[str, list[int]]


@dataclass
class LoadedModel:
    """A live model without chains, the folder of its tokenizer, rows to try it on, the id that pads them, and what a user
    should know of it. `kind` is that of its task (`compressor.models.tasks_table.HeadTask`); one `of_state` has no
    config.json."""

    model: nn.Module
    kind: str
    folder: Path
    rows: list[Row]
    pad_id: int
    notes: list[str] = field(default_factory=list)
    of_state: bool = False


def find_model(reference: str) -> LoadedModel:
    """The model of a reference, with random rows for it. Raises UserError E303, E304 and E305 (damaged), E621."""
    folder = find_folder(reference)
    model = _ours(folder) or _stock(reference, folder)
    notes = []
    if not _is_known(model.config):
        model_type = model.config.model_type.removeprefix(COMPRESSED)
        notes.append(f"'{model_type}' is not a supported architecture: it can be exported, not pruned")
    source = folder if (folder / "tokenizer.json").is_file() else _base_of(folder)
    tokenizer, pad_id = tokenizer_of(source), padding_id(model.config, source)
    if tokenizer.pad_token_id is None:
        notes.append(f"the tokenizer has no padding token: token {pad_id} pads")
    model.config.pad_token_id = pad_id  # decoders look for the last token before it
    kind = BY_AUTO_CLASS[_auto_class(model.config).__name__].kind
    if not _is_known(model.config) and kind != "generation" and most_tokens(model) > MAX_LENGTH:
        # some compute long rows in another way, such as BigBird, whose attention is sparse above 704 tokens
        notes.append(f"rows of up to {MAX_LENGTH} tokens were compared: longer ones may be computed otherwise in the files")
    return LoadedModel(model, kind, source, random_rows(model, tokenizer), pad_id, notes, (folder / STATE_FILE).is_file())


def _auto_class(config: PretrainedConfig) -> type:
    """The Auto class for `config.architectures`; if it names none that is known, that of sequence classifiers."""
    try:
        return class_for(config)
    except UserError:
        return next(iter(HEADS))


def _ours(folder: Path) -> nn.Module | None:
    """Load a state, or a checkpoint that stock transformers rejects; None for any other folder."""
    config = {}
    if (folder / CONFIG).is_file():
        with door("E304", "the folder", str(folder)):
            config = read_json(folder / CONFIG)
    unequal = any(name in config for name in BY_STACK)
    if unequal or any((folder / name).is_file() for name in (STATE_FILE, INSERTS_FILE)):
        model = load(folder)
        require_zeros_kept(model)
        return merge_all(model)
    return None


def _base_of(folder: Path) -> Path:
    """The folder of a state's tokenizer. Raises UserError E304 for any other folder without one."""
    if not (folder / STATE_FILE).is_file():
        raise UserError("E304", "no tokenizer.json", "Save the fast tokenizer beside the weights", str(folder))
    return find_folder(read_description(folder)["base"]["reference"])


def _stock(reference: str, folder: Path) -> nn.Module:
    """Load a Hugging Face folder whose weights contain a task head. Raises UserError E304 (damaged), E621."""
    if not any((folder / name).is_file() for name in (WEIGHTS, INDEX)):
        raise UserError("E621", "no model.safetensors", "Pickled weights are not read: convert them", str(folder))
    with door("E304", f"model '{reference}'"):
        check_pretrained(folder, needs_row=False)
    options = {"local_files_only": True, "trust_remote_code": False}
    none = "is neither a classifier nor a model that generates"
    with door("E621", "the folder", str(folder)), reading_by_library(none, "Give a folder of one"):
        config = plain_outputs(AutoConfig.from_pretrained(folder, **options))
        empty = _check_size(config, folder)
    with door("E304", f"model '{reference}'"):
        _check_tensors(empty, folder)
    with door("E621", "the folder", str(folder)), reading_by_library(none, "Give a folder of one"):
        model, loading = _auto_class(config).from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True, **options
        )
    if missing := sorted(loading["missing_keys"]):
        what = f"the file lacks {len(missing)} tensors of a {type(model).__name__}, e.g. {missing[0]}: they would be random"
        raise UserError("E621", what, "Give a model that is tuned as a classifier, or to generate", str(folder))
    return model.eval()


def _check_tensors(model: nn.Module, folder: Path) -> None:
    """Hold a weightless model against its files, whose tensors must have its names. Raises Damage."""
    stored = stored_tensors(folder)
    try:
        check_shapes(model, stored)
    except Lacking as damage:
        others = _bare(stored, model) - _bare(model.state_dict(), model)
        if not (others and get_checkpoint_conversion_mapping(model.config.model_type)):
            raise
        what = "has tensors of other names than transformers' class has, which renames or joins them as it loads them"
        raise Damage(what, "Such an architecture is not supported: give a model of another one") from damage


def _bare(names: Iterable[str], model: nn.Module) -> set[str]:
    """Names without that of the base, and those of norms in files of 2019 as they are today."""
    today = (name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias") for name in names)
    return {name.removeprefix(f"{model.base_model_prefix}.") for name in today}


def _check_size(config: PretrainedConfig, folder: Path) -> nn.Module:
    """The model of a config on the meta device. One that is far larger than its files is rejected: missing weights would
    be filled at random. Raises Damage."""
    stored = sum(tensor.numbers for tensor in stored_tensors(folder).values())
    with torch.device("meta"):
        model = _auto_class(config).from_config(config, trust_remote_code=False)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    if numbers > 2 * stored + LEEWAY:
        what = f"has weights of {stored:,} numbers, and a config.json of a model of {numbers:,}"
        raise Damage(what, "Give the config.json that belongs to the weights")
    compression_of(model).head_parameters = task_head(model)
    return model


def _is_known(config: PretrainedConfig) -> bool:
    """Whether the model's architecture has a row."""
    model_type = config.model_type.removeprefix(COMPRESSED)
    return model_type in ARCHITECTURES or added_row(model_type) is not None


def most_tokens(model: nn.Module) -> int:
    """Tokens of the longest row that a model takes; of an architecture without a row, so many that it surely does."""
    config = model.config
    if _is_known(config):
        return row_of(config.model_type).most_tokens(config.to_dict()) or UNBOUNDED
    tables = (module for path, module in model.named_modules() if "position" in path)
    # as in RoBERTa, the positions of its tokens may begin behind a padding that the table of positions has
    padding = max((getattr(table, "padding_idx", None) or 0 for table in tables), default=0)
    positions = getattr(config, "max_position_embeddings", None)
    return positions - 1 - max(1, padding) if positions else UNBOUNDED


def random_rows(model: nn.Module, tokenizer: Any) -> list[Row]:
    """ROWS rows of random tokens, 2 to MAX_LENGTH long (or up to the model's maximum positions)."""
    draw, config = np.random.default_rng(0), model.config
    most = max(2, min(MAX_LENGTH, most_tokens(model)))
    words = sorted(set(range(min(len(tokenizer), config.vocab_size))) - set(tokenizer.all_special_ids))
    rows = []
    for length in np.linspace(2, most, ROWS).astype(int):
        ids = draw.choice(words, size=length).tolist()
        if config.is_encoder_decoder:  # its head reads the state of the end token
            ids[-1] = config.eos_token_id
        row = {"input_ids": ids, "attention_mask": [1] * int(length)}
        if "token_type_ids" in tokenizer.model_input_names:
            row["token_type_ids"] = [0] * int(length)
        rows.append(row)
    return rows
