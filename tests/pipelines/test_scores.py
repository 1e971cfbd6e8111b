"""The scores that a prune stage removes by: every criterion is the function of its name."""

import json
import typing
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.modules import MODULES
from compressor.pruning import scores as functions
from compressor.pruning_criteria import BY_ROWS, LOSS_POWER, SUMS, Criterion
from compressor.tasks.data import Data, tensor_batches
from compressor.tasks.task_kind import kind_of
from pipelines.engine.base_corrections import _facts, base_corrections, texts_read_otherwise
from pipelines.engine.runner import prepare
from pipelines.engine.stage import load_stage
from pipelines.engine.stage_inputs import fingerprint_of
from pipelines.file.config import load_pipeline
from pipelines.stages.merge import config as merge
from pipelines.stages.prune import mask_weights
from pipelines.stages.prune.config import STAGE, PruneConfig, PruneItem
from pipelines.stages.prune.prune_weights import WeightsItem
from pipelines.stages.prune.remove_units import score
from tests.compressor.conftest import tiny, tuned
from tests.pipelines.test_precision import rows_of
from tests.tiny import write_model, write_pipeline

QUIET = SimpleNamespace(progress=lambda *_: nullcontext(SimpleNamespace(advance=lambda steps=1: None)))


def expected(model, structure, criterion, batches):
    if criterion == "random":
        return functions.random_scores(model, structure, 5)
    if criterion == "reconstruction":
        return functions.reconstruction_scores(model, structure, [inputs for inputs, _ in batches])
    if criterion in LOSS_POWER:
        return functions.loss_scores(model, structure, criterion, batches)
    return functions.weight_scores(model, structure, criterion, functions.changes_of(model))


@pytest.mark.parametrize("structure", ["heads", "neurons", "layers"])
def test_every_criterion_has_scores_of_its_own(structure):
    model = tuned(tiny("bert", torch.float32), "lora", ["query", "key", "value", "ffn_in", "ffn_out"])
    data = Data(rows_of(model, 16), rows_of(model, 4), ["a", "b", "c"], 1)
    batches, seen = list(tensor_batches(data.train.sample(12), 1, data.batch_size)), []
    for criterion in typing.get_args(Criterion):
        rows = {"rows": 12} if criterion in BY_ROWS else {}
        item = PruneItem(structure=structure, criterion=criterion, remove=1, **rows)
        found = torch.cat(score(item, model, None, 5, data, QUIET)).float()
        torch.testing.assert_close(found, torch.cat(expected(model, structure, criterion, batches)).float())
        assert not any(torch.equal(found, other) for other in seen), criterion
        seen.append(found)
    assert len(seen) == len(SUMS) + len(LOSS_POWER) + 2


@pytest.mark.parametrize("first", [{"remove": {"adapted": 0.1, "others": 0.2}}, {"pattern": "3:4"}], ids=["pools", "n:m"])
def test_a_second_item_ranks_weights_as_a_second_prune_does(first):
    """What the first one hides is no change of the blocks that were not trained: they stay the others, ranked by |W|."""
    first, second = (WeightsItem(structure="weights", **keys) for keys in (first, {"remove": {"adapted": 0.3, "others": 0.4}}))
    model, base = (tiny("bert", torch.float32) for _ in range(2))
    data = Data(rows_of(model, 4), rows_of(model, 4), ["a", "b", "c"], 1)
    with torch.no_grad():
        for matrix in map(layers_of(model)[-1].matrix, layers_of(model)[-1].names):
            matrix.weight.add_(torch.randn(matrix.weight.shape), alpha=0.1)
    before = {matrix.path: matrix.weight.detach().abs() for matrix in matrices_of(model, MODULES)}
    mask_weights.carry_out(first, model, base, 0, data, QUIET)
    adapted, others = mask_weights.carry_out(second, model, base, 0, data, QUIET)["pools"][::-1]
    assert (adapted["pool"], others["pool"]) == ("the adapted matrices", "the other matrices")
    assert others["entries"] == 2 * adapted["entries"] and others["hidden"] == int(0.4 * others["entries"])
    untrained = [matrix for layer in layers_of(model)[:-1] for matrix in map(layer.matrix, layer.names)]
    kept = [before[matrix.path][matrix.mask.keep] for matrix in untrained]
    hidden = [before[matrix.path][~matrix.mask.keep] for matrix in untrained]
    if first.nm is None:
        assert torch.cat(hidden).max() <= torch.cat(kept).min()
    assert all(len(part) for part in kept), "none is emptied"


