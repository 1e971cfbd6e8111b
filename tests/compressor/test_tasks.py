"""The door through which data comes in: right rows in, every mistake out with its line."""

import dataclasses
import gzip
import json
import os
import re
import socket
import weakref
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from transformers import AutoConfig, AutoModel, PreTrainedTokenizerFast

from compressor import digests
from compressor.errors import UserError, UserErrors
from compressor.models.architectures import row_of
from compressor.tasks import TaskConfig, features, reading
from compressor.tasks import data as data_file
from compressor.tasks.data import Data, TokenRows, read_data, tensor_batches
from compressor.tasks.features import batches, check_ends, pad, predict, targets_of, tokenize, tokens_of
from compressor.tasks.kinds.spans import MARKS
from compressor.tasks.metrics import accuracy, difference_interval, interval, matthews
from compressor.tasks.predictions import IGNORED
from compressor.tasks.reading import read_rows, read_task
from compressor.tasks.rows import Split
from compressor.tasks.sources import content as content_file
from compressor.tasks.task_kind import kind_of
from pipelines.stages.loading import judge_rows, load_data
from pipelines.stages.trainings import quality_on_validation
from tests.compressor.conftest import tiny
from tests.tiny import WRITERS, write_model, write_tokenizer

GOOD = "sentence\tlabel\nbad film\tno\ngood film\tyes\n"


def task(tmp_path, train=GOOD, validation=GOOD, ending="tsv", **options) -> TaskConfig:
    paths = {}
    for name, content in (("train", train), ("validation", validation)):
        paths[name] = tmp_path / f"{name}.{ending}"
        paths[name].write_bytes(content if isinstance(content, bytes) else content.encode())
    return TaskConfig(**paths, **{"text": "sentence", **options})


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        ("tsv", 'sentence\tlabel\n"so" good\tyes\nbad\tno\n'),
        ("csv", 'sentence,label\n"""so"" good",yes\nbad,no\n'),
        ("jsonl", '{"sentence": "\\"so\\" good", "label": "yes"}\n{"sentence": "bad", "label": "no"}\n'),
    ],
)
def test_three_formats_read_the_same(tmp_path, ending, content):
    data = read_task(task(tmp_path, content, content, ending))
    assert data.label_names == ["no", "yes"]
    assert data.train.texts == [('"so" good',), ("bad",)] and data.train.labels == [1, 0]


def test_labels_with_an_underscore_are_no_numbers(tmp_path):
    rows = "sentence\tlabel\nx\t1_2\ny\t12\n"
    assert sorted(read_task(task(tmp_path, rows, rows)).label_names) == ["12", "1_2"]


def test_integer_labels_keep_numeric_order(tmp_path):
    rows = "sentence\tlabel\n" + "".join(f"words\t{n}\n" for n in (10, 2, -1))
    assert read_task(task(tmp_path, rows, rows)).label_names == ["-1", "2", "10"]


def test_pairs(tmp_path):
    rows = "a\tb\tlabel\nfirst\tsecond\tx\nthird\tfourth\ty\n"
    assert read_task(task(tmp_path, rows, rows, text=["a", "b"])).train.texts[1] == ("third", "fourth")


@pytest.mark.parametrize(
    ("code", "train", "options"),
    [
        ("E204", "", {}),
        ("E204", "sentence\tlabel\n", {}),
        ("E205", GOOD, {"label": "labels"}),
        ("E205", GOOD, {"text": ["sentence", "other"]}),
        ("E206", "sentence\tlabel\n1.5\tno\n2\tyes\n", {}),
        ("E206", "sentence\tlabel\n \tno\nx\tyes\n", {}),
        ("E207", "sentence\tlabel\nx y\t\nx\tyes\n", {}),
        ("E207", "sentence\tlabel\nx\t--5\ny\t3\n", {}),
        ("E207", "sentence\tlabel\nx\t²\ny\t3\n", {}),
        ("E207", f"sentence\tlabel\nx\t{'7' * 5000}\ny\t3\n", {}),
        ("E208", "sentence\tlabel\nx\tno\ny\tno\n", {}),
        ("E208", "sentence\tlabel\n" + "".join(f"x\t{n}\n" for n in range(300)), {}),
        ("E208", "sentence\tlabel\n" + 5 * "".join(f"x\t{n}\n" for n in range(2001)), {}),
        ("E203", b"sentence\tlabel\ncaf\xe9\tno\nx\tyes\n", {}),
        ("E210", "sentence\tlabel\nx\ty\tno\nx\tyes\n", {}),
    ],
)
def test_mistakes_have_a_code_and_a_place(tmp_path, code, train, options):
    with pytest.raises(UserError) as caught:
        read_task(task(tmp_path, train, **options))
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(code) and "train.tsv" in lines[0]


