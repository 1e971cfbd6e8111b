"""The refit after pruning: one harness over all architectures, against sums that are computed another way."""

import copy

import pytest
import torch

from compressor.checkpoint import load, load_state, save_checkpoint, save_state
from compressor.deltas.factored import require_factorable
from compressor.deltas.kinds.refit import Refit
from compressor.deltas.links import Change, merge_all, merged_copy
from compressor.errors import UserError
from compressor.methods import Options, apply, set_trainable
from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.build import build
from compressor.models.modules import MODULES
from compressor.models.reference import resolve
from compressor.pruning import block_passes
from compressor.pruning.block_passes import outgoing_of, streams_of
from compressor.pruning.refit import Moments, announce, groups_of, refit, unfitted
from compressor.pruning.scores import changes_of
from compressor.pruning.surgery import Removal, kept_of, remove, silence
from compressor.pruning.weights import hide
from tests.compressor.conftest import TRIED, encoding, logits, plan_of, tiny, tuned
from tests.compressor.test_pruning import changed
from tests.tiny import write_model

BATCHES = [encoding(6, 11), encoding(3, 9)]


def refits(model) -> list[Refit]:
    return [module for module in model.modules() if isinstance(module, Refit)]


def pruned(architecture: str, plan: dict[int, Removal], *, masks: bool = False):
    """(the model before the removal, merged; the model after it with its chains)."""
    model = changed(tiny(architecture), masks=masks)
    dense = merged_copy(model)
    remove(model, plan)
    return dense, model


# --- every architecture ---


@pytest.mark.parametrize("masks", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "masked"])
def test_no_sublayer_gets_worse_and_the_model_gets_nearer(architecture, cut, masks):
    """Also where units are all gone, blocks are missing, and single weights are masked: these stay zero."""
    dense, model = pruned(architecture, cut, masks=masks)
    before, expected, changes = logits(model), logits(dense), changes_of(model)
    results = refit(dense, model, BATCHES)
    assert all(one.after <= one.before * (1 + 1e-9) for one in results)
    assert any(one.after < one.before / 2 for one in results)
    assert (logits(model) - expected).norm() < (before - expected).norm()
    for matrix in matrices_of(model, MODULES) if masks else ():
        assert not matrix.weight[~matrix.mask.keep].any()
    again = changes_of(model)
    assert again.keys() == changes.keys() and all(torch.equal(again[name], one) for name, one in changes.items())


def test_what_a_mask_hides_of_w_alone_is_not_fitted_again():
    """The output lacks exactly what is hidden: a free ΔW would be that."""
    model = tiny("bert")
    dense = merged_copy(model)
    matrices = [*matrices_of(model, ["output", "ffn_out"])]
    for number, matrix in enumerate(matrices):
        kept = torch.rand(matrix.weight.shape, generator=torch.Generator().manual_seed(number)) > 0.5
        hide(matrix, kept, "unstructured", "weight")
    results = refit(dense, model, BATCHES)
    assert any(one.after < one.before for one in results)
    for matrix in matrices:
        assert not matrix.weight[~matrix.weight_mask.keep].any() and matrix.weight[matrix.weight_mask.keep].any()


@pytest.mark.parametrize("ridge", [0.0, -1.0])
def test_a_ridge_is_positive(ridge):
    with pytest.raises(ValueError, match="ridge is"):
        refit(tiny("bert"), tiny("bert"), BATCHES, ridge=ridge)


def test_with_nothing_removed_nothing_changes(architecture):
    model = changed(tiny(architecture), masks=True)
    before = logits(model)
    results = refit(merged_copy(model), model, BATCHES)
    assert not refits(model) and torch.equal(logits(model), before)
    assert max(one.before for one in results) < 1e-18


def test_what_is_removed_later_is_what_is_masked(architecture):
    """The links of a refit shrink with their matrices; a second refit has its own, without which it is what it was."""
    dense, model = pruned(architecture, {0: Removal([1], [0, 5, 7]), 2: Removal(neurons=[3])})
    refit(dense, model, BATCHES)
    before = merged_copy(model)
    plan = {0: Removal(neurons=[2, 4]), 1: Removal([0], [1]), 2: Removal(neurons=list(range(19)))}
    masked = merged_copy(model)
    silence(masked, plan)
    remove(model, plan)
    assert (logits(model) - logits(masked)).abs().max() < 1e-12
    cut = logits(model)
    results = refit(before, model, BATCHES)
    assert groups_of(model) == {"refit-1", "refit-2"} and all(one.after <= one.before for one in results)
    assert torch.equal(logits(unfitted(model, {"refit-2"})), cut) and groups_of(model) == {"refit-1"}


