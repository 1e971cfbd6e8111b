"""Tensors and texts through a real server: equal to a local session, and clear when something is wrong."""

import http.server
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime as ort
import pytest
from tokenizers import Tokenizer
from triton_parts import LABELS, WORDS

from compressor.errors import UserError
from serving import running
from serving.client import Client, TextEncoder, kind_served, predict
from serving.repository import tokenizer_sha256

TEXTS = ["great", "the plot was dull", "a film", "the film was fine a great great great great plot"]


@pytest.fixture(scope="session")
def session(classifier):
    return ort.InferenceSession(classifier, providers=["CPUExecutionProvider"])


def features(batch, length, seed=0):
    """Random ids, right-padded to random lengths."""
    generator = np.random.default_rng(seed)
    mask = (np.arange(length) < generator.integers(1, length + 1, (batch, 1))).astype(np.int64)
    return {"input_ids": generator.integers(0, len(WORDS), (batch, length)) * mask, "attention_mask": mask}


@pytest.mark.parametrize("model", ["reviews", "bare"])
def test_served_logits_equal_a_local_session(server, session, model):
    with Client(f"http://{server.url}") as client:
        for batch, length in ((1, 1), (1, 8), (3, 5), (32, 16)):
            feed = features(batch, length)
            served = client.infer(model, feed)
            assert list(served) == ["logits"]
            np.testing.assert_allclose(served["logits"], session.run(["logits"], feed)[0], atol=1e-5, rtol=0)


def infer_or_fail(url, feed):
    with Client(url) as client:
        try:
            return client.infer("reviews", feed)["logits"]
        except UserError as error:
            return error


def test_requests_that_share_a_batch_get_their_own_answers_and_errors(server, session):
    feeds = [features(1 + seed % 3, 4 + seed % 2, seed) for seed in range(24)]
    feeds[7]["input_ids"][:] = len(WORDS)  # outside the vocabulary
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda feed: infer_or_fail(server.url, feed), feeds))
    failed = answers.pop(7)
    assert failed.code == "E715" and "indices element out of data bounds" in str(failed)
    for feed, answer in zip(feeds[:7] + feeds[8:], answers, strict=True):
        np.testing.assert_allclose(answer, session.run(["logits"], feed)[0], atol=1e-5, rtol=0)


