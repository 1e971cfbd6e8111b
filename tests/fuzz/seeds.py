"""Sound inputs, made by the project's own functions: a folder for each target, a folder in it for each seed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from tests.pipelines.toys import REPORT
from tests.tiny import LEFT_OUT, STAGES, WRITERS, write_model, write_pipeline

LABELS = ["class0", "class1"]
EVIL = "import sys\nsys.a_stranger_was_here = True\nclass Evil: pass\n"
"""A stranger's code in a model's folder: it leaves a trace in the process that runs it."""
MORE = {
    "unstructured": [
        {"select": {"score": "rpca", "setting": "released_rank1", "count": 4, "modules": ["query"]}},
        {"tune": {"id": "first", "method": "dsee", "rank": 2, "epochs": 0.5}},
        {"prune": {"structure": "weights", "criterion": "delta_or_weight", "remove": {"adapted": 0.2, "others": 0.2}}},
        {"recover": {"method": "same", "distill": "both", "hidden_weight": 0.5}},
        {"merge": None},
    ],
    "target": [
        {"tune": {"method": "propetl", "shared": "lora", "rank": 4, "keep": 0.5}},
        {"prune": {"target": {"speedup": 1.5, "batch": 4, "length": 32}, "criterion": "taylor", "rows": 16}},
        {"recover": {"epochs": 0.2}},
        {"merge": None},
        {"export": {"precision": ["fp32", "int8"]}},
        {"deploy": {"name": "tiny"}},
        {"benchmark": {"batch": [1], "length": [16]}},
        {"report": None},
    ],
}
"""Further pipelines: of the quickstart's shape there is one anyway."""


def pipelines(root: Path) -> None:
    """The recipes as they are, and each again beside a tiny model and its data."""
    import pipelines as package

    recipes = root / "pipeline text" / "recipes"
    recipes.mkdir(parents=True)
    for path in sorted(Path(package.__file__).parent.glob("recipes/*.yaml")):
        shutil.copyfile(path, recipes / path.name)
    for name, stages in {"quickstart": STAGES, **MORE}.items():
        folder = root / "pipeline check" / name
        write_pipeline(folder, stages=stages, rows=20)
        shutil.copyfile(folder / "pipeline.yaml", recipes / f"tiny_{name}.yaml")


def data(root: Path) -> None:
    """train and dev of every kind of task, in every format that it can have; task.json says how it is read."""
    for kind, write in WRITERS.items():
        folder = root / "data" / kind
        folder.mkdir(parents=True)
        (folder / "task.json").write_text(json.dumps(write(folder, rows=12)))
    for ending, join in {"csv": ",".join, "jsonl": None}.items():
        folder = root / "data" / f"classification {ending}"
        folder.mkdir()
        task = WRITERS["classification"](folder, rows=12)
        for split in ("train", "dev"):
            header, *rows = [line.split("\t") for line in (folder / f"{split}.tsv").read_text().splitlines()]
            lines = [json.dumps(dict(zip(header, row, strict=True))) if join is None else join(row) for row in rows]
            (folder / f"{split}.{ending}").write_text("\n".join([*([join(header)] if join else []), *lines]) + "\n")
            (folder / f"{split}.tsv").unlink()
        task |= {"train": f"train.{ending}", "validation": f"dev.{ending}"}
        (folder / "task.json").write_text(json.dumps(task))


ARCHITECTURES = ("bert", "roberta", "gpt2", "llama", "t5", "deberta-v2", "modernbert", "distilbert")


def models(root: Path, architectures: tuple[str, ...] = ARCHITECTURES) -> None:
    """A pretrained folder of each architecture, with a pipeline that begins with it; one has its weights in shards."""
    for name in architectures:
        folder = root / "model" / name
        write_pipeline(folder, stages=[STAGES[0], STAGES[1], STAGES[2]], model_type=name, rows=8)
        (folder / "model" / "evil.py").write_text(EVIL)
    folder = root / "model" / "shards"
    shutil.copytree(root / "model" / architectures[0], folder)
    _shard(folder / "model")


def _shard(folder: Path) -> None:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="20KB")
    # what an index must not be able to reach
    shutil.copyfile(sorted(folder.glob("*.safetensors"))[0], folder.parent / "outside.safetensors")


