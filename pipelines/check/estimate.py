"""Rough estimate of a run's time, memory and disk, from closed forms and one short measurement of this machine.

The rules give the order of magnitude:

- a training step costs a forward pass and as much again to carry gradients back, and once more where the base's own weights
  are trained; one pass of the dense model over the training rows if it is the teacher (over those that are read, where
  they are few), or as many as the training where its outputs are not stored (hidden states, scores of a vocabulary);
- scoring by gradients costs three forward passes a row, and every exported file computes all validation rows; work not
  measured in FLOPs (robust PCA, tracing, a server, a latency table) counts as a number of seconds. Each stage's row has its
  rule;
- where texts are generated, each of their tokens costs a pass of one token, and each step the time in which weights are read;
- FLOPs run at a share of the speed of one large matrix product on this machine, between FAST and SLOW;
- training holds 16 bytes for each parameter that it trains and 4 for the others, and the activations of its largest batch,
  where texts are learned several times the scores of the vocabulary, too;
- scores of weights that are ranked together are held several times, and an export several copies of the dense model;
- until it is done, a training keeps up to three checkpoints in the output folder, of 12 bytes for each parameter that it trains
  (16 with `keep_best`);
- what is timed against each other is open at once, one process a file; files that are only timed are temporary ones.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from compressor.account import Plan
from compressor.cost import human_bytes
from compressor.errors import UserError
from compressor.processor import free_memory, resident_memory
from pipelines.engine.disk import require_writable
from pipelines.engine.stage import Entry
from pipelines.file.config import Pipeline
from pipelines.reporting.format import human_seconds
from pipelines.stages.generating_cost import work_of_texts

FAST, SLOW = 0.7, 0.2
"""Shares of the speed of a large matrix product that whole models reach."""
SPREAD = 2.0
"""Work counted in seconds may take up to this many times as long."""
LIBRARIES = 1_200_000_000
"""Memory of torch, transformers and a runtime, in bytes."""
FEWEST = {"train": 1, "validation": 1, "tests": 0, "sequences": 1, "mean": 1, "longest": 1, "control": 0}
"""The fewest rows and tokens that stages may find, as `rows_of` counts them; and no control, which the cache may hold."""


def needs_of(pipeline: Pipeline, plans: Sequence[Plan], account: dict[str, Any], threads: int, out: Path) -> dict[str, Any]:
    """Seconds (least, most), bytes of memory and disk, free bytes of both, and the lines that report them.

    `plans` are the closed forms after every stage, `account` is what `checkup.account_of` found. Adds warnings to it.
    """
    rows = rows_of(account)
    works = _works(pipeline.stages, plans, lambda entry: rows | files_of(entry, account))
    speed, device = flops_a_second(threads)
    flops, constant = sum(estimate["flops"] for estimate in works), sum(estimate["seconds"] for estimate in works)
    seconds = (flops / (FAST * speed) + constant, flops / (SLOW * speed) + SPREAD * constant)
    spaces = spaces_of(works, out)
    try:
        require_writable(out, "give --out")
    except UserError as error:
        account["warnings"].append(f"{error.where}: {error.what}; {error.fix}")
    account["warnings"] += shortages(spaces)
    least, most = (human_seconds(bound) for bound in seconds)
    busy = "; other programs keep the processors busy" if os.getloadavg()[0] > (os.cpu_count() or 1) else ""
    time_line = f"about {least} to {most} ({speed / 1e9:,.0f} GFLOP/s measured, {device}{busy})"
    of_spaces = {
        space.name: f"about {human_bytes(space.needed)}, {human_bytes(space.free)} free{space.place}" for space in spaces
    }
    memory, disk = spaces[:2]
    return {
        "seconds": seconds,
        "flops_a_second": speed,
        "memory_bytes": memory.needed,
        "disk_bytes": disk.needed,
        "temporary_bytes": _most(works, "temporary"),
        "free": {"memory": memory.free, "disk": disk.free, "temporary": free_disk(Path(tempfile.gettempdir()))},
        "told": {"time": time_line, **of_spaces},
    }


def shortages_of_run(entries: Sequence[Entry], plans: Sequence[Plan], first: int, out: Path) -> list[str]:
    """What `needs_of` would warn of for the stages from number `first` on, as far as it follows from their models alone:
    whatever the rows are, they need as much. `plans` are the closed forms after every stage.

    Files that are gone when their stage is done do not count: short trainings write no checkpoints, and the cache may hold what
    would be timed. Nor do trainings on a GPU, which has their memory.
    """
    import torch

    works, card = _works(entries, plans[: len(entries)], lambda entry: FEWEST), torch.cuda.is_available()
    for entry, needs in zip(entries, works, strict=True):
        needs |= {"unfinished": 0, "temporary": 0} | ({"memory": 0} if card and entry.row.trains else {})
    return shortages(spaces_of(works[first:], out))


def _works(
    entries: Sequence[Entry], plans: Sequence[Plan], rows_for: Callable[[Entry], dict[str, Any]]
) -> list[dict[str, float]]:
    """What each stage needs, on the rows that `rows_for` gives for it."""
    pairs = zip(entries, plans, (plans[0], *plans[:-1]), strict=True)
    return [work(entry, plan, before, rows_for(entry)) for entry, plan, before in pairs]


class Space(NamedTuple):
    """Bytes that stages need of something, and that are free of it; `place` ends a line about them."""

    name: str
    needed: int
    free: int
    place: str = ""


def spaces_of(works: Sequence[dict[str, float]], out: Path) -> list[Space]:
    """Memory and disk, and temporary files where there are some on another disk than the output folder. What this process holds
    counts as free: it is a part of what is needed (the libraries are loaded already)."""
    memory, temporary = LIBRARIES + _most(works, "memory"), _most(works, "temporary")
    disk, folder = sum(each["disk"] for each in works) + _most(works, "unfinished"), Path(tempfile.gettempdir())
    apart = temporary > 0 and on_another_disk(folder, out)
    ours = free_memory() + resident_memory()
    spaces = [Space("memory", memory, ours), Space("disk", disk + (not apart) * temporary, free_disk(out))]
    return [*spaces, *([Space("temporary files", temporary, free_disk(folder), f" in {folder}")] if apart else [])]


def _most(works: Sequence[dict[str, float]], key: str) -> int:
    return max((each[key] for each in works), default=0)


def shortages(spaces: Sequence[Space]) -> list[str]:
    """A line for each of which more is needed than is free."""
    return [
        f"about {human_bytes(space.needed)} of {space.name} are needed, {human_bytes(space.free)} are free{space.place}"
        for space in spaces
        if space.needed > space.free
    ]


def files_of(entry: Entry, account: dict[str, Any]) -> dict[str, Any]:
    """What `checkup.account_of` found about the files and models that a stage names, and of rows that it makes, by key."""
    start = f"{entry.id}."
    return {name.removeprefix(start): facts for name, facts in account["files"].items() if name.startswith(start)}


def rows_of(account: dict[str, Any]) -> dict[str, Any]:
    """Rows of all tasks together, and the number of tokens of a mean row and of the longest one.

    `validation` and `tests` count rows of the model. `train` counts rows of the task, as batches and steps do: each is
    `sequences` rows of the model, more than one where it has choices, as only the rows of a single task have.
    """
    splits = {key: [task[key] for task in account["tasks"].values()] for key in ("train", "validation")}
    scored = [facts for task in account["tasks"].values() for key, facts in task.items() if key.partition(".")[0] == "test"]
    measured = {"validation": splits["validation"], "tests": scored}
    counts = {key: sum(split["rows"] * split["sequences"] for split in facts) for key, facts in measured.items()}
    counts["train"] = sum(split["rows"] for split in splits["train"])
    counts["sequences"] = max(split["sequences"] for split in splits["train"])
    texts = {"generated": splits["validation"], "generated_tests": scored}
    tokens = [split for facts in splits.values() for split in facts]
    rows = sum(split["rows"] for split in tokens)
    mean = sum(split["rows"] * split["tokens"]["mean"] for split in tokens) / rows
    longest = max(split["tokens"]["max"] for split in tokens)
    return {**counts, **_generated(texts), "mean": max(int(mean), 1), "longest": longest}


def _generated(splits: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The tokens that a model generates for all prompts of some files, its steps, and whether the main metric is of them, by
    name; without those that none is generated for."""
    texts = {name: [facts["generated"] for facts in each if "generated" in facts] for name, each in splits.items()}
    return {
        name: {
            **{key: sum(facts[key] for facts in each) for key in ("tokens", "steps")},
            "decides": any(facts["decides"] for facts in each),
        }
        for name, each in texts.items()
        if each
    }


