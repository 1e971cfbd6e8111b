"""Tensors and texts through a real server: equal to a local session, and clear when something is wrong."""

import contextlib
import http.server
import json
import os
import shutil
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import numpy as np
import pytest
from tokenizers import Tokenizer
from triton_parts import FACTS, LABELS, POSITIONS, WORDS, of_pairs
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server
from tritonclient.http import InferenceServerClient

from compressor.errors import UserError
from serving import server_registry
from serving.client import Client
from serving.clients.by_tokens import TextEncoder, TokenPredictor, kind_served
from serving.clients.channel import channel_options
from serving.predict import predict
from serving.repository import tokenizer_sha256

TEXTS = ["great", "the plot was dull", "a film", "the film was fine a great great great great plot"]


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


@pytest.mark.usefixtures("proxied")
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_proxy_stands_between_this_machine_and_itself(server, host):
    with Client(f"grpc://{host}:{server.ports['grpc']}") as client:
        assert list(client.infer("reviews", features(1, 2))) == ["logits"]


@pytest.mark.parametrize(
    ("host", "direct"), [("127.0.0.2", True), ("::1", True), ("[::1]", True), ("triton", False), ("10.0.0.1", False)]
)
def test_a_proxy_is_left_out_before_this_machine_alone(host, direct):
    assert (("grpc.enable_http_proxy", 0) in channel_options(host)) == direct


def statistics(url, model="reviews"):
    """Requests that were computed, and executions, of a model so far."""
    with InferenceServerClient(url) as client:
        (counts,) = client.get_inference_statistics(model)["model_stats"]
    return np.array([counts["inference_stats"]["compute_infer"]["count"], counts["execution_count"]])


def settled(url):
    """`statistics` that stand still: a request is counted a moment after its answer."""
    counts = statistics(url)
    while True:
        time.sleep(0.1)
        if np.array_equal(before := counts, counts := statistics(url)):
            return before


def infer_or_fail(url, feed):
    with Client(url) as client:
        try:
            return client.infer("reviews", feed)["logits"]
        except UserError as error:
            return error


def test_requests_that_share_a_batch_get_their_own_answers_and_errors(server, session):
    feeds = [features(1 + seed % 3, 4 + seed % 2, seed) for seed in range(24)]
    feeds[7]["input_ids"][:] = len(WORDS)  # outside the vocabulary
    before = settled(server.url)
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda feed: infer_or_fail(server.url, feed), feeds))
    failed = answers.pop(7)
    assert failed.code == "E715" and failed.wrong and "input_ids holds 12, not an id from 0 to 11" in str(failed)
    requests, executions = settled(server.url) - before
    assert requests == 24 and executions < 24, "some requests shared a batch"
    for feed, answer in zip(feeds[:7] + feeds[8:], answers, strict=True):
        np.testing.assert_allclose(answer, session.run(["logits"], feed)[0], atol=1e-5, rtol=0)


LONG = (1, POSITIONS + 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_ids": np.full((1, 4), -1)}, "input_ids holds -1"),
        ({"input_ids": np.full((1, 4), len(WORDS))}, "input_ids holds 12"),
        ({"attention_mask": np.ones((1, 3), dtype=np.int64)}, r"the inputs differ in shape: input_ids \[1, 4\]"),
        ({"attention_mask": np.full((1, 4), 2)}, "other values than 0 and 1"),
        ({"attention_mask": np.array([[0] * 4])}, "row 0 of attention_mask is all 0"),
        ({"input_ids": np.ones(LONG, dtype=np.int64), "attention_mask": np.ones(LONG, dtype=np.int64)}, "at most 64"),
        ({name: np.ones((1, 0), dtype=np.int64) for name in ("input_ids", "attention_mask")}, "holds no tokens"),
    ],
)
def test_wrong_tokens_are_refused_as_the_callers_mistake(server, changes, words):
    """HTTP 400, not 500."""
    feed = {"input_ids": np.ones((1, 4), dtype=np.int64), "attention_mask": np.ones((1, 4), dtype=np.int64)}
    with Client(server.url) as client, pytest.raises(UserError, match=f"E715 .*{words}") as caught:
        client.infer("reviews", feed | changes)
    assert caught.value.wrong


