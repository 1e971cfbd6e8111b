"""Single weights: which go, on every architecture and pattern, and that nothing brings one of them back."""

from itertools import cycle
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from compressor.checkpoint import load, load_state, save_checkpoint, save_state
from compressor.cost import share
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.links import chain, chains, merge_all, merge_deltas, merged_copy
from compressor.errors import UserError
from compressor.methods import Options, apply, set_trainable
from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.modules import MODULES, STRUCTURES
from compressor.pruning.scores import changes_of
from compressor.pruning.surgery import Removal, remove
from compressor.pruning.weights import densities, hide_all_but, hide_lowest, holds, importance, loss_importance, nonzeros
from compressor.pruning_criteria import LOSS_POWER, NofM, WeightCriterion
from compressor.selection.choice import choose_places
from compressor.selection.gradients import gradient_scores
from compressor.storage import delta_file, live
from compressor.storage.peft.write import write_peft
from compressor.training.schedule import Schedule
from compressor.training.trainer import train
from pipelines.stages.prune.mask_weights import hide_by
from pipelines.stages.prune.prune_weights import WeightsItem
from tests.compressor import papers_bits
from tests.compressor.conftest import CASES, GROWING, NEURONS, TRIED, encoding, logits, prepared, tiny, tuned
from tests.compressor.training_parts import rows_of

harness = settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
LABELS = torch.tensor([0, 2, 1])
ADAPTED = ("query", "value")


@st.composite
def plans(draw) -> WeightsItem:
    """Any pattern, criterion, scope, shares and modules that fit a tiny model."""
    item = {"structure": "weights", "pattern": draw(st.sampled_from(["unstructured", "2:4", "1:4", "1:2"]))}
    # delta needs a ΔW on every one of the modules
    item["criterion"] = draw(st.sampled_from(get_args(WeightCriterion)))
    item["modules"] = ADAPTED if item["criterion"] == "delta" else draw(st.sampled_from(["all", ("query", "ffn_out")]))
    if item["pattern"] == "unstructured":
        share = st.floats(0.01, 0.99)
        item["scope"] = draw(st.sampled_from(["matrix", "global"]))
        two = item["criterion"] == "delta_or_weight" and draw(st.booleans())
        item["remove"] = {"adapted": draw(share), "others": draw(share)} if two else draw(share)
    return WeightsItem.model_validate(item)


def scores_of(model, item: WeightsItem) -> dict[str, torch.Tensor]:
    matrices = matrices_of(model, item.modules)
    if item.criterion in LOSS_POWER:
        return loss_importance(model, matrices, item.criterion, [(encoding(), LABELS)])
    return importance(matrices, item.criterion, changes_of(model), seed=3)


def carry_out(model, item: WeightsItem) -> dict[str, torch.Tensor]:
    """As the stage does it, without a pipeline; the scores by which it was done."""
    matrices, scores = matrices_of(model, item.modules), scores_of(model, item)
    hide_by(item, matrices, scores, changes_of(model), "both")
    return scores


def brute_force(item: WeightsItem, scores: dict[str, list[tuple]], adapted: set[str]) -> dict[str, set[int]]:
    """Path -> flat indices that go, by sorting (scores, matrix, index)."""
    gone: dict[str, set[int]] = {path: set() for path in scores}
    if item.nm:
        for path, score in scores.items():
            for start in range(0, len(score), item.nm.run):
                run = sorted(enumerate(score[start:][: item.nm.run]), key=lambda one: one[::-1])
                gone[path] |= {start + place for place, _ in run[: item.nm.run - item.nm.keep]}
        return gone
    groups: dict[object, list[str]] = {}
    for path in scores:
        own = path in adapted and item.criterion == "delta_or_weight"
        groups.setdefault((own, path if item.scope == "matrix" else None), []).append(path)
    for (own, _), paths in groups.items():
        ranked = sorted((v, n, i) for n, path in enumerate(paths) for i, v in enumerate(scores[path]))
        for _, number, index in ranked[: share(item.share_of(own), len(ranked))]:
            gone[paths[number]].add(index)
    return gone


def zeros(tensor: torch.Tensor) -> set[int]:
    return set((tensor == 0).flatten().nonzero().flatten().tolist())


