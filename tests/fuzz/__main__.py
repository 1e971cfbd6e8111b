"""python -m tests.fuzz [--cases N] [--workers N] [--targets A,B] [--only NUMBER] [--seeds FOLDER] [--json FILE]

All cases, those of some targets, or one again; its mutated file is then written to the current folder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TRANSFORMERS_VERBOSITY": "error",
}
IMPORTED = (
    "onnx",
    "onnxruntime",
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "compressor.account",
    "compressor.checkpoint",
    "compressor.training.multitask",
    "export.runtimes.sessions",
    "pipelines.cli.commands",
    "export.parity.sides",
    "pipelines.engine.preflight",
    "pipelines.runs.verify",
)


def main() -> int:
    """The exit code is 1 where there are findings."""
    os.environ.update(ENVIRONMENT)
    from tests.fuzz import harness

    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--targets", default=",".join(harness.TARGETS))
    parser.add_argument("--only", type=int)
    parser.add_argument("--seeds", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    targets = options.targets.split(",")
    with tempfile.TemporaryDirectory() as scratch:
        root = options.seeds or Path(scratch)
        if not root.is_dir() or not any(root.iterdir()):
            _build(root, targets)
        _import_everything()
        counts = harness.numbers(options.cases, targets)
        if options.only is not None:
            counts = {targets[0]: [options.only]}
            one = harness.case(harness.TARGETS[targets[0]], options.only, root)
            Path(f"case-{options.only}{Path(one.file).suffix}").write_bytes(one.content)
        found = harness.Harness(root, options.workers).run(counts)
    print(found.report())
    if options.json:
        options.json.write_text(json.dumps(found.to_json(), indent=1))
    return bool(found.findings)


def _build(root: Path, targets: list[str]) -> None:
    """In a process of its own: training and sessions leave threads behind, and processes are forked from this one."""
    code = (
        "import sys, pathlib; from tests.fuzz.harness import build_seeds; build_seeds(pathlib.Path(sys.argv[1]), sys.argv[2:])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(root), *targets], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"the seeds could not be made:\n{done.stderr[-3000:]}")


def _import_everything() -> None:
    """What the doors import, so that the processes have it when they begin."""
    for name in IMPORTED:
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)


if __name__ == "__main__":
    sys.exit(main())