@pytest.mark.parametrize("way", ["text", "tokens"])
def test_predict_names_the_label_and_every_score(server, session, tokenizer_folder, version_folder, way):
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.enable_truncation(8)
    predictions = predict(server.url, "reviews", TEXTS, version_folder if way == "tokens" else None)
    for text, answer in zip(TEXTS, predictions, strict=True):
        ids = np.array([tokenizer.encode(text).ids])  # alone, so without padding
        logits = session.run(["logits"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0][0]
        expected = np.exp(logits) / np.exp(logits).sum()
        assert tuple(answer.scores) == LABELS and answer.label == LABELS[logits.argmax()]
        np.testing.assert_allclose(list(answer.scores.values()), expected, atol=1e-5)
    assert len({answer.label for answer in predictions}) > 1


def test_logits_that_are_not_finite_are_no_prediction(server, version_folder, monkeypatch):
    """Of the third text."""
    infer = Client.infer

    def broken(client, *arguments):
        outputs = {name: array.copy() for name, array in infer(client, *arguments).items()}
        outputs["logits"][-1, 0] = np.nan
        return outputs

    monkeypatch.setattr(Client, "infer", broken)
    with pytest.raises(UserError, match=rf"E717 text 3, '{TEXTS[0]}': the model's outputs are not finite. Leave it out"):
        predict(server.url, "reviews", [*TEXTS[:2], TEXTS[0]], version_folder)


def test_predict_takes_pairs_many_texts_and_none(server, version_folder, tmp_path):
    pairs = of_pairs(version_folder, tmp_path / "1")
    (pair,) = predict(server.url, "reviews", [("the plot", "was dull")], pairs)
    (joined,) = predict(server.url, "reviews", ["the plot [SEP] was dull"], version_folder)
    assert pair != joined, "a special token in a text is text"
    for folder, name in ((None, "reviews-text"), (version_folder, "reviews")):
        with pytest.raises(UserError, match=f"E717 model '{name}' takes single texts, text 2 is a pair"):
            predict(server.url, "reviews", ["a", ("a", "b")], folder)
    for folder, name in ((None, "reviews-text"), (version_folder, "reviews")):
        for odd in (("a",), ("a", "b", "c")):
            with pytest.raises(UserError, match=rf"E717 model '{name}' takes single texts, text 1 is a tuple of {len(odd)}"):
                predict(server.url, "reviews", [odd], folder)
    with pytest.raises(UserError, match=r"E717 model 'reviews' takes pairs of texts, text 1 is a tuple of 3"):
        predict(server.url, "reviews", [("a", "b", "c")], pairs)
    with pytest.raises(UserError, match=r"E717 model 'reviews' takes pairs of texts, text 2 is one\. Give --pair"):
        predict(server.url, "reviews", [("a", "b"), "a"], pairs)
    many = predict(server.url, "reviews", [TEXTS[index % 2] for index in range(70)])  # max_batch_size is 64
    assert len(many) == 70 and many[0].label == many[2].label == many[68].label
    assert predict(server.url, "reviews", []) == []
    for folder in (None, version_folder):  # in the second request of tokens
        with pytest.raises(UserError, match=r"E717 text 66 is not valid Unicode"):
            predict(server.url, "reviews", [*TEXTS[:1] * 65, "\ud800"], folder)


def test_features_are_those_the_model_declares(tokenizer_folder):
    declared = [{"name": name, "data_type": "TYPE_INT32"} for name in ("token_type_ids", "input_ids")]
    facts = replace(FACTS, tokenizer_sha256=tokenizer_sha256(tokenizer_folder), max_length=6)
    encoder = TextEncoder("m", {"input": declared}, facts, tokenizer_folder)
    encoded = encoder.features(encoder.encode([("the plot was fine", "dull"), ("a", "film")]))
    assert {name: array.dtype for name, array in encoded.items()} == {"token_type_ids": np.int32, "input_ids": np.int32}
    words = [[WORDS[index] for index in row] for row in encoded["input_ids"]]
    assert words == [["[CLS]", "the", "plot", "[SEP]", "dull", "[SEP]"], ["[CLS]", "a", "[SEP]", "film", "[SEP]", "[PAD]"]]
    assert encoded["token_type_ids"].tolist() == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 0]]
    with pytest.raises(UserError, match="E716 model 'm' expects an input 'pixels'"):
        TextEncoder("m", {"input": [{"name": "pixels", "data_type": "TYPE_FP32"}]}, facts, tokenizer_folder)