def assert_exact(architecture: str, item: WeightsItem, case: str, folder: Path) -> None:
    """Against a brute-force sort; in the merged model and in its file; embeddings, norms, biases and head bit for bit.
    Nearly every ΔW of a `selective` is 0."""
    model = tuned(tiny(architecture, torch.float32), case, ADAPTED)
    merged = merged_copy(model)
    before, dense = dict(merged.named_parameters()), {one.path: one.weight for one in matrices_of(merged, MODULES)}
    adapted = set(changes_of(model))
    of_equal = {
        path: weight.detach().abs() * (item.criterion in ("delta", "delta_or_weight")) for path, weight in dense.items()
    }
    scores = {path: torch.stack([score, of_equal[path]], dim=-1) for path, score in carry_out(model, item).items()}
    pairs = {path: [tuple(pair) for pair in score.flatten(0, 1).tolist()] for path, score in scores.items()}
    expected = brute_force(item, pairs, adapted)
    masked, counted = logits(model), densities(model)
    save_checkpoint(merge_all(model), folder, folder)
    again, file = load(folder), load_file(folder / "model.safetensors")
    assert torch.equal(logits(again), masked), "merged is masked, bit for bit"
    for matrix in matrices_of(again, MODULES):
        # a fused weight holds matrices that were not named, too
        assert zeros(matrix.weight) == expected.get(matrix.path, set())
        there = matrix.weight != 0
        assert torch.equal(matrix.weight[there], dense[matrix.path][there])
        assert not matrix.weight[matrix.weight == 0].signbit().any(), "+0.0, never -0.0"
    inside = {id(matrix.owner.weight) for matrix in matrices_of(again, MODULES)}
    for name, parameter in again.named_parameters():
        if name in file:
            assert int((file[name] != 0).sum()) == int((parameter != 0).sum())
        if id(parameter) not in inside:
            assert torch.equal(parameter, before[name])
    hidden = sum(len(places) for places in expected.values())
    entries = sum(matrix.original.numel() for matrix in matrices_of(again, item.modules))
    told = [one for one in counted if one.pattern]
    assert [one.pattern for one in told] == [item.pattern]
    assert (told[0].entries, told[0].nonzeros) == (entries, entries - hidden)
    if item.nm:
        assert all(holds(matrix.weight, item.nm) for matrix in matrices_of(again, item.modules))


@harness
@given(item=plans(), case=st.sampled_from(["dsee", "selective"]))
def test_exactly_the_lowest_go_and_nothing_else_is_touched(architecture, item, case, tmp_path):
    assert_exact(architecture, item, case, tmp_path)


@pytest.mark.slow
@settings(harness, max_examples=100)
@given(item=plans(), case=st.sampled_from(["dsee", "selective"]))
def test_exactly_the_lowest_go_over_many_plans(architecture, item, case, tmp_path):
    assert_exact(architecture, item, case, tmp_path)


WEIGHTS = {"structure": "weights", "remove": 0.5}
HALF = WeightsItem(**WEIGHTS, criterion="weight_plus_delta")
TWO_OF_FOUR = WeightsItem(structure="weights", pattern="2:4", criterion="weight_plus_delta")


@pytest.mark.parametrize("criterion", ["delta", "weight", "weight_plus_delta", "delta_or_weight"])
def test_scores_are_what_they_say(criterion):
    model = tuned(tiny("gpt2"), "dsee", ("query", "value"))
    matrices, changes = matrices_of(model, ("query", "value") if criterion == "delta" else MODULES), changes_of(model)
    scores = importance(matrices, criterion, changes, 0)
    for matrix in matrices:
        base, whole = matrix.original, matrix.weight
        weight = {"weight": base, "weight_plus_delta": whole}.get(criterion, whole - base if matrix.name in ADAPTED else base)
        assert torch.allclose(scores[matrix.path], weight.detach().abs(), atol=1e-12)


@pytest.mark.parametrize("criterion", ["taylor", "fisher"])
def test_loss_criteria_of_weights_are_the_first_order_change_of_the_loss(architecture, criterion):
    """Against central differences: shrink one weight of W + ΔW by ε, batch by batch."""
    model = tuned(tiny(architecture), "lora")
    batches = [(encoding(), LABELS), (encoding(2, 7), LABELS[:2])]
    matrices = matrices_of(model, ("value", "ffn_out"))
    scores, place, step = loss_importance(model, matrices, criterion, batches), (3, 5), 1e-2
    assert any(chains(model)) and not any(parameter.grad is not None for parameter in model.parameters())
    merged = merge_all(model)
    for matrix in matrices_of(merged, ("value", "ffn_out"))[:2]:
        effects = []
        for inputs, labels in batches:
            losses = []
            for factor in (1 - step, (1 + step) / (1 - step), 1 / (1 + step)):
                with torch.no_grad():
                    matrix.weight[place] *= factor
                    losses.append(torch.nn.functional.cross_entropy(merged(**inputs).logits, labels, reduction="sum"))
            effects.append(((losses[0] - losses[1]) / (2 * step)).abs())
        expected = sum(effect if criterion == "taylor" else effect**2 for effect in effects)
        assert torch.isclose(scores[matrix.path][place], expected, rtol=0.02, atol=1e-6)


