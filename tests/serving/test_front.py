"""The front in front of a real server: predictions, ranks, keys, limits, errors, metrics, and the page that describes them."""

import contextlib
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jsonschema
import numpy as np
import pytest
from triton_parts import FACTS, KNOBS, QuickServer, write_tagger
from tritonclient.utils import InferenceServerException

from pipelines.engine.store import Locked, lock, served_lock

pytest.importorskip("fastapi")
httpx = pytest.importorskip("httpx")

TEXTS = ["a great film", "the plot was dull", "a fine plot"]
KEY = "one-of-two-keys"


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def front(server, tmp_path_factory):
    """A client of a front with two keys; bodies of at most 20,000 bytes."""
    keys = tmp_path_factory.mktemp("front") / "keys"
    keys.write_text(f"another-key\n{KEY}\n")
    port = free_port()
    options = {"--triton": f"127.0.0.1:{server.ports['grpc']}", "--port": port, "--keys": keys, "--max-body": 20_000}
    command = [sys.executable, "-m", "serving.front", *(str(part) for option in options.items() for part in option)]
    process = subprocess.Popen(command, env={**os.environ}, stderr=subprocess.PIPE)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
        for _ in range(200):
            try:
                client.get("/health/live")
                break
            except httpx.TransportError:
                assert process.poll() is None, process.stderr.read().decode()
                time.sleep(0.1)
        yield client
    process.terminate()
    assert process.wait(20) in (0, -15)


def test_predictions_in_order(front, server):
    from serving.client import Client
    from serving.predict import predictor

    with Client(server.url) as client:
        expected = predictor(client, "reviews-text")(TEXTS)
    response = front.post("/predict", json={"texts": TEXTS, "model": "reviews"})
    assert response.status_code == 200, response.text
    body = response.json()
    assert body["model"] == "reviews-text"
    for given, prediction in zip(body["predictions"], expected, strict=True):
        assert given["label"] == prediction.label
        assert given["scores"] == pytest.approx(prediction.scores, abs=1e-6)


def test_more_texts_than_a_request_may_have(front):
    texts = [TEXTS[number % 3] for number in range(200)]
    predictions = front.post("/predict", json={"texts": texts}).json()["predictions"]
    assert len(predictions) == 200
    scores = [given["score"] for given in predictions]
    assert scores == pytest.approx([scores[number % 3] for number in range(200)], abs=1e-5)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"texts": []}, 400, "E765"),
        ({"texts": "a film"}, 400, "E765"),
        ({"texts": ["a film"], "wrong": 1}, 400, "E765"),
        ({"texts": ["a film"], "model": "nothing"}, 404, "E715"),
        ({"texts": ["a film"], "pairs": ["a plot"]}, 400, "E767"),
        ({"texts": ["a film"], "task": "reviews"}, 400, "E778"),
        ({"texts": ["a film" * 5000]}, 413, "E770"),
    ],
)
def test_requests_that_are_wrong(front, body, status, code):
    response = front.post("/predict", json=body)
    assert (response.status_code, response.json()["code"]) == (status, code), response.text


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/predict", r'{"model": "\ud800", "texts": ["a"]}'),
        ("/predict", r'{"texts": ["\ud800"]}'),
        ("/rerank", r'{"query": "a", "documents": [{"text": "\ud800"}]}'),
        ("/rerank", r'{"query": "a", "documents": [{"title": "\ud800"}]}'),
    ],
)
def test_texts_that_are_no_unicode(path, content):
    from starlette.testclient import TestClient

    from serving.front.app import Settings, make_app

    with TestClient(make_app(Settings("127.0.0.1:1")), raise_server_exceptions=False) as client:
        response = client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert (response.status_code, response.json()["code"]) == (400, "E765"), response.text


@pytest.mark.parametrize("content", [b"{", b"[" * 9000, b"\xff\xfe", b"null"])
def test_bodies_that_are_no_request(front, content):
    response = front.post("/predict", content=content, headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["code"]) == (400, "E765")
    assert front.post("/predict", json={"texts": TEXTS}).status_code == 200


def test_a_body_of_unknown_length_is_bounded(front):
    response = front.post("/predict", content=(b" " * 5000 for _ in range(10)), headers={"Content-Type": "application/json"})
    assert (response.status_code, response.json()["code"]) == (413, "E770")


