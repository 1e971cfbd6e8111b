"""run.json: the state of the last attempt at a run, whether it finished, failed or was interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from compressor.errors import CheckError, CompressError, UserError, UserErrors
from compressor.run_store import RUN_AGAIN, RUN_FILE
from pipelines.engine.lockfile import Failure, StoredRecord
from pipelines.engine.store import write_atomic
from pipelines.reporting.format import human_seconds

DONE, CHECKS_FAILED, FAILED, STOPPED, RUNNING = "done", "failed checks", "failed", "stopped", "running"


class StageRecord(StoredRecord):
    """A finished stage."""

    id: str
    stage: str
    artifact: str
    reused: bool
    seconds: float


class ErrorRecord(StoredRecord):
    """The error that ended the attempt: the parts of its message, its stage and that stage's log ('' if there is none)."""

    code: str
    what: str
    fix: str = ""
    """As in `Failure`."""
    where: str
    stage: str
    log: str
    lines: list[str] = Field(default_factory=list)
    """All error lines, if there were several."""

    def shown(self) -> list[str]:
        place = f"{self.where}: " if self.where else ""
        return self.lines or [f"{self.code} {place}{self.what}. {self.fix}".replace("\n", " ").rstrip()]


class Attempt(StoredRecord):
    """The last attempt at a run. `stage` is its current or last stage; `parity` are the records of every comparison so far,
    each with the id of its stage."""

    status: Literal["done", "failed checks", "failed", "stopped", "running"]
    started: float
    seconds: float
    stage: str = ""
    stages: list[StageRecord] = Field(default_factory=list)
    parity: list[dict[str, Any]] = Field(default_factory=list)
    failures: list[Failure] = Field(default_factory=list)
    error: ErrorRecord | None = None
    model_folder: str = ""
    model_sha256: str = ""
    machine: dict[str, Any] = Field(default_factory=dict)

    @property
    def finished(self) -> bool:
        """Whether the lock file and the report belong to this attempt."""
        return self.status in (DONE, CHECKS_FAILED)

    def headline(self) -> str:
        """One sentence about how the attempt ended."""
        at = f" in stage '{self.stage}'" if self.stage else ""
        after = f"{human_seconds(max(self.seconds, 0))} after its start"
        return {
            DONE: "the last attempt finished",
            CHECKS_FAILED: "the last attempt finished, and checks of its results failed",
            FAILED: f"the last attempt failed{at}, {after}",
            STOPPED: f"the last attempt was stopped{at}, {after}",
            RUNNING: f"the last attempt did not end{at}: it is still running, or it was killed",
        }[self.status]

    def fault(self) -> CompressError:
        """The error that ended the attempt, in the form reported by a check of the run."""
        if self.error is None:
            return CheckError("E808", self.headline(), "Run the same command again: it continues where this one ended")
        what = f"{self.headline()}: {' '.join(self.error.shown())}"
        return CheckError("E808", what, "Then run the same command again: what is finished is kept")


def last_attempt(folder: Path) -> Attempt | None:
    """Read run.json of a run folder; None where there is none. Raises UserError E803, E801 (cannot be read)."""
    path = folder / RUN_FILE
    try:
        # pydantic's own reader refuses the escapes of a path that is not UTF-8
        return Attempt.model_validate(json.loads(path.read_bytes()))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:
        raise UserError("E801", f"cannot be read ({error.strerror})", "Change its permissions", str(path)) from None
    except (ValidationError, ValueError, RecursionError, OSError):
        raise UserError("E803", "unreadable or damaged", RUN_AGAIN, str(path)) from None


def write_attempt(folder: Path, facts: dict[str, Any]) -> None:
    """Replace run.json. A path that is not UTF-8 is written with escapes."""
    content = json.dumps(facts, indent=1, ensure_ascii=False)
    write_atomic(folder / RUN_FILE, f"{content}\n".encode("utf-8", "backslashreplace"))


def error_record(error: CompressError, stage: str, log: Path | None) -> dict[str, Any]:
    """An error in the form of `ErrorRecord`."""
    parts = {key: getattr(error, key) for key in ("code", "what", "fix", "where")}
    several = [str(item) for item in error.errors] if isinstance(error, UserErrors) and len(error.errors) > 1 else []
    return {**parts, "stage": stage, "log": str(log) if log else "", **({"lines": several} if several else {})}


def checks_failed(failures: list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> CheckError:
    """E615, the error line at the end of a run with failed checks."""
    named = ", ".join(f"{failure['code']} in {failure['stage']}" for failure in failures)
    checks = "1 check" if len(failures) == 1 else f"{len(failures)} checks"
    return CheckError("E615", f"{checks} failed: {named}", "Each is listed above; the report shows what was proven")
