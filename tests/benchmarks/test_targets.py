"""benchmarks/targets.py: its record outlives the store, and is never mixed with another machine's; its table and picture."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from benchmarks import targets

FIGURES = {"dense": 84.0, "pruned": 80.0, "recovered": 83.5, "predicted": 2.0, "measured": 1.9}


@pytest.fixture
def grid(tmp_path, monkeypatch):
    """A grid without a store: every run that is made has FIGURES, and is noted in `made`."""
    made = []

    def make(train=True, rows=10):
        record = targets.Record(tmp_path / "targets-sst2.json", FACTS | {"rows": rows})
        return targets.Grid("MODEL", "sst2", {}, tmp_path, record, train, batch=8, length=128)

    def run(self, name, seed, stages):
        if not self.train:
            return {}
        made.append(name)
        quality = {
            one: SimpleNamespace(metadata={"quality": {"accuracy": FIGURES[key] / 100}}) for one, key in QUALITIES.items()
        }
        quality["prune"].metadata["target"] = {"predicted": 2.0, "measured": 1.9}
        return quality

    monkeypatch.setattr(targets.Grid, "_run", run)
    return SimpleNamespace(make=make, made=made)


QUALITIES = {"tune": "dense", "prune": "pruned", "recover": "recovered"}
FACTS = {"batch": 8, "length": 128, "cpu": "c", "cores": 2, "packages": {}}
CELLS = [(2.0, "taylor", True), (2.0, "taylor", False), (1.5, "taylor", True)]


def test_a_run_that_stands_in_the_record_is_not_made_again(grid):
    first = targets.fill(grid.make(), CELLS, most=2)
    assert len(grid.made) == 6 and first == targets.fill(grid.make(train=False), CELLS, most=2)
    assert grid.make().longer(0) == pytest.approx(-0.5) and len(grid.made) == 7
    assert grid.make(train=False).longer(0) == pytest.approx(-0.5) and grid.make(train=False).longer(1) is None
    assert first[2.0, "taylor", True] == [targets.Result(**FIGURES)] * 2


def test_a_record_of_other_settings_is_refused(grid, tmp_path):
    grid.make().longer(0)
    before = (tmp_path / "targets-sst2.json").read_text()
    with pytest.raises(ValueError, match="is of another 'rows'"):
        grid.make(rows=11)
    assert (tmp_path / "targets-sst2.json").read_text() == before and json.loads(before)["facts"]["rows"] == 10


def test_table_and_picture_say_what_the_control_gained(grid):
    one = grid.make()
    table = targets.fill(one, CELLS, most=3)
    told = targets.markdown(one, table, [0.5, 0.7])
    assert "| 2x | taylor | yes | 2.00x | 1.90x | 80.0 ± 0.0 | 83.5 ± 0.0 | -0.5 | 3 |" in told
    assert "--rows 10 --only taylor --targets 2,1.5 --out docs/results`" in told
    assert "trained as long as the recovered: +0.6 ± 0.1 (2 seeds)" in told
    texts = list(ElementTree.fromstring(targets.picture(table, "accuracy", 1.4)).iter("{http://www.w3.org/2000/svg}text"))
    assert {"dense, trained as long", "taylor, no teacher"} <= {one.text for one in texts}
    assert all(0 < float(one.get("y")) < targets.HEIGHT and 0 < float(one.get("x")) < targets.WIDTH for one in texts)


def test_the_command_of_a_whole_grid_names_no_part(grid):
    cells = [(target, criterion, True) for target in targets.SEEDS for criterion in targets.CRITERIA]
    assert targets.part(targets.fill(grid.make(), cells, most=3)) == ""
    assert targets.part(targets.fill(grid.make(), cells, most=1)) == " --seeds 1"
