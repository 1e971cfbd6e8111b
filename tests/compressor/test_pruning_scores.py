"""What says which units matter least: by weights, by changes, by the loss, by hidden states; and which go first."""

from typing import get_args

import pytest
import torch

from compressor.deltas.links import chain, merged_copy
from compressor.errors import UserError
from compressor.models import architectures
from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.architectures import Architecture, Blocks, add_row
from compressor.models.modules import MODULES, STRUCTURES
from compressor.pruning.block_passes import streams_of
from compressor.pruning.groups import complement
from compressor.pruning.refit import RIDGE
from compressor.pruning.scores import (
    VALUES,
    changes_of,
    loss_scores,
    lowest,
    lowest_of_all,
    random_scores,
    reconstruction_scores,
    units_of,
    weight_scores,
)
from compressor.pruning.surgery import Removal, remove, silence
from compressor.pruning.weights import hide, importance, loss_importance
from compressor.pruning_criteria import LOSS_POWER, UNSTRUCTURED, Magnitude
from compressor.tasks.task_kind import kind_of
from tests.compressor.conftest import EXTRA, encoding, logits, plan_of, tiny, tuned

LABELS = torch.tensor([0, 2, 1])


@pytest.mark.parametrize("criterion", ["taylor", "fisher"])
def test_a_row_of_several_choices_counts_once(criterion):
    """Against differences of each row's loss, by masking neurons in part. A unit that moves all choices alike costs nothing."""
    kind, model = kind_of("choices"), tiny("bert", num_labels=1).requires_grad_(False)
    inputs = encoding(12, 7)
    inputs["attention_mask"][:] = 1

    def losses():
        every = model(**inputs).logits.view(3, 4)
        return torch.stack([kind.loss(every[row], LABELS[row : row + 1], "sum") for row in range(3)])

    weight, changes = layers_of(model)[1].matrix("ffn_out").weight, []
    for unit in range(weight.shape[1]):
        whole, parts = weight[:, unit].clone(), []
        for share in (1 + 1e-6, 1 - 1e-6):
            weight[:, unit] = share * whole
            parts.append(losses())
        weight[:, unit] = whole
        changes.append(((parts[0] - parts[1]) / 2e-6).abs().pow(LOSS_POWER[criterion]).sum())
    scores = loss_scores(model, "neurons", criterion, [(inputs, LABELS)], kind=kind)
    assert torch.allclose(scores[1].double(), torch.stack(changes), rtol=1e-4)


def test_head_scores_are_the_sum_over_the_heads_rows(architecture):
    """DSEE section 3.3: Σ|ΔW_q| + Σ|ΔW_v| over a head's rows."""
    model = tuned(tiny(architecture), "dsee", ("query", "value"))
    changes = changes_of(model)
    scores = weight_scores(model, "heads", "delta", changes)
    layer = layers_of(model)[1]
    grouped = layer.heads // layer.key_value_heads
    spans = {"query": slice(8 * grouped, 16 * grouped), "value": slice(8, 16)}
    by_hand = sum(changes[layer.matrix(name).path][rows].abs().sum() for name, rows in spans.items())
    assert torch.isclose(scores[1][1], by_hand.to(scores[1].dtype))


def test_every_magnitude_has_its_values():
    """A criterion of a new one would end in the middle of a run."""
    assert set(VALUES) == set(get_args(Magnitude))


@pytest.mark.parametrize("hides", ["weight", "both"])
def test_weights_that_a_mask_hides_do_not_count(hides):
    """|W| of a head is that of M ⊙ W, which its model computes with; ΔW counts where W alone is hidden."""
    model = tuned(tiny("bert"), "dsee", ("query",))
    changes, layer = changes_of(model), layers_of(model)[0]
    before = {name: weight_scores(model, "heads", name, changes, ("query",))[0] for name in ("weight", "delta")}
    query = layer.matrix("query")
    keep = torch.ones_like(query.original, dtype=torch.bool)
    keep[8:16] = False
    hide(query, keep, UNSTRUCTURED, hides)
    after = {name: weight_scores(model, "heads", name, changes, ("query",))[0] for name in ("weight", "delta")}
    computed = query.used if hides == "weight" else query.weight
    assert after["weight"][1] == 0 < before["weight"][1] and torch.equal(computed != 0, keep)
    if hides == "both":
        before["delta"][1] = 0
    assert torch.equal(after["delta"], before["delta"])


