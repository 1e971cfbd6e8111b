"""Single weights through real pipelines: masked, recovered, merged, reported; the plan said how many would be left."""

import json

import pytest
from safetensors.torch import load_file

from compressor import load
from compressor.cost import shape_of
from compressor.models.anatomy import matrices_of
from compressor.models.modules import MODULES
from compressor.pruning.weights import holds, nonzeros
from compressor.pruning_criteria import NofM
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.tiny import LEFT_OUT, write_pipeline

FAST = {"epochs": 1, "learning_rate": 0.02, "batch_size": 8}
TUNE = [{"select": {"count": 4}}, {"tune": {"method": "dsee", "rank": 4, **FAST}}]
SHARES = {"structure": "weights", "remove": {"adapted": 0.37, "others": 0.2}}
TWO_OF_FOUR = {"structure": "weights", "pattern": "2:4", "criterion": "taylor", "modules": "ffn_in"}


def ran(folder, *stages):
    pipeline = load_pipeline(write_pipeline(folder, stages=list(stages), rows=80))
    plan = run_pipeline(pipeline, folder / "out", dry_run=True).plan
    return plan, run_pipeline(pipeline, folder / "out")


def left_in(folder) -> int:
    """Non-zeros of the blocks' matrices, counted in the file itself."""
    model, file = load(folder), load_file(folder / "model.safetensors")
    inside = {id(matrix.owner.weight) for matrix in matrices_of(model, MODULES)}
    return sum(int((file[name] != 0).sum()) for name, one in model.named_parameters() if id(one) in inside)


@pytest.mark.slow
def test_the_papers_pools_through_to_the_report(tmp_path):
    """|ΔW| among query and value, |W| among the others, each with its amount; recovery, merge and export leave the zeros."""
    after = [{"recover": FAST}, {"merge": None}, {"export": {"precision": ["fp32"]}}]
    measured = [{"benchmark": {"batch": [1], "length": [16], "rounds": 6, **LEFT_OUT["benchmark"]}}, {"report": None}]
    plan, result = ran(tmp_path, *TUNE, {"prune": SHARES}, *after, *measured)
    adapted, others = 4 * 32 * 32, 4 * 32 * 32 + 4 * 24 * 32
    removed = int(0.37 * adapted) + int(0.2 * others)
    (item,) = result.artifacts["prune"].metadata["items"]
    assert [(one["entries"], one["hidden"]) for one in item["pools"]] == [
        (adapted, int(0.37 * adapted)),
        (others, int(0.2 * others)),
    ]
    merged = result.artifacts["merge"]
    assert left_in(merged.folder) == adapted + others - removed
    (row,) = [row for row in plan.rows() if row[0].startswith("non-zeros")]
    assert row[2].startswith(f"{adapted + others - removed:,} (")
    assert merged.metadata["parity"][0]["max_difference"] == 0.0
    density = [{"pattern": "unstructured", "matrices": 12, "entries": adapted + others, "nonzeros": adapted + others - removed}]
    assert merged.metadata["density"] == density
    report = json.loads((result.folder / "report.json").read_text())
    assert report["density"] == density
    model = load(merged.folder)
    left = {row["metric"]: row for row in report["summary"]}["non-zeros of the merged weights"]
    assert left["compressed"] == f"{nonzeros(model):,}" and shape_of(model).parameters > nonzeros(model)
    assert report["variants"][0]["parameters"] == report["variants"][-1]["parameters"]
    text = (result.folder / "report.md").read_text()
    assert f"{removed:,} of the {adapted + others:,} weights in the masked matrices are zero" in text
    assert "## What is zero" in text and f"{adapted + others - removed:,}" in text


@pytest.mark.slow
def test_what_is_hidden_in_w_alone_is_exported_with_the_delta_apart(tmp_path):
    """DSEE section 3.3: the report counts the zeros of M ⊙ W, the files compute ΔW beside it."""
    prune = {"prune": {"structure": "weights", "remove": 0.2, "hides": "weight"}}
    export = {"export": {"precision": ["fp32"], "merge": False}}
    measured = [{"benchmark": {"batch": [1], "length": [16], "rounds": 6, **LEFT_OUT["benchmark"]}}, {"report": None}]
    plan, result = ran(tmp_path, *TUNE, prune, {"recover": {**FAST, "control": False}}, export, *measured)
    adapted, others = 4 * 32 * 32, 4 * 32 * 32 + 4 * 24 * 32
    left = adapted + others - int(0.2 * adapted) - int(0.2 * others)
    report = json.loads((result.folder / "report.json").read_text())
    (row,) = [row for row in report["density"] if row["pattern"]]
    assert (row["pattern"], row["entries"], row["nonzeros"]) == ("unstructured, of W alone", adapted + others, left)
    (planned,) = [row for row in plan.rows() if row[0].startswith("non-zeros")]
    assert "of W alone" in planned[0] and planned[2].startswith(f"{left:,} (")
    assert any(note.endswith("which merging would save. All figures include them.") for note in report["notes"])


@pytest.mark.parametrize(
    "recover",
    [
        pytest.param({"method": "full"}, id="full", marks=pytest.mark.slow),
        pytest.param({"method": "selective", "modules": "all"}, id="selective"),
    ],
)
def test_patterns_and_heads_and_a_second_training(recover, tmp_path):
    """2:4 by the loss, heads removed behind it, Ω chosen among what is left; all weights trained, or those of Ω."""
    items = [TWO_OF_FOUR, {"structure": "heads", "criterion": "delta", "remove": 1}]
    chosen = [] if recover["method"] == "full" else [{"select": {"score": "pafi", "modules": "all", "count": 4}}]
    plan, result = ran(tmp_path, *TUNE, {"prune": items}, *chosen, {"recover": {**recover, **FAST}}, {"merge": None})
    merged = result.artifacts["merge"]
    matrices = matrices_of(load(merged.folder), ("ffn_in",))
    assert all(holds(matrix.weight, NofM(2, 4)) for matrix in matrices)
    assert {row["pattern"]: row["nonzeros"] for row in merged.metadata["density"]}["2:4"] == 2 * 24 * 32 // 2
    assert plan.sparsity[0].nonzeros(plan.shape) == (2 * 24 * 32 // 2, True)
    assert merged.metadata["parity"][0]["max_difference"] == 0.0
    for name in chosen and ("select-2",):
        places = load_file(result.artifacts[name].folder / "omega.safetensors")
        masked = matrices_of(load(result.artifacts["prune"].folder, base=tmp_path / "model"), ("ffn_in",))
        assert all(matrix.mask.keep.flatten()[places[matrix.path].long()].all() for matrix in masked)
