"""Many tasks on one base (ProPETL section 3.4): who is drawn, what is tied to what, and what lies on disk."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import compressor
from compressor.compression import Tasks, compression_of
from compressor.cost import shape_of
from compressor.deltas.sources import FixedMasks, Masked
from compressor.methods import Options, apply, trainable_counts
from compressor.methods import method as method_row
from compressor.storage import delta_file
from compressor.storage.bits import StoredBits
from compressor.storage.changes import prototypes_of
from compressor.storage.delta_comparison import compare_deltas
from compressor.storage.delta_file import HEADER_LIMIT, header_size
from compressor.storage.live import remember
from compressor.storage.task_files import SHARED, write_tasks
from compressor.training.moved_weights import as_deltas, trained_weights
from compressor.training.multitask import TaskSampler, TaskScores, join_heads, probabilities, trained_parts
from compressor.training.schedule import Schedule
from compressor.training.trainer import train
from tests.compressor import papers_bits
from tests.compressor.conftest import APPLIES, OPTIONS, encoding, logits, tiny
from tests.compressor.delta_parts import bits_of, refused
from tests.compressor.training_parts import CLASSES, many, many_in_one_process, mixture

LABELS = {name: [f"{name}{number}" for number in range(count)] for name, count in CLASSES.items()}
KINDS = {"propetl": "adapter", "propetl-lora": "lora", "propetl-prefix": "prefix"}
PAIRS = [(KINDS[case], architecture) for case, architecture in APPLIES if case in KINDS]


def moved(architecture: str = "bert", dtype: torch.dtype = torch.float32, **kind):
    """The same, its parameters away from the start."""
    model, _ = many(architecture, dtype, **kind)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.1)
    return model


def of_task(model, task: int) -> torch.Tensor:
    with torch.no_grad():
        return model(**encoding(), task=task).logits


# --- who is drawn ---

GLUE = {"rte": 2490, "mrpc": 3668, "stsb": 5749, "cola": 8551, "sst2": 67349, "qnli": 104743, "qqp": 363846, "mnli": 392702}


def test_probabilities_at_temperature_ten():
    """Shares of the sampled tasks: rte .096 mrpc .100 stsb .105 cola .109 sst2 .134 qnli .140 qqp .158 mnli .159."""
    printed = [0.096, 0.100, 0.105, 0.109, 0.134, 0.140, 0.158, 0.159]
    assert probabilities(list(GLUE.values()), 10.0) == pytest.approx(printed, abs=6e-4)  # stsb is .1045


def test_probabilities_at_the_ends():
    """T = 1 is by size, T -> ∞ uniform (the released docstring calls 0 "by size"; it divides by zero)."""
    sizes = list(GLUE.values())
    assert probabilities(sizes, 1.0) == pytest.approx(np.array(sizes) / sum(sizes))
    assert probabilities(sizes, 1e9) == pytest.approx(np.full(8, 1 / 8))
    assert probabilities(sizes, 1e-4)[-1] == 1, "the largest alone, without an underflow"
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="not positive"):
            probabilities(sizes, temperature)


@pytest.mark.parametrize("temperature", [1.0, 10.0])
def test_frequencies_follow_the_closed_form(temperature):
    """χ² of 40,000 draws over eight tasks: 24.3 is the 0.1 % point of 7 degrees of freedom."""
    sampler = TaskSampler(list(GLUE.values()), temperature, batch=128, seed=3)
    expected = 40_000 * probabilities(sampler.sizes, temperature)
    drawn = np.bincount(sampler.tasks(40_000), minlength=8)
    assert ((drawn - expected) ** 2 / expected).sum() < 24.3


@settings(deadline=None)  # a busy machine
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.integers(1, 9), st.integers(0, 3))
def test_every_step_is_of_one_task_and_every_row_comes_before_any_comes_again(sizes, batch, seed):
    sampler = TaskSampler(sizes, 10.0, batch, seed)
    rows = list(itertools.chain.from_iterable(epoch_of(sampler, epoch) for epoch in range(4)))
    assert len(rows) == 4 * len(sampler) == 4 * batch * -(-sum(sizes) // batch)
    ends = np.cumsum(sizes)
    tasks = np.searchsorted(ends, rows, side="right")
    assert np.array_equal(tasks, np.repeat(sampler.tasks(4 * sampler.steps), batch))
    for task, size in enumerate(sizes):
        own = [row for row, one in zip(rows, tasks, strict=True) if one == task]
        for start in range(0, len(own), size):
            assert len(set(own[start : start + size])) == len(own[start : start + size])


def epoch_of(sampler: TaskSampler, epoch: int) -> list[int]:
    sampler.set_epoch(epoch)
    return list(sampler)


def test_the_order_follows_from_seed_and_step_alone():
    first, again = (TaskSampler([7, 30], 10.0, 4, seed=1) for _ in range(2))
    whole = [epoch_of(first, epoch) for epoch in range(3)]
    torch.manual_seed(9)
    np.random.seed(9)
    assert [epoch_of(again, epoch) for epoch in (2, 0, 1)] == [whole[2], whole[0], whole[1]]
    assert epoch_of(TaskSampler([7, 30], 10.0, 4, seed=2), 0) != whole[0]
    assert sorted(whole[0]) != whole[0], "shuffled"


# --- the model ---


@pytest.mark.parametrize(("shared", "architecture"), PAIRS)
def test_trained_scalars_are_the_closed_form(shared, architecture):
    """n + n'(L + T), L blocks of encoder and decoder: T5 has 2L, and one prototype for both."""
    model, options = many(architecture, shared=shared)
    counts, parts, head = trainable_counts(model), trained_parts(model), compression_of(model).head_parameters
    assert counts["body"] == method_row("propetl").count(shape_of(model), options, 0) == sum(parts.values())
    assert counts["head"] == sum(model.get_parameter(name).numel() for name in head)
    masked = sum(p.read(name).numel() for p in prototypes_of(model) for name in p.names if p.read(name).dim() > 1)
    blocks = 6 if architecture.startswith("t5") else 3
    assert len(prototypes_of(model)) == (2 if shared == "lora" else 1)
    assert parts["task_scores"] == 2 * masked and parts["layer_scores"] == blocks * masked


