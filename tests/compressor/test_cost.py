"""Closed forms against the papers' printed figures and against PyTorch's own counter."""

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForSequenceClassification

from compressor.account import Places
from compressor.checkpoint import load, save_checkpoint
from compressor.compression import compression_of
from compressor.cost import Inserted, LayerShape, ModelShape, human_bytes, paper_flops_ratio, shape_of, share, spendable
from compressor.deltas.links import merge_all
from compressor.methods import Options, method
from compressor.models.anatomy import layers_of, matrices_of
from compressor.models.build import task_head
from compressor.models.modules import EVERYTHING, MODULES
from compressor.pruning.surgery import Removal, remove
from pipelines.file.config import find_pipeline, load_pipeline
from tests.compressor.conftest import APPLIES, CASES, tiny, tuned

BERT_BASE = ModelShape(768, (LayerShape(12, 64, 3072),) * 12, other=0, head=0, head_macs=768 * 768 + 2 * 768)


@pytest.mark.parametrize(("heads", "whole", "paper"), [(3, 0.912, 0.9227), (6, 0.824, 0.8385), (9, 0.737, 0.7543)])
def test_flops_of_bert_base_with_heads_removed(heads, whole, paper):
    """export.md's ratios with attention scores at length 128, and DSEE table 6's 0.92 / 0.84 / 0.75, of the recipe as it is."""
    recipe = load_pipeline(find_pipeline("paper"), [f"prune.remove={heads}"])
    stages = {entry.id: entry.config for entry in recipe.stages}
    (prune,), select = stages["prune"].items, stages["select"]
    delta, places = stages["tune"].options(select.ground(), None, "tune"), select.places.total(BERT_BASE)
    assert (prune.structure, prune.scope, prune.criterion, places) == ("heads", "layer", "delta", 24 * 16)
    pruned = BERT_BASE.with_units(prune.structure, [12 - prune.remove] * 12)
    assert round(pruned.flops(128) / BERT_BASE.flops(128), 3) == whole
    low_rank = sum(delta.rank * (m + n) for _, m, n in pruned.matrices(delta.modules))
    assert round(paper_flops_ratio(pruned, BERT_BASE, low_rank + places), 4) == paper


def test_dense_figures_of_bert_base():
    """22.348 GFLOPs at length 128; LoRA's unmerged 1.0069 x."""
    assert round(BERT_BASE.flops(128) / 1e9, 3) == 22.348
    assert round(paper_flops_ratio(BERT_BASE, BERT_BASE, 24 * 16 * (768 + 768)), 4) == 1.0069


def counted(model) -> int:
    """What torch counts over 2 rows of 7 tokens; where attention is not eager, in matrix products, or it would not be seen.

    Nothing is trained: torch's counter stumbles over an expanded bias that has no gradient function.
    """
    model.requires_grad_(False)
    ids = torch.full((2, 7), 4)
    ids[:, -1] = 3
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(input_ids=ids)
    return counter.get_total_flops()


def test_flops_equal_the_counter(architecture):
    """DeBERTa projects its positions once a batch; T5 decodes as many tokens; a decoder's head looks at each."""
    model = tiny(architecture, torch.float32)
    assert counted(model) == shape_of(model).flops(7, batch=2)


@pytest.mark.parametrize(
    ("architecture", "keys"),
    [
        ("electra", {"embedding_size": 16}),
        ("deberta-v2", {"embedding_size": 16, "conv_kernel_size": 3, "conv_groups": 2}),
    ],
    ids=["electra", "deberta-v2"],
)
def test_layers_outside_the_blocks_compute_every_token(architecture, keys):
    """An ELECTRA's projection of its embeddings, a DeBERTa-v2 xlarge's convolution: not once a row, as a classifier does."""
    model = tiny(architecture, torch.float32, **keys)
    assert counted(model) == shape_of(model).flops(7, batch=2)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kinds", [["c2p"], ["p2c"], []], ids=str)
def test_positions_are_projected_by_query_and_key_whatever_is_compared(kinds, shared):
    model = tiny("deberta-v2", torch.float32, pos_att_type=kinds, share_att_key=shared)
    assert counted(model) == shape_of(model).flops(7, batch=2)


def test_flops_equal_the_counter_after_pruning(architecture, cut):
    model = tiny(architecture, torch.float32)
    remove(model, cut)
    assert counted(model) == shape_of(model).flops(7, batch=2)


@pytest.mark.parametrize("pair", [pair for pair in APPLIES if not method(CASES[pair[0]][0]).mergeable], ids="-".join)
def test_what_cannot_be_merged_is_counted(pair, tmp_path):
    """Adapters, prefixes and prototypes behind masks: FLOPs as torch counts them, and every tensor of the checkpoint."""
    case, architecture = pair
    save_checkpoint(merge_all(tuned(tiny(architecture, torch.float32), case)), tmp_path, tmp_path)
    model = load(tmp_path)
    shape, files = shape_of(model), [load_file(path) for path in tmp_path.glob("*.safetensors")]
    assert shape.flops(7, batch=2) == counted(model)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.bytes == sum(tensor.nbytes for tensors in files for tensor in tensors.values())
    assert (shape.bare.parameters < shape.parameters) == (case != "propetl-lora")


def test_a_prefix_that_loses_heads_no_longer_shares():
    model = tuned(tiny("bert", torch.float32), "propetl-prefix")
    before = shape_of(model)
    remove(model, {1: Removal([0, 2], [])})
    assert shape_of(model) == before.with_units("heads", [4, 2, 4])
    assert shape_of(model).inserted == 2 * 2 * 32 + 2 * 2 * 16


def test_parameters_equal_the_model(architecture):
    model = tiny(architecture)
    remove(model, {1: Removal([0], [2, 3])})
    assert shape_of(model).parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("keys", [{"attention_bias": True}, {"mlp_bias": True}], ids=lambda keys: next(iter(keys)))
