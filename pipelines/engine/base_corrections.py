"""What an earlier version read otherwise of a base model's folder: part of the fingerprints of stages that load it, so that
results of before are made again where they would be others, and only there."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
from pathlib import Path
from typing import Any

from compressor.models.special_tokens import read_otherwise, segments_as_words, stock_tokenizer, tokenizer_of
from pipelines.engine.store import replace_files
from serving.running import cache_folder

SPACED = "a film , was n't ."
"""A text that a tokenizer which cleans up spaces writes otherwise."""
CHECK = 3
"""Number of the way in which a folder is checked, raised where this file or `tokenizer_of` finds other things: what the cache
has of an earlier way is found again."""
LIBRARIES = ("transformers", "tokenizers")
"""Their versions decide what is found, too."""
CORRECTIONS = ("tokens", "clean_up", "head", "segments", "positions", "chunks")


def base_corrections(folder: Path, sha256: str, *, decodes: bool) -> dict[str, int]:
    """`tokens` where transformers' AutoTokenizer gives texts other tokens or inputs than tokenizer.json, `clean_up` where it
    writes generated texts otherwise (`decodes`: some are scored), `head` where a part of the task head is pretrained,
    `segments` where its tokenizer numbers segments for a model that takes the numbers for words, `positions` where a DeBERTa
    projects relative positions that it does not compare: FLOPs left them out, `chunks` where a feed-forward layer is computed
    in chunks by its config.json: neurons were scored by the last one.

    `sha256` is the folder's. Raises UserError E304.
    """
    facts = _facts(folder, sha256)
    return {name: 2 for name in CORRECTIONS if facts[name] and (decodes or name != "clean_up")}


def texts_read_otherwise(folder: Path, sha256: str) -> list[str]:
    """A text, or a pair of them, to which AutoTokenizer gives other tokens than tokenizer.json; [] where none is known.

    `sha256` is the folder's. Raises UserError E304.
    """
    return _facts(folder, sha256)["texts"]


@functools.cache
def _facts(folder: Path, sha256: str) -> dict[str, Any]:
    """What `_compared` finds, from the user's cache if it was found before: the libraries take seconds to load, and a run that
    reuses everything needs them for nothing else. A cache that cannot be read or written only costs these seconds."""
    versions = "-".join(importlib.metadata.version(name) for name in LIBRARIES)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # the last where nobody's home is known
        facts = json.loads(_kept(sha256, versions).read_text(encoding="utf-8"))
        if isinstance(facts, dict) and facts.keys() == {*CORRECTIONS, "texts"}:
            return facts
    facts = _compared(folder)
    with contextlib.suppress(OSError, RuntimeError):
        kept = _kept(sha256, versions)
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_files({kept: json.dumps(facts).encode()})
    return facts


def _kept(sha256: str, versions: str) -> Path:
    return cache_folder() / "bases" / str(CHECK) / f"{sha256}-{versions}.json"


def _compared(folder: Path) -> dict[str, Any]:
    ours, stock = tokenizer_of(folder), stock_tokenizer(folder)
    texts = read_otherwise(ours, stock)
    ids = ours(SPACED)["input_ids"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {
        "tokens": texts is not None or ours.model_input_names != stock.model_input_names,
        "clean_up": stock.decode(ids) != stock.decode(ids, clean_up_tokenization_spaces=False),
        "head": config.get("model_type") == "modernbert" and "ModernBertForMaskedLM" in (config.get("architectures") or ()),
        "segments": segments_as_words(config) and "token_type_ids" in stock.model_input_names,
        "positions": bool(config.get("relative_attention") and config.get("share_att_key")) and _compares_one_kind(config),
        "chunks": bool(config.get("chunk_size_feed_forward")),
        "texts": list(texts or ()),
    }


def _compares_one_kind(config: dict[str, Any]) -> bool:
    """Whether `pos_att_type`, a list or words with | between them, names not both kinds of relative positions."""
    kinds = config.get("pos_att_type") or ()
    return len(kinds.split("|") if isinstance(kinds, str) else kinds) < 2
