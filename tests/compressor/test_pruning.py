"""One harness: every architecture x random removals; masked and removed must be the same function."""

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch_pruning
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressor.checkpoint import load, save_checkpoint
from compressor.cost import ModelShape, shape_of
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.kinds.offset import Offset
from compressor.deltas.links import attach, merge_all, merged_copy
from compressor.errors import UserError
from compressor.models.anatomy import biases_of, layers_of, matrices_of
from compressor.models.architectures import ARCHITECTURES, Architecture, Blocks, row_of
from compressor.models.modules import MODULES, STRUCTURES
from compressor.pruning.surgery import Removal, kept_of, remove, restore_kept, silence
from tests.compressor.conftest import EXTRA, LAYERS, NEURONS, TRIED, empty_plan, logits, plan_of, tiny, tuned

harness = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def changed(model, *, masks: bool):
    """DSEE deltas on every matrix, an offset on every bias of the blocks, and last, where asked for, a mask on every matrix.

    Fresh models have biases of 0, of which a wrong cut would not be seen.
    """
    generator = torch.Generator().manual_seed(3)
    for owner in biases_of(model):
        torch.nn.init.normal_(owner.bias, std=0.2, generator=generator)
    tuned(model, "dsee", MODULES)
    matrices = matrices_of(model, MODULES)
    for owner in {matrix.owner: None for matrix in matrices}:
        if owner.bias is not None:
            attach(owner, Offset(torch.randn(owner.bias.shape, generator=generator, dtype=owner.bias.dtype)), "bias")
    for matrix in matrices if masks else ():
        matrix.attach(Mask(torch.rand(matrix.original.shape, generator=generator) > 0.2))
    return model


def groups_of(model, plan: dict[int, Removal]) -> int:
    """How many groups a plan cuts: one for each structure of a block that loses some of its units and keeps some."""
    layers = layers_of(model)
    return sum(
        0 < len(removal.of(structure)) < layers[number].units(structure) and not removal.whole
        for number, removal in plan.items()
        for structure in STRUCTURES
    )


def assert_removed_is_masked(architecture: str, plan: dict[int, Removal], *, masks: bool = False) -> None:
    """float64, changes on every matrix and bias: equal to 1e-12; widths, parameters and FLOPs are the closed form's; and every
    cut is one of torch-pruning's.
    """
    model = changed(tiny(architecture), masks=masks)
    expected = planned(SHAPES[architecture], plan)
    masked = merged_copy(model)
    silence(masked, plan)
    groups = groups_of(model, plan)
    with mock.patch.object(torch_pruning.Group, "prune", autospec=True, side_effect=torch_pruning.Group.prune) as prune:
        remove(model, plan)
    assert prune.call_count == groups
    assert (logits(model) - logits(masked)).abs().max() < 1e-12
    found, total = shape_of(model), sum(parameter.numel() for parameter in merge_all(model).parameters())
    assert found.parameters == expected.parameters == total
    assert found.flops(9) == expected.flops(9)


def planned(shape: ModelShape, plan: dict[int, Removal]) -> ModelShape:
    """The closed form of a removal."""
    for structure in STRUCTURES:
        gone = [len(plan.get(number, Removal()).of(structure)) for number in range(len(shape.layers))]
        left = [layer.units(structure) - less for layer, less in zip(shape.layers, gone, strict=True)]
        shape = shape.with_units(structure, left)
    return shape.without({number for number, removal in plan.items() if removal.whole})


@harness
@given(data=st.data())
def test_removed_is_masked(architecture, data):
    assert_removed_is_masked(architecture, data.draw(plans(architecture)), masks=data.draw(st.booleans()))


def test_removed_is_masked_where_nothing_is_left_of_a_block(architecture):
    assert_removed_is_masked(architecture, empty_plan(architecture))