def work(entry: Entry, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    """FLOPs, further seconds, bytes of memory, bytes left on disk, and of what a stage has there or in temporary files until it
    is done: what its row says, else the usual."""
    shape, forward = plan.shape, plan.shape.flops(rows["mean"])
    usual = {"flops": 0, "seconds": 1.0, "memory": 2 * shape.bytes, "disk": 0, "unfinished": 0, "temporary": 0}
    if entry.row.publishes_model:  # at most all weights
        measured = rows["validation"] + rows["tests"] * entry.row.scores_tests
        generating, waiting = work_of_texts(shape, rows, 1, tests=1) if entry.row.scores_tests else (0, 0)
        usual |= {"flops": measured * forward + generating, "seconds": 1.0 + waiting, "disk": shape.bytes}
    return usual | entry.row.estimate(entry.config, plan, before, rows)


def flops_a_second(threads: int) -> tuple[float, str]:
    """FLOP/s of a float32 matrix product on the training device, measured for a quarter of a second, and a description."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = (torch.rand(size, device=device) for size in ((512, 768), (768, 3072)))
        best = float("inf")
        stop = time.monotonic() + 0.25
        while time.monotonic() < stop:
            start = time.perf_counter()
            left @ right
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return 2 * 512 * 768 * 3072 / best, "the graphics card" if device == "cuda" else f"{threads} threads"


def free_disk(out: Path) -> int:
    """Free bytes on the disk of the output folder, which may not exist yet."""
    return shutil.disk_usage(_existing(out)).free


def on_another_disk(folder: Path, out: Path) -> bool:
    """Whether what is written to one folder leaves the free bytes of the other as they are."""
    return _existing(folder).stat().st_dev != _existing(out).stat().st_dev


def _existing(folder: Path) -> Path:
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
