"""Load on a real server: every request is answered, checked and counted; no timing is asserted."""

import http.server
import json
import os
import signal
import socket
import threading
import time
from dataclasses import replace

import pytest
from triton_parts import WORDS

from compressor.errors import UserError
from pipelines.cli.commands import main
from pipelines.cli.work.loadtest_work import server_of
from pipelines.loadtest.load_page import to_page
from pipelines.loadtest.load_table import level_rows, notes
from pipelines.loadtest.request_rows import traffic_of
from serving.client import Client
from serving.clients.address import parse_url
from serving.loadtest.arrivals import Load
from serving.loadtest.fleet import Fleet
from serving.loadtest.levels import Target, first_pass, measure
from serving.loadtest.plan import Wish, run_levels
from serving.loadtest.request_pools import Endpoint
from serving.loadtest.traffic import Traffic, token_rows

TEXTS = ("great", "the plot was dull", "a film", "the film was fine")
SHORT = Load(warmup=0.1, seconds=0.6, timeout=5)
TOKENS = {"input": [{"name": name, "data_type": "TYPE_INT64"} for name in ("input_ids", "attention_mask")]}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "texts.txt"
    path.write_text("\n".join(TEXTS))
    return path


@pytest.fixture(scope="module")
def traffic(server, texts):
    with Client(server.url) as client:
        return traffic_of(client, "reviews", texts=texts)


@pytest.fixture(scope="module")
def fleet(traffic):
    with Fleet(traffic, 2) as fleet:
        yield fleet


def target(server, protocol="http", model="reviews"):
    client = Client(server.url)
    return Target(Endpoint(replace(client.address, protocol=protocol, port=server.ports[protocol]), model), client)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_levels_of_both_kinds_are_answered_and_checked(server, fleet, traffic, protocol):
    under_test = target(server, protocol)
    expected = first_pass(fleet, under_test)
    assert len(expected) == len(TEXTS) and expected[0]["logits"].shape == (1, 3)
    levels = run_levels(fleet, under_test, [Wish(concurrency=3), Wish(rate=60), Wish(factor=0.5)], SHORT, 5.0, expected)
    assert [level["mode"] for level in levels] == ["closed", "open", "open"]
    for level in levels:
        assert level["errors"] == {} and level["requests"] > 0
        checked = level["answers"]
        assert checked["answers"] > 0 and (checked["wrong"], checked["changed"], checked["unchecked"]) == (0, 0, 0)
        assert level["server"]["executions"] > 0 and level["server"]["mean_batch"] >= 1
        assert level["server"]["memory_mb"] > 10 and level["client"]["processes"] == 2
        assert level["goodput"] > 0
    test = {"rows": traffic.source, "mean_tokens": traffic.mean_tokens, "levels": levels}
    assert traffic.mean_tokens == pytest.approx(4.75) and len(level_rows(levels)[0]) == 11
    assert any(line.startswith("answers: all") for line in notes(test))
    page = to_page({**test, "model": "reviews", "url": "u", "protocol": protocol})
    assert "3 clients" in page and "https:" not in page.partition("<script>")[0]
    assert page.index("@media print") > page.index("prefers-color-scheme: dark") and 'addEventListener("beforeprint"' in page


@pytest.mark.parametrize(("protocol", "kind"), [("http", "404: Request for"), ("grpc", "NOT_FOUND: Request for")])
def test_requests_that_are_refused_are_counted_by_their_kind(server, fleet, protocol, kind):
    endpoint = target(server, protocol, "absent").endpoint
    records, _, _ = fleet.run(endpoint, Load(rate=100, warmup=0, seconds=0.3), lambda start: None)
    kinds = {error for record in records for error in record.errors}
    assert len(kinds) == 1 and kinds.pop().startswith(kind)


def test_a_server_that_is_gone_is_an_error_of_each_request(fleet):
    endpoint = Endpoint(parse_url("127.0.0.1:1"), "reviews")
    (first, second), _, _ = fleet.run(endpoint, Load(concurrency=2, warmup=0, seconds=5, requests=4), lambda start: None)
    assert first.errors + second.errors == ["connection: ConnectionRefusedError"] * 4


def test_the_number_of_requests_is_a_limit(server, fleet):
    expected = first_pass(fleet, target(server))
    level = measure(fleet, target(server), Load(concurrency=2, warmup=0, seconds=30, requests=20), None, expected)
    assert level["requests"] == 20 and level["seconds"] < 30 and "goodput" not in level


def test_a_row_that_the_model_refuses_alone_is_named(server):
    rows = token_rows(
        TOKENS, [{"input_ids": [2, 3], "attention_mask": [1, 1]}, {"input_ids": [len(WORDS)], "attention_mask": [1]}]
    )
    told = r"E748 input_ids \[12\]: the server refuses a row that comes alone \(400: .*holds 12, not an id from 0 to 11\)"
    refused = pytest.raises(UserError, match=told)
    with Fleet(Traffic(rows, "two rows")) as fleet, refused:
        first_pass(fleet, target(server))


