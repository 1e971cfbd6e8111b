"""How much sooner a sweep is done with several workers: one command, several ways to run it, each from an empty store.

    python benchmarks/sweep_speed.py quickstart --seeds 8 --until tune --threads 1 --rounds 3

Every round runs each way once, in shuffled order, in a new folder; the time is that of the whole command, its start and Ray's
included. The ways must give the same files, byte for byte. `one worker, again` is the control. CPU seconds are those of the
command and its workers (Ray's are not its children): on a busy machine they say what the seconds do not.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WAYS = {
    "one worker": (),
    "one worker, again": (),
    "two workers": ("--workers", "2"),
    "two workers on Ray": ("--workers", "2", "--engine", "ray"),
}


def seconds_of(pipeline: str, options: list[str], way: str, expected: dict[str, bytes]) -> tuple[float, float]:
    """(seconds, CPU seconds) of the sweep in a new folder.

    Raises SystemExit when it fails, or gives another file than the ways before it.
    """
    with tempfile.TemporaryDirectory() as folder:
        sweep = [sys.executable, "-m", "pipelines.cli", "sweep", pipeline, *options]
        command = [*sweep, *WAYS[way], "--name", "s", "--out", folder]
        clock, before = time.monotonic(), os.times()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds, after = time.monotonic() - clock, os.times()
        if done.returncode:
            raise SystemExit(f"{way}: {done.stdout}{done.stderr}")
        content = (Path(folder) / "s" / "sweep.json").read_bytes()
        if expected.setdefault("sweep.json", content) != content:
            raise SystemExit(f"{way}: another result than that of one worker")
    return seconds, after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pipeline")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--until", default="tune")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="KEY=VALUE")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    options = ["--seeds", str(given.seeds), "--until", given.until, "--threads", str(given.threads)]
    options += [word for text in given.overrides for word in ("--set", text)]
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    expected: dict[str, bytes] = {}
    for number in range(given.rounds):
        for way in random.Random(number).sample(list(WAYS), len(WAYS)):
            times[way].append(seconds_of(given.pipeline, options, way, expected))
            print(f"round {number + 1}: {way}, {times[way][-1][0]:.1f} s", file=sys.stderr)
    medians = {way: [statistics.median(column) for column in zip(*rows, strict=True)] for way, rows in times.items()}
    print("| trials at a time | median seconds | range | against one worker | CPU seconds |\n|---|---:|---:|---:|---:|")
    for way, (seconds, cpu) in medians.items():
        low, high = min(row[0] for row in times[way]), max(row[0] for row in times[way])
        ratio = medians["one worker"][0] / seconds
        print(f"| {way} | {seconds:.1f} | {low:.1f} to {high:.1f} | {ratio:.2f} × | {cpu:.1f} |")


if __name__ == "__main__":
    main()
