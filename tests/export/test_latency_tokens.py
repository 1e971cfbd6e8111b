"""Tokens that are timed one at a time, on the cache of a prompt; no assertion on a time."""

from types import SimpleNamespace

import pytest
import torch

from compressor.checkpoint import save_checkpoint
from export.graph.decoder import trace_generator
from export.graph.files import save
from export.latency import worker as latency_worker
from export.latency.measure import TOKENS, LatencyVariant, measure
from export.latency.worker import encoding, session_writer, torch_writer
from export.runtimes.decoders import Decoder
from export.runtimes.sessions import session
from tests.compressor.conftest import tiny
from tests.compressor.test_heads import GENERATES


@pytest.fixture(scope="module")
def model():
    return tiny("gpt2", torch.float32, auto=GENERATES["gpt2"], max_position_embeddings=128)


def test_pytorch_writes_behind_the_same_prompt_every_time(model):
    lengths = []
    seen = model.register_forward_hook(lambda *given: lengths.append(given[-1].past_key_values.get_seq_length()))
    writer = torch_writer(model)
    prompts = encoding(2, 6, 99)
    assert writer(prompts, 3) > 0 and writer(prompts, 2) > 0
    seen.remove()
    assert lengths == [6, 7, 8, 9, 7, 8]


def test_a_time_is_that_of_one_token(monkeypatch):
    """Of 3 that take 12 ms together, in PyTorch and in a session."""
    monkeypatch.setattr(latency_worker, "milliseconds", lambda once: 12.0)
    monkeypatch.setattr(latency_worker, "begun", lambda live, texts, mask, begin: (lambda *given: None, texts, mask))
    model = SimpleNamespace(past_key_values=None)
    writers = torch_writer(lambda **given: model), session_writer(None)
    assert [writer(encoding(2, 6, 99), 3) for writer in writers] == [4.0, 4.0]


@pytest.mark.slow
def test_a_decoder_behind_an_encoder_writes_on_the_same_source_every_time(tmp_path):
    """In both, the source is read once and its tokens come one at a time."""
    model = tiny("t5", torch.float32, auto=GENERATES["t5"])
    for name, graph in trace_generator(model).items():
        save(graph, tmp_path / f"{name}.onnx")
    lengths = {"torch": [], "onnx": []}
    model.register_forward_hook(lambda *given: lengths["torch"].append(given[-1].past_key_values.get_seq_length()))
    live, prompts = session(tmp_path / "decoder_model.onnx"), encoding(2, 6, 99, start=0)
    run = Decoder.__call__

    def counted(self, *given):
        logits = run(self, *given)
        lengths["onnx"].append(self.mask.shape[1])
        return logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Decoder, "__call__", counted)
        for writer in (torch_writer(model), session_writer(live)):
            assert writer(prompts, 3) > 0 and writer(prompts, 2) > 0
    assert lengths["torch"] == lengths["onnx"] == [1, 2, 3, 4, 2, 3]


@pytest.mark.slow
def test_two_runtimes_are_measured_behind_every_shape(model, tmp_path):
    graph = tmp_path / "model.onnx"
    save(trace_generator(model)["model"], graph)
    save_checkpoint(model, tmp_path / "checkpoint", tmp_path)
    variants = [
        LatencyVariant("torch", "pytorch", tmp_path / "checkpoint", vocabulary=99),
        LatencyVariant("onnx", "onnxruntime", graph, vocabulary=99),
    ]
    rounds = []
    results = measure(variants, [(1, 8), (2, 4)], 3, tokens=TOKENS, on_round=lambda: rounds.append(1))
    assert [(r.variant, r.batch, r.length, len(r.samples_ms)) for r in results] == [
        ("torch", 1, 8, 3),
        ("onnx", 1, 8, 3),
        ("torch", 2, 4, 3),
        ("onnx", 2, 4, 3),
    ]
    assert len(rounds) == 6 and TOKENS > 1
    assert all(row.throughput == pytest.approx(1000 * row.batch / row.p50) for row in results)
