"""One harness: every tuning method on every architecture."""

from dataclasses import replace

import pytest
import torch

from compressor.anatomy import layers_of, matrices_of
from compressor.checkpoint import load_state, save_state
from compressor.cost import LayerShape, ModelShape, shape_of
from compressor.deltas import LowRank, Mask, Sparse, attach, chain, chains, delta_of, detach, merge_all, merged_copy
from compressor.errors import UserError
from compressor.methods import Options, apply, trainable_counts
from compressor.methods import method as method_row
from compressor.training import Collator, Rows, Schedule, distillation_loss, train
from tests.compressor.conftest import OPTIONS, encoding, tiny, tuned

MODULES = ("query", "value", "ffn_out")


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**encoding()).logits


def test_identity_at_the_start(pair):
    method, architecture = pair
    if not method_row(method).identity:
        pytest.skip("starts from another function")
    model = tiny(architecture)
    before = logits(model)
    apply(model, method, replace(OPTIONS, modules=MODULES))
    assert torch.equal(logits(model), before)


def test_trainable_count_is_the_closed_form(pair):
    (method, architecture), places = pair, 5
    model = tiny(architecture)
    tuned(model, method, MODULES, places)
    row, shape = method_row(method), shape_of(model)
    total = places * len(shape.matrices(MODULES))
    counts, head = trainable_counts(model), model.head_parameter_names
    assert counts["head"] == sum(p.numel() for name, p in model.named_parameters() if name in head)
    assert counts["body"] == row.count(shape, replace(OPTIONS, modules=MODULES), total)


def test_merge_is_bit_equal(pair):
    method, architecture = pair
    model = tuned(tiny(architecture), method, MODULES)
    before = logits(model)
    chained = any(chains(model))
    assert torch.equal(logits(merged_copy(model)), before)
    assert any(chains(model)) == chained, "a merged copy must leave the chains alone"
    assert torch.equal(logits(merge_all(model)), before)
    assert not any(chains(model))


def test_only_the_named_places_move(architecture):
    """AdamW with weight decay, SGD with momentum: outside Ω every weight stays the same bit for bit."""
    for optimizer_of in (
        lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    ):
        model = tiny(architecture)
        layer = layers_of(model)[1].linear("value")
        before, omega = layer.weight.detach().clone(), torch.tensor([3, 50, 95], dtype=torch.int32)
        attach(layer, Sparse.start(layer.weight, omega))
        optimizer = optimizer_of([chain(layer)[0].values])
        for _ in range(3):
            optimizer.zero_grad()
            model(**encoding()).logits.square().sum().backward()
            optimizer.step()
        moved = (layer.weight != before).flatten().nonzero().flatten()
        assert torch.equal(moved, omega.long())


def test_detach_restores_the_base(architecture):
    model = tiny(architecture)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned(model, "dsee", MODULES)
    for _, layer, name in list(chains(model)):
        detach(layer, name)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_delta_behind_a_mask_is_refused():
    layer = torch.nn.Linear(4, 3)
    attach(layer, Mask(torch.ones(3, 4, dtype=torch.bool)))
    with pytest.raises(ValueError, match="behind a mask"):
        attach(layer, LowRank.start(layer.weight, 2, 4.0))


def test_delta_of_leaves_the_mask_out():
    layer = torch.nn.Linear(4, 3)
    attach(layer, Sparse(torch.tensor([1, 5]), torch.tensor([2.0, -3.0])))
    attach(layer, Mask(torch.zeros(3, 4, dtype=torch.bool)))
    expected = torch.zeros(12)
    expected[[1, 5]] = torch.tensor([2.0, -3.0])
    assert torch.allclose(delta_of(layer).flatten(), expected, atol=1e-6)
    assert not layer.weight.any()


def test_dsee_counts_of_the_paper():
    """methods.md 1.1: BERT-base, query and value of 12 layers: 589,824 + 384 at rank 16, 294,912 at rank 8."""
    row = method_row("dsee")
    bert = ModelShape(768, (LayerShape(12, 64, 3072),) * 12, other=0, head=0, head_macs=0)
    count = lambda rank, places: row.count(bert, Options(rank=rank), places)  # noqa: E731
    assert (count(16, 24 * 16), count(8, 0)) == (589_824 + 384, 294_912)


