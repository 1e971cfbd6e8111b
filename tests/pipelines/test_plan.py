"""What an architecture has no place for is told by the plan, before anything runs."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from compressor.account import Places, Plan
from compressor.cost import shape_of
from compressor.deltas.links import chain, merge_all
from compressor.deltas.sources import settle_prototypes
from compressor.errors import UserError
from compressor.methods import Options, apply
from compressor.methods import method as method_row
from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.architectures import ARCHITECTURES
from compressor.models.build import weightless_model
from compressor.models.modules import MODULES
from compressor.pruning.scores import random_scores
from compressor.pruning.surgery import kept_of, remove, restore_kept
from compressor.pruning.weights import densities
from compressor.storage.changes import describe_changes, restore
from compressor.tasks.data import Data
from export.graph.decoder import trace_generator
from export.graph.trace import trace
from pipelines.engine.stage import Entry
from pipelines.stages.export.config import ExportConfig
from pipelines.stages.export.config import plan as export_plan
from pipelines.stages.merge.config import MergeConfig
from pipelines.stages.merge.config import check as merge_check
from pipelines.stages.prune import mask_weights
from pipelines.stages.prune.config import PruneConfig
from pipelines.stages.prune.config import check as prune_check
from pipelines.stages.prune.config import plan as prune_plan
from pipelines.stages.prune.config import warns as prune_warns
from pipelines.stages.prune.prune_units import PruneItem, count_to_remove
from pipelines.stages.prune.prune_weights import WeightsItem, pools_of, tuned_modules
from pipelines.stages.prune.remove_units import removals_of
from pipelines.stages.prune.run import modules_tuned
from pipelines.stages.recover.config import RecoverConfig
from pipelines.stages.recover.config import check as recover_check
from pipelines.stages.recover.config import plan as recover_plan
from pipelines.stages.trainings import settings_of
from pipelines.stages.tune.config import TuneConfig
from pipelines.stages.tune.config import plan as tune_plan
from tests.compressor.conftest import CASES, EXTRA, GROWING, tiny, tuned
from tests.compressor.test_weight_masks import carry_out
from tests.pipelines.test_precision import rows_of
from tests.pipelines.test_scores import QUIET


@pytest.mark.parametrize(
    ("name", "options", "computes"),
    [
        ("selective", Options(strategy="increment", budget=300), (0, 300)),
        ("selective", Options(strategy="repeat", budget=300), (0, 300)),
        ("propetl", Options(shared="lora", rank=8), (8, 0)),
        ("propetl", Options(), (0, 0)),
        ("lora", Options(rank=8), (8, 0)),
    ],
)
def test_the_papers_flops_count_what_a_method_adds(name, options, computes):
    """Rank and |Ω| of an artifact, also where Ω is chosen while training, and where a LoRA is that of a prototype."""
    model = tiny("bert")
    apply(model, name, options)
    settings = settings_of(method_row(name), options, model)
    assert (settings["rank"], settings["places"]) == computes


@pytest.mark.parametrize(
    ("shared", "told", "untold"), [("adapter", "bottleneck", {"alpha", "rank", "length"}), ("lora", "alpha", {"bottleneck"})]
)
def test_an_artifact_names_the_options_of_its_variant_alone(shared, told, untold):
    model, options = tiny("bert"), Options(shared=shared)
    apply(model, "propetl", options)
    settings = settings_of(method_row("propetl"), options, model)
    assert told in settings and not untold & (settings.keys() - {"rank"})
    assert bool(settings["modules"]) == (shared == "lora"), "an adapter stands behind a sublayer, in no matrix"


@pytest.mark.parametrize("keys", [{}, {"share": False}, {"shared": "lora", "rank": 4}, {"masks": "random"}], ids=str)
def test_what_goes_on_of_propetl_are_its_prototypes(keys):
    """The scores of its masks are not stored: `same` behind it trains fewer parameters than it did."""
    model, again = tiny("bert"), tiny("bert").requires_grad_(False)
    config = TuneConfig(method="propetl", **keys)
    apply(model, "propetl", config.options(None, None, ""))
    restore(again, *describe_changes(model))
    trained = sum(parameter.numel() for parameter in again.parameters() if parameter.requires_grad)
    assert recover_plan(RecoverConfig(), tune_plan(config, start("bert"))).trainable[-1][1] == trained


HEADS = {"structure": "heads", "criterion": "random", "remove": 1}


@pytest.mark.parametrize(
    ("keys", "item", "searched"),
    [
        ({"shared": "lora"}, HEADS, False),
        ({"shared": "lora", "modules": "all"}, HEADS, False),  # of the neurons one prototype is left
        ({"shared": "lora"}, {**HEADS, "structure": "neurons"}, False),
        ({"shared": "lora", "modules": "all"}, {**HEADS, "structure": "layers"}, False),
        ({"shared": "lora", "share": False}, HEADS, False),
        ({"shared": "prefix"}, HEADS, False),
        ({"shared": "prefix", "reparametrize": True}, HEADS, False),
        ({}, HEADS, False),
        ({"shared": "lora"}, HEADS, True),
        ({"shared": "prefix"}, HEADS, True),
    ],
    ids=str,
)
def test_what_goes_on_of_propetl_behind_a_prune_is_of_each_block(keys, item, searched):
    """Blocks that were cut share no prototype: each trains its part of it. Where only a run decides which, it is the most."""
    model, again = tiny("bert"), tiny("bert").requires_grad_(False)
    config = TuneConfig(method="propetl", **keys)
    apply(model, "propetl", config.options(None, None, ""))
    settle_prototypes(model)
    remove(model, removals_of(PruneItem(**item), model, random_scores(model, item["structure"], 0)))
    restore_kept(again, kept_of(model))
    restore(again, *describe_changes(model))
    trained = sum(parameter.numel() for parameter in again.parameters() if parameter.requires_grad)
    prune = PruneConfig(search={"target": {"speedup": 2}}) if searched else PruneConfig(items=[item])
    counted = recover_plan(RecoverConfig(), prune_plan(prune, tune_plan(config, start("bert")))).trainable[-1][1]
    assert counted >= trained if searched else counted == trained


def start(architecture: str, **keys) -> Plan:
    model = tiny(architecture, **keys)
    return Plan(shape_of(model), shape_of(model), model)


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("llama", {"method": "bitfit"}),
        ("deberta-v2", {"method": "prefix"}),
        ("mpnet", {"method": "propetl", "shared": "prefix"}),
    ],
)
def test_a_method_without_a_place(architecture, config):
    with pytest.raises(UserError, match=f"E407 .*'{architecture}'"):
        tune_plan(TuneConfig(**config), start(architecture))


def test_heads_that_span_more_than_the_anatomy_knows(monkeypatch):
    monkeypatch.setitem(EXTRA["deberta-v2"], "share_att_key", False)
    heads, neurons = ({"structure": name, "criterion": "taylor", "remove": 1} for name in ("heads", "neurons"))
    for config in (PruneConfig(items=[heads]), PruneConfig(search={"target": {"flops": 0.9}})):
        with pytest.raises(UserError, match=r"E307 .*share_att_key"):
            prune_plan(config, start("deberta-v2"))
    for config in (PruneConfig(items=[neurons]), PruneConfig(search={"target": {"flops": 0.95}, "structures": ["neurons"]})):
        assert prune_plan(config, start("deberta-v2")).shape.parameters < start("deberta-v2").shape.parameters


def test_blocks_that_find_their_mask_by_place_are_searched_in_no_plan(monkeypatch):
    facts = {"use_sliding_window": True, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"] * 2}
    monkeypatch.setitem(EXTRA, "qwen3", {**EXTRA["qwen3"], **facts, "num_hidden_layers": 4})
    search = {"target": {"speedup": 1.5}, "structures": ["layers", "neurons"]}
    with pytest.raises(UserError, match=r"E501 .*find their attention mask by their place"):
        prune_plan(PruneConfig(search=search), start("qwen3"))
    search = {"target": {"speedup": 1.5}, "structures": ["neurons"]}
    assert prune_plan(PruneConfig(search=search), start("qwen3")).shape == start("qwen3").shape


WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("architecture", "keys", "cache"),
    [("qwen3", WINDOWS, "DynamicSlidingWindowLayer"), ("gpt2", {"add_cross_attention": True}, "EncoderDecoderCache")],
)
def test_a_cache_that_is_not_exported_is_told_before_the_training(architecture, keys, cache):
    """As the export itself would say; a classifier has no cache."""
    plan = start(architecture, auto=AutoModelForCausalLM, dtype=torch.float32, **keys)
    for tells in (lambda: export_plan(ExportConfig(), plan), lambda: trace_generator(plan.model)):
        with pytest.raises(UserError, match=rf"E623 .*\({cache}\)"):
            tells()
    for exported in (start(architecture, **keys), start(architecture, auto=AutoModelForCausalLM)):
        assert export_plan(ExportConfig(), exported) == exported


LONG_ROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(("kind", "keys"), [("dynamic", {"factor": 2.0}), ("longrope", LONG_ROPE)])
@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForCausalLM])
def test_positions_that_no_graph_computes_are_told_before_the_training(auto, kind, keys):
    plan = start("llama", auto=auto, rope_scaling={"type": kind, **keys})
    sample = dict.fromkeys(("input_ids", "attention_mask"), np.ones((2, 3), np.int64))
    for tells in (lambda: export_plan(ExportConfig(), plan), lambda: trace(plan.model, sample)):
        with pytest.raises(UserError, match=rf"E622 .*rope_type: {kind} "):
            tells()
    linear = start("llama", auto=auto, rope_scaling={"type": "linear", "factor": 2.0})
    assert export_plan(ExportConfig(), linear) == linear


@pytest.mark.parametrize(
    ("architecture", "item", "says"),
    [
        ("llama", {"structure": "heads", "remove": 2}, "leaves none of the 2 heads of a layer. Use at most 1"),
        ("bert", {"structure": "layers", "remove": 3}, "leaves none of the 3 layers. Use at most 2"),
        ("t5", {"structure": "layers", "remove": 5}, "leaves 1 of the 6 layers. Use at most 4"),
        ("bert", {"structure": "heads", "scope": "global", "remove": 12}, "leaves none of the 12 heads. Use at most 11"),
        ("bert", {"structure": "heads", "remove": 0.1}, "is less than one of the 4 heads"),
        ("bert", {"structure": "cross_heads", "remove": 1}, "there are no cross_heads to remove"),
    ],
)
def test_what_cannot_be_removed(architecture, item, says):
    """Groups of heads for Llama; T5's first blocks make the position bias of the others."""
    with pytest.raises(UserError, match=f"E501 .*{says}"):
        prune_plan(PruneConfig(items=[{"criterion": "taylor", **item}]), start(architecture))


