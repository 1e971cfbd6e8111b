"""A pipeline where there is a GPU: what is trained, scored and predicted there comes back, and the files are the CPU's."""

from contextlib import nullcontext

import numpy as np
import pytest
from safetensors.torch import load_file

from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from tests.pipelines.test_teacher import write_texts
from tests.second_device import REAL, second_device
from tests.tiny import write_pipeline

FAST = {"epochs": 1, "learning_rate": 0.02, "batch_size": 8, "dropout": False}
STAGES = {
    "units": [
        {"select": {"score": "fish", "count": 4, "samples": 16}},
        {"tune": {"method": "dsee", "rank": 4, **FAST}},
        {
            "prune": {
                "items": [
                    {"structure": "heads", "criterion": "taylor", "remove": 1},
                    {"structure": "neurons", "criterion": "reconstruction", "remove": 0.5},
                ],
                "refit": 32,
            }
        },
        {"recover": {**FAST, "distill": True}},
        {"merge": None},
        {"export": {"precision": ["fp32"]}},
    ],
    "weights": [
        {"select": {"score": "sam", "count": 4, "samples": 16}},
        {"tune": {"method": "dsee", "rank": 4, **FAST}},
        {"prune": {"structure": "weights", "pattern": "2:4", "criterion": "taylor", "modules": "ffn_in"}},
        {"merge": None},
    ],
    "texts": [
        {"tune": {"method": "lora", "rank": 2, **FAST}},
        {"prune": {"structure": "neurons", "criterion": "fisher", "remove": 0.5}},
        {"recover": {"method": "full", "texts": "texts.txt", "augment": 1, "distill": "both", "steps": 6, "batch_size": 8}},
        {"merge": None},
    ],
}


@pytest.mark.parametrize("stages", STAGES)
def test_files_are_those_of_the_cpu(tmp_path, stages):
    def merged(name, device):
        path = write_pipeline(tmp_path / name, stages=STAGES[stages], rows=80)
        write_texts(path.parent / "texts.txt")
        pipeline = load_pipeline(path)
        with device:
            result = run_pipeline(pipeline, tmp_path / name / "out")
        return load_file(result.artifacts["merge"].folder / "model.safetensors")

    expected, moved = merged("here", nullcontext()), merged("there", second_device())
    assert moved.keys() == expected.keys()
    for name, tensor in moved.items():
        np.testing.assert_allclose(tensor.numpy(), expected[name].numpy(), rtol=0, atol=1e-3 if REAL else 0)