def test_it_is_merged_and_reloaded_in_bits(architecture, tmp_path):
    """A state on its base, and the merged checkpoint, in float32."""
    base = write_model(tmp_path / "base", architecture)
    model = build(base, ["a", "b"], 0)
    tuned(model, "lora")
    dense = merged_copy(model)
    remove(model, {0: Removal([1], [0, 5]), 1: Removal(neurons=[3])})
    refit(dense, model, SMALL)
    assert refits(model)
    found = resolve(str(base))
    save_state(model, tmp_path / "state", base=str(base), base_sha256=found.sha256, label_names=["a", "b"])
    again = load_state(tmp_path / "state", base)
    assert answers(again).equal(answers(model)) and kept_of(again) == kept_of(model)
    assert not any(parameter.requires_grad for link in refits(again) for parameter in link.parameters())
    merged = merge_all(again)
    assert answers(merged).equal(answers(model))
    save_checkpoint(merged, tmp_path / "merged", base)
    assert answers(load(tmp_path / "merged")).equal(answers(model))


SMALL = [{key: torch.where(value > 3, 4 + value % 16, value) for key, value in inputs.items()} for inputs in BATCHES]
"""Of ids that the models on disk have; 3, at which T5 reads, stays."""


def answers(model) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**SMALL[1]).logits


def test_states_that_are_kept_change_nothing(architecture, monkeypatch):
    """Every pass from the embeddings gives the same bits."""
    results = []
    for most in (block_passes.MOST_KEPT, 0):
        monkeypatch.setattr(block_passes, "MOST_KEPT", most)
        dense, model = pruned(architecture, plan_of(architecture))
        refit(dense, model, BATCHES)
        results.append(logits(model))
    assert torch.equal(*results)
    assert not any("forward" in vars(layer.module) for one in (dense, model) for layer in layers_of(one))


@pytest.mark.parametrize("architecture", TRIED)
def test_the_stream_of_every_sublayer_is_found(architecture):
    """Post-norm: the sublayer's input; pre-norm: what runs by it."""
    model = tiny(architecture)
    for place, layer in enumerate(layers_of(model)):
        post = layer.blocks.ffn_norm is not None
        for structure, stream in streams_of(model, place, BATCHES[0]).items():
            assert stream == ("start" if structure == "heads" else "input" if post else "running"), (layer.path, structure)


def test_a_token_of_huge_states_hides_no_stream():
    """As the first token of many a pre-norm model: what the attention adds is small to it alone."""
    model = tiny("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[BATCHES[0]["input_ids"][0, 0], 0] = 1e5
    for place in range(len(layers_of(model))):
        assert streams_of(model, place, BATCHES[0]) == {"heads": "start", "neurons": "running"}


def test_a_weightless_model_gets_the_same_links(architecture):
    """Those of a plan: all that a refit may attach, also where a block went in between."""
    with torch.device("meta"):
        model = tiny(architecture)
    announce(model)
    found = len(refits(model))
    remove(model, {1: Removal(whole=True)})
    announce(model)
    first, second = ([link for link in refits(model) if link.group == f"refit-{number}"] for number in (1, 2))
    assert found > len(first) == len(second) and all(link.values.is_meta for link in refits(model))
    with pytest.raises(UserError, match="E644 a delta of kind 'refit'"):
        require_factorable(model)


# --- what it minimizes ---


def test_the_error_is_that_of_the_hidden_states():
    """BERT's last sublayer: x before the LayerNorm in both models, computed by whole passes, over real tokens alone."""
    dense, model = pruned("bert", {0: Removal([1], [0, 5, 7]), 2: Removal([0], [1])})
    results = refit(dense, model, BATCHES)
    error = power = 0.0
    for inputs in BATCHES:
        theirs, ours = (before_last_norm(one, inputs)[inputs["attention_mask"].bool()] for one in (dense, model))
        # the target is the dense sum less what the pruned model adds to: of both the pruned stream is taken off
        stream = ours - last_output(model, inputs)[inputs["attention_mask"].bool()]
        error, power = error + (theirs - ours).square().sum(), power + (theirs - stream).square().sum()
    assert results[-1].structure == "neurons" and results[-1].after == pytest.approx(float(error / power), rel=1e-9)


def before_last_norm(model, inputs) -> torch.Tensor:
    seen = []
    hook = layers_of(model)[-1].module.output.LayerNorm.register_forward_pre_hook(lambda norm, args: seen.append(args[0]))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0]


def last_output(model, inputs) -> torch.Tensor:
    seen = []
    hook = outgoing_of(layers_of(model)[-1], "neurons").register_forward_hook(lambda one, args, output: seen.append(output))
    with torch.no_grad():
        model(**inputs)
    hook.remove()
    return seen[0]


