"""Every method trained: it learns, repeats, goes on after a cut, and splits over batches and processes without a difference."""

import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

from compressor.deltas.kinds.prefix import Prefix
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import chain, plain_name
from compressor.deltas.sources import Scores
from compressor.errors import UserError
from compressor.storage import delta_file
from compressor.training import callbacks
from compressor.training.processes import divided_cores
from compressor.training.schedule import Schedule
from compressor.training.trainer import Collator, train, trainer_of
from compressor.training.unfinished import changing, newest, seal
from tests.bait import Bait
from tests.compressor.conftest import CASES, GROWING, encoding, prepared, tiny
from tests.compressor.training_parts import (
    MANY,
    MANY_RESUMED,
    MODULES,
    NUMBERS,
    OTHERS,
    RESUMED,
    SMOOTHED,
    TAGS,
    TAUGHT,
    TEXTS,
    many_in_one_process,
    one_process,
    rows_of,
)

FAST = Schedule(epochs=6, learning_rate=5e-3, batch_size=8, seed=4)


def run(case: str, work: Path, on_step=lambda note: None, *, architecture="bert", rows=64, schedule=FAST, **arguments):
    """A tiny model trained on some rows; returns (model, losses, names of what was frozen -> their first values)."""
    model = tiny(architecture, torch.float32)
    prepared(model, case, MODULES, places=100)
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    return model, train(model, rows_of(rows), 1, schedule, work, on_step, **arguments), frozen


def test_training_learns_repeats_and_moves_nothing_else(case, tmp_path):
    """Two runs with one seed give equal bits; the loss falls; frozen parameters keep their bits."""
    (first, losses, frozen), (second, _, _) = run(case, tmp_path / "1"), run(case, tmp_path / "2")
    assert losses[-1]["loss"] < losses[0]["loss"]
    parameters = dict(first.named_parameters())
    for name, tensor in frozen.items():
        if ".source." in name:  # frozen but for values on Ω, which are merged into it: see test_within.py
            continue
        # a layer in which nothing was chosen has no chain any more
        now = parameters.get(name, parameters.get(plain_name(name)))
        assert torch.equal(now, tensor)
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())


def test_steps_instead_of_epochs(tmp_path):
    """A training of more steps than an epoch has, without dropout: the first loss is that of the model in eval mode."""
    schedule = replace(FAST, max_steps=11, dropout=False)
    assert schedule.steps(rows=64) == 11
    model, rows = tiny("bert", torch.float32), rows_of(schedule.batch_size)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Dropout):
            layer.p = 0.5
    prepared(model, "lora", MODULES, places=100)
    batch = Collator(1)([rows[row] for row in range(len(rows))])
    labels = batch.pop("labels")
    with torch.no_grad():
        expected = rows.kinds[0].loss(model.eval()(**batch).logits, labels)
    steps = []
    losses = train(model, rows, 1, schedule, tmp_path, lambda note: steps.append(note))
    assert len(steps) == 11 and losses[-1]["step"] == 11
    assert steps[0] == "" and steps[1] == f"loss {float(expected):.3f}"


def stepped(schedule: Schedule, work: Path, case: str = "lora", rows: int = 14) -> tuple[dict, list[dict]]:
    """What a training in float64 moves, by name, and its log: in the usual order of rows."""
    model = tiny("bert")
    prepared(model, case, MODULES)
    trainer = trainer_of(model, rows_of(rows), 1, schedule, work, use_cpu=True)
    trainer.train()
    assert trainer.state.global_step == schedule.steps(rows)
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}, trainer.state.log_history


def test_a_part_of_an_epoch_has_as_many_steps_as_it_is_planned_with(tmp_path):
    """1.3 epochs of two batches are 3 steps: what grows, is projected or warms up goes on to the last one."""
    schedule = replace(FAST, epochs=1.3)
    stepped(schedule, tmp_path)
    assert schedule.steps(14) == 3 and replace(schedule, batch_size=4).steps(28) == 10


def test_accumulated_batches_are_one_of_all_their_rows(tmp_path):
    """Also where the last step of an epoch has fewer rows: 8 and 6 are 4 + 4 and 4 + 2, of the same rows."""
    whole, accumulated = replace(FAST, epochs=2), replace(FAST, epochs=2, batch_size=4, accumulate=2)
    (moved, log), (same, again) = stepped(whole, tmp_path / "1"), stepped(accumulated, tmp_path / "2")
    assert all(torch.allclose(tensor, same[name], atol=1e-12) for name, tensor in moved.items())
    assert [entry["loss"] for entry in log[:-1]] == pytest.approx([entry["loss"] for entry in again[:-1]], abs=1e-12)


