"""`compress doctor`: what this machine and its packages can do, what is broken, and how to fix it.

The doctor needs no package except click: missing or broken ones are findings. Packages are imported in a separate process,
because a wheel for another processor may crash the process that imports it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import click

from compressor.errors import CheckError
from pipelines.doctor.findings import FAULT, WARNING, Finding, Probe
from pipelines.doctor.machine import caches, disk, instructions, memory, shared_memory, threads
from pipelines.doctor.packages import EXTRA, cuda, default_model, packages, python, triton, two_runtimes
from pipelines.engine.environment import distribution

NEEDED = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "accelerate",
    "optimum",
    "requests",
    "torch-pruning",
    "numpy",
    "scipy",
    "onnx",
    "onnxscript",
    "onnxruntime",
)

SERVING = ("tritonclient", "nvidia-pytriton")

WRITING = ("pydantic", "pyyaml", "rich", "plotly", "jinja2")

MODULES = {"nvidia-pytriton": None, "pyyaml": "yaml", "torch-pruning": "torch_pruning", "tritonclient": "tritonclient.http"}
"""Module of a distribution with another name; None for the Triton wheel, of which only files are used."""

SECONDS = 120
"""Time limit for importing a package."""

MARK = "facts of the doctor: "
"""Start of the line with a probe's facts: packages may print before it, and at their exit behind it."""

PROBE = """
import importlib, sys
module = importlib.import_module(sys.argv[1])
facts = {}
if sys.argv[1] == "torch":
    facts = {"cuda": module.version.cuda, "available": module.cuda.is_available(), "cards": module.cuda.device_count()}
if sys.argv[1] == "onnxruntime":
    facts = {"providers": module.get_available_providers()}
"""

DRIVER = """
import ctypes
device, name, version = ctypes.c_int(), ctypes.create_string_buffer(256), ctypes.c_int()
try:
    driver = ctypes.CDLL("libcuda.so.1")
    failed = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(name, 256, device)
    driver.cuDriverGetVersion(ctypes.byref(version))
except OSError:
    failed = 1
facts = {} if failed else {"name": name.value.decode(), "cuda": version.value}
"""

TELL = f"""
import json
print("\\n{MARK}" + json.dumps(facts))
"""


def doctor(out: Path, as_json: bool) -> None:
    """Print the findings. Raises CheckError E905 where a fault stops the quickstart."""
    findings = examine(out)
    faults = [finding for finding in findings if finding.status == FAULT]
    if as_json:
        click.echo(
            json.dumps(
                {"findings": [asdict(finding) for finding in findings], "faults": len(faults)}, indent=1, ensure_ascii=False
            )
        )
    else:
        for finding in findings:
            click.echo(f"{finding.status:<8} {finding.name:<17} {finding.what}")
            if finding.fix:
                click.echo(f"{'':<8} {'':<17} fix: {finding.fix}")
    if faults:
        names = ", ".join(finding.name for finding in faults)
        raise CheckError("E905", f"compress run quickstart cannot run here: {names}", "Fix the faults listed above")


def examine(out: Path) -> list[Finding]:
    """Collect every finding. Raises nothing: a check that fails is a finding, too."""
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
    except Exception as error:  # the doctor itself must not fail: every exception is reported as a finding
        name = getattr(look, "__name__", "look").replace("_", " ").strip("<>")
        yield Finding(name, WARNING, f"could not be checked ({type(error).__name__}: {error})", "Please report this")


def _probes(names: list[str]) -> dict[str, Probe]:
    """Import each package in a separate process, two at a time; one more process queries the GPU driver."""
    modules = {name: module for name in names if (module := MODULES.get(name, name))}
    with ThreadPoolExecutor(2) as pool:
        futures = {name: pool.submit(_probe, PROBE, module) for name, module in modules.items()}
        futures["driver"] = pool.submit(_probe, DRIVER)
        return {name: future.result() for name, future in futures.items()}


def _probe(script: str, *arguments: str) -> Probe:
    command = [sys.executable, "-P", "-c", script + TELL, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return Probe({}, f"not imported after {SECONDS} s")
    except OSError as error:
        return Probe({}, f"no process can be started ({error.strerror})")
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        died = f"the import ends the process (signal {-done.returncode})" if done.returncode < 0 else "the import fails"
        return Probe({}, lines[-1][:200] if lines and done.returncode > 0 else died)
    told = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    return Probe(json.loads(told[-1])) if told else Probe({}, "its process ended and gave no facts")
