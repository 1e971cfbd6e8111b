"""OpenVINO's sessions pad rows where that is faster, and give the logits that they would give without."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification

from compressor.processor import weight_bits
from compressor.tasks.features import torch_forward
from export.graph.trace import trace
from export.parity.compare import compare
from export.runtimes import padded_model
from export.runtimes.openvino import RUNTIME, export_openvino
from export.runtimes.padded_model import SHARES, PaddedModel, filler_of, share_of
from export.runtimes.sessions import run, session
from tests.compressor.conftest import tiny
from tests.export.conftest import encoding

openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")

LENGTHS = [(1, 1), (3, 11), (2, 15), (4, 40), (2, 16)]
PADDED = ("bert", "deberta-v2", "distilbert", "electra", "llama", "modernbert", "mpnet", "qwen3", "roberta", "xlm-roberta")
FAST = ("bert", "roberta")


def opened(folder, model, threads=None):
    """A session of a model's fp32 file that pads as those of int8 files do, and the shapes that OpenVINO gets."""
    file = export_openvino(trace(model, encoding(2, 9)), folder, precisions=("fp32",))["fp32"]
    live, shapes = session(file, threads=threads), []
    given, live.model.share = live.model.given, SHARES["int8"]

    def watched(feeds):
        shapes.append(feeds["input_ids"].shape)
        given(feeds)

    live.model.given = watched
    return live, shapes


@pytest.mark.parametrize("name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in PADDED])
def test_padded_rows_give_the_same_logits_with_any_id_where_the_mask_is_0(tmp_path, name):
    model = tiny(name, torch.float32)
    (live, shapes), forward = opened(tmp_path, model), torch_forward(model)
    filler = live.model.filler
    assert filler == (0 if name in ("bert", "deberta-v2", "distilbert", "electra", "modernbert") else model.config.pad_token_id)
    for batch in (encoding(*shape) for shape in LENGTHS):
        live.model.filler = None
        plain, expected = run(live, batch), forward(batch)
        for id_ in (filler, 57) if filler == 0 else (filler,):
            live.model.filler = id_
            logits = run(live, batch)
            np.testing.assert_allclose(logits, plain, atol=1e-5 * max(1, np.abs(plain).max()), rtol=0)
            assert compare("padded", "fp32", expected, logits, expected.argmax(axis=1)).passed
    assert {length for _, length in shapes} == {1, 11, 15, 16, 40, 48}


NEIGHBOURS = {
    "convbert": {"embedding_size": 32, "conv_kernel_size": 3},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 16, "intra_bottleneck_size": 16},
    "squeezebert": {"embedding_size": 32},
}


@pytest.mark.parametrize(("name", "filler"), [("convbert", None), ("mobilebert", None), ("squeezebert", 0)])
def test_models_that_mix_neighbouring_tokens_are_not_padded(tmp_path, name, filler):
    """Masked tokens on the right change what ConvBERT and MobileBERT make of the last ones of a row; SqueezeBERT's convolutions
    are of single tokens."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 100}
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **sizes, **NEIGHBOURS[name])
    model = AutoModelForSequenceClassification.from_config(config).eval()
    live, _ = opened(tmp_path, model)
    assert live.model.filler == filler
    rows = {key: value for key, value in encoding(2, 15).items() if key != "token_type_ids"}
    rows |= {"attention_mask": np.ones_like(rows["attention_mask"])}
    expected = torch_forward(model)(rows)
    np.testing.assert_allclose(run(live, rows), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("precision", "lengths"),
    [("fp32", {*range(1, 15), 16, *range(17, 30), 32}), ("int8", {*range(1, 11), 16, *range(17, 22), 32})],
)
def test_padding_depends_on_the_length_and_on_the_precision(tmp_path, precision, lengths):
    """fp32 is padded by up to a sixteenth of the row, int8 by up to a third."""
    live, shapes = opened(tmp_path, tiny("bert", torch.float32))
    live.model.share = SHARES[precision]
    for length in range(1, 33):
        run(live, encoding(2, length))
    assert {length for _, length in shapes} == lengths


def ones(length: int) -> dict[str, np.ndarray]:
    """Two rows without padding."""
    return {name: np.ones((2, length), np.int64) for name in ("input_ids", "attention_mask")}


def bare():
    """A session's model that pads as one of an fp32 file, with nothing compiled."""
    model = PaddedModel.__new__(PaddedModel)
    model.filler, model.share, model.shortest_failed = 7, 1 / 16, math.inf
    return model


def test_rows_are_padded_to_multiples_of_16_by_a_sixteenth_at_most():
    model, given = bare(), {length: ones(length) for length in (14, 15, 16, 23, 29, 30, 31)}
    lengths = {length: model.padded(rows)["input_ids"].shape[1] for length, rows in given.items()}
    assert lengths == {14: 14, 15: 16, 16: 16, 23: 23, 29: 29, 30: 32, 31: 32}
    assert {length for length, rows in given.items() if model.padded(rows) is rows} == {14, 16, 23, 29}
    added = {name: rows[:, -1].tolist() for name, rows in model.padded(given[15]).items()}
    assert added == {"input_ids": [7, 7], "attention_mask": [0, 0]}