@pytest.mark.parametrize(("shared", "architecture"), [("adapter", "bert"), ("lora", "t5"), ("prefix", "gpt2")])
def test_no_tensor_is_a_layer_mask_and_a_task_mask(shared, architecture):
    """The released code of ProPETL ties the layer mask of encoder block 0 to the last task's mask, and orphans others."""
    model, _ = many(architecture, shared=shared)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    views = [module for module in model.modules() if isinstance(module, Masked)]
    for name, here in itertools.groupby(sorted(views, key=lambda one: one.prototype.name), lambda one: one.prototype.name):
        here = list(here)
        layers = [{id(p) for p in view.layer.parameters()} for view in here]
        tasks = [{id(p) for p in scores.parameters()} for scores in here[0].task.each]
        assert len({id(view.task) for view in here}) == 1, f"{name}: task scores are tied over the blocks"
        assert len({id(view.prototype) for view in here}) == 1
        for one, other in itertools.combinations([*layers, *tasks], 2):
            assert not one & other
        assert set.union(*layers, *tasks) <= trained


def test_a_batch_of_one_task_reaches_what_is_shared_and_its_own():
    """And no other task's mask or head, which therefore do not move: no gradient, no momentum, no decay."""
    model, _ = many(keep=0.3)
    model(**encoding(), task=1).logits.square().sum().backward()
    task = prototype_views(model)[0].task
    assert all(p.grad is None for p in task.each[0].parameters()) and all(p.grad is not None for p in task.each[1].parameters())
    heads = compression_of(model).tasks.heads["classifier"].each
    assert heads[0].weight.grad is None and heads[1].weight.grad.abs().sum() > 0
    assert all(p.grad is not None for view in prototype_views(model) for p in view.layer.parameters())


def prototype_views(model) -> list[Masked]:
    return [module for module in model.modules() if isinstance(module, Masked)]


def test_under_or_a_task_score_learns_only_where_a_layer_mask_is_off():
    """dL/dm_t = Σ_l g_l (1 - m_l), summed over the blocks that the task's scores are tied over."""
    model, _ = many(keep=0.3)
    views = prototype_views(model)
    weights = [torch.randn_like(view.prototype.down) for view in views]
    sum((view.mask("down") * weight).sum() for view, weight in zip(views, weights, strict=True)).backward()
    scores = views[0].task.each[0].down
    off = [1 - view.layer.mask("down").detach() for view in views]
    expected = sum(weight * free for weight, free in zip(weights, off, strict=True)) * scores.detach().sign()
    assert torch.allclose(scores.grad, expected)