def test_ties_go_by_the_lowest_index():
    model = tiny("bert")
    first, second = matrices_of(model, ("query",))[:2]
    scores = {first.path: torch.ones(32, 32), second.path: torch.ones(32, 32)}
    hide_lowest([first, second], scores, 1030)
    assert not first.mask.keep.any() and second.mask.keep.flatten().tolist() == [False] * 6 + [True] * 1018
    hide_all_but(third := matrices_of(model, ("key",))[0], torch.ones(32, 32), NofM(1, 4))
    assert third.mask.keep.view(-1, 4).tolist() == [[False, False, False, True]] * 256


def test_what_is_hidden_already_counts_and_stays():
    model = tiny("bert")
    carry_out(model, WeightsItem(**{**WEIGHTS, "remove": 0.3}, criterion="random"))
    before = {matrix.path: zeros(matrix.weight) for matrix in matrices_of(model, MODULES)}
    carry_out(model, HALF)
    after = {matrix.path: zeros(matrix.weight) for matrix in matrices_of(model, MODULES)}
    assert all(before[path] <= after[path] for path in before)
    (only,) = densities(model)
    assert only.nonzeros == only.entries - only.entries // 2
    with pytest.raises(UserError, match=r"E501 .*zero already"):
        carry_out(model, WeightsItem(**{**WEIGHTS, "remove": 0.3}))
    carry_out(model, TWO_OF_FOUR)
    assert [one.pattern for one in densities(model)] == ["2:4"]
    assert all(len(chain(matrix.owner)) == 1 for matrix in matrices_of(model, MODULES)), "one mask a matrix"


def test_inputs_that_do_not_fall_into_runs():
    matrix = matrices_of(tiny("bert"), ("ffn_out",))[0]
    with pytest.raises(UserError, match=rf"E505 .* has {NEURONS} inputs, no multiple of 8"):
        hide_all_but(matrix, torch.rand(32, NEURONS), NofM(4, 8))
    assert matrix.mask is None


def test_delta_where_nothing_was_tuned():
    model = tuned(tiny("bert"), "lora", ("query",))
    with pytest.raises(UserError, match=r"E502 .*key"):
        importance(matrices_of(model, ("query", "key")), "delta", changes_of(model), 0)


# --- recovery ---


@pytest.mark.parametrize(
    ("case", "item"),
    list(zip([*CASES, *GROWING], cycle([HALF, TWO_OF_FOUR]))),
    ids=lambda one: one if isinstance(one, str) else one.pattern,
)
def test_no_method_revives_a_weight(case, item, tmp_path):
    """Trained with AdamW and decay behind a tuned and masked model; merged, every hidden place is +0.0."""
    model = tuned(tiny("bert", torch.float32), "lora", ADAPTED)
    carry_out(model, item)
    hidden = {matrix.path: ~matrix.mask.keep for matrix in matrices_of(model, MODULES)}
    before = {matrix.path: matrix.weight.detach().clone() for matrix in matrices_of(model, MODULES)}
    if case == "full":
        merge_deltas(model)
        set_trainable(model, base=True, groups=())
    else:
        for _, owner, name in chains(model):
            chain(owner, name)[0].group = "before"
        prepared(model, case, ("query", "key", "ffn_out"), places=60)
    schedule = Schedule(epochs=1, learning_rate=0.02, batch_size=4, weight_decay=0.1, warmup=0)
    train(model, rows_of(8), 1, schedule, tmp_path / "work")
    assert all(isinstance(chain(matrix.owner)[-1], Mask) for matrix in matrices_of(model, MODULES))
    masked = logits(model)
    save_checkpoint(merge_all(model), tmp_path / "merged", tmp_path)
    again = load(tmp_path / "merged")
    assert torch.equal(logits(again), masked)
    moved = False
    for matrix in matrices_of(again, MODULES):
        found = matrix.weight[hidden[matrix.path]]
        assert not found.any() and not found.signbit().any()
        moved |= not torch.equal(matrix.weight, before[matrix.path])
    beside = case in ("bitfit", "propetl", "propetl-only-mask", "mam") or any(word in case for word in ("adapter", "prefix"))
    assert moved != beside, "the others train values of these matrices"


