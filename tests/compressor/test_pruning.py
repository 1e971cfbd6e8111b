"""One harness: every architecture x random removals; masked and removed must be the same function."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.anatomy import layers_of, row_of
from compressor.checkpoint import load, save_checkpoint
from compressor.cost import shape_of
from compressor.deltas import LowRank, Sparse, merge_all, merged_copy
from compressor.errors import UserError
from compressor.pruning.scores import changes_of, lowest, random_scores, taylor_scores, weight_scores
from compressor.pruning.surgery import Removal, kept_of, remove, restore_kept, silence
from compressor.sources import Own
from tests.compressor.conftest import HEADS, LAYERS, NEURONS, encoding, tiny, tuned

some_heads = st.sets(st.integers(0, HEADS - 1), max_size=HEADS - 1).map(sorted)
some_neurons = st.sets(st.integers(0, NEURONS - 1), max_size=NEURONS - 1).map(sorted)
plans = st.dictionaries(st.integers(0, LAYERS - 1), st.builds(Removal, some_heads, some_neurons), min_size=1)
harness = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(**encoding()).logits


def assert_removed_is_masked(architecture: str, plan: dict[int, Removal]) -> None:
    """float64, deltas attached, unequal per layer, odd widths: equal to 1e-12; the widths are what was asked."""
    model = tuned(tiny(architecture), "dsee", ("query", "value", "output", "ffn_in", "ffn_out"))
    masked = merged_copy(model)
    silence(masked, plan)
    remove(model, plan)
    assert (logits(model) - logits(masked)).abs().max() < 1e-12
    for number, layer in enumerate(layers_of(model)):
        gone = plan.get(number, Removal())
        assert (layer.heads, layer.neurons) == (HEADS - len(gone.heads), NEURONS - len(gone.neurons))
    assert shape_of(model).parameters == sum(p.numel() for p in merge_all(model).parameters())


@harness
@given(plan=plans)
def test_removed_is_masked(architecture, plan):
    assert_removed_is_masked(architecture, plan)


@pytest.mark.slow
@settings(harness, max_examples=200)
@given(plan=plans)
def test_removed_is_masked_over_many_plans(architecture, plan):
    assert_removed_is_masked(architecture, plan)


@harness
@given(first=plans, second=st.dictionaries(st.integers(0, LAYERS - 1), st.builds(Removal, st.just([0])), min_size=1))
def test_two_removals_restore_from_original_indices(architecture, first, second):
    """What `kept_of` records after two removals rebuilds the same model from the base in one cut."""
    model, again = tiny(architecture), tiny(architecture)
    remove(model, first)
    second = {n: r for n, r in second.items() if layers_of(model)[n].heads > 1}
    remove(model, second)
    restore_kept(again, kept_of(model))
    assert kept_of(again) == kept_of(model)
    assert torch.equal(logits(again), logits(model))


def test_pruned_checkpoint_reloads_bit_equal_and_stock_loading_fails(architecture, tmp_path):
    """Strict, no pickle; a stock from_pretrained of the folder raises instead of loading something else."""
    model = tiny(architecture, torch.float32)
    remove(model, {0: Removal([1, 3], [0, 5, 7]), 2: Removal([0], list(range(11)))})
    save_checkpoint(model, tmp_path, tmp_path)
    again = load(tmp_path)
    expected = model.state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(logits(again), logits(model))
    written = json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    assert written["0"] == {"num_attention_heads": 2, "intermediate_size": NEURONS - 3}
    assert not list(tmp_path.glob("*.bin")) + list(tmp_path.glob("*.pt"))
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        type(model).from_pretrained(tmp_path)


def test_uniformly_pruned_checkpoint_fails_in_stock_loading_too(tmp_path):
    """The same count in every layer, so nothing is unequal: the config must still not read as a dense one."""
    model = tiny("bert", torch.float32)
    remove(model, {layer: Removal([], [0]) for layer in range(LAYERS)})
    save_checkpoint(model, tmp_path, tmp_path)
    with pytest.raises(RuntimeError, match="per-layer attribute"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "shape", "config"])
def test_damaged_checkpoint_is_refused(damage, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny("bert", torch.float32)
    remove(model, {0: Removal([1], [])})
    save_checkpoint(model, tmp_path, tmp_path)
    path, tensors = tmp_path / "model.safetensors", load_file(tmp_path / "model.safetensors")
    name = "bert.encoder.layer.0.attention.self.query.weight"
    if damage == "missing":
        del tensors[name]
    if damage == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    if damage == "config":
        config = json.loads((tmp_path / "config.json").read_text())
        config.pop("per_layer_config")
        (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path)
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert caught.value.code == "E305" and "\n" not in str(caught.value)


def test_removing_everything_is_refused(architecture):
    model = tiny(architecture)
    before = logits(model)
    with pytest.raises(UserError, match="E501"):
        remove(model, {1: Removal(list(range(HEADS)), [])})
    assert torch.equal(logits(model), before)


def test_head_scores_are_the_sum_over_the_heads_rows(architecture):
    """DSEE section 3.4: Σ|ΔW_q| + Σ|ΔW_v| over a head's rows."""
    model = tuned(tiny(architecture), "dsee", ("query", "value"))
    changes = changes_of(model)
    scores = weight_scores(model, "heads", "delta", changes)
    layer = layers_of(model)[1]
    by_hand = sum(changes[layer.linear_path(name)][8:16].abs().sum() for name in ("query", "value"))
    assert torch.isclose(scores[1][1], by_hand)