def test_each_task_has_its_head_and_computes_as_if_alone():
    """One model, three and two classes: what a task computes is what a model with its masks alone does."""
    model = moved(dtype=torch.float64)
    assert [of_task(model, number).shape[1] for number in (0, 1, 0)] == [3, 2, 3]
    compression_of(model).tasks.choose("b")
    assert torch.equal(logits(model), of_task(model, 1))


# --- training ---


FAST = Schedule(epochs=3, learning_rate=5e-3, batch_size=8, seed=4)


def run(work, on_step=lambda note: None, **arguments):
    model, _ = many(dtype=torch.float32)
    return model, train(model, mixture(), 1, FAST, work, on_step, **arguments)


class Cut(Exception):
    pass


def test_training_learns_repeats_and_goes_on_after_a_cut(tmp_path):
    """Two runs with one seed give equal bits; so does one that stopped at step 19 of 36, in the middle of an epoch."""
    (whole, losses), (again, _) = run(tmp_path / "1"), run(tmp_path / "2")
    assert losses[-1]["loss"] < losses[0]["loss"]
    seen = []

    def stop(note: str) -> None:
        seen.append(note)
        if len(seen) == 19:
            raise Cut

    with pytest.raises(Cut):
        run(tmp_path / "cut", stop, save_every=0.0)
    torch.manual_seed(77)
    steps = []
    resumed, same = run(tmp_path / "cut", steps.append)
    assert steps.count("resumed") == 18 and len(steps) == 36 == FAST.steps(90)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]) and torch.equal(tensor, resumed.state_dict()[name])
    assert same == losses


def test_a_step_is_of_one_task_also_where_it_is_accumulated(tmp_path, monkeypatch):
    """16 rows a step: whole, and as 8 + 8; the tasks are those of the sampler, batch by batch."""
    seen = []
    monkeypatch.setattr(
        Tasks, "active", property(lambda tasks: seen[-1], lambda tasks, number: seen.append(number)), raising=False
    )
    drawn = TaskSampler([60, 30], 10.0, 16, seed=5).tasks(12).tolist()
    whole = many_in_one_process(tmp_path / "1", batch_size=16)
    assert set(drawn) == {0, 1} and seen[1:] == drawn  # behind the first, which every model begins with
    seen.clear()
    halves = many_in_one_process(tmp_path / "2", batch_size=8, accumulate=2)
    assert seen[1:] == [task for task in drawn for _ in range(2)]
    assert all(torch.allclose(tensor, halves[name], atol=1e-9) for name, tensor in whole.items())


# --- on disk ---


def written(model, folder, sha256="0"):
    return write_tasks(model, folder, base="here", base_sha256=sha256, label_names=LABELS)


@pytest.mark.parametrize(
    ("shared", "architecture", "combine"),
    [(*pair, "or") for pair in PAIRS] + [(shared, "bert", combine) for shared in KINDS.values() for combine in ("and", "add")],
)
def test_a_task_comes_back_bit_equal(shared, architecture, combine, tmp_path):
    """From base, shared file and task file; `add` has mask values of 0, 1 and 2, kept as the two masks that they are."""
    model = moved(architecture, shared=shared, keep=0.3, combine=combine)
    paths, live = written(model, tmp_path), remember(tiny(architecture, torch.float32), "here", "0")
    for number, name in ((0, "a"), (1, "b"), (0, "a")):
        assert compressor.load(live, delta=paths[name]) is live
        assert torch.equal(logits(live), of_task(model, number))
    assert list(live.config.id2label.values()) == LABELS["a"]
    # a self-contained file of one task, by the ordinary way
    delta_file.write(live, tmp_path / "alone", base="here", base_sha256="0", label_names=LABELS["a"])
    (tmp_path / SHARED).unlink()
    assert torch.equal(logits(compressor.load(live, delta=tmp_path / "alone")), of_task(model, 0))


