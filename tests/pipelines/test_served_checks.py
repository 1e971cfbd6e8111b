"""What a served model answers against what a local session computes: which answers agree with their own scores."""

import numpy as np
import pytest

from compressor.tasks.kinds.classification import Prediction
from compressor.tasks.kinds.multilabel import KIND as MULTILABEL
from compressor.tasks.kinds.multilabel import LabelsFound, prediction
from pipelines.stages.served_checks import ANSWERS, Served, given_labels, given_scores
from serving.layout.knobs import Knobs

NAMES = ["bad", "fair", "good"]


def scores(*values):
    return dict(zip(NAMES, np.array(values, np.float32).tolist(), strict=True))


@pytest.mark.parametrize(("label", "agrees"), [("bad", False), ("fair", True), ("good", True)])
def test_labels_whose_scores_are_equal_in_float32_agree_both(label, agrees):
    """The server chooses by logits, which may differ by less."""
    given = scores(0.2, 0.4, 0.4)
    (row,) = given_scores([Prediction(label, given)], NAMES)
    assert np.isfinite(row).all() == agrees


@pytest.mark.parametrize(
    ("labels", "agrees"),
    [(("good",), True), (("fair", "good"), True), (("good", "fair"), False), ((), False), (("bad", "good"), False)],
)
def test_a_label_at_a_half_may_be_chosen_or_not(labels, agrees):
    (row,) = given_labels([LabelsFound(labels, scores(0.1, 0.5, 0.9))], NAMES)
    assert np.isfinite(row).all() == agrees


def test_the_labels_of_a_text_are_decided_as_by_logits():
    """A kind's metric and agreement compare with 0, which is the logit of a half."""
    logits, answers = np.array([[-2.0, 0.5, 3.0], [-0.1, -4.0, 0.1]], np.float32), ANSWERS["multilabel"]
    truth = np.array([[False, True, False], [True, False, True]])
    given = answers.given([prediction(NAMES, row) for row in logits], NAMES, None)
    for side in (answers.expected(logits, None), given):
        assert np.array_equal(MULTILABEL.metric_inputs(side, truth)[0], logits > 0)
        assert MULTILABEL.agreement.measure(side, logits) == 1.0
    assert MULTILABEL.agreement.measure(answers.expected(-logits, None), given) == 0.0


@pytest.mark.parametrize(
    ("precision", "device", "bound"),
    [
        ("fp16", "cuda", "served, fp16"),
        ("bf16", "cuda", "served, bf16"),
        ("bf16", "cpu", "served"),
        ("fp32", "cuda", "served"),
    ],
)
def test_half_precision_has_a_wider_bound_on_a_gpu_alone(precision, device, bound):
    """On the CPU the same file in the same runtime gives the same numbers."""
    assert Served(None, "m", None, None, (), Knobs(device=device), precision).bound == bound