@pytest.mark.parametrize("remove", [0.5, 1, 3])
def test_nothing_is_advised_where_nothing_can_be_removed(remove):
    """Of a layer with one head: as an earlier prune by global ranks may leave it."""
    plan = start("bert")
    uneven = replace(plan, shape=plan.shape.with_units("heads", [1, 4, 4]))
    with pytest.raises(UserError, match=r"E501 none of the 1 heads of a layer can be removed: 1 must stay\. Leave out"):
        prune_plan(PruneConfig(items=[{"structure": "heads", "remove": remove}]), uneven)


GLOBAL = {"structure": "heads", "scope": "global", "remove": 0.5}


@pytest.mark.parametrize(
    ("first", "then", "told"),
    [
        ([GLOBAL], {"structure": "heads", "remove": 3}, ["heads a layer keeps, and 'prune-2' removes 3 of each: E501"]),
        ({"target": {"speedup": 2}}, {"structure": "heads", "remove": 0.5}, ["how many heads a layer keeps"]),
        ({"target": {"flops": 0.5}}, {"structure": "neurons", "remove": 9}, ["how many neurons a layer keeps"]),
        ([GLOBAL, {"structure": "heads", "remove": 1}], {"structure": "neurons", "remove": 9}, ["later item removes 1"]),
        ({"target": {"flops": 0.5}}, {"structure": "neurons", "remove": 0.5}, []),
        ([GLOBAL], GLOBAL, []),
        ([GLOBAL], {"structure": "neurons", "remove": 9}, []),
        ([GLOBAL], {"structure": "weights", "remove": 0.5}, []),
        ([{"structure": "heads", "remove": 1}], {"structure": "heads", "remove": 1}, []),
    ],
)
def test_a_removal_from_layers_that_only_the_run_knows_is_told(first, then, told):
    later = (Entry("recover", "recover", RecoverConfig()), Entry("prune-2", "prune", PruneConfig.model_validate(then)))
    found = [*prune_warns(PruneConfig.model_validate(first), later)]
    assert len(found) == len(told) and all(words in text for words, text in zip(told, found, strict=True)), found