@pytest.mark.parametrize(
    ("warmup", "rising"), [(0, [1, 0.75, 0.5, 0.25]), (0.5, [0, 0.5, 1, 0.5]), (0.99, [0, 1 / 3, 2 / 3, 1])]
)
def test_the_learning_rate_rises_in_the_steps_of_warmup(warmup, rising, tmp_path):
    _, log = stepped(replace(FAST, epochs=1, batch_size=4, warmup=warmup), tmp_path)
    assert [entry["learning_rate"] / FAST.learning_rate for entry in log[:-1]] == pytest.approx(rising)


def first_step(schedule: Schedule, work: Path, case: str) -> dict[str, torch.Tensor]:
    """What the first step of a training in float64 moves, by name."""
    model = tiny("bert")
    prepared(model, case, MODULES)
    moved = {}
    _, on_step = after(
        1, lambda: moved.update((n, p.detach().cpu().clone()) for n, p in model.named_parameters() if p.requires_grad)
    )
    train(model, rows_of(14), 1, schedule, work, on_step)
    return moved


@pytest.mark.parametrize("case", ["lora", "id3", "propetl", "diff_pruning", "adapter-adapterhub"])
def test_weight_decay_takes_its_share_of_a_weight(case, tmp_path):
    """In one step, beside AdamW's: learning rate · decay · weight, of all but biases, scores and gates."""
    schedule = replace(FAST, max_steps=2, warmup=0)
    model = tiny("bert")
    prepared(model, case, MODULES)
    start = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    plain = first_step(schedule, tmp_path / "1", case)
    decayed = first_step(replace(schedule, weight_decay=0.5), tmp_path / "2", case)
    kept = tuple(path for path, module in model.named_modules() if isinstance(module, Scores))
    for name, weight in start.items():
        share = 0.0 if name.endswith(("bias", "alpha")) or name.startswith(kept) else FAST.learning_rate * 0.5
        assert torch.allclose(plain[name] - decayed[name], share * weight, atol=1e-12), name


class Cut(Exception):
    pass


def cut_and_taken_up(case: str, work: Path, at: int, steps: int, **arguments) -> None:
    """A training stopped in step `at` of `steps`, with a checkpoint after each, ends as one that was not, in a new model."""
    whole, losses, _ = run(case, work / "whole", **arguments)
    seen = []

    def stop(note: str) -> None:
        seen.append(note)
        if len(seen) == at:
            raise Cut

    with pytest.raises(Cut):
        run(case, work / "cut", stop, save_every=0.0, **arguments)
    told = []
    resumed, again, _ = run(case, work / "cut", told.append, **arguments)
    assert told.count("resumed") == at - 1 and len(told) == steps
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in whole.state_dict().items())
    assert again == losses


def test_a_cut_training_ends_in_the_same_bits(case, tmp_path):
    cut_and_taken_up(case, tmp_path, at=19, steps=48)


@pytest.mark.parametrize("case", ["lora", "selective", "id3", "propetl"])
def test_a_cut_training_ends_in_the_same_bits_on_every_architecture(case, architecture, tmp_path):
    """In the second of two epochs: dropout, batches and a growing Ω go on where they were."""
    schedule = Schedule(epochs=2, learning_rate=5e-3, batch_size=4, seed=4)
    cut_and_taken_up(case, tmp_path, at=4, steps=4, architecture=architecture, rows=8, schedule=schedule)


def test_a_damaged_checkpoint_is_left_for_the_one_before(tmp_path):
    model = tiny("bert", torch.float32)
    prepared(model, "lora", MODULES)
    train(model, rows_of(64), 1, FAST, tmp_path, save_every=0.0)
    assert newest(tmp_path).name == "checkpoint-47"
    stored = tmp_path / "checkpoint-47" / "changing.safetensors"
    stored.write_bytes(stored.read_bytes()[:-1] + b"x")
    assert newest(tmp_path).name == "checkpoint-46"
    assert not stored.exists()
    poisoned = shutil.copytree(tmp_path / "checkpoint-46", tmp_path / "checkpoint-47") / "changing.safetensors"
    save_file({name: tensor / 0 for name, tensor in load_file(poisoned).items()}, poisoned)
    seal(poisoned.parent)
    assert newest(tmp_path).name == "checkpoint-46", "sealed, but not finite"
    (tmp_path / "checkpoint-46" / "manifest.json").unlink()
    assert newest(tmp_path) is None


