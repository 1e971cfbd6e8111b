"""Shared prototypes: exact masks, the straight-through gradient, one object for all blocks, and hybrid masks' truth tables."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from compressor.cost import LayerShape, ModelShape, shape_of
from compressor.deltas.sources import Masked, Prototype, Scores, kept_count, straight_through, top_mask
from compressor.methods import Options, trainable_counts
from compressor.methods import method as method_row
from compressor.storage.changes import pack, prototypes_of, unpack
from compressor.training.multitask import trained_parts
from compressor.training.trainer import settle
from tests.compressor.conftest import encoding, logits, prepared, tiny, tuned
from tests.compressor.training_parts import many

DOUBLE = torch.float64


@pytest.mark.parametrize(("size", "keep", "kept"), [(10, 0.3, 3), (7, 0.5, 4), (5, 1.0, 5), (8, 0.5, 4)])
def test_kept_counts_as_the_authors_count(size, keep, kept):
    """The size of a mask: n - int((1 - k) n); n=10, k=.3 -> 3; n=7, k=.5 -> 4."""
    assert kept_count(size, keep) == kept
    assert int(straight_through(torch.randn(size), keep).sum()) == kept


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 24), st.integers(0, 9), st.booleans())
def test_the_largest_are_kept_whatever_the_ties_and_the_layout(count, seed, transposed):
    """The released routine writes through flatten() and is wrong for a transposed view."""
    scores = torch.randint(0, 4, (4, 6), generator=torch.Generator().manual_seed(seed)).double()
    scores = scores.T if transposed else scores
    mask = top_mask(scores, count)
    best = torch.sort(scores.flatten(), descending=True, stable=True).indices[:count]
    expected = torch.zeros(24, dtype=torch.bool)
    expected[best] = True
    assert torch.equal(mask.flatten(), expected)


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation returns."""

    most = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.most = max([self.most, *(tensor.nbytes for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor))])
        return result


def test_a_mask_takes_a_byte_an_entry_where_few_scores_are_equal():
    """Of a whole model an index for every entry would be several times its weights."""
    scores = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    with Largest() as found:
        mask = top_mask(scores, 100)
    assert (int(mask.sum()), found.most) == (100, scores.nbytes)  # flatten() gives the scores themselves


def test_the_gradient_passes_straight_through():
    """dL/ds = dL/d(w·m) · w · sign(s), dL/dw = dL/d(w·m) · m, also by finite differences."""
    generator = torch.Generator().manual_seed(0)
    w, s, g = (torch.randn(6, 4, generator=generator, dtype=DOUBLE) for _ in range(3))
    w.requires_grad_(True)
    s.requires_grad_(True)
    mask = straight_through(s, 0.5)
    ((w * mask) * g).sum().backward()
    assert torch.allclose(s.grad, g * w.detach() * s.detach().sign())
    assert torch.allclose(w.grad, g * mask.detach())
    # with the threshold taken as the identity, L(s) = Σ g w |s|
    step = 1e-6
    for index in (0, 7, 23):
        nudge = torch.zeros(24, dtype=DOUBLE)
        nudge[index] = step
        nudge = nudge.view(6, 4)
        rise = (g * w * ((s + nudge).abs() - (s - nudge).abs())).sum() / (2 * step)
        assert torch.isclose(s.grad.flatten()[index], rise.detach(), rtol=1e-6)


def masked(task: bool, combine: str = "or", keep: float = 0.3) -> Masked:
    torch.manual_seed(5)
    prototype = Prototype("p", {"down": torch.randn(40, 50, dtype=DOUBLE), "down_bias": torch.randn(40, dtype=DOUBLE)})
    return Masked(prototype, Scores(prototype, keep), Scores(prototype, keep) if task else None, combine)


@pytest.mark.parametrize(
    ("combine", "table", "layer_gradient"),
    [
        ("or", lambda layer, task: layer | task, lambda layer, task: ~task),
        ("and", lambda layer, task: layer & task, lambda layer, task: task),
        ("add", lambda layer, task: layer.int() + task.int(), lambda layer, task: torch.ones_like(task)),
    ],
)
def test_hybrid_masks(combine, table, layer_gradient):
    """Truth tables, and whom the gradient reaches: under OR a mask that is on leaves the other none."""
    source = masked(True, combine)
    layer, task = source.layer.mask("down").bool(), source.task.mask("down").bool()
    mask = source.mask("down")
    assert torch.equal(mask, table(layer, task).to(DOUBLE))
    mask.sum().backward()
    expected = layer_gradient(layer, task).to(DOUBLE) * source.layer.down.detach().sign()
    assert torch.equal(source.layer.down.grad, expected)
    assert source.layer.down is not source.task.down, "the released code ties block 0's mask to the last task's"


def test_or_of_two_masks_of_three_tenths_is_about_half_dense():
    """1 - 0.7² = 0.51."""
    assert masked(True).mask("down").mean().item() == pytest.approx(0.51, abs=0.02)


def test_biases_are_never_masked_and_all_of_it_is_plain_sharing():
    source = masked(False, keep=1.0)
    assert torch.equal(source.read("down"), source.prototype.down)
    assert source.mask("down_bias") is None
    assert torch.equal(source.read("down_bias"), source.prototype.down_bias)


def read_cut_off(view: Masked, name: str) -> torch.Tensor:
    """What a block sees of its prototype, without a way back to it."""
    return Masked.read(view, name).detach()


