"""What an earlier version read otherwise of a base model's folder: part of the fingerprints of stages that load it, so that
results of before are made again where they would be others, and only there."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from compressor.models.special_tokens import read_otherwise, stock_tokenizer, tokenizer_of

SPACED = "a film , was n't ."
"""A text that a tokenizer which cleans up spaces writes otherwise."""


def base_corrections(folder: Path, sha256: str, *, decodes: bool) -> dict[str, int]:
    """`tokens` where transformers' AutoTokenizer gives texts other tokens or inputs than tokenizer.json, `clean_up` where it
    writes generated texts otherwise (`decodes`: some are scored), `head` where a part of the task head is pretrained.

    `sha256` is the folder's. Raises UserError E304.
    """
    found = _corrections(folder, sha256)
    return {name: 2 for name in found if decodes or name != "clean_up"}


@functools.cache
def _corrections(folder: Path, sha256: str) -> tuple[str, ...]:
    ours, stock = tokenizer_of(folder), stock_tokenizer(folder)
    ids = ours(SPACED)["input_ids"]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts = {
        "tokens": read_otherwise(ours, stock) is not None or ours.model_input_names != stock.model_input_names,
        "clean_up": stock.decode(ids) != stock.decode(ids, clean_up_tokenization_spaces=False),
        "head": config.get("model_type") == "modernbert" and "ModernBertForMaskedLM" in (config.get("architectures") or ()),
    }
    return tuple(name for name, differs in facts.items() if differs)