def test_heads_are_scored_by_the_modules_that_are_named():
    """DSEE table 7 sums |W + ΔW| over query and value alone, not over key."""
    model = tuned(tiny("bert"), "dsee", ("query", "value"))
    layer = layers_of(model)[0]
    for criterion, weight in (("weight_plus_delta", lambda one: one.weight), ("weight", lambda one: one.original)):
        score = weight_scores(model, "heads", criterion, changes_of(model), ("query", "value"))[0][1]
        by_hand = sum(weight(layer.matrix(name))[8:16].abs().sum() for name in ("query", "value"))
        assert torch.isclose(score, by_hand.to(score.dtype))
    with pytest.raises(UserError, match="E502 heads by criterion delta: nothing was tuned on key"):
        weight_scores(model, "heads", "delta", changes_of(model), ("key",))


def test_a_block_where_nothing_changed_is_least_needed_by_delta():
    """Positions chosen over all matrices may all lie in other blocks."""
    model = tuned(tiny("bert"), "lora", ("query",))
    changes = changes_of(model)
    del changes[layers_of(model)[1].matrix("query").path]
    scores = weight_scores(model, "heads", "delta", changes)
    assert not scores[1].any() and all(score.all() for number, score in enumerate(scores) if number != 1)
    with pytest.raises(UserError, match=r"E502 heads by criterion delta: nothing was tuned on query, key, value\. Tune"):
        weight_scores(model, "heads", "delta", {})


@pytest.mark.parametrize(("architecture", "rows"), [("bert", ["ffn_in"]), ("llama", ["ffn_in", "ffn_gate"])])
def test_neuron_scores_take_rows_and_columns(architecture, rows):
    """The rows of both halves of a GLU."""
    model = tuned(tiny(architecture), "lora", ("ffn_in", "ffn_out"))
    layer, number = layers_of(model)[0], 7
    for criterion, weight in (("weight", lambda matrix: matrix.original), ("weight_plus_delta", lambda matrix: matrix.weight)):
        score = weight_scores(model, "neurons", criterion, changes_of(model))[0][number]
        into, out = (weight(layer.matrix(name))[number] for name in rows), weight(layer.matrix("ffn_out"))[:, number]
        assert torch.isclose(score.double(), sum(part.abs().sum() for part in (*into, out)))


def test_a_blocks_score_is_that_of_all_its_matrices():
    model = tiny("bert")
    by_hand = sum(matrix.original.abs().sum() for matrix in matrices_of(model, MODULES) if ".layer.1." in matrix.path)
    assert torch.isclose(weight_scores(model, "layers", "weight", {})[1][0].double(), by_hand)


@pytest.mark.parametrize("structure", [*STRUCTURES, "layers"])
def test_what_is_left_of_a_pruned_model_can_be_scored(architecture, structure):
    """By every criterion, also where a sublayer or a block has gone: as a second prune does."""
    model = tuned(tiny(architecture), "dsee", MODULES)
    remove(model, plan_of(architecture))
    units, changes = units_of(model, structure), changes_of(model)
    scores = [weight_scores(model, structure, criterion, changes) for criterion in ("weight", "weight_plus_delta")]
    scores += [loss_scores(model, structure, criterion, [(encoding(), LABELS)]) for criterion in ("taylor", "fisher")]
    scores.append(reconstruction_scores(model, structure, [encoding()]))
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


@pytest.mark.parametrize("structure", ["heads", "neurons", "layers", "weights"])
def test_what_the_loss_does_not_read_scores_nothing(structure):
    """The encoder of a T5 of which all cross-attention is gone."""
    model = tiny("t5")
    remove(
        model,
        {number: Removal(cross_heads=[*range(layer.units("cross_heads"))]) for number, layer in enumerate(layers_of(model))},
    )
    encoder = [layer.path for layer in layers_of(model) if ".encoder." in layer.path]
    if structure == "weights":
        scores = loss_importance(model, matrices_of(model, ("ffn_in",)), "taylor", [(encoding(), LABELS)]).values()
    else:
        scores = loss_scores(model, structure, "taylor", [(encoding(), LABELS)])
    assert [bool(block.any()) for block in scores] == [layer.path not in encoder for layer in layers_of(model)]


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
    assert lowest_of_all([torch.tensor([0.5, 1.0]), torch.ones(4)], 1, [0, 0], normalize=True) == [[0], []], "Euclidean"


