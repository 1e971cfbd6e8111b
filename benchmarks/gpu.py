"""Does removing heads and neurons turn FLOPs into time? BERT-base and BERT-large shapes, dense against physically pruned.

    python benchmarks/gpu.py --out docs/results                         # a GPU: every cell, CUDA graphs too
    python benchmarks/gpu.py --out /tmp/r --models base --batches 1 8 --time-limit 300
    python benchmarks/gpu.py --out /tmp/r --small                       # a CPU, about a minute

One file that needs torch and transformers and nothing else. Weights and token ids are random, rows are full length (no
mask), attention is sdpa. A cell is a model, a precision and a batch: in every round each of its contenders runs one
forward pass, in an order shuffled anew. On a GPU one pass is timed by CUDA events after a synchronization, so eager times
hold the launch gaps that a single request sees; on a CPU by perf_counter. `dense again` is a second copy of dense: where
its time is more than 3 % off, the cell is void. fp32 is IEEE fp32; TF32 is the precision tf32.

Writes gpu.json and gpu.md (gpu-on-cpu.* on a CPU) after every cell. Exit code 0, 2 for a wrong argument, 3 when a check failed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import platform
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STARTED = time.monotonic()  # before the slow imports, so that --time-limit covers them

import torch  # noqa: E402
import transformers  # noqa: E402
from torch import Tensor, nn  # noqa: E402

MINIMUM_ROUNDS, WARM_UP, CONTROL_BOUND = 5, 3, 0.03
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16}
BOUNDS = {"fp32": 1e-4, "tf32": 1e-2, "fp16": 1e-2}
"""Of max(1, |logit|): what a replayed graph may differ from eager."""


class CheckFailed(Exception):
    """A number would be wrong, so none is printed. Exit code 3."""


@dataclass(frozen=True)
class Shape:
    """A BERT's widths; `heads` and `neurons` are what is left in every layer, `head_size` never changes."""

    hidden: int
    layers: int
    heads: int
    neurons: int
    head_size: int
    vocabulary: int = 30522

    def flops(self, length: int, batch: int = 1) -> int:
        """FLOPs of one forward pass over (batch, length) tokens: a multiply-add is two; QKᵀ, AV, pooler and a two-class
        head are counted; softmax, norms and look-ups are not."""
        width = self.heads * self.head_size
        linear = length * self.hidden * (4 * width + 2 * self.neurons)
        return 2 * batch * (self.layers * (linear + 2 * length * length * width) + self.hidden * (self.hidden + 2))

    def without(self, heads: float, neurons: float) -> Shape:
        """The shape with these fractions of the heads and of the FFN neurons removed."""
        kept = round(self.heads * (1 - heads)), round(self.neurons * (1 - neurons))
        return Shape(self.hidden, self.layers, *kept, self.head_size, self.vocabulary)


SHAPES = {
    "base": Shape(768, 12, 12, 3072, 64),
    "large": Shape(1024, 24, 16, 4096, 64),
    "tiny": Shape(64, 2, 4, 128, 16, vocabulary=100),
}
FRACTIONS = ((0, 0), (0, 0), (1 / 4, 0), (1 / 2, 0), (3 / 4, 0), (0, 1 / 2), (1 / 2, 1 / 2))
"""Heads and neurons removed; dense comes first and, as the A/A control, second."""


def variants(dense: Shape) -> dict[str, Shape]:
    """Name -> shape of every contender, dense first."""
    shapes = [dense.without(*fractions) for fractions in FRACTIONS]
    return {describe(dense, shape, again=place == 1): shape for place, shape in enumerate(shapes)}


def describe(dense: Shape, shape: Shape, again: bool = False) -> str:
    """'dense', 'dense again', '6 of 12 heads + half FFN removed', ..."""
    heads = [f"{dense.heads - shape.heads} of {dense.heads} heads"] if shape.heads < dense.heads else []
    ffn = ["half FFN"] if shape.neurons < dense.neurons else []
    return " + ".join(heads + ffn) + " removed" if heads + ffn else "dense again" if again else "dense"


# --- models -------------------------------------------------------------------------------------------------------------


def build(shape: Shape, device: str, length: int) -> nn.Module:
    """A random two-class BERT of this dense shape, in evaluation mode."""
    config = transformers.BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=shape.neurons,
        max_position_embeddings=max(512, length),
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.BertForSequenceClassification(config)
    return model.eval().requires_grad_(False)