@pytest.mark.parametrize("architecture", TRIED)
def test_full_training_holds_the_masks_on_every_architecture(architecture):
    """Fused and transposed weights too: decay moves what is hidden, the mask hides it all the same."""
    model = tuned(tiny(architecture), "dsee", ADAPTED)
    carry_out(model, HALF)
    hidden = {matrix.path: ~matrix.mask.keep for matrix in matrices_of(model, MODULES)}
    merge_deltas(model)
    set_trainable(model, base=True, groups=())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(**encoding()).logits, LABELS).backward()
        optimizer.step()
    for matrix in matrices_of(merge_all(model), MODULES):
        assert not matrix.weight[hidden[matrix.path]].any() and matrix.weight.any()


def test_values_on_hidden_places_stand_still():
    """Ω that was chosen before the masks: no gradient arrives there, and merging gives zero."""
    model = tiny("bert")
    matrix = matrices_of(model, ("value",))[0]
    scores = torch.ones(32, 32)
    scores.view(-1)[[3, 50]] = 0
    hide_lowest([matrix], {matrix.path: scores}, 2)
    apply(model, "selective", Options(modules=("value",), omega={matrix.path: torch.tensor([3, 7], dtype=torch.int32)}))
    values = chain(matrix.owner)[0].values
    optimizer = torch.optim.AdamW([values], lr=0.1, weight_decay=0.0)
    model(**encoding()).logits.square().sum().backward()
    optimizer.step()
    assert values[0] == 0 and values[1] != 0
    assert zeros(matrix.weight) == {3, 50}


def test_a_selection_leaves_hidden_places_out():
    """By gradients they score 0, which is no candidate; so do the stage's scores of weights."""
    model = tuned(tiny("gpt2"), "dsee", ADAPTED)
    carry_out(model, HALF)
    matrices = matrices_of(merge_deltas(model), ADAPTED)
    keep = {matrix.path: matrix.mask.keep for matrix in matrices}
    for score in ("fish", "sam", "d3"):
        scores = gradient_scores(model, matrices, score, [(encoding(), LABELS)])
        assert all(not scores[path][~keep[path]].any() and scores[path].any() for path in keep)
        (places,) = choose_places([scores[matrices[0].path]], 200)
        assert keep[matrices[0].path].flatten()[places.long()].all()


# --- surgery ---


@harness
@given(data=st.data())
def test_masks_are_cut_with_their_weights(architecture, data):
    """Masks, then units removed, is units removed, then what is left of the masks."""
    model, bare = (tuned(tiny(architecture), "dsee", ADAPTED) for _ in range(2))
    carry_out(model, HALF)
    plan = {0: Removal([1], [3, 4, 9]), 1: Removal(neurons=[0, 7])}
    if data.draw(st.booleans()):
        plan[2] = Removal(whole=True)
    before, left = layers_of(model), {}
    for number, layer in enumerate(before):
        removal = plan.get(number, Removal())
        for name in () if removal.whole else layer.names:
            structure = next((key for key, span in STRUCTURES.items() if name in (*span.rows, span.columns)))
            units = [unit for unit in range(layer.units(structure)) if unit not in removal.of(structure)]
            places, keep = layer.spread(name, torch.tensor(units)), layer.matrix(name).mask.keep
            left[number, name] = keep[:, places] if name == STRUCTURES[structure].columns else keep[places]
    for one in (model, bare):
        remove(one, plan)
    numbers = [number for number in range(len(before)) if not plan.get(number, Removal()).whole]
    for number, masked, cut in zip(numbers, layers_of(model), layers_of(bare), strict=True):
        for name in masked.names:
            assert torch.equal(masked.matrix(name).mask.keep, left[number, name])
            cut.matrix(name).attach(Mask(left[number, name]))
    assert torch.equal(logits(model), logits(bare))


def test_a_pattern_that_was_cut_through_is_none():
    """Heads go in multiples of 4 inputs here, neurons one by one."""
    model = tiny("bert")
    carry_out(model, TWO_OF_FOUR)
    remove(model, {0: Removal([1])})
    assert [one.pattern for one in densities(model)] == ["2:4"]
    remove(model, {0: Removal(neurons=[0])})
    assert {one.pattern: one.matrices for one in densities(model)} == {"2:4": 17, "unstructured": 1}


# --- storage ---