def test_many_classes_are_taken_where_each_has_rows(tmp_path):
    rows = "sentence\tlabel\n" + "".join(f"film {n}\tintent {n % 300}\n" for n in range(1500))
    assert len(read_task(task(tmp_path, rows, rows)).label_names) == 300
    with pytest.raises(UserError, match=r"E208 .*300 distinct labels in 1499 rows\. At most 200 classes with fewer"):
        read_task(task(tmp_path, rows[: rows.rindex("film")], rows))


@pytest.mark.parametrize("kind", ["classification", "multilabel"])
def test_of_many_labels_the_largest_scores_are_shown(kind):
    names = [f"c{n}" for n in range(1000)]
    logits = np.linspace(-9, -8, 1000)
    few = str(kind_of(kind).prediction(names[:5], logits[:5]))
    assert [word for word in few.replace("(", "").split() if word in names[:5]][-5:] == names[:5]
    many = str(kind_of(kind).prediction(names, logits))
    assert re.findall(r"c\d+ 0", many) == [f"c{n} 0" for n in range(999, 994, -1)] and many.endswith("995 more)")


def test_both_files_are_reported_at_once(tmp_path):
    with pytest.raises(UserErrors) as caught:
        read_task(task(tmp_path, "", b"\xff\xfe"))
    assert [error.code for error in caught.value.errors] == ["E204", "E203"]


def test_validation_label_that_training_lacks_names_its_line(tmp_path):
    with pytest.raises(UserError, match=r"E209 .*validation.tsv:3: label 'maybe'"):
        read_task(task(tmp_path, validation="sentence\tlabel\nx\tno\ny\tmaybe\n"))


@pytest.mark.parametrize("content", ["[1]\n", "{broken\n"])
def test_bad_json_lines(tmp_path, content):
    with pytest.raises(UserError, match="E210"):
        read_task(task(tmp_path, content, content, "jsonl"))


def test_a_number_where_json_should_hold_text(tmp_path):
    rows = "".join(json.dumps({"sentence": n, "label": "ab"[n]}) + "\n" for n in (0, 1))
    with pytest.raises(UserError, match=r"E206 .*train.jsonl:1"):
        read_task(task(tmp_path, rows, rows, "jsonl"))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c", "\n", "\r\n"])
def test_a_row_of_csv_ends_where_csv_ends_it_and_keeps_its_line(tmp_path, separator):
    quote = '"' if "\n" in separator else ""
    rows = f"sentence,label\n{quote}one{separator}row{quote},no\n\nanother,yes\n"
    data = read_task(task(tmp_path, rows, rows, "csv"))
    assert data.train.texts == [(f"one{separator}row",), ("another",)]
    line = 6 if quote else 5
    with pytest.raises(UserError, match=rf"E207 .*train.csv:{line}: "):
        read_task(task(tmp_path, f"{rows}x,\n", rows, "csv"))


@pytest.mark.parametrize("separator", ["\n", "\u2028"])
def test_a_label_of_several_lines_is_refused_before_the_training(tmp_path, separator):
    """The server lists the labels in lines: the last stage would refuse it."""
    rows = f'sentence,label\nz,no\nx,"ye{separator}s"\n'
    with pytest.raises(UserError, match=r"E207 .*train.csv:3: column 'label' holds 'ye.*, not a class"):
        read_task(task(tmp_path, rows, rows, "csv"))
    with pytest.raises(ValidationError, match="label must be the name of a column, in one line"):
        task(tmp_path, rows, rows, "csv", kind="regression", label=f"sc{separator}ore")


