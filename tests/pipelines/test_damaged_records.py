"""pipeline.lock.yaml, run.json and report.json are read again by five commands: whatever is in them, there is no traceback."""

import copy
import json
import os
import random

import pytest
import yaml
from click.testing import CliRunner

from compressor.errors import UserError
from compressor.run_store import LOCK_FILE, RUN_FILE
from pipelines.cli.commands import main
from pipelines.engine.attempt import last_attempt, write_attempt
from pipelines.engine.lockfile import read_lock
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.finished import open_run
from pipelines.runs.stored import stored
from tests.pipelines import toys

COMMANDS = (("verify", "--no-serve"), ("serve",), ("report",), ("report", "--plan"))
PIPELINE = toys.PIPELINE.replace("  - report", "  - deploy:\n  - report")


@pytest.fixture
def run(project, out):
    project.write_text(PIPELINE)
    return run_pipeline(load_pipeline(project), out).folder


def ask_all(run) -> list[tuple[int, str]]:
    """(exit code, what was said) of every command that reads a run; none may end in anything but a code."""
    ends = []
    for command, *options in COMMANDS:
        done = CliRunner().invoke(main, [command, str(run), *options])
        assert done.exit_code in (0, 2, 3) and "Traceback" not in done.output, (command, done.output)
        assert isinstance(done.exception, SystemExit | None), (command, done.exception)
        ends.append((done.exit_code, done.output))
    return ends


CONTENTS = [
    b"",
    b"[]",
    b"null",
    b"some text",
    b"{}",
    b"\xff\xfe\x00",
    b"\x00",
    b"[" * 100_000,
    b"{" * 5000 + b"}" * 5000,
    b'{"a": ' * 2000,
    b"9" * 5000,
    b"a: &a [1]\nb: [*a, *a]\n",
    b"a: !!python/object/apply:os.system [echo]\n",
    b"a: 2026-99-99\n",
    b"? [a]\n: b\n",
    b"a: 1\na: 2\n",
    b"stages: [",
]


@pytest.mark.parametrize("name", [LOCK_FILE, RUN_FILE, "report.json"])
@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: content[:12])
def test_no_record_at_all(run, name, content):
    (run / name).write_bytes(content)
    verify, serve, report, plan = ask_all(run)
    readers = {LOCK_FILE: (verify, serve, plan), RUN_FILE: (verify, serve, report, plan), "report.json": (report,)}[name]
    assert [(code, "E803" in said) for code, said in readers] == [(2, True)] * len(readers)


def test_a_folder_or_nothing_in_their_place(run):
    for name in (LOCK_FILE, RUN_FILE, "report.json"):
        content = (run / name).read_bytes()
        (run / name).unlink()
        ask_all(run)
        (run / name).mkdir()
        ask_all(run)
        (run / name).rmdir()
        (run / name).write_bytes(content)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("name",), "../../other"),
        (("name",), "a/b/c"),
        (("name",), ""),
        (("stages", 0, "stage"), "../select"),
        (("stages", 0, "fingerprint"), "../../../../../../etc"),
        (("stages", 0, "fingerprint"), "A" * 64),
        (("stages", 0, "id"), "../x"),
        (("stages", 0, "files"), ["a"]),
        (("stages", 0), None),
        (("data",), []),
        (("task",), {"kind": "nonsense"}),
        (("task",), None),
        (("task", "text"), 3),
        (("seed",), "0"),
        (("threads",), 0),
        (("model",), "x"),
        (("failures",), [{"stage": "tune"}]),
    ],
)
def test_a_lock_file_of_another_form(run, path, value):
    lock = yaml.safe_load((run / LOCK_FILE).read_text())
    place = lock
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    (run / LOCK_FILE).write_text(yaml.safe_dump(lock))
    with pytest.raises(UserError, match=rf"E803 {run / LOCK_FILE}: unreadable"):
        open_run(run)


