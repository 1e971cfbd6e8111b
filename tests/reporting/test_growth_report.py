"""Where a growing Ω was, as a report shows it: module by block, and its statistics step by step."""

import json
from types import SimpleNamespace

import pytest

from pipelines.reporting.growth_report import allocation_figures, allocation_record, allocation_tables

MATRICES = [
    ("embeddings.weight", "everything else"),
    ("encoder.layer.0.attention.value", "value"),
    ("encoder.layer.0.output.LayerNorm.weight", "everything else"),
    ("encoder.layer.0.output.LayerNorm.bias", "everything else"),
    ("encoder.layer.1.attention.value", "value"),
    ("decoder.layer.1.attention.value", "value"),
]
STEPS = [[1, 0, 0, 0, 3, 0], [1, 2, 1, 1, 3, 0], [2, 2, 1, 1, 3, 1]]


@pytest.fixture
def report(tmp_path):
    """The part of a report of a run with one training of 20 positions that Ω grew in, and one that it did not."""
    steps = [
        {"step": step, "chosen": sum(entries), "tensor_sparsity": entries.count(0) / 6, "entropy": 0.5, "entries": entries}
        for step, entries in zip((1, 5, 9), STEPS, strict=True)
    ]
    matrices = [{"path": path, "module": module, "entries": 100} for path, module in MATRICES]
    (tmp_path / "allocation.json").write_text(json.dumps({"budget": 20, "matrices": matrices, "steps": steps}))
    grown = SimpleNamespace(entry="tune", folder=tmp_path, files={"allocation.json": ""})
    return allocation_record(SimpleNamespace(artifacts=[grown, SimpleNamespace(entry="recover", files={})]))


def test_blocks_are_told_apart_and_hold_shares_of_the_budget(report):
    (record,) = report["allocation"]
    assert (record["blocks"], record["modules"], record["tensors"]) == (3, ["value", "everything else"], 6)
    assert record["first"] == [[0, 0.15, 0], [0, 0, 0]]
    assert record["last"] == [[0.1, 0.15, 0.05], [0.1, 0, 0]], "what is in no block is in no cell"


def test_its_table_and_figures(report):
    (table,) = allocation_tables(report)
    assert table.rows == [
        ("tune", "1", "4", "66.7 %", "0.500"),
        ("tune", "5", "8", "16.7 %", "0.500"),
        ("tune", "9", "10", "0.0 %", "0.500"),
    ]
    # with repeat what leaves Ω returns to its pretrained value, and is counted no longer
    assert table.note.startswith("Positions: those in Ω at that step; with deselected: freeze also those that left it and keep")
    maps, lines = allocation_figures(report)
    assert maps["data"][1]["z"] == report["allocation"][0]["last"] and "15.0 % and 15.0 %" in maps["caption"]
    assert maps["layout"]["xaxis2"]["title"]["text"] == "block, step 9"
    assert [trace["y"] for trace in lines["data"]] == [[4 / 6, 1 / 6, 0], [0.5] * 3] and "6 tensors" in lines["caption"]
    assert allocation_tables({}) == allocation_figures({}) == []
