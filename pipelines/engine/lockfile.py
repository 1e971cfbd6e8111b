"""pipeline.lock.yaml: the inputs of a finished run, and the sha256 of every file that it wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from compressor.arguments import NAME_PATTERN
from compressor.errors import UserError
from compressor.run_store import MOST_BYTES, RUN_AGAIN, plain_yaml
from compressor.tasks import TaskConfig

_NAME = NAME_PATTERN.strip("^$")
ARTIFACT_NAME = r"[a-z_]+-[0-9a-f]{16}"
"""Pattern of the name of an artifact's folder; whatever else lies in a store is a user's own."""
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]


class StoredRecord(BaseModel):
    """Strict base class: values are not converted. Unknown keys of later versions are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


class Failure(StoredRecord):
    """A check that failed without stopping the run; `stage` is the id of its stage."""

    stage: str
    code: str
    what: str
    fix: str = ""
    """Empty in a record of an earlier version, which had another key."""

    def line(self) -> str:
        """The failure as one line, in the format of errors."""
        return f"{self.code} {self.what}. {self.fix}".replace("\n", " ").rstrip()


class LockedStage(StoredRecord):
    """A finished stage. Its artifact's folder is named by `stage` and `fingerprint`, which cannot lead out of the store."""

    id: Name
    stage: Annotated[str, StringConstraints(pattern=r"^[a-z_]+$")]
    config: dict[str, Any]
    kind: str
    artifact: str
    fingerprint: Sha256
    sha256: Sha256
    files: dict[str, Sha256]


class LockedModel(StoredRecord):
    """The pretrained base model; `artifact` is its folder's name where another run made it in the same store."""

    reference: str
    sha256: Sha256
    artifact: Annotated[str, StringConstraints(pattern=rf"^({ARTIFACT_NAME})?$")] = ""


class Lock(StoredRecord):
    """The whole lock file. A run has either one task or several; the name of a sweep's variant has two parts."""

    name: Annotated[str, StringConstraints(pattern=rf"^{_NAME}(/{_NAME})?$")]
    model: LockedModel
    task: dict[str, Any] | None = None
    tasks: dict[str, dict[str, Any]] | None = None
    data: dict[str, Sha256]
    seed: int
    threads: int = Field(ge=1)
    stages: list[LockedStage]
    failures: list[Failure] = Field(default_factory=list)

    @model_validator(mode="after")
    def _tasks(self) -> Lock:
        if (self.task is None) == (self.tasks is None):
            raise ValueError("one task, or several")
        for task in (self.task,) if self.tasks is None else self.tasks.values():
            _require_form(task)
        return self


REFUSED = ("value_error", "extra_forbidden")
"""Types of pydantic's faults that are of no form: values that do not go together, or a key of a later version. Both may be of a
task that another version accepted."""


def _require_form(task: dict[str, Any]) -> None:
    """Raises ValueError for a task of another form than any version writes."""
    try:
        TaskConfig.model_validate(task)
    except ValidationError as error:
        if any(fault["type"] not in REFUSED for fault in error.errors(include_url=False)):
            raise


def read_lock(path: Path) -> dict[str, Any]:
    """Read the lock file as plain data in the form of `Lock`. Raises UserError E803 if invalid, E801 (permission denied)."""
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError
        content = plain_yaml(path.read_bytes().decode("utf-8"))
        Lock.model_validate(content)
    except PermissionError as error:
        raise UserError("E801", f"cannot be read ({error.strerror})", "Change its permissions", str(path)) from None
    except (yaml.YAMLError, ValidationError, ValueError, OSError, RecursionError):
        raise UserError("E803", "unreadable or damaged", RUN_AGAIN, str(path)) from None
    return content
