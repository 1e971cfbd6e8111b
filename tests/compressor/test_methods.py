"""One harness: every tuning method on every architecture."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from compressor.checkpoint import load, load_state, save_checkpoint, save_state
from compressor.compression import compression_of
from compressor.cost import LayerShape, ModelShape, shape_of
from compressor.deltas.inserts import has_inserts
from compressor.deltas.kinds.adapter import Adapter
from compressor.deltas.kinds.low_rank import LowRank
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.kinds.prefix import Prefix
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import attach, chain, chains, delta_of, detach, merge_all, merged_copy
from compressor.deltas.sources import PlainTensors, Scores
from compressor.errors import UserError
from compressor.methods import NAMES, Options, apply, trainable_counts
from compressor.methods import method as method_row
from compressor.models.anatomy import layers_of, matrices_of
from compressor.pruning.surgery import Removal, remove
from tests.compressor.conftest import CASES, GATED, OPTIONS, REFUSED, encoding, logits, prepared, tiny, tuned

MODULES = ("query", "value", "ffn_out")
PREFIXES = {"prefix", "prefix-reparametrized", "propetl-prefix", "propetl-prefix-reparametrized"}
STARTS_ELSEWHERE = {*PREFIXES, "mam", "propetl", "propetl-only-mask"}
"""Cases whose model answers otherwise before the first step."""


@pytest.mark.parametrize(("case", "architecture"), [(case, name) for case, names in REFUSED.items() for name in names])
def test_a_method_without_its_modules_is_refused(case, architecture):
    with pytest.raises(UserError, match="E407"):
        prepared(tiny(architecture, torch.float32), case)


def test_identity_at_the_start(pair):
    case, architecture = pair
    model = tiny(architecture)
    before = logits(model)
    prepared(model, case, MODULES)
    assert torch.equal(logits(model), before) != (case in STARTS_ELSEWHERE)


def test_trainable_count_is_the_closed_form(pair):
    case, architecture = pair
    model = tiny(architecture)
    options, row = prepared(model, case, MODULES), method_row(CASES[case][0])
    shape, counts, head = shape_of(model), trainable_counts(model), compression_of(model).head_parameters
    assert counts["head"] == sum(p.numel() for name, p in model.named_parameters() if name in head)
    assert counts["body"] == row.count(shape, options, sum(len(omega) for omega in options.omega.values()))


def test_merge_is_bit_equal(pair):
    case, architecture = pair
    name, kind = CASES[case]
    model = tuned(tiny(architecture), case, MODULES)
    before = logits(model)
    chained = any(chains(model))
    assert torch.equal(logits(merged_copy(model)), before)
    assert any(chains(model)) == chained, "a merged copy must leave the chains alone"
    assert torch.equal(logits(merge_all(model)), before)
    assert not any(chains(model))
    mergeable = method_row(name).mergeable
    if not isinstance(mergeable, bool):
        options = Options(**kind)
        mergeable = mergeable[options.on if name == "selective" else options.shared]
    assert has_inserts(model) != mergeable


def test_checkpoint_reloads_bit_equal(pair_of_case, tmp_path):
    """Merged, with the adapters and prefixes that cannot be: such a folder must not load as a stock model without them."""
    case, architecture = pair_of_case
    model = merge_all(tuned(tiny(architecture, torch.float32), case, MODULES))
    before = logits(model)
    save_checkpoint(model, tmp_path, tmp_path)
    assert torch.equal(logits(load(tmp_path)), before)
    if has_inserts(model):
        with pytest.raises(OSError, match="no file named"):
            AutoModelForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "optimizer_of",
    [
        lambda ps: torch.optim.AdamW(ps, lr=0.1, weight_decay=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, weight_decay=0.1),
    ],
    ids=["adamw-decay", "sgd-momentum-decay"],
)
def test_only_the_named_places_move(architecture, optimizer_of):
    """Weight decay, momentum, clipping and accumulated batches: outside Ω every weight stays the same bit for bit."""
    model = tiny(architecture)
    matrix = layers_of(model)[1].matrix("value")
    before, omega = matrix.original.detach().clone(), torch.tensor([3, 50, 95], dtype=torch.int32)
    model.requires_grad_(False)
    matrix.attach(Sparse.start(matrix.original, omega))
    values = chain(matrix.owner)[-1].values
    optimizer = optimizer_of([values])
    for _ in range(3):
        optimizer.zero_grad()
        for batch in (encoding(), encoding(2, 7)):
            model(**batch).logits.square().sum().backward()
        torch.nn.utils.clip_grad_norm_([values], 1.0)
        optimizer.step()
    moved = (matrix.weight != before).flatten().nonzero().flatten()
    assert torch.equal(moved, omega.long())
    assert torch.equal(matrix.original, before)


@pytest.mark.parametrize(("architecture", "wide"), [("t5", {"ffn_in": "wi"}), (GATED, {"ffn_in": "wi_1", "ffn_gate": "wi_0"})])
def test_every_t5_keeps_its_matrices_under_the_same_names(architecture, wide):
    """A gate is what goes through the activation; both stacks have it."""
    model = tiny(architecture)
    for layer in layers_of(model):
        ffn = {name: layer.linear_path(name).rpartition(".")[2] for name in layer.names if name.startswith("ffn")}
        assert ffn == {**wide, "ffn_out": "wo"}
        named = {layer.linear(name) for name in layer.names}
        assert named == {module for module in layer.module.modules() if isinstance(module, torch.nn.Linear)}


def test_detach_restores_the_base(architecture):
    model = tiny(architecture)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tuned(model, "dsee", MODULES)
    for _, layer, name in list(chains(model)):
        detach(layer, name)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_delta_goes_in_front_of_the_masks():
    layer = torch.nn.Linear(4, 3)
    attach(layer, Mask(torch.ones(3, 4, dtype=torch.bool)))
    attach(layer, Mask(torch.zeros(3, 4, dtype=torch.bool)))
    attach(layer, LowRank.start(layer.weight, 2, 4.0))
    attach(layer, Sparse(torch.tensor([1]), torch.ones(1)))
    assert [link.kind for link in chain(layer)] == ["low_rank", "sparse", "mask", "mask"]
    assert not layer.weight.any()


def test_delta_of_leaves_the_mask_out():
    layer = torch.nn.Linear(4, 3)
    attach(layer, Sparse(torch.tensor([1, 5]), torch.tensor([2.0, -3.0])))
    attach(layer, Mask(torch.zeros(3, 4, dtype=torch.bool)))
    expected = torch.zeros(12)
    expected[[1, 5]] = torch.tensor([2.0, -3.0])
    assert torch.allclose(delta_of(layer).flatten(), expected, atol=1e-6)
    assert not layer.weight.any()


def test_dsee_counts_of_the_paper():
    """DSEE table 1: BERT-base, query and value of 12 layers: 589,824 + 384 at rank 16, 294,912 at rank 8."""
    row = method_row("dsee")
    bert = ModelShape(768, (LayerShape(12, 64, 3072),) * 12, other=0, head=0, head_macs=0)
    count = lambda rank, places: row.count(bert, Options(rank=rank), places)  # noqa: E731
    assert (count(16, 24 * 16), count(8, 0)) == (589_824 + 384, 294_912)


def test_full_tuning_of_the_last_blocks():
    """DSEE table 4, FT-Top2 of GPT-2 medium: 25.19M."""
    config = AutoConfig.for_model("gpt2", n_embd=1024, n_layer=24, n_head=16, num_labels=2)
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    compression_of(model).head_parameters = frozenset({"score.weight"})
    apply(model, "full", Options(top=2))
    count = method_row("full").count(shape_of(model), Options(top=2), 0)
    assert trainable_counts(model)["body"] == count == 25_192_448
    with pytest.raises(UserError, match="E414 top is 25, the model has 24 blocks"):
        apply(model, "full", Options(top=25))


def test_mam_of_the_paper():
    """He et al. 2022, section 4.6: prefixes of 30 positions and bottlenecks of 512, here in BERT-base: 6.7 % of it."""
    bert = ModelShape(768, (LayerShape(12, 64, 3072),) * 12, other=0, head=0, head_macs=0)
    assert method_row("mam").defaults[None] == {"length": 30, "bottleneck": 512}
    count = method_row("mam").count(bert, Options(length=30, bottleneck=512), 0)
    assert count == 12 * (2 * 30 * 768 + 2 * 512 * 768 + 512 + 768) == 10_005_504


def test_adapters_of_adapterhub_and_of_mam_compute_their_formulas():
    """LN(s + f(LN(s))) and h + 4 f(x), f(x) = up(ReLU(down(x))), in a block of BERT by hand."""

    def f(change, x):
        read = change.source.read
        return torch.relu(x @ read("down").T + read("down_bias")) @ read("up").T + read("up_bias")

    x = torch.randn(2, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for case in ("adapter-adapterhub", "mam"):
        model = tuned(tiny("bert"), case)
        block = model.bert.encoder.layer[0]
        dense, norm = block.output.dense, block.output.LayerNorm
        bare = lambda layer, y: type(layer).forward(layer, y)  # noqa: E731
        with torch.no_grad():
            h = bare(dense, block.intermediate(x))
            if case == "mam":
                expected = bare(norm, h + 4 * f(dense.inserts[0], x) + x)
            else:
                expected = bare(norm, h + x + f(norm.inserts[0], bare(norm, h + x)))
            assert torch.allclose(block.output(block.intermediate(x), x), expected, atol=1e-12)


@pytest.mark.parametrize("case", ["lora", "dsee", "propetl-lora"])
def test_a_low_rank_update_is_scaled_by_alpha_over_its_rank(case):
    """4 / 2 in OPTIONS, as LoRA has it: with alpha alone it would be `rank` times too strong."""
    model = tiny("bert")
    prepared(model, case, MODULES)
    links = [link for module in model.modules() for link in chain(module) if isinstance(link, LowRank)]
    assert {link.scale for link in links} == {2.0}


def test_what_is_drawn_has_the_spread_that_its_method_names():
    """N(0, 0.02²) but for a LoRA's B and an adapter's up, which are 0; scores of masks are U(-1/√in, 1/√in)."""
    weight, hidden = torch.zeros(400, 300), torch.zeros(400)
    tensors = {
        **LowRank.tensors(weight, 200),
        **Adapter.tensors(hidden, 300, std=0.0),
        **{f"shared {name}": tensor for name, tensor in Adapter.tensors(hidden, 300, std=0.02).items()},
        **Prefix.tensors(weight, 300),
    }
    drawn = {name: float(tensor.std()) for name, tensor in tensors.items() if tensor.any()}
    assert drawn == pytest.approx(dict.fromkeys(("A", "down", "shared down", "shared up", "keys", "values"), 0.02), rel=0.05)
    scores = Scores(PlainTensors({"A": torch.zeros(40, 400)}), keep=0.5).A.abs() * 400**0.5
    assert 0.9 < scores.max() <= 1


@pytest.mark.parametrize("first", ["adapter", "adapter-houlsby", "adapter-adapterhub", "mam", "prefix", "lora"])
@pytest.mark.parametrize("second", ["adapter", "adapter-houlsby", "adapter-adapterhub", "prefix", "lora"])
def test_a_second_method_begins_with_what_the_first_has_learned(first, second):
    """As a recovery by a method of its own does; adapters of AdapterHub are both at the same norm."""
    model = tuned(tiny("bert"), first)
    before = logits(model)
    assert not torch.allclose(before, logits(tiny("bert")))
    name, options = CASES[second]
    apply(model, name, replace(OPTIONS, group="second", **options))
    after = logits(model)
    if second == "prefix":  # its keys are seen from the start
        assert not torch.allclose(after, before)
    else:
        assert torch.allclose(after, before, atol=1e-12)


@pytest.mark.parametrize("case", ["vera", "propetl", "propetl-lora", "propetl-prefix", "propetl-only-mask"])
def test_prototypes_of_one_group_are_stored_apart(case, tmp_path, monkeypatch):
    """A method applied twice, on other matrices or beside the first one, draws prototypes of its own each time."""
    model = tuned(tuned(tiny("bert", torch.float32), case), case, ("value",))
    before = logits(model)
    save_state(model, tmp_path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    monkeypatch.setattr("compressor.checkpoint.build", lambda *_: tiny("bert", torch.float32))
    assert torch.equal(logits(load_state(tmp_path, tmp_path)), before)


@pytest.mark.parametrize("case", ["prefix-reparametrized", "propetl-prefix", "mam"])
def test_an_attention_without_heads_gets_no_prefix(case):
    """A search for a target may empty some: a recovery by prefixes is of the others."""
    model = tiny("bert")
    remove(model, {0: Removal(list(range(4))), 2: Removal(neurons=list(range(20)))})
    options = prepared(model, case)
    counted = method_row(CASES[case][0]).count(shape_of(model), options, 0)
    assert trainable_counts(model)["body"] == counted and logits(model).isfinite().all()
    assert [has_inserts(layer.attention) for layer in layers_of(model)] == [False, True, True]


def test_a_network_behind_a_prefix_has_a_default_rate_of_its_own():
    row = method_row("prefix")
    assert [row.rate(Options(reparametrize=given)) for given in (False, True)] == [1e-2, 1e-3]
    assert method_row("lora").rate(Options()) == method_row("lora").learning_rate


def test_a_reparametrized_prefix_has_the_network_of_peft():
    """Li and Liang 2021, section 4.3, as peft has it: embedding, linear, tanh, and a linear for all blocks."""
    from peft import PrefixTuningConfig
    from peft.tuners.prefix_tuning import PrefixEncoder

    sizes = {"num_virtual_tokens": 7, "token_dim": 32, "num_layers": 3, "num_attention_heads": 4}
    theirs = PrefixEncoder(PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=512, **sizes))
    shape = shape_of(tiny("bert"))
    ours = method_row("prefix").count(shape, Options(length=7, reparametrize=True), 0)
    assert ours == sum(parameter.numel() for parameter in theirs.parameters())


def test_state_reloads_bit_equal(pair_of_case, tmp_path, monkeypatch):
    case, architecture = pair_of_case
    model = tuned(tiny(architecture, torch.float32), case, MODULES)
    base = tiny(architecture, torch.float32)
    before = logits(model)
    save_state(model, tmp_path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    monkeypatch.setattr("compressor.checkpoint.build", lambda *_: base)
    assert torch.equal(logits(load_state(tmp_path, tmp_path)), before)


def test_deltas_on_top_of_moved_weights_reload_bit_equal(architecture, tmp_path, monkeypatch):
    """Full tuning, then deltas: the state holds the moved weights and the deltas, or the model would fall back to the base."""
    base = tiny(architecture, torch.float32)
    model = tuned(tuned(tiny(architecture, torch.float32), "full"), "lora", MODULES)
    before = logits(model)
    save_state(model, tmp_path, base="here", base_sha256="0", label_names=["a", "b", "c"])
    monkeypatch.setattr("compressor.checkpoint.build", lambda *_: base)
    assert torch.equal(logits(load_state(tmp_path, tmp_path)), before)


def test_positions_in_tensors_that_are_not_tuned_are_refused():
    """Nothing is left out in silence: of other modules, or of another class of models."""
    model = tiny("bert")
    omega = {matrix.path: torch.arange(3) for matrix in matrices_of(model, ("query", "key"))}
    with pytest.raises(UserError, match=r"E404 positions are chosen in 3 tensors that are not tuned, e.g. bert.*0.*key"):
        apply(model, "dsee", Options(omega=omega))


def test_a_method_that_there_is_not():
    with pytest.raises(UserError, match=rf"E402 unknown method 'dora'\. Methods: .*{NAMES[0]}"):
        apply(tiny("bert"), "dora", Options())
