"""One harness: every architecture x random removals; masked and removed must be the same function."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch
import torch_pruning
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.checkpoint import load, save_checkpoint
from compressor.cost import ModelShape, shape_of
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import merge_all, merged_copy
from compressor.deltas.sources import Own
from compressor.errors import UserError
from compressor.models.anatomy import biases_of, layers_of
from compressor.models.architectures import row_of
from compressor.models.modules import MODULES, STRUCTURES
from compressor.pruning.scores import changes_of, loss_scores, lowest, lowest_of_all, random_scores, units_of, weight_scores
from compressor.pruning.surgery import Removal, kept_of, remove, restore_kept, silence
from tests.compressor.conftest import EXTRA, LAYERS, NEURONS, TRIED, empty_plan, encoding, logits, plan_of, tiny, tuned

harness = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
SHAPES = {architecture: shape_of(tiny(architecture)) for architecture in TRIED}


@st.composite
def plans(draw, architecture: str) -> dict[int, Removal]:
    """Anything that may go: unequal counts, odd widths, all of a sublayer, whole blocks; one block of a stack stays."""
    plan, layers = {}, SHAPES[architecture].layers
    for number in draw(st.sets(st.integers(0, len(layers) - 1), min_size=1)):
        layer = layers[number]
        gone = {}
        for structure in STRUCTURES:
            there = layer.units(structure)
            most = there - (layer.needed and structure == "heads")
            gone[structure] = sorted(draw(st.sets(st.integers(0, there - 1), max_size=most))) if there else []
        last = number % LAYERS == LAYERS - 1
        plan[number] = Removal(**gone, whole=not layer.needed and not last and draw(st.integers(0, 5)) == 0)
    return plan


def assert_removed_is_masked(architecture: str, plan: dict[int, Removal]) -> None:
    """float64, a delta on every matrix: equal to 1e-12; widths, parameters and FLOPs are the closed form's.

    Fresh models have biases of 0, of which a wrong cut would not be seen.
    """
    model = tiny(architecture)
    for number, owner in enumerate(biases_of(model)):
        torch.nn.init.normal_(owner.bias, std=0.2, generator=torch.Generator().manual_seed(number))
    tuned(model, "dsee", MODULES)
    expected = planned(SHAPES[architecture], plan)
    masked = merged_copy(model)
    silence(masked, plan)
    remove(model, plan)
    assert (logits(model) - logits(masked)).abs().max() < 1e-12
    found, total = shape_of(model), sum(parameter.numel() for parameter in merge_all(model).parameters())
    assert found.parameters == expected.parameters == total
    assert found.flops(9) == expected.flops(9)


def planned(shape: ModelShape, plan: dict[int, Removal]) -> ModelShape:
    """The closed form of a removal."""
    for structure in STRUCTURES:
        gone = [len(plan.get(number, Removal()).of(structure)) for number in range(len(shape.layers))]
        left = [layer.units(structure) - less for layer, less in zip(shape.layers, gone, strict=True)]
        shape = shape.left(structure, left)
    return shape.without({number for number, removal in plan.items() if removal.whole})


@harness
@given(data=st.data())
def test_removed_is_masked(architecture, data):
    assert_removed_is_masked(architecture, data.draw(plans(architecture)))


def test_removed_is_masked_where_nothing_is_left_of_a_block(architecture):
    assert_removed_is_masked(architecture, empty_plan(architecture))


@pytest.mark.slow
@settings(harness, max_examples=200)
@given(data=st.data())
def test_removed_is_masked_over_many_plans(architecture, data, tmp_path):
    plan = data.draw(plans(architecture))
    assert_removed_is_masked(architecture, plan)
    assert_reloads(architecture, plan, tmp_path)


def test_neurons_and_blocks_go_where_heads_cannot(monkeypatch):
    """A DeBERTa whose heads have position matrices of their own."""
    monkeypatch.setitem(EXTRA["deberta-v2"], "share_att_key", False)
    plan = {0: Removal(neurons=[0, 5]), 1: Removal(whole=True), 2: Removal(neurons=list(range(NEURONS)))}
    model = tiny("deberta-v2")
    masked = merged_copy(model)
    silence(masked, plan)
    remove(model, plan)
    assert (logits(model) - logits(masked)).abs().max() < 1e-12
    with pytest.raises(UserError, match="E307"):
        remove(model, {0: Removal(heads=[0])})


@settings(harness, max_examples=8)
@given(data=st.data())
def test_two_removals_restore_from_original_indices(architecture, data):
    """What `kept_of` records after two removals rebuilds the same model from the base in one cut."""
    model, again = tiny(architecture), tiny(architecture)
    remove(model, data.draw(plans(architecture)))
    remove(model, {n: Removal([0]) for n, layer in enumerate(layers_of(model)) if layer.units("heads") > 1})
    restore_kept(again, kept_of(model))
    assert kept_of(again) == kept_of(model)
    assert torch.equal(logits(again), logits(model))


LABELS = torch.tensor([0, 2, 1])


def assert_reloads(architecture: str, plan: dict[int, Removal], folder: Path):
    """Cut, saved and loaded in float32: the same tensors and answers in bits; gives what was saved."""
    model = tiny(architecture, torch.float32)
    remove(model, plan)
    save_checkpoint(model, folder, folder)
    again, expected = load(folder), model.state_dict()
    assert again.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.state_dict().items())
    assert torch.equal(logits(again), logits(model))
    return model


def test_pruned_checkpoint_reloads_bit_equal_and_stock_loading_fails(architecture, tmp_path):
    """Strict, no pickle; a stock from_pretrained of the folder raises instead of loading something else."""
    model = assert_reloads(architecture, plan_of(architecture), tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["per_layer_config"]
    words = layers_of(model)[0].blocks.configs
    assert (written["0"][words["neurons"]], written["1"]) == (NEURONS - 3, {"skip": ["block"]})
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


def test_removing_what_must_stay_is_refused(architecture):
    model = tiny(architecture)
    before, layers = logits(model), layers_of(model)
    refused = [{number: Removal(whole=True) for number in range(len(layers))}, {1: Removal([99])}]
    if layers[0].needed:
        refused += [{0: Removal(list(range(layers[0].units("heads"))))}, {0: Removal(whole=True)}]
    for plan in refused:
        with pytest.raises(UserError, match="E501"):
            remove(model, plan)
    assert torch.equal(logits(model), before)


def test_head_scores_are_the_sum_over_the_heads_rows(architecture):
    """DSEE section 3.4: Σ|ΔW_q| + Σ|ΔW_v| over a head's rows."""
    model = tuned(tiny(architecture), "dsee", ("query", "value"))
    changes = changes_of(model)
    scores = weight_scores(model, "heads", "delta", changes)
    layer = layers_of(model)[1]
    grouped = layer.heads // layer.key_value_heads
    spans = {"query": slice(8 * grouped, 16 * grouped), "value": slice(8, 16)}
    by_hand = sum(changes[layer.matrix(name).path][rows].abs().sum() for name, rows in spans.items())
    assert torch.isclose(scores[1][1], by_hand.to(scores[1].dtype))


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


