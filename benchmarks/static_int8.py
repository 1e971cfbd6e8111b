"""What ONNX Runtime's static int8 (QDQ) costs and gives, against its dynamic int8 and OpenVINO's static one: time and quality.

    compress run twice_as_fast
    python benchmarks/static_int8.py runs/twice_as_fast --out docs/results

Takes the merged model of a finished run, its validation rows, and 128 of its training rows to calibrate on. The more operators
compute in int8, the fewer conversions are between them; what that does to the labels is the question. Every file is timed in a
process of its own, in interleaved rounds. --out writes static_int8.md. Exit code 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import yaml
from onnxruntime.quantization.registry import QDQRegistry

from benchmarks.record import plain, void_where_disturbed
from benchmarks.runtimes import quantized_static
from compressor.checkpoint import load
from compressor.models.reference import resolve
from compressor.tasks import TaskConfig
from compressor.tasks.data import Data
from compressor.tasks.features import Forward, predict, torch_forward
from export.graph.files import save
from export.graph.rewrite import can_fuse
from export.latency.measure import LatencyVariant, Measurement, measure
from export.runtimes.onnxruntime import write_onnx
from export.runtimes.openvino import export_openvino
from export.runtimes.sessions import run, session
from pipelines.engine.environment import machine
from pipelines.engine.stage import Inputs
from pipelines.engine.store import write_atomic
from pipelines.stages.benchmark.config import STAGE
from pipelines.stages.export.config import ExportConfig
from pipelines.stages.export.exported import calibration, traced
from pipelines.stages.loading import load_data

SUMS = {"Add", "LayerNormalization"}
STATIC = {
    "ONNX static int8, products": ["MatMul", "Gemm"],
    "ONNX static int8, all but sums": sorted(set(QDQRegistry) - SUMS),
    "ONNX static int8, every operator": None,
}
"""Name -> the operators in int8."""
FIRST = "ONNX fp32"


@dataclass(frozen=True)
class Figures:
    """Of one file: the metric, the agreement with PyTorch, its bytes."""

    quality: float
    agreement: float
    size: int


def files_of(model, data: Data, folder: Path) -> dict[str, Path]:
    """Every contender's file."""
    graph, rows = traced(model, data), calibration(ExportConfig(runtime=["openvino"]), data, seed=0)
    plain_files = write_onnx(graph, folder, precisions=["fp32", "int8"], fuse=can_fuse(model))
    files = {FIRST: plain_files["fp32"], "ONNX dynamic int8": plain_files["int8"]}
    for number, (name, operators) in enumerate(STATIC.items()):
        files[name] = folder / f"static_{number}.onnx"
        save(quantized_static(graph, rows, operators), files[name])
    return files | {"OpenVINO static int8": export_openvino(graph, folder, precisions=["int8"], rows=rows)["int8"]}


def figures(path: Path, reference: np.ndarray, data: Data) -> Figures:
    """What a file says of all validation rows, against PyTorch's answers."""
    outputs = logits_of(partial(run, session(path)), data)
    weights = path.with_suffix(".bin") if path.suffix == ".xml" else path
    return Figures(quality_of(outputs, data), data.kind.agreement.measure(reference, outputs), weights.stat().st_size)


def logits_of(forward: Forward, data: Data) -> np.ndarray:
    """The logits of all validation rows."""
    rows = data.validation
    return predict(forward, rows.tokens, data.pad_id, labels=rows.labels, batch_size=data.batch_size)


def quality_of(outputs: np.ndarray, data: Data) -> float:
    return data.kind.metric.value(*data.kind.metric_inputs(outputs, data.validation.labels))


def table(measured: dict[str, Figures], times: dict[str, Measurement], dense: float, metric: str) -> Iterator[str]:
    """The rows as Markdown."""
    yield f"| file | {metric} | against PyTorch, points | labels agree | MB | p50, ms | IQR | over dynamic int8 |"
    yield "|---|--:|--:|--:|--:|--:|--:|--:|"
    dynamic = times["ONNX dynamic int8"].p50
    for name, file in measured.items():
        time = times[name]
        quality = f"{100 * file.quality:.1f} | {100 * (file.quality - dense):+.1f} | {file.agreement:.1%}"
        yield f"| {name} | {quality} | {file.size / 1e6:.1f} | {time.p50:.1f} | {time.iqr:.1f} | {dynamic / time.p50:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run with a merge stage, such as runs/twice_as_fast")
    parser.add_argument("--model", help="the pretrained model, where it is not what the run calls it")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, metavar="DIR")
    options = parser.parse_args()
    lock = options.run / "pipeline.lock.yaml"
    if not lock.is_file():
        parser.error(f"{lock} is missing: give the folder of a finished run")
    content = yaml.safe_load(lock.read_text(encoding="utf-8"))
    merged = [stage["artifact"] for stage in content["stages"] if stage["stage"] == "merge"]
    if not merged:
        parser.error(f"{lock} has no merge stage")
    base = resolve(options.model or content["model"]["reference"])
    data = load_data(Inputs(base, TaskConfig(**content["task"]), content["seed"]))
    model = load(options.run.parent / ".store" / merged[-1]).eval()
    reference = logits_of(torch_forward(model), data)
    with tempfile.TemporaryDirectory() as scratch:
        files = files_of(model, data, Path(scratch))
        measured = {name: figures(path, reference, data) for name, path in files.items()}
        variants = [
            LatencyVariant(
                name, "openvino" if path.suffix == ".xml" else "onnxruntime", path, vocabulary=model.config.vocab_size
            )
            for name, path in files.items()
        ]
        timed = measure(variants, [(options.batch, options.length)], options.rounds)
    facts = machine([STAGE], None, ["openvino", "nncf"])
    text = "\n".join(
        [
            "# Static int8 in ONNX Runtime",
            "",
            f"`python benchmarks/static_int8.py runs/{plain(str(options.run))} --out docs/results`",
            "",
            f"{facts['cpu']}, {facts['cores']} cores; {', '.join(filter(None, facts['packages'].values()))}.",
            f"The merged model of that run; {len(data.validation)} validation rows; {options.rounds} interleaved rounds of "
            f"{options.batch} × {options.length} tokens.",
            "",
            *table(measured, {row.variant: row for row in timed}, quality_of(reference, data), data.kind.metric.name),
            *(["", *void] if (void := void_where_disturbed(timed)) else []),
        ]
    )
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        write_atomic(options.out / "static_int8.md", f"{text}\n".encode())


if __name__ == "__main__":
    main()