@pytest.mark.slow
@pytest.mark.parametrize("structure", [*STRUCTURES, None], ids=lambda name: name or "all")
@settings(harness, max_examples=200)
@given(data=st.data())
def test_removed_is_masked_over_many_plans(architecture, structure, data, tmp_path):
    """200 plans of each structure by itself, and of all together, which are also saved and loaded."""
    if structure == "cross_heads" and not any(layer.units(structure) for layer in SHAPES[architecture].layers):
        pytest.skip("no decoder with cross-attention")
    plan = data.draw(plans(architecture))
    if structure is not None:
        plan = {number: Removal(**{structure: removal.of(structure)}) for number, removal in plan.items()}
    assert_removed_is_masked(architecture, plan, masks=data.draw(st.booleans()))
    if structure is None:
        assert_reloads(architecture, plan, tmp_path)


@settings(harness, max_examples=5)
@given(data=st.data())
def test_a_weightless_model_is_cut_to_the_same_shapes(architecture, data):
    """On meta, as the closed forms of a plan are computed: the same names and sizes, and the same is trained."""
    plan, model = data.draw(plans(architecture)), tiny(architecture)
    with torch.device("meta"):
        meta = tiny(architecture)
    remove(model, plan)
    remove(meta, plan)
    assert all(parameter.is_meta for parameter in meta.parameters())
    assert described(meta) == described(model)
    assert shape_of(meta) == shape_of(model) and kept_of(meta) == kept_of(model)


def described(model) -> list[tuple]:
    return [(name, one.shape, one.stride(), one.dtype, one.requires_grad) for name, one in model.named_parameters()]


@pytest.mark.parametrize("kinds", [["p2c", "c2p"], ["p2c"], ["c2p"]], ids="+".join)
def test_neurons_and_blocks_go_where_heads_cannot(monkeypatch, kinds):
    """A DeBERTa whose heads have position matrices of their own."""
    monkeypatch.setitem(EXTRA, "deberta-v2", {**EXTRA["deberta-v2"], "share_att_key": False, "pos_att_type": kinds})
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


def test_unknown_architecture_has_a_code():
    with pytest.raises(UserError, match="E301"):
        row_of("gpt_neox")


def test_blocks_that_share_their_weights_are_refused(monkeypatch):
    """An ALBERT runs one block three times: a row for it would change one and count one."""
    inner = "albert_layers.0.attention"
    modules = {name: f"{inner}.{name}" for name in ("query", "key", "value")} | {"output": f"{inner}.dense"}
    ffn = {"ffn_in": "albert_layers.0.ffn", "ffn_out": "albert_layers.0.ffn_output"}
    homes = {"heads": inner, "neurons": "albert_layers.0.ffn"}
    blocks = Blocks("encoder.albert_layer_groups", inner, {**modules, **ffn}, homes)
    monkeypatch.setitem(ARCHITECTURES, "albert", Architecture("albert", (blocks,), "ALBERT"))
    monkeypatch.setitem(EXTRA, "albert", {"embedding_size": 8})
    with pytest.raises(UserError, match=r"E317 'albert' runs 3 blocks by its config.json but has 1 of its own"):
        layers_of(tiny("albert"))


def test_blocks_that_find_their_mask_by_place_stay_where_masks_differ(monkeypatch):
    """A Qwen3 with sliding windows in some blocks: a block behind a gap would get its neighbour's mask."""
    mixed = ["full_attention", "sliding_attention", "full_attention"]
    monkeypatch.setitem(
        EXTRA, "qwen3", {**EXTRA["qwen3"], "use_sliding_window": True, "sliding_window": 4, "layer_types": mixed}
    )
    model, plan = tiny("qwen3"), {0: Removal([0], [1]), 1: Removal([1], [0, 3])}
    masked = merged_copy(model)
    silence(masked, plan)
    with pytest.raises(UserError, match=r"E501 blocks with full_attention and sliding_attention"):
        remove(model, {0: Removal(whole=True)})
    remove(model, plan)
    assert (logits(model) - logits(masked)).abs().max() < 1e-12