@pytest.mark.parametrize("structure", [*STRUCTURES, "layers"])
def test_what_is_left_of_a_pruned_model_can_be_scored(architecture, structure):
    """By every criterion, also where a sublayer or a block has gone: as a second prune does."""
    model = tuned(tiny(architecture), "dsee", MODULES)
    remove(model, plan_of(architecture))
    units, changes = units_of(model, structure), changes_of(model)
    scores = [weight_scores(model, structure, criterion, changes) for criterion in ("weight", "weight_plus_delta")]
    scores += [loss_scores(model, structure, criterion, [(encoding(), LABELS)]) for criterion in ("taylor", "fisher")]
    for found in scores:
        assert [len(one) for one in found] == units
        assert all(torch.isfinite(one).all() for one in found)


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
@pytest.mark.parametrize("criterion", ["taylor", "fisher"])
def test_loss_criteria_are_the_first_order_change_of_the_loss(architecture, structure, criterion):
    """Against central differences: shrink one unit's outgoing columns by ε, one row at a time."""
    model = tuned(tiny(architecture), "lora")
    scores = loss_scores(model, structure, criterion, [(encoding(), LABELS)])
    number, unit, name = 1, 1, STRUCTURES[structure].columns

    def losses(step: float) -> torch.Tensor:
        merged = merged_copy(model)
        layer = layers_of(merged)[number]
        with torch.no_grad():
            layer.matrix(name).weight[:, layer.spread(name, torch.tensor([unit]))] *= 1 - step
        return row_losses(merged)

    effects = (losses(STEP) - losses(-STEP)).abs() / (2 * STEP)
    expected = (effects if criterion == "taylor" else effects.square()).sum()
    assert torch.isclose(scores[number][unit].double(), expected, rtol=0.02)