@pytest.mark.parametrize(
    "keys", [{"remove": 0.5}, {"remove": 0.5, "criterion": "delta", "hides": "weight"}, {"pattern": "2:4"}]
)
def test_of_weights_that_changed_equally_the_smaller_goes(keys):
    """After a sparse tune nearly every ΔW is 0: by |ΔW| alone whole blocks would go, or the same places of every run."""
    item, model = WeightsItem(structure="weights", **keys), tuned(tiny("bert", torch.float32), "selective", MODULES)
    data, changes = Data(rows_of(model, 4), rows_of(model, 4), ["a", "b", "c"], 1), functions.changes_of(model)
    matrices = matrices_of(model, MODULES)
    moved = torch.cat([changes[matrix.path].abs().flatten() for matrix in matrices])
    sizes = torch.cat([matrix.weight.detach().abs().flatten() for matrix in matrices])
    width = item.nm.run if item.nm else len(sizes)
    order = np.lexsort((sizes.view(-1, width), moved.view(-1, width)))
    expected = np.zeros(order.shape, dtype=bool)
    np.put_along_axis(expected, order[:, width // 2 :], True, axis=1)
    mask_weights.carry_out(item, model, None, 0, data, QUIET)
    kept = torch.cat([(matrix.mask or matrix.weight_mask).keep.flatten() for matrix in matrices])
    assert (kept.numpy() == expected.ravel()).all()


def test_what_was_scored_otherwise_before_is_made_again():
    """Of the criteria by the loss, where a row has choices, alone."""
    made = {
        name: PruneConfig(items=[{"structure": "heads", "criterion": name, "remove": 1}])
        for name in ("taylor", "fisher", "delta")
    }
    found = {(name, kind): STAGE.corrected(of, [kind]) for name, of in made.items() for kind in ("choices", "regression")}
    assert {key for key, again in found.items() if again} == {("taylor", "choices"), ("fisher", "choices")}


def test_what_was_merged_otherwise_before_is_made_again():
    """Where the number of outputs does not tell the kind, and transformers has a word for it."""
    again = {kind: merge.STAGE.corrected(merge.MergeConfig(), [kind]) for kind in ("multilabel", "classification", "choices")}
    assert {kind for kind, keys in again.items() if keys} == {"multilabel"}


@pytest.mark.parametrize(
    ("model_type", "auto", "keys", "again"),
    [
        ("bert", "AutoModel", {}, {}),
        ("bert", "AutoModel", None, {"tokens": 2}),  # then a BertTokenizer, which lowers the case
        ("bert", "AutoModel", {"model_input_names": ["input_ids", "attention_mask"]}, {"tokens": 2}),  # without segments
        ("gpt2", "AutoModelForCausalLM", {"clean_up_tokenization_spaces": True}, {"clean_up": 2}),
        ("gpt2", "AutoModel", {"model_input_names": ["input_ids", "token_type_ids"]}, {"tokens": 2, "segments": 2}),
        ("modernbert", "AutoModelForMaskedLM", {}, {"head": 2}),
        ("modernbert", "AutoModelForSequenceClassification", {}, {}),
    ],
)
def test_bases_that_were_read_otherwise_before_are_told(model_type, auto, keys, again, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model", model_type, auto=auto)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({} if keys is None else config | keys))
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["vocab"] |= {".": len(words["model"]["vocab"])}
    (folder / "tokenizer.json").write_text(json.dumps(words))
    assert base_corrections(folder, str(keys), decodes=True) == again
    assert base_corrections(folder, str(keys), decodes=False) == {name: 2 for name in again if name != "clean_up"}


def test_a_base_whose_flops_left_positions_out_is_told(tmp_path, monkeypatch):
    """A DeBERTa that compares one kind of them, and projects both."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model", "deberta-v2")
    config, told = json.loads((folder / "config.json").read_text()), []
    cases = ({}, {"pos_att_type": "p2c|c2p"}, {"pos_att_type": "c2p"}, {"pos_att_type": []}, {"share_att_key": False})
    for keys in (*cases, {"pos_att_type": ["c2p"], "share_att_key": False}):
        (folder / "config.json").write_text(json.dumps(config | keys))
        told.append(base_corrections(folder, str(keys), decodes=False).get("positions"))
    assert told == [None, None, 2, 2, None, None]


@pytest.mark.parametrize(("size", "told"), [(0, {}), (2, {"chunks": 2})])
def test_a_base_whose_neurons_were_scored_by_a_part_of_the_row_is_told(size, told, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model", chunk_size_feed_forward=size)
    assert base_corrections(folder, str(size), decodes=False) == told


@pytest.mark.parametrize("content", [None, "", "[]", '{"tokens": true}'])
def test_what_is_known_of_a_base_is_kept_for_later_processes(content, tmp_path, monkeypatch):
    """By its sha256, so the folder is not looked at again; what cannot be read is found again, and a cache that cannot be
    written stops nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = write_model(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text("{}")
    found = texts_read_otherwise(folder, "a")
    (kept,) = (tmp_path / "cache" / "compress" / "bases").glob("*/a-*.json")
    stored = json.loads(kept.read_text())
    assert stored["texts"] == found != []
    if content is not None:
        kept.write_text(content)
    _facts.cache_clear()  # as in another process
    assert texts_read_otherwise(folder if content is not None else tmp_path / "moved", "a") == found
    assert json.loads(kept.read_text()) == stored
    monkeypatch.setenv("XDG_CACHE_HOME", str(kept))
    assert texts_read_otherwise(folder, "b") == found


GROWN = {"method": "selective", "budget": 9, "control": False}
EVERYTHING = {"method": "selective", "modules": "everything"}
WEIGHTS = {"structure": "weights", "remove": 0.5}
HEADS = {"structure": "heads", "criterion": "random", "remove": 1}
CHECKPOINTS = {**GROWN, "strategy": "increment", "checkpoints": [3], "modules": ["query"], "control": True}


@pytest.mark.parametrize(
    ("stage", "config", "again"),
    [
        ("prune", {"items": [{**WEIGHTS, "pattern": "unstructured", "hides": "weight"}]}, ["equal_changes"]),
        ("prune", {"items": [{**WEIGHTS, "criterion": "weight"}, HEADS, WEIGHTS]}, ["masked_base", "equal_changes"]),
        ("prune", {"items": [WEIGHTS, {**WEIGHTS, "criterion": "weight"}, HEADS]}, ["equal_changes"]),
        ("prune", {"items": [HEADS, {"structure": "weights", "pattern": "2:4", "criterion": "delta"}]}, ["equal_changes"]),
        ("prune", {"items": [HEADS, {**WEIGHTS, "criterion": "weight_plus_delta"}]}, []),
        ("prune", {"structure": "heads", "criterion": "random", "remove": 1, "refit": 8}, ["refit"]),
        ("prune", {"target": {"speedup": 2.0, "lengths": "data", "batch": 48}}, ["rows"]),
        ("prune", {"target": {"speedup": 2.0, "lengths": "data", "batch": 16}}, ["rows"]),  # of 56 rows one had 8
        ("prune", {"target": {"speedup": 2.0, "lengths": "data", "batch": 64}}, []),
        ("prune", {"target": {"speedup": 2.0, "lengths": "data"}}, []),
        ("prune", {"target": {"speedup": 2.0, "batch": 48}}, []),
        ("benchmark", {"batch": [1, 48]}, ["rows", "few_rows"]),
        ("benchmark", {"batch": [1, 48], "real_lengths": False}, ["few_rows"]),
        ("benchmark", {"batch": [1, 64, 65]}, ["few_rows"]),
        ("recover", {**GROWN, "strategy": "increment"}, ["grown_positions"]),
        ("recover", {**GROWN, "strategy": "repeat"}, ["grown_positions"]),
        ("recover", EVERYTHING, ["control_positions"]),
        ("recover", {"method": "selective"}, ["control_positions"]),  # the select before it may say everything
        ("recover", {"method": "child_tuning", "child": "d"}, ["control_positions"]),
        ("recover", {**EVERYTHING, "control": False}, []),
        ("recover", {"method": "selective", "modules": ["query"]}, []),
        ("recover", {"method": "selective", "on": "lora"}, []),
        ("recover", {"method": "dsee"}, []),
        ("recover", {**GROWN, "strategy": "increment", "checkpoints": [3], "augment": 1}, ["spaced_texts", "grown_positions"]),
        ("recover", {**CHECKPOINTS, "augment": 1}, ["control_checkpoints", "spaced_texts", "grown_positions"]),
        ("recover", {**CHECKPOINTS, "augment": 1, "teacher": "t"}, ["spaced_texts", "grown_positions"]),
        ("recover", CHECKPOINTS, ["grown_positions"]),
        ("recover", {"method": "same"}, []),
        ("recover", {"method": "same", "weight_decay": 0.1}, ["norm_decay"]),  # which may train adapters further
        ("recover", {"method": "adapter", "placement": "adapterhub", "weight_decay": 0.1}, ["norm_adapters", "norm_decay"]),
        ("tune", {"method": "adapter", "placement": "adapterhub", "weight_decay": 0.1}, ["norm_decay"]),
        ("tune", {"method": "adapter", "placement": "adapterhub", "weight_decay": 0.0}, []),
        ("tune", {"method": "adapter", "placement": "houlsby", "weight_decay": 0.1}, []),
        ("tune", {"method": "selective", "on": "adapter", "weight_decay": 0.1}, ["norm_decay"]),  # the select may place them so
        ("tune", {"method": "selective", "weight_decay": 0.1}, ["norm_decay"]),
        ("tune", {"method": "selective", "on": "lora", "weight_decay": 0.1}, []),
        ("tune", {"method": "dsee", "weight_decay": 0.1}, []),
        ("tune", {"method": "propetl", "keep": 1}, ["useless_scores"]),
        ("tune", {"method": "propetl", "keep": 1, "masks": "random"}, ["useless_scores"]),  # masks of ones were stored
        ("tune", {"method": "propetl", "keep": 0.5}, []),
        ("recover", {"method": "propetl", "keep": 1.0}, ["useless_scores"]),
        ("select", {"score": "sam"}, ["short_batch"]),  # there may be fewer rows, which its 16 do not divide
        ("select", {"score": "d3", "samples": 1000}, ["short_batch"]),
        ("select", {"score": "sam", "samples": 9600, "batch_size": 16}, []),
        ("select", {"score": "fish"}, []),
        ("select", {"score": "fish", "batch_size": 8}, ["short_batch"]),
        ("select", {"score": "pafi", "on": "adapter"}, []),
        ("select", {"score": "pafi"}, ["hidden_of_w"]),
        ("select", {"score": "random", "modules": "everything"}, ["hidden_of_w"]),
        ("select", {"score": "magnitude"}, []),  # 0 where W is hidden
    ],
)
def test_what_a_correction_changed_is_made_again(stage, config, again):
    """And nothing else."""
    row = load_stage(stage)
    assert list(row.corrected(row.config.model_validate(config), ["classification"])) == again


@pytest.mark.parametrize(("stage", "version"), [("benchmark", 13), ("export", 12)])
def test_differences_that_few_rows_were_said_to_show_are_measured_again(stage, version):
    """Version 12 of a benchmark and 11 of an export called four other predictions a difference."""
    assert load_stage(stage).version >= version


@pytest.mark.parametrize(("metric", "again"), [("macro_f1", True), ("micro_f1", False)])
def test_intervals_that_were_drawn_otherwise_before_are_made_again(tmp_path, monkeypatch, metric, again):
    """Of the metric that was biased, by the stages that measure quality."""
    stages = [{"select": {"score": "rpca"}}, {"tune": {"method": "dsee"}}, {"merge": None}, {"export": None}, {"report": None}]
    project = write_pipeline(tmp_path, kind="multilabel", stages=stages)
    run = prepare(load_pipeline(project, [f"task.metric={metric}"]), tmp_path / "runs")
    found = [fingerprint_of(run, number, ()) for number in range(len(stages))]
    monkeypatch.setattr("pipelines.engine.stage_inputs.kind_for", lambda task: kind_of("classification"))
    before = [fingerprint_of(run, number, ()) for number in range(len(stages))]
    assert [one != other for one, other in zip(found, before, strict=True)] == [False, again, again, again, False]
