"""The groups that torch-pruning cuts: what shrinks with a unit, and what torch-pruning's own traced graph says of it."""

import subprocess
import sys
from collections import defaultdict

import pytest
import torch
import torch_pruning

from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import Place, attach, delta_of, merged_copy, original
from compressor.deltas.sources import PlainTensors
from compressor.models.anatomy import layers_of
from compressor.models.architectures import ARCHITECTURES
from compressor.models.modules import STRUCTURES
from compressor.pruning.groups import complement
from compressor.pruning.surgery import Removal, remove
from tests.compressor.conftest import TRIED, encoding, logits, tiny
from tests.compressor.test_pruning import changed


def test_a_cut_trains_what_was_trained(architecture):
    """torch-pruning gives back trainable parameters: frozen weights must stay frozen, also the deltas of an earlier stage."""
    model = changed(tiny(architecture), masks=True)
    for layer in layers_of(model):
        for link in layer.linear("value").parametrizations["weight"]:
            link.requires_grad_(False)
    before = {name: one.requires_grad for name, one in model.named_parameters()}
    remove(model, {1: Removal([0], [3, 4])})
    assert {name: one.requires_grad for name, one in model.named_parameters()} == before
    assert set(before.values()) == {True, False}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "modernbert"])
def test_a_change_of_a_whole_fused_weight_is_cut_with_it(name, transposed):
    """As an adapter of another tool has it, either way round, and a task's fully tuned weights."""
    model, places = tiny(name), Place(transposed=transposed)
    for owner in {layer.linear(part) for layer in layers_of(model) for part in layer.parts}:
        shape = original(owner).shape[::-1] if transposed else original(owner).shape
        factors = {"A": torch.randn(2, shape[1]), "B": torch.randn(shape[0], 2)}
        link = LowRank(PlainTensors({name: factor.to(original(owner)) for name, factor in factors.items()}), 0.1)
        link.place = places
        attach(owner, link)
    merged, plan = merged_copy(model), {0: Removal([1], [0, 5]), 1: Removal([0, 2])}
    remove(model, plan)
    remove(merged, plan)
    torch.testing.assert_close(logits(model), logits(merged), rtol=0, atol=1e-9)


def test_the_changes_of_a_cut_weight_are_the_cut_changes(architecture):
    """ΔW of weights and biases, also of the parts of a fused weight, which move when the part before them shrinks. Not in bits:
    on some processors the product of two factors rounds otherwise where one of them is cut."""
    model = changed(tiny(architecture), masks=True)
    layer, plan = layers_of(model)[1], {1: Removal([1], [0, 5])}
    weights, biases = {}, {}
    for structure, span in STRUCTURES.items():
        if plan[1].of(structure):
            keep = complement(plan[1].of(structure), layer.units(structure))
            for name in (name for name in (*span.rows, span.columns) if name in layer.parts):
                places, matrix = layer.spread(name, keep), layer.matrix(name)
                out = name != span.columns
                weights[name] = matrix.delta[places] if out else matrix.delta[:, places]
                if matrix.owner.bias is not None:
                    start = (matrix.place.rows or (0,))[0]
                    change = delta_of(matrix.owner, name="bias")
                    biases[name] = change[start + places] if out else change
    remove(model, plan)
    for name, expected in weights.items():
        torch.testing.assert_close(layer.matrix(name).delta, expected, rtol=0, atol=1e-12)
        assert layer.matrix(name).mask.keep.shape == layer.matrix(name).original.shape
    for name, expected in biases.items():
        start, stop = layer.matrix(name).place.rows or (0, None)
        owner = layer.linear(name)
        torch.testing.assert_close(delta_of(owner, name="bias")[start:stop], expected, rtol=0, atol=1e-12)
        assert original(owner, "bias").shape == owner.bias.shape


PACKAGE = """
import sys
import compressor.pruning_criteria, pipelines.stages.prune.config
assert not {"torch", "torch_pruning"} & set(sys.modules)
sys.modules["torch_pruning"] = None
import compressor.pruning
"""


def test_pruning_needs_torch_pruning_at_its_import():
    """What is not installed is told at once; the words that pipeline files are checked by need neither it nor torch."""
    done = subprocess.run([sys.executable, "-c", PACKAGE], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ModuleNotFoundError: import of torch_pruning halted" in done.stderr


def test_links_shrink_to_the_right_places():
    """A cut link is the cut of the dense ΔW."""
    torch.manual_seed(0)
    rows, columns = torch.tensor([0, 2, 5]), torch.tensor([1, 3, 4])
    weight = torch.zeros(6, 5)
    omega = torch.tensor([1, 3, 11, 14, 29], dtype=torch.int32)
    for link in (
        LowRank(PlainTensors({"A": torch.randn(2, 5), "B": torch.randn(6, 2)}), 2.0),
        Sparse(omega, torch.arange(1.0, 6.0)),
    ):
        dense = link(weight)
        cut = link.cut((6, 5), rows, columns)
        assert torch.allclose(cut(torch.zeros(3, 3)), dense[rows][:, columns])


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
UNTRACED = [
    name for name, row in ARCHITECTURES.items() if row.transposed or row.stacks[0].configs["heads"] == "num_key_value_heads"
]
"""Conv1D is unknown to torch-pruning; with shared key and value heads its walk over the traced graph does not end."""
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
