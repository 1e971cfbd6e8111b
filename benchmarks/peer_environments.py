"""Other tools that make ONNX or OpenVINO files: their packages, the script a user would write, and what the script came to.

Each peer has an environment of its own, because no two of them agree on the version of transformers or of ONNX Runtime.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.record import write_record

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(__file__).resolve().parent / "peers"
TORCH = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
"""Installed first and held: each tool computes with the version that this project is tested with."""
STAMP = "finished.json"
FAULT = re.compile(r"[\w.]*(Error|Exception|Exit|Interrupt|Failure|NotImplemented)\b.*")


@dataclass(frozen=True)
class File:
    """What a script writes: a path below its folder, and the precision that it is compared in."""

    title: str
    precision: str
    path: str
    pruned: bool = False


@dataclass(frozen=True)
class Peer:
    """A tool: its script in benchmarks/peers/, the packages that pip installs for it, and the files that the script writes."""

    name: str
    script: str
    packages: tuple[str, ...]
    files: tuple[File, ...]
    without: tuple[str, ...] = ()
    """Removed after the installation: torchvision may be of another build of torch, and text models do not need it."""
    note: str = ""
    """What a user runs into that is no error of the script."""

    @property
    def source(self) -> Path:
        return SCRIPTS / self.script


TRANSFORMERS, ONNX, ONNX_RUNTIME = "transformers==5.23.0", ("onnx==1.23.2", "onnxscript==0.7.2"), "onnxruntime==1.31.1"
OPENVINO = ("openvino==2026.4.1", "nncf==3.4.0")
PEERS = (
    Peer(
        "optimum-onnx",
        "optimum_onnx.py",
        ("optimum-onnx[onnxruntime]==0.1.0", "transformers==4.57.6", "onnx==1.23.2", ONNX_RUNTIME),
        (File("", "fp32", "fp32/model.onnx"), File("", "int8", "int8/model_quantized.onnx")),
    ),
    Peer(
        "optimum-intel",
        "optimum_intel.py",
        ("optimum-intel==2.2.0", "transformers==5.5.4", "datasets==5.0.1", *OPENVINO),
        (File("", "fp32", "fp32/openvino_model.xml"), File("", "int8", "int8/openvino_model.xml")),
        without=("torchvision",),
    ),
    Peer(
        "sentence-transformers onnx",
        "sentence_transformers_onnx.py",
        ("sentence-transformers[onnx]==5.7.0", "optimum-onnx==0.1.0", "transformers==4.57.6", "onnx==1.23.2", ONNX_RUNTIME),
        (
            File("", "fp32", "fp32/onnx/model.onnx"),
            File("O3", "fp32", "optimized/onnx/model_O3.onnx"),
            File("avx512_vnni", "int8", "int8/onnx/model_qint8_avx512_vnni.onnx"),
        ),
        note="6.2.0 cannot be installed with its extra onnx: ResolutionImpossible, optimum-onnx 0.1.0 needs transformers 4",
    ),
    Peer(
        "sentence-transformers openvino",
        "sentence_transformers_openvino.py",
        ("sentence-transformers[openvino]==6.2.0", "optimum-intel==2.0.0", "transformers==5.0.0", "datasets==5.0.1", *OPENVINO),
        (
            File("", "fp32", "fp32/openvino/openvino_model.xml"),
            File("", "int8", "int8/openvino/openvino_model_qint8_quantized.xml"),
        ),
        without=("torchvision",),
    ),
    Peer(
        "Olive",
        "olive_ai.py",
        ("olive-ai==0.13.0", TRANSFORMERS, "datasets==5.0.1", "requests==2.34.2", *ONNX, ONNX_RUNTIME),
        (File("", "fp32", "fp32/model.onnx"), File("", "int8", "int8/model.onnx")),
    ),
    Peer(
        "neural-compressor",
        "neural_compressor_pt2e.py",
        ("neural-compressor[pt]==3.10", TRANSFORMERS, *ONNX),
        (File("static", "int8", "model_int8.onnx"),),
    ),
    Peer(
        "onnx-neural-compressor",
        "onnx_neural_compressor.py",
        ("onnx-neural-compressor==1.0", "prettytable==3.18.0", "scipy==1.17.1", TRANSFORMERS, "onnx==1.23.2", ONNX_RUNTIME),
        (File("", "int8", "model_int8.onnx"),),
    ),
    Peer(
        "ONNX Runtime",
        "onnxruntime_quantizer.py",
        (ONNX_RUNTIME, TRANSFORMERS, *ONNX),
        (
            File("after torch.onnx", "fp32", "model.onnx"),
            File("transformers.optimizer", "fp32", "optimized.onnx"),
            File("after torch.onnx", "int8", "model_int8.onnx"),
            File("transformers.optimizer", "int8", "optimized_int8.onnx"),
        ),
    ),
    Peer(
        "NNCF",
        "nncf_static.py",
        (*OPENVINO, TRANSFORMERS, *ONNX, ONNX_RUNTIME),
        (
            File("", "fp32", "fp32.xml"),
            File("", "int8", "int8.xml"),
            File("on ONNX", "int8", "int8.onnx"),
        ),
    ),
    Peer(
        "onnxsim",
        "onnxsim_pruner.py",
        ("onnxsim==0.8.1", TRANSFORMERS, *ONNX, ONNX_RUNTIME),
        (
            File("pruned", "fp32", "pruned.onnx", pruned=True),
            File("pruned, ridge", "fp32", "recovered.onnx", pruned=True),
            File("pruned, ridge", "int8", "recovered_int8.onnx", pruned=True),
        ),
    ),
    Peer(
        "Torch-Pruning",
        "torch_pruning_bert.py",
        ("torch-pruning==1.6.1", TRANSFORMERS, *ONNX, ONNX_RUNTIME),
        (
            File("pruned", "fp32", "pruned.onnx", pruned=True),
            File("pruned, trained", "fp32", "trained.onnx", pruned=True),
            File("pruned, trained", "int8", "trained_int8.onnx", pruned=True),
        ),
    ),
)
"""In the order of the second table."""


@dataclass(frozen=True)
class Account:
    """What a peer came to: seconds of its script, the first line of its error ('' without one), and its packages' versions."""

    seconds: float | None
    failure: str
    versions: dict[str, str]
    folder: Path
    lines: int

    @property
    def minutes(self) -> float | None:
        return None if self.seconds is None else self.seconds / 60