def narrow(linear: nn.Linear, rows: int, columns: int) -> None:
    """Keep the first rows and columns of a Linear, physically."""
    linear.weight = nn.Parameter(linear.weight[:rows, :columns].clone(), requires_grad=False)
    linear.bias = nn.Parameter(linear.bias[:rows].clone(), requires_grad=False)
    linear.out_features, linear.in_features = rows, columns


def pruned(model: nn.Module, shape: Shape) -> nn.Module:
    """A copy of `model` whose layers have only `shape`'s heads and neurons."""
    model = copy.deepcopy(model)
    width = shape.heads * shape.head_size
    for layer in model.bert.encoder.layer:
        attention = layer.attention.self
        for projection in (attention.query, attention.key, attention.value):
            narrow(projection, width, shape.hidden)
        narrow(layer.attention.output.dense, shape.hidden, width)
        attention.num_attention_heads, attention.all_head_size = shape.heads, width
        narrow(layer.intermediate.dense, shape.neurons, shape.hidden)
        narrow(layer.output.dense, shape.hidden, shape.neurons)
    return model


def masked(model: nn.Module, shape: Shape) -> nn.Module:
    """The reference for `pruned`: the same heads and neurons silenced by zero columns, nothing removed."""
    model = copy.deepcopy(model)
    for layer in model.bert.encoder.layer:
        layer.attention.output.dense.weight[:, shape.heads * shape.head_size :] = 0
        layer.output.dense.weight[:, shape.neurons :] = 0
    return model


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """(batch, 2) for ids (batch, length)."""
    return model(input_ids=ids).logits


def agree(name: str, ours: Tensor, reference: Tensor, bound: float) -> None:
    """Raises CheckFailed when two sets of logits differ by more than bound x max(1, |logit|), or are not numbers."""
    excess = ((ours - reference).abs() / reference.abs().clamp(min=1)).max().item()
    if not excess <= bound:
        raise CheckFailed(f"{name}: logits differ by {excess:.2e}, allowed {bound:.0e}")


def check_removal(dense: nn.Module, name: str, shape: Shape, ids: Tensor) -> None:
    """Removed against masked, the bound of the project's parity checks. Raises CheckFailed."""
    agree(f"{name}, removed against masked", logits(pruned(dense, shape), ids), logits(masked(dense, shape), ids), 1e-4)


# --- time ---------------------------------------------------------------------------------------------------------------

Forward = Callable[[], object]


def stopwatch(device: str) -> Callable[[Forward], float]:
    """A function that runs a forward pass once and returns its milliseconds."""
    if device == "cpu":

        def sample(forward: Forward) -> float:
            start = time.perf_counter()
            forward()
            return 1e3 * (time.perf_counter() - start)

        return sample
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def sample_events(forward: Forward) -> float:
        torch.cuda.synchronize()
        start.record()
        forward()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop)

    return sample_events


def captured(forward: Callable[[], Tensor], bound: float, pool: object) -> Forward:
    """The pass as a CUDA graph, checked against eager. The cell's graphs share `pool`: only one runs at a time."""
    reference = forward()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            forward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        output = forward()
    output.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    agree("CUDA graph against eager", output, reference, bound)
    return graph.replay


def set_precision(precision: str) -> None:
    """TF32 only where it is the precision's name."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


def peaks(device: str, precisions: list[str], size: int) -> dict:
    """Rates of this very machine: matmul TFLOP/s of size³ per precision, and a copy's GB/s (read + written), as medians
    of 20 on random data."""
    sample, rates = stopwatch(device), {}
    for precision in precisions:
        set_precision(precision)
        left, right = (torch.randn(size, size, device=device, dtype=DTYPES[precision]) for _ in range(2))
        product = torch.empty_like(left)
        rates[precision] = 2 * size**3 / middle(sample, lambda a=left, b=right, c=product: torch.mm(a, b, out=c)) / 1e9
    source = torch.randn(16 * size * size // (4 if device == "cuda" else 1), device=device)
    target = torch.empty_like(source)
    copy_rate = 2 * source.nbytes / middle(sample, lambda: target.copy_(source)) / 1e6
    return {"matmul_size": size, "matmul_tflops": rates, "copy_bytes": source.nbytes, "copy_gb_per_s": copy_rate}


def middle(sample: Callable[[Forward], float], forward: Forward, repeats: int = 20) -> float:
    """The median milliseconds of a forward, warmed up."""
    return statistics.median([sample(forward) for _ in range(repeats + WARM_UP)][WARM_UP:])


@dataclass(frozen=True)
class Budget:
    """The program's seconds."""

    seconds: float

    def remaining(self) -> float:
        """How many of them are left."""
        return self.seconds - (time.monotonic() - STARTED)


