"""Several tasks that generate, in one model: what is shared, what each task has, and what each of them writes."""

import json
import re
from pathlib import Path

import pytest
import yaml

import compressor
from compressor.models.special_tokens import tokenizer_of
from compressor.storage.delta_file import read
from compressor.storage.task_files import SHARED
from compressor.tasks.data import read_data
from compressor.tasks.decoding.generate_texts import generate_texts
from compressor.tasks.decoding.text_quality import score_texts
from pipelines.file.config import load_pipeline
from tests.tiny import WORDS, write_data, write_model, write_prompts, write_sources

FAST = {"epochs": 6, "batch_size": 8, "learning_rate": 0.02}
PROPETL = {"method": "propetl", "shared": "lora", "modules": "all", "rank": 8, "keep": 0.5, "mask_learning_rate": 0.02, **FAST}
SHORT = {**FAST, "epochs": 1}
METHODS = {"propetl": PROPETL, "adapter": {"method": "adapter", "bottleneck": 8, **SHORT}, "full": {"method": "full", **SHORT}}


def write_project(folder: Path, tune: dict, model_type: str = "t5", auto: str = "AutoModelForSeq2SeqLM") -> Path:
    """Two tasks on one base: to say the telling words again, and to write the class of a sentence."""
    (again := folder / "again").mkdir()
    (mood := folder / "mood").mkdir()
    repeats = {"t5": write_sources, "gpt2": write_prompts}[model_type](again, rows=96)
    classes = {**write_data(mood, rows=96), "kind": repeats["kind"], "text": "sentence", "label": "label"}
    for file in mood.glob("*.tsv"):
        file.write_text(file.read_text().replace("class0", "bad").replace("class1", "good"))
    if model_type == "t5":
        classes |= {"prefix": "film ", "metric": "exact_match", "decode": {"max_new_tokens": 3, "metrics": ["exact_match"]}}
    write_model(folder / "model", model_type, auto=auto)
    tasks = {name: _inside(name, task) for name, task in {"again": repeats, "mood": classes}.items()}
    path = folder / "p.yaml"
    pipeline = {"name": "many", "model": "./model", "threads": 1, "tasks": tasks, "stages": [{"tune": tune}]}
    path.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    return path


def _inside(folder: str, task: dict) -> dict:
    return {**task, **{key: f"{folder}/{task[key]}" for key in ("train", "validation")}}


def metadata_of(out: Path) -> dict:
    lock = yaml.safe_load((out / "many" / "pipeline.lock.yaml").read_text())
    return json.loads((out / ".store" / lock["stages"][0]["artifact"] / "artifact.json").read_text())["metadata"]


@pytest.mark.parametrize("method", METHODS)
def test_one_encoder_and_decoder_writes_the_answers_of_two_tasks(method, tmp_path, out, compress):
    project = write_project(tmp_path, METHODS[method])
    project.write_text(f"{project.read_text()}- report:\n")
    code, shown, error = compress("run", project, "--out", out)
    assert code == 0, error
    metadata, files = metadata_of(out), out / "many" / "tasks"
    assert metadata["trainable"]["head"] == 0 and metadata["trainable"]["body"] == metadata["closed_form"]
    names = [f"{name}.{ending}" for name in ("again", "mood") for ending in ("generated.jsonl", "safetensors")]
    assert sorted(path.name for path in files.iterdir()) == [SHARED, *names]
    model = base = tmp_path / "model"
    for row in metadata["tasks"]:
        task = load_pipeline(project).tasks[row["task"]]
        model = compressor.load(model, delta=files / f"{row['task']}.safetensors")  # the second on the model of the first
        data = read_data(base, task)
        texts = generate_texts(model, tokenizer_of(base), data.validation.prompts, task.decode, data.pad_id)
        again = score_texts(data.validation.items, texts, task.decode).values
        assert {key: row["quality"][key] for key in again} == again, "each file computes what was measured"
        assert row["labels"] == [] and f"{100 * row['quality'][row['metric']]:.1f}" in shown
    assert "mood: 192 generated texts: exact match" in " ".join(shown.split())
    again, mood = metadata["tasks"]
    assert (again["metric"], mood["metric"]) == ("likelihood", "exact_match")
    masks = read(files / "mood.safetensors").layout["tasks"]
    assert bool(masks) == (method == "propetl"), "only masks are a task's own"
    page = (out / "many" / "report.md").read_text()
    assert "of a constant prediction" not in page and '"name": "constant"' not in (out / "many" / "report.html").read_text()
    assert f"| mood | {mood['generated']['examples'][0]['prompt']} |" in page, "examples of what each task writes"
    if method == "propetl":  # trained longest
        assert again["quality"]["accuracy"] > 0.6 and mood["quality"]["exact_match"] > 0.75, "a guess is right in half"


