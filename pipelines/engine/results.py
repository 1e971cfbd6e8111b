"""What a run leaves in its folder: run.json at every step; at its end the lock file, the report and the files of tasks."""

from __future__ import annotations

import re
import time
from pathlib import Path

import yaml

from compressor.errors import CompressError, UserError
from compressor.models.row_file import row_entry
from compressor.run_store import LOCK_FILE
from pipelines.engine.attempt import error_record, write_attempt
from pipelines.engine.invocation import Run
from pipelines.engine.lockfile import ARTIFACT_NAME, read_lock
from pipelines.engine.stage import TASKS
from pipelines.engine.stage_inputs import by_key
from pipelines.engine.store import digest, replace_files
from pipelines.file.config import without_id

REPORTS = ("report.html", "report.md", "report.json")
"""The files of a report, the one to be shown first; a user may keep others beside them, such as report.pdf."""


def write_account(run: Run, status: str, error: CompressError | None = None) -> None:
    """Write run.json: the progress of this attempt, and how it ended. Raises OSError."""
    base = run.ready.base
    facts = {
        "status": status,
        "started": run.started,
        "seconds": time.monotonic() - run.clock,
        "stage": run.current,
        "stages": run.records,
        "parity": [{**record, "stage": entry} for entry, records in run.proofs.items() for record in records],
        "failures": run.failures,
        "error": error_record(error, run.current, run.log) if error else None,
        # the lock file has the reference, which may be a relative path
        "model_folder": str(base.folder),
        "model_sha256": base.sha256,
        "machine": run.machine,
    }
    write_attempt(run.folder, facts)


def publish_results(run: Run) -> None:
    """Replace an earlier run's lock file and results for the user by those of this run: reports, files of tasks.

    Files of the user beside them stay.
    """
    of_tasks = _files_of_tasks(run.folder)
    results: dict[Path, Path] = {}
    for artifact in run.artifacts:
        for path in sorted(artifact.folder.glob("report.*" if artifact.kind == "report" else f"{TASKS}/*")):
            results[run.folder / path.relative_to(artifact.folder)] = path
    for folder in {path.parent for path in results}:
        folder.mkdir(exist_ok=True)
    contents = {place: path.read_bytes() for place, path in results.items()}
    replace_files({**contents, run.folder / LOCK_FILE: _lock_file(run)})
    for earlier in [*(run.folder / name for name in REPORTS), *of_tasks]:
        if earlier not in results:
            earlier.unlink(missing_ok=True)


def _files_of_tasks(folder: Path) -> list[Path]:
    """The files of tasks that the last finished run left in its folder, by its lock file; none where that cannot be read."""
    try:
        stages = read_lock(folder / LOCK_FILE)["stages"]
    except UserError:
        return []  # without it nobody can tell them from those of the user
    return [folder / name for stage in stages for name in stage["files"] if Path(name).parent == Path(TASKS)]


def _artifact(run: Run) -> dict[str, str]:
    """The base's artifact where another run made it in this store: its reference may lead to another model later."""
    folder = run.ready.base.folder
    made = folder.parent == run.store.root.resolve() and re.fullmatch(ARTIFACT_NAME, folder.name)
    return {"artifact": folder.name} if made else {}


def _lock_file(run: Run) -> bytes:
    """Content of pipeline.lock.yaml: resolved config, fingerprint and sha256s of every artifact; failed checks, if any."""
    pipeline, entries = run.pipeline, {entry.id: entry for entry in run.entries}
    stages = [
        {
            "id": artifact.entry,
            "stage": artifact.stage,
            "config": without_id(entries[artifact.entry].config),
            "kind": artifact.kind,
            "artifact": artifact.id,
            "fingerprint": run.fingerprints[artifact.entry],
            "sha256": digest(artifact),
            "files": artifact.files,
        }
        for artifact in run.artifacts
    ]
    content = {
        "name": pipeline.name,
        "model": {
            "reference": run.ready.base.reference,
            "sha256": run.ready.base.sha256,
            **_artifact(run),
            **({} if pipeline.architecture is None else row_entry(pipeline.architecture.model_type)),
        },
        **by_key({path: task.model_dump(mode="json") for path, task in pipeline.all_tasks.items()}),
        "data": {str(path): sha256 for path, sha256 in run.ready.data.items()},
        "seed": pipeline.seed,
        "threads": run.threads,
        "stages": stages,
        **({"failures": [dict(failure) for failure in run.failures]} if run.failures else {}),
    }
    return yaml.safe_dump(content, sort_keys=False, allow_unicode=True).encode()
