"""What a run will need, roughly: time, memory and disk, from closed forms and one short measurement of this machine.

The rules, each a figure to be wrong by a factor and not by a power of ten:

- a training step costs a forward pass and as much again to carry gradients back, and once more where the base's own weights are
  trained; one pass of the dense model over the training rows where it teaches;
- scoring by gradients costs three forward passes a row, robust PCA SECONDS_A_MATRIX, an exported file SECONDS_A_FILE, a server
  SECONDS_A_SERVER, a latency table SECONDS_A_TABLE, and every file is asked for all validation rows;
- FLOPs run at a share of the speed of one large matrix product on this machine, between FAST and SLOW;
- training holds 16 bytes for each parameter that it trains and 4 for the others, and the activations of its largest batch.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.account import Plan
from compressor.cost import ModelShape, human_bytes
from compressor.methods import method
from pipelines.engine.stage import Entry
from pipelines.file.config import Pipeline
from pipelines.stages.training_config import TrainingConfig
from pipelines.terminal.progress import human_seconds

FAST, SLOW = 0.7, 0.2
"""Shares of the speed of a large matrix product that whole models reach."""
SECONDS_A_MATRIX, SECONDS_A_FILE, SECONDS_A_SERVER, SECONDS_A_TABLE = 0.1, 6.0, 15.0, 60.0
SPREAD = 2.0
"""What is counted in seconds may take so many times as long."""
LIBRARIES = 1_200_000_000
"""Bytes that torch, transformers and a runtime hold."""


def needs_of(pipeline: Pipeline, plans: Sequence[Plan], account: dict[str, Any], threads: int, out: Path) -> dict[str, Any]:
    """Seconds (least, most), bytes of memory and disk, what is free of both, and the lines that tell it.

    `plans` are the closed forms after every stage, `account` is what `checkup.account_of` found. Adds warnings to it.
    """
    rows = rows_of(account)
    works = [
        work(entry, plan, before, rows)
        for entry, plan, before in zip(pipeline.stages, plans, (plans[0], *plans[:-1]), strict=True)
    ]
    speed, device = flops_a_second(threads)
    flops, constant = sum(one["flops"] for one in works), sum(one["seconds"] for one in works)
    seconds = (flops / (FAST * speed) + constant, flops / (SLOW * speed) + SPREAD * constant)
    memory = LIBRARIES + max((one["memory"] for one in works), default=0)
    disk = sum(one["disk"] for one in works)
    free = {"memory": free_memory(), "disk": free_disk(out)}
    for name, need in (("memory", memory), ("disk", disk)):
        if need > free[name]:
            account["warnings"].append(f"about {human_bytes(need)} of {name} are needed, {human_bytes(free[name])} are free")
    least, most = (human_seconds(one) for one in seconds)
    busy = "; other programs keep the processors busy" if os.getloadavg()[0] > (os.cpu_count() or 1) else ""
    told = {
        "time": f"about {least} to {most} ({speed / 1e9:,.0f} GFLOP/s measured, {device}{busy})",
        "memory": f"about {human_bytes(memory)}, {human_bytes(free['memory'])} free",
        "disk": f"about {human_bytes(disk)}, {human_bytes(free['disk'])} free",
    }
    return {"seconds": seconds, "flops_a_second": speed, "memory_bytes": memory, "disk_bytes": disk, "free": free, "told": told}


def rows_of(account: dict[str, Any]) -> dict[str, Any]:
    """Rows of all tasks together, and the tokens of a mean and of the longest row."""
    splits = {key: [task[key] for task in account["tasks"].values()] for key in ("train", "validation")}
    counts = {key: sum(one["rows"] for one in found) for key, found in splits.items()}
    tokens = [one for found in splits.values() for one in found]
    whole = sum(one["rows"] for one in tokens)
    mean = sum(one["rows"] * one["tokens"]["mean"] for one in tokens) / whole
    return {**counts, "mean": max(int(mean), 1), "longest": max(one["tokens"]["max"] for one in tokens)}


def work(entry: Entry, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    """FLOPs, further seconds, bytes of memory and bytes left on disk of one stage."""
    config, makes, shape = entry.config, entry.row.produces, plan.shape
    forward = shape.flops(rows["mean"])
    nothing = {"flops": 0, "seconds": 1.0, "memory": 2 * shape.bytes, "disk": 0}
    if isinstance(config, TrainingConfig):
        return training(config, plan, before, rows)
    if makes == "omega":
        asked = getattr(config, "samples", None) or 1024
        by_data = entry.row.reads_data(config)
        matrices = len(shape.matrices(config.modules))
        return {**nothing, "flops": 3 * asked * forward if by_data else 0, "seconds": 1 + SECONDS_A_MATRIX * matrices}
    search = getattr(config, "search", None)
    if search is not None and search.target.timed:
        nothing = {**nothing, "seconds": SECONDS_A_TABLE}
    if makes == "model":  # removed, or merged: whole weights at most; losses are looked at on a few hundred rows
        return {**nothing, "flops": 6 * 512 * forward + rows["validation"] * forward, "disk": shape.bytes}
    if makes == "onnx":
        files = 2 * sum(len(config.precisions_of(runtime)) for runtime in config.runtime)
        return {
            "flops": files * rows["validation"] * forward,
            "seconds": files * SECONDS_A_FILE,
            "memory": 6 * shape.bytes,
            "disk": files * before.dense.bytes,
        }
    if makes == "repository":
        return {**nothing, "seconds": SECONDS_A_SERVER, "disk": shape.bytes}
    if makes == "measurements":
        calls = sum(batch * before.dense.flops(length) for batch in config.batch for length in config.length)
        return {**nothing, "flops": 5 * (config.rounds * calls + rows["validation"] * forward), "seconds": 5 * SECONDS_A_FILE}
    return nothing


def training(config: TrainingConfig, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    """A tune or a recover, its teacher and its validation included."""
    shape, trained = plan.shape, plan.trainable[-1][1] + plan.shape.head
    whole = config.method == "full" or (config.method != "same" and method(config.method).trains_base)
    forward = shape.flops(rows["mean"])
    flops = (3 if whole else 2) * forward * rows["train"] * config.epochs + rows["validation"] * forward
    teacher = bool(getattr(config, "distill", False))
    if teacher:
        flops += rows["train"] * plan.dense.flops(rows["mean"])
    activations = config.batch_size * saved_bytes(shape, min(rows["longest"], plan.length))
    return {
        "flops": flops,
        "seconds": 3.0,
        "memory": shape.bytes + 12 * trained + activations + teacher * plan.dense.bytes,
        "disk": shape.bytes if whole else 8 * trained,
    }


def saved_bytes(shape: ModelShape, length: int) -> int:
    """Bytes of activations that a row of `length` tokens keeps for the way back, float32: of each token about 10 vectors of the
    hidden size and 3 of the FFN's in every layer, and the attention's weights twice."""
    layers = shape.layers
    return 4 * length * sum(10 * shape.hidden + 3 * layer.neurons + 2 * layer.heads * length for layer in layers)


def flops_a_second(threads: int) -> tuple[float, str]:
    """FLOP/s of a matrix product in float32 where training will run, measured for a quarter of a second, and what that is."""
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


def free_memory() -> int:
    """Bytes that a process may still take: of the machine, or of its container where that allows less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")]
    try:
        facts = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found = [1024 * int(facts["MemAvailable"].split()[0])]
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError, KeyError):  # another system, or no limit ("max")
        pass
    return max(min(found), 0)


def free_disk(out: Path) -> int:
    """Bytes free where the output folder is, or will be."""
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free