def test_neuron_scores_take_rows_and_columns():
    model = tuned(tiny("bert"), "lora", ("ffn_in", "ffn_out"))
    layer, number = layers_of(model)[0], 7
    for criterion, weight in (
        ("weight", lambda linear: linear.parametrizations.weight.original),
        ("weight_plus_delta", lambda linear: linear.weight),
    ):
        score = weight_scores(model, "neurons", criterion, changes_of(model))[0][number]
        into, out = weight(layer.linear("ffn_in")), weight(layer.linear("ffn_out"))
        assert torch.isclose(score, into[number].abs().sum() + out[:, number].abs().sum())


def test_delta_without_a_delta_is_refused():
    model = tuned(tiny("bert"), "lora", ("query",))
    with pytest.raises(UserError, match="E502"):
        weight_scores(model, "neurons", "delta", changes_of(model))


def test_after_full_tuning_the_delta_is_the_distance_from_the_base():
    base, model = tiny("bert"), tiny("bert")
    with torch.no_grad():
        layers_of(model)[0].linear("value").weight[3] += 1.0
    changes = changes_of(model, base)
    assert list(changes) == [layers_of(model)[0].linear_path("value")]
    assert torch.allclose(changes[layers_of(model)[0].linear_path("value")][3], torch.ones(32, dtype=torch.float64))


@pytest.mark.parametrize("structure", ["heads", "neurons"])
def test_taylor_is_the_first_order_change_of_the_loss(architecture, structure):
    """Against finite differences: shrink one structure's outgoing columns by ε, one row at a time."""
    model = tuned(tiny(architecture), "lora")
    batch, labels = encoding(), torch.tensor([0, 2, 1])
    scores = taylor_scores(model, structure, [(batch, labels)])
    merged, number, place, step = merged_copy(model), 1, 2, 1e-5
    layer = layers_of(merged)[number]
    linear, size = (layer.linear("output"), 8) if structure == "heads" else (layer.linear("ffn_out"), 1)

    def losses():
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(merged(**batch).logits, labels, reduction="none")

    before = losses()
    with torch.no_grad():
        linear.weight[:, place * size : (place + 1) * size] *= 1 - step
    expected = ((before - losses()) / step).abs().sum()
    assert torch.isclose(scores[number][place].double(), expected, rtol=1e-3)


def test_lowest_breaks_ties_by_index():
    assert lowest([torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0])], [2]) == [[1, 2]]


def test_random_scores_repeat():
    model = tiny("bert")
    first, second = random_scores(model, "heads", 7), random_scores(model, "heads", 7)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_links_shrink_to_the_right_places():
    """A cut link is the cut of the dense ΔW."""
    torch.manual_seed(0)
    rows, columns = torch.tensor([0, 2, 5]), torch.tensor([1, 3, 4])
    weight = torch.zeros(6, 5)
    omega = torch.tensor([1, 3, 11, 14, 29], dtype=torch.int32)
    for link in (LowRank(Own({"A": torch.randn(2, 5), "B": torch.randn(6, 2)}), 2.0), Sparse(omega, torch.arange(1.0, 6.0))):
        dense = link(weight)
        cut = link.cut((6, 5), rows, columns)
        assert torch.allclose(cut(torch.zeros(3, 3)), dense[rows][:, columns])


def test_unknown_architecture_has_a_code():
    with pytest.raises(UserError, match="E301"):
        row_of("gpt_neox")
