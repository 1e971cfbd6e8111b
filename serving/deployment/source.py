"""What a deployment publishes, a model of a run's repository, and how."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from google.protobuf import text_format

from compressor.digests import sha256_of
from serving.deployment.target import CONFIG
from serving.repository import read_config


@dataclass(frozen=True)
class Options:
    """`most_ms`: largest median latency of a request; None: the limit is relative to the version before."""

    run: str
    most_ms: float | None = None
    keep: int = 3
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Source:
    """One model of a repository that a run wrote: version 1, its config and the files that this names."""

    name: str
    folder: Path

    @property
    def version(self) -> Path:
        return self.folder / "1"

    @property
    def beside(self) -> dict[str, bytes]:
        """The config and the files that it names: path -> content."""
        files = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_relative_to(self.version))
        return {path.relative_to(self.folder).as_posix(): path.read_bytes() for path in files}

    def beside_as(self, name: str) -> dict[str, bytes]:
        """The same for the model under another name."""
        config = read_config(self.folder)
        config.name = name
        return self.beside | {CONFIG: text_format.MessageToString(config).encode()}

    @cached_property
    def sha256(self) -> str:
        """Over every file: names and contents."""
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        listed = "".join(f"{path.relative_to(self.folder).as_posix()} {sha256_of(path)}\n" for path in files)
        return hashlib.sha256(listed.encode()).hexdigest()