def summed(tokens: int = 40, bias: bool = True):
    generator = torch.Generator().manual_seed(0)
    x, target, output = (torch.randn(tokens, n, generator=generator, dtype=torch.float64) for n in (6, 3, 3))
    moments = Moments(6, 3, torch.device("cpu"))
    for start in range(0, tokens, 7):
        moments.add(x[start : start + 7] + 1, target[start : start + 7], output[start : start + 7])
    return x + 1, target - output, moments


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("masked", [0, 0.1, 0.4, 0.8])
def test_the_solution_is_that_of_the_augmented_least_squares(bias, masked):
    """Rows √λ I below X, whose penalty leaves out the bias; each output over its kept inputs."""
    x, lacking, moments = summed()
    keep = torch.rand(3, 6, generator=torch.Generator().manual_seed(1)) >= masked
    change, offset = moments.solve(0.1, bias=bias, keep=keep if masked else None)
    penalty = 0.1 * x.square().sum(0).mean()
    for row, kept in enumerate(keep):
        left = torch.cat([x[:, kept], penalty.sqrt() * torch.eye(int(kept.sum()), dtype=torch.float64)])
        ones = torch.cat([torch.ones(len(x), 1), torch.zeros(len(left) - len(x), 1)]).double()
        right = torch.cat([lacking[:, row], torch.zeros(len(left) - len(x), dtype=torch.float64)])
        expected = torch.linalg.lstsq(torch.cat([left, ones], 1) if bias else left, right).solution
        assert torch.allclose(change[row, kept], expected[: int(kept.sum())], atol=1e-10) and not change[row, ~kept].any()
        assert torch.allclose(offset[row], expected[-1] if bias else torch.zeros(()).double(), atol=1e-10)
    error = (lacking - x @ change.T - offset).square().sum()
    assert torch.allclose(moments.error_with(change, offset), error, rtol=1e-10)


@pytest.mark.parametrize(("hidden", "sizes"), [(2, [10, 2, 2, 2]), (5, [5, 5, 5]), (8, [2, 2, 2])])
def test_an_output_costs_what_it_keeps_or_what_is_hidden(monkeypatch, hidden, sizes):
    """Whichever is less: an eighth of the time where one is half as much."""
    factorized, cholesky = [], torch.linalg.cholesky
    monkeypatch.setattr(torch.linalg, "cholesky", lambda matrix: (factorized.append(len(matrix)), cholesky(matrix))[1])
    moments = Moments(10, 3, torch.device("cpu"))
    moments.add(*(torch.rand(40, n) for n in (10, 3, 3)))
    keep = torch.stack([torch.randperm(10) >= hidden for _ in range(3)])
    change, _ = moments.solve(0.1, bias=True, keep=keep)
    assert sorted(factorized) == sorted(sizes) and torch.equal(change != 0, keep)


def test_inputs_that_are_all_zero_leave_the_matrix():
    moments = Moments(4, 2, torch.device("cpu"))
    moments.add(torch.zeros(5, 4), torch.ones(5, 2), torch.zeros(5, 2))
    change, offset = moments.solve(0.1, bias=True)
    assert not change.any() and torch.equal(offset, torch.ones(2, dtype=torch.float64))


def test_hidden_states_that_are_not_finite_are_refused():
    dense, model = pruned("bert", {0: Removal([1])})
    with torch.no_grad():
        layers_of(dense)[0].linear("output").bias[0] = torch.inf
    with pytest.raises(UserError, match="E521"):
        refit(dense, model, BATCHES)
    assert not any("forward" in vars(layer.module) for layer in layers_of(dense))


# --- trainings after it ---


def test_a_later_training_leaves_it_frozen():
    """`same` trains the deltas, another method its own; full tuning takes it into the weights."""
    dense, model = pruned("bert", {0: Removal([1], [0])})
    refit(dense, model, BATCHES)
    set_trainable(model, base=False, groups={module.group for module in model.modules() if isinstance(module, Change)})
    assert refits(model) and not any(link.values.requires_grad for link in refits(model))
    apply(model, "lora", Options(rank=2, modules=("output",), group="9"))
    assert not any(link.values.requires_grad for link in refits(model))


def test_a_copy_refits_alike():
    """No randomness, and the model before is left alone."""
    dense, model = pruned("gpt2", {0: Removal([1], [0, 3])})
    other, bits = copy.deepcopy(model), {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    assert refit(dense, model, BATCHES) == refit(dense, other, BATCHES)
    assert torch.equal(logits(model), logits(other))
    assert all(torch.equal(tensor, bits[name]) for name, tensor in dense.state_dict().items())
