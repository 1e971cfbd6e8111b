"""Scalars as YAML 1.2 reads them, the line of every value, and what is refused."""

import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from compressor.errors import UserError, UserErrors
from pipelines.file.config import find_pipeline, load_pipeline
from pipelines.file.yaml_source import PIPELINE, parse, read_yaml, scalar

TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc", "Cn", "Zl", "Zp")), max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT
DATA = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)


@pytest.mark.parametrize(
    ("text", "value"),
    [("5e-4", 5e-4), ("1.0e-3", 1e-3), (".5", 0.5), ("1.", 1.0), ("+3", 3), ("0123", 123), ("0o17", 15), ("0x1F", 31)]
    + [("true", True), ("FALSE", False), ("~", None), ("", None), ("Null", None)]
    + [
        (word, word) for word in ("yes", "no", "on", "off", "y", "12:30", "1_000", "2024-01-01", "1e", "tRUE", "0b1", "<<", "=")
    ],
)
def test_scalars_are_those_of_yaml_1_2(text, value):
    found = scalar(text)
    assert (found, type(found)) == (value, type(value))
    assert parse(f"key: {text}" if text else "key:", "f").data == {"key": value}
    assert parse(f"key: '{text}'", "f").data == {"key": text}


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_come_back_as_python_writes_them(number):
    found = scalar(repr(number))
    assert (found, type(found)) == (number, type(number))


@given(DATA, st.booleans())
@example({"🙂": "a 🙂"}, True)
def test_json_is_yaml_and_reads_the_same(data, escaped):
    assert json.dumps(parse(json.dumps(data, ensure_ascii=escaped), "f").data) == json.dumps(data)


def test_every_value_has_the_line_of_its_key():
    source = parse("a: 1\nb:\n  - c:\n      - {d: 2,\n         e: 3}\n  # comment\n  - f\n", "x.yaml")
    paths = {("a",): 1, ("b",): 2, ("b", 0): 3, ("b", 0, "c"): 3, ("b", 0, "c", 0, "e"): 5, ("b", 1): 7}
    assert {path: source.marks[path] for path in paths} == {path: f"x.yaml:{line}" for path, line in paths.items()}
    assert source.where(("b", 0, "c", 0, "e")) == "x.yaml:5: b[0].c[0].e"
    assert source.where(("b", 0, "c", 0, "new")) == "x.yaml:4: b[0].c[0].new"  # the line of the mapping around it


def test_anchors_stand_for_their_values():
    assert parse("a: &x {k: 1}\nb: *x\n", "f").data == {"a": {"k": 1}, "b": {"k": 1}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\nb: {c: 2, c: 3}", "E106 f:2: b.c: key given twice, first in line 2"),
        ("a: 1\nb: [", "E101 f:2: not YAML"),
        ("a: !!python/object:os.system x", "E101 f:1: tag '!!python/object:os.system'"),
        ("a: 1\n---\nb: 2", "E101 f:2: not YAML (but found another document)"),
        ("a: &a [*a]", "E101 f:1: aliases that multiply or contain themselves"),
        ("a: .inf", "E104 f:1: a: .inf is no finite number"),
        ("a: 1e999", "E104 f:1: a: 1e999 is no finite number"),
        ("? [1]\n: 2", "E101 f:1: a key that is a list or a mapping"),
        ("a: \x01", "E101 f: not YAML (special characters are not allowed)"),
        ("[" * 40 + "]" * 40, "E101 f:1: nested too deeply"),
        ("[" * 1000, "E101 f:1: nested too deeply"),
    ],
)
def test_what_is_refused(text, says):
    with pytest.raises(UserError) as error:
        parse(text, "f")
    assert str(error.value).startswith(says)