@pytest.mark.parametrize(
    ("ending", "rows", "says"),
    [
        ("tsv", GOOD.replace("\n", "\r"), r"E236 .*train.tsv:1: the lines end in CR alone"),
        ("jsonl", '{"sentence": "a"}\r{"sentence": "b"}\r', r"E236 .*train.jsonl:1: the lines end in CR alone"),
        ("tsv", "sentence\tlabel\nx\t1\ny\t0\nz\t1.0\n", r"E235 .*train.tsv:4: label '1.0' is the same number as '1'"),
        (
            "jsonl",
            '{"sentence": "a", "label": 1}\n{"sentence": "b", "label": "good"}\n',
            r"E235 .*train.jsonl:2: column 'label' holds text, 'good', where line 1 holds an integer, 1",
        ),
        (
            "jsonl",
            '{"sentence": "a", "label": 1}\n{"sentence": "b", "label": false}\n',
            r"E235 .*train.jsonl:2: column 'label' holds true or false, False, where line 1 holds an integer",
        ),
    ],
)
def test_line_ends_of_cr_and_labels_of_several_types_are_refused(tmp_path, ending, rows, says):
    with pytest.raises(UserError, match=says):
        read_task(task(tmp_path, rows, rows, ending))


@pytest.mark.parametrize("separator", [";", "\t"])
def test_csv_may_separate_its_fields_as_spreadsheets_do(tmp_path, separator):
    """Where a comma is the decimal point, spreadsheets write semicolons; a first line with a comma has commas."""
    lines = [f"text{separator}label", f'"good, fine{separator}a film"{separator}1,5', f"bad{separator}0"]
    (tmp_path / "train.csv").write_text("\r\n".join(lines))
    rows = [row for _, row in read_rows(tmp_path / "train.csv")]
    assert rows == [{"text": f"good, fine{separator}a film", "label": "1,5"}, {"text": "bad", "label": "0"}]
    (tmp_path / "train.csv").write_text(f"text,label\ngood{separator} fine,1\n")
    assert [row["text"] for _, row in read_rows(tmp_path / "train.csv")] == [f"good{separator} fine"]
    (tmp_path / "train.csv").write_text(f'"te{separator}xt"\ngood\n')
    assert [list(row) for _, row in read_rows(tmp_path / "train.csv")] == [[f"te{separator}xt"]], "it is quoted"


@pytest.mark.parametrize(("name", "fix"), [("a.json", "as .jsonl"), ("a.xlsx", "Save it as .csv"), ("a.doc", "Use .tsv, .csv")])
def test_a_file_of_another_kind_says_what_to_make_of_it(tmp_path, name, fix):
    (tmp_path / name).write_text("[]")
    with pytest.raises(UserError, match=f"E202 .*{name}: unknown file extension .*{fix}"):
        read_rows(tmp_path / name)


def test_csv_may_end_its_lines_in_cr(tmp_path):
    rows = "sentence,label\rx,no\ry,yes\r"
    assert len(read_task(task(tmp_path, rows, rows, "csv")).train) == 2


def test_an_open_quote_in_csv_is_named_where_it_opens(tmp_path):
    rows = 'sentence,label\nz,no\n"open,no\nx,yes\n'
    with pytest.raises(UserError, match=r"E210 .*train.csv:3: not CSV"):
        read_task(task(tmp_path, rows, rows, "csv"))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[" * 3000 + "]" * 3000, "E210 .*:2: .*nested too deeply"),
        ('{"sentence": ' + "[" * 900 + "]" * 900 + ', "label": "yes"}', "E210 .*:2: lists or objects nested too deeply"),
        (f'{{"sentence": "x", "label": {"7" * 5000}}}', "E210 .*:2: an integer of more digits than Python reads"),
        (f'{{"sentence": "x", "label": {"7" * 4000}}}', "E207 .*:2: column 'label' holds 777"),
        ('{"sentence": "x", "label": "no", "label": "yes"}', "E216 .*:2: key 'label' appears twice in one object"),
        ('{"sentence": "x", "label": {"a": 1, "a": 2}}', "E216 .*:2: key 'a' appears twice in one object"),
        ('{"sentence": "x\0", "label": "yes"}', "E203 .*:2: a NUL byte"),
    ],
)
def test_json_that_python_cannot_hold_is_a_mistake_in_its_line(tmp_path, line, says):
    rows = '{"sentence": "bad film", "label": "no"}\n' + line + "\n"
    with pytest.raises(UserError, match=says):
        read_task(task(tmp_path, rows, rows, "jsonl"))