METHODS = ("dsee", "lora", "adapter", "bitfit", "propetl")


def deltas(root: Path, methods: tuple[str, ...] = METHODS) -> None:
    """Delta files of several methods, each beside its base and once more as it is."""
    from compressor.models.build import build
    from compressor.models.reference import resolve
    from compressor.storage import delta_file

    base = resolve(str(write_model(root / "base")))
    for method in methods:
        folder = root / "delta" / method
        folder.mkdir(parents=True)
        shutil.copytree(base.folder, folder / "base")
        model = _tuned(build(base.folder, LABELS), method)
        facts = {"base": "./base", "base_sha256": base.sha256, "label_names": LABELS}
        for name in ("tuned", "sound"):
            delta_file.write(model, folder / f"{name}.safetensors", **facts)


def _tuned(model, method: str):
    """The model with a change by `method`, moved away from its start."""
    import torch

    from compressor.methods import Options, apply
    from compressor.methods.selective import ground

    torch.manual_seed(0)
    options = Options(rank=2, bottleneck=3, length=2, modules=("query", "value"), group="1")
    omega = {matrix.path: torch.arange(5, dtype=torch.int32) for matrix in ground(model, options)}
    apply(model, method, replace(options, omega=omega))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


TRAINED = [
    STAGES[0],
    {"tune": {"method": "dsee", "rank": 2, "epochs": 0.5, "batch_size": 8}},
    STAGES[2],
    {"merge": None},
]
WHOLE = [*TRAINED, *STAGES[6:8], {"benchmark": {"batch": [1], "length": [8], "rounds": 6, **LEFT_OUT["benchmark"]}}, STAGES[9]]


def trained(root: Path, stages: list[dict] = TRAINED) -> dict[str, Path]:
    """What a run leaves: its folder, and by themselves states and a checkpoint. Returns its artifacts' folders by stage."""
    from rich.console import Console

    from pipelines.engine.runner import run_pipeline
    from pipelines.file.config import load_pipeline

    project = root / "run" / "whole" / "project"
    path, out = write_pipeline(project, stages=stages, rows=24), project.with_name("runs")
    run_pipeline(load_pipeline(path), out, console=Console(quiet=True))
    report = out / "tiny" / "report.json"
    if not report.is_file():
        report.write_text(json.dumps(REPORT))
    made = {folder.name.partition("-")[0]: folder for folder in (out / ".store").iterdir() if not folder.name.startswith(".")}
    for name in ("tune", "prune"):
        shutil.copytree(made[name], root / "state" / name / "stored")
        shutil.copytree(project / "model", root / "state" / name / "base")
    shutil.copytree(made["merge"], root / "checkpoint" / "merged" / "stored")
    return made


def stored(root: Path) -> None:
    """The same of a run through its report, and its graphs."""
    made = trained(root, WHOLE)
    for name in ("model", "model_int8"):
        folder = root / "graph" / name
        folder.mkdir(parents=True)
        shutil.copyfile(made["export"] / "compressed" / f"{name}.onnx", folder / f"{name}.onnx")


def graphs(root: Path) -> None:
    """A small graph by hand, and the same for OpenVINO."""
    from export.runtimes.openvino import export_openvino

    folder = root / "graph" / "by hand"
    folder.mkdir(parents=True)
    model = small_graph()
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    export_openvino(model, root / "openvino" / "by hand", precisions=["fp32"])


def small_graph():
    """Words' vectors, their mean and one matrix: (batch, length) -> logits (batch, 2)."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    draw = np.random.default_rng(0)
    weights = {
        "words": draw.normal(size=(22, 8)).astype(np.float32),
        "matrix": draw.normal(size=(8, 2)).astype(np.float32),
        "axes": np.array([1]),
    }
    nodes = [
        helper.make_node("Gather", ["words", "input_ids"], ["vectors"], axis=0),
        helper.make_node("ReduceMean", ["vectors", "axes"], ["mean"], keepdims=0),
        helper.make_node("MatMul", ["mean", "matrix"], ["logits"]),
    ]
    inputs = [helper.make_tensor_value_info("input_ids", TensorProto.INT64, ["batch", "length"])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", 2])]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "small", inputs, outputs, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
