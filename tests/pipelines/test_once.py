"""Results that are kept for all runs of a store: made once, made again where they must be, refused where they were changed."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from compressor.errors import UserError
from pipelines.stages.once import once


@pytest.fixture
def make(tmp_path):
    """Asks for a result that is `content` if it is made now."""

    def ask(content, again=False):
        return once("prices", lambda: content, SimpleNamespace(cache=tmp_path, again=again, say=lambda text: None))

    return ask


def test_a_result_is_made_once_and_again_by_force(make):
    assert [make(b"first"), make(b"second"), make(b"third", again=True), make(b"fourth")] == [b"first", b"first"] + [
        b"third"
    ] * 2


def test_one_that_was_changed_is_refused(make, tmp_path):
    make(b"first")
    (tmp_path / "prices.json").write_bytes(b"other")
    with pytest.raises(UserError, match="E803"):
        make(b"second")


@pytest.mark.parametrize("count", [1, 2])
def test_after_a_kill_while_it_is_replaced_it_is_made_again(make, monkeypatch, count):
    """Between the result and its checksum: the new one must not be taken for one that somebody changed."""
    make(b"first")
    replaced, calls = Path.replace, []

    def kill(self, place):
        calls.append(place)
        if len(calls) == count:
            raise SystemExit
        return replaced(self, place)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", kill)
        with pytest.raises(SystemExit):
            make(b"second", again=True)
    assert make(b"third") == b"third"