def test_state_reloads_bit_equal(pair, tmp_path, monkeypatch):
    method, architecture = pair
    model = tuned(tiny(architecture, torch.float32), method, MODULES)
    base = tiny(architecture, torch.float32)
    before = logits(model)
    save_state(model, tmp_path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    monkeypatch.setattr("compressor.checkpoint.build", lambda folder, labels, seed: base)
    assert torch.equal(logits(load_state(tmp_path, tmp_path)), before)


def test_deltas_on_top_of_moved_weights_reload_bit_equal(architecture, tmp_path, monkeypatch):
    """Full tuning, then deltas: the state holds the moved weights and the deltas, or the model would fall back to the base."""
    base = tiny(architecture, torch.float32)
    model = tuned(tuned(tiny(architecture, torch.float32), "full"), "lora", MODULES)
    before = logits(model)
    save_state(model, tmp_path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    monkeypatch.setattr("compressor.checkpoint.build", lambda folder, labels, seed: base)
    assert torch.equal(logits(load_state(tmp_path, tmp_path)), before)


def rows_of(count: int) -> Rows:
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(3, 99, (4 + i % 7,), generator=generator).tolist() for i in range(count)]
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in tokens]
    return Rows(rows, [ids[0] % 3 for ids in tokens])


def test_training_learns_repeats_and_moves_nothing_else(method, tmp_path):
    """Two runs with one seed give equal bits; the loss falls; frozen parameters keep their bits."""
    results = []
    for _ in range(2):
        model = tiny("bert", torch.float32)
        omega = {
            matrix.path: torch.arange(0, matrix.original.numel(), 3, dtype=torch.int32)
            for matrix in matrices_of(model, MODULES)
        }
        apply(model, method, replace(OPTIONS, modules=MODULES, omega=omega))
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        losses = train(model, rows_of(64), 1, Schedule(epochs=6, learning_rate=5e-3, batch_size=8, seed=4), tmp_path)
        assert losses[-1]["loss"] < losses[0]["loss"]
        parameters = dict(model.named_parameters())
        assert all(torch.equal(parameters[name], tensor) for name, tensor in frozen.items())
        results.append(model.state_dict())
    assert all(torch.equal(tensor, results[1][name]) for name, tensor in results[0].items())


def test_diverged_training_is_an_error_not_a_model(tmp_path):
    model = tiny("bert", torch.float32)
    apply(model, "lora", Options(modules=MODULES, rank=2, alpha=4.0))
    with pytest.raises(UserError, match="E406"):
        train(model, rows_of(64), 1, Schedule(epochs=2, learning_rate=1e38, batch_size=8), tmp_path)


def test_accumulated_batches_give_the_gradient_of_the_whole_batch(tmp_path):
    """Trainer would double the loss of encoders under accumulation (they take **kwargs): ours must not."""
    from transformers import TrainingArguments

    from compressor.training import TaskTrainer

    gradients = []
    for batch, accumulate in ((16, 1), (8, 2)):
        model = tiny("bert")
        model.requires_grad_(False)
        model.classifier.requires_grad_(True)
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            learning_rate=1.0,
            optim="sgd",
            max_grad_norm=0.0,
            lr_scheduler_type="constant",
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            remove_unused_columns=False,
            train_sampling_strategy="sequential",
            use_cpu=True,
        )
        before = model.classifier.weight.detach().clone()
        TaskTrainer(model=model, args=arguments, train_dataset=rows_of(16), data_collator=Collator(1)).train()
        gradients.append(before - model.classifier.weight.detach())
    assert gradients[0].abs().max() > 1e-3
    assert torch.allclose(gradients[0], gradients[1], atol=1e-12)


def test_distillation_loss_by_hand():
    student, teacher = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.5, 0.0]])
    p, q = torch.softmax(teacher / 2, -1), torch.softmax(student / 2, -1)
    expected = 0.5 * -torch.log_softmax(student, -1)[0, 0] + 0.5 * 4 * (p * (p / q).log()).sum()
    assert torch.isclose(distillation_loss(student, teacher, torch.tensor([0])), expected)
