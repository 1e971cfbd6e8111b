"""Learning from the dense model's hidden states: by hand, on every architecture, and in the training harness."""

import copy

import pytest
import torch
from torch.nn import functional

from compressor.models.anatomy import layers_of
from compressor.pruning.surgery import kept_of, remove
from compressor.tasks.kinds.classification import distillation_loss
from compressor.tasks.kinds.spans import BEGINS, ENDS
from compressor.tasks.predictions import IGNORED
from compressor.tasks.task_kind import kind_of
from compressor.training.distillation import HiddenTeacher, hidden_distance
from compressor.training.schedule import Schedule
from compressor.training.trainer import train
from tests.compressor.conftest import encoding, plan_of, prepared, tiny
from tests.compressor.training_parts import MODULES, rows_of

LABELS = torch.tensor([0, 2, 1])


def test_the_distance_by_hand():
    """Two blocks, a row of two tokens and one of one: ‖s - t‖² / ‖t‖² averaged over tokens, then rows, then blocks."""
    theirs = torch.tensor([[[3.0, 4.0], [0.0, 2.0]], [[1.0, 0.0], [7.0, 7.0]]])
    ours = theirs + torch.tensor([[[0.0, 1.0], [2.0, 0.0]], [[3.0, 0.0], [9.0, 9.0]]])
    mask = torch.tensor([[1, 1], [1, 0]])
    assert torch.isclose(hidden_distance([ours], [theirs], [mask]), torch.tensor(((1 / 25 + 4 / 4) / 2 + 9 / 1) / 2))
    two = hidden_distance([ours, theirs], [theirs, theirs], [mask, mask])
    assert torch.isclose(two, hidden_distance([ours], [theirs], [mask]) / 2)


def test_distillation_loss_by_hand():
    student, teacher = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, 0.0]])
    p, q = torch.softmax(teacher / 2, -1), torch.softmax(student / 2, -1)
    expected = 0.5 * -torch.log_softmax(student, -1)[0, 0] + 0.5 * 4 * (p * (p / q).log()).sum()
    assert torch.isclose(distillation_loss(student, teacher, torch.tensor([0])), expected)


def test_distillation_loss_of_several_labels_by_hand():
    """The KL divergence of two Bernoulli distributions, the mean over the labels."""
    student, teacher, labels = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, 0.0]]), torch.tensor([[True, False]])
    p, q = torch.sigmoid(teacher / 2), torch.sigmoid(student / 2)
    distance = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
    expected = 0.5 * functional.binary_cross_entropy_with_logits(student, labels.float()) + 0.5 * 4 * distance
    assert torch.isclose(kind_of("multilabel").distillation(student, teacher, labels), expected)


def test_losses_of_an_answer_by_hand():
    """The means of those of its beginning, at the first of two tokens, and of its end, at the second."""
    kind, labels = kind_of("spans"), torch.tensor([[BEGINS, ENDS]])
    student, teacher = torch.tensor([[[1.0, 0.0], [-1.0, 3.0]]]), torch.tensor([[[0.5, 2.0], [0.0, 1.0]]])
    logs = torch.log_softmax(student, 1)
    loss = -(logs[0, 0, 0] + logs[0, 1, 1]) / 2
    assert torch.isclose(kind.loss(student, labels), loss)
    p, q = torch.softmax(teacher / 2, 1), torch.softmax(student / 2, 1)
    expected = 0.5 * loss + 0.5 * 4 * (p * (p / q).log()).sum(dim=1).mean()
    assert torch.isclose(kind.distillation(student, teacher, labels), expected)


def test_smoothed_labels_are_torch_s():
    """In the loss, for a mean or a sum; with a teacher in the half that learns the labels, and nowhere else."""
    kind, draw = kind_of("classification"), torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 4, generator=draw, dtype=torch.float64)
    smooth = kind.with_smoothing(0.1)
    for reduction in ("mean", "sum"):
        expected = functional.cross_entropy(student, LABELS, reduction=reduction, label_smoothing=0.1)
        assert torch.equal(smooth.loss(student, LABELS, reduction=reduction), expected)
    gained = smooth.loss(student, LABELS) - kind.loss(student, LABELS)
    taught = smooth.distillation(student, teacher, LABELS) - kind.distillation(student, teacher, LABELS)
    assert torch.isclose(taught, 0.5 * gained) and abs(gained) > 1e-3


