"""Resources of this process: the processor, its instruction sets, and the cores and the memory that the process may use."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from compressor.control_groups import CGROUP, MEMBERSHIP, cpu_quota, groups_of, rows_of, words_of

INSTRUCTIONS = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16", "amx_int8", "amx_bf16"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)
"""Processor flags that decide which fp32, bf16 and int8 kernels are used, on x86 and ARM."""
BF16 = ("amx_bf16", "avx512_bf16", "bf16")
"""Those that multiply in bf16: on x86, and on ARM the last."""
LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
"""Environment variables that keep oneDNN, PyTorch and MKL from kernels of some instruction sets."""
CPUINFO = Path("/proc/cpuinfo")
"""The file that describes every core of the machine; systems other than Linux have none."""
MEMINFO = Path("/proc/meminfo")
"""The file with the memory of the machine; systems other than Linux have none."""
STATM = Path("/proc/self/statm")
"""The file with the memory of this process, in pages: all, then those that it holds."""
WORTH_RELEASING = 2**28
"""Bytes by which a process must have grown to look for what it no longer needs."""
NO_LIMIT = 2**60
"""Control groups 1 write about 2^63 bytes where memory is not limited."""


def processor() -> dict[str, Any]:
    """What decides which of two files is faster: the processor's name, its relevant instruction sets, its cores, and `limits`
    (name -> value) where environment variables restrict the kernels.

    A virtual machine may hide the name of the generation ("AMD EPYC"); the instruction sets identify it. ARM has no names:
    there it is the architecture and the numbers of the designer and of the design ("aarch64 0x41/0xd40").
    """
    lines = CPUINFO.read_text().splitlines() if CPUINFO.is_file() else []
    cpuinfo = {key.strip(): value.strip() for key, _, value in reversed([line.partition(":") for line in lines])}
    flags = cpuinfo.get("flags", cpuinfo.get("Features", "")).split()
    instructions = [name for name in INSTRUCTIONS if name in flags]
    numbers = "/".join(cpuinfo[key] for key in ("CPU implementer", "CPU part") if key in cpuinfo)
    name = cpuinfo.get("model name", f"{platform.machine()} {numbers}".strip())
    limits = {variable: os.environ[variable] for variable in LIMITS if os.environ.get(variable)}
    facts = {"cpu": name, "instructions": instructions, "cores": physical_cores()}
    return {**facts, **({"limits": limits} if limits else {})}


def weight_bits(instructions: Sequence[str] | None = None) -> int:
    """Bits of a weight in int8 files for these instructions: 8, or 7 without VNNI.

    Without them x86 adds pairs of 8-bit products in 16 bits, which silently saturate; with 7-bit weights they do not.
    `instructions` are by default those of this machine.
    """
    available = processor()["instructions"] if instructions is None else instructions
    overflows = platform.machine().lower() in ("x86_64", "amd64") and not {"avx512_vnni", "avx_vnni"} & set(available)
    return 7 if overflows else 8


def default_threads() -> int:
    """Default number of threads: OMP_NUM_THREADS if it is a number, else the number of physical cores.

    Never more than the cores: a thread without its own core delays the others.
    """
    setting = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()  # one number a level of nesting
    return max(1, min(int(setting), physical_cores())) if setting.isdecimal() and int(setting) else physical_cores()


def physical_cores() -> int:
    """Number of cores that this process may use: hyper-threads count once, and a container's CPU quota limits it, too."""
    allowed = allowed_cores()
    siblings = [Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list") for core in allowed]
    cores = len({path.read_text() for path in siblings}) if all(path.is_file() for path in siblings) else len(allowed)
    quota = cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def allowed_cores() -> Collection[int]:
    """Numbers of the logical cores that this process may run on: all, where the system does not say which."""
    affinity = getattr(os, "sched_getaffinity", None)
    return affinity(0) if affinity else range(os.cpu_count() or 1)


def memory_limit(root: Path = CGROUP, membership: Path = MEMBERSHIP) -> int | None:
    """Bytes of memory that the control groups of this process allow (docker --memory, Slurm), None for no limit."""
    return min((limit for limit, _ in _memory_limits(root, membership)), default=None)


def free_memory(root: Path = CGROUP, membership: Path = MEMBERSHIP, meminfo: Path = MEMINFO) -> int:
    """Bytes of memory that this process may still use: those of the machine (all of its memory, where the system does not say
    what is free), or fewer where its control groups allow less."""
    available = [int(words[1]) * 1024 for words in rows_of(meminfo) if words[:1] == ["MemAvailable:"]]
    machine = available[0] if available else _pages() * os.sysconf("SC_PAGE_SIZE")
    return max(min([machine, *(limit - used for limit, used in _memory_limits(root, membership))]), 0)


def resident_memory(statm: Path = STATM) -> int:
    """Bytes of memory that this process holds; 0 where the system does not say."""
    words = words_of(statm)
    return int(words[1]) * os.sysconf("SC_PAGE_SIZE") if words else 0


def release_memory(before: int) -> None:
    """Give the system back what work of this process has freed, of which it had `before` bytes. What libraries free in small
    parts, such as graphs and tokens, the C library keeps until it is asked (glibc's malloc_trim).

    Where it grew by less than WORTH_RELEASING nothing is done: to look for objects in reference cycles takes a moment.
    """
    if resident_memory() - before < WORTH_RELEASING:
        return
    gc.collect()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def _pages() -> int:
    """Free pages of the machine's memory; all of them, where the system does not count the free ones."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES")
    except ValueError:
        return os.sysconf("SC_PHYS_PAGES")


def _memory_limits(root: Path, membership: Path) -> list[tuple[int, int]]:
    """(limit, use) in bytes of every control group of this process that limits memory; what the kernel would drop from its
    cache of files for other data is not in use."""
    limits = []
    for folder in groups_of("memory", root, membership):
        stat = dict(words for words in rows_of(folder / "memory.stat") if len(words) == 2)
        cache = sum(int(stat.get(f"total_{name}", stat.get(name, 0))) for name in ("inactive_file", "active_file"))
        for limit, use in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            words, used = words_of(folder / limit), words_of(folder / use)
            if words and words[0].isdecimal() and int(words[0]) < NO_LIMIT:
                limits.append((int(words[0]), max(int(used[0]) - cache, 0) if used else 0))
    return limits
