"""`prune: {refit: ROWS}` in whole pipelines, with and without a recovery."""

import pytest
import torch

from compressor import load
from compressor.deltas.kinds.refit import Refit
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.verify import verify
from tests.tiny import write_pipeline

FAST = {"epochs": 1, "learning_rate": 0.02, "batch_size": 8}
PRUNES = {
    "items": {"items": [{"structure": "heads", "remove": 2}, {"structure": "neurons", "criterion": "random", "remove": 0.7}]},
    "target": {"target": {"flops": 0.5, "length": 16}, "rows": 32, "price_rows": 32},
    "weights": {"structure": "weights", "pattern": "1:4"},
}
TUNES = {"lora": {"method": "lora", "rank": 2, "modules": "all"}, "full": {"method": "full"}}


def refits(model) -> list[Refit]:
    return [module for module in model.modules() if isinstance(module, Refit)]


@pytest.mark.parametrize("prune", PRUNES)
@pytest.mark.parametrize("tune", TUNES)
def test_a_pruned_model_is_refitted_stored_and_merged(tune, prune, tmp_path):
    """Without any training after it: the state has the links, the checkpoint has them in its weights."""
    stages = [{"tune": {**TUNES[tune], **FAST}}, {"prune": {**PRUNES[prune], "refit": 48}}, {"merge": None}]
    made = run_pipeline(load_pipeline(write_pipeline(tmp_path, stages=stages, rows=80)), tmp_path / "out").artifacts
    record = made["prune"].metadata["refit"]
    assert record["rows"] == 48 and record["told"].startswith("refit on 48 rows: mean squared error of a sublayer ")
    assert all(one["after"] <= one["before"] for one in record["sublayers"])
    assert sum(one["after"] for one in record["sublayers"]) < 0.7 * sum(one["before"] for one in record["sublayers"])
    state, merged = load(made["prune"].folder, base=tmp_path / "model"), load(made["merge"].folder)
    assert refits(state) and not refits(merged)
    layers = dict(state.named_modules())
    for name, weight in merged.state_dict().items():
        layer, _, parameter = name.rpartition(".")
        assert torch.equal(getattr(layers[layer], parameter), weight), name
    inputs = {"input_ids": torch.arange(4, 16)[None], "attention_mask": torch.ones(1, 12, dtype=torch.long)}
    with torch.no_grad():  # not in bits: some processors round otherwise where a tensor begins at another byte of a cache line
        torch.testing.assert_close(state(**inputs).logits, merged(**inputs).logits, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_recovery_leaves_the_refit_and_a_second_prune_cuts_it(tmp_path):
    """`same` counts and trains the deltas alone; the plan's number of trained parameters is what is trained."""
    cut = {"structure": "neurons", "criterion": "random", "remove": 5}
    stages = [
        {"tune": {**TUNES["lora"], **FAST}},
        {"prune": {**cut, "refit": 48}},
        {"recover": {"distill": False, **FAST}},
        {"prune": {**cut, "id": "again", "refit": 48}},
        {"recover": {"id": "last", "method": "full", **FAST}},
        {"merge": None},
    ]
    made = run_pipeline(load_pipeline(write_pipeline(tmp_path, stages=stages, rows=80)), tmp_path / "out").artifacts
    first, second, third, last = (
        refits(load(made[name].folder, base=tmp_path / "model")) for name in ("prune", "recover", "again", "last")
    )
    third = [link for link in third if link.group == "refit-1"]
    assert first and not last and len(first) == len(second) == len(third)
    assert all(torch.equal(one.values, other.values) for one, other in zip(first, second, strict=True))
    assert any(one.values.shape != other.values.shape for one, other in zip(second, third, strict=True))
    assert all(check.passed for check in verify(tmp_path / "out" / "tiny"))


def test_without_the_key_the_artifact_is_the_same_as_before(tmp_path):
    """Neither its metadata nor its fingerprint has it."""
    stages = [{"tune": {**TUNES["lora"], **FAST}}, {"prune": PRUNES["items"]}]
    path = write_pipeline(tmp_path, stages=stages, rows=80)
    made = run_pipeline(load_pipeline(path), tmp_path / "out").artifacts
    assert "refit" not in made["prune"].metadata
    assert "prune" in run_pipeline(load_pipeline(path, ["prune.refit=null"]), tmp_path / "out").reused