def test_biases_that_only_some_matrices_have_are_counted_once(keys):
    """As in Qwen2, whose output and FFN have none; also where a sublayer goes, of which a bias is left or nothing."""
    model = tiny("llama", **keys)
    before, biases = shape_of(model), [p for name, p in model.named_parameters() if name.endswith(".bias")]
    assert before.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert before.biases == method("bitfit").count(before, Options(), 0) == sum(bias.numel() for bias in biases)
    remove(model, {0: Removal([0, 1]), 1: Removal(neurons=list(range(20))), 2: Removal([1], [3])})
    planned = before.with_units("heads", [0, 2, 1]).with_units("neurons", [20, 0, 19])
    assert shape_of(model).parameters == planned.parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("model", "inserted"),
    [
        (lambda: tiny("bert"), 0),
        (lambda: tuned(tiny("bert"), "adapter"), 3 * 2 * 3 * 32),
        (lambda: tiny("electra", embedding_size=16), 0),
    ],
    ids=["bert", "adapters", "a projection of the embeddings"],
)
def test_the_weights_that_a_pass_reads_are_those_of_every_matrix(model, inserted):
    """2 b d of each block's adapter, and of the layers outside the blocks, too."""
    model = model()
    matrices = [module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert shape_of(model).read_weights == sum(matrices) + inserted


def test_the_flops_that_a_file_saves_at_other_tokens_than_the_first():
    """The last block's, of 7 of 8 tokens: all of its 12 d² but keys and values, and QKᵀ and AV over 8 tokens."""
    assert BERT_BASE.unread_flops(8) == 2 * 7 * (10 * 768**2 + 2 * 8 * 768) == 82_747_392


def test_the_papers_ratio_holds_adapters():
    """They are linear layers that stay: 2 b d multiply-adds on top of a block's 12 d²."""
    with_adapters = BERT_BASE.with_inserts([(Inserted("adapter", 48),)] * 12)
    assert paper_flops_ratio(with_adapters, BERT_BASE, 0) == 1 + 2 * 48 * 768 / (12 * 768**2)
    of_last = with_adapters.unread_flops(8) - BERT_BASE.unread_flops(8)
    assert of_last == 2 * 7 * 2 * 48 * 768, "a file computes that of the last block at the first token alone"


def test_human_bytes():
    assert [human_bytes(n) for n in (12, 1536, 2_500_000, 3.2e9)] == ["12 B", "1.5 KB", "2.5 MB", "3.20 GB"]
    assert [human_bytes(n) for n in (999, 999_940, 999_960, 999_999_999)] == ["999 B", "999.9 KB", "1.0 MB", "1.00 GB"]


def test_a_share_is_what_is_written():
    """0.29 of 100 are 29, though 0.29 * 100 is 28.999999999999996; the papers' round down stays: 0.5 % of BERT's matrices."""
    assert all(share(percent / 100, size) == percent * size // 100 for percent in range(1, 100) for size in (7, 100, 768**2))
    assert share(0.005, 12 * (4 * 768**2 + 2 * 768 * 3072)) == 424_673
    assert [share(0.999, 1000), share(1e-7, 10_000_000), share(1e-7, 9_999_999), share(5, 3)] == [999, 1, 0, 5]
    assert spendable(5, 5) == 5, "every position"


SHAPES = {
    "roberta": {"vocab_size": 50265, "max_position_embeddings": 514, "type_vocab_size": 1},
    "bert": {},
    "deberta-v2": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
}
"""Base sizes; the keys that differ from their config's defaults."""


def test_a_scope_is_what_has_entries():
    """Of T5 the decoder's layers alone have cross attention; a layer whose heads are all gone has none."""
    shape = shape_of(tiny("t5"))
    cross = Places(Options(modules=("cross_query", "cross_value")), "layer", count=64)
    assert len(cross.scopes(shape)) == len(shape.layers) // 2 and min(cross.scopes(shape)) > 64
    emptied = tiny("bert")
    remove(emptied, {1: Removal(heads=range(layers_of(emptied)[1].units("heads")))})
    left = Places(Options(modules=("query", "value")), "matrix", count=16)
    assert left.total(shape_of(emptied)) == 16 * 2 * (len(layers_of(emptied)) - 1)


@pytest.mark.parametrize(
    ("architecture", "everything", "matrices"),
    [
        # SAM: floor(m p) = 620,275 at p = 0.005, of the model without pooler and task head
        ("roberta", 124_055_040, 84_934_656),
        # poolers stay frozen: 590,592 parameters of BERT's are not counted
        ("bert", 109_482_240 - 590_592, 84_934_656),
        # ID3: 184 M, of which the matrices of the blocks are 46 %
        ("deberta-v2", 183_831_552, 84_934_656),
    ],
)
def test_everything_is_every_parameter_of_the_base(architecture, everything, matrices):
    with torch.device("meta"):
        config = AutoConfig.for_model(architecture, **SHAPES[architecture])
        model = AutoModelForSequenceClassification.from_config(config)
        compression_of(model).head_parameters = task_head(model)
    shape = shape_of(model)
    for modules, size in ((EVERYTHING, everything), (MODULES, matrices)):
        assert sum(matrix.original.numel() for matrix in matrices_of(model, modules)) == size
        budget = Places(Options(modules=modules), "global", ratio=0.005)
        assert budget.scopes(shape) == [size] and budget.total(shape) == size * 5 // 1000
        growing = Options(modules=modules, strategy="increment", budget=0.005)
        assert method("selective").count(shape, growing, 0) == size * 5 // 1000
    if architecture == "roberta":
        assert everything * 5 // 1000 == 620_275
