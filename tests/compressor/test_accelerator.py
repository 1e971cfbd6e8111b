"""Outputs, scores and refits of a model on the CPU are computed on the second device, and the model comes back as it was."""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from compressor.accelerator import accelerated, batches_on
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.links import merged_copy
from compressor.models.anatomy import matrices_of
from compressor.pruning.refit import refit
from compressor.pruning.surgery import Removal, remove
from compressor.selection.gradients import gradient_scores
from compressor.tasks.data import TokenRows
from compressor.tasks.features import metric_inputs_of, predict, torch_forward
from compressor.tasks.kinds.classification import KIND as CLASSIFICATION
from compressor.tasks.kinds.regression import KIND as REGRESSION
from pipelines.stages.parity_checks import compare_modules
from tests.compressor.conftest import encoding, tiny, tuned
from tests.second_device import REAL, is_second, second_device

ROWS = [{"input_ids": list(range(3, 3 + length)), "attention_mask": [1] * length} for length in (4, 9, 2, 7)]


def devices_of(model) -> set[bool]:
    """Whether the tensors of a model are on the second device: one answer, or both."""
    return {is_second(tensor) for tensor in (*model.parameters(), *model.buffers())}


def watched(model) -> list[set[bool]]:
    """Where the model is at each of its passes."""
    seen = []
    model.register_forward_pre_hook(lambda module, inputs: seen.append(devices_of(module)))
    return seen


def equal(moved, expected) -> bool:
    return np.allclose(moved, expected, atol=1e-5) if REAL else np.array_equal(moved, expected)


def test_without_a_gpu_nothing_moves():
    model = tiny("bert")
    with accelerated(model) as device:
        assert (device.type == "cpu") is not REAL


@pytest.mark.parametrize("case", ["dsee", "adapter", "prefix", "vera", "propetl-lora"])
def test_many_rows_are_predicted_there(case):
    model = tuned(tiny("bert", torch.float32), case)
    forward = torch_forward(model)
    expected, seen = [forward({key: np.array([row[key]]) for key in row}) for row in ROWS], watched(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with second_device():
        got = predict(forward, ROWS, 1, batch_size=1)
        judged, _ = metric_inputs_of(
            forward, ROWS, 1, np.zeros(4, int), lambda outputs, labels: (outputs, labels), batch_size=1
        )
    assert equal(got, np.concatenate(expected)) and equal(judged, got)
    assert seen == [{True}] * 8 and devices_of(model) == {False}
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_model_that_is_there_already_stays(monkeypatch):
    with second_device() as there:
        model = tiny("bert").to(there)
        predict(torch_forward(model), ROWS, 1)
        assert devices_of(model) == {True}


def test_what_was_merged_on_the_cpu_is_compared_there(monkeypatch):
    """A GPU adds W and BA in another order than the CPU that merged them, and the comparison allows no difference."""

    def change(link, weight):
        return weight + link.scale * (link.B * 3 @ link.A / 3)

    @contextmanager
    def elsewhere(*models):
        with mock.patch.object(LowRank, "change", change):
            yield torch.device("cpu")

    monkeypatch.setattr("compressor.tasks.features.accelerated", elsewhere)
    model = tuned(tiny("bert", torch.float32), "lora")
    merged, rows = merged_copy(model), TokenRows(ROWS, np.zeros(4, int), CLASSIFICATION)
    logits = [predict(torch_forward(one), ROWS, 1) for one in (model, merged)]
    assert not np.array_equal(*logits), "otherwise this shows nothing"
    data, workspace = SimpleNamespace(pad_id=1, batch_size=2), mock.MagicMock()
    assert compare_modules("hop", "merged", model, merged, rows, data, workspace).max_difference == 0


@pytest.mark.parametrize("count", [1, 33])
def test_no_row_is_compared_alone_where_equal_bits_are_required(count):
    """The last bits of a row that is alone depend on where in memory the weights are; 33 rows left one alone behind 32."""

    def alone(_module, _inputs, output):
        output.logits = output.logits + 1e-6 * (len(output.logits) == 1)
        return output

    model = tuned(tiny("bert", torch.float32), "lora")
    merged, rows = merged_copy(model), TokenRows((ROWS * 9)[:count], np.zeros(count, int), CLASSIFICATION)
    merged.register_forward_hook(alone)
    data, workspace = SimpleNamespace(pad_id=1, batch_size=32), mock.MagicMock()
    result = compare_modules("hop", "merged", model, merged, rows, data, workspace)
    assert result.max_difference == 0 < result.batches["batch 1"]


def test_a_matrix_of_one_row_is_compared_from_an_aligned_address():
    """The last bits of its products depend on where it begins; one of a loaded file lies anywhere."""
    model = tiny("bert", torch.float32)
    model.classifier = torch.nn.Linear(model.config.hidden_size, 1)
    loaded, weight = merged_copy(model), model.classifier.weight
    loaded.classifier.weight.data = torch.empty(weight.numel() + 1)[1:].view_as(weight).copy_(weight.data)
    rows = TokenRows((ROWS * 23)[:90], np.arange(90.0), REGRESSION)
    data, workspace = SimpleNamespace(pad_id=1, batch_size=32), mock.MagicMock()
    assert compare_modules("hop", "merged", model, loaded, rows, data, workspace).max_difference == 0


def test_it_comes_back_after_an_error():
    model = tiny("bert")
    with second_device(), pytest.raises(KeyError), accelerated(model):
        raise KeyError
    assert devices_of(model) == {False}


def test_scores_and_refits_are_computed_there():
    def results(context):
        model = tuned(tiny("bert"), "lora")
        dense, cut = merged_copy(model), merged_copy(model)
        remove(cut, {0: Removal([1], [0, 5])})
        batch = (encoding(), torch.tensor([0, 2, 1]))
        with context:
            plain = merged_copy(model)
            with accelerated(plain) as device:
                scores = gradient_scores(plain, matrices_of(plain, ("query",)), "fish", batches_on(device, [batch]))
            with accelerated(dense, cut) as device:
                refit(dense, cut, [inputs for inputs, _ in [batch]])
            logits = predict(torch_forward(cut), ROWS, 1)
        assert all(devices_of(one) == {False} for one in (plain, dense, cut))
        return [*(values.cpu().numpy() for values in scores.values()), logits]

    for moved, expected in zip(results(second_device()), results(nullcontext()), strict=True):
        assert equal(moved, expected)
