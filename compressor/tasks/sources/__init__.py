"""Where rows come from: the bytes of a file, Parquet, data sets of the Hugging Face hub, and GLUE's tasks by name."""

from __future__ import annotations

import importlib
from types import ModuleType

from compressor.errors import UserError


def needed(package: str, purpose: str, where: str) -> ModuleType:
    """Import a package of the extra `data`. Raises UserError E907 if it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        name = package.partition(".")[0]
        lacks = isinstance(error, ModuleNotFoundError) and error.name == name
        what = f"{purpose} needs the package {name}, which {'is not installed' if lacks else f'cannot be imported ({error})'}"
        raise UserError("E907", what, "Run: pip install 'compress-pipeline[data]'", where) from None
