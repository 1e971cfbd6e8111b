"""What a model can compute, from its folder: the limits that a version's requests are checked against."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compressor.models.architectures import row_of
from compressor.models.build import config_of, end_id


def limits_of(folder: Path, most_tokens: int) -> dict[str, Any]:
    """The fields of `VersionFacts` that follow from the config and the tokenizer in a model's folder.

    Relative and rotary positions have no table that ends: then `most_tokens` is the limit, which bounds memory, too.
    """
    config, values = config_of(folder), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {
        "vocabulary": config.vocab_size,
        "positions": row_of(values["model_type"]).most_tokens(values) or most_tokens,
        "type_vocabulary": getattr(config, "type_vocab_size", None) or None,
        "end_id": end_id(folder),
    }
