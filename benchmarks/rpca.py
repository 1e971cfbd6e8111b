"""Robust PCA for Ω: seconds, growth with size, an SVD-based method of equal quality, and what each setting chooses.

    python benchmarks/rpca.py --model FOLDER --json out.json
    python benchmarks/rpca.py --rounds 3 --largest 1024

Four tables. Every round of a timed one runs all its rows in shuffled order; medians with the interquartile range, two
rounds of warm-up. Matrices are float32; without --model those of the first and the last table are Gaussian.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.arguments import round_count
from benchmarks.train_step import interleaved
from compressor.models.anatomy import layers_of
from compressor.models.build import build
from compressor.models.reference import resolve
from compressor.selection.choice import choose_places
from compressor.selection.rpca import decompose, sparse_residual
from compressor.selection.settings import SETTINGS, Setting

PLACES, STD = 16, 0.042
CHOOSERS: dict[str, Setting] = {
    "default (hard, rank 16)": SETTINGS["default"],
    "default, but soft": replace(SETTINGS["default"], kind="soft"),
    "default, but constant λ": replace(SETTINGS["default"], schedule="constant"),
    "original (soft, rank 16)": SETTINGS["original"],
    "released_rank1": SETTINGS["released_rank1"],
    "released (rank 496)": SETTINGS["released"],
}


def gaussian(size: int, seed: int) -> Tensor:
    return STD * torch.randn(size, size, generator=torch.Generator().manual_seed(seed))


def queries_and_values(folder: Path) -> list[Tensor]:
    """The weights that DSEE adapts by default, in layer order."""
    model = build(folder, ["0", "1"])
    return [layer.linear(name).weight.detach() for layer in layers_of(model) for name in ("query", "value")]


def planted(size: int, rank: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """W, its background of `rank` and std `STD`, and the flat places of its spikes: 1 %, 4 to 12 STD high, either sign."""
    generator = torch.Generator().manual_seed(seed)
    left, right = (torch.randn(shape, generator=generator) for shape in ((size, rank), (rank, size)))
    background = left @ right * STD / rank**0.5
    places = torch.randperm(size * size, generator=generator)[: size * size // 100].sort().values
    height = STD * (4 + 8 * torch.rand(len(places), generator=generator))
    weight = background.flatten().index_add(0, places, height * torch.randn(len(places), generator=generator).sign())
    return weight.view(size, size), background, places


def inexact_alm(weight: Tensor, tol: float, partial_svd: bool) -> tuple[Tensor, Tensor]:
    """min ‖L‖_* + λ‖S‖₁ with W = L + S by the inexact augmented Lagrangian method (Lin, Chen & Ma 2010, algorithm 5).

    Their constants: λ = 1/√n, μ from 1.25/‖W‖₂, growing by 1.5. `partial_svd` computes only the singular vectors expected
    above 1/μ (their prediction of the rank; here by a randomized SVD), else all.
    """
    norm, sparsity = float(torch.linalg.matrix_norm(weight, 2)), 1 / math.sqrt(max(weight.shape))
    multiplier = weight / max(norm, float(weight.abs().max()) / sparsity)
    mu, low, width = 1.25 / norm, torch.zeros_like(weight), 10
    while True:
        sparse = F.softshrink(weight - low + multiplier / mu, sparsity / mu)
        target = weight - sparse + multiplier / mu
        if partial_svd and width < min(weight.shape) // 5:
            U, singular, V = torch.svd_lowrank(target, q=width, niter=2)
        else:
            U, singular, Vh = torch.linalg.svd(target, full_matrices=False)
            V = Vh.T
        kept = int((singular > 1 / mu).sum())
        width = kept + 1 if kept < width else kept + round(0.05 * min(weight.shape))
        low = (U[:, :kept] * (singular[:kept] - 1 / mu)) @ V[:, :kept].T
        gap = weight - low - sparse
        multiplier, mu = multiplier + mu * gap, mu * 1.5
        if float(gap.norm()) <= tol * float(weight.norm()):
            return low, sparse


def grebsmo(weight: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    result = decompose(weight, setting)
    return result.U @ result.V, result.S


def timed(title: str, steps: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of every step: median and interquartile range over interleaved rounds."""
    print(f"\n{title}, {rounds} rounds")
    rows = {}
    for name, values in interleaved(dict(steps), rounds).items():
        low, median, high = (value / 1000 for value in statistics.quantiles(values, n=4))
        rows[name] = {"median_s": median, "iqr_s": high - low, "max_s": max(values) / 1000}
    return rows


def seconds_of_all(weights: list[Tensor], rounds: int) -> dict[str, dict[str, float]]:
    def choose_all(setting: str) -> None:
        for weight in weights:
            choose_places([sparse_residual(weight, seed=0, setting=setting).abs()], PLACES)

    steps = {name: partial(choose_all, name) for name in SETTINGS if name != "released"}
    shapes = " ".join(sorted({"x".join(map(str, weight.shape)) for weight in weights}))
    rows = timed(f"(a) Ω of {len(weights)} matrices of {shapes}", steps, rounds)
    print(f"{'setting':<26}{'median s':>10}{'IQR':>8}{'slowest':>9}")
    for name, row in rows.items():
        print(f"{name:<26}{row['median_s']:>10.2f}{row['iqr_s']:>8.2f}{row['max_s']:>9.2f}")
    return rows


