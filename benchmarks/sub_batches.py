"""Time the sub-batches of a deployed model of texts: `python benchmarks/sub_batches.py RUN NAME`, about a minute on two cores.

The texts of the run's validation rows, and each of them repeated up to `max_length`, in merged batches: CPU and wall time a row
in a session as the server opens it, for several `max_batch_tokens` and one or more sub-batches at a time, interleaved; the
first budget is repeated at the end as a control.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from compressor.tasks.reading import read_task
from export.runtimes.runtime import Runtime
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import session
from pipelines.runs.finished import open_run
from pipelines.runs.served import find_repository
from serving.backends.door import ENCODING_FIELDS
from serving.backends.sub_batches import sub_batches
from serving.layout.version_file import VersionFacts, read_version
from serving.repository import TOKENIZER

BUDGETS = (64, 128, 256, 512, 1024, 2048, 64)


def padded(encodings: list, names: list[str]) -> dict[str, np.ndarray]:
    """The inputs of a sub-batch; what pads them changes no time."""
    length = max(len(encoding.ids) for encoding in encodings)
    arrays = {}
    for name in names:
        values = (getattr(encoding, ENCODING_FIELDS[name]) for encoding in encodings)
        arrays[name] = np.array([row + [0] * (length - len(row)) for row in values], dtype=np.int64)
    return arrays


class Side:
    """A session whose threads compute one sub-batch together, or each one of its own (`streams`)."""

    def __init__(self, path: Path, runtime: Runtime, threads: int, streams: int):
        self.live = session(path, runtime=runtime, threads=threads // streams)
        self.names = [value.name for value in self.live.get_inputs()]
        self.pool, self.streams = ThreadPoolExecutor(streams), streams

    def milliseconds(self, encodings: list, budget: int, rows: int) -> tuple[float, float]:
        """CPU and wall time a row, of all merged batches."""
        cpu, wall = time.process_time(), time.perf_counter()
        for start in range(0, len(encodings), rows):
            self.compute(encodings[start : start + rows], budget)
        scale = 1000 / len(encodings)
        return scale * (time.process_time() - cpu), scale * (time.perf_counter() - wall)

    def compute(self, merged: list, budget: int) -> None:
        """The sub-batches of one merged batch."""
        batches = sub_batches([len(encoding.ids) for encoding in merged], budget, self.streams)
        list(self.pool.map(self.run, [[merged[place] for place in batch] for batch in batches]))

    def run(self, encodings: list) -> None:
        self.live.run(["logits"], padded(encodings, self.names))


@dataclass(frozen=True)
class Opened:
    """A version of a deployed model of texts: its facts, runtime, model file and tokenizer."""

    facts: VersionFacts
    runtime: Runtime
    path: Path
    tokenizer: Tokenizer

    @classmethod
    def at(cls, version: Path) -> Opened:
        facts = read_version(version)
        runtime = RUNTIMES[facts.runtime]
        tokenizer = Tokenizer.from_file(str(version / TOKENIZER / "tokenizer.json"))
        tokenizer.no_padding()
        tokenizer.enable_truncation(facts.max_length)
        return cls(facts, runtime, next(version.glob(f"model*{runtime.suffix}")), tokenizer)

    def side(self, threads: int, streams: int) -> Side:
        return Side(self.path, self.runtime, threads, streams)


def main() -> None:
    """Print a table for short and for long texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--merged", type=int, default=16, help="rows of a merged batch")
    options = parser.parse_args()
    opened = Opened.at(find_repository(options.run).repository / f"{options.name}-text" / "1")
    facts = opened.facts
    # OpenVINO's session computes one run at a time
    sides = [opened.side(options.threads, streams) for streams in ((1, options.threads) if opened.runtime.streams else (1,))]
    texts = read_task(open_run(options.run).task).validation.texts[: options.rows]
    for label, times in (("as they are", 1), ("up to max_length", facts.max_length)):
        repeated = [tuple(" ".join([cell] * times) for cell in cells) for cells in texts]
        encodings = opened.tokenizer.encode_batch([cells if facts.pair else cells[0] for cells in repeated])
        ways = list(product(sides, BUDGETS))
        found = [[side.milliseconds(encodings, budget, options.merged) for side, budget in ways] for _ in range(options.rounds)]
        print(
            f"\n{facts.runtime} {facts.precision}, {options.threads} threads, {options.merged} rows merged, texts {label}, "
            f"mean of {np.mean([len(encoding.ids) for encoding in encodings]):.0f} tokens, medians of {options.rounds} rounds\n"
        )
        print("| streams | max_batch_tokens | CPU ms a row | wall ms a row |\n|--:|--:|--:|--:|")
        for (side, budget), (cpu, wall) in zip(ways, np.median(found, axis=0), strict=True):
            print(f"| {side.streams} | {budget} | {cpu:.2f} | {wall:.2f} |")


if __name__ == "__main__":
    main()
