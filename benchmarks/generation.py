"""What a generated token takes in ONNX Runtime, in every precision of one exported decoder, on its cache.

    compress export MODEL --out ./onnx --precision fp32,int8,int4
    python benchmarks/generation.py ./onnx --prompt 16 --new 32 --rounds 15

Texts are random tokens, without padding. In every round each precision generates once behind the same prompt, in shuffled
order; a token's time is the median over those that follow the prompt, so the prompt itself is not in it. What each file
agreed on when it was exported stands beside it. Exit code 0, 2 for a folder that holds no generating export.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.arguments import round_count
from compressor.errors import UserError
from compressor.processor import processor
from export.generation.greedy import facts_of, open_live
from export.runtimes.decoders import Decoder
from pipelines.engine.environment import distribution

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


def milliseconds(decoder: Decoder, prompt: np.ndarray, new: int) -> float:
    """Median time of one of the tokens that are generated one at a time behind a prompt (batch, length)."""
    fed, times = decoder(prompt, np.ones_like(prompt))[:, -1].argmax(axis=-1)[:, None], []
    for _ in range(new):
        began = time.perf_counter()
        fed = decoder(fed, np.ones_like(fed))[:, -1].argmax(axis=-1)[:, None]
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times)


def measure(live: dict[str, InferenceSession], options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds a token of every round, by precision."""
    # of the first words, which any vocabulary has: which they are does not change the time
    prompt = np.random.default_rng(0).integers(5, 90, (options.batch, options.prompt))
    samples: dict[str, list[float]] = {precision: [] for precision in live}
    for number in range(options.rounds + 1):
        for precision in random.Random(number).sample(list(live), len(live)):
            measured = milliseconds(Decoder(live[precision], options.batch), prompt, options.new)
            samples[precision] += [measured] if number else []  # the first round warms up
    return samples


def rows(facts: dict[str, Any], samples: dict[str, list[float]]) -> Iterator[str]:
    """The table as Markdown."""
    yield "| precision | bytes | likeliest token is PyTorch's | generated tokens are | ms a token | IQR | over fp32 |"
    yield "|---|--:|--:|--:|--:|--:|--:|"
    sizes = {row["precision"]: row["bytes"] for row in facts["files"].values()}
    proofs = {row["precision"]: row for row in facts["parity"]}
    for precision, times in samples.items():
        p25, p50, p75 = np.percentile(times, [25, 50, 75])
        agreed = f"{proofs[precision]['agreement']:.1%} | {proofs[precision]['generated_agreement']:.1%}"
        over = f"{statistics.median(samples['fp32']) / p50:.2f}" if "fp32" in samples else ""
        yield f"| {precision} | {sizes[precision]:,} | {agreed} | {p50:.2f} | {p75 - p25:.2f} | {over} |"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what compress export wrote")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of a prompt [%(default)s]")
    parser.add_argument("--new", type=int, default=32, help="tokens behind it [%(default)s]")
    parser.add_argument("--rounds", type=round_count, default=15)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args(arguments)
    try:
        facts = facts_of(options.folder)
        precisions = [row["precision"] for row in facts["parity"]]
        live = {precision: open_live(options.folder, precision, threads=options.threads) for precision in precisions}
    except UserError as error:
        parser.error(str(error))
    if any(isinstance(session, tuple) for session in live.values()):
        parser.error("a decoder alone is measured here, not one behind an encoder")
    samples, hardware = measure(live, options), processor()
    print(
        f"{hardware['cpu']}, {hardware['cores']} cores ({', '.join(hardware['instructions'])}); {distribution('onnxruntime')};"
    )
    print(f"batch {options.batch}, {options.new} tokens behind {options.prompt}; medians of {options.rounds} rounds.\n")
    print("\n".join(rows(facts, samples)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
