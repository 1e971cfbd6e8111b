"""benchmarks/load.py and served_texts.py with turns that are given: figures that too few requests show, and what is refused."""

from types import SimpleNamespace

import pytest

from benchmarks import load, served_texts

FEW = {"rate": 20.0, "p50": 4.0, "p99": None}
MANY = {"rate": 40.0, "p50": 5.0, "p99": 9.0}


@pytest.mark.parametrize("turns", [[FEW], [FEW, MANY, MANY]])
def test_a_turn_of_too_few_requests_leaves_p99_out(turns):
    both = {"loadtest": turns, "perf_analyzer": [MANY] * len(turns)}
    row = {"protocol": "http", "clients": 1, **load.medians(both)}
    rate = load.significant(row["loadtest"]["rate"])
    assert load.opinion_cells(row)[2].startswith(f"{rate} / 40.0 (") and load.opinion_cells(row)[4] == "- / 9.00 (-)"
    figures = served_texts.typical(turns, 1, {("bare, one session", 1): [MANY] * len(turns)})
    assert served_texts.cells({"way": "2 x 1", "clients": 1, **figures}, ["bare, one session"])[4] == "-"


def test_overload_without_dynamic_batching_is_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.pbtxt").write_text('name: "reviews"\nmax_batch_size: 32\n')
    bench = SimpleNamespace(folder=tmp_path, traffic=SimpleNamespace(source="rows"))
    monkeypatch.setattr(load, "Bench", lambda *given: bench)
    with pytest.raises(SystemExit, match="2"):
        load.main(["runs/toy", "reviews", "--overload", "--out", str(tmp_path)])
    assert "--overload limits the queue of dynamic batching, and 'reviews' has none" in capsys.readouterr().err
