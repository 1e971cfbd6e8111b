"""The tokenizer of a model's folder, and the ids of the tokens that a model needs: padding, start and end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import UserError
from compressor.models.architectures import COMPRESSED
from compressor.models.files.damage import door, read_json, reading_by_library
from compressor.models.files.model_folder import CONFIG, TRIAL

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import nn
    from transformers import PretrainedConfig

PROBES = (
    ("a Good film",),  # capitals
    ("a  good film ",),  # white space
    ("caf\u00e9",),  # accents
    ("\ufb01lm",),  # ligatures
    ("\uff46ilm",),  # full-width letters
    ("film\u2026",),  # dots
    ("good\u00a0film",),  # a space that breaks no line
    ("\u4e2d\u6587",),  # Chinese
    ("a 1984, 3.5%...",),  # numbers and punctuation
    ("don't\tgo\n",),  # apostrophes, tabs and line ends
    ("a\u0007b",),  # control characters
    ("a film", "good"),  # a pair
)
"""Texts, and a pair of them, on which tokenizers differ."""
SEGMENTS_AS_WORDS = ("codegen", "ctrl", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "openai-gpt")
"""Model types that look up token_type_ids in their table of words: they have no embeddings of segments."""


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
    """The fast tokenizer stored in `folder`, from local files only; no code of the folder runs. Raises UserError E304.

    It reads texts as its tokenizer.json says, which is all that a server has of it. Most classes of transformers 5 take only
    the vocabulary from that file and normalize and split texts in their own way; what they say of special tokens holds.
    """
    from tokenizers import Tokenizer

    with door("E304", "the folder", str(folder)), reading_by_library("has a tokenizer that transformers cannot use"):
        tokenizer = stock_tokenizer(folder)
        stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer._tokenizer = stored
        for name, token in tokenizer.special_tokens_map.items():
            if isinstance(token, str) and stored.token_to_id(token) is None:  # of the class; no text has it
                setattr(tokenizer, name, None)
        tokenizer.model_input_names = _input_names(tokenizer.model_input_names, stored, folder)
        tokenizer(*TRIAL, verbose=False)  # a key of another type than it must have is read here first
    return tokenizer


def _input_names(names: list[str], stored: Tokenizer, folder: Path) -> list[str]:
    """The inputs that a tokenizer gives a model: segments where tokenizer.json numbers those of a pair and the model has as
    many, whatever the class says: transformers 5's general one leaves them out, and a BertTokenizer gives them to a RoBERTa."""
    size, number = _segments(folder), max(stored.encode("a", "b").type_ids, default=0)
    if size is None:
        return names
    if "token_type_ids" in names and size <= number:
        return [name for name in names if name != "token_type_ids"]
    return [*names, "token_type_ids"] if "token_type_ids" not in names and 0 < number < size else names


def _segments(folder: Path) -> int | None:
    """How many segments the model in a folder has embeddings for, 0 where it takes their numbers for words; None where it
    reads none, or none is there."""
    from transformers import CONFIG_MAPPING

    if not (folder / CONFIG).is_file():
        return None
    config = read_json(folder / CONFIG)
    if segments_as_words(config):
        return 0
    model_type = str(config.get("model_type")).removeprefix(COMPRESSED)
    usual = getattr(CONFIG_MAPPING[model_type], "type_vocab_size", 0) if model_type in CONFIG_MAPPING else 0
    return config.get("type_vocab_size", usual) or None


def segments_as_words(config: Mapping[str, Any]) -> bool:
    """Whether the model of a config.json adds to each token the embedding of the word that has its segment's number."""
    return str(config.get("model_type")).removeprefix(COMPRESSED) in SEGMENTS_AS_WORDS


def stock_tokenizer(folder: Path):
    """The tokenizer in `folder` as transformers' AutoTokenizer makes it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def read_otherwise(ours, stock) -> tuple[str, ...] | None:
    """A short text, or a pair of them, to which the tokenizers of `tokenizer_of` and `stock_tokenizer` give other tokens; None
    if there is none of the PROBES."""
    return next((texts for texts in PROBES if ours(*texts)["input_ids"] != stock(*texts)["input_ids"]), None)