class LeftOut(Exception):
    """Why a cell was not measured."""


def interleave(
    contenders: dict[tuple, Forward], device: str, rounds: int, budget: Budget, share: float
) -> dict[tuple, list[float]]:
    """Milliseconds of every contender in every round. Rounds are cut to `share` seconds, never below MINIMUM_ROUNDS.

    Raises LeftOut when the budget does not hold that many.
    """
    sample, order = stopwatch(device), list(contenders)
    times: dict[tuple, list[float]] = {key: [] for key in contenders}
    for _ in range(WARM_UP if device == "cuda" else 1):
        round_s = sum(sample(contenders[key]) for key in order) / 1e3
    if math.isfinite(budget.remaining()):
        rounds = min(rounds, max(MINIMUM_ROUNDS, int(share / round_s)))
    shuffle = random.Random(0).shuffle
    for done in range(rounds):
        if budget.remaining() < 1.2 * round_s:
            if done < MINIMUM_ROUNDS:
                raise LeftOut("no time left")
            break
        shuffle(order)
        for key in order:
            times[key].append(sample(contenders[key]))
    return times


# --- the grid -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """One model, precision and batch: what is interleaved together."""

    model: str
    precision: str
    batch: int

    def __str__(self) -> str:
        return f"BERT-{self.model} {self.precision} batch {self.batch}"


def measure(cell: Cell, models: dict[str, nn.Module], options: argparse.Namespace, budget: Budget, share: float) -> list[dict]:
    """The cell's rows, dense first. Raises LeftOut and CheckFailed."""
    device, length = options.device, options.length
    shapes = variants(SHAPES[cell.model])
    vocabulary = SHAPES[cell.model].vocabulary
    ids = torch.randint(vocabulary, (cell.batch, length), generator=torch.Generator().manual_seed(1)).to(device)
    eager = {name: lambda model=model: logits(model, ids) for name, model in models.items()}
    contenders: dict[tuple, Forward] = {("eager", name): forward for name, forward in eager.items()}
    if "graphs" in options.modes:
        pool = torch.cuda.graph_pool_handle()
        for name, forward in eager.items():
            contenders["graphs", name] = captured(forward, BOUNDS[cell.precision], pool)
    if "eager" not in options.modes:
        contenders = {key: forward for key, forward in contenders.items() if key[0] == "graphs"}
    times = interleave(contenders, device, options.rounds, budget, share)
    rows = [row(cell, length, mode, name, shapes, taken) for (mode, name), taken in times.items()]
    return compare(rows)


def row(cell: Cell, length: int, mode: str, name: str, shapes: dict[str, Shape], taken: list[float]) -> dict:
    """One contender's figures."""
    first, p50, third = statistics.quantiles(taken, n=4)
    flops = shapes[name].flops(length, cell.batch)
    return {
        "model": cell.model,
        "precision": cell.precision,
        "batch": cell.batch,
        "length": length,
        "mode": mode,
        "variant": name,
        "heads": shapes[name].heads,
        "neurons": shapes[name].neurons,
        "flops": flops,
        "flops_ratio": flops / shapes["dense"].flops(length, cell.batch),
        "rounds": len(taken),
        "p25_ms": first,
        "p50_ms": p50,
        "p75_ms": third,
        "tflops": flops / p50 / 1e9,
    }


def compare(rows: list[dict]) -> list[dict]:
    """Add the ratio to dense, and the control's verdict, to the rows of a cell."""
    p50 = {(each["mode"], each["variant"]): each["p50_ms"] for each in rows}
    for each in rows:
        dense = p50[each["mode"], "dense"]
        each["latency_ratio"] = each["p50_ms"] / dense
        each["void"] = abs(p50[each["mode"], "dense again"] / dense - 1) > CONTROL_BOUND
    return rows


def too_long(cell: Cell, options: argparse.Namespace, rates: dict, budget: Budget) -> bool:
    """Whether even the fewest rounds, at a third of the peak rate, would not fit."""
    flops = sum(shape.flops(options.length, cell.batch) for shape in variants(SHAPES[cell.model]).values())
    passes = (MINIMUM_ROUNDS + 2 * WARM_UP) * len(options.modes)
    return 3 * passes * flops / (rates["matmul_tflops"][cell.precision] * 1e12) > budget.remaining()


