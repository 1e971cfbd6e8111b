"""Many delta files in one ONNX file: each row is its own task's, as the merged model computes it."""

import json

import onnx
import pytest
import torch

from compressor.compression import compression_of
from compressor.models.hub import SEQUENCES, build, resolve
from compressor.storage import delta_file
from export.many.stacked_tasks import stack_files
from tests.compressor.conftest import tuned
from tests.export.conftest import check_wholly, notes
from tests.tiny import write_model

LABELS = (["bad", "good"], ["entailed", "neutral", "contradicted"], ["score"])


def write_task(base, path, case, labels, *, auto_class=SEQUENCES, seed=0):
    model = build(base.folder, labels, seed, auto_class)
    tuned(model, case, ("query", "ffn_out"))
    with torch.no_grad():
        for name in compression_of(model).head_parameters:
            model.get_parameter(name).normal_(std=0.5, generator=torch.Generator().manual_seed(seed))
    delta_file.write(model, path, base=base.reference, base_sha256=base.sha256, label_names=labels)
    return path


def write_tasks(base, folder, cases, **options):
    return [
        write_task(base, folder / f"{case}.delta.safetensors", case, LABELS[number % 3], seed=number, **options)
        for number, case in enumerate(cases)
    ]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return resolve(str(write_model(tmp_path_factory.mktemp("base"))))


def operators(path):
    return [node.op_type for node in onnx.load(path).graph.node]


def test_a_file_of_many_tasks(base, tmp_path):
    cases = ("dsee", "lora", "bitfit", "adapter", "selective")
    made = stack_files(write_tasks(base, tmp_path, cases), tmp_path / "out")
    assert [task.name for task in made.tasks] == list(cases) and all(result.passed for result in made.parity)
    assert [task.kind for task in made.tasks[:3]] == ["classification", "classification", "regression"]
    print(operators(made.path), [r.max_difference for r in made.parity], made.base_bytes, made.changes)
    assert operators(made.path).count("MultiHeadAttention") == 2
    check_wholly(made.path)
    assert json.loads(notes(made.path)["tasks"])[1] == {"name": "lora", "labels": LABELS[1], "kind": "classification"}