@pytest.mark.parametrize("item", [HALF, TWO_OF_FOUR], ids=["unstructured", "2:4"])
def test_state_and_delta_file_reload_bit_equal(architecture, item, tmp_path, monkeypatch):
    """Masked, cut, trained behind the masks: stored a bit a weight, and what is hidden of ΔW comes back too."""
    model = tuned(tiny(architecture, torch.float32), "dsee", ADAPTED)
    carry_out(model, item)
    remove(model, {0: Removal([1], [0, 1, 2, 3])})
    tuned(model, "lora", ("output",))
    facts = {"base": "here", "base_sha256": "0", "label_names": ["a", "b", "c"]}
    save_state(model, tmp_path / "state", **facts)
    monkeypatch.setattr("compressor.checkpoint.build", lambda *_: tiny(architecture, torch.float32))
    again = load_state(tmp_path / "state", tmp_path)
    for mine, other in zip(matrices_of(model, MODULES), matrices_of(again, MODULES), strict=True):
        assert torch.equal(mine.mask.keep, other.mask.keep) and mine.mask.pattern == other.mask.pattern == item.pattern
        assert torch.equal(mine.delta, other.delta)
    assert torch.equal(logits(again), logits(model))
    base = load_state(tmp_path / "state", tmp_path, changes=False)
    for mine, other in zip(matrices_of(model, MODULES), matrices_of(base, MODULES), strict=True):
        assert torch.equal(mine.mask.keep, other.mask.keep)
    assert {link.kind for _, owner, name in chains(base) for link in chain(owner, name)} == {"mask"}
    delta_file.write(model, tmp_path / "delta", **facts)
    found = delta_file.read(tmp_path / "delta")
    assert delta_file.stored(found).pruned_entries == sum(matrix.original.numel() for matrix in matrices_of(model, MODULES))
    monkeypatch.setattr(live, "base_of", lambda *_: type("Base", (), {"folder": "", "reference": "", "sha256": "0"}))
    monkeypatch.setattr(live, "build", lambda *_, **options: tiny(architecture, torch.float32))
    assert torch.equal(logits(live.load_on(found, None, "delta")), logits(model))


def test_size_formula_counts_a_bit_a_weight(tmp_path):
    model = tuned(tiny("bert", torch.float32), "lora", ADAPTED)
    sizes = []
    for name in ("without", "with"):
        delta_file.write(model, tmp_path / name, base="here", base_sha256="0", label_names=["a", "b", "c"], head=False)
        size = (tmp_path / name).stat().st_size
        with (tmp_path / name).open("rb") as stream:
            sizes.append(size - delta_file.header_size(stream.read(8)))
        if name == "without":
            carry_out(model, HALF)
    shapes = [tuple(matrix.original.shape) for matrix in matrices_of(model, MODULES)]
    assert sizes[1] - sizes[0] == papers_bits.pruned(shapes).bytes == sum(out * into for out, into in shapes) // 8
    found = delta_file.read(tmp_path / "with")
    adapted = [shape for shape in shapes if shape == (32, 32)][:6]
    assert delta_file.stored(found).trained == papers_bits.low_rank(2, adapted).scalars


@pytest.mark.parametrize("damage", ["short", "long", "shape", "missing"])
def test_damaged_masks_are_refused(damage, tmp_path, monkeypatch):
    model = tuned(tiny("bert", torch.float32), "lora", ADAPTED)
    carry_out(model, HALF)
    save_state(model, tmp_path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    tensors = load_file(tmp_path / "changes.safetensors")
    name = next(name for name in tensors if name.endswith("|keep"))
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        text = (tmp_path / "state.json").read_text()
        (tmp_path / "state.json").write_text(text.replace("32,\n", "16,\n"))
    else:
        tensors[name] = tensors[name][:-1].clone() if damage == "short" else tensors[name].repeat(2)
    save_file(tensors, tmp_path / "changes.safetensors")
    monkeypatch.setattr("compressor.checkpoint.build", lambda *_: tiny("bert", torch.float32))
    with pytest.raises(UserError, match="E305"):
        load_state(tmp_path, tmp_path)


def test_peft_has_no_form_for_masks(tmp_path):
    model = tuned(tiny("bert", torch.float32), "lora", ADAPTED)
    carry_out(model, HALF)
    with pytest.raises(UserError, match="E314"):
        write_peft(model, tmp_path, base="here")


def test_nonzeros_count_every_parameter_once():
    model = tiny("bert")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    total = sum(parameter.numel() for parameter in model.parameters())
    carry_out(model, WeightsItem(**WEIGHTS, criterion="weight", modules="query"))
    assert nonzeros(merge_all(model)) == total - 3 * 32 * 32 // 2
