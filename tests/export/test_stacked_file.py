"""Many delta files in one ONNX file: each row is its own task's, as the merged model computes it."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from compressor.compression import compression_of
from compressor.deltas.kinds import sparse
from compressor.errors import CheckError, UserError
from compressor.models.architectures import ARCHITECTURES
from compressor.models.build import SEQUENCES, TOKENS, build
from compressor.models.reference import resolve
from compressor.pruning.surgery import Removal, remove
from compressor.storage import delta_file
from compressor.storage.live import remember
from export.graph.rewrites import late_gathers
from export.many import stacked_tasks
from export.many.stacked_tasks import stack_files
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import run, session
from tests.compressor.conftest import tuned
from tests.export.conftest import check_wholly, encoding, notes
from tests.tiny import WORDS, write_model

LABELS = (["bad", "good"], ["entailed", "neutral", "contradicted"], ["score"])


def write_task(base, path, case, labels, *, auto_class=SEQUENCES, seed=0, kind="", head=True):
    model = build(base.folder, labels, seed, auto_class)
    tuned(model, case, ("query", "ffn_out"), places=9 if case == "selective" else 5)
    with torch.no_grad():
        for name in compression_of(model).head_parameters:
            model.get_parameter(name).normal_(std=0.5, generator=torch.Generator().manual_seed(seed))
    facts = {"base": base.reference, "base_sha256": base.sha256, "label_names": labels, "kind": kind}
    delta_file.write(model, path, **facts, head=head)
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


@pytest.mark.slow
def test_a_file_of_many_tasks(base, tmp_path, monkeypatch):
    monkeypatch.setattr(sparse, "FEW", 5)  # the 9 positions of selective are stored as short integers
    monkeypatch.setattr(late_gathers, "LEAST", 1)
    # the file computes on the CPU, and so does what it is compared with
    monkeypatch.setattr("compressor.tasks.features.accelerated", lambda _: pytest.fail("the model is moved"))
    cases = ("dsee", "lora", "bitfit", "adapter", "selective", "vera")
    made = stack_files(write_tasks(base, tmp_path, cases), tmp_path / "out")
    assert [task.name for task in made.tasks] == list(cases) and all(result.passed for result in made.parity)
    assert [task.kind for task in made.tasks[:3]] == ["classification", "classification", "regression"]
    assert operators(made.path).count("MultiHeadAttention") == 2
    # one look-up of all short vectors by the task; those of a block's factors wait for its states
    graph = onnx.load(made.path).graph
    assert operators(made.path).count("Split") and sum(node.name.endswith("/late") for node in graph.node) >= 8
    check_wholly(made.path)
    assert json.loads(notes(made.path)["tasks"])[1] == {"name": "lora", "labels": LABELS[1], "kind": "classification"}
    assert "ScatterND" not in operators(made.path)  # its sums race in ONNX Runtime's threads
    # VeRA's random matrices, of query and ffn_out, once for both blocks
    shapes = [tuple(tensor.dims) for tensor in onnx.load(made.path).graph.initializer]
    assert shapes.count((32, 2)) == shapes.count((24, 2)) == 1
    # a task's outputs are followed by none; the tasks of a batch do not touch each other
    live, batch = session(made.path), encoding(4, 9)
    batch["input_ids"] %= len(WORDS)
    batch["token_type_ids"] = np.zeros_like(batch["input_ids"])
    logits = run(live, {**batch, "task": np.array([0, 1, 2, 0])})
    assert logits.shape == (4, 3) and (logits[[0, 3], 2] < -1e38).all() and (logits[2, 1:] < -1e38).all()
    for row, task in enumerate((0, 1, 2, 0)):
        alone = {name: values[row : row + 1] for name, values in batch.items()}
        assert abs(run(live, {**alone, "task": np.array([task])}) - logits[row])[0, : made.tasks[task].outputs].max() < 1e-5


@pytest.mark.slow
def test_tags_of_every_token_in_openvino(base, tmp_path):
    pytest.importorskip("openvino", reason="the extra openvino is not installed")
    paths = write_tasks(base, tmp_path, ("dsee", "lora"), auto_class=TOKENS)
    made = stack_files(paths, tmp_path / "out", runtime=RUNTIMES["openvino"])
    assert {task.kind for task in made.tasks} == {"tokens"} and made.parity[0].rows > 100
    other = write_task(base, tmp_path / "other.safetensors", "lora", LABELS[0])
    with pytest.raises(UserError, match=r"E775 .*other.safetensors: it is a task of sequence classification, the first file"):
        stack_files([*paths, other], tmp_path / "no")


def test_a_file_that_computes_a_task_wrongly_is_refused(monkeypatch):
    """No run has the comparison, and nothing was published: the way out is to leave that task out."""
    task, rows = stacked_tasks.StackedTask("moods", LABELS[0], "classification", 1), [encoding(1, 4)] * 3
    monkeypatch.setattr(stacked_tasks, "session", lambda path: None)
    monkeypatch.setattr(
        stacked_tasks, "outputs_of", lambda live, tasks, samples, chosen, pad_id: [np.zeros((1, 2))] * len(chosen)
    )
    with pytest.raises(
        CheckError, match=r"E610 task 'moods', merged -> model.onnx: .*\. Nothing was written. Leave the delta of 'moods'"
    ):
        stacked_tasks.prove_tasks(Path("model.onnx"), [task], [rows], [np.ones((3, 2))], pad_id=1)


def test_files_that_do_not_belong_together_are_refused(base, tmp_path):
    first = write_task(base, tmp_path / "first.safetensors", "lora", LABELS[0])
    elsewhere = resolve(str(write_model(tmp_path / "elsewhere", initializer_range=0.1)))
    foreign = write_task(elsewhere, tmp_path / "foreign.safetensors", "lora", LABELS[0])
    with pytest.raises(
        UserError, match=r"E775 .*foreign.safetensors: its base .* is not .* first file, .*, or stack it with files"
    ):
        stack_files([first, foreign], tmp_path / "out")
    several = write_task(base, tmp_path / "several.safetensors", "lora", LABELS[0], kind="multilabel")
    with pytest.raises(UserError, match=r"E775 .*several.safetensors: .* 'multilabel' needs a model of its own. Leave it out$"):
        stack_files([first, several], tmp_path / "out")
    bare = write_task(base, tmp_path / "bare.safetensors", "lora", LABELS[0], head=False)
    with pytest.raises(UserError, match=r"E775 .*bare.safetensors: it has no task head"):
        stack_files([first, bare], tmp_path / "out")
    shared = write_task(base, tmp_path / "_shared.safetensors", "lora", [])
    with pytest.raises(UserError, match=r"E775 .*_shared.safetensors: this is the file that tasks share, not one of the tasks"):
        stack_files([shared, first], tmp_path / "out")
    wide = remember(build(base.folder, LABELS[0]), base.reference, base.sha256).double()
    names = {"base": base.reference, "base_sha256": base.sha256, "label_names": LABELS[0]}
    delta_file.write(tuned(wide, "lora"), tmp_path / "wide.safetensors", **names)
    with pytest.raises(UserError, match=r"E775 .*wide.safetensors: its numbers are float64, those of a stacked file float32"):
        stack_files([first, tmp_path / "wide.safetensors"], tmp_path / "out")
    pruned = remember(build(base.folder, LABELS[0]), base.reference, base.sha256)
    remove(pruned, {0: Removal(heads=[1])})
    delta_file.write(tuned(pruned, "lora"), tmp_path / "cut.safetensors", **names)
    with pytest.raises(UserError, match=r"E775 .*cut.safetensors: its base is pruned otherwise"):
        stack_files([first, tmp_path / "cut.safetensors"], tmp_path / "out")
    prefix = write_task(base, tmp_path / "prefix.safetensors", "prefix", LABELS[0])
    with pytest.raises(UserError, match=r"E776 .*prefix.safetensors: task 'prefix': a change of kind 'prefix'"):
        stack_files([first, prefix], tmp_path / "out")
    (tmp_path / "again").mkdir()
    again = write_task(base, tmp_path / "again" / "first.delta.safetensors", "lora", LABELS[0])
    with pytest.raises(UserError, match=r"E777 .*two tasks are named 'first'"):
        stack_files([first, again], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_every_architecture(name, tmp_path):
    base = resolve(str(write_model(tmp_path / "base", name)))
    cases = ("dsee", "lora", "adapter")
    made = stack_files(write_tasks(base, tmp_path, cases), tmp_path / "out")
    assert len(made.parity) == len(cases)
