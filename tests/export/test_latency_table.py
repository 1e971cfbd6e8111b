"""The latency table: found again from times that it made, kept sane by force, read only where it belongs. Nothing is timed."""

import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from compressor.cost import shape_of
from compressor.errors import UserError
from compressor.models.first_token import reads_first_token
from compressor.pruning.surgery import Removal, remove
from export.latency import table as latency_table
from export.latency.measure import LatencyVariant, measure, summarize
from export.latency.passes import Pass
from export.latency.table import LatencyTable, exported, fit, measure_table, probes, times_of, undisturbed
from tests.compressor.conftest import EXTRA, tiny

FACTS = {"batch": 2, "shape": {"layers": (1, 2)}}


def cut(name, removals):
    model = tiny(name)
    remove(model, removals)
    return shape_of(model)


def true_table(shape, last=False):
    """Some times for every number of units: bent, as real ones are; in the last block by itself, if requested, straight."""
    draw = random.Random(0)
    sublayers = {}
    for name in ("heads", "cross_heads", "neurons"):
        full = max(layer.units(name) for layer in shape.layers)
        if full:
            knots = sorted({0, full // 4, full // 2, full})
            times = np.cumsum([0.0, *(draw.uniform(0.5, 2) for _ in knots[1:])])
            sublayers[name] = tuple(zip(knots, times.tolist(), strict=True))
    straight = {name: ((0, 0.0), (row[-1][0], draw.uniform(0.1, 0.5))) for name, row in sublayers.items()}
    return LatencyTable(FACTS, sublayers, 0.3, 1.7, last=straight if last else {})


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", ["bert", "llama", "t5", "modernbert"])
def test_a_table_is_found_again_from_the_times_of_its_probes(name, last):
    """Whatever the layout: groups of heads, two stacks, blocks that must stay as they are, a last block that costs less."""
    dense = shape_of(tiny(name))
    last = last and reads_first_token(tiny(name))
    table = true_table(dense, last)
    shapes = [dense, *(cut(name, removals) for removals in probes(tiny(name)))]
    found = fit(FACTS, [(shape, table.ms(shape)) for shape in shapes], last=last)
    assert found.facts == FACTS and found.sublayers.keys() == table.sublayers.keys()
    assert found.last.keys() == table.last.keys()
    for shape in (*shapes, dense.with_units("neurons", [layer.neurons // 3 for layer in dense.layers])):
        assert found.ms(shape) == pytest.approx(table.ms(shape), rel=1e-6)


def test_the_last_block_is_timed_by_itself_where_the_head_reads_the_first_token_alone():
    reads, other = (probes(tiny(name)) for name in ("bert", "llama"))
    assert [removals for removals in reads if removals.keys() == {2} and not removals[2].whole] == [
        {2: Removal(heads=[1, 2, 3])},
        {2: Removal(neurons=list(range(20)))},
    ]
    # it always keeps a head: without any, files would compute the first token alone in every block
    assert all(len(removals[2].heads) < 4 for removals in reads if 2 in removals)
    assert not [removals for removals in other if removals.keys() == {2} and not removals[2].whole]


MIXED = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}


@pytest.mark.parametrize(
    ("name", "facts", "stays"),
    [
        ("deberta-v2", {"share_att_key": False}, lambda removal: removal.heads),
        ("qwen3", {**MIXED, "num_hidden_layers": 4}, lambda removal: removal.whole),
    ],
)
def test_what_cannot_be_removed_is_not_timed(monkeypatch, name, facts, stays):
    """Heads with position matrices of their own; blocks that find their masks by their place."""
    monkeypatch.setitem(EXTRA, name, {**EXTRA[name], **facts})
    dense, removed = shape_of(tiny(name)), probes(tiny(name))
    assert removed and not [one for removals in removed for one in removals.values() if stays(one)]
    table = true_table(dense)
    shapes = [dense, *(cut(name, removals) for removals in removed)]
    found = fit(FACTS, [(shape, table.ms(shape)) for shape in shapes])
    assert [found.ms(shape) for shape in shapes] == pytest.approx([table.ms(shape) for shape in shapes], rel=1e-6)


def test_a_last_block_keeps_its_only_head():
    one = probes(tiny("bert", num_attention_heads=1))
    assert all(not removals[2].heads for removals in one if 2 in removals) and {0, 1} in [set(each) for each in one]


def test_the_last_block_has_times_of_its_own_wherever_it_is():
    shape = shape_of(tiny("bert"))
    table = true_table(shape, last=True)
    inside = table.ms(shape.without({1})) - table.rest_ms - 2 * table.block_ms
    assert inside == pytest.approx(sum(table.sublayers[name][-1][1] + table.last[name][-1][1] for name in table.last))
    assert table.ms(shape.without({2})) == table.ms(shape.without({1}))
    again = LatencyTable.from_json(table.to_json(), FACTS)
    assert again.last == table.last and again.sublayer_ms("heads", 2, last=True) == table.last["heads"][-1][1] / 2


def test_noise_never_makes_fewer_units_slower():
    dense = shape_of(tiny("bert"))
    table, draw = true_table(dense), random.Random(1)
    shapes = [dense, *(cut("bert", removals) for removals in probes(tiny("bert")))]
    for _ in range(20):
        found = fit(FACTS, [(shape, table.ms(shape) * draw.uniform(0.5, 2)) for shape in shapes])
        assert min(found.rest_ms, found.block_ms) >= 0
        for row in found.sublayers.values():
            assert row[0] == (0, 0.0) and all(low[1] <= high[1] for low, high in itertools.pairwise(row))


def test_between_the_knots_a_table_is_linear():
    table = LatencyTable({}, {"heads": ((0, 0.0), (2, 4.0), (4, 6.0))}, 0.0, 0.0)
    assert [table.sublayer_ms("heads", units) for units in range(5)] == [0, 2, 4, 5, 6]


def test_a_table_is_read_for_its_own_facts_only():
    table = LatencyTable(FACTS, {"heads": ((0, 0.0), (4, 1.5))}, 0.25, 1.0)
    text = table.to_json()
    again = LatencyTable.from_json(text, FACTS)
    assert (again.sublayers, again.block_ms, again.rest_ms) == (table.sublayers, 0.25, 1.0)
    busy = replace(table, waited=0.5).to_json()
    assert LatencyTable.from_json(busy, FACTS).waited == 0.5
    with pytest.raises(UserError, match="E803 the latency table belongs to another model"):
        LatencyTable.from_json(text, {**FACTS, "shape": {"layers": (1, 3)}})
    for broken in (text[:-9], "[]", text.replace("sublayers", "layers")):
        with pytest.raises(UserError, match="E803 the latency table is unreadable"):
            LatencyTable.from_json(broken, FACTS)


def test_what_disturbs_some_rounds_is_left_out_of_the_ratios():
    quiet = summarize("quiet", 1, 1, [10.0, 11.0, 12.0])
    disturbed = summarize("disturbed", 1, 1, [5.0, 40.0, 50.0])
    found = undisturbed([quiet, disturbed])
    assert found["quiet"] == pytest.approx(2 * found["disturbed"])
    assert undisturbed([quiet]) == {"quiet": pytest.approx(11.0)}


def test_a_table_remembers_that_its_processes_waited(monkeypatch):
    def timed(variants, *_given, **_options):
        return [summarize(one.name, 2, 6, [10.0 + place] * 3, waited=place / 10) for place, one in enumerate(variants)]

    monkeypatch.setattr(latency_table, "measure", timed)
    monkeypatch.setattr(latency_table, "exported", lambda name, *_given: LatencyVariant(name, "onnxruntime", Path()))
    table = measure_table(tiny("bert"), {}, FACTS, workload=(2, 6))
    assert table.waited == len(probes(tiny("bert"))) / 10


def test_the_time_of_a_pass_is_that_of_its_mean_batch(monkeypatch):
    rows = [SimpleNamespace(variant="x", fastest_ms=80.0, p50=100.0, waited=0.25)]
    monkeypatch.setattr(latency_table, "measure_passes", lambda *_given, **_options: rows)
    found = times_of([], Pass("arrival", 2, ({"input_ids": np.ones((2, 5))},) * 4), 3)
    assert (found.ms, found.waited) == ({"x": 25.0}, 0.25)


@pytest.mark.parametrize(("runtime", "precision"), [("onnxruntime", "fp32"), ("openvino", "int8")])
@pytest.mark.slow
def test_real_models_are_exported_and_timed(runtime, precision, monkeypatch):
    """One block, and nothing between all and none: three graphs. The model comes out as it went in."""
    if runtime == "openvino":
        pytest.importorskip("nncf", reason="the extra openvino is not installed")
    monkeypatch.setattr(latency_table, "KNOTS", (0.0,))
    model = tiny("bert", torch.float32)
    remove(model, {1: Removal(whole=True), 2: Removal(whole=True)})
    before, done = shape_of(model), []
    sample = {name: np.ones((2, 4), dtype=np.int64) for name in ("input_ids", "attention_mask")}
    how = {"runtime": runtime, "precision": precision, "rounds": 3, "threads": 1}
    table = measure_table(model, sample, FACTS, workload=(2, 6), on_step=done.append, **how)
    assert sum(done) == latency_table.steps(model, 3) and shape_of(model) == before
    layer = before.layers[0]
    assert {name: [units for units, _ in row] for name, row in table.last.items()} == {
        "heads": [0, layer.heads],
        "neurons": [0, layer.neurons],
    }
    assert table.ms(before) > 0


@pytest.mark.slow
def test_a_model_that_reads_its_answer_at_the_end_gets_rows_with_one(tmp_path):
    model = tiny("t5", torch.float32)
    sample = {"input_ids": np.array([[7, 8, 3], [9, 3, 1]]), "attention_mask": np.array([[1, 1, 1], [1, 1, 0]])}
    variant = exported("t5", model, sample, tmp_path)
    assert measure([variant], [(2, 5)], 2, threads=1)[0].p50 > 0