def growth(largest: int, rounds: int) -> dict[str, dict[str, float]]:
    weights = {str(256 * 2**step): gaussian(256 * 2**step, seed=step) for step in range(int(math.log2(largest // 256)) + 1)}
    steps = {size: partial(decompose, weight) for size, weight in weights.items()}
    rows = timed("(b) growth with the size of a square Gaussian matrix, default", steps, rounds)
    print(f"{'size':>6}{'iterations':>12}{'median s':>10}{'IQR':>8}{'ms/iteration':>14}{'exponent':>10}")
    earlier = None
    for size, row in rows.items():
        row["iterations"] = sum(len(phase.objective) for phase in decompose(weights[size]).phases)
        row["ms_per_iteration"] = 1000 * row["median_s"] / row["iterations"]
        exponent = f"{math.log2(row['ms_per_iteration'] / earlier):.2f}" if earlier else ""
        earlier = row["ms_per_iteration"]
        print(f"{size:>6}{row['iterations']:>12}{row['median_s']:>10.3f}{row['iqr_s']:>8.3f}{earlier:>14.2f}{exponent:>10}")
    logs = [(math.log(int(size)), math.log(row["ms_per_iteration"])) for size, row in rows.items()]
    for name, points in (("all sizes", logs), ("the three largest", logs[-3:])):
        slope = statistics.linear_regression(*zip(*points, strict=True)).slope
        print(f"fitted over {name}: the time of an iteration grows as size^{slope:.2f}")
    return rows


def against_svd(size: int, rank: int, tol: float, rounds: int) -> dict[str, dict[str, float]]:
    weight, background, places = planted(size, rank)
    default = SETTINGS["default"]
    methods = {
        f"default, told rank {rank}": partial(grebsmo, weight, replace(default, rank=rank)),
        f"default, told {rank}, again": partial(grebsmo, weight, replace(default, rank=rank)),
        f"default, rank {default.rank}": partial(grebsmo, weight, default),
        "inexact ALM, whole SVD": partial(inexact_alm, weight, tol, False),
        "inexact ALM, partial SVD": partial(inexact_alm, weight, tol, True),
    }
    rows = timed(f"(c) planted {size}x{size}: rank {rank} and {len(places)} spikes; ALM to {tol:g}", methods, rounds)
    print(f"{'method':<26}{'median s':>10}{'IQR':>8}{'x first':>9}{'spikes found':>14}{'error of L':>12}")
    first = rows[next(iter(rows))]["median_s"]
    for name, row in rows.items():
        low, sparse = methods[name]()
        recovered = torch.isin(sparse.abs().flatten().topk(len(places)).indices, places).sum()
        row["found"], row["error"] = int(recovered) / len(places), float((low - background).norm() / background.norm())
        ratio = row["median_s"] / first
        print(f"{name:<26}{row['median_s']:>10.3f}{row['iqr_s']:>8.3f}{ratio:>9.2f}{row['found']:>14.2%}{row['error']:>12.1e}")
    return rows


def overlap(title: str, weights: list[Tensor]) -> dict[str, dict[str, float]]:
    """Of the 16 places of a matrix, how many two runs share, on average over the matrices; three seeds."""

    def places(setting: Setting, seed: int) -> list[set[int]]:
        return [set(choose_places([decompose(weight, setting, seed=seed).S.abs()], PLACES)[0].tolist()) for weight in weights]

    def shared(first: list[set[int]], second: list[set[int]]) -> float:
        return statistics.mean(len(a & b) for a, b in zip(first, second, strict=True))

    print(f"\n(d) of {PLACES} places in each of {len(weights)} {title}, shared on average with")
    largest = [set(choose_places([weight.abs()], PLACES)[0].tolist()) for weight in weights]
    reference, rows = places(SETTINGS["default"], 0), {}
    print(f"{'setting':<26}{'other seeds':>13}{'top |W|':>9}{'default':>9}")
    for name, setting in CHOOSERS.items():
        runs = [places(setting, seed) for seed in range(3)]
        rows[name] = {
            "other_seeds": statistics.mean(shared(a, b) for a, b in combinations(runs, 2)),
            "magnitude": shared(runs[0], largest),
            "default": shared(runs[0], reference),
        }
        print(
            f"{name:<26}"
            + "".join(f"{value:>{width}.1f}" for value, width in zip(rows[name].values(), (13, 9, 9), strict=True))
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, or package:NAME/PATH: its query and value matrices for (a) and (d)")
    parser.add_argument("--rounds", type=round_count, default=7)
    parser.add_argument("--largest", type=int, default=4096, help="largest size of (b)")
    parser.add_argument("--tol", type=float, default=1e-4, help="where the inexact ALM of (c) stops")
    parser.add_argument("--tables", default="abcd", help="which of the four, e.g. bc")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    noise = [gaussian(768, seed) for seed in range(24)]
    title = Path(options.model).name if options.model else "Gaussian matrices"
    weights = queries_and_values(resolve(options.model).folder) if options.model else noise
    print(f"{title}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    tables = {
        "a": lambda: seconds_of_all(weights, options.rounds),
        "b": lambda: growth(options.largest, options.rounds),
        "c": lambda: {size: against_svd(size, 8, options.tol, options.rounds) for size in (256, 768, 1536)},
        "d": lambda: [overlap(f"matrices of {title}", weights), overlap("Gaussian matrices of 768x768", noise[:6])],
    }
    result = {letter: tables[letter]() for letter in options.tables}
    if options.json:
        settings = {key: str(value) for key, value in vars(options).items()}
        options.json.write_text(json.dumps({"settings": settings, "tables": result}, indent=1))


if __name__ == "__main__":
    main()