def attempt(
    cell: Cell, models: dict[str, nn.Module], options: argparse.Namespace, result: dict, budget: Budget, share: float
) -> None:
    """Measure a cell into `result`, or say there why not."""
    try:
        if too_long(cell, options, result["peaks"], budget):
            raise LeftOut("no time left")
        rows = measure(cell, models, options, budget, share)
    except (LeftOut, torch.OutOfMemoryError) as reason:
        result["left_out"].append(f"{cell}: {str(reason).splitlines()[0]}")
        print(f"{cell}: left out", flush=True)
    else:
        result["rows"] += rows
        last = rows[-1]
        print(f"{cell}: {last['rounds']} rounds; {last['mode']}, {last['variant']}: {last['latency_ratio']:.3f} x", flush=True)


def run(options: argparse.Namespace, result: dict, budget: Budget) -> None:
    """Every cell in turn; the result is written after each. Raises CheckFailed."""
    result["peaks"] = peaks(options.device, options.rates, options.matmul_size)
    cells = [Cell(m, p, b) for m in options.models for p in options.precisions for b in options.batches]
    for name in options.models:
        if building(SHAPES[name]) > budget.remaining():
            continue
        set_precision("fp32")
        dense, shapes = build(SHAPES[name], options.device, options.length), variants(SHAPES[name])
        ids = torch.randint(SHAPES[name].vocabulary, (2, options.length), device=options.device)
        check_removal(dense, *list(shapes.items())[-1], ids)
        for precision in options.precisions:
            set_precision(precision)
            models = None  # those of the precision before are freed first
            models = {variant: pruned(dense, shape).to(DTYPES[precision]) for variant, shape in shapes.items()}
            while cells[:1] and (cells[0].model, cells[0].precision) == (name, precision):
                attempt(cells[0], models, options, result, budget, share=budget.remaining() / len(cells))
                del cells[0]
                gc.collect()
                torch.cuda.empty_cache()  # nothing on a CPU; on a GPU it frees the graphs' memory
                write(options, result)
        del dense, models
    result["left_out"] += [f"{cell}: no time left" for cell in cells]


def building(shape: Shape) -> float:
    """Seconds that making and checking a model's variants takes at most on a slow CPU."""
    return shape.layers * shape.hidden * shape.neurons / 1.5e6


# --- what is written ----------------------------------------------------------------------------------------------------


def machine(device: str) -> dict:
    """Versions and names that a number means nothing without."""
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "device": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": properties.name, "cuda": torch.version.cuda, "driver": driver()}
        facts |= {"multiprocessors": properties.multi_processor_count, "memory_gib": round(properties.total_memory / 2**30, 1)}
    return facts


def driver() -> str:
    """The NVIDIA driver's version, as nvidia-smi prints it."""
    if shutil.which("nvidia-smi") is None:
        return "unknown (no nvidia-smi)"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    completed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    return completed.stdout.splitlines()[0].strip() if completed.returncode == 0 else "unknown (nvidia-smi failed)"


def write(options: argparse.Namespace, result: dict) -> Path:
    """gpu.json and gpu.md in --out; returns the Markdown's path."""
    stem = options.out / ("gpu" if options.device == "cuda" else "gpu-on-cpu")
    stem.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    stem.with_suffix(".md").write_text(markdown(result))
    return stem.with_suffix(".md")


def markdown(result: dict) -> str:
    """The result as tables, one for each model and precision."""
    facts, rates = result["machine"], result["peaks"]
    matmul = ", ".join(f"{name} {rate:.4g} TFLOP/s" for name, rate in rates["matmul_tflops"].items())
    lines = [
        f"# Heads and neurons removed: FLOPs and time on {facts['device']}",
        "",
        f"Command: `{result['command']}`",
        "",
        "; ".join(f"{name} {value}" for name, value in facts.items() if name != "device") + ".",
        "",
        f"Measured here: matmul {rates['matmul_size']}³ {matmul}; copy {rates['copy_gb_per_s']:.4g} GB/s (read + written).",
        "",
        "Random weights and tokens, full rows, no mask, sdpa. Medians in ms with the interquartile range; ratios to dense",
        "of the same column. `dense again` is the A/A control: a mode in which it is more than 3 % off is marked void.",
    ]
    groups = dict.fromkeys((each["model"], each["precision"], each["length"]) for each in result["rows"])
    for group in groups:
        rows = [each for each in result["rows"] if (each["model"], each["precision"], each["length"]) == group]
        lines += ["", f"## BERT-{group[0]}, {group[1]}, length {group[2]}", "", *table(rows, rates["matmul_tflops"][group[1]])]
    if result["left_out"]:
        lines += ["", "## Left out", "", *(f"- {each}" for each in result["left_out"])]
    return "\n".join(lines) + "\n"


