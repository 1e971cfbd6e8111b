"""What is no delta: damaged and foreign files, and sealed ones whose description no writer here makes."""

import copy
import json
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file

import compressor
from compressor.errors import UserError
from compressor.storage import delta_file
from compressor.storage.delta_comparison import compare_deltas
from pipelines.cli.work.delta_work import _facts
from tests.compressor.conftest import tiny, tuned
from tests.compressor.delta_parts import live, refused, sealed, write


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = write(tuned(tiny("bert", torch.float32), "propetl"), tmp_path / "x")
    data, bad = path.read_bytes(), tmp_path / "bad"
    refused("E310", delta_file.read, tmp_path / "nothing")
    refused("E310", delta_file.read, tmp_path)
    for cut in (0, 7, 200, len(data) // 2, len(data) - 1):
        bad.write_bytes(data[:cut])
        refused("E310", delta_file.read, bad)
    start = delta_file.header_size(data)
    for place in (data.index(b"prototype"), data.index(b"0-2"), start, start + 100, len(data) - 1):
        bad.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        refused("E310", delta_file.read, bad)
    save_file({"x": torch.ones(2)}, bad)
    assert "not a delta" in refused("E310", delta_file.read, bad)
    save_file({"x": torch.ones(2)}, bad, {delta_file.KEY: "[]"})
    refused("E310", delta_file.read, bad)
    for number, fix in ((7, "A newer version made it: upgrade this one, or create it again"), (0, "Create it again")):
        save_file({"x": torch.ones(2)}, bad, {delta_file.KEY: f'{{"format": {number}}}'})
        assert f"format {number}, this version reads {delta_file.FORMAT}. {fix} with" in refused("E310", delta_file.read, bad)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused(tmp_path, number):
    model = tuned(tiny("bert", torch.float32), "lora")
    with torch.no_grad():
        next(parameter for name, parameter in model.named_parameters() if name.endswith(".B"))[0, 0] = number
    assert "NaN or infinite" in refused("E310", delta_file.read, write(model, tmp_path / "x"))


def test_what_a_delta_cannot_hold(tmp_path):
    model = tiny("bert", torch.float32)
    assert "nothing was added" in refused("E312", write, model, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


# --- a sealed file whose description is not what a writer here makes ---


@pytest.fixture(scope="module")
def dsee_file(tmp_path_factory):
    return write(tuned(tiny("bert", torch.float32), "dsee"), tmp_path_factory.mktemp("dsee") / "x.safetensors")


def shared_with_itself(description):
    return {**description, "shared": {"file": "y.safetensors", "sha256": "0"}}


def of_many_blocks(description):
    (paths, _, changes), *rest = description["changes"]["links"]
    return {**description, "changes": {**description["changes"], "links": [[paths * 50, "0-9999", changes], *rest]}}


@pytest.mark.parametrize(
    "change",
    [
        lambda one: {**one, "labels": ["a", 1, "c"]},
        lambda one: {**one, "labels": "abc"},
        lambda one: {**one, "base": 7},
        lambda one: {**one, "changes": 5},
        lambda one: {**one, "changes": {**one["changes"], "tasks": 5}},
        lambda one: {**one, "kept": 3},
        lambda one: {**one, "kept": {"blocks": [1], "sizes": {"heads": 1}}},
        lambda one: {**one, "head": [1]},
        lambda one: {**one, "head": {name: "x" for name in one["head"]}},
        lambda one: {**one, "shared": 4},
        lambda one: {**one, "shared": {"file": "../y", "sha256": "0"}},
        of_many_blocks,
        shared_with_itself,
    ],
)
def test_a_sealed_description_of_another_form_is_refused(dsee_file, tmp_path, change):
    """A checksum says that a file is as it was written, not by whom."""
    refused("E310", delta_file.read, sealed(dsee_file, tmp_path / "y.safetensors", change))


def test_a_description_that_python_cannot_parse_is_refused(dsee_file, tmp_path):
    with safe_open(dsee_file, "pt") as stream:
        flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    for text in ("[" * 100_000 + "]" * 100_000, '{"format": ' + "7" * 5000 + "}", '{"format": {"a": 1}}', "\ud7ff", "[]", "3"):
        save_file(flat, tmp_path / "x.safetensors", {delta_file.KEY: text})
        refused("E310", delta_file.read, tmp_path / "x.safetensors")
    os.mkfifo(tmp_path / "pipe")
    refused("E310", delta_file.read, tmp_path / "pipe")


def test_a_place_beyond_any_matrix_takes_no_memory(dsee_file, tmp_path):
    """Two sparse changes are compared at their places alone."""
    path = write(tuned(tiny("bert", torch.float32), "selective"), tmp_path / "x.safetensors")
    with safe_open(path, "pt") as stream:
        text = stream.metadata()[delta_file.KEY]
        flat = {name: stream.get_tensor(name) for name in stream.keys()}  # noqa: SIM118
    flat["indices"] = flat["indices"] + (2**31 - 1 - int(flat["indices"].max()))
    description = json.loads(text)
    del description["sha256"]
    seal = delta_file._digest(description, flat)
    save_file(flat, path, {delta_file.KEY: json.dumps({**description, "sha256": seal})})
    found = delta_file.read(path)
    assert all(row.cosine == pytest.approx(1) for row in compare_deltas(found, found))


VALUES = st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=4) | st.just([]) | st.just({})


def places_in(value, path=()):
    """The path of every value inside a JSON value."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from places_in(one, (*path, key))


def put(value, path, new):
    if not path:
        return new
    value = copy.copy(value)
    value[path[0]] = put(value[path[0]], path[1:], new)
    return value


@pytest.mark.parametrize("method", ["dsee", "propetl", "prefix", "vera"])
def test_whatever_a_sealed_description_says_it_is_a_delta_or_a_mistake(method, tmp_path):
    """info, diff and apply alike: one value of the description is another, at random."""
    good = write(tuned(tiny("bert", torch.float32), method), tmp_path / "good.safetensors")
    base, whole, path = live(), delta_file.read(good), tmp_path / "bad.safetensors"
    with safe_open(good, "pt") as stream:
        places = list(places_in(json.loads(stream.metadata()[delta_file.KEY])))[1:]
    places = [place for place in places if place != ("sha256",)]

    @settings(max_examples=40, deadline=None, database=None)
    @given(st.sampled_from(places), VALUES)
    def spoil(place, value):
        sealed(good, path, lambda description: put(description, place, value))
        for use in (
            lambda: _facts(path, delta_file.read(path)),
            lambda: compare_deltas(delta_file.read(path), whole),
            lambda: compressor.load(base, delta=path),
        ):
            try:
                use()
            except UserError as error:
                assert error.code in ("E306", "E310", "E311", "E316")
            except delta_file.DAMAGED:  # the command says E310
                assert use.__code__.co_names[0] in ("_facts", "compare_deltas")

    spoil()
