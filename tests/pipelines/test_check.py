"""What `compress check` tells beside faults, and what stops a run before it writes anything because a tokenizer says so."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from compressor.account import Plan
from compressor.cost import LayerShape, ModelShape
from compressor.printable import OBEYED, printable
from compressor.tasks import TaskConfig
from compressor.tasks.data import read_data
from compressor.tasks.reading import read_task
from compressor.tasks.rows import Split
from compressor.tasks.task_kind import kind_of
from pipelines.check.auto_tokenizer import texts_read_otherwise
from pipelines.check.checkup import account_of, warnings_of
from pipelines.check.estimate import (
    FEWEST,
    LIBRARIES,
    Space,
    needs_of,
    on_another_disk,
    rows_of,
    shortages,
    shortages_of_run,
    spaces_of,
    work,
)
from pipelines.engine import preflight
from pipelines.engine.preflight import check_inputs, check_tokens, make_plans
from pipelines.engine.stage import Stage, StageConfig, load_stage
from pipelines.file.config import load_pipeline
from pipelines.stages.training_plan import saved_bytes
from serving import bundle
from tests.pipelines import toys
from tests.pipelines.toys import tree
from tests.tiny import write_model, write_pipeline

STAGES = [
    {"tune": {"method": "lora", "rank": 4, "epochs": 1}},
    {"merge": None},
    {"export": None},
    {"benchmark": {"length": [16]}},
]


@pytest.fixture
def write(tmp_path, capfd):
    """Write a project; what its making says is no output of the command."""

    def call(kind: str = "classification", stages: list = STAGES):
        path = write_pipeline(tmp_path, kind=kind, model_type="gpt2" if kind == "generation" else "bert", stages=stages)
        capfd.readouterr()
        return path

    return call


@pytest.mark.parametrize(("kind", "tasks"), [("classification", 0), ("multilabel", 0), ("regression", 0), ("tokens", 1)])
def test_only_rows_that_may_be_refused_are_tokenized_before_a_run(write, monkeypatch, kind, tasks):
    """Long rows of the other kinds are cut: half a minute for 100,000 rows that find nothing."""
    ready, tokenized = check_inputs(load_pipeline(write(kind, STAGES[:2]))), []
    monkeypatch.setattr(preflight, "read_data", lambda *given: tokenized.append(given) or read_data(*given))
    check_tokens(ready)
    assert len(tokenized) == tasks


@pytest.mark.parametrize("kind", ["tokens", "generation"])
def test_rows_that_are_too_long_stop_a_run_before_it_writes_anything(tmp_path, compress, write, kind):
    """Not after a minute, in the tune. Both files at once, each with the key that names it."""
    path = write(kind, STAGES[:2])
    path.write_text(path.read_text().replace("max_length: 32", "max_length: 4"))
    before = tree(tmp_path)
    for command in (("run", path, "--out", tmp_path / "runs"), ("check", path)):
        code, shown, error = compress(*command)
        lines = error.splitlines()
        assert (code, shown, [line[:4] for line in lines]) == (2, "", ["E213", "E213"])
        assert all("longer than max_length 4" in line for line in lines)
        assert [f"task.{key})" in line for key, line in zip(("train", "validation"), lines, strict=True)] == [True, True]
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    ("lacks", "told"),
    [
        ("libpython", r"E703 .*: stage 'deploy' starts a server: .* needs libpythonNONE\.so\.1\.0, .*Or leave out the stage"),
        ("cache", r"E801 .*taken: stage 'deploy' starts a server: a file, where a folder is needed\. Set XDG_CACHE_HOME to "),
    ],
)
def test_what_triton_lacks_stops_a_run_before_it_writes_anything(tmp_path, compress, write, monkeypatch, lacks, told):
    """Not after all training, in deploy."""
    path = write(stages=[*STAGES[:3], {"deploy": {"name": "x"}}])
    (tmp_path / "taken").touch()
    if lacks == "libpython":
        monkeypatch.setattr(bundle.sysconfig, "get_config_var", lambda name: "NONE")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    before = tree(tmp_path)
    for command in (("run", path, "--out", tmp_path / "runs"), ("check", path)):
        code, shown, error = compress(*command)
        assert (code, shown) == (2, "") and re.match(told, error)
    assert tree(tmp_path) == before
    assert compress("check", write(stages=STAGES[:3]))[0] == 0, "nothing is deployed"


@pytest.mark.parametrize("place", ["data", "out", "model"])
def test_a_path_that_is_not_utf_8_stops_a_run_before_it_writes_anything(tmp_path, compress, write, place):
    """Not after all training: the folder of a model cannot be read there, and the lock file cannot name it."""
    path, odd = write(stages=STAGES[:2]), tmp_path / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    if place != "out":
        if place == "data":
            path.write_text(path.read_text().replace("./model", str(tmp_path / "model")))
        else:
            (tmp_path / "model").rename(odd / "model")
        for file in (path, tmp_path / "train.tsv", tmp_path / "dev.tsv"):
            file.rename(odd / file.name)
        path = odd / path.name
    before = tree(tmp_path)
    code, shown, error = compress("run", path, "--out", (odd if place == "out" else tmp_path) / "runs")
    told = {
        "out": "E801 .* the path is not",
        "data": r"E201 .*train\.tsv: its path is not",
        "model": "E304 .*model './model' is at .*, a path that is not UTF-8.* Rename the folder",
    }
    assert (code, shown) == (2, "") and re.match(told[place], error), error
    assert tree(tmp_path) == before


def test_a_mark_that_is_cut_off_stops_a_run_before_it_writes_anything(tmp_path, compress, write):
    """Also in a file that is only scored, which is read behind the training."""
    path = write("marked", STAGES[:2])
    row = {"text": "good " + "the film " * 20 + "story", "span1": "good", "span2": "story", "label": "class0"}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    path.write_text(path.read_text().replace("max_length: 32", "max_length: 32\n  test: test.jsonl"))
    before = tree(tmp_path)
    for command in (("run", path, "--out", tmp_path / "runs"), ("check", path)):
        code, shown, error = compress(*command)
        assert (code, shown) == (2, "") and "task.test)" in error
        assert error.startswith(f"E213 {tmp_path / 'test.jsonl'}:1: max_length 32 cuts off a marked span")
        assert tree(tmp_path) == before


def rows(*lines: str) -> str:
    return "sentence\tlabel\n" + "".join(f"{line}\n" for line in lines)


def test_check_tells_what_is_cut_shared_contradicted_and_unbalanced(tmp_path, compress, write):
    path = write()
    long = " ".join(["film"] * 40)
    train = [f"{long}\tclass0", "a film\tclass0", "a film\tclass1", "good\tclass1", "bad\tclass0", "a plot\tclass0"]
    (tmp_path / "train.tsv").write_text(rows(*train))
    (tmp_path / "dev.tsv").write_text(rows(*["the plot\tclass0"] * 18, "a film\tclass1", "good\tclass0"))
    code, shown, error = compress("check", path)
    assert (code, error) == (0, "")
    lines = shown.splitlines()
    assert lines[0] == "task.train       6 rows; 2 classes: class0 (66.7%), class1 (33.3%); a constant prediction gets 66.7%"
    assert lines[1].strip() == "tokens a row: median 4, 95 % at most 32, longest 42; 1 row cut"
    assert [line.split()[0] for line in lines[2:7]] == ["task.validation", "tokens", "time", "memory", "disk"]
    assert lines[7:-1] == [
        "warning: task: train: 1 of 6 rows longer than max_length 32, cut there: the longest has 42 tokens",
        "warning: task: validation: 95.0% of the rows have the same class: a constant prediction reaches that accuracy",
        "warning: task: 2 of 20 validation rows are in the training file, too: quality looks better than it is "
        "(dev.tsv: lines 20, 21)",
        "warning: task: train: 1 row repeat the text of an earlier row with another label (train.tsv: line 4)",
    ]
    assert lines[-1].endswith("no faults in 4 stages, the model and the data")


def test_a_row_with_several_targets_is_one_line(tmp_path):
    texts, lines = [(f"prompt {row // 2}",) for row in range(8)], [1, 1, 2, 2, 3, 3, 4, 4]
    split = Split(texts, [f"target {row}" for row in range(8)], lines)
    task = TaskConfig(kind="generation", train=tmp_path / "a.jsonl", validation=tmp_path / "b.jsonl", text="x", label="y")
    for count, says in ((2, "line 1"), (6, "lines 1, 2, 3"), (8, "lines 1, 2, 3, ...")):
        part = Split(texts[:count], split.labels[:count], lines[:count])
        (told,) = warnings_of({"train": split, "validation": part}, kind_of("generation"), task, {})
        assert told.endswith(f"(b.jsonl: {says})"), told


def test_a_folder_in_which_no_run_can_be_written_is_a_warning(tmp_path, compress, write, monkeypatch):
    path = write(stages=STAGES[:2])
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert "warning: runs" not in compress("check", path)[1]
    (tmp_path / "here" / "runs").touch()
    code, shown, _ = compress("check", path)
    assert code == 0 and f"warning: {tmp_path}/here/runs: a file, where a folder is needed; give --out" in shown


def test_labels_that_a_terminal_obeys_are_shown_as_escapes(tmp_path, compress, write):
    """JSON for programs is as it was, and so are tabs and letters."""
    path, label = write(stages=STAGES[:2]), "\u4e2d\x1b]0;a\x07\x1b[2J\u202e"
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text(rows("good\tclass0", f"bad\t{label}"))
    code, shown, _ = compress("check", path)
    assert code == 0 and "2 classes: class0 (50.0%), \u4e2d\\x1b]0;a\\x07\\x1b[2J\\u202e (50.0%)" in shown
    assert not any(map(OBEYED.search, shown.splitlines()))
    code, shown, _ = compress("check", path, "--json")
    assert "\u4e2d\\u001b]0;a\\u0007\\u001b[2J\u202e" in shown
    assert label in json.loads(shown)["tasks"]["task"]["train"]["labels"]
    readable = "a\tb \u00e9 \u05d0 \u200f \U0001f600"
    assert printable(f"{readable}\n\r\x85\x7f") == f"{readable}\\n\\r\\x85\\x7f"


MARK = "train: {} read as a class; if it marks missing labels, delete them"
WORD = "train: label '{}' ({}) is a word where the others are numbers: it is one more class, and all are in alphabetical order"
QUOTED = "train: {} with quoted texts: .tsv has no quoting, the quotes are read as text; save the file as .csv (train.tsv: {})"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({0: "good\tnan"}, [MARK.format("1 row with the label 'nan',")]),
        (
            {0: "good\tnan", 1: "bad\tNULL", 2: "a plot\tNULL"},
            [MARK.format("1 row with the label 'nan',"), MARK.format("2 rows with the label 'NULL',")],
        ),
        ({0: "good\tone"}, [WORD.format("one", "1 row")]),
        ({0: "good\tone", 1: "bad\tone"}, []),  # no slip any more
        ({0: '"a ""good"" film"\t0', 2: '"""good"""\t2'}, [QUOTED.format("2 rows", "lines 2, 4")]),
        ({0: '"a good film"\t0', 1: '"so "good" as ""bad"" is"\t1', 2: '""good"\t2', 3: '"\t0'}, []),
    ],
)
def test_labels_and_texts_that_look_like_slips_are_told(tmp_path, compress, write, changed, told):
    path = write(stages=STAGES[:2])
    lines = [f"{'a film ' * (row % 7)}and {'very ' * (row // 7)}story\t{row % 3}" for row in range(160)]
    (tmp_path / "dev.tsv").write_text(rows(*(f"the plot {line}" for line in lines)))
    (tmp_path / "train.tsv").write_text(rows(*(changed.get(row, line) for row, line in enumerate(lines))))
    code, shown, error = compress("check", path, "--json")
    warnings = [text.removeprefix("task: ") for text in json.loads(shown)["warnings"]]
    found = [text for text in warnings if "label" in text or "quoted" in text]
    assert (code, error, len(found)) == (0, "", len(told)), found
    assert all(text.startswith(says) for says, text in zip(told, found, strict=True)), found


@pytest.mark.parametrize(
    ("kind", "label", "labels", "told"),
    [
        ("multilabel", (True, False), ["nan", "5"], 1),
        ("multilabel", (True, False), ["one", "5"], 0),
        ("tokens", [1], ["O", "B-nan", "I-nan"], 0),
        ("marked", 1, ["5", "nan"], 1),
    ],
)
def test_only_labels_that_are_classes_can_look_like_slips(tmp_path, kind, label, labels, told):
    rare = Split([("good",)], [label], [2])
    other = (False, True) if kind == "multilabel" else [0] if kind == "tokens" else 0
    split = Split([*rare.texts, *((f"text {row}",) for row in range(150))], [label, *[other] * 150], [*range(2, 153)])
    row, task = kind_of(kind), TaskConfig(train=tmp_path, validation=tmp_path, text="text", label="labels")
    facts = {"train": {"cut": 0, "rows": 151, "constant": None, "labels": row.spread(split.labels, labels)}}
    assert len([*warnings_of({"train": split, "validation": replace(rare, texts=[("bad",)])}, row, task, facts)]) == told


def test_check_as_json(compress, write):
    path = write()
    code, shown, error = compress("check", path, "--json")
    account = json.loads(shown)
    assert (code, error, account["warnings"]) == (0, "", [one for one in account["warnings"] if "validation rows stand" in one])
    train = account["tasks"]["task"]["train"]
    assert (train["rows"], train["cut"], train["labels"]) == (160, 0, {"class0": 80, "class1": 80})
    least, most = account["needs"]["seconds"]
    assert 0 < least < most and account["needs"]["memory_bytes"] > 1e9 and account["needs"]["disk_bytes"] > 0


def check_warnings(compress, path, stage: str, told: list[str]) -> None:
    """`compress check` finds no fault, and its warnings of a stage have these words, in this order."""
    code, shown, error = compress("check", path, "--json")
    assert (code, error) == (0, "")
    warnings = [text for text in json.loads(shown)["warnings"] if text.startswith(f"{stage}: ")]
    assert len(warnings) == len(told) and all(words in text for words, text in zip(told, warnings, strict=True)), warnings


def with_target(target: dict, export: dict, deploy: dict | None) -> list:
    """Stages with a speed-up as the target, and a deployment behind it where one is given."""
    merge = [] if export.get("merge") is False else [{"merge": None}]
    stages = [{"prune": {"target": {"speedup": 1.5, "length": 16, **target}}}, *merge, {"export": export}, {"deploy": deploy}]
    return [STAGES[0], *stages[: -1 if deploy is None else None]]


@pytest.mark.parametrize(
    ("target", "export", "deploy", "timed"),
    [
        ({}, {}, {}, ("onnxruntime", "int8")),
        ({}, {}, {"precision": "fp32"}, ("onnxruntime", "fp32")),
        ({}, {"runtime": ["openvino"]}, {}, ("openvino", "int8")),
        ({}, {"runtime": ["onnxruntime", "openvino"]}, {"runtime": "openvino", "precision": "fp32"}, ("openvino", "fp32")),
        ({"precision": "fp32"}, {}, {}, ("onnxruntime", "fp32")),
        ({"runtime": "openvino"}, {}, {}, ("openvino", "fp32")),
        ({}, {}, None, ("onnxruntime", "fp32")),
        ({}, {"precision": "auto"}, {}, ("onnxruntime", "fp32")),
        ({}, {"precision": ["fp16"]}, {"device": "cuda"}, ("onnxruntime", "fp32")),
    ],
)
def test_a_target_is_timed_in_the_file_that_is_deployed(write, target, export, deploy, timed):
    pipeline = load_pipeline(write(stages=with_target(target, export, deploy)))
    found = pipeline.stages[1].config.search.target
    assert (found.runtime, found.precision) == timed


@pytest.mark.parametrize("deploy", [{}, {"runtime": "openvino"}])
def test_of_two_exports_the_one_that_is_deployed_is_timed(write, deploy):
    first, *stages = with_target({}, {"runtime": ["openvino"]}, deploy)
    stages.insert(-2, {"export": {"id": "other"}})
    found = load_pipeline(write(stages=[first, *stages])).stages[1].config.search.target
    assert (found.runtime, found.precision) == ("openvino", "int8")


def test_a_model_that_generates_is_timed_as_it_can_be(write):
    """Its pass over a prompt, in fp32: the deployed int8 file would be E646."""
    pipeline = load_pipeline(write("generation", with_target({}, {}, {"interfaces": ["text"]})))
    assert pipeline.stages[1].config.search.target.precision == "fp32"


@pytest.mark.parametrize(
    ("target", "export", "deploy", "told"),
    [
        (
            {"runtime": "openvino"},
            {},
            {},
            ["timed in OpenVINO fp32, and ONNX Runtime int8 is deployed, which may gain less or more: name target.runtime"],
        ),
        ({}, {}, {}, []),
        ({}, {"runtime": ["openvino"]}, {"precision": "fp32"}, []),
        ({"precision": "fp32"}, {}, {}, []),
        ({"precision": "int8"}, {}, {}, []),
        ({}, {}, {"precision": "fp32"}, []),
        ({}, {"precision": "auto"}, {}, []),
        ({}, {}, None, []),
        ({}, {"merge": False}, {"precision": "fp32"}, ["merged deltas, and 'export' keeps them apart (merge: false)"]),
    ],
)
def test_a_target_of_another_file_than_the_deployed_one_is_told(compress, write, target, export, deploy, told):
    check_warnings(compress, write(stages=with_target(target, export, deploy)), "prune", told)


@pytest.mark.parametrize(
    ("export", "bits", "told"),
    [
        ({"runtime": ["onnxruntime", "openvino"]}, 7, ["without it OpenVINO int8 takes longer than OpenVINO fp32"]),
        ({"runtime": ["openvino"], "precision": ["fp32"]}, 7, []),
        ({"runtime": ["openvino"], "precision": "auto"}, 7, []),
        ({"runtime": ["openvino"]}, 8, []),
        ({}, 7, []),
    ],
)
def test_int8_that_is_no_gain_on_this_machine_is_told(compress, write, monkeypatch, export, bits, told):
    monkeypatch.setattr("pipelines.stages.export.config.weight_bits", lambda: bits)
    check_warnings(compress, write(stages=[*STAGES[:2], {"export": export}]), "export", told)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("regression", "160 rows; mean 2."),
        ("tokens", "160 rows; words "),
        ("generation", "160 rows; target words, mean "),
    ],
)
def test_other_kinds_have_other_figures(compress, write, kind, says):
    path = write(kind, STAGES[:2])
    code, shown, error = compress("check", path)
    assert (code, error) == (0, "") and says in shown


def test_many_labels_have_no_class_and_no_accuracy(tmp_path):
    """Every row has the first of two labels: predicting it everywhere is a micro F1 of 20/21; 1 row in 10 has the other."""
    split = Split([(f"text {row}",) for row in range(10)], [(True, row == 0) for row in range(10)], list(range(1, 11)))
    kind, task = kind_of("multilabel"), TaskConfig(train=tmp_path, validation=tmp_path, text="text", label="labels")
    counts = kind.spread(split.labels, ["joy", "love"])
    facts = {"train": {"cut": 0, "rows": 10, "constant": kind.constant(split.labels), "labels": counts}}
    other = replace(split, texts=[(f"other {row}",) for row in range(10)])
    (warning,) = warnings_of({"train": split, "validation": other}, kind, task, facts)
    assert warning == "train: predicting the same labels for every row reaches a micro F1 of 95.2%"


def test_what_does_not_fit_is_a_warning(compress, write, monkeypatch):
    monkeypatch.setattr("pipelines.check.estimate.free_disk", lambda out: 1000)
    path = write()
    code, shown, _ = compress("check", path)
    assert code == 0 and "of disk are needed, 1.0 KB are free" in shown


@pytest.mark.parametrize("apart", [True, False])
def test_temporary_files_that_do_not_fit_are_a_warning(compress, write, tmp_path, monkeypatch, apart):
    """Of the folder of temporary files, or of the disk of the run where both are one."""
    monkeypatch.setattr("pipelines.check.estimate.free_disk", lambda out: 1000)
    monkeypatch.setattr("pipelines.check.estimate.on_another_disk", lambda folder, out: apart)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    timed = {"prune": {"target": {"speedup": 1.5, "length": 16}}}
    more, less = (json.loads(compress("check", write(stages=[STAGES[0], *stages]), "--json")[1]) for stages in ([timed], []))
    told = {text.partition(" of ")[2] for text in more["warnings"] if " are free" in text}
    place = f"temporary files are needed, 1.0 KB are free in {tmp_path}"
    assert told == {"disk are needed, 1.0 KB are free"} | ({place} if apart else set())
    temporary = more["needs"]["temporary_bytes"]
    assert temporary > 0 == less["needs"]["temporary_bytes"] and ("temporary files" in more["needs"]["told"]) == apart
    assert (more["needs"]["disk_bytes"] >= less["needs"]["disk_bytes"] + temporary) == (not apart)


def test_a_folder_that_is_not_there_yet_is_on_the_disk_of_its_parent(tmp_path):
    assert not on_another_disk(tmp_path, tmp_path / "not" / "yet")
    if Path("/dev/shm").is_dir() and Path("/dev/shm").stat().st_dev != tmp_path.stat().st_dev:
        assert on_another_disk(Path("/dev/shm"), tmp_path / "not")


@pytest.mark.parametrize("kind", ["model", "onnx", "measurements", "embeddings"])
def test_a_new_stage_whose_row_says_nothing_takes_the_usual(compress, write, monkeypatch, kind):
    new = Stage("probe", "", StageConfig, kind, "nowhere:run", packages=("click",))
    toys.add(monkeypatch, new)
    code, shown, _ = compress("check", write(stages=[*STAGES[:1], {"probe": None}]))
    assert code == 0 and "time" in shown


def estimates_of(path: Path, overrides: Sequence[str] = ()) -> tuple[list[dict[str, float]], list[int]]:
    """What every stage of a pipeline is estimated to need, and the FLOPs of a mean row in the model behind each."""
    ready = check_inputs(load_pipeline(path, overrides))
    plans, rows = make_plans(ready), rows_of(account_of(ready))
    before = (plans[0], *plans[:-1])
    works = [work(entry, *of, rows) for entry, *of in zip(ready.pipeline.stages, plans, before, strict=True)]
    return works, [plan.shape.flops(rows["mean"]) for plan in plans]


def test_a_row_with_choices_is_estimated_as_its_pairs(tmp_path):
    """A batch of 8 rows with three choices is one of 24 pairs, and every pass over the rows is three times as long."""

    def stages(rows: int) -> list:
        training = {"method": "lora", "rank": 2, "epochs": 1, "batch_size": 8 * rows}
        prune = {"items": [{"structure": "neurons", "criterion": "taylor", "remove": 4}], "refit": 10 * rows}
        select = {"score": "fish", "count": 2, "samples": 20 * rows}
        tune = {"tune": {**training, "method": "dsee"}}
        return [{"select": select}, tune, {"prune": prune}, {"recover": training}, {"merge": None}, {"export": None}]

    path = write_pipeline(tmp_path, kind="choices", stages=stages(1))
    task = load_pipeline(path).task
    data = read_task(task)
    for name, split in (("train", data.train), ("dev", data.validation)):
        pairs = [f"{first}\t{choice}\t{n / 2}" for first, *choices in split.texts for n, choice in enumerate(choices)]
        (tmp_path / f"{name}-pairs.tsv").write_text("\n".join(["first\tsecond\tscore", *pairs]) + "\n")
    pair = {"kind": "regression", "train": "train-pairs.tsv", "validation": "dev-pairs.tsv", "max_length": 32}
    pair |= {"text": ["first", "second"], "label": "score"}
    paired = tmp_path / "pairs.yaml"
    paired.write_text(json.dumps({"name": "pairs", "model": "./model", "task": pair, "stages": stages(3)}))
    of_choices, of_pairs = estimates_of(path)[0], estimates_of(paired)[0]
    assert of_choices == of_pairs


def test_the_texts_that_are_generated_are_estimated(tmp_path):
    """Of the validation prompts after every stage, of the models of a training that is judged by them at every evaluation."""
    tune = {"method": "lora", "rank": 2, "epochs": 3, "keep_best": True}
    prune = {"structure": "neurons", "criterion": "weight", "remove": 4}
    stages = [{"tune": tune}, {"prune": prune}, {"recover": {"method": "lora", "rank": 2, "epochs": 1}}, {"merge": None}]
    path = write_pipeline(tmp_path, kind="generation", model_type="gpt2", stages=stages)
    decode = "task.decode={beams: 10, max_new_tokens: 16, rows: 7, metrics: [exact_match]}"
    ready = make_plans(check_inputs(load_pipeline(path)))
    given = ([], [decode], [decode, "task.metric=exact_match"])
    without, beside, judged = (estimates_of(path, overrides)[0] for overrides in given)
    for each, models in (
        (beside, [{0: 1}, {}, {2: 1}, {3: 1}]),
        (judged, [{0: 1 + 3}, {1: 1}, {2: 1, 0: 1}, {3: 1}]),  # the control of a recovery is the tuned model
    ):
        for more, less, times in zip(each, without, models, strict=True):
            shapes = [(ready[model].shape, count) for model, count in times.items()]
            assert more["flops"] - less["flops"] == sum(7 * 10 * 16 * shape.flops(1) * count for shape, count in shapes)
            # three prompts of ten beams at a time
            waited = sum(3 * 16 * shape.bytes / 10e9 * count for shape, count in shapes)
            assert more["seconds"] - less["seconds"] == pytest.approx(waited)


def test_the_checkpoints_of_one_training_are_on_disk_at_a_time(write, tmp_path):
    path = write(stages=[STAGES[0], {"recover": {"epochs": 1, "batch_size": 8}}, *STAGES[1:2]])
    ready, works = check_inputs(load_pipeline(path)), estimates_of(path)[0]
    needs = needs_of(ready.pipeline, make_plans(ready), account_of(ready), 1, tmp_path)
    unfinished = [each["unfinished"] for each in works]
    assert needs["disk_bytes"] == sum(each["disk"] for each in works) + max(unfinished)
    assert [bool(each) for each in unfinished] == [entry.row.trains for entry in ready.pipeline.stages]


@pytest.mark.parametrize(
    ("keys", "rows"),
    [
        ({"score": "fish"}, 100),
        ({"score": "fish", "samples": 20}, 20),
        ({"score": "d3", "samples": 500}, 500),
        ({"score": "pafi", "on": "lora"}, 0),
        ({"score": "random", "on": "adapter"}, 0),
        ({}, 0),
    ],
)
def test_the_rows_that_a_select_reads_are_estimated(keys, rows):
    """Of 100 training rows, which are repeated for more `samples` alone."""
    shape = ModelShape(32, (LayerShape(4, 8, 24),) * 2, other=1000, head=66, head_macs=64)
    row, plan = load_stage("select"), Plan(shape, shape, None)
    needs = row.estimate(row.config(**keys), plan, plan, {"train": 100, "mean": 10, "sequences": 1})
    assert needs["flops"] == 3 * rows * shape.flops(10)


SHAPE = ModelShape(32, (LayerShape(4, 8, 24),) * 2, other=1000, head=66, head_macs=64)
FEW = {"train": 100, "validation": 10, "mean": 10, "sequences": 1}


@pytest.mark.parametrize(
    ("keys", "an_entry"),
    [
        ({"score": "pafi"}, 34),  # twice the scores and a copy of them in float64, an index, and two masks
        ({"score": "magnitude"}, 22),
        ({"score": "fish"}, 22),
    ],
)
def test_the_scores_that_a_select_ranks_together_are_estimated(keys, an_entry):
    """Of a matrix they are few beside the model; of the whole model they are several times as many bytes as it."""
    row, plan = load_stage("select"), Plan(SHAPE, SHAPE, None)
    config = row.config(**{"modules": "all", "scope": "global", "ratio": 0.1, **keys})
    entries = sum(rows * columns for _, rows, columns in SHAPE.matrices(config.modules))
    whole = row.estimate(config, plan, plan, FEW)["memory"]
    assert whole == (2 if keys["score"] == "fish" else 1) * SHAPE.bytes + an_entry * entries
    assert row.estimate(config.model_copy(update={"scope": "matrix"}), plan, plan, FEW)["memory"] < whole


@pytest.mark.parametrize(("criterion", "an_entry"), [("weight", 28), ("taylor", 32), ("delta_or_weight", 40)])
def test_the_scores_that_a_prune_ranks_together_are_estimated(criterion, an_entry):
    """Beside the model and its merged copy, with which the masked one is compared."""
    row, plan = load_stage("prune"), Plan(SHAPE, SHAPE, None)
    item = {"structure": "weights", "criterion": criterion, "remove": 0.5, "modules": ["query", "ffn_in"]}
    entries = sum(rows * columns for _, rows, columns in SHAPE.matrices(item["modules"]))
    whole, of_matrix = (
        row.estimate(row.config(items=[{**item, "scope": scope}]), plan, plan, FEW)["memory"] for scope in ("global", "matrix")
    )
    assert whole == 2 * SHAPE.bytes + an_entry * entries
    assert 2 * SHAPE.bytes < of_matrix < whole


@pytest.mark.parametrize(("precision", "times"), [(["fp32"], 7), (["fp32", "int8"], 10), (["auto"], 10)])
def test_an_export_needs_what_the_dense_model_takes(precision, times):
    """However small the pruned one is: both are loaded, and the dense one is written, too."""
    row, plan = load_stage("export"), Plan(SHAPE, SHAPE.with_units("neurons", [1, 1]), None)
    assert row.estimate(row.config(precision=precision), plan, plan, FEW)["memory"] == times * SHAPE.bytes


def test_the_logits_of_a_training_over_a_vocabulary_are_estimated(write):
    """Of every token of a batch, several times: the parts of the loss, their gradients, and those of a teacher."""
    keys = {"method": "lora", "rank": 2, "epochs": 1}
    ready = check_inputs(load_pipeline(write("generation", [{"tune": keys}, {"recover": {**keys, "distill": "logits"}}])))
    plans, rows = make_plans(ready), rows_of(account_of(ready))
    vocabulary, length = plans[0].model.config.vocab_size, min(rows["longest"], plans[0].length)
    for entry, plan, times in zip(ready.pipeline.stages, plans, (4, 6), strict=True):
        configs = [entry.config.model_copy(update={"batch_size": size}) for size in (8, 9)]
        less, more = (entry.row.estimate(config, plan, plans[0], rows)["memory"] for config in configs)
        assert more - less == saved_bytes(plan.shape, length) + times * 4 * length * vocabulary


def test_a_run_needs_no_less_than_its_models(write, tmp_path, monkeypatch):
    """What is told before its first stage is a part of what `check` tells, of the stages that are still to run."""
    monkeypatch.setattr("pipelines.check.estimate.free_memory", lambda: 600)
    monkeypatch.setattr("pipelines.check.estimate.resident_memory", lambda: 400)
    monkeypatch.setattr("pipelines.check.estimate.free_disk", lambda out: 1000)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    ready = check_inputs(load_pipeline(write(stages=[STAGES[0], {"recover": {"epochs": 1, "batch_size": 8}}, *STAGES[1:]])))
    plans, entries = make_plans(ready), ready.pipeline.stages
    needs = needs_of(ready.pipeline, plans, account_of(ready), 1, tmp_path)

    def told(first: int, last: int = len(entries)) -> list[Space]:
        works = [work(entry, *of, FEWEST) for entry, *of in zip(entries, plans, (plans[0], *plans[:-1]), strict=True)]
        spaces = spaces_of([each | {"unfinished": 0, "temporary": 0} for each in works[first:last]], tmp_path)
        assert shortages_of_run(entries[:last], plans, first, tmp_path) == shortages(spaces)
        return spaces

    memory, disk = told(0)[:2]
    assert shortages([memory, disk])[0].endswith(" of memory are needed, 1.0 KB are free")
    assert 1e9 < memory.needed <= needs["memory_bytes"] and 0 < disk.needed <= needs["disk_bytes"]
    assert told(2)[1].needed < disk.needed > told(0, 1)[1].needed


def test_what_a_run_may_do_without_is_not_told_before_it(write, tmp_path, monkeypatch):
    """Checkpoints, which a short training does not write; a control, which the cache may hold; memory that this process holds
    already, and a training's where a card has it."""
    monkeypatch.setattr("pipelines.check.estimate.shortages", list)
    monkeypatch.setattr("pipelines.check.estimate.free_memory", lambda: 1000)
    monkeypatch.setattr("pipelines.check.estimate.resident_memory", lambda: 500)
    prune = {"items": [{"structure": "neurons", "criterion": "weight", "remove": 4}]}
    stages = [{"tune": {"method": "full", "steps": 2}}, {"prune": prune}, {"recover": {"epochs": 1}}]
    ready = check_inputs(load_pipeline(write(stages=stages)))
    plans, entries = make_plans(ready), ready.pipeline.stages

    def told(card: bool, last: int = len(entries)) -> list[Space]:
        monkeypatch.setattr("torch.cuda.is_available", lambda: card)
        return shortages_of_run(entries[:last], plans, 0, tmp_path)

    memory, disk = told(False)
    assert memory.free == 1500 and memory.needed > LIBRARIES + 4 * plans[0].shape.bytes
    assert disk.needed == sum(plan.shape.bytes for plan in plans)
    assert [told(True, last)[0].needed - LIBRARIES for last in (1, 3)] == [0, 2 * plans[1].shape.bytes]


def test_a_tokenizer_that_transformers_reads_otherwise_is_told(tmp_path, compress, write):
    path = write(stages=STAGES[:2])
    check_warnings(compress, path, "model", [])
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")  # then a BertTokenizer, which lowers the case
    check_warnings(compress, path, "model", ["AutoTokenizer gives 'a Good film' other tokens than tokenizer.json"])


@pytest.mark.parametrize("content", [None, "", "[]", '{"tokens": true}'])
def test_what_is_known_of_a_tokenizer_is_kept_for_later_processes(content, tmp_path, monkeypatch):
    """By its sha256, so the folder is not looked at again; what cannot be read is found again, and a cache that cannot be
    written stops nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{}")
    found = texts_read_otherwise(folder, "a")
    (kept,) = (tmp_path / "cache" / "compress" / "bases").glob("*/a-*.json")
    stored = json.loads(kept.read_text())
    assert stored["texts"] == found != []
    if content is not None:
        kept.write_text(content)
    texts_read_otherwise.cache_clear()  # as in another process
    assert texts_read_otherwise(folder if content is not None else tmp_path / "moved", "a") == found
    assert json.loads(kept.read_text()) == stored
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    assert texts_read_otherwise(folder, "b") == found