def table(rows: list[dict], peak: float) -> list[str]:
    """Batches and variants down, modes across."""
    modes = list(dict.fromkeys(each["mode"] for each in rows))
    by_key = {(each["batch"], each["variant"], each["mode"]): each for each in rows}
    head = ["batch", "variant", "GFLOPs", "FLOPs x"] + [
        f"{mode} {column}" for mode in modes for column in ("ms", "x", "% of peak")
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for batch, variant in dict.fromkeys((each["batch"], each["variant"]) for each in rows):
        each = by_key[batch, variant, modes[0]]
        columns = [str(batch), variant, f"{each['flops'] / 1e9:.4g}", f"{each['flops_ratio']:.3f}"]
        for mode in modes:
            columns += timing(by_key[batch, variant, mode], peak)
        lines.append("| " + " | ".join(columns) + " |")
    return lines


def timing(each: dict, peak: float) -> list[str]:
    """Median with range, ratio, and the share of the measured matmul rate."""
    void = " void" if each["void"] else ""
    middle_and_range = f"{each['p50_ms']:.4g} ({each['p25_ms']:.4g} to {each['p75_ms']:.4g})"
    return [middle_and_range, f"{each['latency_ratio']:.3f}{void}", f"{100 * each['tflops'] / peak:.1f}"]


# --- arguments ----------------------------------------------------------------------------------------------------------


def positive(kind: type) -> Callable[[str], float]:
    """A parser of numbers above zero, for argparse."""

    def parse_number(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    return parse_number


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Arguments with the defaults of the device filled in: a CPU gets fewer shapes, eager and fp32 only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the two files go")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is one")
    parser.add_argument("--small", action="store_true", help="BERT-base, batch 1, eager, fp32 where not given")
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), help="default: base large")
    parser.add_argument("--precisions", nargs="+", choices=list(DTYPES), help="default: fp32 fp16")
    parser.add_argument("--modes", nargs="+", choices=["eager", "graphs"], help="default: eager graphs")
    parser.add_argument("--batches", nargs="+", type=positive(int), metavar="N", help="default: 1 8 32 128")
    parser.add_argument("--length", type=positive(int), default=128, metavar="TOKENS", help="default: 128")
    parser.add_argument("--rounds", type=positive(int), metavar="N", help="default: 50, on a CPU 10; 5 at least")
    limit = "end within S seconds: fewer rounds, then fewer cells (default: no limit)"
    parser.add_argument("--time-limit", type=positive(float), default=math.inf, metavar="S", help=limit)
    options = parser.parse_args(arguments)
    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        parser.error("--device cuda: torch sees no GPU here; leave --device out for a CPU run")
    options.device = options.device or ("cuda" if available else "cpu")
    cpu, few = options.device == "cpu", options.small or options.device == "cpu"
    options.models = options.models or (["base"] if few else ["base", "large"])
    options.precisions = options.precisions or (["fp32"] if few else ["fp32", "fp16"])
    options.modes = options.modes or (["eager"] if few else ["eager", "graphs"])
    options.batches = sorted(options.batches or ([1] if options.small else [1, 8] if cpu else [1, 8, 32, 128]))
    options.rounds = options.rounds or (10 if few else 50)
    for several in ("models", "precisions", "modes", "batches"):
        setattr(options, several, list(dict.fromkeys(getattr(options, several))))
    options.rates = list(dict.fromkeys(options.precisions if cpu else ["fp32", "tf32", "fp16"]))
    options.matmul_size = 1024 if cpu else 8192
    if cpu and "graphs" in options.modes:
        parser.error("--modes graphs: CUDA graphs need a GPU; use --modes eager")
    if options.rounds < MINIMUM_ROUNDS:
        parser.error(f"--rounds {options.rounds}: quartiles need at least {MINIMUM_ROUNDS}")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    budget = Budget(options.time_limit)
    options.out.mkdir(parents=True, exist_ok=True)
    command = ["python", "benchmarks/gpu.py", *(sys.argv[1:] if arguments is None else arguments)]
    result: dict = {"command": " ".join(command), "machine": machine(options.device), "peaks": {}, "rows": [], "left_out": []}
    try:
        with torch.inference_mode():
            run(options, result, budget)
    except CheckFailed as failure:
        print(f"check failed: {failure}", file=sys.stderr)
        return 3
    for each in result["left_out"]:
        print(f"left out: {each}")
    print(write(options, result))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