def test_a_training_goes_on_whose_checkpoints_are_ahead_of_the_clock(tmp_path):
    """The clock was set back, or they were copied from a machine ahead of this one: the last one written is the newest."""
    schedule, ahead = replace(FAST, epochs=1, max_steps=6), time.time() + 3600
    _, losses, _ = run("lora", tmp_path / "whole", schedule=schedule)

    def stop(_: str) -> None:
        if (tmp_path / "cut" / "checkpoint-3").is_dir():
            raise Cut

    with pytest.raises(Cut):
        run("lora", tmp_path / "cut", stop, save_every=0.0, schedule=schedule)
    for name in ("checkpoint-2", "checkpoint-3"):
        os.utime(tmp_path / "cut" / name, (ahead, ahead))
    told = []
    _, again, _ = run("lora", tmp_path / "cut", told.append, save_every=0.0, schedule=schedule)
    assert again == losses and told.count("resumed") == 3
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {"checkpoint-4", "checkpoint-5"}


@pytest.mark.parametrize(("took", "pause"), [(0.5, 30), (1.5, 30), (9, 180), (45, 900)])
def test_a_checkpoint_that_takes_long_puts_off_the_next(monkeypatch, took, pause):
    """To write them takes a twentieth of the time at most; what is computed before, such as an evaluation, does not count."""
    clock = [0.0]
    monkeypatch.setattr(callbacks, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    save, state = callbacks.Save(), SimpleNamespace(global_step=1, max_steps=9)

    def asked(after: float) -> bool:
        clock[0] += after
        save.on_step_end(None, state, control := SimpleNamespace(should_save=False))
        return control.should_save

    assert [asked(after=29), asked(after=1)] == [False, True]
    clock[0] += 100  # an evaluation
    save.on_log(None, state, None)
    clock[0] += took
    save.on_save(None, state, None)
    assert [asked(after=pause - 1), asked(after=1)] == [False, True]


@pytest.mark.parametrize("name", ["checkpoint-500", "checkpoint-best"])
def test_checkpoints_of_another_program_are_not_touched(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    model = tiny("bert", torch.float32)
    prepared(model, "lora", MODULES)
    with pytest.raises(ValueError, match=f"holds {name}, which is of another program"):
        train(model, rows_of(8), 1, FAST, tmp_path)
    assert (tmp_path / name / "model.safetensors").read_bytes() == b"weights"
    # what a kill left of one of ours while it was deleted is in nobody's way
    shutil.rmtree(tmp_path / name)
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "checkpoint-3" / "optimizer.pt").touch()
    assert newest(tmp_path) is None and not (tmp_path / "checkpoint-3").exists()


def test_a_training_that_was_stopped_after_its_last_step_takes_no_other(tmp_path):
    """As by a kill while its model is judged; in the middle of an epoch Trainer would go on to the next step."""
    schedule = replace(FAST, epochs=1, max_steps=6)
    _, losses, _ = run("lora", tmp_path, save_every=0.0, schedule=schedule)
    told = []
    _, again, _ = run("lora", tmp_path, told.append, save_every=0.0, schedule=schedule)
    assert again == losses and told.count("resumed") == 5 and len(told) == 6


def test_a_training_goes_on_with_the_other_numpy(tmp_path):
    """numpy 2 renamed the module that a random state names: the triton extra brings numpy 1 beside a training cut before."""
    whole, losses, _ = run("lora", tmp_path / "whole")

    def stop(_: str) -> None:
        if newest(tmp_path / "cut") is not None:
            raise Cut

    with pytest.raises(Cut):
        run("lora", tmp_path / "cut", stop, save_every=0.0)
    state = newest(tmp_path / "cut") / "rng_state.pth"
    with zipfile.ZipFile(state) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    names = [b"numpy.core.multiarray", b"numpy._core.multiarray"]
    ours = next(name for name in names if any(name in part for part in parts.values()))
    with zipfile.ZipFile(state, "w", zipfile.ZIP_STORED) as archive:
        for name, part in parts.items():
            archive.writestr(name, part.replace(ours, names[1 - names.index(ours)]))
    seal(state.parent)
    told = []
    resumed, again, _ = run("lora", tmp_path / "cut", told.append, save_every=0.0)
    assert "resumed" in told and again == losses
    assert all(torch.equal(tensor, resumed.state_dict()[name]) for name, tensor in whole.state_dict().items())


def test_a_checkpoint_is_no_door_for_code(tmp_path):
    """Trainer keeps the optimizer's state as torch writes it; what is more than tensors and numbers in it is refused unread."""

    def stop(_: str) -> None:
        if newest(tmp_path / "work") is not None:
            raise Cut

    with pytest.raises(Cut):
        run("lora", tmp_path / "work", stop, save_every=0.0)
    folder = newest(tmp_path / "work")
    torch.save(Bait(tmp_path / "ran"), folder / "optimizer.pt")
    seal(folder)
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        run("lora", tmp_path / "work", save_every=0.0)
    assert not (tmp_path / "ran").exists()
    torch.load(folder / "optimizer.pt", weights_only=False).close()
    assert (tmp_path / "ran").exists(), "the bait does not work"


def test_a_checkpoint_holds_what_moves_and_no_more():
    model = tiny("bert", torch.float32)
    prepared(model, "lora", MODULES)
    assert sum(tensor.numel() for tensor in changing(model).values()) < 0.1 * sum(p.numel() for p in model.parameters())


def test_diverged_training_is_an_error_not_a_model(tmp_path):
    model = tiny("bert", torch.float32)
    prepared(model, "lora", MODULES)
    with pytest.raises(UserError, match="E406"):
        train(model, rows_of(64), 1, Schedule(epochs=2, learning_rate=1e38, batch_size=8), tmp_path)


def after(step: int, act) -> tuple[list, Callable[[str], None]]:
    """The steps done so far, and a callback that calls `act` once `step` are."""
    done = []

    def on_step(note: str) -> None:
        done.append(note)
        if len(done) == step:
            act()

    return done, on_step


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_ends_every_method_there(case, value, tmp_path):
    """In the last tensor that the method trains: the error has its name, or its matrix where Ω grows. The checkpoint stays."""
    model = tiny("bert", torch.float32)
    prepared(model, case, MODULES, places=100)
    name, parameter = [row for row in model.named_parameters() if row[1].requires_grad and "classifier" not in row[0]][-1]
    done, on_step = after(1, lambda: parameter.register_hook(lambda gradient: torch.full_like(gradient, value)))
    with pytest.raises(UserError, match=r"E406 training diverged at (mask_)?learning_rate 0\.005, in step 2 of 8: ") as error:
        train(model, rows_of(64), 1, replace(FAST, epochs=1), tmp_path, on_step, save_every=0.0)
    if case in GROWING:
        growth = model.growth
        name = growth.matrices[int(growth.matrix[: growth.count].max())].path
    assert f"the gradients of {name} hold" in str(error.value) and str(error.value).endswith("e.g. to a third of that")
    assert len(done) == 1 and newest(tmp_path).name == "checkpoint-1"


@pytest.mark.parametrize(
    ("case", "trained", "key", "step"),
    [
        ("propetl", ".layer.", "mask_learning_rate", 3),
        ("diff_pruning", ".alpha", "mask_learning_rate", 3),
        ("diff_pruning", ".values", "learning_rate", 4),  # when the gates become a mask
        ("diff_pruning", ".values", "final_learning_rate", 8),
        ("lora", ".A", "learning_rate", 8),
    ],
)
@pytest.mark.parametrize("save_every", [0.0, None])
def test_a_value_that_is_not_finite_ends_the_training_before_it_is_stored(case, trained, key, step, save_every, tmp_path):
    """A NaN among scores or gates: the masks, the loss and the gradients stay finite."""
    model = tiny("bert", torch.float32)
    prepared(model, case, MODULES)
    name, parameter = next(
        row for row in model.named_parameters() if row[1].requires_grad and trained in row[0].replace("layer.0", "")
    )
    done, on_step = after(step, lambda: parameter.detach().view(-1)[:2].fill_(float("nan")))
    says = rf"E406 training diverged at {key} 0\.005, after step {step} of 8: the values of {re.escape(name)} hold 2 of"
    with pytest.raises(UserError, match=says):
        train(model, rows_of(64), 1, replace(FAST, epochs=1), tmp_path, on_step, save_every=save_every)
    assert len(done) == step
    assert save_every is None or newest(tmp_path).name == f"checkpoint-{step - 1}"


def test_a_model_that_is_not_finite_is_told_before_training(tmp_path):
    model = tiny("bert", torch.float32)
    prepared(model, "lora", MODULES)
    with torch.no_grad():
        model.bert.embeddings.word_embeddings.weight[:, 0] = float("nan")
    with pytest.raises(UserError, match=r"E406 .* in step 1 of 48: .* Nothing was trained yet: use a model whose weights"):
        train(model, rows_of(64), 1, FAST, tmp_path)


@pytest.mark.parametrize(("case", "trainings"), [("bitfit", 1), ("diff_pruning", 2)])
def test_warm_up_leaves_a_training_of_one_step_a_rate(case, trainings, tmp_path):
    model = tiny("bert", torch.float32)
    prepared(model, case, MODULES)
    body = model.base_model
    before = body(**encoding()).last_hidden_state
    train(model, rows_of(8), 1, replace(FAST, epochs=trainings), tmp_path)
    assert not torch.equal(body.eval()(**encoding()).last_hidden_state, before)


@pytest.fixture(scope="module")
def two_processes(request, tmp_path_factory) -> Path:
    """The cases of the tests that are run, trained by two gloo processes with about half of each batch; a folder with one file
    a case."""
    asking = [item for item in request.session.items if "two_processes" in item.fixturenames]
    rows = [item.callspec.params if hasattr(item, "callspec") else {"case": MANY} for item in asking]
    cases = dict.fromkeys(row.get("case") or row["what"] for row in rows)
    out = tmp_path_factory.mktemp("gloo")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run([*command, "-m", "tests.compressor.training_parts", str(out), *cases], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


def test_one_batch_is_two_accumulated_is_two_processes(case, tmp_path, two_processes):
    """16 rows a step, in the last 1, in float64: whole, as 8 + 8 accumulated, as two processes (in the last one is idle)."""
    whole = one_process(case, tmp_path / "1", batch_size=16)
    halves = one_process(case, tmp_path / "2", batch_size=8, accumulate=2)
    spread = load_file(two_processes / f"{case}.safetensors")
    assert whole.keys() == halves.keys() == spread.keys()
    start = tiny("bert")
    prepared(start, case, MODULES, places=20)
    assert any(not torch.equal(tensor, changing(start)[name]) for name, tensor in whole.items())
    for name, tensor in whole.items():
        assert torch.allclose(tensor.double(), halves[name].double(), atol=1e-9), name
        assert torch.allclose(tensor.double(), spread[name].double(), atol=1e-9), name


def test_many_tasks_are_the_same_over_two_processes(tmp_path, two_processes):
    """All batches of a step are of one task, whichever process has them."""
    whole, spread = many_in_one_process(tmp_path, batch_size=16), load_file(two_processes / f"{MANY}.safetensors")
    assert whole.keys() == spread.keys()
    assert all(torch.allclose(tensor, spread[name], atol=1e-9) for name, tensor in whole.items())


@pytest.mark.parametrize("what", [TAUGHT, NUMBERS, SMOOTHED, TAGS, TEXTS, RESUMED, MANY_RESUMED])
def test_another_loss_is_the_same_over_two_processes(what, tmp_path, two_processes):
    """Learnt from a live dense model, or labels of every kind and a teacher's outputs: whole, as 8 + 8, as two processes."""
    whole, spread = OTHERS[what](tmp_path / "1", batch_size=16), load_file(two_processes / f"{what}.safetensors")
    halves = OTHERS[what](tmp_path / "2", batch_size=8, accumulate=2)
    assert whole.keys() == halves.keys() == spread.keys()
    for name, tensor in whole.items():
        assert torch.allclose(tensor, halves[name], atol=1e-9) and torch.allclose(tensor, spread[name], atol=1e-9), name


def test_a_second_gpu_does_not_multiply_the_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: getattr(self, "_n_gpu", 2) or 2))
    trainer = trainer_of(tiny("bert"), rows_of(16), 1, FAST, tmp_path)
    assert trainer.args.train_batch_size == FAST.batch_size