@pytest.mark.parametrize("ones", [False, True])
def test_tasks_that_share_a_prototype_alone_come_back_bit_equal(ones, tmp_path):
    """Of `keep: 1`, without masks; and as earlier versions wrote it, with masks of ones, which `add` joins to twos."""
    model = moved(keep=1.0, combine="add")
    if ones:
        drawn, tasks = partial(FixedMasks.drawn, prototypes_of(model)[0], 1.0), compression_of(model).tasks
        of_tasks = TaskScores(tasks, [drawn() for _ in tasks.names])
        for view in prototype_views(model):
            view.layer, view.task = drawn(), of_tasks
            assert view.mask("down").eq(2).all()
    paths, live = written(model, tmp_path), remember(tiny("bert", torch.float32), "here", "0")
    assert bool(delta_file.stored(delta_file.read(paths["a"])).mask_entries) == ones
    for number, name in enumerate(LABELS):
        assert torch.equal(logits(compressor.load(live, delta=paths[name])), of_task(model, number))


@pytest.mark.parametrize(("method", "architecture"), [("adapter", "bert"), ("full", "bert"), ("full", "t5")])
def test_tasks_that_share_all_but_their_heads(method, architecture, tmp_path):
    """The baselines of ProPETL table 2: one set of adapters, or a fully tuned model, for all tasks. T5 ties its embeddings."""
    model, options = many(architecture, torch.float32, method)
    assert trainable_counts(model)["body"] == method_row(method).count(shape_of(model), options, 0) and not trained_parts(model)
    before = trained_weights(model) if method == "full" else {}
    train(model, mixture(), 1, FAST, tmp_path / "work")
    expected = [of_task(model, number) for number in range(2)]
    if method == "full":
        as_deltas(model, before, options.group)
    paths, live = written(model, tmp_path), remember(tiny(architecture, torch.float32), "here", "0")
    start = logits(live)
    for number, name in ((0, "a"), (1, "b"), (0, "a")):
        found = logits(compressor.load(live, delta=paths[name]))
        assert found.shape == expected[number].shape
        assert torch.allclose(found, expected[number], atol=1e-5) and torch.equal(found, of_task(model, number))
    assert not torch.allclose(expected[0], start, atol=1e-3)
    assert delta_file.stored(delta_file.read(paths["a"])).scalars == 0, "only its head"


def test_switching_does_not_touch_the_base(tmp_path):
    paths, live = written(moved(), tmp_path), remember(tiny("bert", torch.float32), "here", "0")
    before = {name: (parameter.data_ptr(), parameter.clone()) for name, parameter in live.base_model.named_parameters()}
    for name in "abab":
        compressor.load(live, delta=paths[name])
    now = {name: parameter for name, parameter in live.base_model.named_parameters() if ".inserts." not in name}
    assert now.keys() == before.keys()
    assert all(p.data_ptr() == before[name][0] and torch.equal(p, before[name][1]) for name, p in now.items())


def deep_t5(hidden: int, count: int, bottleneck: int):
    """T5's 12 + 12 blocks, so many tasks of two classes."""

    def one(blocks: int):
        sizes = {"vocab_size": 40, "d_model": hidden, "d_kv": 8, "num_heads": 2, "d_ff": 8}
        config = AutoConfig.for_model("t5", **sizes, num_layers=blocks, num_decoder_layers=blocks)
        model = AutoModelForSequenceClassification.from_config(config)
        compression_of(model).head_parameters = frozenset(
            n for n, _ in model.named_parameters() if not n.startswith("transformer.")
        )
        return model

    model = join_heads((f"task{number}", one(1 if number else 12)) for number in range(count))  # of the others the heads alone
    apply(model, "propetl", Options(bottleneck=bottleneck, keep=0.3, group="1", tasks=count))
    return model


def test_eight_tasks_cost_on_disk_what_the_formula_says(tmp_path):
    """ProPETL table 2: 24 layer masks and 8 task masks over one prototype, .01107 % and .00108 % a task of T5-base at bn 64 and
    bn 6. The files of a small T5 of this shape hold exactly that formula's bits, beside heads and headers.
    """
    t5_base = 222_900_000
    assert 100 * papers_bits.shared_adapter(768, 64, 24 + 8).share(t5_base) / 8 == pytest.approx(0.01107, abs=5e-6)
    assert 100 * papers_bits.shared_adapter(768, 6, 24 + 8).share(t5_base) / 8 == pytest.approx(0.00108, abs=5e-6)
    hidden, bottleneck, count = 20, 3, 8
    model = deep_t5(hidden, count, bottleneck)
    labels = {name: ["no", "yes"] for name in compression_of(model).tasks.names}
    paths = write_tasks(model, tmp_path, base="here", base_sha256="f" * 64, label_names=labels)
    head = 4 * (hidden * hidden + hidden + 2 * hidden + 2)
    total = StoredBits()
    for path in (tmp_path / SHARED, *paths.values()):
        held, header = delta_file.stored(delta_file.read(path)), header_size(path.read_bytes())
        assert header <= HEADER_LIMIT
        assert path.stat().st_size == header + held.bytes + (0 if path.name == SHARED else head)
        total += held
    assert total == papers_bits.shared_adapter(hidden, bottleneck, 24 + count)
    assert len(list(tmp_path.iterdir())) == 1 + count


