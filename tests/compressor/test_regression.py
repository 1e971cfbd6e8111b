"""Numbers instead of classes: their losses, metrics and scores by hand and against scipy, and every label that is none."""

import json

import numpy as np
import pytest
import torch
from scipy import stats
from torch.nn import functional
from transformers import AutoModelForSequenceClassification

from compressor import load
from compressor.checkpoint import save_checkpoint, save_state
from compressor.compression import compression_of
from compressor.errors import UserError
from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.build import build
from compressor.models.reference import resolve
from compressor.pruning.scores import loss_scores
from compressor.pruning.weights import loss_importance
from compressor.selection.gradients import gradient_scores
from compressor.storage import delta_file
from compressor.tasks import KINDS, TaskConfig
from compressor.tasks.metrics import concordance, difference_interval, interval, pearson, spearman
from compressor.tasks.reading import read_task
from compressor.tasks.task_kind import kind_of, kind_with
from compressor.training.distillation import HiddenTeacher
from tests.compressor.conftest import encoding
from tests.compressor.training_parts import with_classes
from tests.tiny import DECODERS, write_model

KIND = kind_of("regression")
LABELS = torch.tensor([0.5, 4.0, 2.25])
RNG = np.random.default_rng(3)
SCORES = RNG.integers(0, 6, 200).astype(float)
"""With many ties, as people's scores have."""
OUTPUTS = (SCORES + RNG.normal(size=200))[:, None].astype(np.float32)


def test_losses_by_hand():
    """(3-1)² and (1-2)²; the teacher says 2 and 1. Labels come in float64 from files, in float32 from batches."""
    student, teacher = torch.tensor([[3.0], [1.0]]), torch.tensor([[2.0], [1.0]])
    for labels in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], dtype=torch.float64)):
        assert KIND.loss(student, labels).item() == 2.5 and KIND.loss(student, labels, "sum").item() == 5.0
        assert KIND.distillation(student, teacher, labels).item() == 0.5 * 2.5 + 0.5 * 0.5


NO_BIAS = DECODERS
"""Their heads are a matrix alone."""


