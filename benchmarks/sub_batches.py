"""Time the sub-batches of a deployed model of texts: `python benchmarks/sub_batches.py RUN NAME`, about a minute on two cores.

The texts of the run's validation rows, and each of them repeated up to `max_length`, in merged batches of 32 rows: CPU and wall
time a row in the server's session, for several `max_batch_tokens`, interleaved; the first is repeated at the end as a control.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from compressor.tasks import TaskConfig
from compressor.tasks.reading import read_task
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import session
from pipelines.runs.finished import open_run
from pipelines.runs.served import find_repository
from serving.backends.sub_batches import sub_batches
from serving.layout.version_file import read_version
from serving.layout.warmup import ENCODING_FIELDS
from serving.repository import TOKENIZER

BUDGETS = (128, 256, 512, 1024, 2048, 4096, 128)
ROWS = 32
"""Rows of a merged batch."""


def padded(encodings: list, names: list[str]) -> dict[str, np.ndarray]:
    """The inputs of a sub-batch; what pads them changes no time."""
    length = max(len(encoding.ids) for encoding in encodings)
    arrays = {}
    for name in names:
        values = (getattr(encoding, ENCODING_FIELDS[name]) for encoding in encodings)
        arrays[name] = np.array([row + [0] * (length - len(row)) for row in values], dtype=np.int64)
    return arrays


def milliseconds(live, encodings: list, budget: int) -> tuple[float, float]:
    """CPU and wall time a row, of all merged batches."""
    names = [value.name for value in live.get_inputs()]
    cpu, wall = time.process_time(), time.perf_counter()
    for start in range(0, len(encodings), ROWS):
        merged = encodings[start : start + ROWS]
        for batch in sub_batches([len(encoding.ids) for encoding in merged], budget):
            live.run(["logits"], padded([merged[place] for place in batch], names))
    scale = 1000 / len(encodings)
    return scale * (time.process_time() - cpu), scale * (time.perf_counter() - wall)


def main() -> None:
    """Print a table for short and for long texts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("name")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=128)
    options = parser.parse_args()
    version = find_repository(options.run).repository / f"{options.name}-text" / "1"
    facts = read_version(version)
    runtime = RUNTIMES[facts.runtime]
    live = session(next(path for path in version.glob(f"model*{runtime.suffix}")), runtime=runtime, threads=options.threads)
    texts = read_task(TaskConfig(**open_run(options.run).lock["task"])).validation.texts[: options.rows]
    tokenizer = Tokenizer.from_file(str(version / TOKENIZER / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(facts.max_length)
    for label, times in (("as they are", 1), ("up to max_length", facts.max_length)):
        repeated = [tuple(" ".join([cell] * times) for cell in cells) for cells in texts]
        encodings = tokenizer.encode_batch([cells if facts.pair else cells[0] for cells in repeated])
        found = [[milliseconds(live, encodings, budget) for budget in BUDGETS] for _ in range(options.rounds)]
        print(
            f"\n{facts.runtime} {facts.precision}, {options.threads} threads, texts {label}, mean of "
            f"{np.mean([len(encoding.ids) for encoding in encodings]):.0f} tokens, medians of {options.rounds} rounds\n"
        )
        print("| max_batch_tokens | CPU ms a row | wall ms a row |\n|--:|--:|--:|")
        for budget, (cpu, wall) in zip(BUDGETS, np.median(found, axis=0), strict=True):
            print(f"| {budget} | {cpu:.2f} | {wall:.2f} |")


if __name__ == "__main__":
    main()