def test_equal_work_gives_equal_bytes(tmp_path):
    for folder in ("1", "2"):
        written(moved(), tmp_path / folder)
    for path in sorted((tmp_path / "1").iterdir()):
        assert path.read_bytes() == (tmp_path / "2" / path.name).read_bytes()


def test_the_shared_file_must_be_there_and_be_the_one(tmp_path):
    model, live = moved(), remember(tiny("bert", torch.float32), "here", "0")
    paths, before = written(model, tmp_path / "x"), logits(live)
    own, bare = (tmp_path / "x" / SHARED).read_bytes(), bits_of(live)
    with torch.no_grad():
        prototypes_of(model)[0].down.add_(1)
    other = written(model, tmp_path / "y")
    (tmp_path / "x" / SHARED).write_bytes((tmp_path / "y" / SHARED).read_bytes())
    assert "of another training" in refused("E316", compressor.load, live, delta=paths["a"])
    (tmp_path / "x" / SHARED).unlink()
    assert "is not beside it" in refused("E316", compressor.load, live, delta=paths["a"])
    assert "not one of the tasks" in refused("E316", compressor.load, live, delta=tmp_path / "y" / SHARED)
    (tmp_path / "x" / SHARED).write_bytes(own[:-1] + bytes([own[-1] ^ 1]))
    refused("E310", compressor.load, live, delta=paths["a"])
    assert all(torch.equal(tensor, bare[name]) for name, tensor in bits_of(live).items()) and torch.equal(logits(live), before)
    refused("E306", compressor.load, remember(tiny("bert", torch.float32), "here", "1"), delta=other["a"])


def test_what_tasks_that_generate_share_is_none_of_them(tmp_path):
    """None of their files has labels: the shared one names the tasks; of an earlier version it is told by its own name."""

    def decoder():
        return tiny("gpt2", torch.float32, auto=AutoModelForCausalLM)

    model, live = join_heads((name, decoder()) for name in "ab"), remember(decoder(), "here", "0")
    apply(model, "lora", OPTIONS)
    paths = write_tasks(model, tmp_path, base="here", base_sha256="0", label_names={"a": [], "b": []})
    assert torch.equal(logits(compressor.load(live, delta=paths["a"])), logits(model))
    shared = delta_file.read(tmp_path / SHARED)
    assert shared.tasks == ["a", "b"] and not delta_file.read(paths["a"]).tasks
    (tmp_path / "x.safetensors").write_bytes((tmp_path / SHARED).read_bytes())
    facts = {"base": "here", "base_sha256": "0", "labels": [], "auto_class": shared.auto_class}
    (tmp_path / "earlier").mkdir()
    delta_file.save(tmp_path / "earlier" / SHARED, facts, shared.changes, shared.tensors, None)
    for path in (tmp_path / SHARED, tmp_path / "x.safetensors", tmp_path / "earlier" / SHARED):
        assert "not one of the tasks" in refused("E316", compressor.load, live, delta=path)


def test_two_tasks_of_one_training_compare_by_their_joined_masks(tmp_path):
    model = moved(keep=0.3)
    rows = compare_deltas(*(delta_file.read(path) for path in written(model, tmp_path).values()))
    view, masks = prototype_views(model)[0], []
    for name in CLASSES:
        compression_of(model).tasks.choose(name)
        masks.append(torch.cat([view.mask(part).flatten() for part in ("down", "up")]).bool())
    assert len(rows) == 3
    assert rows[0].jaccard == pytest.approx(float((masks[0] & masks[1]).sum() / (masks[0] | masks[1]).sum()))
