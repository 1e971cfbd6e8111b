"""The stage `recover` with each of its teachers, in a real run."""

import pytest

from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
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


def test_true_means_logits(recovered):
    recovered("logits")
    assert "recover" in recovered("true").reused
