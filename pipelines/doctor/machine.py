"""What the doctor says of the machine: processor, threads, memory, disk and caches."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from compressor.control_groups import cpu_quota
from compressor.processor import BF16, allowed_cores, free_memory, memory_limit, physical_cores, processor
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.doctor.findings import FAULT, GIGABYTE, OK, WARNING, Finding
from pipelines.engine.disk import existing_part

LEAST_MEMORY, GOOD_MEMORY = 1.5 * GIGABYTE, 4 * GIGABYTE

LEAST_DISK, GOOD_DISK = 0.3 * GIGABYTE, 2 * GIGABYTE

LEAST_SHARED = 2**25
"""Least size of /dev/shm, in bytes, with which Triton's Python backend can start."""


def instructions() -> Iterator[Finding]:
    """The processor's instruction sets, and what follows for the choice of a precision."""
    facts = processor()
    names = set(facts["instructions"])
    shown = f"{facts['cpu']}; {', '.join(facts['instructions']) or 'no instructions known'}"
    yield Finding("processor", OK, shown)
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in names:
        yield Finding("avx2", WARNING, "missing: everything is several times slower", "Use a processor of the last ten years")
    if not names & {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}:
        what = "no VNNI: int8 weights get 7 bits and gain less; OpenVINO's int8 takes longer than fp32"
        yield Finding("int8", WARNING, what, "export: {precision: auto} keeps what is fast and good, and fp32 always works")
    else:
        yield Finding("int8", OK, "in hardware" + (", with AMX tiles" if "amx_int8" in names else ""))
    able = [row.title for row in RUNTIMES.values() if names & set(row.instructions.get("bf16", ()))]
    exported = [f"export writes it for {' and '.join(able)}"] if able else []
    if names & {*BF16}:
        yield Finding("bf16", OK, f"in hardware: {', '.join([*exported, 'trainings take less time with precision: bf16'])}")


def threads() -> Iterator[Finding]:
    """Number of cores, and the thread settings in the environment."""
    cores, quota, requested = physical_cores(), cpu_quota(), os.environ.get("OMP_NUM_THREADS", "")
    limit = f", a quota of {quota:g} by the container" if quota else ""
    yield Finding("cores", OK, f"{cores} to compute on, {len(allowed_cores())} of {os.cpu_count()} allowed{limit}")
    if requested and not (requested.split(",")[0].strip().isdecimal() and int(requested.split(",")[0]) > 0):
        yield Finding("OMP_NUM_THREADS", WARNING, f"{requested[:40]!r} is not a number of threads", "unset OMP_NUM_THREADS")
    elif requested and int(requested.split(",")[0]) > cores:
        what = f"{requested[:40]}, more than there are cores; {cores} are used"
        yield Finding("OMP_NUM_THREADS", WARNING, what, "unset OMP_NUM_THREADS, or `threads` in the pipeline")
    elif requested:
        yield Finding("OMP_NUM_THREADS", OK, f"{requested[:40]}: the threads of a pipeline that sets none")
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        what = "not PASSIVE: idle threads spin and take cores from those that work"
        yield Finding("OMP_WAIT_POLICY", WARNING, what, "export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0")


def memory() -> Iterator[Finding]:
    """Memory of the machine, the limit of the container or the job, and what is free of both."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, free = memory_limit(), free_memory()
    status = FAULT if free < LEAST_MEMORY else WARNING if free < GOOD_MEMORY else OK
    allowed = f", {_size(limit)} by the limit of the container or job" if limit else ""
    what = f"{_size(total)}{allowed}, {_size(free)} free"
    yield Finding("memory", status, what, "" if status == OK else "Free some, or use a smaller batch_size and fewer threads")


def shared_memory() -> Iterator[Finding]:
    """Findings on /dev/shm, through which Triton's Python backend communicates; containers have 64 MB of it."""
    place = Path("/dev/shm")
    if not place.is_dir() or not os.access(place, os.W_OK):
        yield Finding(
            "/dev/shm", FAULT, "not there or not writable: Triton's Python backend needs it", "docker run --shm-size=1g"
        )
        return
    free = shutil.disk_usage(place).free
    status = FAULT if free < LEAST_SHARED else WARNING if free < 2 * LEAST_SHARED else OK
    yield Finding("/dev/shm", status, f"{_size(free)} free", "" if status == OK else "docker run --shm-size=1g")


def disk(out: Path) -> Iterator[Finding]:
    """Free space and write permission for the folders of runs and of temporary files."""
    for name, place, option in ((f"{out}/", out, "another --out"), ("temporary", Path(tempfile.gettempdir()), "TMPDIR=FOLDER")):
        existing = existing_part(place)
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            yield Finding(name, FAULT, f"{existing} cannot be written", f"Use {option}")
            continue
        free = shutil.disk_usage(existing).free
        status = FAULT if free < LEAST_DISK else WARNING if free < GOOD_DISK else OK
        yield Finding(name, status, f"{_size(free)} free in {existing}", "" if status == OK else f"Make room, or use {option}")


def caches() -> Iterator[Finding]:
    """Folders of the hub's cache and of the server's record, and whether access to the hub is allowed."""
    home = Path(os.environ.get("HOME") or "~").expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or base / "huggingface") / "hub")
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off")
    meaning = "set: models come from folders, packages and the cache alone" if offline else "not set: hub ids are fetched"
    yield Finding("HF_HUB_OFFLINE", OK, meaning)
    for name, place, fix in (
        ("hub cache", hub, "export HF_HOME=FOLDER; packages and folders work without"),
        ("cache", base, "export XDG_CACHE_HOME=FOLDER: compress serve keeps its note there"),
    ):
        existing = existing_part(place)
        able = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        yield Finding(name, OK if able else WARNING, f"{place}{'' if able else ' cannot be written'}", "" if able else fix)


def _size(count: float) -> str:
    return f"{count / GIGABYTE:.1f} GB" if count >= GIGABYTE else f"{count / 10**6:.0f} MB"