def test_a_fresh_head_begins_at_the_mean_of_the_labels(architecture):
    """The first loss is near the variance, not the square of the mean; nothing of the base is touched."""
    model = with_classes(architecture, 1, torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    KIND.start(model, [40.0, 41.0, 45.0])
    moved = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert moved == [] if architecture in NO_BIAS else (len(moved) == 1 and moved[0] in compression_of(model).head_parameters)
    if architecture not in NO_BIAS:
        with torch.no_grad():
            assert (model(**encoding()).logits - 42.0).abs().max() < 10.0


def test_it_is_the_loss_that_transformers_gives_such_a_model():
    model = with_classes("bert", 1, torch.float32)
    model.config.problem_type = "regression"
    with torch.no_grad():
        outputs = model(**encoding(), labels=LABELS)
    assert torch.equal(outputs.loss, KIND.loss(outputs.logits, LABELS))


@pytest.mark.parametrize("labels", [SCORES, SCORES + 1e6, SCORES[::-1], np.arange(200.0)])
def test_metrics_are_those_of_scipy(labels):
    assert pearson(OUTPUTS, labels) == pytest.approx(stats.pearsonr(OUTPUTS[:, 0].astype(float), labels).statistic, abs=1e-9)
    assert spearman(OUTPUTS, labels) == pytest.approx(stats.spearmanr(OUTPUTS[:, 0], labels).statistic, abs=1e-12)


@pytest.mark.parametrize(
    "broken", [np.zeros((200, 1)), np.full((200, 1), 2.7), np.full((200, 1), np.nan), np.full((200, 1), np.inf)]
)
def test_what_has_no_correlation_is_worth_nothing(broken):
    """A model that says the same of everything guesses: 0, never a NaN in a report."""
    assert pearson(broken, SCORES) == spearman(broken, SCORES) == 0.0
    assert KIND.quality(broken, SCORES)["interval"] == [0.0, 0.0]


def test_concordance_by_hand_and_what_correlation_does_not_see():
    """1, 2, 3 against 2, 3, 4: 2 · 2/3 / (2/3 + 2/3 + 1)."""
    one = np.array([[1.0], [2.0], [3.0]])
    assert concordance(one, one + 1) == pytest.approx(4 / 3 / (4 / 3 + 1))
    assert concordance(one, -one) < 0 and concordance(np.ones((3, 1)), np.ones((3, 1))) == 1.0
    for other in (OUTPUTS + 0.5, 0.8 * OUTPUTS):
        assert spearman(other, OUTPUTS[:, 0]) > 0.999 and concordance(OUTPUTS, other) < 0.98


def test_intervals_hold_the_estimate_and_pairing_narrows(monkeypatch):
    monkeypatch.setattr("compressor.tasks.metrics.RESAMPLES", 300)  # correlations take long to resample
    quality = KIND.quality(OUTPUTS, SCORES)
    low, high = quality["interval"]
    assert low < quality["spearman"] < high and (low, high) == interval(spearman, OUTPUTS, SCORES)
    assert list(quality) == ["spearman", "interval", "pearson", "rows"]
    worse = OUTPUTS + RNG.normal(size=(200, 1))
    below, above = difference_interval(spearman, worse, OUTPUTS, SCORES, resamples=300)
    assert below < spearman(worse, SCORES) - quality["spearman"] < above < 0.0
    assert difference_interval(spearman, OUTPUTS, OUTPUTS, SCORES) == (0.0, 0.0)


def by_hand(model, parameters, reduction: str):
    """Gradients of the squared error, without the kind."""
    loss = getattr((model(**encoding()).logits.squeeze() - LABELS).square(), reduction)()
    return torch.autograd.grad(loss, parameters)


def test_scores_that_ask_the_task_ask_for_its_loss():
    batch, names = [(encoding(), LABELS)], ("query", "ffn_in")
    model = with_classes("bert", 1, torch.float64)
    matrices = matrices_of(model, names)
    weights = [matrix.original for matrix in matrices]
    means, sums = (by_hand(model, weights, reduction) for reduction in ("mean", "sum"))
    found = loss_importance(model, matrices, "taylor", batch, kind=KIND)
    for matrix, weight, gradient in zip(matrices, weights, sums, strict=True):
        assert torch.allclose(found[matrix.path], (weight * gradient).abs())
    found = gradient_scores(model, matrices, "fish", batch, kind=KIND)
    for matrix, gradient in zip(matrices, means, strict=True):
        assert torch.allclose(found[matrix.path], gradient.square())


def test_taylor_foretells_what_a_silent_neuron_changes():
    """|Σ x · ∂L/∂x| of one row is the derivative of its squared error by the neuron's column, to first order."""
    model, row = with_classes("bert", 1, torch.float64), {key: value[:1] for key, value in encoding().items()}
    scores = loss_scores(model, "neurons", "taylor", [(row, LABELS[:1])], kind=KIND)
    column, step = layers_of(model)[1].matrix("ffn_out").original, 1e-4
    losses = []
    for factor in (1 - step, 1 + step):
        with torch.no_grad():
            before = column[:, 3].clone()
            column[:, 3] *= factor
            losses.append((model(**row).logits.squeeze() - LABELS[0]).square().item())
            column[:, 3] = before
    assert scores[1][3].item() == pytest.approx(abs(losses[1] - losses[0]) / (2 * step), rel=1e-4)


def test_a_live_teacher_teaches_numbers():
    dense, student = with_classes("bert", 1, torch.float64), with_classes("bert", 1, torch.float64)
    with torch.no_grad():
        student.classifier.bias += 1.0
    teacher = HiddenTeacher(dense, student, logits=True)
    outputs, loss = teacher.loss(student, dict(encoding()), LABELS, KIND)
    errors = (outputs.logits.squeeze() - LABELS).square().mean()
    assert torch.isclose(loss, 0.5 * errors + 0.5)  # its hidden states are the teacher's own, and all outputs are 1 above
    teacher.logits = False
    assert torch.isclose(teacher.loss(student, dict(encoding()), LABELS, KIND)[1], errors)


def test_one_output_named_after_its_column_lives_on_disk(tmp_path):
    """State, delta file and checkpoint carry it; transformers knows that it is a number and adds no sigmoid."""
    base = write_model(tmp_path / "base")
    model, found = build(base, ["score"]), resolve(str(base))
    assert model.config.problem_type == "regression" and model.classifier.out_features == 1
    with torch.no_grad():
        model.classifier.bias += 3.0
    facts = {"base": str(base), "base_sha256": found.sha256, "label_names": ["score"]}
    save_state(model, tmp_path / "state", **facts)
    delta_file.write(build_with_lora(base), tmp_path / "delta.safetensors", **facts)
    save_checkpoint(model, tmp_path / "checkpoint", base)
    rows = {"input_ids": torch.tensor([[2, 5, 9, 3]])}
    expected = model(**rows).logits
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint")
    for again in (load(tmp_path / "state"), load(tmp_path / "checkpoint"), stock):
        assert torch.equal(again.eval()(**rows).logits, expected) and again.config.problem_type == "regression"
    live = load(build_live(base), delta=tmp_path / "delta.safetensors")
    assert live.config.id2label == {0: "score"} and live.config.problem_type == "regression"
    assert live(**rows).logits.shape == (1, 1)


def build_with_lora(base):
    from compressor.methods import Options, apply

    model = build(base, ["score"])
    apply(model, "lora", Options(rank=2, alpha=4.0, modules=("query",), group="1"))
    return model


def build_live(base):
    """A model of two classes, live, that takes the delta in place of what it is."""
    from compressor.storage.live import remember

    found = resolve(str(base))
    return remember(build(base, ["bad", "good"]), found.reference, found.sha256)


def test_the_number_of_outputs_tells_the_kind_of_a_model_that_says_nothing_else(tmp_path):
    model = build(write_model(tmp_path / "base"), ["bad", "good"])
    assert model.config.problem_type is None and kind_with(model.config.num_labels).name == "classification"
    assert kind_with(1) is KIND


GOOD = "sentence\tscore\nbad film\t1.25\ngood film\t4\n"


def task(tmp_path, train=GOOD, validation=GOOD, ending="tsv", **options) -> TaskConfig:
    paths = {}
    for name, content in (("train", train), ("validation", validation)):
        paths[name] = tmp_path / f"{name}.{ending}"
        paths[name].write_text(content)
    return TaskConfig(**paths, **{"kind": "regression", "text": "sentence", "label": "score", **options})


@pytest.mark.parametrize(
    ("written", "read"),
    [("3.800", 3.8), (" 5 ", 5.0), ("-1.5e-2", -0.015), ("+.5", 0.5), ("4.", 4.0), ("0", 0.0), ("1E3", 1000.0)],
)
def test_numbers_are_read_as_they_are_written(tmp_path, written, read):
    data = read_task(task(tmp_path, f"{GOOD}x y\t{written}\n"))
    assert data.train.labels == [1.25, 4.0, read] and data.label_names == ["score"]
    assert all(type(label) is float for label in data.train.labels)


BROKEN = ("high", "", "nan", "-inf", "1e39", "3,5", "1_000", "0x1F", "4/5", "٣", "True", "1 2", "²")


@pytest.mark.parametrize("written", BROKEN)
def test_a_label_that_is_no_number_has_a_code_and_a_line(tmp_path, written):
    faulty = f"{GOOD}x y\t{written}\n"
    for name, files in (("train", (faulty, GOOD)), ("validation", (GOOD, faulty))):
        with pytest.raises(UserError) as caught:
            read_task(task(tmp_path, *files))
        assert str(caught.value).startswith(
            f"E207 {tmp_path / name}.tsv:4: column 'score' holds {written!r}, not a finite number"
        )


@pytest.mark.parametrize("value", [None, True, "high", [1], {"a": 1}, float("nan"), float("inf"), 10**400, -(10**39)])
def test_json_labels(tmp_path, value):
    rows = "".join(json.dumps({"sentence": "a b", "score": one}) + "\n" for one in (1, 2.5, "3.5", value))
    with pytest.raises(UserError, match=r"E207 .*train.jsonl:4: "):
        read_task(task(tmp_path, rows, rows, "jsonl"))


def test_json_numbers_and_text_read_the_same(tmp_path):
    rows = "".join(json.dumps({"sentence": "a b", "score": one}) + "\n" for one in (1, 2.5, "3.5"))
    assert read_task(task(tmp_path, rows, rows, "jsonl")).validation.labels == [1.0, 2.5, 3.5]


CONSTANT = "sentence\tscore\nbad film\t3\ngood film\t3.0\n"


def test_equal_labels_have_nothing_to_learn_and_no_correlation(tmp_path):
    for name, files in (("train", (CONSTANT, GOOD)), ("validation", (GOOD, CONSTANT))):
        with pytest.raises(UserError, match=rf"E208 .*{name}.tsv: every row has the label 3\. "):
            read_task(task(tmp_path, *files))


def test_a_validation_number_need_not_occur_in_training(tmp_path):
    assert read_task(task(tmp_path, GOOD, GOOD.replace("4", "4.5"))).validation.labels == [1.25, 4.5]


def test_a_subset_keeps_its_numbers_and_needs_two_different_ones(tmp_path):
    rows = GOOD + "".join(f"row {n}\t{n}\n" for n in range(18))
    drawn = read_task(task(tmp_path, rows, subset={"share": 0.5})).train
    whole = dict(zip(*(lambda split: (split.texts, split.labels))(read_task(task(tmp_path, rows)).train), strict=True))
    assert len(drawn) == 10 and all(whole[text] == label for text, label in zip(drawn.texts, drawn.labels, strict=True))
    with pytest.raises(UserError, match=r"E211 .*holds no two different labels\. Raise subset\.share"):
        read_task(task(tmp_path, rows, subset={"share": 0.05}))


def test_scores_taken_for_classes_are_pointed_at_regression(tmp_path):
    rows = "sentence\tscore\n" + "".join(f"x y\t{n / 50:.2f}\n" for n in range(300))
    with pytest.raises(UserError, match=r"E208 .*300 distinct labels.*say kind: regression"):
        read_task(task(tmp_path, rows, rows, kind="classification"))


def test_every_kind_is_a_row_with_a_main_metric():
    for name in KINDS:
        kind = kind_of(name)
        assert kind.name == name and kind.metric is kind.metrics[0]
    with pytest.raises(ValueError, match="ranking"):
        kind_of("ranking")


def test_hidden_states_are_worth_the_same_whatever_the_kind():
    """Only what is learnt beside them differs."""
    dense, student = (with_classes("bert", 1, torch.float64) for _ in range(2))
    with torch.no_grad():
        layers_of(student)[0].matrix("ffn_out").original.mul_(1.5)
    outputs, loss = HiddenTeacher(dense, student, weight=2.0).loss(student, dict(encoding()), LABELS, KIND)
    rest = loss - functional.mse_loss(outputs.logits.squeeze(), LABELS.double())
    same = HiddenTeacher(dense, student, weight=1.0).loss(student, dict(encoding()), LABELS, KIND)[1]
    assert torch.isclose(rest, 2 * (same - (loss - rest))) and rest > 1e-4