POOLS = {"remove": {"adapted": 0.6, "others": 0.2}}


@pytest.mark.parametrize(
    ("first", "then", "refused"),
    [
        (POOLS, {"remove": 0.5}, "the adapted matrices"),
        (POOLS, {"remove": 0.6}, ""),
        ({"remove": 0.6, "modules": "query"}, {"remove": 0.4}, ""),
        ({"remove": 0.6, "modules": "query", "scope": "matrix"}, {"remove": 0.4, "scope": "matrix"}, "query 0"),
        ({"remove": 0.5, "scope": "matrix"}, {"remove": 0.4}, "the adapted matrices"),
        ({"remove": 0.5, "criterion": "weight"}, {"remove": 0.3}, "these modules"),
        ({"pattern": "1:4"}, {"remove": 0.7}, "the adapted matrices"),
        ({"pattern": "1:4"}, {"remove": 0.8}, ""),
        ([{"pattern": "1:4", "modules": "ffn_in"}, {"pattern": "1:2"}], {"remove": 0.5}, "the other matrices"),
        ([{"pattern": "1:4", "modules": "ffn_in"}, {"pattern": "1:2"}], {"remove": 0.6}, ""),
    ],
)
def test_a_prune_of_weights_is_compared_with_those_before_pool_by_pool(first, then, refused):
    """The plan refuses what a run would refuse behind a training, and nothing else."""
    *first, then = (
        WeightsItem(structure="weights", **keys) for keys in (*(first if isinstance(first, list) else [first]), then)
    )
    plan = prune_plan(PruneConfig(items=first), tune_plan(TuneConfig(method="lora"), start("bert")))
    model = tuned(tiny("bert"), "lora", ("query", "value"))
    for item in first:
        carry_out(model, item)
    if not refused:
        prune_plan(PruneConfig(items=[then]), plan)
        carry_out(model, then)
        return
    with pytest.raises(UserError, match=f"E501 .* weights of {refused} are zero already"):
        prune_plan(PruneConfig(items=[then]), plan)
    with pytest.raises(UserError, match=r"E501 .* weights are zero already"):
        carry_out(model, then)