@pytest.mark.parametrize(("ending", "comma"), [("csv", ","), ("tsv", "\t")])
def test_both_tables_take_long_fields_and_refuse_a_column_twice(tmp_path, ending, comma):
    """csv.field_size_limit is 131,072 characters at first."""
    rows = f"sentence,label\n{'word ' * 60_000},no\nx,yes\n".replace(",", comma)
    assert len(read_task(task(tmp_path, rows, rows, ending)).train.texts[0][0]) == 300_000
    twice = "sentence,label,sentence\nx,no,z\ny,yes,z\n".replace(",", comma)
    with pytest.raises(UserError, match=r"E216 .*:1: column 'sentence' appears twice in the header"):
        read_task(task(tmp_path, twice, twice, ending))
    unnamed = "sentence,label,,\nx,no,,\ny,yes,,\n".replace(",", comma)
    assert len(read_task(task(tmp_path, unnamed, unnamed, ending)).train) == 2


def test_what_is_no_regular_file_or_too_large_is_never_read(tmp_path):
    base = task(tmp_path)
    os.mkfifo(tmp_path / "pipe.tsv")
    (tmp_path / "zero.tsv").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as server, (tmp_path / "huge.tsv").open("wb") as huge:
        server.bind(str(tmp_path / "s.tsv"))
        huge.truncate(2**40)
        for name, says in (
            ("pipe", "E201"),
            ("zero", "E201"),
            ("s", "E201"),
            ("huge", "E215 .*: 1,024 GiB, where a data file"),
        ):
            with pytest.raises(UserError, match=says):
                read_task(base.model_copy(update={"train": tmp_path / f"{name}.tsv"}))
    with pytest.raises(UserError, match=r"E201 .*: no such file"):
        read_task(base.model_copy(update={"train": Path("x" * 5000 + ".tsv")}))


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl", "conll"])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    content=st.binary(max_size=80)
    | st.text(alphabet='{}[]",:\t\n\\u0\ud7ffsentencelabel 1', max_size=80).map(lambda text: text.encode("utf-8", "ignore"))
)
def test_whatever_a_file_holds_it_reads_or_is_a_mistake(tmp_path, ending, content):
    head = {
        "tsv": b"sentence\tlabel\nx\tno\n",
        "csv": b"sentence,label\nx,no\n",
        "jsonl": b'{"sentence": "x", "label": "no"}\n',
    }
    try:
        read_task(
            task(
                tmp_path,
                head.get(ending, b"") + content,
                ending=ending,
                kind="tokens" if ending == "conll" else "classification",
            )
        )
    except UserError as error:
        assert str(error).startswith("E2")


def test_of_a_row_only_what_the_task_names_is_held(tmp_path, monkeypatch):
    """A file may have hundreds of other columns."""
    rows, counts = [], []

    class Counted(reading._Defaulted):
        def __init__(self, row):
            super().__init__(row)
            rows.append(weakref.ref(self))
            counts.append(sum(row() is not None for row in rows))

    monkeypatch.setattr(reading, "_Defaulted", Counted)
    lines = [json.dumps({"sentence": f"film {row}", "label": "no" if row % 2 else "yes", "other": row}) for row in range(40)]
    assert len(read_task(task(tmp_path, "\n".join(lines), "\n".join(lines), "jsonl")).train) == 40
    assert len(counts) == 80 and max(counts) <= 4


@pytest.mark.parametrize("faults", [(2, 4), (4, 2)])
def test_the_first_fault_of_a_file_is_told_whatever_it_is(tmp_path, faults):
    lines = GOOD.splitlines() * 3
    for line, fault in zip(faults, ("good film\t ", "good film"), strict=True):
        lines[line - 1] = fault
    with pytest.raises(UserError, match=rf"{'E207' if faults[0] == 2 else 'E210'} .*train\.tsv:2: "):
        read_task(task(tmp_path, "\n".join(lines)))


def test_folder_missing_and_ending(tmp_path):
    base = task(tmp_path)
    (tmp_path / "x.xlsx").write_bytes(b"x")
    for path, code in ((tmp_path, "E202"), (tmp_path / "no.tsv", "E201"), (tmp_path / "x.xlsx", "E202")):
        with pytest.raises(UserError, match=code):
            read_task(base.model_copy(update={"train": path}))


