"""A stock `backend: "openvino"` repository on the real embedded server, against a local session."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from triton_parts import POSITIONS, WORDS, QuickServer, write_served

from compressor.errors import UserError
from export.runtimes.sessions import run, session
from serving.client import Client
from serving.predict import predict
from serving.repository import read_config, write_repository
from serving.server import EmbeddedServer

openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")


@pytest.fixture(scope="module")
def model(classifier, tmp_path_factory):
    """The tiny classifier as model.xml and model.bin."""
    path = tmp_path_factory.mktemp("openvino") / "model_int8.xml"
    openvino.save_model(openvino.Core().read_model(classifier), path, compress_to_fp16=False)
    return path


@pytest.fixture(scope="module")
def repository(model, tokenizer_folder, tmp_path_factory):
    return write_served(tmp_path_factory.mktemp("served") / "repository", model, tokenizer_folder)


@pytest.fixture(scope="module")
def server(repository, tmp_path_factory, triton):
    with QuickServer(repository, log_path=tmp_path_factory.mktemp("log") / "triton.log") as running:
        yield running


def features(batch, length, seed=0):
    """Random ids, right-padded to random lengths."""
    generator = np.random.default_rng(seed)
    mask = (np.arange(length) < generator.integers(1, length + 1, (batch, 1))).astype(np.int64)
    return {"input_ids": generator.integers(0, len(WORDS), (batch, length)) * mask, "attention_mask": mask}


def test_the_repository_is_one_that_the_native_backend_reads(repository, model):
    files = ["model.bin", "model.xml", "serving.json", "tokenizer"]
    assert sorted(path.name for path in (repository / "reviews" / "1").iterdir()) == files
    assert (repository / "reviews" / "1" / "model.bin").read_bytes() == model.with_suffix(".bin").read_bytes()
    batched, bare = (read_config(repository / name) for name in ("reviews", "bare"))
    assert (batched.backend, batched.max_batch_size) == ("openvino", 64)
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in batched.input] == [
        (name, 9, [-1]) for name in ("input_ids", "attention_mask")
    ]
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in batched.output] == [("logits", 11, [3])]
    assert batched.parameters["ENABLE_BATCH_PADDING"].string_value == "YES"
    assert list(bare.input[0].dims) == [-1, -1] and "ENABLE_BATCH_PADDING" not in bare.parameters


@pytest.mark.parametrize("name", ["reviews", "bare"])
def test_served_logits_equal_a_local_session(server, model, name):
    live = session(model)
    with Client(f"http://{server.url}") as client:
        for batch, length in ((1, 1), (1, 8), (3, 5), (32, 16)):
            feed = features(batch, length)
            np.testing.assert_allclose(client.infer(name, feed)["logits"], run(live, feed), atol=1e-5, rtol=0)


def infer_or_fail(url, feed):
    with Client(url) as client:
        try:
            return client.infer("reviews", feed)["logits"]
        except UserError as error:
            return error


def test_requests_that_share_a_batch_get_their_own_answers_and_errors(server, model):
    live = session(model)
    feeds = [features(1 + seed % 3, 4 + seed % 2, seed) for seed in range(24)]
    for number in range(0, 24, 7):
        feeds[number] = features(1, POSITIONS + 1)
    feeds[8]["input_ids"][:] = len(WORDS)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda feed: infer_or_fail(server.url, feed), feeds))
    wrong = {**dict.fromkeys(range(0, 24, 7), "a row of 65 tokens"), 8: "input_ids holds 12"}
    for number, reason in wrong.items():
        assert answers[number].wrong and reason in str(answers[number])
    for number in set(range(24)) - set(wrong):
        np.testing.assert_allclose(answers[number], run(live, feeds[number]), atol=1e-5, rtol=0)


def test_texts_get_the_answers_that_tokens_get(server, repository):
    rows = [" ".join(["film"] * count) for count in range(70)]
    tokens = predict(server.url, "reviews", rows, repository / "reviews" / "1")
    for text, token in zip(predict(server.url, "reviews", rows), tokens, strict=True):
        assert text.label == token.label and text.scores == pytest.approx(token.scores, abs=1e-5)


def test_a_config_that_is_not_the_models_is_refused(tmp_path, model, triton):
    config = write_repository(tmp_path / "repository", "renamed", model) / "config.pbtxt"
    config.write_text(config.read_text().replace("attention_mask", "mask"))
    with pytest.raises(UserError, match=r"E707 .*input 'mask', allowed inputs are: input_ids, attention_mask"):
        EmbeddedServer(tmp_path / "repository", log_path=tmp_path / "log").start()


def test_a_broken_model_is_refused(tmp_path):
    (tmp_path / "model.xml").write_text("<net>")
    with pytest.raises(UserError, match=r"E721 .*model.xml: not a readable OpenVINO model"):
        write_repository(tmp_path / "repository", "broken", tmp_path / "model.xml")
