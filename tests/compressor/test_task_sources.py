"""Where rows come from besides text files: Parquet, data sets of the hub, GLUE by name; and rows that are too long."""

import csv
import dataclasses
import datetime
import decimal
import errno
import gzip
import http.server
import json
import math
import os
import re
import socket
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from compressor import digests
from compressor.digests import mark_of
from compressor.errors import UserError
from compressor.tasks import TaskConfig, reading
from compressor.tasks.reading import read_rows, read_task, skipped_lines
from compressor.tasks.sources import content, hub_rows, hub_set, parquet_rows
from compressor.tasks.sources.glue import TASKS, glue_keys
from compressor.tasks.sources.hub_card import found_outside
from compressor.tasks.sources.hub_set import fetch, parse
from compressor.tasks.texts import read_texts

ROWS = {"text": ["good film", "bad"], "label": [1, 0]}
LONG = "a" * 300
"""Longer than the name of a file may be."""


@pytest.fixture
def arrow():
    return pytest.importorskip("pyarrow")


@pytest.fixture
def write(arrow, tmp_path):
    """A Parquet file of a table or of columns."""
    from pyarrow import parquet

    def make(table) -> Path:
        parquet.write_table(table if isinstance(table, arrow.Table) else arrow.table(table), tmp_path / "train.parquet")
        return tmp_path / "train.parquet"

    return make


def read(path: Path, **options):
    return read_task(TaskConfig(train=path, validation=path, **options))


def test_parquet_reads_as_text_files_do_also_gzipped(write):
    path = write({**ROWS, "when": [datetime.date(2026, 1, 2), None], "cost": [decimal.Decimal("1.50"), None]})
    packed = path.with_name("dev.parquet.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    rows = [{"text": "good film", "label": 1, "when": "2026-01-02", "cost": "1.50"}]
    assert read_rows(path)[:1] == list(enumerate(rows, start=1)) and read_rows(packed) == read_rows(path)
    data = read(path)
    assert (data.label_names, data.train.texts, data.train.lines) == (["0", "1"], [("good film",), ("bad",)], [1, 2])


def test_times_in_nanoseconds_are_text(arrow, write):
    """As pandas writes them."""
    path = write({**ROWS, "when": arrow.array([1, None], arrow.timestamp("ns"))})
    assert [row["when"] for _, row in read_rows(path)] == ["1970-01-01 00:00:00.000000001", None]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_numbers_of_single_precision_get_no_further_digits(arrow, write, kind):
    """A target of kind text2text is the number's text."""
    path = write({**ROWS, "label": arrow.array([3.8, None], getattr(arrow, kind)())})
    assert [row["label"] for _, row in read_rows(path)] == [3.8, None]


def test_lists_in_parquet_are_words_and_tags(write):
    path = write({"tokens": [["Anna", "ran"], ["So"]], "tags": [["B-PER", "O"], ["O"]]})
    assert read(path, kind="tokens").label_names == ["O", "B-PER", "I-PER"]


def test_binary_columns_in_utf_8_are_text_as_others_are(write):
    """As Hive and older versions of Spark write them; an image in another column is not read."""
    path = write({"text": [b"caf\xc3\xa9", b"b"], "label": [b"pos", b"neg"], "image": [b"\xff\xd8", b"\xff"]})
    data = read(path)
    assert (data.label_names, data.train.texts) == (["neg", "pos"], [("café",), ("b",)])
    lists = write({"text": [b"a", b"b"], "labels": [[b"x", b"y"], [b"x"]]})
    assert read(lists, kind="multilabel").label_names == ["x", "y"]


@pytest.mark.parametrize(
    ("columns", "kind", "says"),
    [
        (
            {"text": ["a", "b"], "label": [b"pos", b"\xff"]},
            "classification",
            "E207 .*train.parquet:2: .* holds b'.xff', not a class",
        ),
        ({"text": ["a", "b"], "labels": [[b"x", b"y"], [b"\xff"]]}, "multilabel", "E220 .*train.parquet:2: b'.xff' in column"),
        ({"text": [b"a", b"\xff"], "label": [1, 0]}, "classification", "E206 .*train.parquet:2: .* holds b'.xff', not text"),
        ({"text": ["a", "b"], "label": [b"1.5", b"\xff"]}, "regression", "E207 .*train.parquet:2: .* not a finite number"),
    ],
)
def test_bytes_that_are_no_text_are_neither_texts_nor_labels(write, columns, kind, says):
    with pytest.raises(UserError, match=says):
        read(write(columns), kind=kind)


MISTAKES = {
    "a null": ({"text": ["a b", None], "label": [1, 0]}, r"E206 .*train.parquet:2: column 'text' holds nothing, not text"),
    "no number": (
        {"text": ["a b", "c", "d"], "label": [1.5, 0.0, float("nan")]},
        r"E207 .*train.parquet:3: .* holds nan, not a finite number",
    ),
    "numbers for text": ({"text": [1, 2], "label": [1, 0]}, r"E206 .*train.parquet:1: column 'text' holds 1, not text"),
    "another column": ({"sentence": ["a"], "label": [1]}, r"E205 .*no column 'text'. The file has: sentence, label"),
    "no rows": ({"text": [], "label": []}, r"E204 .*the file has no rows"),
    "one huge cell": (
        {"text": ["x" * (content.MOST_OF_A_ROW + 1), "c"], "label": [1, 0]},
        r"E234 .*train.parquet:1: a row of 16",
    ),
}


@pytest.mark.parametrize(("columns", "says"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_in_parquet_has_the_number_of_its_row(write, monkeypatch, columns, says):
    monkeypatch.setattr(reading, "MOST_OF_A_ROW", 1000)
    with pytest.raises(UserError, match=says):
        read(write(columns), kind="regression")


def test_parquet_columns_twice_and_bytes_that_are_no_text(arrow, write):
    names = ["text", "text", "label"]
    with pytest.raises(UserError, match=r"E216 .*column 'text' appears twice"):
        read(write(arrow.table([arrow.array(["a"]), arrow.array(["b"]), arrow.array([1])], names=names)))
    offsets, letters = b"\0\0\0\0\3\0\0\0\5\0\0\0", b"abc\xff\xfe"
    broken = arrow.Array.from_buffers(arrow.string(), 2, [None, arrow.py_buffer(offsets), arrow.py_buffer(letters)])
    with pytest.raises(UserError, match=r"E203 .*train.parquet:2: not UTF-8"):
        read(write({"text": broken, "label": [1, 0]}))


@pytest.mark.parametrize(
    "damage", [lambda good: good[:-9], lambda good: good[:20] + b"\xff" * 40 + good[60:], lambda _: b"a,b\n"]
)
def test_a_damaged_parquet_file_is_one_line(write, damage):
    path = write(ROWS)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=r"E210 .*train.parquet: not a readable Parquet file"):
        read(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match=r"E204 .*the file is empty"):
        read(path)


def test_a_small_parquet_file_of_much_content_is_refused(arrow, write, monkeypatch):
    """Equal texts are stored once, and rows without values hardly at all."""
    monkeypatch.setattr(parquet_rows, "DATA", small_limit(200_000))
    same = arrow.DictionaryArray.from_arrays(arrow.array([0] * 100), arrow.array(["x" * 50_000]))
    path = write({"text": same, "label": list(range(100))})
    assert path.stat().st_size < 60_000
    with pytest.raises(UserError, match=r"E215 .*where a data file has at most 195.3 KiB"):
        read(path)
    with pytest.raises(UserError, match="E215 "):
        read(write({"text": arrow.nulls(60_000, arrow.string()), "label": arrow.nulls(60_000, arrow.int8())}))


def small_limit(most: int):
    return dataclasses.replace(content.DATA, most=most)


def test_a_package_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "train.parquet").write_bytes(b"PAR1")
    with pytest.raises(
        UserError, match=r"E907 .*pyarrow, which is not installed. Run: pip install 'compress-pipeline\[data\]'"
    ):
        read(tmp_path / "train.parquet")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"E907 .*datasets, which is not installed"):
        fetch(parse("hub:a/b/train", tmp_path))