@pytest.mark.parametrize(
    "headers", [{"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}]
)
def test_a_key_is_needed(front, headers):
    response = front.post("/predict", json={"texts": TEXTS}, headers=headers)
    assert (response.status_code, response.json()["code"]) == (401, "E769")


def test_a_model_that_ranks_nothing_says_so(front):
    response = front.post("/v2/rerank", json={"model": "reviews", "query": "a film", "documents": TEXTS})
    assert (response.status_code, response.json()["code"]) == (400, "E767")


@pytest.fixture(scope="module")
def ranking(tmp_path_factory, tokenizer_folder, triton):
    """A front of a ranker, which gives a pair of texts the mean of their ids."""
    from starlette.testclient import TestClient

    from serving.front.app import Settings, make_app
    from serving.repository import write_repository

    folder = tmp_path_factory.mktemp("ranker")
    model = write_tagger(folder / "ranker.onnx", labels=1, pooled=True)
    options = {"facts": replace(FACTS, task="regression", labels=("score",), pair=True), "tokenizer_folder": tokenizer_folder}
    write_repository(folder / "repository", "ranker", model, interfaces=("text",), knobs=KNOBS, **options)
    with (
        QuickServer(folder / "repository", log_path=folder / "log") as server,
        TestClient(make_app(Settings(f"127.0.0.1:{server.ports['grpc']}", keys=(KEY,)))) as client,
    ):
        yield client


DOCUMENTS = ["a a", "was the", "film film"]


def test_documents_are_ranked_by_the_number_of_each_pair(ranking):
    request = {"model": "ranker", "query": "a", "documents": DOCUMENTS, "return_documents": True}
    headers = {"Authorization": f"Bearer {KEY}"}
    results = ranking.post("/v2/rerank", json=request, headers=headers).json()["results"]
    # ids of [CLS] query [SEP] document [SEP]: a is 4, film 6, the 10, was 11
    scores = {
        "was the": (2 + 4 + 3 + 11 + 10 + 3) / 6,
        "film film": (2 + 4 + 3 + 6 + 6 + 3) / 6,
        "a a": (2 + 4 + 3 + 4 + 4 + 3) / 6,
    }
    assert [(one["index"], one["document"]["text"]) for one in results] == [(1, "was the"), (2, "film film"), (0, "a a")]
    assert [one["relevance_score"] for one in results] == pytest.approx(list(scores.values()), abs=1e-5)
    few = ranking.post("/rerank", json={"query": "a", "documents": DOCUMENTS, "top_n": 1}, headers=headers).json()["results"]
    assert [(one["index"], one.get("document")) for one in few] == [(1, None)]


@pytest.mark.skipif(importlib.util.find_spec("cohere") is None, reason="cohere is not installed")
@pytest.mark.parametrize("kind", ["Client", "ClientV2"])
def test_coheres_own_client_ranks(ranking, kind):
    import cohere

    client = getattr(cohere, kind)(KEY, base_url=str(ranking.base_url), httpx_client=ranking)
    response = client.rerank(model="ranker", query="a", documents=DOCUMENTS, top_n=2)
    assert [one.index for one in response.results] == [1, 2]
    assert response.results[0].relevance_score == pytest.approx(33 / 6, abs=1e-5)


def test_health_and_metrics_need_no_key(front):
    assert front.get("/health/ready", headers={"Authorization": ""}).json() == {"status": "ready"}
    front.get("/nothing-of-the-kind")
    front.post("/predict", json={"texts": TEXTS})
    lines = front.get("/metrics", headers={"Authorization": ""}).text.splitlines()
    counted = {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}
    assert counted['front_requests_total{path="/predict",status="200"}'] >= 1
    assert counted['front_requests_total{path="other",status="404"}'] >= 1
    assert counted['front_texts_total{model="reviews-text"}'] >= 3
    assert not [name for name in counted if "nothing-of" in name], "what clients make up is no series"


def test_what_no_handler_answers_is_counted_and_has_a_code(played):
    predict = played(PlayedTriton(RuntimeError("no text of a user")), raise_server_exceptions=False)
    failed, large, elsewhere = predict(1), predict(600_000), predict.client.post("/none", content=b" " * 2_000_000)
    pieces = predict.client.post("/predict", content=(b" " * 500_000 for _ in range(4)))
    assert (failed.status_code, failed.json()["code"]) == (500, "E899") and "no text of a user" not in failed.text
    assert [(one.status_code, one.json()["code"]) for one in (large, elsewhere, pieces)] == [(413, "E770")] * 3
    lines = predict.client.get("/metrics").text.splitlines()
    for path, status, count in (("/predict", 500, 1), ("/predict", 413, 2), ("other", 413, 1)):
        assert f'front_requests_total{{path="{path}",status="{status}"}} {count}.0' in lines
    assert 'front_seconds_count{path="/predict"} 2.0' in lines


def test_responses_match_the_page_that_describes_them(front):
    page = front.get("/openapi.json").json()
    assert {"/predict", "/v2/rerank", "/metrics"} <= set(page["paths"])
    schema = {"$ref": "#/components/schemas/PredictResponse", "components": page["components"]}
    jsonschema.validate(front.post("/predict", json={"texts": TEXTS}).json(), schema)
    problem = {"$ref": "#/components/schemas/Problem", "components": page["components"]}
    jsonschema.validate(front.post("/predict", json={}).json(), problem)


def test_triton_is_away(server):
    """A front without its server: 503 with a code, readiness false, and no traceback."""
    from starlette.testclient import TestClient

    from serving.front.app import Settings, make_app

    with TestClient(make_app(Settings(f"127.0.0.1:{free_port()}", seconds=0.5))) as client:
        response = client.post("/predict", json={"texts": TEXTS, "model": "reviews"})
        assert (response.status_code, response.json()["code"]) in ((503, "E768"), (504, "E768"))
        assert client.get("/health/ready").status_code == 503


def front_of(port, **options):
    from starlette.testclient import TestClient

    from serving.front.app import Settings, make_app

    return TestClient(make_app(Settings(f"127.0.0.1:{port}", **options)))


@pytest.mark.usefixtures("proxied")
def test_no_proxy_stands_between_a_front_and_its_triton(server):
    with front_of(server.ports["grpc"]) as client:
        assert client.get("/health/ready").status_code == 200


def user_timeouts(port):
    """Milliseconds that sent data may stay unacknowledged (0: the kernel's quarter of an hour) on this process's connections to
    a port."""
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(path).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    if one.family in (socket.AF_INET, socket.AF_INET6) and one.getpeername()[1] == port:
                        yield one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)


def test_a_triton_whose_host_vanished_is_given_up(server):
    with front_of(server.ports["grpc"]) as client:
        assert client.get("/health/ready").status_code == 200
        assert 5000 in list(user_timeouts(server.ports["grpc"]))


@pytest.mark.slow
def test_a_triton_that_is_away_is_looked_for_every_few_seconds():
    times, end = [], time.monotonic() + 14
    with socket.create_server(("127.0.0.1", 0)) as listener, front_of(listener.getsockname()[1], seconds=0.2) as client:
        listener.settimeout(0.2)
        while time.monotonic() < end:
            assert client.get("/health/ready").status_code == 503
            with contextlib.suppress(TimeoutError):
                listener.accept()[0].close()
                times.append(time.monotonic())
    assert len(times) > 4 and max(np.diff([*times, end])) < 3


class PlayedTriton:
    """Triton as the front sees it: models of a number, two rows a request; `errors` has one for each request, or None."""

    def __init__(self, *errors):
        self.errors, self.config, self.rows = list(errors), {"max_batch_size": 2}, 0

    async def get_model_config(self, name, **_):
        return {"config": {"name": name, "input": [{"name": "TEXT"}], "output": [{"name": "VALUE"}]} | self.config}

    async def infer(self, _name, inputs, **_):
        if error := self.errors.pop(0) if self.errors else None:
            raise error
        self.rows = inputs[0].shape()[0]
        return self

    def as_numpy(self, _name):
        return np.zeros((self.rows, 1), np.float32)

    async def close(self):
        pass


@pytest.fixture
def played(monkeypatch):
    """Starts a front before a Triton that is played; what it gives sends so many texts."""
    from starlette.testclient import TestClient

    from serving.front.app import Settings, make_app

    with contextlib.ExitStack() as fronts:

        def start(triton, **options):
            monkeypatch.setattr("serving.front.triton_models.InferenceServerClient", lambda address, channel_args: triton)
            client = fronts.enter_context(TestClient(make_app(Settings("triton:8001")), **options))

            def predict(count, **more):
                return client.post("/predict", json={"model": "m", "texts": ["a"] * count, **more})

            predict.client = client
            return predict

        yield start


@pytest.mark.parametrize(
    ("whole", "kind", "reason", "told"),
    [
        (0, "INVALID_ARGUMENT", "[request id: <id_unknown>] row 1: not UTF-8", "row 1: not UTF-8"),
        (1, "INVALID_ARGUMENT", "[request id: <id_unknown>] row 1: not UTF-8", "row 3: not UTF-8"),
        (2, "INVALID_ARGUMENT", "not UTF-8", "row 4: not UTF-8"),
        (1, "INTERNAL", "onnx runtime error: row 1: not finite", "row 3: not finite"),
        (2, "INTERNAL", "onnx runtime error: not finite", "row 4: onnx runtime error: not finite"),
    ],
)
def test_a_wrong_text_is_named_by_its_place_among_all(played, whole, kind, reason, told):
    predict = played(PlayedTriton(*[None] * whole, InferenceServerException(reason, f"StatusCode.{kind}")))
    response = predict(5)
    assert (response.status_code, response.json()["code"]) == ({"INTERNAL": 502}.get(kind, 400), "E715")
    assert response.json()["message"].startswith(f"Triton refused the request: {told}. ")


@pytest.mark.parametrize(
    ("status", "told"),
    [
        ("UNAVAILABLE", (503, "Triton at triton:8001 is not available (Exceeds maximum queue size)")),
        ("DEADLINE_EXCEEDED", (504, "Triton at triton:8001 did not answer within 10 s")),
    ],
)
def test_a_full_queue_is_told_from_a_late_answer(played, status, told):
    predict = played(PlayedTriton(InferenceServerException("Exceeds maximum queue size", f"StatusCode.{status}")))
    response = predict(1)
    assert (response.status_code, response.json()["message"].partition(". ")[0]) == told


def test_a_new_version_may_take_something_else(played, monkeypatch):
    monkeypatch.setattr("serving.front.triton_models.KNOWN_SECONDS", 0.0, raising=False)
    triton = PlayedTriton()
    predict = played(triton)
    assert [predict(1).status_code, predict(1, pairs=["b"]).status_code] == [200, 400]
    triton.config["input"] = [{"name": "TEXT"}, {"name": "PAIR"}]
    assert [predict(1).status_code, predict(1, pairs=["b"]).status_code] == [400, 200]


def test_documents_of_any_shape():
    from serving.front.shapes import RerankRequest

    documents = ["a", {"text": "b", "id": 1}, {"title": "c", "body": "d"}]
    assert RerankRequest(query="q", documents=documents).texts == ["a", "b", "c d"]


@pytest.mark.parametrize("content", ["", " \n\n"])
def test_a_file_without_keys_opens_nothing(tmp_path, content):
    from compressor.errors import UserError
    from serving.front.__main__ import keys_in

    (tmp_path / "keys").write_text(content)
    with pytest.raises(UserError, match="E765"):
        keys_in(tmp_path / "keys")
    assert json.loads("[]") == list(keys_in(None))


def test_a_key_may_hold_any_character(tmp_path):
    from starlette.testclient import TestClient

    from serving.front.__main__ import keys_in
    from serving.front.app import Settings, make_app

    (tmp_path / "keys").write_text("\ufeffschl\u00fcssel\n", encoding="utf-8")
    with TestClient(make_app(Settings("127.0.0.1:1", keys_in(tmp_path / "keys")))) as client:
        given = {b"Authorization": "Bearer schl\u00fcssel".encode()}
        codes = [client.post("/predict", json={}, headers=headers).json()["code"] for headers in (given, {})]
    assert codes == ["E765", "E769"]


def test_a_file_of_keys_that_is_missing_is_told_in_a_line_and_before_anything_is_served(tmp_path, monkeypatch, capsys):
    from compressor.errors import UserError
    from pipelines.cli.work.serve_work import serve
    from serving.front.__main__ import main

    monkeypatch.setattr(sys, "argv", ["front", "--triton", "127.0.0.1:1", "--keys", str(tmp_path / "none")])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2 and "E765" in capsys.readouterr().err
    with pytest.raises(UserError, match="E765"):
        serve(tmp_path, 1.0, 1, False, None, http_front=8080, keys=tmp_path / "none")


def test_a_missing_package_of_the_front_is_told_before_anything_is_served(tmp_path, monkeypatch):
    from compressor.errors import UserError
    from pipelines.cli.work.serve_work import serve

    monkeypatch.setitem(sys.modules, "fastapi", None)
    with pytest.raises(UserError, match=r"E701 the HTTP front needs fastapi. Run: pip install 'compress-pipeline\[front\]'"):
        serve(tmp_path / "none", 1.0, 1, False, None, http_front=8080)


@pytest.fixture
def stopped(tmp_path, monkeypatch):
    """`compress serve` with a front, from its first signal on: the server's tasks, and what happens while the front ends."""
    from pipelines.cli.work import serve_work

    @contextlib.contextmanager
    def served(_run, empty):
        yield SimpleNamespace(outdated=None, repository=tmp_path / "deploy-0" / "repository", logs=tmp_path)

    def first_signal(*_):
        raise KeyboardInterrupt

    def serve(drain, ending, **tasks):
        @contextlib.contextmanager
        def fronted(_server, _port, _keys):
            yield None
            ending()

        server = SimpleNamespace(guard=True, start=lambda: None, **tasks)
        fakes = {"repository_in_use": served, "_fronted": fronted, "watch": first_signal, "adopt_orphans": lambda: None}
        fakes |= {"EmbeddedServer": lambda *_, **options: server, "_show": lambda *_: None}
        for name, fake in fakes.items():
            monkeypatch.setattr(serve_work, name, fake)
        serve_work.serve(tmp_path, drain, 1, False, None, http_front=8080)

    return serve


def test_a_second_signal_is_not_lost_while_the_front_ends(stopped):
    """Requests are refused before: the guard would take new ones for as long as the front answers those that it has."""
    done = []

    def second_signal():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped(1.0, second_signal, refuse=lambda: done.append("refused"), stop=done.append)
    assert done == ["refused", 0], "what still runs is killed at once"


def test_what_is_served_is_kept_to_the_end(stopped, tmp_path):
    """Triton goes on reading the repository after its start, which is over here."""
    (tmp_path / "deploy-0" / "repository").mkdir(parents=True)
    (tmp_path / "deploy-0" / "artifact.json").touch()
    held = []

    def look(*_):
        with contextlib.suppress(Locked), lock(served_lock(tmp_path, "deploy-0")):
            return
        held.append(True)

    stopped(1.0, look, refuse=look, drained=lambda seconds: True, stop=look)
    assert len(held) == 4 and not served_lock(tmp_path, "deploy-0").exists()


@pytest.mark.parametrize(("takes", "told"), [(3, (3, 5)), (2, (3, 6)), (9, (3, 5))])
def test_all_that_is_in_flight_has_one_time_from_the_signal_on(stopped, monkeypatch, takes, told):
    """Of 6 s, of which 1 is over when new requests are refused, and 2 more when the front has ended."""
    from pipelines.cli.work import serve_work

    now, given = [1000.0], []
    monkeypatch.setattr(serve_work, "time", SimpleNamespace(monotonic=lambda: now[0]), raising=False)

    def passed(seconds):
        now[0] += seconds

    def drained(seconds):
        given.append(seconds)
        passed(min(seconds, takes))

    stopped(6.0, lambda: passed(2), refuse=lambda: passed(1), drained=drained, stop=lambda *seconds: given.extend(seconds))
    assert tuple(given) == told, "what is left for HTTP, and with 5 s to end in for Triton"


@pytest.mark.slow
def test_no_model_takes_texts(repository, tmp_path, triton):
    from starlette.testclient import TestClient

    from serving.front.app import Settings, make_app

    with (
        QuickServer(repository, log_path=tmp_path / "log", models=["bare"]) as server,
        TestClient(make_app(Settings(f"127.0.0.1:{server.ports['grpc']}"))) as client,
    ):
        response = client.post("/predict", json={"texts": TEXTS})
        assert (response.status_code, response.json()["code"]) == (400, "E766")


@pytest.mark.slow
def test_a_front_that_cannot_start_is_given_up(tmp_path):
    from compressor.errors import UserError
    from serving.front.front_process import FrontProcess

    said = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        front = FrontProcess("127.0.0.1:1", taken.getsockname()[1], None, tmp_path / "log")
        with front.running(), pytest.raises(UserError, match="E771"):
            for _ in range(4):
                front.process.wait(30)
                front.keep(said.append)
    assert len(said) == 3 and "address already in use" in (tmp_path / "log").read_text()
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600, "for this user's eyes"


def test_a_front_that_ends_once_after_three_ends_long_ago_is_started_again(tmp_path, monkeypatch):
    """The ends of one early minute are not those of a later one; and its log may be gone with its folder."""
    from compressor.errors import UserError
    from serving.front import front_process

    now, said = [1000.0], []
    monkeypatch.setattr(front_process.FrontProcess, "command", property(lambda self: ["/bin/false"]))
    monkeypatch.setattr(front_process, "time", SimpleNamespace(monotonic=lambda: now[0]))
    front = front_process.FrontProcess("127.0.0.1:1", 8080, None, tmp_path / "logs" / "log")
    front.start()
    for seconds in (10, 10, 10, 90 * 86400, 10, 10):
        front.process.wait()
        now[0] += seconds
        front.keep(said.append)
    assert len(said) == 6 and (tmp_path / "logs" / "log").stat().st_mode & 0o777 == 0o600
    front.process.wait()
    with pytest.raises(UserError, match=r"E771 the HTTP front ended 4 times within 60 s \(exit status 1\)"):
        front.keep(said.append)


@pytest.mark.parametrize("drain", [30.0, 0.0])
def test_a_front_that_is_stopped_has_the_time_of_its_server(tmp_path, monkeypatch, drain):
    """A request of many texts is many to Triton, one after the other."""
    from serving.front.__main__ import main
    from serving.front.front_process import FrontProcess

    front, given, waited = FrontProcess("127.0.0.1:1", 1, None, tmp_path / "log", drain), [], []
    monkeypatch.setattr("uvicorn.run", lambda _app, **options: given.append(options["timeout_graceful_shutdown"]))
    monkeypatch.setattr(sys, "argv", front.command[front.command.index("serving.front") :])
    main()
    front.process = SimpleNamespace(terminate=lambda: None, kill=lambda: None, wait=lambda seconds=0: waited.append(seconds))
    monkeypatch.setattr(front, "start", lambda: None)
    with front.running():
        pass
    assert given == [drain] and waited[0] > drain


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("--triton", "https://127.0.0.1:8001", "E711 .*https://127.0.0.1:8001' is not an address of gRPC without TLS"),
        ("--triton", "127.0.0.1", "E711 'grpc://127.0.0.1' is not a server's URL"),
        ("--triton", "grpc://127.0.0.1:8001", None),
        ("--port", "99999", "--port: 99999 is not from 1 to 65535"),
        ("--drain", "nan", "--drain: nan is not from 0 to 3600"),
        ("--max-body", "0", "--max-body: 0 is not from 1 to"),
        ("--timeout", "soon", "--timeout: invalid float value: 'soon'"),
    ],
)
def test_an_option_that_no_front_can_use_is_refused(monkeypatch, capsys, option, value, told):
    """Else one whose Triton has no such address would answer 503 for ever."""
    from serving.front import __main__ as front

    served = []
    monkeypatch.setattr(front, "serve", lambda **options: served.append(options["triton"]))
    monkeypatch.setattr(sys, "argv", ["serving.front", "--triton", "127.0.0.1:8001", option, value])
    with pytest.raises(SystemExit, match="2") if told else contextlib.nullcontext():
        front.main()
    assert re.search(told, capsys.readouterr().err) if told else served == ["127.0.0.1:8001"]


SERVING = """
import sys, time
from pathlib import Path
from serving.front.front_process import FrontProcess
front = FrontProcess("127.0.0.1:1", int(sys.argv[1]), None, Path("log"))
front.start()
time.sleep(600)
"""


def is_live(port):
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.slow
def test_a_front_ends_with_a_killed_server_and_takes_no_code_of_the_current_folder(tmp_path):
    (tmp_path / "uvicorn.py").write_text("raise SystemExit('the current folder is imported')")
    port, deadline = free_port(), time.monotonic() + 60
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen([sys.executable, "-P", "-c", SERVING, str(port)], cwd=tmp_path, env=environment)
    try:
        while not is_live(port):
            assert time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.1)
    finally:
        server.kill()
        server.wait(10)
    while is_live(port):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_a_front_follows_its_triton_to_another_port(tmp_path):
    from serving.front.front_process import FrontProcess

    with FrontProcess("127.0.0.1:1", free_port(), None, tmp_path / "log").running() as front:
        first = front.process
        front.follow("127.0.0.1:1")
        assert front.process is first
        front.follow("127.0.0.1:2")
        assert first.poll() is not None and front.process.poll() is None and "127.0.0.1:2" in front.command
    assert front.process.poll() is not None