def test_outputs_of_tokens_are_cut_to_those_that_were_given_and_those_of_rows_are_not():
    model, tokens = bare(), np.arange(2 * 16 * 3).reshape(2, 16, 3)
    model.given, model.request = lambda feeds: None, SimpleNamespace(results={"tokens": tokens, "rows": tokens[:, 0]})
    for found, expected in zip(model.infer(["tokens", "rows"], ones(15)), (tokens[:, :15], tokens[:, 0]), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("reads", "filler"),
    [
        (lambda ops, ids: ids, 0),
        (lambda ops, ids: ops.logical_not(ops.equal(ids, ops.constant(7, np.int64))), 7),
        (lambda ops, ids: ops.non_zero(ops.equal(ids, ops.constant(7, np.int64))), None),
        (lambda ops, ids: ops.reshape(ids, ops.constant([-1]), False), None),
    ],
    ids=["looked up", "unlike padding", "the end of a sentence", "in another shape"],
)
def test_a_model_is_padded_where_its_ids_are_only_looked_up_or_compared_with_padding(reads, filler):
    """As BERT, RoBERTa, T5 and GPT-2 read them."""
    ops = openvino.opset13
    ids, mask = inputs = [ops.parameter([-1, -1], np.int64) for _ in range(2)]
    states = ops.gather(ops.constant(np.ones((9, 4), np.float32)), ids, ops.constant(0))
    masked = ops.multiply(states, ops.unsqueeze(ops.convert(mask, "f32"), ops.constant(2)))
    read = ops.reduce_prod(ops.shape_of(reads(ops, ids)), ops.constant(0))
    model = openvino.Model([ops.result(ops.add(masked, ops.convert(read, "f32")))], inputs)
    for port, name in zip(model.inputs, ("input_ids", "attention_mask"), strict=True):
        port.set_names({name})
    assert filler_of(model) == filler


@pytest.mark.parametrize(
    ("machine", "flags", "share"),
    [
        ("x86_64", "avx2 avx512_vnni", 1 / 3),
        ("AMD64", "avx_vnni", 1 / 3),
        ("x86_64", "avx2", 1 / 16),
        ("aarch64", "asimd", 1 / 3),
        ("x86_64", None, 1 / 3),
    ],
)
def test_int8_is_padded_less_where_the_processor_has_no_vnni(tmp_path, monkeypatch, machine, flags, share):
    if flags is not None:
        (tmp_path / "cpuinfo").write_text(f"flags\t: fpu {flags}\n")
    monkeypatch.setattr(padded_model, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr("platform.machine", lambda: machine)
    assert (share_of("int8"), share_of("fp32"), share_of("bf16")) == (share, 1 / 16, 1 / 3)


def test_what_the_backend_says_of_the_processor_is_what_the_export_goes_by():
    """It is copied beside Triton's backend, and so asks by itself."""
    assert padded_model.multiplies_int8() == (weight_bits() == 8)


@pytest.mark.slow
def test_the_precision_of_a_file_is_found(tmp_path):
    graph = trace(tiny("bert", torch.float32), encoding(2, 9))
    precisions = [name for name in SHARES if RUNTIME.computes(name)]
    paths = export_openvino(graph, tmp_path, precisions=precisions, rows=[encoding(2, 9)])
    assert {name: session(path).model.share for name, path in paths.items()} == {name: share_of(name) for name in precisions}


@pytest.mark.slow
def test_logits_of_tokens_are_cut_to_the_tokens_that_were_given(tmp_path):
    model = tiny("bert", torch.float32, auto=AutoModelForTokenClassification)
    (live, shapes), batch = opened(tmp_path, model), encoding(3, 11)
    expected, mask = torch_forward(model)(batch), batch["attention_mask"] == 1
    logits = run(live, batch)
    assert (shapes, logits.shape) == ([(3, 16)], expected.shape)
    np.testing.assert_allclose(logits[mask], expected[mask], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["gpt2"])
@pytest.mark.slow
def test_a_model_that_reads_its_last_token_is_not_padded(tmp_path, name):
    live, shapes = opened(tmp_path, tiny(name, torch.float32))
    assert live.model.filler is None
    run(live, encoding(2, 9))
    assert shapes == [(2, 9)]


@pytest.mark.parametrize("threads", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_rows_that_fit_only_without_padding_are_run_without(tmp_path, threads):
    """60 positions: 58 tokens would become 64. On one thread OpenVINO's own `infer` keeps the outputs of the run before."""
    model = tiny("bert", torch.float32, max_position_embeddings=60)
    (live, _), batch = opened(tmp_path, model, threads), encoding(2, 58)
    for shape in ((2, 58), (2, 50), (2, 59)):
        batch = encoding(*shape)
        np.testing.assert_allclose(run(live, batch), torch_forward(model)(batch), atol=1e-5, rtol=0)
    assert live.model.shortest_failed == 64
    with pytest.raises(RuntimeError):
        run(live, encoding(2, 61))
    assert np.isfinite(run(live, batch)).all()
    with pytest.raises(RuntimeError, match="Required inputs are missing: attention_mask"):
        live.run(["logits"], {"input_ids": batch["input_ids"]})
    with pytest.raises(RuntimeError, match="missing"):
        live.run(["logits"], {"input_ids": encoding(2, 30)["input_ids"]})
    assert live.model.shortest_failed == 64, "an input was missing: 30 tokens are padded to 32 as before"


@pytest.mark.slow
def test_ids_and_mask_of_different_lengths_are_not_padded_to_one(tmp_path):
    live, _ = opened(tmp_path, tiny("bert", torch.float32))
    batch = encoding(2, 12)
    with pytest.raises(RuntimeError):
        run(live, {**batch, "attention_mask": batch["attention_mask"][:, :10]})