def test_readiness_and_config(server):
    with Client(server.url) as client:
        assert client.ready("reviews") and not client.ready("absent")
        assert client.models() == ["bare", "reviews", "reviews-text"] and client.versions("reviews") == ["1"]
        assert client.config("reviews")["parameters"]["intra_op_thread_count"]["string_value"] == "1"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1",
        "127.0.0.1:http",
        "ftp://127.0.0.1:1",
        "127.0.0.1:99999",
        "http://h:1/v2",
        "http://u@h:1",
        "[::1",
        "\udcff",
    ],
)
def test_a_bad_url_is_refused(url):
    with pytest.raises(UserError, match="E711"):
        predict(url, "reviews", TEXTS)


def test_an_unknown_model_names_the_loaded_ones(server):
    with pytest.raises(UserError, match=r"E713 .*no model 'review' is loaded. Loaded models: bare, reviews, reviews-text"):
        predict(server.url, "review", TEXTS)
    with Client(server.url) as client, pytest.raises(UserError, match="E713"):
        client.infer("review", features(1, 2))


def test_a_refused_request_gives_tritons_reason(server):
    with Client(server.url) as client, pytest.raises(UserError, match=r"E715 .*batch-size must be <= 64"):
        client.infer("reviews", features(65, 2))


def test_a_model_without_labels_is_no_classifier(server):
    with pytest.raises(UserError, match=r"E728 .*not the facts of a version"):
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


def test_a_server_that_answers_everything_alike_is_said_so():
    """A gateway's page of its own, or a mock: 200 and JSON at every path."""

    class Alike(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Alike) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        with Client(f"127.0.0.1:{other.server_port}") as client, pytest.raises(UserError, match=r"E712 .*not a Triton server"):
            client.config("reviews")
        other.shutdown()


class Hanging(GRPCInferenceServiceServicer):
    """A server whose models do not answer before the test is over."""

    def __init__(self, over):
        self.over = over

    def ServerLive(self, request, context):
        return messages.ServerLiveResponse(live=True)

    def ModelInfer(self, request, context):
        self.over.wait(30)
        return messages.ModelInferResponse()