# --- rows and lines that are too long ---


@pytest.mark.parametrize("ending", ["tsv", "csv", "jsonl", "tsv.gz"])
def test_a_line_that_is_too_long_is_refused_before_it_is_read_whole(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(content, "MOST_OF_A_ROW", 1000)
    line = b"text\tlabel\nx\ty\n" + b"z" * 100_000
    path = tmp_path / f"train.{ending}"
    path.write_bytes(gzip.compress(line) if ending.endswith("gz") else line)
    size = "1.938 KiB" if ending.endswith("gz") else "97.66 KiB"  # of a packed line only the first blocks are unpacked
    with pytest.raises(UserError, match=rf"E234 .*train.{ending}:3: a row of {size}"):
        read_rows(path)


def test_a_quote_that_closes_late_is_a_row_that_is_too_long(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MOST_OF_A_ROW", 100)
    (tmp_path / "train.csv").write_text('text,label\na,b\n"' + "line\n" * 50 + '",b\n')
    with pytest.raises(UserError, match=r"E234 .*train.csv:3: a row of 2"):
        read_rows(tmp_path / "train.csv")


# --- a header that is missing ---


@pytest.mark.parametrize(("ending", "comma"), [("tsv", "\t"), ("csv", ",")])
def test_a_file_without_a_header_has_numbered_columns(tmp_path, ending, comma):
    path = tmp_path / f"train.{ending}"
    path.write_text("a,1\nb,0\n".replace(",", comma))
    data = read(path, text="column1", label="column2", header=False)
    assert (data.train.texts, data.train.lines) == ([("a",), ("b",)], [1, 2])
    path.write_text("a,1\nb\n".replace(",", comma))
    with pytest.raises(UserError, match=rf"E210 .*train.{ending}:2: 1 fields where the first row has 2"):
        read(path, text="column1", label="column2", header=False)


# --- the hub ---


class Rows:
    """What `datasets` gives of a streamed split."""

    def __init__(self, rows, **features):
        self.rows, self.features = rows, features

    def __iter__(self):
        for row in self.rows:
            if isinstance(row, Exception):
                raise row
            yield row


class ClassLabel:
    """As that of `datasets`, of the classes no and yes."""

    names = ("no", "yes")

    def encode_example(self, value: str | int) -> int:
        number = self.names.index(value) if value in self.names else int(value)
        if not -1 <= number < len(self.names):
            raise ValueError(f"Class label {value} is none of {self.names}")
        return number


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for the library: each reference is answered with rows, or an error."""
    library = types.ModuleType("datasets")
    library.exceptions = types.SimpleNamespace(DatasetGenerationError=type("DatasetGenerationError", (Exception,), {}))
    library.answer, library.calls = Rows([]), []

    def streamed(*arguments):
        library.calls.append(arguments)
        if isinstance(library.answer, Exception):
            raise library.answer
        return library.answer

    def load_dataset_builder(*arguments):
        return types.SimpleNamespace(config=None, as_streaming_dataset=lambda split: streamed(*arguments, split))

    library.load_dataset_builder = load_dataset_builder
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return library


def cached(tmp_path) -> list[str]:
    return [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_a_split_is_read_once_into_a_file_that_reads_as_any_other(hub, tmp_path):
    hub.answer = Rows(
        [{"text": "caf\u00e9", "label": 1}, {"text": "x", "label": 0}, {"text": "y", "label": -1}], label=ClassLabel()
    )
    wanted = parse("hub:owner/name:config/train:2", tmp_path)
    seen = []
    path = fetch(wanted, seen.append)
    assert [json.loads(line) for line in path.read_text().splitlines()] == hub.answer.rows[:2] and seen == [1, 2]
    assert read(path).label_names == ["0", "1"]
    assert fetch(wanted) == path and hub.calls == [("hf://datasets/owner/name", "config", "train")]
    with pytest.raises(UserError, match=r"E207 .*train.jsonl:3: column 'label' holds nothing"):  # -1 marks a hidden label
        read(fetch(parse("hub:owner/name:config/train", tmp_path)))


@pytest.mark.parametrize("left", [b"", b'{"text": "x", "la', b"\0" * 20], ids=["nothing", "half a row", "zeros"])
def test_a_file_in_the_cache_that_a_loss_of_power_cut_is_fetched_again(hub, tmp_path, left):
    hub.answer, wanted = Rows([{"text": "x", "label": "a"}]), parse("hub:owner/name/train", tmp_path)
    whole = fetch(wanted).read_bytes()
    wanted.path.write_bytes(left)
    assert fetch(wanted).read_bytes() == whole and len(hub.calls) == 2


def test_rows_are_on_disk_before_their_file_has_its_name(hub, tmp_path, monkeypatch):
    synced, sync = [], os.fsync

    def seen(handle):
        synced.append(os.fstat(handle).st_size)
        assert not parse("hub:owner/name/train", tmp_path).path.exists()
        sync(handle)

    monkeypatch.setattr(os, "fsync", seen)
    hub.answer = Rows([{"text": "x", "label": "a"}])
    assert synced == [] and [fetch(parse("hub:owner/name/train", tmp_path)).stat().st_size] == synced


def test_a_class_is_a_target_as_its_number(hub, tmp_path):
    """As of `{glue: rte, kind: text2text}`."""
    hub.answer = Rows([{"text": "x", "label": 1}, {"text": "y", "label": 0}], label=ClassLabel())
    path = fetch(parse("hub:owner/name:rte/train", tmp_path))
    assert read(path, kind="text2text", text="text", label="label").train.labels == ["1", "0"]


def test_a_number_of_single_precision_is_the_one_that_was_meant(hub, tmp_path):
    """As the scores of `{glue: stsb, kind: text2text}`."""
    hub.answer = Rows([{"text": "x", "label": float(np.float32(3.8))}], label=types.SimpleNamespace(dtype="float32"))
    path = fetch(parse("hub:owner/name:stsb/train", tmp_path))
    assert read(path, kind="text2text", text="text", label="label").train.labels == ["3.8"]


def test_bytes_of_a_data_set_are_text_or_missing(hub, tmp_path):
    hub.answer = Rows([{"text": b"caf\xc3\xa9", "label": b"pos"}, {"text": b"x", "label": b"\xff"}])
    path = fetch(parse("hub:owner/name/train", tmp_path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"text": "café", "label": "pos"},
        {"text": "x", "label": None},
    ]


def test_half_of_a_character_is_told_with_its_row(hub, tmp_path):
    """As in a file of the user's: it is no matter of the encoding."""
    hub.answer = Rows([{"text": "caf\u00e9", "label": 1}, {"text": "a\ud83d", "label": 0}])
    path = fetch(parse("hub:owner/name/train", tmp_path))
    assert "caf\u00e9" in path.read_text()
    with pytest.raises(UserError, match=r"E210 .*train.jsonl:2: .*an unpaired surrogate"):
        read(path)


@pytest.mark.parametrize(
    ("file", "is_own"),
    [
        *((file, True) for file in ("data/*.csv", "./x.csv", "hf://datasets/a/b/x.csv", "hf://datasets/a/b@main/x*.csv")),
        ("hf://datasets/a/b@refs/convert/parquet/x.parquet", True),
        *((file, False) for file in ("hf://datasets/a/bc/x.csv", "hf://datasets/a/b@main/../../c/d/x.csv", "../../c/d/x.csv")),
        *((file, False) for file in ("https://example.org/x.csv", "/etc/x.csv", "file:///etc/x.csv", "file:/etc/x.csv")),
        *((file, False) for file in ("hf://datasets/a/b/zip://x.csv::/etc/x.zip", "zip::/etc/x.zip", "hf://buckets/a/b/x.csv")),
        # `datasets` looks for these in the current folder
        *((file, False) for file in ("zip://x.csv::data.zip", "train:v1/*.csv")),
        ("https://huggingface.co/datasets/a/b/resolve/main/x.csv", False),
    ],
)
def test_a_data_set_of_the_hub_names_its_own_files(hub, tmp_path, monkeypatch, file, is_own):
    """In its card, before the library asks for anything; and what the library finds is held to the same."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "README.md").write_text(f"---\n{json.dumps({'configs': [{'config_name': 'x', 'data_files': [file]}]})}\n---\n")

    def download(place, name, **options):
        if name != "README.md":
            raise huggingface_hub.errors.EntryNotFoundError(name)
        return tmp_path / name

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    hub.answer, wanted = Rows([{"text": "x", "label": 0}]), parse("hub:a/b/train", tmp_path)
    builder = types.SimpleNamespace(
        config=types.SimpleNamespace(data_files={"test": ["hf://datasets/a/b@0/x.csv"], "train": [file]})
    )
    # what was found has an address
    assert found_outside(builder, "a/b", local=False) == (None if is_own and file.startswith("hf:") else file)
    if is_own:
        assert fetch(wanted).is_file()
        return
    with pytest.raises(UserError, match=rf"E232 hub:a/b/train: the data set names '{re.escape(file)}' by an address"):
        fetch(wanted)
    assert hub.calls == [] and cached(tmp_path) == []


def test_a_local_folder_is_read_once_by_a_process_and_its_file_stays(hub, tmp_path, monkeypatch):
    """Each trial of a sweep reads its pipeline while another may be reading the file: a new one would end that one (E807)."""
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("the library reads this")
    hub.answer, wanted = Rows([{"text": "x", "label": 0}]), parse("hub:./set/train", tmp_path)
    first = mark_of(fetch(wanted))
    assert mark_of(fetch(wanted)) == first and len(hub.calls) == 2, "written a moment ago, it is read again"
    monkeypatch.setattr(digests, "SETTLED_NS", -1)
    for _ in range(2):
        assert mark_of(fetch(wanted)) == first and len(hub.calls) == 3
    (tmp_path / "set" / "train.jsonl").write_text("other rows")
    hub.answer = Rows([{"text": "y", "label": 0}])
    assert "y" in fetch(wanted).read_text() and len(hub.calls) == 4
    wanted.path.unlink()
    assert "y" in fetch(wanted).read_text() and len(hub.calls) == 5 and len(cached(tmp_path)) == 1


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (
            ConnectionError("Couldn't reach 'a/b' on the Hub"),
            "E231 .*could not be fetched from the hub.*ConnectionError.*hub:./FOLDER",
        ),
        (Rows([{"text": "a"}, TimeoutError("later")]), "E231 .*TimeoutError: later"),
        (ValueError("Bad split: x. Available splits: ['train']"), r"E232 .*Available splits: \['train'\]"),
    ],
)
def test_what_the_hub_does_not_give_is_told_and_leaves_nothing(hub, tmp_path, answer, says):
    hub.answer = answer
    with pytest.raises(UserError, match=says):
        fetch(parse("hub:a/b/train", tmp_path))
    assert cached(tmp_path) == []


def test_without_a_network_the_hub_is_asked_once(hub, tmp_path, monkeypatch):
    """Its client would wait and ask again, a dozen times, with two raw lines for each."""
    constants, asked, slept = pytest.importorskip("huggingface_hub").constants, [], []

    def unknown(host, *_, **__):
        asked.append(host)
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(time, "sleep", slept.append)
    told = (
        r"E231 .*could not be fetched from the hub: ConnectError: .*Name or service not known.*with HF_HUB_OFFLINE=1 it is read"
    )
    with pytest.raises(UserError, match=told):
        fetch(parse("hub:a/b/train", tmp_path))
    assert len(asked) <= 2, "the client asks for a list of programs, too, once in a process"
    assert (slept, hub.calls) == ([], [])


def test_a_name_of_the_hub_is_no_folder_below_the_current_one(folder, tmp_path, monkeypatch):
    (folder({}) / "name").mkdir()
    folder({"name/train.csv": "text,label\na,1\n"})
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match=r"E231 hub:set/name/train: could not be fetched from the hub \(HF_HUB_OFFLINE is set\)"
    ):
        fetch(parse("hub:set/name/train", tmp_path))
    assert cached(tmp_path) == []


@pytest.mark.parametrize(("lacks", "way"), [(False, "."), (True, "."), (False, "2")])
def test_a_file_that_an_earlier_version_read_is_named_where_the_hub_is_out_of_reach(hub, tmp_path, monkeypatch, lacks, way):
    """The first cached the rows without the number of its way of reading."""
    wanted = parse("hub:a/b:c/train:9", tmp_path)
    earlier = tmp_path / "cache" / "compress" / "data" / way / "a--b" / "c" / "train-first-9.jsonl"
    hub.answer, told = ConnectionError("offline"), f"; or name this file itself.*: {earlier}$"
    if lacks:
        monkeypatch.setitem(sys.modules, "datasets", None)
    code = "E907" if lacks else "E231"
    with pytest.raises(UserError, match=code) as without:
        fetch(wanted)
    assert "name this file itself" not in str(without.value)
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")
    with pytest.raises(UserError, match=f"{code} .*{told}"):
        fetch(wanted)


@pytest.mark.parametrize("reference", ["hub:a/b/train", "hub:a/b/train_r1", "hub:a/b/train_r1:20"])
def test_a_split_that_is_too_large_is_not_kept(hub, tmp_path, monkeypatch, reference):
    monkeypatch.setattr(hub_set, "DATA", small_limit(1000))
    hub.answer = Rows([{"text": "x" * 90}] * 100)
    name = reference.removesuffix(":20")
    with pytest.raises(UserError, match=rf"E215 .*more than 1,000 bytes after 10 rows. Take fewer: {name}:5$"):
        fetch(parse(reference, tmp_path))
    assert cached(tmp_path) == []


@pytest.mark.parametrize(
    "reference",
    [
        *("hub:imdb", "hub:imdb/train", "hub:a/b", "hub:a/b/train:0", "hub:a/b/c/train", "hub:/train"),
        *(f"hub:{LONG}/b/train", f"hub:a/b:{LONG}/train", f"hub:a/b/{LONG}", "hub:./a\0b/train", "hub:a/b:\0/train"),
    ],
)
def test_a_reference_that_names_no_split_is_told(tmp_path, reference):
    with pytest.raises(UserError, match=r"E230 .*Write hub:OWNER/NAME/SPLIT"):
        parse(reference, tmp_path)


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "E804"), (errno.EDQUOT, "E804"), (errno.EACCES, "E801")])
def test_a_cache_that_cannot_be_written_is_told(hub, tmp_path, monkeypatch, number, code):
    def fail(*paths):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(UserError, match=rf"{code} .*cannot be written \({os.strerror(number)}\)"):
        fetch(parse("hub:org/set/train", tmp_path))
    assert cached(tmp_path) == []


def test_the_cache_is_one_place_whatever_a_task_is_relative_to(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.chdir(tmp_path)
    assert parse("hub:org/set/train", tmp_path / "pipelines").path.is_relative_to(tmp_path / "cache")


def test_a_folder_laid_out_as_on_the_hub_is_read_anew_each_time(arrow, tmp_path, monkeypatch):
    """By the library itself: Parquet shards and a card that names splits and classes."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    from pyarrow import parquet

    card = {
        "dataset_info": [{"config_name": "main", "features": [
            {"name": "text", "dtype": "string"},
            {"name": "label", "dtype": {"class_label": {"names": {"0": "no", "1": "yes"}}}},
            {"name": "picture", "dtype": "image"},
        ]}],
        "configs": [{"config_name": "main", "data_files": [{"split": "train", "path": "data/train-*"}]}],
    }  # fmt: skip
    folder = tmp_path / "set"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text(f"---\n{json.dumps(card)}\n---\n")
    pictures = [{"bytes": b"x", "path": "a.png"}] * 2
    for labels in ([1, -1], [0, 1]):
        parquet.write_table(arrow.table({**ROWS, "label": labels, "picture": pictures}), folder / "data/train-0-of-1.parquet")
        rows = [row for _, row in read_rows(fetch(parse("hub:./set/train", tmp_path)))]
        assert rows == [
            {"text": text, "label": None if label < 0 else label} for text, label in zip(ROWS["text"], labels, strict=True)
        ]
    for reference, says in (
        ("hub:./set:other/train", r"E232 .*'other' not found. Available: \['main'\]"),
        ("hub:./set/tset", r"E232 .*Bad split: tset. Available splits: \['train'\]"),
        ("hub:./sets/train", "E231 .*no folder "),
    ):
        with pytest.raises(UserError, match=says):
            fetch(parse(reference, tmp_path))


def card_of(**columns) -> str:
    """The card of a data set that declares the types of its columns."""
    features = [{"name": name, "dtype": kind} for name, kind in columns.items()]
    return f"---\n{json.dumps({'dataset_info': {'features': features}})}\n---\n"


def card_with(**options) -> str:
    """The card of a data set that says how train.csv is read."""
    configs = [{"config_name": "default", "data_files": "train.csv", **options}]
    return f"---\n{json.dumps({'configs': configs})}\n---\n"


def lines_of(*rows) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in rows)


CLASSES = {"class_label": {"names": {"0": "no", "1": "yes"}}}
DATES = [{"text": "a", "target": "2009-06-15", "score": 1}, {"text": "b", "target": "2009-06-16 00:00:00", "score": 2.5}]
AS_WRITTEN = {
    "dates and numbers of JSON": ({"train.jsonl": lines_of(*DATES)}, DATES),
    "a list of objects": ({"train.json": json.dumps(DATES, indent=1)}, DATES),
    "a list of texts": ({"train.json": json.dumps(["2009-06-15", "b"])}, [{"text": "2009-06-15"}, {"text": "b"}]),
    "a byte order mark": ({"train.jsonl": "\ufeff" + lines_of(*DATES)}, DATES),
    "two files": ({"train-1.jsonl": lines_of(DATES[0]), "train-2.jsonl": lines_of(DATES[1])}, DATES),
    "two files, then a list": ({"train-1.jsonl": lines_of(*DATES), "train-2.json": json.dumps(DATES)}, DATES * 2),
    "two files, first a list": ({"train-1.json": json.dumps(DATES), "train-2.jsonl": lines_of(*DATES)}, DATES * 2),
    "several types in a column": (
        {"train.jsonl": lines_of({"text": "a", "target": "1"}, {"text": "b", "target": ["x"]})},
        [{"text": "a", "target": "1"}, {"text": "b", "target": ["x"]}],
    ),
    "JSON with declared types": (
        {
            "train.jsonl": lines_of({"label": "yes", "text": 7, "score": 3.8}, {"label": None, "text": "2009-06-15"}),
            "README.md": card_of(label=CLASSES, text="string", score="float32"),
        },
        [{"label": 1, "text": "7", "score": 3.8}, {"label": None, "text": "2009-06-15"}],
    ),
    "JSON with classes as other numbers": (
        {
            "train.jsonl": lines_of(*({"label": label} for label in (True, False, 1.0, "0.0", "True", None, math.nan))),
            "README.md": card_of(label=CLASSES),
        },
        [{"label": label} for label in (1, 0, 1, 0, 1, None, None)],
    ),
    "cells of CSV": (
        {"train.csv": 'text,label,score\n"a, b",None,01\nNA,null,12.50\ntrue,nan,\n'},
        [
            {"text": "a, b", "label": "None", "score": "01"},
            {"text": "NA", "label": "null", "score": "12.50"},
            {"text": "true", "label": "nan", "score": None},
        ],
    ),
    "CSV with declared types": (
        {
            "train.csv": "text,label,score\n01,yes,1\nNone,0,2.50\n2009-06-15,,\n",
            "README.md": card_of(text="string", label=CLASSES, score="float32"),
        },
        [
            {"text": "01", "label": 1, "score": 1.0},
            {"text": "None", "label": 0, "score": 2.5},
            {"text": "2009-06-15", "label": None, "score": None},
        ],
    ),
    "CSV with classes as pandas writes numbers": (
        {"train.csv": "text,label\na,1.0\nb,\nc,False\nd,no\n", "README.md": card_of(text="string", label=CLASSES)},
        [{"text": text, "label": label} for text, label in zip("abcd", (1, None, 0, 0), strict=True)],
    ),
    "CSV with decimal commas": (
        {"train.csv": "text;score\nNone;1,5\nb;\n", "README.md": card_with(sep=";", decimal=",")},
        [{"text": "None", "score": 1.5}, {"text": "b", "score": None}],
    ),
    "CSV with a mark of missing cells": (
        {"train.csv": "text,label\na,-\n-,01\n", "README.md": card_with(na_values=["-"])},
        [{"text": "a", "label": None}, {"text": None, "label": "01"}],
    ),
    "CSV without a header": (
        {"train.csv": "a,01\nb,02\n", "README.md": card_with(header=None)},
        [{"0": "a", "1": "01"}, {"0": "b", "1": "02"}],
    ),
    "quotes in TSV": (
        {"train.tsv": 'text\tlabel\n"a\t1\nb"\t0\n'},
        [{"text": '"a', "label": "1"}, {"text": 'b"', "label": "0"}],
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Writes a folder laid out as on the hub; needs the library itself."""
    pytest.importorskip("datasets")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()

    def write(files: dict[str, str]) -> Path:
        for name, text in files.items():
            (tmp_path / "set" / name).write_text(text)
        return tmp_path / "set"

    return write


@pytest.fixture
def listening():
    """A server of this machine that notes what it is asked, and has nothing."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield types.SimpleNamespace(port=server.server_port, asked=asked)
        server.shutdown()


@pytest.mark.parametrize(("files", "rows"), AS_WRITTEN.values(), ids=AS_WRITTEN)
def test_rows_of_a_data_set_are_as_its_files_have_them(folder, tmp_path, files, rows):
    """Not as pyarrow and pandas infer them; what the data set declares holds."""
    folder(files)
    path = fetch(parse("hub:./set/train", tmp_path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({"train.json": '{\n"text": ["a", "b"]}'}, "ValueError: JSON that is neither one object a line nor a list of objects"),
        ({"train.jsonl": lines_of({"text": "a"}, ["b"])}, "ValueError: a row of JSON that is not an object"),
        ({"train.jsonl": '{"text": "a"}\n{"text": '}, "JSONDecodeError: "),
        (
            {"train.jsonl": lines_of({"label": "maybe"}), "README.md": card_of(label=CLASSES)},
            "ValueError: Invalid string class label maybe",
        ),
        ({"data.arrow": "", "state.json": "{}"}, "ValueError: a folder that `save_to_disk` wrote"),
    ],
)
def test_files_of_a_data_set_that_are_no_rows_are_told(folder, tmp_path, files, says):
    folder(files)
    with pytest.raises(UserError, match=rf"E232 .*this split of it cannot be read \({says}"):
        fetch(parse("hub:./set/train", tmp_path))
    assert cached(tmp_path) == []


OUTSIDE = {
    "an address": {"data_files": "http://127.0.0.1:{port}/latest/x.csv"},
    "an address of a split": {"data_files": [{"split": "train", "path": ["train.csv", "http://127.0.0.1:{port}/x.csv"]}]},
    "an address in another config": {"config_name": "other", "data_files": "http://127.0.0.1:{port}/x.csv"},
    "a path of the disk": {"data_files": "{private}/x.csv"},
    "a path upwards": {"data_files": "../private/x.csv"},
    "a file's address": {"data_files": "file://{private}/x.csv"},
    "a file's short address": {"data_files": "file:{private}/x.csv"},
    "a file in an archive": {"data_files": "zip://x.csv::{private}/x.zip"},
    "a chain of names": {"data_files": "x.csv::{private}/x.zip"},
    "a data set of the hub": {"data_files": "hf://datasets/a/b/x.csv"},
    "a folder upwards": {"data_dir": "../private"},
    "a folder of the disk": {"data_dir": "{private}"},
}
"""What a card gives as files that are none of the data set's own."""


@pytest.mark.parametrize(("name", "card"), [*((name, "README.md") for name in OUTSIDE), ("an address", ".huggingface.yaml")])
def test_a_card_reads_no_file_and_no_address_beside_the_data_set(folder, tmp_path, listening, name, card):
    """Nothing is asked for: finding out whether an address is there would be a request, too."""
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / "x.csv").write_text("text,label\nsecret,0\n")
    named = json.loads(
        json.dumps(OUTSIDE[name]).replace("{port}", str(listening.port)).replace("{private}", f"{tmp_path}/private")
    )
    content = card_with(**named)
    folder({card: content if card == "README.md" else content.strip("-\n"), "train.csv": "text,label\na,1\n"})
    with pytest.raises(UserError, match=r"E232 hub:./set/train: the data set names '.*(x\.|private).*' by an address"):
        fetch(parse("hub:./set/train", tmp_path))
    assert listening.asked == [] and cached(tmp_path) == []


@pytest.mark.parametrize("pattern", ["train.csv", "./*.csv", "tr*.csv"])
def test_a_link_out_of_the_folder_of_a_data_set_is_not_followed(folder, tmp_path, pattern):
    (tmp_path / "private.csv").write_text("text,label\nsecret,0\n")
    (folder({"README.md": card_with(data_files=pattern)}) / "train.csv").symlink_to(tmp_path / "private.csv")
    with pytest.raises(UserError, match=r"E232 .*names '.*train.csv' by an address, or a path or link that leads out of it"):
        fetch(parse("hub:./set/train", tmp_path))
    assert cached(tmp_path) == []


def test_a_link_within_the_hubs_cache_is(folder, tmp_path):
    """A snapshot and its folders are links to a folder beside the snapshots; and the folder that is named may be a link
    itself."""
    blob, snapshot = tmp_path / "hub/blobs/x", tmp_path / "hub/snapshots/1"
    for place in (blob.parent, snapshot / "inner"):
        place.mkdir(parents=True)
    blob.write_text("text,label\na,1\n")
    (snapshot / "train.csv").symlink_to("../../blobs/x")
    (snapshot / "inner" / "train.csv").symlink_to("../../../blobs/x")
    (tmp_path / "link").symlink_to(snapshot)
    for place in ("hub/snapshots/1", "hub/snapshots/1/inner", "link"):
        assert "a" in fetch(parse(f"hub:./{place}/train", tmp_path)).read_text()
    shared = tmp_path / "blobs" / "0a"  # of all repositories of the cache
    shared.mkdir(parents=True)
    blob.rename(shared / "x")
    blob.symlink_to("../../blobs/0a/x")
    with pytest.raises(UserError, match=r"E232 .*or a path or link that leads out of it"):
        fetch(parse("hub:./link/train", tmp_path))
    (shared.parent / ".huggingface-shared-blobs").write_text("1\n")
    assert "a" in fetch(parse("hub:./link/train", tmp_path)).read_text()


def test_columns_that_hold_images_are_left_out_and_those_of_mixed_json_are_not(arrow, folder, tmp_path):
    datasets = pytest.importorskip("datasets")
    from pyarrow import parquet

    image, mixed = datasets.Image(), datasets.Json()
    features = datasets.Features(
        {"target": mixed, "turns": [mixed], "pictures": [image], "inner": {"picture": image, "name": datasets.Value("string")}}
    )
    stored = [{"bytes": b"x", "path": "a.png"}]
    columns = {
        "target": ["1", '["x"]'],
        "turns": [['{"a": 1}', '{"b": 2}'], []],
        "pictures": [stored, stored],
        "inner": [{"picture": stored[0], "name": "a"}] * 2,
    }
    table = datasets.table.table_cast(arrow.table(columns), features.arrow_schema)
    parquet.write_table(table, folder({}) / "train.parquet")
    rows = [row for _, row in read_rows(fetch(parse("hub:./set/train", tmp_path)))]
    assert rows == [{"target": 1, "turns": [{"a": 1}, {"b": 2}]}, {"target": ["x"], "turns": []}]


def test_columns_of_json_that_are_declared_as_images_are_left_out(folder, tmp_path):
    folder({"train.jsonl": lines_of({"text": "a", "picture": "x.png"}), "README.md": card_of(text="string", picture="image")})
    assert [row for _, row in read_rows(fetch(parse("hub:./set/train", tmp_path)))] == [{"text": "a"}]


# the same without the library, where the extra `data` is not installed

TEXT, CLASS, OTHER = types.SimpleNamespace(dtype="string"), ClassLabel(), types.SimpleNamespace(dtype="float32")
LIST, IMAGE = types.SimpleNamespace(feature=CLASS), types.SimpleNamespace(decode_example=None)


@pytest.mark.parametrize(
    ("feature", "value", "is_read_as"),
    [
        *((CLASS, value, 1) for value in ("yes", "1", 1, True, 1.0, "1.0", "True", "true")),
        *((CLASS, value, 0) for value in ("no", "0", 0, False, 0.0, "0.0", "False")),
        *((CLASS, value, -1) for value in (-1, -1.0, "-1", "-1.0")),
        *((CLASS, value, None) for value in ("maybe", "1.5", 1.5, "2", 2, 2.0, "nan", 10**400, "")),
        *((TEXT, 7, "7"), (TEXT, "01", "01"), (TEXT, ["é"], '["é"]'), (OTHER, 3.8, 3.8), (None, "01", "01"), (None, [1], [1])),
        *(
            (LIST, ["yes", None, 0.0, math.nan, math.inf], [1, None, 0, None, None]),
            ({"a": CLASS}, {"a": True, "b": True}, {"a": 1, "b": True}),
        ),
    ],
)
def test_a_value_is_read_as_it_is_declared(feature, value, is_read_as):
    if is_read_as is None:
        with pytest.raises(ValueError):
            hub_rows._as_declared(feature, value)
        return
    found = hub_rows._as_declared(feature, value)
    assert (found, type(found)) == (is_read_as, type(is_read_as))
    assert hub_rows._as_declared(feature, None) is None


def csv_builder(features, *columns: str, **options) -> types.SimpleNamespace:
    """A builder of CSV files with these columns."""
    defaults = {"sep": ",", "quoting": csv.QUOTE_MINIMAL, "header": "infer", "names": None, "na_values": None, "decimal": "."}
    defaults |= {"thousands": None, "true_values": None, "false_values": None, "keep_default_na": True, "converters": None}
    return types.SimpleNamespace(
        config=types.SimpleNamespace(**{**defaults, **options}),
        info=types.SimpleNamespace(features=features),
        as_streaming_dataset=lambda split: [dict.fromkeys(columns)],
    )


@pytest.mark.parametrize(
    ("options", "cell", "is_read_as"),
    [
        *(({}, cell, cell) for cell in ("01", "None", "2009-06-15", "1.50")),
        ({}, "", None),
        ({"na_values": ["-", 9]}, "-", None),
        ({"na_values": ["-", 9]}, "9", None),
        ({"na_values": "-"}, "-", None),
        ({"na_values": "-"}, "--", "--"),
    ],
)
def test_a_cell_of_a_column_without_a_type_is_text(options, cell, is_read_as):
    for key, more in (("label", {}), (1, {"header": None})):
        builder = csv_builder(None, *(("1",) if more else ("text", "label")), **options, **more)
        hub_rows._keep_cells(builder, "train")
        assert builder.config.converters[key](cell) == is_read_as


@pytest.mark.parametrize("option", [{"decimal": ","}, {"thousands": "."}, {"true_values": ["si"]}, {"false_values": ["no"]}])
def test_a_data_set_that_spells_numbers_in_its_own_way_is_read_by_it(option):
    builder = csv_builder(None, "text", "label", **option)
    hub_rows._keep_cells(builder, "train")
    found = builder.config
    assert (found.converters, found.keep_default_na, found.na_values) == (None, False, [""]), "the text None is not missing"


def test_cells_of_declared_texts_and_classes_are_read_as_they_are_written():
    builder = csv_builder({"text": TEXT, "label": CLASS, "score": OTHER}, decimal=",", sep="\t")
    hub_rows._keep_cells(builder, "train")
    found = builder.config
    assert found.quoting == csv.QUOTE_NONE and found.keep_default_na and set(found.converters) == {"text", "label"}
    assert [found.converters["label"](cell) for cell in ("yes", "1.0", "False", "")] == [1, 1, 0, None]
    assert [found.converters["text"](cell) for cell in ("01", "")] == ["01", None]


class Files(list):
    """The files of a split, as `datasets` has them."""

    def __init__(self, files, origin_metadata):
        super().__init__(files)
        self.origin_metadata = origin_metadata


class Text:
    """The reader of text files of `datasets`."""

    def __init__(self, *, data_files, sample_by, **_):
        self.files, self.sample_by = data_files, sample_by

    def as_streaming_dataset(self, split: str) -> list[dict]:
        texts = [path.read_text() for path in self.files[split]]
        return [{"text": text} for one in texts for text in (one.split("\n") if self.sample_by == "line" else [one])]


@pytest.fixture
def json_rows(tmp_path, monkeypatch):
    """Reads files of JSON of one split, with the declared types and a field."""
    monkeypatch.setattr(hub_rows, "needed", lambda *_: types.SimpleNamespace(Text=Text))

    def read_files(*texts: str, field: str | None = None, split: str = "train", **features) -> list[dict]:
        paths = [tmp_path / str(number) for number in range(len(texts))]
        for path, text in zip(paths, texts, strict=True):
            path.write_text(text)
        config = type("JsonConfig", (), {"encoding": "utf-8", "encoding_errors": None, "field": field})()
        config.data_files = {"train": Files(paths, [])}
        info = types.SimpleNamespace(features=features or None)
        builder = types.SimpleNamespace(config=config, info=info, base_path=None, token=None)
        return list(hub_rows.rows_as_written(builder, split)[0])

    return read_files


def test_each_file_of_json_is_read_in_its_own_form(json_rows):
    lines, a_list = lines_of(*DATES), json.dumps(DATES, indent=1)
    assert json_rows(lines, a_list) == json_rows(a_list, lines) == DATES * 2
    assert json_rows(json.dumps({"version": 1, "data": DATES}), field="data") == DATES
    assert json_rows('["a", "b"]', lines) == [{"text": "a"}, {"text": "b"}, *DATES]
    assert json_rows(lines_of(DATES[0]), score=CLASS, target=IMAGE) == [{"text": "a", "score": 1}], "an image is left out"
    for files, says in (
        ((lines, '{"text": "a"}\n["b"]'), "a row of JSON that is not an object"),
        ((a_list, '{\n"text": "a"}'), "JSON that is neither one object a line nor a list of objects"),
    ):
        with pytest.raises(ValueError, match=says):
            json_rows(*files)
    with pytest.raises(ValueError, match=r"Bad split: tset. Available splits: \['train'\]"):
        json_rows(lines, split="tset")


# --- GLUE ---

KNOWN = ("kind", "train", "validation", "text", "label", "header")
HEADS = {
    "cola": "gj04\t1\t\t{}\ngj04\t0\t*\t{}",
    "sst2": "sentence\tlabel\n{}\t1\n{}\t0",
    "mrpc": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n1\t2\t3\t{0}\t{1}\n0\t2\t3\t{0}\t{1}",
    "stsb": "index\tsentence1\tsentence2\tscore\n0\t{0}\t{1}\t2.500\n0\t{0}\t{1}\t4.000",
    "qqp": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n0\t1\t2\t{0}\t{1}\t0\n0\t1\t2\t{0}\t{1}\t1",
    "mnli": "index\tsentence1\tsentence2\tlabel1\tgold_label\n0\t{0}\t{1}\tneutral\tneutral\n0\t{0}\t{1}\tneutral\tentailment",
    "qnli": "index\tquestion\tsentence\tlabel\n0\t{0}\t{1}\tentailment\n0\t{0}\t{1}\tnot_entailment",
    "rte": "index\tsentence1\tsentence2\tlabel\n0\t{0}\t{1}\tentailment\n0\t{0}\t{1}\tnot_entailment",
    "wnli": "index\tsentence1\tsentence2\tlabel\n0\t{0}\t{1}\t0\n0\t{0}\t{1}\t1",
}


@pytest.mark.parametrize("name", TASKS)
def test_the_download_of_a_task_is_read_with_its_columns(tmp_path, name):
    folder = tmp_path / "glue" / TASKS[name].folder
    folder.mkdir(parents=True)
    text = HEADS[name].format('a "quote', "b") + "\n"
    (folder / "train.tsv.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf" + text.encode()))  # MRPC has a byte order mark
    for split in ("dev", "dev_matched", "dev_mismatched"):
        (folder / f"{split}.tsv").write_text(text)
    keys = glue_keys(name, None, tmp_path, KNOWN)
    data = read_task(TaskConfig(**keys))
    assert data.train.texts == data.validation.texts and data.train.texts[0][0] == 'a "quote' and len(data.train) == 2
    assert keys == glue_keys(name, str(folder), tmp_path, KNOWN) == glue_keys(name, "glue", tmp_path, KNOWN)
    metric = glue_keys(name, "glue", tmp_path, ("metric", "test"))
    figure = {"cola": "matthews", "mrpc": "accuracy_f1", "qqp": "accuracy_f1", "stsb": "pearson_spearman"}
    assert metric.pop("metric") == figure.get(name, "accuracy")
    assert metric == ({"test": {"mismatched": str(folder / "dev_mismatched.tsv")}} if name == "mnli" else {})


def test_rows_that_the_download_of_qqp_breaks_over_two_lines_are_left_out(tmp_path):
    (tmp_path / "QQP").mkdir()
    whole = HEADS["qqp"].format("a", "b") + "\n"
    for split in ("train", "dev"):
        (tmp_path / "QQP" / f"{split}.tsv").write_text(
            whole + '3\t1\t2\tis it?\the said "\n"\tis it so?\t0\n' + "4\t1\t2\ta\tc\t1\n"
        )
    config = TaskConfig(**glue_keys("qqp", ".", tmp_path, TaskConfig.model_fields))
    assert read_task(config).train.lines == [2, 3, 6] and skipped_lines(config.train, config) == [4, 5]
    assert read_texts(config.train, config).lines == [2, 3, 6]
    strict = config.model_copy(update={"broken_rows": None})
    assert skipped_lines(strict.train, strict) == []
    with pytest.raises(UserError, match=r"E210 .*train.tsv:4: 5 fields where the header has 6"):
        read_task(strict)


@pytest.mark.parametrize("key", [{"header": False}, {"broken_rows": "skip"}])
def test_keys_of_tables_are_refused_beside_other_files(key):
    with pytest.raises(ValidationError, match=f"{next(iter(key))} is used by .tsv and .csv files, and the task names none"):
        TaskConfig(train="a.jsonl", validation="b.parquet", test={"c": "c.conll"}, **key)
    assert TaskConfig(train="a.jsonl", validation="b.parquet", test={"c": "c.csv.gz"}, **key)


def test_without_a_download_the_hub_is_named(tmp_path):
    assert glue_keys("mnli", None, tmp_path, (*KNOWN, "test")) == {
        "kind": "classification",
        "train": "hub:nyu-mll/glue:mnli/train",
        "validation": "hub:nyu-mll/glue:mnli/validation_matched",
        "text": ["premise", "hypothesis"],
        "label": "label",
        "test": {"mismatched": "hub:nyu-mll/glue:mnli/validation_mismatched"},
    }
    for name, folder, says in (
        ("sst-2", None, "E233 GLUE has no task 'sst-2'. Did you mean 'glue/sst2'"),
        ("sst2", "nowhere", "E233 .*neither SST-2/train.tsv nor train.tsv"),
        ("sst2", 5, "E233 folder is 5, not a path"),
    ):
        with pytest.raises(UserError, match=says):
            glue_keys(name, folder, tmp_path, KNOWN)
    (tmp_path / "SST-2").mkdir()
    (tmp_path / "SST-2/train.tsv").write_text("sentence\tlabel\n")
    with pytest.raises(UserError, match=r"E233 .*SST-2: dev.tsv \(or .gz\) is missing"):
        glue_keys("sst2", ".", tmp_path, KNOWN)
