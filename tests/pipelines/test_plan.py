"""What an architecture has no place for is told by the plan, before anything runs."""

import pytest

from compressor.cost import Plan, hollow, shape_of
from compressor.errors import UserError
from pipelines.stages.prune import PruneConfig
from pipelines.stages.prune import plan as prune_plan
from pipelines.stages.tune import TuneConfig
from pipelines.stages.tune import plan as tune_plan
from tests.compressor.conftest import CASES, GROWING, tiny


def start(architecture: str) -> Plan:
    model = tiny(architecture)
    return Plan(shape_of(model), shape_of(model), model)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"method": "bitfit"}),
        ("deberta-v2", {"method": "prefix"}),
        ("mpnet", {"method": "propetl", "shared": "prefix"}),
    ],
)
def test_a_method_without_a_place(architecture, config):
    with pytest.raises(UserError, match=f"E407 .*'{architecture}'"):
        tune_plan(TuneConfig(**config), start(architecture))


def test_heads_that_cannot_be_removed_yet():
    with pytest.raises(UserError, match=r"E307 .*'gpt2'"):
        prune_plan(PruneConfig(items=[{"structure": "heads", "criterion": "taylor", "remove": 1}]), start("gpt2"))


@pytest.mark.parametrize("case", [*CASES, *GROWING])
def test_every_method_can_be_tried_on_a_hollow_model(case, tmp_path):
    """As the plan does it: no weights, only shapes."""
    method, kind = {**CASES, **GROWING}[case]
    tiny("bert").config.save_pretrained(tmp_path)
    model = hollow(tmp_path, ["a", "b", "c"])
    plan = Plan(shape_of(model), shape_of(model), model)
    assert tune_plan(TuneConfig(method=method, **kind), plan).trainable[0][1] >= 0


def test_the_plan_counts_what_a_growing_tune_will_train():
    plan = tune_plan(TuneConfig(method="selective", strategy="increment", budget=0.01, modules="all"), start("llama"))
    shape = plan.shape
    assert plan.trainable == (("tune", int(0.01 * sum(out * into for _, out, into in shape.matrices()))),)