@pytest.mark.parametrize("case", ["sparse", *GROWING])
def test_optimizer_memory_is_that_of_the_places(case, tmp_path):
    """No dense gradient and no dense moment outlives a step: two scalars of state for each place (and its step)."""
    model = tiny("bert", torch.float32)
    prepared(model, "selective" if case == "sparse" else case, MODULES)
    trainer = trainer_of(model, rows_of(16), 1, Schedule(epochs=1, learning_rate=1e-3, batch_size=8), tmp_path)
    trainer.train()
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    held = sum(t.numel() for state in trainer.optimizer.state.values() for t in state.values() if torch.is_tensor(t))
    assert held <= 3 * trained + len(trainer.optimizer.state)
    assert all(parameter.grad is None for parameter in model.parameters() if not parameter.requires_grad)


def test_every_case_is_in_the_harness():
    assert {method for method, _ in CASES.values()} == set(__import__("compressor.methods", fromlist=["NAMES"]).NAMES)


def test_a_reparametrized_prefix_ends_as_a_plain_one(tmp_path):
    """What the network computed last, in as many scalars and bytes as a prefix that was trained itself."""
    computed = {}

    def look(note: str) -> None:
        computed.update({index: change.source.read("keys").detach().cpu() for index, change in enumerate(prefixes_of(model))})

    model = tiny("bert", torch.float32)
    prepared(model, "prefix-reparametrized")
    assert len({id(change.source.network) for change in prefixes_of(model)}) == 1, "one network for all blocks"
    train(model, rows_of(8), 1, Schedule(epochs=1, learning_rate=5e-3, batch_size=8), tmp_path / "1", look)
    plain = tiny("bert", torch.float32)
    prepared(plain, "prefix")
    assert {name: tensor.shape for name, tensor in model.state_dict().items()} == {
        name: tensor.shape for name, tensor in plain.state_dict().items()
    }
    for index, change in enumerate(prefixes_of(model)):  # on a GPU the network's sums are in another order
        torch.testing.assert_close(change.source.read("keys"), computed[index], rtol=1e-5, atol=1e-6)
    files = [tmp_path / "settled", tmp_path / "plain"]
    for path, one in zip(files, (model, plain), strict=True):
        delta_file.write(one, path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    assert files[0].stat().st_size == files[1].stat().st_size


def prefixes_of(model) -> list[Prefix]:
    return [module for module in model.modules() if isinstance(module, Prefix)]


def test_a_growth_ends_as_plain_sparse_links(tmp_path):
    model, _, _ = run("id3", tmp_path)
    links = [link for module in model.modules() for link in chain(module)]
    assert links and all(isinstance(link, Sparse) for link in links)
    assert sum(len(link.values) for link in links) == GROWING["id3"][1]["budget"]
    assert all((link.omega[1:] > link.omega[:-1]).all() for link in links)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOCAL_RANK", "0"),
        ("OMPI_COMM_WORLD_SIZE", "2"),
        ("ACCELERATE_DYNAMO_BACKEND", "AOT_EAGER"),
        ("ACCELERATE_USE_DEEPSPEED", "true"),
    ],
)
def test_variables_of_a_launcher_change_nothing_where_one_process_trains(name, value, tmp_path, monkeypatch):
    """As of torchrun with one process, of a shell under mpirun, or of `accelerate launch`: no group of processes, as many
    threads as before, and no compiler."""
    monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "compile", None)
    threads = []
    run("lora", tmp_path, lambda note: threads.append(torch.get_num_threads()), schedule=replace(FAST, epochs=1), rows=8)
    assert set(threads) == {torch.get_num_threads()} and not torch.distributed.is_initialized()
    assert os.environ[name] == value


@pytest.mark.parametrize("processes", [1, 2])
def test_a_training_sees_no_settings_of_accelerate(processes, monkeypatch):
    """Several processes find each other by the variables of their launcher."""
    names = {
        "WORLD_SIZE": processes,
        "RANK": 0,
        "LOCAL_RANK": 0,
        "MASTER_ADDR": "localhost",
        "ACCELERATE_DYNAMO_BACKEND": "EAGER",
    }
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    with divided_cores():
        seen = {*names} & {*os.environ}
    assert seen == ({"RANK", "MASTER_ADDR"} if processes == 1 else {*names} - {"ACCELERATE_DYNAMO_BACKEND"})
    assert {*names} <= {*os.environ}
