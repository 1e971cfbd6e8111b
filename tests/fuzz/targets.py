"""The doors through which inputs come in: what is mutated, and which function of the project is given it.

A door is called as `door(folder, name)`: a sound seed in `folder`, of which the file `name` has been mutated. It returns, or
raises a CompressError; anything else is a finding.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz import mutators, seeds

Door = Callable[[Path, str], None]


@dataclass(frozen=True)
class Target:
    """`files` of a seed (patterns below `root`/`folder`/SEED) are mutated; `share` of all cases is this target's."""

    name: str
    folder: str
    files: tuple[str, ...]
    door: Door
    builders: tuple[Callable[[Path], None], ...]
    share: float
    structure: tuple[mutators.Change, ...] = ()
    """Instead of what the files' endings say."""

    def seeds(self, root: Path) -> list[Path]:
        """Folders, each with one sound input."""
        return sorted(path for path in (root / self.folder).iterdir() if path.is_dir())

    def victims(self, seed: Path) -> list[str]:
        """The files that may be mutated."""
        found = {str(path.relative_to(seed)) for pattern in self.files for path in seed.glob(pattern) if path.is_file()}
        return sorted(found)


class Spoken(Exception):
    """What a command must not say or end with."""


def command(*arguments: object) -> None:
    """The command line in this process. Raises what it raises, and Spoken for a traceback, E899 or another exit code."""
    from click.testing import CliRunner

    from pipelines.cli.commands import main

    # as `yes |` does: a question whether to run a stranger's code is answered
    done = CliRunner().invoke(main, [str(one) for one in arguments], input="y\n" * 100)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    said = done.output.strip()
    if "Traceback" in said or "E899" in said or done.exit_code not in (0, 2, 3):
        short = said if len(said) < 800 else f"{said[:400]} ... {said[-400:]}"
        raise Spoken(f"exit code {done.exit_code}: {short}")
    if done.exit_code:
        raise Refused(said)


class Refused(Exception):
    """A command that ended in exit code 2 or 3: fine. `code` is the first one that it said."""

    def __init__(self, said: str):
        super().__init__(said)
        found = re.search(r"\bE\d{3}\b", said)
        self.code = found[0] if found else "no code"


def load(folder: Path, name: str) -> None:
    """A pipeline file, by itself."""
    from pipelines.file.config import load_pipeline

    load_pipeline(folder / name)


def check(folder: Path, _name: str) -> None:
    """`compress check` on a pipeline beside its model and data."""
    try:
        command("check", folder / "pipeline.yaml")
    finally:
        no_stranger()


def no_stranger() -> None:
    """Raises Spoken where a folder's own code was run (seeds.EVIL)."""
    if hasattr(sys, "a_stranger_was_here"):
        del sys.a_stranger_was_here
        raise Spoken("a stranger's code was run")


def export(folder: Path, _name: str) -> None:
    """`compress export` of a model folder by itself."""
    try:
        command("export", folder / "model", "--out", folder / "out", "--precision", "fp32")
    except Refused:
        if (folder / "out").exists():
            raise Spoken("refused, and something was written") from None
        raise
    finally:
        no_stranger()


def check_then_build(folder: Path, name: str) -> None:
    """A base that passes the check can be built."""
    from compressor.models.build import build

    check(folder, name)
    build(folder / "model", seeds.LABELS)


def read_rows(folder: Path, _name: str) -> None:
    """Data files, as a run reads them first."""
    from compressor.tasks import TaskConfig
    from compressor.tasks.reading import check_data

    task = json.loads((folder / "task.json").read_text())
    check_data(TaskConfig(**{**task, "train": folder / task["train"], "validation": folder / task["validation"]}))


def look_at_delta(folder: Path, name: str) -> None:
    """`compress delta info`, and `diff` with a sound one."""
    command("delta", "info", folder / name)
    command("delta", "info", folder / name, "--json")
    command("delta", "diff", folder / name, folder / "sound.safetensors")


def apply_delta(folder: Path, name: str) -> None:
    """`compress delta apply`."""
    command("delta", "apply", folder / name, "--base", folder / "base", "--out", folder / "out")


