"""An architecture's row from a user's file: what is refused, and that a model made with it carries it along."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from compressor import load
from compressor.checkpoint import save_checkpoint
from compressor.errors import UserError
from compressor.models import architectures
from compressor.models.anatomy import layers_of
from compressor.models.architectures import ARCHITECTURES, add_row, row_of
from compressor.models.discovery.discover import prove, proven_row
from compressor.models.files.damage import Damage
from compressor.models.reference import resolve
from compressor.models.row_file import KEY, ROW, read_row, row_entry, use_stored_row
from compressor.pruning.surgery import Removal, remove
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.finished import open_run
from tests.compressor.conftest import EXTRA, logits, tiny
from tests.tiny import write_pipeline


@pytest.fixture(autouse=True)
def unregistered(monkeypatch):
    """Each test begins with the built-in rows alone."""
    monkeypatch.setattr(architectures, "_added", {})


@pytest.fixture(scope="module")
def row():
    return proven_row(AutoConfig.for_model("camembert"))


def written(row, path: Path, **changes) -> Path:
    path.write_text(json.dumps({**ROW.dump_python(row, mode="json", exclude_defaults=True), **changes}))
    return path


def test_every_row_survives_its_file(tmp_path):
    for model_type, row in ARCHITECTURES.items():
        again = ROW.validate_json(ROW.dump_json(row, exclude_defaults=True))
        assert again == row, model_type


def test_a_row_of_a_file_is_used_and_stored(row, tmp_path):
    with pytest.raises(UserError, match="E301"):
        row_of("camembert")
    assert row_entry("camembert") == {} and read_row(written(row, tmp_path / "row.json")) == row
    add_row(row)
    assert row_of("camembert") is row and row_of("compressed-camembert") is row
    stored = row_entry("camembert")
    architectures._added.clear()
    use_stored_row(json.loads(json.dumps(stored)))
    assert row_of("camembert") == row
    with pytest.raises(UserError, match="E320 another row for 'camembert' is in use already"):
        use_stored_row({KEY: {**stored[KEY], "prefixes": not row.prefixes}})
    with pytest.raises(Damage, match="that is no row of an architecture"):
        use_stored_row({KEY: {"model_type": "camembert"}})


@pytest.mark.parametrize(
    "content, why",
    [
        ("[]", "E320 .*the folder has a row.json that is no JSON object but a list"),
        ("{", "E320 .*the folder has a row.json that is not JSON"),
        ('{"model_type": "x", "models": "X"}', "E320 .*no row of an architecture: stacks: Field required"),
        ('{"model_type": "x", "models": "X", "stacks": [], "prefixs": true}', "E320 .*no row of an architecture: prefixs: "),
        ('{"model_type": "bert", "models": "X", "stacks": []}', "E320 .*'bert' has a built-in row"),
        (None, "E320 .*no such file"),
    ],
)
def test_what_is_no_row_is_refused(content, why, tmp_path):
    path = tmp_path / "row.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=why):
        read_row(path)


def test_a_row_must_hold_on_the_model(row):
    """A value that is left whole, a path that is not there, the row of another model."""
    config = AutoConfig.for_model("camembert")
    prove(row, config)
    content = ROW.dump_python(row, mode="json", exclude_defaults=True)
    for module, path in (("value", content["stacks"][0]["modules"]["query"]), ("query", "attention.nowhere")):
        wrong = json.loads(json.dumps(content))
        wrong["stacks"][0]["modules"][module] = path
        with pytest.raises(UserError, match="E320 the row does not hold: "):
            prove(ROW.validate_python(wrong), config)
    with pytest.raises(UserError, match="E320 it is the row of 'camembert', and the model is a 'roberta'"):
        prove(row, AutoConfig.for_model("roberta"))
    with pytest.raises(UserError, match="E320 a model with an encoder and a decoder"):
        prove(ROW.validate_python({**content, "model_type": "bart"}), AutoConfig.for_model("bart"))


SHORT = [
    {"tune": {"method": "lora", "rank": 2, "epochs": 0.2}},
    {
        "prune": [
            {"structure": "heads", "criterion": "delta", "remove": 1},
            {"structure": "layers", "criterion": "delta", "remove": 1},
        ]
    },
    {"merge": None},
]
LOADED = """
import sys
from compressor import load
from compressor.checkpoint import save_checkpoint
from compressor.models.auto import class_for
from compressor.models.special_tokens import tokenizer_of
from pathlib import Path
checkpoint, state, delta, base = map(Path, sys.argv[1:])
rows = tokenizer_of(checkpoint)(["the film was great", "a dull plot ."], padding=True, return_tensors="pt")
model = load(checkpoint)
again = class_for(model.config).from_pretrained(checkpoint)
print((model(**rows).logits - again(**rows).logits).abs().max().item() == 0)
print(load(state, base=base)(**rows).logits.shape == load(base=base, delta=delta)(**rows).logits.shape)
"""


def in_a_process(*command: object) -> str:
    done = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(row, path: Path, stages: list):
    """A whole run on a model whose architecture has its row in a file, which is gone afterwards."""
    write_pipeline(path.parent, stages=stages, model_type="camembert")
    path.write_text("architecture: row.json\n" + path.read_text())
    written(row, path.parent / "row.json")
    result = run_pipeline(load_pipeline(path), path.parent / "out")
    (path.parent / "row.json").unlink()
    checks = json.loads((path.parent / "out" / "tiny" / "run.json").read_text())["parity"]
    assert all(check["passed"] for check in checks)
    return result, {check["kind"] for check in checks}


def test_a_run_with_a_row_from_a_file(row, tmp_path):
    """Without the file or with one that does not hold, nothing is run; with it, what was made loads without the file."""
    path = write_pipeline(tmp_path, stages=SHORT, model_type="camembert")
    with pytest.raises(UserError, match=r"E301 .*architecture 'camembert' is not supported"):
        run_pipeline(load_pipeline(path), tmp_path / "out")
    path.write_text("architecture: row.json\n" + path.read_text())
    wrong = json.loads(written(row, tmp_path / "row.json").read_text())
    wrong["stacks"][0]["homes"] = {}
    (tmp_path / "row.json").write_text(json.dumps(wrong))
    with pytest.raises(UserError, match=r"E320 .*pipeline.yaml:1: architecture: the row does not hold"):
        run_pipeline(load_pipeline(path), tmp_path / "out")
    architectures._added.clear()
    result, kinds = run(row, path, SHORT)
    assert kinds == {"removed", "merged"}
    for stage in ("tune", "prune", "merge"):
        architectures._added.clear()
        assert len(layers_of(load(result.artifacts[stage].folder, base=tmp_path / "model"))) == (2 if stage == "tune" else 1)
        assert row_of("camembert") == row
    architectures._added.clear()
    open_run(tmp_path / "out" / "tiny")
    assert row_of("camembert") == row


@pytest.mark.slow
def test_new_processes_know_the_row_from_what_was_made(row, tmp_path):
    """The exported checkpoint by us and by its Auto class, the state, a delta, and the whole run."""
    result, kinds = run(row, tmp_path / "pipeline.yaml", [*SHORT, {"export": {"precision": "fp32"}}])
    assert kinds == {"removed", "merged", "fp32"}
    tuned, delta = result.artifacts["tune"].folder, tmp_path / "delta.safetensors"
    in_a_process("-m", "pipelines.cli", "delta", "convert", tuned, delta, "--base", tmp_path / "model")
    output = in_a_process("-c", LOADED, result.artifacts["merge"].folder, tuned, delta, tmp_path / "model")
    assert output.split() == ["True", "True"]
    in_a_process("-m", "pipelines.cli", "verify", tmp_path / "out" / "tiny", "--no-serve")


def test_another_row_is_another_model(row, tmp_path):
    """What was trained with one row is not reused with another: both say the same of the weights, and cut in their own ways."""
    folder = write_pipeline(tmp_path, model_type="camembert").parent / "model"
    digests = set()
    for prefixes in (True, False):
        architectures._added.clear()
        add_row(replace(row, prefixes=prefixes))
        digests.add(resolve(str(folder)).sha256)
    assert len(digests) == 2


def test_a_checkpoint_has_buffers_that_no_file_holds(tmp_path, monkeypatch):
    """A Gemma scales its embeddings by one: whatever a model computes from its config is computed again."""
    monkeypatch.setitem(EXTRA, "gemma", {"num_key_value_heads": 2, "head_dim": 8})
    add_row(replace(row_of("llama"), model_type="gemma"))
    model = tiny("gemma", torch.float32)
    remove(model, {1: Removal([0], [2])})
    save_checkpoint(model, tmp_path, tmp_path)
    assert torch.equal(logits(load(tmp_path)), logits(model))