def test_only_masks_and_random_masks():
    """ProPETL table 4: without sharing every block has its own tensors; a random mask keeps as many entries, and is fixed."""
    model = tiny("bert")
    prepared(model, "propetl-only-mask")
    assert len({id(prototype.down) for prototype in prototypes_of(model)}) == 3
    model = tiny("bert")
    prepared(model, "propetl-lora-random")
    views = [module for module in model.modules() if isinstance(module, Masked)]
    assert not any(isinstance(module, Scores) for module in model.modules())
    kept = [(view.mask(name).bool(), kept_count(view.size(name).numel(), 0.5)) for view in views for name in view.names]
    assert all(int(mask.sum()) == count for mask, count in kept)
    assert not torch.equal(views[0].mask("A"), views[2].mask("A")), "each block has its own"


@pytest.mark.parametrize("combine", ["or", "add"])
@pytest.mark.parametrize("shared", ["adapter", "lora", "prefix"])
def test_masks_that_hide_nothing_are_none(shared, combine):
    """ProPETL table 4, only share: neither blocks nor tasks have masks, and the prototypes alone are trained."""
    model, options = many(shared=shared, keep=1.0, combine=combine)
    views = [module for module in model.modules() if isinstance(module, Masked)]
    assert all(view.mask(name) is None and view.task is None for view in views for name in view.names)
    assert all(torch.equal(view.read(name), view.prototype.read(name)) for view in views for name in view.names)
    assert shape_of(model).mask_entries == 0 and trained_parts(model)["prototype"] == trainable_counts(model)["body"]
    trained = {id(parameter) for prototype in prototypes_of(model) for parameter in prototype.parameters()}
    body = {id(one) for one in model.base_model.parameters() if one.requires_grad}
    assert body == trained and method_row("propetl").count(shape_of(model), options, 0) == trainable_counts(model)["body"]


def test_a_reparametrized_prototype_is_stored_without_its_network():
    """ProPETL equations 12 and 13: the masks lie on the network's outputs, which alone are kept."""
    model = tuned(tiny("bert"), "propetl-prefix-reparametrized")
    before, (prototype,) = logits(model), prototypes_of(model)
    assert prototype.to_tensors()["keys"].shape == (2, 32) and sum(p.numel() for p in prototype.parameters()) > 512 * 64
    settle(model)
    (plain,) = prototypes_of(model)
    assert {name for name, _ in plain.named_parameters()} == {"keys", "values"} and torch.equal(logits(model), before)
    assert all(view.prototype is plain for view in model.modules() if isinstance(view, Masked))


@pytest.mark.parametrize("case", ["propetl", "propetl-lora", "propetl-prefix"])
def test_one_object_gets_the_gradients_of_all_blocks(case):
    """Its gradient is the sum of those that reach it through one block alone."""
    model = tiny("bert")
    prepared(model, case)
    assert len(prototypes_of(model)) == (2 if case == "propetl-lora" else 1), "query and value have one each"
    prototype = prototypes_of(model)[0]
    views = [module for module in model.modules() if isinstance(module, Masked) and module.prototype is prototype]
    assert len(views) == 3
    name = prototype.names[0]

    def gradient(blocks: set[int]) -> torch.Tensor:
        model.zero_grad()
        for number, view in enumerate(views):
            if number not in blocks:
                view.read = partial(read_cut_off, view)
        model(**encoding()).logits.square().sum().backward()
        for view in views:
            view.__dict__.pop("read", None)
        return getattr(prototype, name).grad.clone()

    if case == "propetl-lora":
        with torch.no_grad():
            prototype.B.normal_()
    whole = gradient({0, 1, 2})
    assert whole.abs().max() > 0
    assert torch.allclose(whole, sum(gradient({block}) for block in range(3)), atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 9))
def test_packed_masks_come_back_a_bit_an_entry(shape, seed):
    mask = torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) > 0.5
    packed = pack(mask)
    assert packed.dtype == torch.uint8 and len(packed) == -(-mask.numel() // 8)
    assert torch.equal(unpack(packed, tuple(shape)), mask)


BASE, LARGE = (ModelShape(hidden, (LayerShape(heads, 64, 4 * hidden),) * depth, 0, 0, 0) for hidden, heads, depth in (
    (768, 12, 12), (1024, 16, 24)))  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "method", "options", "places", "printed"),
    [
        (BASE, "dsee", Options(rank=16), 384, 589_824 + 384),  # DSEE table 1, BERT-base
        (BASE, "lora", Options(rank=8), 0, 294_912),
        (LARGE, "lora", Options(rank=4), 0, 393_216),  # table 4, GPT-2-medium
        (LARGE, "lora", Options(rank=8), 0, 786_432),  # table 5, RoBERTa-large
        (BASE, "adapter", Options(bottleneck=64), 0, 12 * (2 * 64 * 768 + 64 + 768)),  # ProPETL appendix B.2
        (BASE, "propetl", Options(bottleneck=64), 0, 2 * 64 * 768 + 64 + 768 + 12 * 2 * 64 * 768),
        (BASE, "propetl", Options(rank=32, shared="lora"), 0, 13 * 4 * 32 * 768),  # B.3: 4 bn d
        (BASE, "propetl", Options(length=64, shared="prefix"), 0, 13 * 2 * 64 * 768),  # B.4: 2 l d
        (
            BASE,
            "propetl",
            Options(rank=32, shared="lora", share=False),
            0,
            12 * 2 * 4 * 32 * 768,
        ),  # only mask: values and scores
        (BASE, "propetl", Options(rank=32, shared="lora", masks="random"), 0, 4 * 32 * 768),
        (BASE, "propetl", Options(bottleneck=88, keep=1.0), 0, 2 * 88 * 768 + 88 + 768),  # table 4, only share
    ],
)
def test_counts_that_the_papers_print(shape, method, options, places, printed):
    assert method_row(method).count(shape, options, places) == printed