def test_predict_names_the_label_and_every_score(server, session, tokenizer_folder):
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    predictions = predict(server.url, "reviews", TEXTS)
    for text, answer in zip(TEXTS, predictions, strict=True):
        ids = np.array([tokenizer.encode(text).ids])  # alone, so without padding
        logits = session.run(["logits"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0]
        expected = np.exp(logits) / np.exp(logits).sum()
        assert tuple(answer.scores) == LABELS and answer.label == LABELS[logits.argmax()]
        np.testing.assert_allclose(list(answer.scores.values()), expected, atol=1e-5)
    assert len({answer.label for answer in predictions}) > 1


def test_predict_takes_pairs_many_texts_and_none(server, tokenizer_folder):
    pairs = predict(server.url, "reviews", [("the plot", "was dull")], tokenizer_folder)
    joined = predict(server.url, "reviews", ["the plot [SEP] was dull"], tokenizer_folder)
    assert pairs == joined
    many = predict(server.url, "reviews", [TEXTS[index % 2] for index in range(70)])  # max_batch_size is 32
    assert len(many) == 70 and many[0].label == many[2].label == many[68].label
    assert predict(server.url, "reviews", []) == []


def test_features_are_those_the_model_declares(tokenizer_folder):
    declared = [{"name": name, "data_type": "TYPE_INT32"} for name in ("token_type_ids", "input_ids")]
    parameters = {"tokenizer_sha256": tokenizer_sha256(tokenizer_folder), "max_length": "6"}
    encoder = TextEncoder("m", {"input": declared}, parameters, tokenizer_folder)
    encoded = encoder.features(encoder.encode([("the plot was fine", "dull"), ("a", "film")]))
    assert {name: array.dtype for name, array in encoded.items()} == {"token_type_ids": np.int32, "input_ids": np.int32}
    words = [[WORDS[index] for index in row] for row in encoded["input_ids"]]
    assert words == [["[CLS]", "the", "plot", "[SEP]", "dull", "[SEP]"], ["[CLS]", "a", "[SEP]", "film", "[SEP]", "[PAD]"]]
    assert encoded["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]]
    with pytest.raises(UserError, match="E716 model 'm' expects an input 'pixels'"):
        TextEncoder("m", {"input": [{"name": "pixels", "data_type": "TYPE_FP32"}]}, parameters, tokenizer_folder)


def test_readiness_and_config(server):
    with Client(server.url) as client:
        assert client.ready("reviews") and not client.ready("absent")
        assert client.models() == ["bare", "reviews"]
        assert client.config("reviews")["parameters"]["intra_op_thread_count"]["string_value"] == "1"


@pytest.mark.parametrize("url", ["", "127.0.0.1", "127.0.0.1:http", "ftp://127.0.0.1:1", "127.0.0.1:99999", "http://h:1/v2"])
def test_a_bad_url_is_refused(url):
    with pytest.raises(UserError, match="E711"):
        predict(url, "reviews", TEXTS)


def test_an_unknown_model_names_the_loaded_ones(server):
    with pytest.raises(UserError, match=r"E713 .*no model 'review' is loaded. Loaded models: bare, reviews"):
        predict(server.url, "review", TEXTS)
    with Client(server.url) as client, pytest.raises(UserError, match="E713"):
        client.infer("review", features(1, 2))


def test_a_refused_request_gives_tritons_reason(server):
    with Client(server.url) as client, pytest.raises(UserError, match=r"E715 .*batch-size must be <= 32"):
        client.infer("reviews", features(33, 2))


def test_a_model_without_labels_is_no_classifier(server):
    with pytest.raises(UserError, match="E716 model 'bare' has no labels"):
        predict(server.url, "bare", TEXTS)


def test_an_absent_server_is_said_so():
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"127.0.0.1:{closed.getsockname()[1]}"
    with pytest.raises(UserError, match=f"E712 {url}: no Triton server responds"):
        predict(url, "reviews", TEXTS)


def test_another_kind_of_server_is_said_so(tmp_path):
    class Quiet(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with pytest.raises(UserError, match=r"E712 .*not a Triton server"):
            predict(f"127.0.0.1:{other.server_port}", "reviews", TEXTS)
        other.shutdown()


def test_the_tokenizer_must_be_the_models_own(server, tokenizer_folder, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"E714 .*no tokenizer.json. Pass --tokenizer"):
        predict(server.url, "reviews", TEXTS, tmp_path)
    shutil.copytree(tokenizer_folder, tmp_path / "other")
    (tmp_path / "other" / "tokenizer_config.json").write_text('{"pad_token": "[UNK]"}')
    with pytest.raises(UserError, match=r"E714 .*not the tokenizer that the model was deployed with"):
        predict(server.url, "reviews", TEXTS, tmp_path / "other")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # as on another machine
    with pytest.raises(UserError, match=r"E714 .*Pass --tokenizer FOLDER"):
        predict(server.url, "reviews", TEXTS)
    assert predict(server.url, "reviews", TEXTS, tokenizer_folder)


def test_the_note_of_a_killed_server_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    running.announce(8000, tmp_path, pid=2**22 + 1)  # above the kernel's largest pid
    assert running.registry_file(8000).is_file() and running.served_repository("127.0.0.1", 8000) is None


def test_a_kind_of_task_that_this_client_does_not_know():
    assert kind_served("m", {}).name == "classification" and kind_served("m", {"task": "regression"}).name == "regression"
    with pytest.raises(UserError, match=r"E716 model 'm' is for the task 'ranking', .*classification or regression"):
        kind_served("m", {"task": "ranking"})
