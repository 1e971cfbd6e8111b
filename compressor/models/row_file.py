"""Rows of architectures that the built-in table lacks: read from a user's file, and carried along by stored models.

A file for `architecture: FILE` is what `compress list architectures --discover MODEL --json` prints. A checkpoint keeps the
row in its config.json, a state and a delta in their descriptions, so that each loads without the user's file. Torch-free.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from compressor.errors import UserError
from compressor.models.architectures import ARCHITECTURES, COMPRESSED, Architecture, add_row, added_row, row_of
from compressor.models.files.damage import Damage, read_json

KEY = "compress_architecture"
"""The row's key in a config.json, a state.json, a delta's description and a lock file."""
ROW = TypeAdapter(Architecture)
HOW = "compress list architectures --discover MODEL --json prints one"


def read_row(path: Path) -> Architecture:
    """The row in a user's file. Raises UserError E320 where there is none, or its model type has a built-in row."""
    if not os.path.isfile(path):  # Path.is_file raises where the name is too long
        raise UserError("E320", "no such file", HOW, str(path))
    try:
        row = _row(read_json(path))
    except Damage as damage:
        raise UserError("E320", f"the folder {damage.what}", HOW, str(path.parent)) from None
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise UserError("E320", f"no row of an architecture: {key}: {fault['msg']}", HOW, str(path)) from None
    if row.model_type in ARCHITECTURES:
        what = f"'{row.model_type}' has a built-in row, which this file cannot replace"
        raise UserError("E320", what, "Remove the key `architecture`", str(path))
    return row


def _row(content: Any) -> Architecture:
    return ROW.validate_python(content, strict=False)


def row_entry(model_type: str) -> dict[str, Any]:
    """What a stored model of this type carries: {KEY: its row}, or nothing where the row is built in."""
    row = added_row(model_type)
    return {} if row is None else {KEY: ROW.dump_python(row, mode="json", exclude_defaults=True)}


def use_stored_row(stored: Mapping[str, Any]) -> None:
    """Make the row that a stored model carries, if any, known to this process. Raises Damage where it is none, or another
    than one that this process already uses."""
    if KEY not in stored:
        return
    try:
        row = _row(stored[KEY])
    except ValidationError:
        raise Damage(f"has a {KEY} that is no row of an architecture") from None
    if row.model_type not in ARCHITECTURES:
        add_row(row)


def row_in(config: Mapping[str, Any]) -> Architecture:
    """The row of a stored model: the one that its config.json carries, else the built-in one. Raises Damage; UserError E301."""
    use_stored_row(config)
    return row_of(config["model_type"])


def row_digest(model_type: Any) -> bytes:
    """What the row adds to a model's sha256: two rows cut the same weights in different ways. Empty for a built-in row."""
    entry = row_entry(str(model_type).removeprefix(COMPRESSED))
    return json.dumps(entry, sort_keys=True).encode() if entry else b""