def test_imitation_is_the_distance_from_the_teacher_alone():
    """Whatever the labels are: zero at the teacher's outputs; KL of the distributions, or a squared error; at tagged tokens."""
    student, teacher = torch.tensor([[1.0, -1.0], [0.0, 3.0]]), torch.tensor([[0.5, 0.0], [0.0, 3.0]])
    p, q = torch.softmax(teacher, -1), torch.softmax(student, -1)
    expected, labels = (p * (p / q).log()).sum() / 2, torch.tensor([0, 1])
    classes, numbers, tags = (kind_of(name).unlabelled for name in ("classification", "regression", "tokens"))
    for of in (labels, 1 - labels):
        assert torch.isclose(classes.distillation(student, teacher, of), expected)
    assert classes.loss(student, labels) == classes.distillation(teacher, teacher, labels) == 0
    assert torch.isclose(numbers.distillation(student[:, :1], teacher[:, :1], labels), torch.tensor(0.125))
    tagged = torch.tensor([[IGNORED, 0], [IGNORED, 0]])
    tokens = [torch.stack([torch.full_like(rows, 9.0), rows], dim=1) for rows in (student, teacher)]
    assert torch.isclose(tags.distillation(*tokens, tagged), expected)


def pruned(architecture: str, dtype=torch.float64):
    """A dense model, and what PLAN leaves of it."""
    dense = tiny(architecture, dtype)
    student = copy.deepcopy(dense)
    remove(student, plan_of(architecture))
    return dense, student


def test_a_block_learns_from_the_block_that_it_was(architecture):
    """The states of the same original block, masked; a model that is still whole has nothing to learn."""
    dense, student = pruned(architecture)
    teacher, batch = HiddenTeacher(dense, student, weight=3.0), encoding()
    outputs, loss = teacher.loss(student, dict(batch), LABELS)
    assert torch.equal(outputs.logits, student(**batch).logits)
    states = []
    for model, numbers in ((student, range(len(kept_of(student)))), (dense, map(int, kept_of(student)))):
        blocks, found = layers_of(model), []
        for number in numbers:
            hook = blocks[number].module.register_forward_hook(
                lambda block, given, output, found=found: found.append(output[0] if isinstance(output, tuple) else output)
            )
            model(**batch)
            hook.remove()
        states.append(found)
    distance = hidden_distance(*states, [batch["attention_mask"]] * len(found))
    assert torch.isclose(loss, functional.cross_entropy(outputs.logits, LABELS) + 3.0 * distance) and distance > 1e-3
    whole = copy.deepcopy(dense)
    outputs, loss = HiddenTeacher(dense, whole, logits=True).loss(whole, dict(batch), LABELS)
    assert torch.isclose(loss, 0.5 * functional.cross_entropy(outputs.logits, LABELS))


def test_what_pads_does_not_matter(architecture):
    """Longer padding, of other ids: the same loss."""
    dense, student = pruned(architecture)
    teacher, batch = HiddenTeacher(dense, student), encoding()
    _, loss = teacher.loss(student, dict(batch), LABELS)
    longer = {name: functional.pad(tensor, (0, 4), value=name == "input_ids") for name, tensor in batch.items()}
    _, again = teacher.loss(student, longer, LABELS)
    assert torch.isclose(loss, again, rtol=1e-9)


def test_the_gradient_reaches_what_is_trained_and_no_more():
    """With labels that weigh nothing: a LoRA in every block, nothing frozen, nothing of the teacher, which is in eval mode."""
    dense, student = pruned("bert")
    prepared(student, "lora", MODULES)
    teacher = HiddenTeacher(dense.train(), student.train())
    _, loss = teacher.loss(student, dict(encoding()), LABELS)
    loss.backward()
    trained = {name: parameter for name, parameter in student.named_parameters() if parameter.requires_grad}
    assert all(parameter.grad is not None for parameter in trained.values())
    assert all(p.grad is None for name, p in student.named_parameters() if name not in trained)
    assert not any(p.requires_grad or p.grad is not None for p in dense.parameters()) and not dense.training
    assert not any(block._forward_hooks for block in (*teacher.ours, *teacher.theirs))


class Cut(Exception):
    pass


def run(work, on_step=lambda note: None, **arguments):
    """A pruned model with dropout, recovering with a live teacher; returns (model, losses)."""
    dense, student = pruned("bert", torch.float32)
    for module in student.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.1
    prepared(student, "lora", MODULES)
    teacher = HiddenTeacher(dense, student, logits=True)
    schedule = Schedule(epochs=6, learning_rate=5e-3, batch_size=8, seed=4)
    return student, train(student, rows_of(64), 1, schedule, work, on_step, teacher=teacher, **arguments)


def test_it_learns_repeats_and_goes_on_after_a_cut(tmp_path):
    """The loss falls; a second run and one that was cut in step 19 end in the same bits."""
    (whole, losses), (again, same) = run(tmp_path / "1"), run(tmp_path / "2")
    assert losses == same and losses[-1]["loss"] < losses[0]["loss"]
    seen = []

    def stop(note: str) -> None:
        seen.append(note)
        if len(seen) == 19:
            raise Cut

    with pytest.raises(Cut):
        run(tmp_path / "cut", stop, save_every=0.0)
    resumed, taken_up = run(tmp_path / "cut")
    assert taken_up == losses
    for model in (again, resumed):
        assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in whole.state_dict().items())