LIMIT = PIPELINE.most
TOP = "name: t\nmodel: m\ntask: {train: a.tsv, validation: b.tsv}\n"
LARGE = {
    "brackets": ("[" * (LIMIT // 2) + "]" * (LIMIT // 2), "E101 {path}:1: nested too deeply. Write at most 30 levels"),
    "brackets apart": ("[\n" * (LIMIT // 2), "E101 {path}:32: nested too deeply"),
    "dashes": ("- " * (LIMIT // 2), "E101 {path}:1: nested too deeply"),
    "braces": ("{a: " * (LIMIT // 4), "E101 {path}:1: nested too deeply"),
    "a flat list": (
        f"a: [{'1,' * (LIMIT // 2 - 4)}]",
        "E101 {path}:1: more than 10,000 values. Name the pipeline file, not a data",
    ),
    "keys": ("".join(f"key{number}: 1\n" for number in range(9000)), "E102 {path}:1: key0: unknown key"),
    "keys of a stage": (
        f"{TOP}stages:\n  - tune:\n" + "".join(f"      lerning_rate{number}: 1\n" for number in range(9000)),
        "E102 {path}:6: stages[0].tune.lerning_rate0: unknown key. Did you mean 'learning_rate'?",
    ),
    "stages": (f"{TOP}stages:\n" + "  - tunee\n" * 9000, "E104 {path}:4: stages: has 9,000 members, where"),
    "wrong values": (
        f"{TOP}stages: [{{tune: {{checkpoints: [{'x, ' * 9000}]}}}}]",
        "E104 {path}:4: stages[0].tune.checkpoints[0]: must be an integer or a number",
    ),
    "a comment": ("#" * LIMIT, "E101 {path}:1: not a mapping"),
    "a word": (f"a: {'x' * (LIMIT - 3)}", "E102 {path}:1: a: unknown key"),
    "a number": (f"a: {'1' * (LIMIT - 3)}", "E104 {path}:1: a: a number of 262,141 digits"),
    "a number of another base": (f"a: 0x{'f' * (LIMIT - 5)}", "E104 {path}:1: a: a number of 262,141 digits"),
    "one byte too many": (
        "#" * (LIMIT + 1),
        "E101 {path}: 256 KiB, where a pipeline file has at most 256 KiB. Name the pipeline",
    ),
    "five megabytes": ("[" * 5_000_000, "E101 {path}: 4.768 MiB, where a pipeline file has at most 256 KiB"),
}


@pytest.mark.parametrize("case", LARGE)
def test_a_large_file_is_answered_at_once(case, tmp_path):
    """And in few lines, whatever is in it: a slow machine takes 2 to 3 seconds."""
    (text, says), path = LARGE[case], tmp_path / "x.yaml"
    path.write_text(text)
    start = time.process_time()
    with pytest.raises(UserError) as error:
        load_pipeline(path)
    assert time.process_time() - start < 20
    assert str(error.value).startswith(says.format(path=path))
    assert str(error.value).count("\n") < 100 and len(str(error.value)) < 30_000


def test_how_many_faults_are_left_untold_is_told(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("".join("a: 1\n" for _ in range(200)))
    with pytest.raises(UserErrors, match=r"Keep one of them \(and 99 more faults\)$"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("name: x\n".encode("utf-16"), "{path}:1: UTF-16, not UTF-8. Convert it: iconv -f utf-16 -t utf-8"),
        ("name: x\n".encode("utf-16-le"), "{path}:1: UTF-16, not UTF-8. Convert it: iconv -f utf-16le -t utf-8"),
        ("name: x\n".encode("utf-16-be"), "{path}:1: UTF-16, not UTF-8. Convert it: iconv -f utf-16be -t utf-8"),
        ("name: x\n".encode("utf-32"), "{path}:1: UTF-32, not UTF-8. Convert it: iconv -f utf-32 -t utf-8"),
        (b"name: caf\xe9\n", "{path}:1: not UTF-8. Convert it: iconv -f latin1 -t utf-8"),
        (b"name: x\nmodel: caf\xe9\x92s\n", "{path}:2: not UTF-8. Convert it: iconv -f cp1252 -t utf-8"),
        (b"name: x\nmodel: \0\n", "{path}:2: a NUL byte, which no text holds"),
    ],
)
def test_another_encoding_is_named(tmp_path, content, says):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_yaml(path)
    assert str(error.value).startswith(f"E101 {says.format(path=path)}")


def test_a_pipe_and_a_device_are_no_pipeline_files(tmp_path):
    """And are never opened: reading them would not end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UserError, match=r"E101 .*: not a regular file"):
            read_yaml(path)
    with pytest.raises(UserError, match="E110 no pipeline file"):
        find_pipeline("x" * 5000)


def test_aliases_cannot_multiply():
    layers = "\n".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 9))
    with pytest.raises(UserError, match=r"E101 .*multiply"):
        parse(f"a0: &a0 [1]\n{layers}", "f")


def test_all_faults_are_told_at_once():
    with pytest.raises(UserErrors) as error:
        parse("a: 1\na: 2\nb: .nan\n", "f")
    assert [one.code for one in error.value.errors] == ["E106", "E104"]