@contextlib.contextmanager
def hanging_grpc(over):
    server = grpc.server(ThreadPoolExecutor(2))
    add_GRPCInferenceServiceServicer_to_server(Hanging(over), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"grpc://127.0.0.1:{port}"
    server.stop(None).wait(10)


@contextlib.contextmanager
def hanging_http(over):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()

        def do_POST(self):
            over.wait(30)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("hanging", [hanging_grpc, hanging_http])
def test_a_model_that_hangs_is_not_waited_for(hanging):
    over = threading.Event()
    with hanging(over) as url:
        with Client(url, seconds=0.2) as client, pytest.raises(UserError, match=r"E712 .*does not answer in time"):
            client.infer("reviews", features(1, 4))
        over.set()


def test_the_tokenizer_must_be_the_models_own(server, version_folder, tmp_path, monkeypatch):
    shutil.copytree(version_folder, tmp_path / "1")
    (tmp_path / "1" / "tokenizer" / "tokenizer_config.json").write_text('{"pad_token": "[UNK]"}')
    with pytest.raises(UserError, match=r"E714 .*not the tokenizer that the model was deployed with"):
        predict(server.url, "reviews", TEXTS, tmp_path / "1")
    with pytest.raises(UserError, match=r"E714 .*not a version's folder: it has no serving\.json\. Pass --tokenizer .* NAME/1"):
        predict(server.url, "reviews", TEXTS, tmp_path)
    shutil.rmtree(tmp_path / "1" / "tokenizer")
    with pytest.raises(UserError, match=r"E714 .*no tokenizer.json. Pass --tokenizer"):
        predict(server.url, "reviews", TEXTS, tmp_path / "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # as on another machine
    with Client(server.url) as client, pytest.raises(UserError, match=r"E714 .*Pass --tokenizer NAME/1"):
        TokenPredictor(client, "reviews")
    assert predict(server.url, "reviews", TEXTS) and predict(server.url, "reviews", TEXTS, version_folder)


def test_the_labels_must_be_those_of_the_served_version(server, version_folder, tmp_path):
    shutil.copytree(version_folder, tmp_path / "reviews" / "2")
    with pytest.raises(UserError, match=r"E714 .*of version 2, and the server predicts with version 1 of 'reviews'"):
        predict(server.url, "reviews", TEXTS, tmp_path / "reviews" / "2")
    other = tmp_path / "other"
    (tmp_path / "reviews" / "2").rename(other)
    assert predict(server.url, "reviews", TEXTS, other) == predict(server.url, "reviews", TEXTS, version_folder)
    facts = json.loads((other / "serving.json").read_text())
    (other / "serving.json").write_text(json.dumps(facts | {"labels": ["bad", "good"]}))
    for url in (server.url, f"grpc://127.0.0.1:{server.ports['grpc']}"):
        with pytest.raises(UserError, match=r"E714 .*the folder has 2 labels, and model 'reviews' gives 3 logits"):
            predict(url, "reviews", TEXTS, other)


def test_the_record_of_a_killed_server_is_not_believed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as process:
        server_registry.announce(8000, tmp_path, process.pid)
        assert server_registry.server_pid("127.0.0.1", 8000) == process.pid
        process.kill()
    assert server_registry.registry_file(8000).is_file() and server_registry.served_repository("127.0.0.1", 8000) is None


def test_nor_where_another_process_has_its_pid(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server_registry.announce(8000, tmp_path, os.getpid())
    record = json.loads(server_registry.registry_file(8000).read_text())
    server_registry.registry_file(8000).write_text(json.dumps(record | {"started": record["started"] - 1}))
    assert (
        server_registry.served_repository("127.0.0.1", 8000) is None and server_registry.server_pid("127.0.0.1", 8000) is None
    )


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"repository": 1, "pid": 1}', '{"repository": "/", "pid": null}', "\udcff"])
def test_a_record_that_cannot_be_read_is_no_record(tmp_path, monkeypatch, text):
    """A full disk leaves an empty one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    server_registry.announce(8000, tmp_path, os.getpid())
    assert (
        server_registry.served_repository("localhost", 8000) == tmp_path
        and server_registry.server_pid("localhost", 8000) == os.getpid()
    )
    assert [path.name for path in server_registry.registry_file(8000).parent.iterdir()] == ["127.0.0.1-8000.json"]
    server_registry.registry_file(8000).write_bytes(text.encode("utf-8", "surrogateescape"))
    assert (
        server_registry.served_repository("localhost", 8000) is None and server_registry.server_pid("localhost", 8000) is None
    )


def test_a_kind_of_task_that_this_client_does_not_know():
    assert kind_served("m", replace(FACTS, task="regression")).name == "regression"
    with pytest.raises(UserError, match=r"E716 model 'm' is for the task 'ranking', .*classification or regression"):
        kind_served("m", replace(FACTS, task="ranking"))