def load_stored(folder: Path, _name: str) -> None:
    """`compressor.load` of a state on its base, or of a checkpoint."""
    import compressor

    base = folder / "base"
    compressor.load(folder / "stored", base=base if base.is_dir() else None)


def run_graph(folder: Path, name: str) -> None:
    """A session of an .onnx or an .xml, and one batch through it."""
    import numpy as np

    from export.parity.sides import runs
    from export.runtimes.sessions import run, session

    path = folder / name if name.endswith((".onnx", ".xml")) else next(folder.glob("*.xml"))
    live = session(path, threads=1)
    words = np.array([[2, 5, 9, 3], [2, 6, 3, 0]])
    rows = {"input_ids": words, "attention_mask": (words > 0).astype(np.int64), "token_type_ids": words * 0}
    with runs("fuzz"):
        run(live, rows)


def read_run(folder: Path, name: str) -> None:
    """Everything that reads a run's folder: the report, the plan, what is served, and the proof."""
    from pipelines.runs.served import find_repository

    run = folder / "runs" / "tiny"
    readers = [
        lambda: command("report", run),
        lambda: command("report", run, "--plan"),
        lambda: find_repository(run),
    ]
    if not name.endswith("report.json"):  # verify does not read it
        readers.append(lambda: command("verify", run, "--no-serve", "--stage", "select"))
    refused = None
    for reader in readers:
        refused = _tried(reader) or refused
    if refused is not None:
        raise refused


def _tried(reader: Callable[[], None]) -> Exception | None:
    """How it was refused, if it was: the next reader must stand the same file, too."""
    from compressor.errors import CompressError

    try:
        reader()
    except (CompressError, Refused) as error:
        return error
    return None


def clean(folder: Path, seed: Path) -> None:
    """Remove what a door has written beside its input."""
    for path in sorted(folder.rglob("*"), reverse=True):
        if not (seed / path.relative_to(folder)).exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


CONFIG = ("model/config.json", "model/config.json", "model/tokenizer.json", "model/tokenizer_config.json")
RUN = (
    "runs/tiny/pipeline.lock.yaml",
    "runs/tiny/*.json",
    "runs/.store/prune-*/artifact.json",
    "runs/.store/deploy-*/artifact.json",
)
DELTA = ("tuned.safetensors",)

TARGETS = {
    target.name: target
    for target in (
        Target("pipeline text", "pipeline text", ("*.yaml",), load, (seeds.pipelines,), 0.28),
        Target(
            "pipeline check", "pipeline check", ("pipeline.yaml",), check, (seeds.pipelines,), 0.05, (mutators.yaml_values,)
        ),
        Target("data", "data", ("train.*", "dev.*"), read_rows, (seeds.data,), 0.3),
        Target("delta", "delta", DELTA, look_at_delta, (seeds.deltas,), 0.04),
        Target("sealed delta", "delta", DELTA, look_at_delta, (seeds.deltas,), 0.05, (mutators.delta,)),
        Target("applied delta", "delta", DELTA, apply_delta, (seeds.deltas,), 0.02, (mutators.delta,)),
        Target("model config", "model", CONFIG, check, (seeds.models,), 0.1),
        Target("weights", "model", ("model/*.safetensors*",), check_then_build, (seeds.models,), 0.04),
        Target("checkpoint", "checkpoint", ("stored/*",), load_stored, (seeds.stored,), 0.03),
        Target("state", "state", ("stored/*",), load_stored, (seeds.stored,), 0.03),
        Target("graph", "graph", ("*.onnx",), run_graph, (seeds.graphs, seeds.stored), 0.04),
        Target("openvino", "openvino", ("*.xml", "*.bin"), run_graph, (seeds.graphs,), 0.01),
        # a sound model takes seconds: only the rows of cases.py go through it
        Target("export", "model", CONFIG, export, (seeds.models,), 0.0),
        Target("run", "run", RUN, read_run, (seeds.stored,), 0.01),
    )
}