def test_lowest_breaks_ties_by_index():
    assert lowest([torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0])], [2]) == [[1, 2]]


def test_random_scores_repeat():
    model = tiny("bert")
    first, second = random_scores(model, "heads", 7), random_scores(model, "heads", 7)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("structure", ["heads", "neurons"])
def test_reconstruction_is_the_error_of_a_refit_without_the_unit(architecture, structure):
    """Solved by least squares over the other columns, the ridge as further rows, from inputs that a hook sees."""
    model = tuned(tiny(architecture), "dsee", MODULES)
    batches = [encoding(6, 11), encoding(3, 9)]
    scores = reconstruction_scores(model, structure, batches)
    layer, seen = layers_of(model)[1], []
    matrix = layer.matrix(STRUCTURES[structure].columns)
    hook = matrix.owner.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0].detach()))
    for batch in batches:
        model(**batch)
    hook.remove()
    x = torch.cat([states[batch["attention_mask"].bool()] for states, batch in zip(seen, batches, strict=True)])
    system = torch.cat([x, (RIDGE * x.square().sum(0).mean()).sqrt() * torch.eye(x.shape[1], dtype=x.dtype)])
    target = system @ matrix.weight.detach().T

    def error(unit: int) -> torch.Tensor:
        rest = complement(layer.spread(matrix.name, torch.tensor([unit])).tolist(), x.shape[1])
        return (system[:, rest] @ torch.linalg.lstsq(system[:, rest], target).solution - target).square().sum()

    # both are relative to the same hidden states
    assert torch.isclose(scores[1][0] / scores[1][1], error(0) / error(1))


