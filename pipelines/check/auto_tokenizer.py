"""Whether transformers' AutoTokenizer reads texts otherwise than the tokenizer.json of a model's folder, which is read here."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import json
from pathlib import Path

from compressor.models.special_tokens import read_otherwise, stock_tokenizer, tokenizer_of
from pipelines.engine.store import replace_files
from serving.server_registry import cache_folder

CHECK = 4
"""Number of the way in which a folder is checked, raised where this file or `tokenizer_of` finds other things: what the cache
has of an earlier way is found again."""
LIBRARIES = ("transformers", "tokenizers")
"""Their versions decide what is found, too."""


@functools.cache
def texts_read_otherwise(folder: Path, sha256: str) -> list[str]:
    """A text, or a pair of them, to which AutoTokenizer gives other tokens than tokenizer.json; [] where none is known.

    From the user's cache if it was found before by the folder's `sha256`: the libraries take seconds to load. A cache that
    cannot be read or written only costs these seconds. Raises UserError E304.
    """
    versions = "-".join(importlib.metadata.version(name) for name in LIBRARIES)
    with contextlib.suppress(OSError, ValueError, RuntimeError):  # the last where nobody's home is known
        facts = json.loads(_kept(sha256, versions).read_text(encoding="utf-8"))
        if isinstance(facts, dict) and facts.keys() == {"texts"}:
            return facts["texts"]
    texts = list(read_otherwise(tokenizer_of(folder), stock_tokenizer(folder)) or ())
    with contextlib.suppress(OSError, RuntimeError):
        kept = _kept(sha256, versions)
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_files({kept: json.dumps({"texts": texts}).encode()})
    return texts


def _kept(sha256: str, versions: str) -> Path:
    return cache_folder() / "bases" / str(CHECK) / f"{sha256}-{versions}.json"
