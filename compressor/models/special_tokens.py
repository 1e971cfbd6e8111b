"""The tokenizer of a model's folder, and the ids of the tokens that a model needs: padding, start and end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import UserError
from compressor.models.files.damage import door, reading_by_library
from compressor.models.files.model_folder import TRIAL

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig


def padding_id(config: PretrainedConfig, folder: Path) -> int:
    """The id that pads input_ids, in training and wherever the model runs: the config's own, else the tokenizer's padding
    token, else its end of sentence; the first that is in the vocabulary. `folder` holds the tokenizer. Raises UserError E304
    where there is none of them.
    """

    def usable(token: int | None) -> bool:
        # some Llamas say -1; a token that was added to the tokenizer alone has no embedding
        return token is not None and 0 <= token < config.vocab_size

    if usable(config.pad_token_id):
        return config.pad_token_id
    tokenizer = tokenizer_of(folder)
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if usable(token):
            return token
    what = "neither config.json nor the tokenizer has a padding token of the vocabulary, and there is no end of sentence either"
    raise UserError("E304", what, "Give config.json a pad_token_id", str(folder))


def start_id(config: PretrainedConfig, pad_id: int) -> int:
    """The id that the inputs of a decoder behind an encoder begin with: the config's own, else that of padding, as in T5."""
    start = getattr(config, "decoder_start_token_id", None)  # a config has this key only where its file names it
    return pad_id if start is None else start


def end_id_of(model: nn.Module) -> int | None:
    """`end_id` of a live model."""
    from compressor.models.anatomy import row_of_model

    return model.config.eos_token_id if row_of_model(model).head_on_end else None


def tokenizer_of(folder: Path):
    """The fast tokenizer stored in `folder`, from local files only; no code of the folder runs. Raises UserError E304."""
    from transformers import AutoTokenizer

    with door("E304", "the folder", str(folder)), reading_by_library("has a tokenizer that transformers cannot use"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        tokenizer(*TRIAL, verbose=False)  # a key of another type than it must have is read here first
    return tokenizer