ALONE = {"remove": 0.2, "hides": "weight"}
LORA, ADAPTER = {"method": "lora"}, {"method": "adapter"}
REFITTED = {"structure": "heads", "criterion": "random", "remove": 1, "refit": 8}


@pytest.mark.parametrize(
    ("tuned_by", "prunes", "fix"),
    [
        (LORA, [[ALONE]], "Use merge: false in export, or leave out hides: weight in the prune"),
        (LORA, [[{**ALONE, "modules": "ffn_in"}]], ""),
        (ADAPTER, [[ALONE]], ""),
        ({"method": "bitfit"}, [[ALONE]], ""),
        (ADAPTER, [REFITTED, [ALONE]], "Use merge"),
        (ADAPTER, [[ALONE], REFITTED], ""),
        (LORA, [[ALONE, {"remove": 0.4}]], ""),
        (LORA, [[ALONE], [{"remove": 0.4, "modules": ["query", "value"]}]], ""),
        (LORA, [[ALONE], [{"remove": 0.4, "modules": "query"}]], "Leave out hides: weight in the prune"),
        (LORA, [[ALONE], [{"pattern": "2:4"}]], "Leave out hides: weight in the prune"),
        (LORA, [[{"remove": 0.1}], [ALONE]], "Leave out hides: weight in the prune"),
    ],
    ids=str,
)
def test_a_merge_is_refused_where_it_fills_what_a_mask_hides_of_w_alone(tuned_by, prunes, fix):
    """Where a ΔW is, and no later mask over the sum hides as much; files without a merge have no mask over the sum."""
    weights = {"structure": "weights"}
    items = [[weights | item for item in prune] if isinstance(prune, list) else prune for prune in prunes]
    entries = [Entry(f"prune-{number}", "prune", PruneConfig.model_validate(keys)) for number, keys in enumerate(items)]
    earlier = (Entry("tune", "tune", TuneConfig(**tuned_by)), *entries)
    found = [*merge_check(MergeConfig(), earlier)]
    assert [problem.code for problem in found] == ["E412"] * bool(fix) and all(one.fix.startswith(fix) for one in found)


