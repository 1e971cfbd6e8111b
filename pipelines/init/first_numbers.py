"""The numbers of a first pipeline: how long its rows are, how many it trains on, and how long a run takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

from compressor.account import Plan
from compressor.errors import UserError
from compressor.models.architectures import row_of
from compressor.models.build import config_of
from compressor.models.normalized import normalized
from compressor.processor import default_threads, processor
from compressor.tasks import GENERATED, MOST_TOKENS, Subset, TaskConfig, data_files
from compressor.tasks.data import task_tokenizer
from compressor.tasks.features import sequences_of, tokens_of
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import kind_of
from pipelines.init import defaults
from pipelines.init.first_pipeline import Facts
from pipelines.stages.benchmark.config import BenchmarkConfig, tokens_behind

STEPS_FOR = 8_000
"""Least number of rows seen in a training: small data sets get more epochs."""

CORE = 50e9
"""FLOPs a second of one core of a recent processor in training."""

SEEDS = 20
"""Samples of one size that are tried."""
DOUBLINGS = 3
"""How often the size is doubled where none of them will do."""

FIXED_SECONDS = 100
"""Imports, tracing, exports, the live server and the benchmark of a small model."""


def max_length(splits: Mapping[str, Split], task: TaskConfig, folder: Path) -> tuple[int, float, str]:
    """(max_length, mean tokens of a row, reason): nothing is cut off where a row would be refused for it, else at most one row
    in 100. `splits` are the rows by file: train, validation, those that are only scored.

    Raises UserError E213 if rows that may not be truncated are longer than the model's positions.
    """
    most, kind = _positions(folder), kind_of(task.kind)
    tokenizer = task_tokenizer(folder, kind)
    lengths = {role: tokens_of(tokenizer, split, kind.continues) for role, split in splits.items()}
    uncut = not kind.truncates
    needed = lengths if uncut else {role: kind.least_tokens(tokenizer, split) for role, split in splits.items()}
    places = [(count, role, row) for role, counts in needed.items() for row, count in enumerate(counts)]
    least, role, row = max(places, key=itemgetter(0), default=(0, "train", 0))
    if least > most:
        where = f"{dict(zip(splits, data_files(task), strict=True))[role]}:{splits[role].lines[row]}"
        what = f"the longest row has {least} tokens" if uncut else f"the marked spans of a row need {least} tokens"
        fix = "Split such rows or drop them: here nothing may be cut off"
        raise UserError("E213", f"{what}, and the model has positions for {most}", fix, where)
    counts = sorted(lengths["train"])
    usual = counts[min(int(0.99 * len(counts)), len(counts) - 1)]
    length = min(max(-(-max(usual, least) // 8) * 8, 16), most)
    if uncut:
        why = f"the longest row has {least}, and nothing may be cut off"
    else:
        cut = sum(count > length for count in counts) / len(counts)
        marks = f"; the marked spans of a row need {least}" if least > usual else ""
        why = f"99 of 100 training rows have at most {usual}, the longest {counts[-1]}{marks}; more are cut off"
        why += f" ({cut:.1%} of the rows)"
    return length, sum(min(count, length) for count in counts) / len(counts), why


def _positions(folder: Path) -> int:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return row_of(config["model_type"]).most_tokens(config) or MOST_TOKENS


def timed_length(length: int, kind: str, folder: Path) -> int:
    """Tokens of the rows that a benchmark times: a decoder's leave room for those that are generated behind them."""
    return min(length, _positions(folder) - tokens_behind(BenchmarkConfig(), [kind]))


def has_places(folder: Path, kind: str) -> bool:
    """Whether robust PCA reliably finds 16 entries in each matrix: for an encoder that is not narrow."""
    return kind not in GENERATED and normalized(config_of(folder)).hidden_size >= 256


def kept_share(requested: int | None, rows: int) -> float | None:
    """The share of the training rows to train on: as many digits, at least three, as give so many rows and at most 5 % more.

    None for all.
    """
    count = (defaults.ROWS if rows > defaults.MANY else rows) if requested is None else requested
    if count == 0 or count >= rows:
        return None
    shares = [-(-whole * count // rows) / whole for whole in (10**digits for digits in range(3, 10))]
    return next((share for share in shares if share < 1 and Subset(share=share).count(rows) <= 1.05 * count), shares[-1])


def first_subset(requested: int | None, train: Split, names: list[str], task: TaskConfig) -> tuple[Subset | None, str]:
    """(the training rows of a first run, why): the first of SEEDS samples that holds what training needs, such as every class.
    Where no number was `requested` larger samples are tried, too. None for all rows, '' where nobody expects a sample.

    Raises UserError E211 where no sample of the requested number does.
    """
    kept, rows, lacks = kept_share(requested, len(train)), len(train), kind_of(task.kind).lacks
    if kept is None:
        return None, ""
    count = Subset(share=kept).count(rows)
    shares = [kept] if requested else [kept_share(count << step, rows) for step in range(DOUBLINGS + 1)]
    for subset in (Subset(share=share, seed=seed) for share in shares if share for seed in range(SEEDS)):
        if (missing := lacks([train.labels[row] for row in subset.sample(rows)], names)) is None:
            return subset, f"{subset.count(rows):,} of {rows:,} training rows, for a first run in minutes"
    what = f"{SEEDS} samples of {count:,} of {rows:,} training rows each lack something, the last holds {missing}"
    if requested:
        raise UserError("E211", what, "Raise --rows, or give 0 for all rows", str(task.train))
    return None, f"none: {what}"


def used_rows(kept: Subset | None, rows: int) -> int:
    """How many of the training rows are trained on."""
    return kept.count(rows) if kept else rows


def time_of(plan: Plan | None, facts: Facts, mean: float, splits: Mapping[str, Split]) -> str:
    """Rough time of a run, in words: FLOPs of its trainings and measurements over the speed of the cores. `splits` and the
    `mean` tokens of a row as in `max_length`."""
    threads = default_threads()
    forward = plan.dense.flops(max(int(mean), 1)) if plan else 0
    used, sequences = used_rows(facts.kept, len(splits["train"])), sequences_of(splits["train"])
    # in forward passes of the dense model: a row of tune takes 2.2, of recover half as much, of its control again 2.2, and the
    # teacher one
    passes = (used * (5.5 * facts.epochs + 1) + 10 * len(splits["validation"])) * sequences
    vectors = {"avx2", "asimd"} & set(processor()["instructions"])
    seconds = FIXED_SECONDS + passes * forward / ((CORE if vectors else CORE / 5) * threads)
    return f"a run takes about {max(round(seconds / 60), 2)} minutes with {threads} free cores, roughly estimated"