def seen_at(model, module, batches) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output of a module at the real tokens of all batches, (tokens, width) each."""
    calls = []
    hook = module.register_forward_hook(lambda module, arguments, output: calls.append((arguments[0], output)))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    hook.remove()
    real = torch.cat([batch["attention_mask"].bool().flatten() for batch in batches])
    return tuple(torch.cat([states.flatten(end_dim=1) for states in side])[real] for side in zip(*calls, strict=True))


def test_reconstruction_is_relative_to_the_states_that_a_unit_adds_to():
    """One head is left: all that it writes, and the ridge, over what the norm behind it reads. So blocks can be compared."""
    model, batches = tiny("bert"), [encoding(6, 11), encoding(3, 9)]
    remove(model, {1: Removal([0, 1, 3])})
    output = model.bert.encoder.layer[1].attention.output
    x, _ = seen_at(model, output.dense, batches)
    states, _ = seen_at(model, output.LayerNorm, batches)
    weight = output.dense.weight.detach()
    error = (x @ weight.T).square().sum() + RIDGE * x.square().sum(0).mean() * weight.square().sum()
    assert torch.isclose(reconstruction_scores(model, "heads", batches)[1][0], error / states.square().sum())


def test_reconstruction_of_a_block_is_the_share_of_its_output_that_it_adds():
    """Over the real tokens of all batches together."""
    model, batches = tiny("bert"), [encoding(6, 11), encoding(3, 9)]
    (_, before), (_, after) = (seen_at(model, block.output.LayerNorm, batches) for block in model.bert.encoder.layer[:2])
    share = (after - before).square().sum() / after.square().sum()
    assert torch.isclose(reconstruction_scores(model, "layers", batches)[1][0], share)


@pytest.mark.parametrize("structure", ["heads", "neurons", "layers"])
def test_hidden_states_that_are_not_finite_have_no_scores(structure):
    model = tiny("bert")
    with torch.no_grad():
        layers_of(model)[0].linear("output").bias[0] = torch.inf
    for score in (
        lambda: reconstruction_scores(model, structure, [encoding()]),
        lambda: loss_scores(model, structure, "taylor", [(encoding(), LABELS)]),
    ):
        with pytest.raises(UserError, match="E521"):
            score()
    assert not any("forward" in vars(layer.module) for layer in layers_of(model))


def scored(model, structure: str, criterion: str) -> object:
    """Scores of the units of a structure, or of single weights, by any criterion but random."""
    changes, batch = changes_of(model), (encoding(), LABELS)
    if criterion == "reconstruction":
        return reconstruction_scores(model, structure, [batch[0]])
    if structure == "weights":
        matrices = matrices_of(model, ("query",))
        by_loss = criterion in LOSS_POWER
        return loss_importance(model, matrices, criterion, [batch]) if by_loss else importance(matrices, criterion, changes, 0)
    if criterion in LOSS_POWER:
        return loss_scores(model, structure, criterion, [batch])
    return weight_scores(model, structure, criterion, changes)


CRITERIA = ("delta", "weight", "weight_plus_delta", *LOSS_POWER)


@pytest.mark.parametrize("structure", ["heads", "neurons", "layers", "weights"])
@pytest.mark.parametrize("criterion", [*CRITERIA, "reconstruction"])
def test_scores_that_are_not_finite_name_their_place_and_criterion(structure, criterion):
    """One NaN in ΔW or W of the second block; in the loss it is everywhere, so that the first block is named."""
    if structure == "weights" and criterion == "reconstruction":
        criterion = "delta_or_weight"  # of single weights alone, as reconstruction is of units
    model = tuned(tiny("bert"), "lora", ("query", "value", "ffn_in"))
    matrix = layers_of(model)[1].matrix("ffn_in" if structure == "neurons" else "query")
    spoilt = chain(matrix.owner)[0].source.B if criterion.startswith("delta") else matrix.original
    spoilt.detach()[0, 0] = torch.nan
    block = 0 if criterion in LOSS_POWER else 1
    with pytest.raises(UserError, match=rf"E(409|521) criterion {criterion}: .*encoder\.layer\.{block}"):
        scored(model, structure, criterion)


OPT_BLOCKS = Blocks(
    "decoder.layers",
    "self_attn",
    {
        **{name: f"self_attn.{name[0]}_proj" for name in ("query", "key", "value")},
        **{"output": "self_attn.out_proj", "ffn_in": "fc1", "ffn_out": "fc2"},
    },
    {"heads": "self_attn", "neurons": "fc1"},
    head_size="head_dim",
    heads_attributes=("num_heads",),
    width_attributes=(),
    configs={"heads": "num_attention_heads", "neurons": "ffn_dim"},
)


@pytest.fixture
def opt(monkeypatch):
    """A model of an architecture with a row of its own: as OPT, which discovery finds."""
    monkeypatch.setattr(architectures, "_added", {})
    add_row(Architecture("opt", (OPT_BLOCKS,), "OPT", head_on_tokens=True))
    monkeypatch.setitem(EXTRA, "opt", {"ffn_dim": 20, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.2})
    return tiny("opt")


def test_an_ffn_that_gets_the_tokens_of_all_rows_in_one_axis_is_scored_row_by_row(opt):
    """Each row has its own effect, and padding none."""
    model, rows = opt, encoding()
    apart = [
        {name: values[row : row + 1, : rows["attention_mask"][row].sum()] for name, values in rows.items()} for row in range(3)
    ]
    for structure in ("heads", "neurons"):
        together = loss_scores(model, structure, "taylor", [(rows, LABELS)])
        each = loss_scores(model, structure, "taylor", list(zip(apart, LABELS.split(1), strict=True)))
        states = [reconstruction_scores(model, structure, batches) for batches in ([rows], apart)]
        for one, other in (*zip(together, each, strict=True), *zip(*states, strict=True)):
            assert one.any() and torch.allclose(one, other, rtol=1e-6)
    assert set(streams_of(model, 1, rows).values()) == {"start", "running"}


def test_an_ffn_whose_first_matrix_is_a_home_of_its_own_may_lose_all_neurons(opt):
    masked, plan = merged_copy(opt), {1: Removal(neurons=list(range(20)))}
    silence(masked, plan)
    remove(opt, plan)
    assert torch.allclose(logits(opt), logits(masked), atol=1e-12)
    assert units_of(opt, "neurons") == [20, 0, 20] and "ffn_in" not in layers_of(opt)[1].names
