"""What a deployment publishes, a model of a repository, and how."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from compressor.digests import sha256_of
from compressor.errors import UserError
from serving.deployment.target import CONFIG, Target, is_beside, version_files
from serving.repository import config_bytes, read_config, version_folders
from serving.repository_safety import leads_out


@dataclass(frozen=True)
class Options:
    """`most_ms`: largest median latency of a request; None: the limit is relative to the version before."""

    run: str
    most_ms: float | None = None
    keep: int = 3
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Source:
    """One model of a repository, that of a run or one that holds several versions: the newest, its config and the files that
    this names."""

    name: str
    folder: Path

    @cached_property
    def version(self) -> Path:
        """The newest version's folder. Raises UserError E727 where there is none, E757, and E756 for one whose deployment has
        not ended: what stands beside it may be that of the version before."""
        newest = version_folders(self.folder)[-1]
        if not Target.at(str(self.folder.parent)).finished(self.folder.name, int(newest.name)):
            what = f"version {newest.name} of '{self.name}' is being deployed here, or its deployment was killed"
            fix = "Wait until it has ended; after one that was killed repeat the deployment to this repository"
            raise UserError("E756", what, fix, str(self.folder))
        return newest

    def refuse_links(self) -> None:
        """Raises UserError E724 for a link out of the repository among the files to publish and their folders, whose target
        would be published, and for a link to a folder in the version, whose files would be left out."""
        names = [f"{self.version.name}/{name}" for name in version_files(self.version)]
        for name in map(Path, (*names, *self._paths_beside())):
            for part in (*reversed(name.parents), name):
                if leads_out(str(part), self.folder, self.folder):
                    what, fix = "a link out of the repository, whose target would be published", "Put the target in its place"
                    raise UserError("E724", what, fix, str(self.folder / part))
        for path in sorted(self.version.rglob("*")):
            if path.is_symlink() and path.is_dir():
                what, fix = "a link to a folder, whose files would not be published", "Put the target in its place"
                raise UserError("E724", what, fix, str(path))

    def _paths_beside(self) -> dict[str, Path]:
        files = {path.relative_to(self.folder).as_posix(): path for path in self.folder.rglob("*") if path.is_file()}
        return {name: path for name, path in files.items() if is_beside(name)}

    @property
    def beside(self) -> dict[str, bytes]:
        """The config and the files that it names: path -> content."""
        return {name: path.read_bytes() for name, path in self._paths_beside().items()}

    def beside_as(self, name: str) -> dict[str, bytes]:
        """The same for the model under another name."""
        config = read_config(self.folder)
        config.name = name
        return self.beside | {CONFIG: config_bytes(config)}

    @cached_property
    def sha256(self) -> str:
        """Over every file: names and contents. The version counts as version 1, as which a run wrote it."""
        files = {f"1/{name}": path for name, path in version_files(self.version).items()}
        files |= {name: self.folder / name for name in self.beside}
        listed = "".join(f"{name} {sha256_of(files[name])}\n" for name in sorted(files, key=Path))
        return hashlib.sha256(listed.encode()).hexdigest()
