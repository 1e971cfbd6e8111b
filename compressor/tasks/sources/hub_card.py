"""Which files the card of a data set may name: its own. `datasets` itself opens any file of the disk and any address."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlparse

import yaml

from compressor.inside import is_inside

README, PLAIN = "README.md", ".huggingface.yaml"
"""The files in which a data set says which files its configs and splits have."""


def named_outside(place: str, local: bool) -> str | None:
    """The first name in a data set's card that is none of its own files; None where there is none.

    To be asked before `datasets` reads the card: it sends requests to find files. `place` is OWNER/NAME, or a `local` folder.
    """
    return next((name for name in _names_in_card(place, local) if not _is_own(name, place, local)), None)


def found_outside(builder: Any, place: str, local: bool) -> str | None:
    """The first file that a builder of `datasets` would read and that is none of the data set's own, links followed."""
    files = [file for split in (getattr(builder.config, "data_files", None) or {}).values() for file in split]
    return next((file for file in files if not _lies_in(file, place, local)), None)


def _is_own(name: str, place: str, local: bool) -> bool:
    """Whether a name is a path or a pattern below the data set, on the hub also by its address there."""
    inner = name if local else re.sub(rf"^hf://datasets/{re.escape(place)}(@[^/]*)?/", "", name)
    addressed = urlparse(inner).scheme or "://" in inner or "::" in inner
    return not addressed and not inner.startswith("/") and ".." not in PurePosixPath(inner).parts


def _lies_in(file: str, place: str, local: bool) -> bool:
    """Whether a file, by its path or its address, is one of the data set's."""
    if local:
        return os.path.isabs(file) and is_inside(Path(file), Path(place))
    return file.startswith("hf://") and _is_own(file, place, local)


def _names_in_card(place: str, local: bool) -> Iterator[str]:
    """What the configs of a card give as `data_files` and `data_dir`; entries of other types are told by `datasets`."""
    for card in _cards(place, local):
        configs = card.get("configs")
        for config in configs if isinstance(configs, list) else ():
            if isinstance(config, dict):
                yield from _texts([config.get("data_files"), config.get("data_dir")])


def _cards(place: str, local: bool) -> Iterator[dict[str, Any]]:
    """The content of a data set's cards. Raises ValueError where one is no mapping, and what reading and the hub's client
    raise."""
    from huggingface_hub.repocard import metadata_load

    if (path := _file(place, local, README)) is not None:
        yield metadata_load(path) or {}
    if (path := _file(place, local, PLAIN)) is not None:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        if not isinstance(content, dict):
            raise ValueError(f"a {PLAIN} that is no mapping")
        yield content


def _file(place: str, local: bool, name: str) -> Path | None:
    """A file of a data set; None where it has none, or is out of reach, which `datasets` then tells."""
    if local:
        return path if (path := Path(place, name)).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    with suppress(EntryNotFoundError, RepositoryNotFoundError):
        return Path(hf_hub_download(place, name, repo_type="dataset"))
    return None


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value of a card."""
    if isinstance(value, str):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _texts(inner)