STEP = 1e-3
"""Of central differences: llama's, T5's and ModernBERT's norms and positions compute in float32 even in a float64 model."""


def row_losses(model) -> torch.Tensor:
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(**encoding()).logits, LABELS, reduction="none")


def test_a_blocks_taylor_score_is_the_first_order_change_of_passing_it_by(architecture):
    """Against central differences: the block gives h_out - ε (h_out - h_in)."""
    model, number = tiny(architecture), 1
    score = loss_scores(model, "layers", "taylor", [(encoding(), LABELS)])[number]

    def losses(step: float) -> torch.Tensor:
        def shrink(block, arguments, keywords, output):
            states = arguments[0] if arguments else keywords["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            after = after - step * (after - states)
            return (after, *output[1:]) if isinstance(output, tuple) else after

        hook = layers_of(model)[number].module.register_forward_hook(shrink, with_kwargs=True)
        found = row_losses(model)
        hook.remove()
        return found

    expected = ((losses(STEP) - losses(-STEP)).abs() / (2 * STEP)).sum()
    assert torch.isclose(score[0].double(), expected, rtol=0.02)


def test_one_ranking_over_all_blocks():
    scores = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 20.0, 30.0])]
    assert lowest_of_all(scores, 3, [0, 0]) == [[0, 1, 2], []]
    assert lowest_of_all(scores, 3, [1, 1]) == [[0, 1], [0]]
    assert lowest_of_all(scores, 3, [0, 0], normalize=True) == [[0, 1], [0]]


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


def traced_group(architecture: str, structure: str) -> tuple[dict, dict]:
    """What goes with a unit of the second block by torch-pruning's traced graph, and by the anatomy: layer and side -> indices.

    Without a cache of keys and values: no tracer gets through that.
    """
    model, unit = tiny(architecture, torch.float32, use_cache=False), torch.tensor([1])
    graph = torch_pruning.DependencyGraph()
    graph.build_dependency(model, example_inputs=dict(encoding()), output_transform=lambda found: found.logits)
    layer, span = layers_of(model)[1], STRUCTURES[structure]
    theirs, ours = defaultdict(set), defaultdict(set)
    places = layer.spread(span.rows[0], unit).tolist()
    for item in graph.get_pruning_group(layer.linear(span.rows[0]), torch_pruning.prune_linear_out_channels, idxs=places):
        if isinstance(item.dep.target.module, torch.nn.Linear):
            theirs[item.dep.target.module, item.dep.handler.__name__].update(item.idxs)
    for name in (name for name in (*span.rows, span.columns) if name in layer.parts):
        how = "prune_in_channels" if name == span.columns else "prune_out_channels"
        start = (layer.matrix(name).place.rows or (0,))[0]
        ours[layer.linear(name), how].update((start + layer.spread(name, unit)).tolist())
    return theirs, ours


COUPLED = [("mpnet", "heads"), ("t5", "heads"), ("t5-gated", "heads")]
"""Their blocks share a position bias, so torch-pruning takes the same head out of all of them."""
UNTRACED = ("gpt2", "llama")
"""Conv1D is unknown to torch-pruning; on Llama its walk over the traced graph does not end."""
TRACED = [(one, structure) for one in TRIED if one not in UNTRACED for structure in ("heads", "neurons")]


@pytest.mark.parametrize("traced", [one for one in TRACED if one not in [*COUPLED, ("modernbert", "heads")]], ids="-".join)
def test_torch_prunings_groups_say_the_same(traced):
    """A second opinion: what its traced dependency graph couples is what the anatomy calls one unit's."""
    theirs, ours = traced_group(*traced)
    assert theirs == ours


@pytest.mark.parametrize("traced", COUPLED, ids="-".join)
def test_torch_prunings_groups_couple_blocks(traced):
    """Why surgery takes the anatomy's groups: a head of one block is no reason to take those of the others."""
    theirs, ours = traced_group(*traced)
    assert ours.items() < theirs.items()


def test_torch_pruning_takes_a_third_of_a_fused_weight():
    """Of ModernBERT's query, key and value it takes the query's rows alone."""
    theirs, ours = traced_group("modernbert", "heads")
    layers = [key for key in ours if key[1] == "prune_out_channels"]
    assert theirs.keys() == ours.keys() and [(len(theirs[key]), len(ours[key])) for key in layers] == [(8, 24)]


def test_torch_pruning_knows_no_conv1d():
    with pytest.raises(ValueError, match=r"Conv1D.* is not in the dependency graph"):
        traced_group("gpt2", "heads")
