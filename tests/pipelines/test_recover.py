"""The stage `recover` with each of its teachers, in a real run."""

import pytest
import torch

from compressor.deltas.links import Change
from compressor.methods import Options, apply
from pipelines.engine.preflight import check_inputs, make_plan
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.stages.recover import lessons
from pipelines.stages.recover.config import RecoverConfig
from pipelines.stages.recover.preparing import prepare
from tests.compressor.conftest import tiny
from tests.tiny import write_pipeline

FAST = {"learning_rate": 0.02, "batch_size": 8}
STAGES = [
    {"tune": {"method": "lora", "rank": 2, "epochs": 2, **FAST}},
    {"prune": [
        {"structure": "heads", "criterion": "random", "remove": 1},
        {"structure": "layers", "criterion": "random", "remove": 1},
    ]},
    {"recover": {"method": "lora", "rank": 2, "modules": "all", "epochs": 1, "control": False, **FAST}},
]  # fmt: skip


@pytest.fixture(scope="module")
def recovered(tmp_path_factory):
    """distill -> the run's result, all in one store."""
    folder = tmp_path_factory.mktemp("project")
    path = write_pipeline(folder, stages=STAGES, rows=80)

    def run(distill: str):
        return run_pipeline(load_pipeline(path, [f"recover.distill={distill}"]), folder / "out")

    return run


@pytest.mark.slow
def test_every_teacher_gives_another_model(recovered):
    """The first batches show it: each adds its own part to the loss."""
    made = {name: recovered(name).artifacts["recover"] for name in ("false", "logits", "hidden", "both")}
    assert [artifact.metadata["distill"] for artifact in made.values()] == [False, "logits", "hidden", "both"]
    # `all` in the file, and what a BERT has in the report
    listed = {tuple(artifact.metadata["modules"]) for artifact in made.values()}
    assert listed == {("query", "key", "value", "output", "ffn_in", "ffn_out")}
    assert len({artifact.files["head.safetensors"] for artifact in made.values()}) == 4
    first = {name: artifact.metadata["losses"][0]["loss"] for name, artifact in made.items()}
    assert first["hidden"] > first["false"] and first["both"] > first["logits"]


@pytest.mark.parametrize(
    ("kind", "length"), [pytest.param("classification", {"steps": 2}, marks=pytest.mark.slow), ("tokens", {"epochs": 0.01})]
)
def test_for_few_steps_the_teacher_computes_the_rows_that_they_take(tmp_path, monkeypatch, kind, length):
    """And of these what it computes among all rows, but for the last bits."""
    short = {"method": "lora", "rank": 2, **length, "batch_size": 2, "learning_rate": 0.02}
    stages = [{"tune": {"method": "lora", "rank": 2, "steps": 1}}, STAGES[1], {"recover": short}]
    pipeline = load_pipeline(write_pipeline(tmp_path, kind=kind, rows=300, stages=stages))
    computed, predict = [], lessons.predict

    def counting(forward, rows, *given, **options):
        computed.append(len(rows))
        return predict(forward, rows, *given, **options)

    monkeypatch.setattr(lessons, "predict", counting)
    few = run_pipeline(pipeline, tmp_path / "out").artifacts["recover"]
    monkeypatch.setattr(lessons, "few_of_teacher", lambda *given: None)
    whole = run_pipeline(pipeline, tmp_path / "out", force=["recover"]).artifacts["recover"]
    assert computed == [4, 300] and "control" in few.metadata
    losses = [[row["loss"] for row in made.metadata["losses"]] for made in (few, whole)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_another_method_freezes_adapters_that_outlived_a_full_recovery():
    """Full merges the first group and leaves the second, whose name the next one must not take."""
    model = tiny("bert", torch.float32)
    apply(model, "lora", Options(rank=2, group="1"))
    first, full, last = (RecoverConfig(**one) for one in ({"method": "adapter"}, {"method": "full"}, {"method": "lora"}))
    prepare(model, first, "lora", lambda group: Options(bottleneck=4, group=group))
    prepare(model, full, "adapter", lambda group: Options(group=group))
    prepare(model, last, "full", lambda group: Options(rank=2, group=group))
    groups = {type(module).__name__: module.group for module in model.modules() if isinstance(module, Change)}
    assert groups == {"Adapter": "2", "LowRank": "3"}
    trained = {type(module).__name__ for module in model.modules() if isinstance(module, Change) and moved(module)}
    assert trained == {"LowRank"}


@pytest.mark.parametrize("last", [{}, {"method": "lora", "rank": 3}, {"method": "full"}])
def test_a_recovery_goes_on_behind_one_that_took_new_positions(tmp_path, last):
    """It trains as many parameters as are planned, and needs no select of its own."""
    tune, prune, _ = STAGES
    alone = {"epochs": 1, "control": False, "distill": False, **FAST}
    dsee = {"recover": {"method": "dsee", "rank": 2, **alone}}
    path = write_pipeline(
        tmp_path, stages=[tune, prune, {"select": {"count": 4}}, dsee, {"recover": {**last, **alone}}], rows=16
    )
    pipeline = load_pipeline(path)
    made = run_pipeline(pipeline, tmp_path / "out").artifacts["recover-2"].metadata
    assert make_plan(check_inputs(pipeline)).trainable[-1] == ("recover", made["trainable"]["body"])
    assert made["method"] == last.get("method", "dsee")


def moved(module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())


def test_true_means_logits(recovered):
    recovered("logits")
    assert "recover" in recovered("true").reused