def lines_of(source: Path) -> int:
    """Lines that a user has to write: without blank lines, comments and the docstring of the file."""
    text = source.read_text()
    if source.suffix != ".py":
        return sum(bool(line.partition("#")[0].strip()) for line in text.splitlines())
    tree = ast.parse(text)
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    written = text.splitlines()[body[0].lineno - 1 :]
    return sum(bool(line.strip()) and not line.lstrip().startswith("#") for line in written)


def account_of(peer: Peer, model: Path, cache: Path, threads: int, minutes: float, again: bool) -> Account:
    """Install and run a peer, or take what an earlier run left in `cache`. `model` is a folder with model/ and train.tsv.

    A failure is an account, too; it is tried again by the next run.
    """
    key = hashlib.sha256(peer.source.read_bytes() + repr((peer.packages, TORCH, threads)).encode()).hexdigest()[:12]
    folder = model / f"{peer.source.stem}-{key}"
    lines, stamp = lines_of(peer.source), folder / STAMP
    if stamp.is_file() and not again:
        stored = json.loads(stamp.read_text())
        return Account(stored["seconds"], "", stored["versions"], folder, lines)
    python, failure = environment_of(peer, cache, again)
    if failure:
        return Account(None, failure, {}, folder, lines)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("model", "train.tsv"):
        (folder / name).symlink_to(model / name)
    versions, clock = versions_of(python), time.monotonic()
    failure = carried_out([str(python), "-P", str(peer.source)], folder, threads, 60 * minutes)
    seconds = time.monotonic() - clock
    if not failure:
        write_record(stamp, {"seconds": seconds, "versions": versions})
    return Account(seconds, failure, versions, folder, lines)


def environment_of(peer: Peer, cache: Path, again: bool) -> tuple[Path, str]:
    """The Python of a peer's environment, made if it is not there; and the first line of pip's error, '' without one."""
    key = hashlib.sha256(repr((peer.packages, peer.without, TORCH, sys.version_info[:2])).encode()).hexdigest()[:12]
    folder = cache / "environments" / f"{peer.source.stem}-{key}"
    python, stamp = folder / "bin" / "python", folder / STAMP
    if stamp.is_file() and not again:
        return python, ""
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    held = folder / "constraints.txt"
    held.write_text(f"{TORCH}\n")
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", "-c", str(held)]
    for packages in ((TORCH,), peer.packages):
        done = subprocess.run([*pip, *packages], capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return python, plain_error((errors or done.stderr.splitlines() or ["pip failed"])[0], folder)
    if peer.without:
        subprocess.run([str(python), "-m", "pip", "uninstall", "-q", "-y", *peer.without], check=True)
    write_record(stamp, {"packages": list(peer.packages)})
    return python, ""


def versions_of(python: Path) -> dict[str, str]:
    """Every package of an environment."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "list", "--format", "json"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return {package["name"]: package["version"] for package in listed}


def carried_out(command: list[str], folder: Path, threads: int, seconds: float) -> str:
    """Run a script in its folder, its output in log.txt; returns the first line of its error, '' without one."""
    settings: dict[str, Any] = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")} | settings
    log = folder / "log.txt"
    with log.open("wb") as output:
        try:
            ended = subprocess.run(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return f"not finished after {seconds / 60:.0f} minutes"
    if not ended:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    faults = [line for line in lines if FAULT.match(line)]
    return plain_error((faults or lines or [f"exit code {ended}"])[-1], folder)


def plain_error(line: str, folder: Path) -> str:
    """An error's line without the folders of one person's disk, and not longer than a cell of a table."""
    return re.sub(r"(/[\w.+-]+){2,}/", "", line.replace(str(folder), "."))[:200].replace("|", "/")
