"""Values on Ω of a LoRA and of adapters, through real pipelines: select, tune, prune, recover, merge."""

import pytest
import torch
from safetensors.torch import load_file

from compressor import load
from compressor.checkpoint import load_state
from compressor.deltas.kinds.adapter import Adapter
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.links import chain, chains
from compressor.models.reference import Reference
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import Inputs
from pipelines.file.config import load_pipeline
from pipelines.stages.loading import load_data
from pipelines.stages.select.run import start
from tests.tiny import write_pipeline

FAST = {"epochs": 1, "learning_rate": 0.02, "batch_size": 8}


def ran(folder, *stages):
    pipeline = load_pipeline(write_pipeline(folder, stages=list(stages), rows=80, classes=3))
    return pipeline, run_pipeline(pipeline, folder / "out").artifacts


def starts(pipeline, artifacts, select: str, before: str | None):
    """The tensors of `select` as it saw them, by path: made again from what it was given."""
    entry = next(entry for entry in pipeline.stages if entry.id == select)
    base = Reference("./model", pipeline.source_folder / "model", "")
    found = Inputs(base, pipeline.task, pipeline.seed, (artifacts[before],) if before else ())
    return {matrix.path: matrix.original for matrix in start(entry.config, found, load_data(found))[1]}


def only_omega_moved(pipeline, artifacts, select: str, training: str, before: str | None = None) -> bool:
    """Whether the trained tensors equal the start that `select` scored, but for its places."""
    omega = load_file(artifacts[select].folder / "omega.safetensors")
    model = load_state(artifacts[training].folder, pipeline.source_folder / "model")
    first, moved = starts(pipeline, artifacts, select, before), 0
    assert first.keys() == omega.keys()
    for path, tensor in first.items():
        change, _, name = path.rpartition(".")
        changed = (model.get_submodule(change).read(name) != tensor).flatten().nonzero().flatten()
        assert set(changed.tolist()) <= set(omega[path].tolist()), path
        moved += len(changed)
    return 0 < moved <= sum(map(len, omega.values()))


@pytest.mark.parametrize(
    "select",
    [
        {"on": "lora", "score": "pafi", "scope": "global", "ratio": 0.7, "rank": 4, "alpha": 6, "modules": ["query", "ffn_in"]},
        {"on": "lora", "score": "random", "ratio": 0.25},
        {"on": "adapter", "score": "d3", "scope": "layer", "ratio": 0.25, "bottleneck": 5, "placement": "houlsby"},
    ],
    ids=["pafi-lora", "random-lora", "d3-adapter"],
)
def test_a_tune_starts_where_its_select_looked(select, tmp_path):
    """The tune says nothing of it twice, and what was not chosen has the bits that the select saw."""
    pipeline, artifacts = ran(tmp_path, {"select": select}, {"tune": {"method": "selective", **FAST}})
    assert only_omega_moved(pipeline, artifacts, "select", "tune")
    told = artifacts["tune"].metadata
    assert told["trainable"]["body"] == artifacts["select"].metadata["places"] == dict(plan_of(pipeline, tmp_path))["tune"]
    for key in ("on", "rank", "alpha", "modules", "bottleneck", "placement"):
        assert told[key] == select[key] if key in select else True
    if select["score"] == "pafi":  # the select itself saw these bits: all of B and the smallest of A are chosen
        omega, first = load_file(artifacts["select"].folder / "omega.safetensors"), starts(pipeline, artifacts, "select", None)
        chosen, left = zip(*(split(tensor.abs().flatten(), omega[path].long()) for path, tensor in first.items()), strict=True)
        assert 0 < torch.cat(chosen).max() <= torch.cat(left).min()


def split(values, places):
    outside = torch.ones(len(values), dtype=torch.bool)
    outside[places] = False
    return values[places], values[outside]


def plan_of(pipeline, folder):
    return run_pipeline(pipeline, folder / "dry", dry_run=True).plan.trainable


@pytest.mark.slow
def test_a_second_choice_after_pruning(tmp_path):
    """Sparse adapters, heads removed, then ID3's comparison on a fresh LoRA: merged with parity."""
    pipeline, artifacts = ran(
        tmp_path,
        {"select": {"on": "adapter", "score": "random", "scope": "global", "ratio": 0.5, "bottleneck": 4}},
        {"tune": {"method": "selective", **FAST}},
        {"prune": {"structure": "heads", "criterion": "taylor", "remove": 1}},
        {"select": {"on": "lora", "score": "fish", "samples": 20, "scope": "global", "count": 50, "rank": 2}},
        {"recover": {"method": "selective", **FAST}},
        {"merge": None},
    )
    assert only_omega_moved(pipeline, artifacts, "select", "tune")
    assert only_omega_moved(pipeline, artifacts, "select-2", "recover", "prune")
    assert artifacts["recover"].metadata["trainable"]["body"] == 50
    assert all(hop["passed"] for hop in artifacts["merge"].metadata["parity"])
    assert (artifacts["merge"].folder / "model_with_inserts.safetensors").is_file()
    model = load(artifacts["merge"].folder)
    assert not any(chains(model)) and any(isinstance(module, Adapter) for module in model.modules())


def test_id3_on_lora_leaves_a_plain_lora_and_a_series_of_budgets(tmp_path):
    tune = {"method": "selective", "strategy": "increment", "on": "lora", "rank": 4, "budget": 0.3, "checkpoints": [0.1]}
    _, artifacts = ran(tmp_path, {"tune": {**tune, **FAST}})
    artifact = artifacts["tune"]
    whole = load(artifact.folder, base=tmp_path / "model")
    part = load(base=tmp_path / "model", delta=artifact.folder / artifact.metadata["budgets"][0]["file"])
    links = [[link for _, owner, _ in chains(model) for link in chain(owner)] for model in (part, whole)]
    assert all(isinstance(link, LowRank) for found in links for link in found) and len(links[0]) == len(links[1]) == 4
    size = 4 * 4 * (32 + 32)
    assert artifact.metadata["budgets"][0]["places"] == int(0.1 * size)
    assert artifact.metadata["trainable"]["body"] == int(0.3 * size)
    trained = [sum(int(link.B.count_nonzero()) for link in found) for found in links]
    assert 0 < trained[0] <= int(0.1 * size) and trained[0] < trained[1] <= int(0.3 * size)