@pytest.mark.parametrize("end", [signal.SIGSTOP, signal.SIGKILL])
def test_a_client_process_that_hangs_or_is_killed_is_an_error_and_does_not_hold_up_the_end(server, traffic, monkeypatch, end):
    monkeypatch.setattr("serving.loadtest.fleet.SLACK", -3.8)
    monkeypatch.setattr("serving.loadtest.fleet.END_SECONDS", 0.2)
    with Fleet(traffic) as fleet:
        processes = list(fleet._pool._pool)
        for process in processes:
            os.kill(process.pid, end)
        with pytest.raises(UserError, match=r"E746 a client process of the load test ended or hangs"):
            fleet.once(target(server).endpoint, Load(concurrency=1, warmup=0, seconds=1, timeout=3))
    for process in (*processes, *fleet._pool._pool):
        process.join(10)
        assert not process.is_alive()


def test_a_load_that_begins_while_ended_processes_are_replaced_is_sent(server, traffic, monkeypatch):
    with Fleet(traffic) as fleet, monkeypatch.context() as replaced:
        replaced.setattr(fleet._pool, "_pool", [])
        assert fleet.once(target(server).endpoint, Load(concurrency=1, warmup=0, seconds=1, timeout=3))


def test_the_command_prints_and_writes_every_figure(server, texts, tmp_path, capfd):
    options = ["--texts", texts, "--concurrency", "2", "--rate", "30", "--seconds", "0.5", "--warmup", "0", "--deadline", "900"]
    with pytest.raises(SystemExit) as end:
        main(["loadtest", server.url, "reviews", *map(str, options), "--out", str(tmp_path / "load")], prog_name="compress")
    shown, error = capfd.readouterr()
    assert not end.value.code
    assert "2 clients" in shown and "30 requests/s" in shown and "answers: all" in shown and "4 texts of texts.txt" in shown
    assert error.splitlines()[-1] == f"load test: {tmp_path / 'load' / 'loadtest.html'}"
    written = json.loads((tmp_path / "load" / "loadtest.json").read_text())
    assert [level["mode"] for level in written["levels"]] == ["closed", "open"] and written["levels"][1]["deadline_ms"] == 900


def test_rows_must_come_from_somewhere(server):
    with Client(server.url) as client, pytest.raises(UserError, match="E749 there are no rows to send"):
        traffic_of(client, "reviews")


def test_a_server_that_hangs_is_not_waited_for_longer_than_for_an_answer(monkeypatch):
    """Each level asks for statistics twice."""
    monkeypatch.setattr("pipelines.cli.work.loadtest_work.LEAST_SECONDS", 0.2)
    options = {"run": None, "protocol": "http", "ca": None, "token": None, "timeout": 0.2}
    hangs = socket.create_server(("127.0.0.1", 0))  # connections wait in its backlog
    with hangs, server_of(f"127.0.0.1:{hangs.getsockname()[1]}", options) as served:
        start = time.monotonic()
        assert Target(Endpoint(served.address, "m"), served.client).statistics_if_any() == {}
        assert time.monotonic() - start < 5  # not for 60 s, and 10 more to see whether it lives


def test_a_short_timeout_of_requests_is_not_that_of_the_server():
    """A limit for answers may be as short as people need them; config and statistics of a busy server take longer."""
    stats = {
        "name": "m",
        "version": "1",
        "inference_count": 7,
        "execution_count": 7,
        "inference_stats": {"success": {"count": 7}},
    }

    class Busy(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            time.sleep(0.3)
            config = {"name": "m", "input": [], "output": [], "max_batch_size": 8}
            body = json.dumps(config | {"model_stats": [stats]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    options = {"run": None, "protocol": "http", "ca": None, "token": None, "timeout": 0.1}
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Busy) as busy:
        threading.Thread(target=busy.serve_forever, daemon=True).start()
        with server_of(f"127.0.0.1:{busy.server_port}", options) as served:
            assert served.client.config("m")["name"] == "m"
            assert Target(Endpoint(served.address, "m"), served.client).statistics_if_any()["success_count"] == 7
        busy.shutdown()


def test_a_server_without_statistics_is_said_so():
    class Closed(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            live = self.path == "/v2/health/live"
            body = b"" if live else b'{"error": "closed here"}'
            self.send_response(200 if live else 400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Closed) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"127.0.0.1:{other.server_port}"
        with Client(url) as client, pytest.raises(UserError, match=r"E747 .*gives no statistics of 'm' \(closed here\)"):
            Target(Endpoint(client.address, "m"), client).statistics()
        other.shutdown()