def test_a_decoder_alone_learns_what_the_answers_of_two_tasks_look_like(tmp_path, out, compress):
    """In three epochs; not yet which of them is right."""
    project = write_project(tmp_path, {**PROPETL, "epochs": 3}, "gpt2", "AutoModelForCausalLM")
    assert compress("run", project, "--out", out)[0] == 0
    metadata = metadata_of(out)
    assert [row["metric"] for row in metadata["tasks"]] == ["likelihood", "likelihood"]
    assert all(row["quality"]["likelihood"] > 2 / len(WORDS) for row in metadata["tasks"]), "a guess among all words has half"
    assert metadata["losses"][-1]["loss"] < 0.5 * metadata["losses"][0]["loss"]
    loaded = compressor.load(tmp_path / "model", delta=out / "many" / "tasks" / "mood.safetensors")
    assert type(loaded).__name__ == "GPT2LMHeadModel"


@pytest.mark.slow
def test_old_texts_do_not_stay(tmp_path, out, compress):
    project = write_project(tmp_path, METHODS["adapter"])
    assert compress("run", project, "--out", out)[0] == 0
    text = yaml.safe_load(project.read_text())
    del text["tasks"]["mood"]
    project.write_text(yaml.safe_dump(text, sort_keys=False))
    assert compress("run", project, "--out", out)[0] == 0
    assert sorted(path.name for path in (out / "many" / "tasks").glob("*.jsonl")) == ["again.generated.jsonl"]


@pytest.mark.parametrize(
    ("mood", "says"),
    [
        (
            {"kind": "classification"},
            r"E118 \S+:\d+: tasks.mood.kind: .* classification needs another model than one of kind text2text",
        ),
        ({}, r"E118 \S+:\d+: tasks.mood.kind: .* classification needs another model than one of kind text2text"),
        (
            {"kind": "spans", "text": ["sentence", "label"], "label": "x"},
            r"E118 \S+:\d+: tasks.mood.kind: .* spans cannot share a base",
        ),
        (
            {"kind": "text2text", "metric": "ter", "decode": {"metrics": ["ter"]}},
            r"E119 \S+:\d+: tasks.mood.metric: ter falls when a model improves",
        ),
        (
            {"kind": "text2text", "metric": "nist", "decode": {"metrics": ["nist"]}},
            r"E119 \S+:\d+: tasks.mood.metric: nist is no share, and its mean with likelihood would be nist's alone",
        ),
    ],
)
def test_tasks_that_cannot_be_together(mood, says, tmp_path, out, compress):
    project = write_project(tmp_path, PROPETL)
    pipeline = yaml.safe_load(project.read_text())
    files = {key: pipeline["tasks"]["mood"][key] for key in ("train", "validation", "text", "label")}
    pipeline["tasks"]["mood"] = {**files, **mood}
    project.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    code, shown, error = compress("run", project, "--out", out)
    assert (code, shown) == (2, "") and re.match(says, error.splitlines()[-1])  # the lines before are of writing the model


def test_scores_of_one_scale_are_averaged(tmp_path):
    """Of NIST, which is not a share of anything, with itself."""
    project = write_project(tmp_path, PROPETL)
    pipeline = yaml.safe_load(project.read_text())
    for task in pipeline["tasks"].values():
        task |= {"metric": "nist", "decode": {"metrics": ["nist"]}}
    project.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    assert {task.metric for task in load_pipeline(project).all_tasks.values()} == {"nist"}
