"""Checks that the data files and the base do not change during a run, from the first hash to the last stage."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from compressor.digests import Mark, mark_of, sha256_of
from compressor.errors import UserError
from compressor.models.files.model_folder import COPIED, TOKENIZER_FILES
from compressor.models.files.weight_files import tensor_files
from compressor.models.reference import Reference, model_digest
from pipelines.engine.preflight import Ready, copied_digests


class Originals:
    """The data files, the base and the other models in a run's fingerprints.

    A stage may use its inputs only if the files have the same hash before and after it, and were not touched in between: a
    file that is replaced and restored has equal bytes, but a different mark.
    """

    def __init__(self, ready: Ready):
        self._ready = ready
        self._marks = self._look()

    def before(self) -> None:
        """Check for files touched since the last check, before a stage begins. Raises UserError E807."""
        marks = self._look()
        if marks != self._marks:
            self._marks = marks
            self._compare()

    def require(self) -> None:
        """Hash all files again. Raises UserError E807 unless they match the fingerprints and were not touched since."""
        self._compare()
        for path, mark in self._look().items():
            if mark != self._marks.get(path):
                raise _changed("was written to while the run was reading it", path)

    def _compare(self) -> None:
        # not `resolve`: the folder was already validated, only its bytes matter
        for path, sha256 in self._ready.data.items():
            try:
                current = sha256_of(path)
            except OSError:
                raise _changed("disappeared while the run was reading it", path) from None
            if current != sha256:
                raise _changed("changed while the run was reading it", path)
        for model in self._models():
            try:
                current = model_digest(model.folder)
            except (UserError, OSError) as error:
                raise _changed("the model's folder changed while the run was reading it", model.folder) from error
            if current != model.sha256:
                raise _changed("the model's folder changed while the run was reading it", model.folder)
        if (current := copied_digests(self._ready.base.folder)) != (before := self._ready.copied):
            name = next(name for name in COPIED if current.get(name) != before.get(name))
            raise _changed("changed while the run was reading it", self._ready.base.folder / name)

    def _models(self) -> Iterator[Reference]:
        yield self._ready.base
        yield from self._ready.models.values()

    def _look(self) -> dict[Path, Mark | None]:
        return {path: mark_of(path) for path in self._files()}

    def _files(self) -> Iterator[Path]:
        yield from self._ready.data
        for folder in (model.folder for model in self._models()):
            yield from (folder / name for name in ("config.json", *TOKENIZER_FILES))
            yield from (folder / name for name in tensor_files(folder))
            yield from sorted(folder.glob("*.safetensors.index.json"))
        yield from (self._ready.base.folder / name for name in COPIED)


def _changed(what: str, path: Path) -> UserError:
    fix = "Nothing of this stage was kept: run the same command again, and do not change the file meanwhile"
    return UserError("E807", what, fix, str(path))