def test_packed_files_are_read_as_what_is_in_them(tmp_path):
    two = gzip.compress(GOOD.encode()[:20]) + gzip.compress(GOOD.encode()[20:])
    packed = read_task(task(tmp_path, two, gzip.compress(GOOD.encode()), "tsv.gz"))
    plain = read_task(task(tmp_path))
    assert (packed.train, packed.validation, packed.label_names) == (plain.train, plain.validation, plain.label_names)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (GOOD.encode(), "E201 .*cannot be decompressed .Error -3"),
        (gzip.compress(GOOD.encode())[:-9], "E201 .*cut short"),
        (gzip.compress(GOOD.encode())[:-8] + b"\0" * 8, "E201 .*incorrect data check"),
        (gzip.compress(b"sentence\tlabel\nx\t\xff\n"), "E203 .*train.tsv.gz:2"),
        (gzip.compress(b"x" * 2**20), "E215 .*where a data file has at most 97.66 KiB"),
    ],
    ids=["not packed", "cut", "changed", "not UTF-8", "endless"],
)
def test_a_damaged_or_endless_packed_file_is_told(tmp_path, monkeypatch, content, what):
    monkeypatch.setattr(content_file, "DATA", dataclasses.replace(content_file.DATA, most=100_000))
    with pytest.raises(UserError, match=what):
        read_task(task(tmp_path, content, gzip.compress(GOOD.encode()), "tsv.gz"))
    with pytest.raises(UserError, match=r"E202 .*unknown file extension '\.gz'"):
        read_task(task(tmp_path, content, content, "gz"))


def test_texts_are_tokenized_in_parts_that_give_the_same_rows(tmp_path, monkeypatch):
    """For each of its texts the tokenizer holds forty times the memory until the last is done."""
    write_tokenizer(tmp_path, "t5")
    tokenizer, calls = PreTrainedTokenizerFast.from_pretrained(tmp_path), []
    texts = [("the film was good " * number, "a very bad plot") for number in range(7)]
    split = Split(texts, [second for _, second in texts])
    encoded = tokenizer(*map(list, zip(*texts, strict=True)), truncation=True, max_length=12)
    longer = tokenizer(*map(list, zip(*texts, strict=True)))["input_ids"]
    targets = [ids[:-1] for ids in tokenizer(split.labels)["input_ids"]]
    whole = type(tokenizer).__call__

    def counted(self, *columns, text_target=None, **options):
        calls.append(len(text_target or columns[0]))
        return whole(self, *columns, text_target=text_target, **options)

    monkeypatch.setattr(type(tokenizer), "__call__", counted)
    monkeypatch.setattr(features, "PART", 200, raising=False)
    rows = tokenize(tokenizer, split, TaskConfig(train="a.tsv", validation="a.tsv", max_length=12))
    assert json.dumps(rows) == json.dumps([{key: encoded[key][row] for key in encoded} for row in range(7)])
    assert max(calls) <= 3 and sum(calls) == 7
    assert rows[-1]["attention_mask"] is rows[-2]["attention_mask"], "equal ones are held once"
    assert tokens_of(tokenizer, split, with_labels=False) == [len(ids) for ids in longer]
    assert targets_of(tokenizer, split) == targets and max(calls) < 7 and sum(calls) == 21


