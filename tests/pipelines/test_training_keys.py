"""Keys of tune and recover about the training itself: the schedule and the loss that they become."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from compressor.methods import method
from compressor.tasks.data import Data, TokenRows
from compressor.tasks.task_kind import kind_of
from pipelines.stages.trainings import rows_of, schedule_of
from pipelines.stages.tune.config import TuneConfig


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


@pytest.mark.parametrize("smoothing", [None, 0.0, 0.3])
def test_smoothed_labels_are_those_of_the_training_alone(smoothing):
    rows = TokenRows([{"input_ids": [1]}] * 2, np.array([0, 1]), kind_of("classification"))
    data, logits = Data(rows, rows, ["a", "b"], 0), torch.tensor([[2.0, -1.0], [0.5, 0.0]])
    trained = rows_of(TuneConfig(label_smoothing=smoothing), data)
    labels = torch.tensor(trained.labels)
    expected = functional.cross_entropy(logits, labels, label_smoothing=smoothing or 0.0)
    assert torch.equal(trained.kinds[0].loss(logits, labels), expected)
    assert torch.equal(data.kind.loss(logits, labels), functional.cross_entropy(logits, labels))