@pytest.mark.parametrize("structure", ["heads", "neurons", "layers"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_plan_of_a_global_ranking_has_the_parameters_of_any_outcome(structure, architecture):
    """Every unit of a structure costs the same wherever it is, unless a sublayer is emptied."""
    item = PruneItem(structure=structure, criterion="random", scope="global", remove=2)
    found = start(architecture)
    planned = prune_plan(PruneConfig(items=[item]), found).shape
    if structure == "layers" and architecture == "t5":
        return  # a block of the decoder has more than one of the encoder
    model = tiny(architecture)
    remove(model, removals_of(item, model, random_scores(model, structure, 3)))
    emptied = any(not layer.units("heads") for layer in layers_of(model))
    assert emptied or shape_of(model).parameters == planned.parameters


@pytest.mark.parametrize("item", [{"remove": {"adapted": 0.37, "others": 0.11}}, {"pattern": "1:4"}], ids=["pools", "1:4"])
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_the_plan_counts_the_weights_that_will_be_left(architecture, item):
    """Exactly, also behind removed heads; after heads that go later, about."""
    item = WeightsItem(structure="weights", **item)
    heads = {"structure": "heads", "criterion": "taylor", "remove": 1}
    tuned_plan = tune_plan(TuneConfig(method="lora", modules=["value", "output"]), start(architecture))
    plan = prune_plan(PruneConfig(items=[heads, item]), tuned_plan)
    model = tuned(tiny(architecture), "lora", ("value", "output"))
    remove(model, removals_of(PruneItem(**heads), model, random_scores(model, "heads", 0)))
    carry_out(model, item)
    (only,) = densities(model)
    assert plan.sparsity[0].nonzeros(plan.shape) == (only.nonzeros, True)
    assert plan.sparsity[0].entries == only.entries
    later = prune_plan(PruneConfig(items=[item, heads]), tuned_plan)
    assert later.sparsity[0].row(later.dense, later.shape)[2].startswith("about ")


@pytest.mark.parametrize(
    ("config", "touches"),
    [
        ({"method": "full"}, True),
        ({"method": "lora"}, True),
        ({"method": "propetl", "shared": "lora"}, True),
        ({"method": "propetl"}, False),
        ({"method": "adapter"}, False),
        ({"method": "selective", "strategy": "increment", "budget": 9, "on": "lora"}, True),
        ({"method": "selective", "strategy": "increment", "budget": 9, "on": "adapter"}, False),
    ],
)
def test_which_methods_leave_a_delta_to_prune_by(config, touches):
    """The plan and the check of the file say the same: no training is spent on what cannot be pruned by it."""
    config = TuneConfig(**config)
    expected = set(MODULES) if config.method == "full" else {"query", "value"} if touches else set()
    assert tuned_modules(tune_plan(config, start("bert"))) == [expected] * 3
    heads = PruneConfig(items=[{"structure": "heads", "criterion": "delta", "remove": 1}])
    faults = [one.code for one in prune_check(heads, (Entry("tune", "tune", config),))]
    assert faults == ([] if touches else ["E502"])


def test_the_pools_of_a_model_of_which_the_last_blocks_were_trained():
    """The plan ranks the matrices of those blocks apart from the others, as the run does; with what other stages moved."""
    last, item = {"method": "full", "top": 1}, WeightsItem(structure="weights", **POOLS)
    plan, model = tune_plan(TuneConfig(**last), start("bert")), tiny("bert")
    matrices = matrices_of(model, item.modules)
    adapted = [matrix.path.startswith(layers_of(model)[-1].path) for matrix in matrices]
    found = pools_of(item, [matrix.path for matrix in matrices], [matrix.original.numel() for matrix in matrices], adapted)
    assert [count for _, count in prune_plan(PruneConfig(items=[item]), plan).sparsity[0].parts] == [one.count for one in found]
    plan = tune_plan(TuneConfig(method="lora"), start("bert"))
    assert tuned_modules(recover_plan(RecoverConfig(**last), plan)) == [{"query", "value"}, {"query", "value"}, set(MODULES)]


@pytest.mark.parametrize("criterion", ["delta", "delta_or_weight"])
def test_the_pools_where_a_tuned_matrix_has_no_position(criterion):
    """Of positions that are chosen in the whole model a matrix may get none: it is ranked with the tuned ones nonetheless."""
    of_query = Options(modules=("query",))
    plan = replace(start("bert"), places=Places(of_query, "global", count=3))
    plan = tune_plan(TuneConfig(method="selective", modules=["query"]), plan)
    keys = {"modules": ["query"], "remove": 0.5} if criterion == "delta" else POOLS
    item, model = WeightsItem(structure="weights", criterion=criterion, **keys), tiny("bert", torch.float32)
    first = matrices_of(model, of_query.modules)[0]
    options = replace(of_query, omega={first.path: torch.arange(3, dtype=torch.int32)})
    apply(model, "selective", options)
    torch.nn.init.ones_(chain(first.owner)[0].values)
    trained = {"method": "selective", "trainable": 3, **settings_of(method_row("selective"), options, model)}
    data = Data(rows_of(model, 4), rows_of(model, 4), ["a", "b", "c"], 1)
    tuned = modules_tuned(SimpleNamespace(artifacts=[SimpleNamespace(metadata=trained)]))
    mask_weights.carry_out(item, model, None, 0, data, QUIET, tuned)
    planned = prune_plan(PruneConfig(items=[item]), plan).sparsity[0]
    (only,) = (row for row in densities(model) if row.pattern)
    assert (only.entries, only.nonzeros) == (planned.entries, planned.nonzeros(plan.shape)[0])


@pytest.mark.parametrize(
    ("trainings", "modules"),
    [
        ([{"method": "full", "trainable": 9}], set(MODULES)),
        ([{"method": "full", "trainable": 9, "top": 1}, {"method": "full"}], set()),  # the last one is of a prune
        ([{"method": "lora", "trainable": 9, "modules": ["query"]}, {"method": "adapter", "trainable": 9}], {"query"}),
    ],
)
def test_the_run_knows_what_was_tuned_in_every_block(trainings, modules):
    assert modules_tuned(SimpleNamespace(artifacts=[SimpleNamespace(metadata=facts) for facts in trainings])) == modules


@pytest.mark.parametrize(
    ("trainings", "refused"),
    [
        ([{"method": "full", "top": 1}, {"method": "lora"}], []),
        ([{"method": "full", "top": 1}, {"method": "lora"}, {"method": "same"}], []),
        ([{"method": "lora"}, {"method": "full", "top": 1}, {"method": "lora"}], []),
        ([{"method": "lora"}, {"method": "full", "top": 1}], ["E404"]),
    ],
)
def test_same_is_of_the_last_training_and_refused_where_that_was_of_the_last_blocks(trainings, refused):
    (first, *others), heads = trainings, Entry("prune", "prune", PruneConfig(items=[HEADS]))
    recoveries = [Entry(f"recover-{number}", "recover", RecoverConfig(**keys)) for number, keys in enumerate(others)]
    earlier = (Entry("tune", "tune", TuneConfig(**first)), heads, *recoveries)
    assert [problem.code for problem in recover_check(RecoverConfig(), earlier)] == refused
    plan = tune_plan(TuneConfig(**first), start("bert"))
    for keys in [*others, {}] if not refused else ():
        plan = recover_plan(RecoverConfig(**keys), plan)
    last = max(number for number, keys in enumerate(trainings) if keys["method"] == "lora")
    assert refused or plan.trainable[-1][1] == plan.trainable[last][1], "the last lora is trained further"


UNEVEN = {"structure": "neurons", "criterion": "weight", "scope": "global", "remove": 0.5}


@pytest.mark.parametrize(
    ("earlier", "fits"),
    [
        ([{"target": {"flops": 0.7}}], True),
        ([{"target": {"flops": 0.7}}, {"target": {"flops": 0.5}, "structures": ["heads"]}], True),
        ([UNEVEN, {"target": {"flops": 0.5}}], False),
        ([UNEVEN, {"target": {"flops": 0.5}, "structures": ["heads"]}], False),
        ([{"target": {"speedup": 1.2}}, {"target": {"speedup": 1.5}}], False),
    ],
)
def test_a_pattern_fits_behind_a_target_unless_the_layers_were_uneven(earlier, fits):
    """Of 256 neurons a search keeps a multiple of 8, of as many as a cut left, any number."""
    model = tiny("bert", intermediate_size=256)
    plan = Plan(shape_of(model), shape_of(model), model)
    for config in earlier:
        plan = prune_plan(PruneConfig.model_validate(config), plan)
    pattern = PruneConfig.model_validate({"structure": "weights", "pattern": "2:4"})
    if fits:
        assert prune_plan(pattern, plan).sparsity
        return
    with pytest.raises(UserError, match=r"E505 only the run decides how many neurons each layer keeps: .* ffn_out"):
        prune_plan(pattern, plan)


@pytest.mark.parametrize(
    ("earlier", "recover", "uneven"),
    [
        ([GLOBAL], {"shared": "lora"}, "heads"),
        ([GLOBAL], {"shared": "prefix"}, "heads"),
        ([UNEVEN], {"shared": "lora", "modules": "all"}, "neurons"),
        ([{"target": {"speedup": 2}, "structures": ["heads"]}], {"shared": "lora"}, "heads"),
        ([GLOBAL], {"shared": "adapter"}, ""),
        ([GLOBAL], {"shared": "lora", "share": False}, ""),
        ([UNEVEN], {"shared": "lora"}, ""),
        ([UNEVEN], {"shared": "prefix"}, ""),
        ([{**GLOBAL, "structure": "layers"}], {"shared": "lora"}, ""),
        ([{**GLOBAL, "scope": "layer"}], {"shared": "lora"}, ""),
    ],
    ids=str,
)
def test_no_prototype_serves_blocks_of_which_only_the_run_knows_the_size(earlier, recover, uneven):
    plan, recover = tune_plan(TuneConfig(method="lora"), start("bert")), RecoverConfig(method="propetl", **recover)
    for config in earlier:
        plan = prune_plan(PruneConfig.model_validate(config), plan)
    if not uneven:
        assert recover_plan(recover, plan).trainable[-1][1] > 0
        return
    with pytest.raises(UserError, match=rf"E407 only the run decides how many {uneven} each layer keeps: .*Use share: false"):
        recover_plan(recover, plan)


@pytest.mark.parametrize(("share", "units", "gone"), [(0.5, 5, 2), (0.5, 7, 3), (0.3, 5, 1), (0.3, 12, 4), (0.35, 10, 3)])
def test_a_share_of_units_is_the_nearest_count_of_two_the_fewer(share, units, gone):
    assert count_to_remove(share, units, 0, "heads") == gone


def test_no_weights_to_hide():
    plan = start("bert")
    gone = replace(plan, shape=plan.shape.with_units("neurons", [0, 0, 0]))
    with pytest.raises(UserError, match="E501 no weights are left in ffn_out"):
        prune_plan(PruneConfig(items=[{"structure": "weights", "remove": 0.5, "modules": "ffn_out"}]), gone)


@pytest.mark.parametrize("case", [*CASES, *GROWING])
def test_every_method_can_be_tried_on_a_weightless_model(case, tmp_path):
    """As the plan does it: no weights, only shapes."""
    method, kind = {**CASES, **GROWING}[case]
    tiny("bert").save_pretrained(tmp_path)
    model = weightless_model(tmp_path, ["a", "b", "c"])
    plan = Plan(shape_of(model), shape_of(model), model)
    assert tune_plan(TuneConfig(method=method, **kind), plan).trainable[0][1] >= 0


@pytest.mark.parametrize("case", ["adapter-houlsby", "prefix", "propetl", "lora"])
def test_the_plan_holds_what_a_method_leaves_in_the_model(case):
    """As the tuned and merged model has it; a second stage's adapters come on top of the first's."""
    method, kind = CASES[case]
    config = {"method": method, **kind, "length": 2, "bottleneck": 3, "rank": 2}
    config = {key: value for key, value in config.items() if key in ("method", *kind, *method_row(method).reads)}
    planned = recover_plan(RecoverConfig(method="adapter", bottleneck=5), tune_plan(TuneConfig(**config), start("bert")))
    model = tuned(tiny("bert"), case)
    apply(model, "adapter", Options(bottleneck=5, group="2"))
    real = shape_of(merge_all(model))
    assert planned.shape.inserted == real.inserted and planned.shape.parameters == real.parameters
    assert (planned.shape.bytes, planned.shape.flops(9)) == (real.bytes, real.flops(9))
    told = {row[0]: row[2] for row in planned.rows()}
    kinds = "adapters and prefixes" if case == "prefix" else "adapters"
    assert told[f"of these {kinds} (cannot be merged)"] == f"{real.inserted:,}"
    assert not any("merged" in row[0] for row in start("bert").rows())


def test_the_plan_counts_what_a_growing_tune_will_train():
    plan = tune_plan(TuneConfig(method="selective", strategy="increment", budget=0.01, modules="all"), start("llama"))
    shape = plan.shape
    assert plan.trainable == (("tune", int(0.01 * sum(out * into for _, out, into in shape.matrices()))),)