def test_training_rows_are_tokenized_only_where_they_are_used(tmp_path, monkeypatch):
    """A merge, a deployment and a measurement need none of them; a training has those that are checked before a run."""
    folder, config, read = write_model(tmp_path / "model"), task(tmp_path, GOOD + GOOD.splitlines(keepends=True)[1]), []
    token_rows = data_file._token_rows

    def counted(tokenizer, folder, split, config, path, kind):
        read.append(path.stem)
        return token_rows(tokenizer, folder, split, config, path, kind)

    monkeypatch.setattr(data_file, "_token_rows", counted)
    data = load_data(SimpleNamespace(base=SimpleNamespace(folder=folder), task=config))
    assert (data.kind.name, data.batch_size, len(data.compared()), data.traced["input_ids"].shape) == (
        "classification",
        32,
        2,
        (2, 4),
    )
    assert read == ["validation"]
    whole = read_data(folder, config)
    assert data.train.tokens == whole.train.tokens and np.array_equal(data.train.labels, whole.train.labels)
    assert data.train is data.train and read == ["validation", "train", "validation", "train"]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_few_drawn_rows_are_those_of_all_with_no_other_tokenized(tmp_path, monkeypatch, kind):
    """A selection on 512 of 500,000 rows need not tokenize the others."""
    generates = {"generation": "AutoModelForCausalLM", "text2text": "AutoModelForSeq2SeqLM"}
    types = {"generation": "gpt2", "text2text": "t5"}
    folder = write_model(tmp_path / "model", types.get(kind, "bert"), auto=generates.get(kind, "AutoModel"))
    keys = WRITERS[kind](tmp_path, rows=12)
    config = TaskConfig(**{**keys, **{key: tmp_path / keys[key] for key in ("train", "validation")}})
    whole, data, counts = read_data(folder, config), read_data(folder, config, later=True), []
    token_rows = data_file._token_rows
    monkeypatch.setattr(data_file, "_token_rows", lambda *given: counts.append(len(given[2])) or token_rows(*given))
    few, same = data.draw(5, seed=3), whole.train.draw(5, seed=3)
    assert counts == [5] and few.tokens == same.tokens

    def learned(rows) -> list:
        """What a loss takes; the labels of spans also say which row they are of."""
        of = np.where(rows.labels == IGNORED, IGNORED, rows.labels % MARKS) if kind == "spans" else rows.labels
        each = tensor_batches(replace(rows, labels=of), data.pad_id, 2)
        return [({key: value.tolist() for key, value in inputs.items()}, labels.tolist()) for inputs, labels in each]

    assert learned(few) == learned(same) and len(learned(few)) == 3
    assert data.draw(12, seed=3).tokens == whole.train.draw(12, seed=3).tokens == data.draw(99, seed=3).tokens
    assert counts == [5, 12], "all of them are held"


def test_stages_after_each_other_share_the_tokens_of_unchanged_files(tmp_path, monkeypatch):
    """And the trials of a sweep; one that is changed is read again, as is all for another task, which takes its place."""
    folder, config, read = write_model(tmp_path / "model"), task(tmp_path), []
    token_rows = data_file._token_rows
    monkeypatch.setattr(data_file, "_token_rows", lambda *given: read.append(given[4].stem) or token_rows(*given))
    first, second = (read_data(folder, config, later=True) for _ in range(2))
    assert first is not second, "just written: it may change within a clock's tick"
    monkeypatch.setattr(digests, "SETTLED_NS", -1)
    read.clear()
    data = read_data(folder, config, later=True)
    assert read_data(folder, config, later=True) is data and read == ["validation"]
    assert read_data(folder, config).train is data.train is read_data(folder, config, later=True).train
    assert read == ["validation", "train"]
    with pytest.raises(ValueError, match="read-only"):
        data.train.labels[0] = 1
    read_data(folder, config.model_copy(update={"max_length": 4}), later=True)
    assert read_data(folder, config, later=True) is not data and read == ["validation", "train", "validation", "validation"]
    config.train.write_text(GOOD.replace("bad film", "a plot"))
    assert read_data(folder, config).train.tokens != data.train.tokens
    config.validation.write_text("sentence\n")
    with pytest.raises(UserErrors, match="E204"):
        read_data(folder, config, later=True)
    config.validation.write_bytes(GOOD.encode())
    known = read_data(folder, config, later=True)
    assert read_data(folder, config, later=True) is known
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    assert read_data(folder, config, later=True) is not known


def test_the_rows_are_looked_through_once_for_the_batch_size_of_a_generation():
    class Counted(list):
        def __iter__(self):
            passes.append(len(self))
            return super().__iter__()

    passes, kind = [], kind_of("generation")
    rows = TokenRows(Counted([{"input_ids": [1] * 2048}]), np.zeros((1, 2048), dtype=np.int64), kind)
    data = Data(rows, TokenRows([], rows.labels[:0], kind), [], 0, vocabulary=512)
    assert data.batch_size == data.batch_size == 16 and passes == [1]


def test_the_number_of_a_token_is_held_once_for_all_rows():
    def numbered(texts, **options):
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}

    rows = tokenize(numbered, Split([("1000 2000",), ("2000 1000",)], [0, 0]), TaskConfig(train="a.tsv", validation="a.tsv"))
    assert [row["input_ids"] for row in rows] == [[1000, 2000], [2000, 1000]]
    assert len({id(number) for row in rows for number in row["input_ids"]}) == 2


