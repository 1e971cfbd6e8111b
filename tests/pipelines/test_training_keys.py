"""Keys of tune and recover about the training itself: the schedule and the loss that they become."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from compressor.errors import UserError, UserErrors
from compressor.methods import method
from compressor.selection.growth import growth_targets
from compressor.tasks.data import Data, TokenRows
from compressor.tasks.task_kind import kind_of
from compressor.training import mixed_precision
from pipelines.engine.preflight import check_inputs, make_plan
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import Inputs
from pipelines.file.config import load_pipeline
from pipelines.reporting.gather import trainable_rows
from pipelines.reporting.tables import trainable
from pipelines.stages.recover.config import STAGE as RECOVER
from pipelines.stages.recover.config import RecoverConfig
from pipelines.stages.select.config import SelectConfig
from pipelines.stages.training_plan import check_steps
from pipelines.stages.trainings import rows_of, schedule_of
from pipelines.stages.tune.config import STAGE as TUNE
from pipelines.stages.tune.config import TuneConfig
from tests.tiny import write_pipeline


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"method": "full"}, (1, 0.06, 0.01)),
        ({"method": "lora"}, (1, 0.06, 0.0)),
        ({"method": "full", "accumulate": 3, "warmup": 0, "weight_decay": 0}, (3, 0.0, 0.0)),
        ({"method": "lora", "weight_decay": 0.1}, (1, 0.06, 0.1)),
    ],
)
def test_the_schedule(keys, expected):
    schedule = schedule_of(TuneConfig(**keys), method(keys["method"]), seed=0)
    assert (schedule.accumulate, schedule.warmup, schedule.weight_decay) == expected


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"method": "propetl", "shared": "lora"}, {"rank": 32, "alpha": 48.0}),  # ProPETL, section 4.2
        ({"method": "propetl", "shared": "lora", "rank": 8}, {"rank": 8, "alpha": 16.0}),
        ({"method": "propetl"}, {"rank": 16, "bottleneck": 64, "length": 64}),
        ({"method": "mam"}, {"length": 30, "bottleneck": 512}),  # He et al. 2022, section 4.6
        ({"method": "mam", "bottleneck": 8}, {"length": 64, "bottleneck": 8}),
    ],
)
def test_the_values_of_the_papers_are_defaults(keys, expected):
    options = TuneConfig(**keys).options(None, None, "1")
    assert {key: getattr(options, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("stage", "keys", "alpha"),
    [
        (TUNE, {"rank": 8}, 4.0),
        (TUNE, {"rank": 8, "alpha": 4.0}, 4.0),
        (TUNE, {}, 4.0),
        (TUNE, {"method": "dsee", "rank": 8}, 16.0),
        (TUNE, {"method": "lora", "rank": 8}, 16.0),
        (RECOVER, {"rank": 8, "control": False}, 4.0),
    ],
)
def test_a_rank_that_is_repeated_keeps_the_alpha_of_the_select(stage, keys, alpha):
    of_weights = keys.get("method") == "dsee"
    selected = SelectConfig() if of_weights else SelectConfig(on="lora", rank=8, alpha=4, score="random")
    config = stage.config(**{"method": "selective", **keys})
    assert config.options(selected.ground(), {}, "1").alpha == alpha


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.3])
def test_smoothed_labels_are_those_of_the_training_alone(smoothing):
    rows = TokenRows([{"input_ids": [1]}] * 2, np.array([0, 1]), kind_of("classification"))
    data, logits = Data(rows, rows, ["a", "b"], 0), torch.tensor([[2.0, -1.0], [0.5, 0.0]])
    trained = rows_of(TuneConfig(label_smoothing=smoothing), data)
    assert trained.labels is rows.labels  # where they are texts' tokens, lists of them would take five times the memory
    labels = torch.tensor(trained.labels)
    expected = functional.cross_entropy(logits, labels, label_smoothing=smoothing or 0.0)
    assert torch.equal(trained.kinds[0].loss(logits, labels), expected)
    assert torch.equal(data.kind.loss(logits, labels), functional.cross_entropy(logits, labels))


FAST = {"method": "lora", "rank": 2, "epochs": 1, "learning_rate": 0.02, "batch_size": 8}
CUT = {"prune": {"structure": "neurons", "criterion": "random", "remove": 3}}


def of_precision(folder, **keys):
    """A pipeline with a tune and a recover, and these keys in both."""
    stages = [{"tune": {**FAST, **keys}}, CUT, {"recover": {**FAST, **keys}}, {"merge": {}}]
    return load_pipeline(write_pipeline(folder, stages=stages, rows=24))


def test_bf16_changes_what_is_trained_and_the_report_tells_it(tmp_path, monkeypatch):
    """On any machine: the control is trained so, too; a precision that is fp32 anyway changes nothing."""
    monkeypatch.setattr(mixed_precision, "multiplies_bf16", lambda: True)
    runs = {
        name: run_pipeline(
            of_precision(tmp_path / str(name), **({"precision": name} if name else {})), tmp_path / "out", until="recover"
        )
        for name in (None, "fp32", "bf16")
    }
    plain, same, narrow = (run.artifacts["recover"].metadata for run in runs.values())
    assert plain["losses"] == same["losses"] != narrow["losses"]
    assert plain["control"]["losses"] == same["control"]["losses"] != narrow["control"]["losses"]
    assert "precision" not in plain and narrow["precision"] == narrow["control"]["precision"] == "bf16"
    notes = {}
    for name, run in runs.items():
        inputs = Inputs(base=None, task=None, seed=0, artifacts=tuple(run.artifacts.values()))
        notes[name] = trainable({"trainable": trainable_rows(inputs, dense_parameters=10_000)}).note
    assert "Matrix products of tune and recover were computed in bf16" in notes["bf16"]
    assert "bf16" not in notes["fp32"] == notes[None]


@pytest.mark.parametrize("stage", ["tune", "recover"])
def test_bf16_is_refused_where_it_would_be_emulated(stage, tmp_path, monkeypatch):
    monkeypatch.setattr(mixed_precision, "multiplies_bf16", lambda: False)
    keys = {"precision": "bf16"}
    stages = [{"tune": {**FAST, **(keys if stage == "tune" else {})}}, CUT, {"recover": {**FAST, **keys}}, {"merge": {}}]
    pipeline = load_pipeline(write_pipeline(tmp_path, stages=stages, rows=24))
    with pytest.raises(UserErrors, match=r"E904 .*precision: bf16 is slower than fp32 here"):
        make_plan(check_inputs(pipeline))


def refusal(rows: int | None, **keys) -> str | None:
    """The code with which a recovery on so many rows is too short for its own keys, if it is."""
    config = RecoverConfig(**keys)
    try:
        check_steps(config, config.options(None, {}, "1"), rows)
    except UserError as error:
        return error.code


@pytest.mark.parametrize(
    ("keys", "rows", "code"),
    [
        ({"burn_in": 125}, 4000, "E413"),
        ({"burn_in": 124}, 4000, None),
        ({"burn_in": 126, "accumulate": 2, "epochs": 2}, 4000, "E413"),
        ({"burn_in": 126, "augment": 1}, 4000, None),  # on more rows
        ({"burn_in": 126}, None, None),
        ({"renew": 62}, 4000, "E413"),  # positions are fixed after half of 125 steps
        ({"renew": 61}, 4000, None),
        ({"renew": 62, "burn_in": 63}, 4000, None),
        ({"renew": 62, "augment": 1}, 4000, None),
        ({"renew": 1, "steps": 2}, 4000, None),  # after each step: fixing positions after the first returns the rest, too
        ({}, 1, None),
    ],
)
def test_a_burn_in_and_a_renewal_are_compared_with_the_steps_on_the_rows(keys, rows, code):
    """The control of texts without labels has a burn-in of its own."""
    assert refusal(rows, method="diff_pruning", budget=0.01, **keys) == code


@pytest.mark.parametrize("schedule", ["exact", "cohorts"])
@pytest.mark.parametrize("steps", [1, 4, 5, 32, 40])
@pytest.mark.parametrize("stops", [(7,), (20, 40, 60, 80), tuple(range(1, 32)), tuple(range(1, 33))])
def test_checkpoints_are_refused_early_where_the_training_would(schedule, steps, stops):
    keys = {"method": "selective", "strategy": "increment", "budget": 90, "schedule": schedule, "checkpoints": stops}
    missed = not set(stops) <= set(growth_targets(90, steps, schedule, stops).values())
    assert refusal(32 * steps, **keys) == refusal(None, steps=steps, **keys) == ("E408" if missed else None)