def test_records_of_an_earlier_version(run):
    """It had another key for what to do about an error, which is left out."""
    failure = {"stage": "tune", "code": "E610", "what": "unequal", "mend": "Train again"}
    lock = yaml.safe_load((run / LOCK_FILE).read_text()) | {"failures": [failure]}
    (run / LOCK_FILE).write_text(yaml.safe_dump(lock))
    attempt = json.loads((run / RUN_FILE).read_text()) | {"status": "failed", "failures": [failure]}
    (run / RUN_FILE).write_text(json.dumps(attempt | {"error": failure | {"where": "", "log": ""}}))
    opened = open_run(run)
    assert [found.line() for found in opened.failures] == ["E610 unequal."]
    assert opened.attempt.failures == opened.failures and opened.attempt.error.shown() == ["E610 unequal."]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("test", {"validation": "x.tsv"}, "test: validation is what reports call the rows"),
        ("broken", "skip", "broken: Extra inputs are not permitted"),
    ],
)
def test_a_task_that_another_version_accepted(run, compress, key, value, said):
    """The lock file is whole: what does not need the task goes on, and `verify` says what is refused."""
    lock = yaml.safe_load((run / LOCK_FILE).read_text())
    lock["task"][key] = value
    (run / LOCK_FILE).write_text(yaml.safe_dump(lock))
    assert {row.runs for row in stored(run.parent).rows} == {("toy",)} and not stored(run.parent).unread
    code, _, told = compress("verify", run, "--no-serve")
    assert code == 3 and f"E803 {run / LOCK_FILE}: its task is refused by this version: {said}" in told
    assert ask_all(run)[3][0] == 0


def test_a_name_deeper_than_the_folder(run, monkeypatch):
    lock = yaml.safe_load((run / LOCK_FILE).read_text()) | {"name": "a/b"}
    (run / LOCK_FILE).write_text(yaml.safe_dump(lock))
    with pytest.raises(UserError, match="E805"):
        open_run(run).artifact(lock["stages"][0])  # another store: there is nothing


VALUES = (None, True, -1, 2**70, 1.5, float("nan"), "", "x", "../..", "\u0000", [], [1], {}, {"a": 1}, [[[]]])


def damaged(content, draw: random.Random):
    """The data with one value somewhere exchanged, dropped or moved."""
    content = copy.deepcopy(content)
    places = []

    def walk(value):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            places.append((value, key))
            if isinstance(inner, dict | list):
                walk(inner)

    walk(content)
    holder, key = draw.choice(places)
    if draw.random() < 0.2:
        del holder[key]
    else:
        holder[key] = draw.choice(VALUES)
    return content


def fuzz(run, count: int) -> None:
    draw = random.Random(count)
    for name, load, dump in (
        (LOCK_FILE, yaml.safe_load, yaml.safe_dump),
        (RUN_FILE, json.loads, json.dumps),
        ("report.json", json.loads, json.dumps),
    ):
        whole = (run / name).read_text()
        for _ in range(count):
            if draw.random() < 0.7:
                content = dump(damaged(load(whole), draw)).encode()
            else:
                content = bytearray(whole.encode())
                content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            (run / name).write_bytes(bytes(content))
            ask_all(run)
        (run / name).write_text(whole)


def test_values_of_other_types(run):
    fuzz(run, 12)


@pytest.mark.slow
def test_many_values_of_other_types(run):
    fuzz(run, 400)


def test_reading_is_quick_and_gives_what_was_written(run):
    assert read_lock(run / LOCK_FILE) == yaml.safe_load((run / LOCK_FILE).read_text())
    assert last_attempt(run).status == "done" and last_attempt(run.parent) is None


def test_a_path_that_is_not_utf8_is_read_as_it_was(tmp_path):
    folder = os.fsdecode(b"/models/caf\xe9")
    write_attempt(tmp_path, {"status": "done", "started": 1.5, "seconds": 2.5, "model_folder": folder})
    assert last_attempt(tmp_path).model_folder == folder