def test_predictions_come_back_in_order():
    """The model sees batches sorted by length; the caller sees its own order."""
    rows = [{"input_ids": [n] * (1 + n % 5), "attention_mask": [1] * (1 + n % 5)} for n in range(23)]
    seen = []

    def forward(encoding):
        seen.append(encoding["input_ids"].shape)
        return encoding["input_ids"][:, :1].astype(float)

    assert predict(forward, rows, 0, batch_size=4).flatten().tolist() == list(range(23))
    assert [shape[1] for shape in seen] == sorted((shape[1] for shape in seen), reverse=True)
    assert sorted(row for batch in batches(rows, 4) for row in batch) == list(range(23))


@pytest.mark.parametrize(
    ("model_type", "settings", "most"),
    [
        ("bert", {}, 24),
        ("mpnet", {}, 22),
        ("mpnet", {"pad_token_id": 5}, 22),
        ("roberta", {}, 22),
        ("roberta", {"pad_token_id": 5}, 18),
        ("gpt2", {}, 24),
        ("deberta-v2", {}, 24),
        ("deberta-v2", {"position_biased_input": False, "relative_attention": True, "pos_att_type": ["c2p"]}, None),
        ("llama", {}, None),
    ],
)
def test_the_longest_row_is_what_the_live_model_takes(tmp_path, model_type, settings, most):
    config = AutoConfig.for_model(
        model_type, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=30,
        max_position_embeddings=24, **settings,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    assert row_of(model_type).most_tokens(json.loads((tmp_path / "config.json").read_text())) == most
    model = AutoModel.from_config(config).eval()
    model(torch.full((1, most or 60), 7))
    if most is not None:
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.full((1, most + 1), 7))


def test_positions_that_the_config_leaves_out_are_the_defaults():
    assert [row_of(kind).most_tokens({}) for kind in ("bert", "mpnet", "gpt2", "t5")] == [512, 510, 1024, None]


class Ends:
    """A tokenizer of letters that ends a text with token 9."""

    def __call__(self, *texts):
        return {"input_ids": [9] * len(texts)}

    def convert_ids_to_tokens(self, token):
        return f"<{token}>"


@pytest.mark.parametrize("choices", [1, 2])
def test_a_text_that_spells_the_end_is_told_with_its_line(choices):
    """Of the choices of a row, which are one line, each is a row of the model."""
    split = Split([("a", *"bc")[: 1 + choices * (choices > 1)]] * 3, [0] * 3, [2, 5, 7])
    good, bad = ([1, 9, 9], [9, 1, 9, 9]) if choices > 1 else ([1, 9], [9, 1, 9])
    rows = [good, good, bad]
    tokens = [{"input_ids": [good, row] if choices > 1 else row} for row in rows]
    with pytest.raises(UserError, match=r"E212 a\.csv:7: the text 'a' makes [23] tokens '<9>', not [12]\."):
        check_ends(Ends(), tokens, split, 9, Path("a.csv"))
    check_ends(Ends(), tokens[:2], Split(split.texts[:2], split.labels[:2], split.lines[:2]), 9, Path("a.csv"))


def test_padding_is_on_the_right():
    batch = pad([{"input_ids": [5, 6], "attention_mask": [1, 1]}, {"input_ids": [7], "attention_mask": [1]}], pad_id=9)
    assert batch["input_ids"].tolist() == [[5, 6], [7, 9]] and batch["attention_mask"].tolist() == [[1, 1], [1, 0]]


def test_intervals_hold_the_estimate_and_pairing_narrows():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, 500)
    logits = np.eye(2)[np.where(rng.random(500) < 0.85, labels, 1 - labels)]
    low, high = interval(accuracy, logits, labels)
    share = accuracy(logits, labels)
    assert low < share < high and high - low == pytest.approx(2 * 1.96 * np.sqrt(share * (1 - share) / 500), rel=0.1)
    assert difference_interval(accuracy, logits, logits, labels) == (0.0, 0.0)
    worse = logits.copy()
    worse[:50] = worse[:50, ::-1]
    low, high = difference_interval(accuracy, worse, logits, labels)
    assert low < accuracy(worse, labels) - accuracy(logits, labels) < high < 0.0
    worse[20:] = logits[20:]
    low, high = difference_interval(accuracy, worse, logits, labels)
    assert high - low == pytest.approx(2 * 1.96 * np.sqrt(20 / 500 / 500), rel=0.2), "that of the rows that turn"


def test_requests_have_no_targets():
    """What is timed is what a server computes before it writes the first token."""
    row = {"input_ids": [5, 6, 7, 8], "attention_mask": [1] * 4}
    labels = np.array([[IGNORED, 7, 8, 2], [IGNORED, IGNORED, 8, 2]])
    written = TokenRows([row] * 2, labels, kind_of("generation"))
    assert [one["input_ids"] for one in written.requests] == [[5, 6], [5, 6, 7]]
    assert [one["attention_mask"] for one in written.requests] == [[1, 1], [1, 1, 1]]
    behind = {**row, "decoder_input_ids": [0, 9, 9], "decoder_attention_mask": [1, 1, 1]}
    (source,) = TokenRows([behind], np.array([[9, 9, 1]]), kind_of("text2text")).requests
    assert source == {**row, "decoder_input_ids": [0]}
    assert TokenRows([row], np.array([1]), kind_of("classification")).requests == [row]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_trained_model_whose_outputs_are_not_finite_has_no_quality(value):
    """Its weights may be finite. Otherwise it would score as one that predicts the first class of every row."""
    tokens = {"input_ids": [5, 3], "attention_mask": [1, 1]}
    rows = TokenRows([tokens] * 4, np.array([0, 1, 0, 0]), kind_of("classification"))
    workspace = SimpleNamespace(progress=lambda *_: nullcontext(SimpleNamespace(advance=lambda rows: None)))

    def forward(encoding):
        return np.full((len(encoding["input_ids"]), 2), [1.0, value])

    with pytest.raises(UserError, match="E406 the trained model's outputs hold 4 of 8 numbers that are not finite"):
        judge_rows(forward, rows, Data(rows, rows, ["no", "yes"], 0), workspace, "validating")


def test_an_evaluation_of_outputs_that_are_not_finite_ends_the_training():
    rows = TokenRows([{"input_ids": [5, 3], "attention_mask": [1, 1]}] * 4, np.arange(4) % 2, kind_of("classification"))
    model = tiny("bert", torch.float32)
    torch.nn.init.constant_(model.classifier.weight, torch.finfo(torch.float32).max)
    torch.nn.init.constant_(model.bert.pooler.dense.bias, 9.0)
    with pytest.raises(UserError, match="E406 the trained model's outputs hold"):
        quality_on_validation(Data(rows, rows, ["no", "yes"], 0))(model)


def test_matthews_by_hand():
    """Two classes: (TP·TN - FP·FN) / √((TP+FP)(TP+FN)(TN+FP)(TN+FN)); three perfect classes give 1; a constant guess 0."""
    labels = np.array([1] * 7 + [0] * 5)
    predicted = np.array([1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 1, 1])
    tp, tn, fp, fn = 5, 3, 2, 2
    expected = (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn)) ** 0.5
    assert matthews(np.eye(2)[predicted], labels) == pytest.approx(expected)
    assert matthews(np.eye(3)[[0, 1, 2, 1]], np.array([0, 1, 2, 1])) == 1.0
    assert matthews(np.eye(2)[[1, 1, 1]], np.array([0, 1, 1])) == 0.0


def test_more_rows_than_there_are_come_again_in_another_order():
    """SAM's burn-in: 600 batches of 16 whatever the rows, here of CB's 250."""
    rows = TokenRows(
        [{"input_ids": [number, 3], "attention_mask": [1, 1]} for number in range(250)],
        np.arange(250),
        kind_of("classification"),
    )
    repeated = rows.repeated(9600, seed=1)
    passes = [repeated.labels[start : start + 250].tolist() for start in range(0, 9600, 250)]
    assert all(sorted(one) == list(range(250)) for one in passes[:-1]) and passes[0] != passes[1]
    assert len(set(passes[-1])) == 9600 % 250
    assert repeated.at(range(200)).labels.tolist() == rows.draw(200, seed=1).labels.tolist()
    made = [labels for _, labels in tensor_batches(repeated, 0, 16, in_order=True)]
    assert len(made) == 600 and torch.equal(torch.cat(made), torch.from_numpy(repeated.labels))
