"""When requests are due, what is counted, and how answers compare: pure functions."""

import asyncio
import contextlib
import json
import os
import time
import tracemalloc
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from google.protobuf import json_format
from triton_parts import FACTS, KNOBS

from compressor.errors import CheckError, UserError
from export.runtimes.runtime_registry import DEFAULT
from pipelines.cli.commands import main
from pipelines.cli.work import loadtest_work
from pipelines.loadtest.load_table import answer_notes, level_rows, server_notes
from pipelines.loadtest.request_rows import traffic_of
from serving.answer_bounds import IN_BATCHES, TOLERANCE
from serving.backends.door import VERSION_FILE
from serving.client import Refusal
from serving.clients.address import parse_url
from serving.deployment.answers import Answer, tensor, write_answers
from serving.layout.generator_config import generator_config
from serving.layout.model_config import text_config
from serving.loadtest.answer_check import Checked, check_answers, compared, first_answers, require_recorded
from serving.loadtest.arrivals import Load, poisson_times, shares
from serving.loadtest.levels import Target, client_figures, window
from serving.loadtest.observed import Processes, Watch, added_up, server_figures
from serving.loadtest.plan import Wish, require_answers, run_levels, wishes
from serving.loadtest.quantiles import curve, latency_figures, quantile, slope
from serving.loadtest.request_pools import Answer as Reply
from serving.loadtest.request_pools import Endpoint, HttpPool, failure, kind_of_error
from serving.loadtest.senders import TIMED_OUT, Record
from serving.loadtest.traffic import Traffic, http_body, outputs_of, read_texts, recorded_rows, text_rows, token_rows
from serving.server_registry import log_folder


def test_poisson_arrivals_have_their_rate_and_independent_exponential_gaps():
    times = poisson_times(500, 40, seed=1)
    gaps = np.diff(times)
    assert len(times) == pytest.approx(20_000, rel=0.03) and times[0] >= 0 and times[-1] < 40
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)
    assert abs(np.corrcoef(gaps[1:], gaps[:-1])[0, 1]) < 0.03
    assert (poisson_times(500, 40, seed=1) == times).all() and len(poisson_times(1, 0.001)) == 0


def test_an_open_loop_is_bounded_by_its_measured_requests():
    load = Load(rate=100, warmup=1, seconds=10, requests=50)
    times = load.times()
    assert (times >= 1).sum() == 50 and (times < 1).sum() > 50
    assert not len(Load(concurrency=4).times())
    assert shares(5, 3) == [2, 2, 1] and shares(1, 2) == [1, 0]


def test_a_quantile_is_given_only_where_values_lie_above_it():
    values = np.arange(1, 1001) / 1000
    assert latency_figures(values[::-1]) == {"mean": 500.5, "p50": 500, "p90": 900, "p99": 990, "p99.9": 999, "max": 1000}
    assert quantile(np.arange(100.0), 0.99) == 98 and quantile(np.arange(100.0), 0.999) is None
    assert quantile(np.arange(1.0), 0.5) is None and latency_figures(np.empty(0))["max"] is None
    assert curve(np.empty(0)) == [] and curve(values)[-1] == (0.999, 999)


def test_a_slope_is_that_of_most_points():
    assert slope(range(10), [3 * time + (1000 if time == 4 else 0) for time in range(10)]) == 3
    assert slope([0, 1, 2], [1, 2, 3]) is None


def test_the_slope_of_an_hour_needs_little_memory():
    times = np.arange(14_400) / 4
    tracemalloc.start()
    try:
        found = slope(list(times), list(3 * times + 1000 * (times > 3500)))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == pytest.approx(3) and most < 100e6


def record(due, waited, took, errors=None):
    """Requests that were sent `waited` seconds after they were due, and took so long."""
    due = np.array(due, dtype=float)
    return Record(list(due), list(due + waited), list(due + waited + took), errors or [""] * len(due))


def test_latency_counts_from_when_a_request_was_due():
    """Requests that wait for a stalled client or server are late: no coordinated omission."""
    late = record([10.5, 11.0, 11.5], waited=np.array([2.0, 1.5, 1.0]), took=0.1)
    measured = window([record([9.9], 0, 0.2), late], Load(rate=2, warmup=1, seconds=10), start=9)
    np.testing.assert_allclose(measured.latencies, [2.1, 1.6, 1.1])
    assert measured.in_time(1.5) == 1 and measured.seconds == 10


def test_a_closed_loop_counts_what_ended_in_its_window():
    load = Load(concurrency=1, warmup=1, seconds=2)
    measured = window([record([0.5, 1.2, 2.9], 0, 0.6), record([2.0], 0, 0.1, ["503: full"])], load, start=0)
    assert measured.answered == 2 and measured.kinds == {"503: full": 1} and len(measured.latencies) == 2
    short = window([record([1.0, 1.5, 2.0], 0, 0.25)], Load(concurrency=1, warmup=1, seconds=9, requests=3), start=0)
    assert short.seconds == pytest.approx(1.25) and short.answered == 3


def test_a_client_of_a_closed_loop_that_waits_in_vain_is_counted():
    """It ends behind the window, for it waited longer than that lasts."""
    stalled = record([0.5, 1.2, 1.8], 0, np.array([0.6, 0.6, 5.0]), ["", "", TIMED_OUT])
    load = Load(concurrency=2, warmup=1, seconds=2, timeout=5)
    measured = window([stalled, record([3.1], 0, 5.0, [TIMED_OUT])], load, start=0)
    assert measured.kinds == {TIMED_OUT: 1} and measured.answered == 2 and measured.seconds == 2
    np.testing.assert_allclose(measured.latencies, [0.6, 0.6, 5.0])


def test_an_open_loop_of_few_requests_counts_their_answers():
    load = Load(rate=5, warmup=1, seconds=60, requests=2)
    measured = window([record([0.5, 1.1, 1.3, 1.5], 0, 0.25)], load, start=0)
    assert measured.answered == 3 and measured.seconds == pytest.approx(0.75), "until the last was answered"


def test_an_open_loop_counts_every_answer_that_came_in_its_window():
    """Also those to requests of the warm-up: as many came in as went out."""
    measured = window([record(np.arange(0, 11, 0.02), 0, 0.51)], Load(rate=50, warmup=1, seconds=10), start=0)
    assert measured.answered / measured.seconds == pytest.approx(50, rel=0.01) and measured.in_time(1) == 500


def test_a_clock_that_has_run_for_years_loses_no_request():
    late = 2.0**28
    measured = window([record([late + 0.5], 0, 0.125)], Load(rate=1, warmup=0, requests=1), start=late)
    assert (len(measured.due), measured.answered, measured.seconds) == (1, 1, pytest.approx(0.625))


def test_a_request_without_an_answer_counts_with_the_time_that_was_waited():
    measured = window([record([1.0, 1.0], 0, np.array([0.1, 5.0]), ["", TIMED_OUT])], Load(rate=1, warmup=0), start=0)
    assert list(np.round(measured.latencies, 6)) == [0.1, 5.0] and measured.in_time(10) == 1 and measured.answered == 1


def test_the_last_sample_of_a_server_is_of_the_end():
    """Its CPU time is divided by all requests of the time that was measured."""
    with Watch(Processes(os.getpid())) as watch:
        while not watch.cpu:
            time.sleep(0.001)
        ended = time.monotonic()
    assert watch.times[0] <= ended <= watch.times[-1] and len(watch.times) == len(watch.cpu) == len(watch.memory)


def test_a_client_that_is_busy_or_late_is_the_limit():
    def client(busy, late, p50=10.0):
        return client_figures([Record(busy=busy, late=[late] * 200)], p50)["limit"]

    assert client(0.9, 0) == "busy" and client(0.1, 0.005) == "late"
    assert client(0.3, 0.0005) == client(0.3, 0.005, p50=100.0) == client(0.3, 0.0005, p50=1.0) == ""


def test_levels_as_they_are_asked_for():
    assert [wish.concurrency for wish in wishes(None, None)] == [1, 4, 16] and wishes("2", None) == [Wish(concurrency=2)]
    assert wishes(None, "50, 7.5") == [Wish(rate=50), Wish(rate=7.5)]
    assert wishes("8", "2x") == [Wish(concurrency=8), Wish(factor=2)] and len(wishes(None, "0.5x")) == 4


@pytest.mark.parametrize(
    ("concurrency", "rate"),
    [("0", None), ("1,a", None), ("1.5", None), ("9999", None), (None, "0x"), (None, "nan"), (None, "")],
)
def test_a_level_that_is_no_number_is_refused(concurrency, rate):
    with pytest.raises(UserError, match=r"E751 --(concurrency|rate): '.*' is not a number up to"):
        wishes(concurrency, rate)
    with pytest.raises(UserError, match=r"E751 --concurrency: a process sends at most 800 .*--clients 2"):
        wishes("4,1024", None)
    assert wishes("1024", None, processes=2) == [Wish(concurrency=1024)]


def test_a_slow_model_has_the_time_that_is_given_from_the_first_row_on(monkeypatch):
    class Fleet:
        traffic, loads = Traffic([{"TEXT": np.array([[b"a"]], dtype=object)}], "a row"), []

        def once(self, _endpoint, load):
            self.loads.append(load)
            return Record()

    monkeypatch.setattr(loadtest_work, "Fleet", lambda *_: contextlib.nullcontext(Fleet()))
    monkeypatch.setattr(loadtest_work, "traffic_of", lambda *_, **__: Fleet.traffic)
    options = dict.fromkeys(("texts", "tokenizer", "ca", "token", "deadline"))
    options |= {"warmup": 1.0, "seconds": 1.0, "requests": 1, "timeout": 60.0, "clients": 1}
    loadtest_work.carried_out(loadtest_work.Served(None, parse_url("h:1"), None), "m", [], options)
    assert [load.timeout for load in Fleet.loads] == [60.0]


def test_a_folder_that_cannot_be_written_is_told_before_the_test(tmp_path, monkeypatch, capfd):
    (tmp_path / "load").touch()
    monkeypatch.setattr(loadtest_work, "server_of", None)
    with pytest.raises(SystemExit) as end:
        main(["loadtest", "h:1", "m", "--out", str(tmp_path / "load" / "inner")], prog_name="compress")
    assert end.value.code == 2 and f"E801 {tmp_path / 'load'}: a file, where a folder is needed" in capfd.readouterr().err


def test_nothing_is_written_into_a_repository_that_is_tested(tmp_path, monkeypatch):
    """A server that polls it, or loads all of it, takes every folder in it for a model."""
    (tmp_path / "reviews").mkdir()
    (tmp_path / "reviews" / "config.pbtxt").touch()
    logs = []

    @contextlib.contextmanager
    def server(_repository, log_path):
        logs.append(log_path)
        yield SimpleNamespace(url="127.0.0.1:1", ports={"http": 1})

    monkeypatch.setattr(loadtest_work, "EmbeddedServer", server)
    with loadtest_work.server_of(str(tmp_path), {"run": None, "protocol": None, "timeout": 10.0}) as served:
        assert served.run is None  # E749 advises --run and --texts
    assert logs == [log_folder() / "loadtest.log"]


def test_statistics_are_the_difference_of_two_looks():
    def version(count):
        part = {"count": count, "ns": count * 2_000_000}
        parts = dict.fromkeys(("success", "queue", "compute_input", "compute_infer", "compute_output"), part)
        return {"inference_count": 3 * count, "execution_count": count, "inference_stats": parts}

    found = server_figures(added_up([version(10)]), added_up([version(10), version(30)]))
    assert found == {"requests": 30, "failed": 0, "executions": 30, "mean_batch": 3, "queue_ms": 2, "compute_ms": 6}
    assert server_figures(added_up([]), added_up([]))["mean_batch"] is None
    restarted = server_figures(added_up([version(5000)]), added_up([version(30)]))
    assert set(restarted) == set(found) and not any(value is not None for value in restarted.values())


class PlayedFleet:
    """One request a level, which is answered."""

    traffic = SimpleNamespace(bound=IN_BATCHES)

    def run(self, _endpoint, _load, observe):
        start = time.monotonic()
        return [replace(record([start], 0, 0.01), late=[0.0])], start, observe(start)

    def wait(self, seconds):
        pass


def test_a_server_that_is_being_started_again_costs_no_level():
    """Its guard refuses, or nothing answers; the levels that were measured before are not lost."""
    starting = Refusal("E737 the server is starting; try again in some seconds", "h:1", wrong=False)
    gone = UserError("E712", "no Triton server responds", "Start one")
    unloaded = UserError("E713", "no model 'm' is loaded", "Loaded models: none")
    looks = [5, 5, 9, 9, starting, gone, 3, 0, unloaded, 4, 6]

    def statistics(_model):
        if isinstance(look := looks.pop(0), Exception):
            raise look
        return [{"inference_count": look, "execution_count": look, "inference_stats": {"success": {"count": look}}}]

    target = Target(Endpoint(parse_url("h:1"), "m"), SimpleNamespace(statistics=statistics, address=parse_url("h:1")))
    load = Load(warmup=0, seconds=1)
    levels = run_levels(PlayedFleet(), target, [Wish(concurrency=count) for count in (1, 2, 4, 8, 16)], load, None, [])
    assert [level["server"]["requests"] for level in levels] == [4, None, None, None, 2] and not looks
    told = "the server or its model ended, was started again, or did not tell in time: what it says of itself is left out"
    assert f"4 clients: {told}" in server_notes(levels)
    assert level_rows(levels)[1][-4:-1] == ["-"] * 3 and [level["requests"] for level in levels] == [1] * 5
    looks[:] = [starting]
    with pytest.raises(UserError, match=r"E747 .*gives no statistics of 'm' \(E737"):
        run_levels(PlayedFleet(), target, [Wish(concurrency=1)], load, None, [])


def test_answers_are_equal_near_wrong_or_of_another_text():
    def answer(score, label="good"):
        return {"SCORES": np.array([[score, 1.0]], np.float32), "LABEL": np.array([[label.encode()]], dtype=object)}

    def verdict(found, bound=IN_BATCHES):
        return compared(answer(0.5), found, bound)[0]

    assert compared(answer(0.5), answer(0.5), TOLERANCE) == ("equal", 0)
    assert verdict(answer(0.51, "bad")) == "near" and verdict(answer(0.5005), TOLERANCE) == "near"
    assert verdict(answer(-0.3)) == verdict(answer(np.nan)) == verdict({"SCORES": np.zeros((1, 3))}) == "wrong"
    assert verdict(answer(0.51, "bad"), TOLERANCE) == "wrong"  # no int8 whose scales depend on the batch
    assert verdict(answer(0.5, "bad")) == "changed"
    place, other = ({"SPAN": np.array([span], np.int64)} for span in ([60, 62], [100, 105]))
    assert [compared(*pair, 0.7)[0] for pair in ((place, place), (place, other), (other, place))] == ["equal", *["changed"] * 2]


def http_answer(*logits):
    described = {"name": "logits", "datatype": "FP32", "shape": [1, len(logits)]}
    body = np.array(logits, np.float32).tobytes()
    header = json.dumps({"outputs": [described | {"parameters": {"binary_data_size": len(body)}}]}).encode()
    return header + body, len(header)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (TIMED_OUT, r"a row that comes alone is not answered \(no answer in time\)\. .*--timeout"),
        ("connection: ConnectionResetError", r"a row that comes alone is not answered \(connection: .*log"),
        ("400: too long", r"the server refuses a row that comes alone \(400: too long\)\. Remove that row"),
    ],
)
def test_a_row_without_an_answer_is_not_called_refused(error, told):
    """It is shown, as it has no number that a user knows."""
    rows = text_rows({"input": [{"name": "TEXT", "data_type": "TYPE_STRING"}]}, [("a",), ("a dull film " * 9,), ("c",)])
    with pytest.raises(UserError, match=rf"E748 '(a dull film ?){{5}}: {told}"):
        first_answers(Record(errors=["", error, ""]), Traffic(rows, "three rows"))


def test_a_row_of_several_choices_is_named_by_its_first():
    texts = {name: np.array([["a film"], ["the plot"]], dtype=object) for name in ("TEXT", "PAIR")}
    row = {name: np.char.encode(values.astype(str)).astype(object) for name, values in texts.items()}
    with pytest.raises(UserError, match=r"E748 \('a film', 'a film'\): the server refuses"):
        first_answers(Record(errors=["400: no"]), Traffic([row], "one row"))


def test_a_single_error_is_told_in_full():
    answers = [Reply(), failure(400, "a text of\n1,048,577 bytes, at most 1,048,576 are read"), failure(400, "another")]
    record = Record()
    for row, answer in enumerate(answers):
        record.add(row, 0.0, 0.0, answer)
    assert record.errors[1] == "400: a text of N,N,N bytes, at most N,N,N are read", "equal errors are counted as one kind"
    tokens = token_rows({"input": [{"name": "input_ids", "data_type": "TYPE_INT64"}]}, [{"input_ids": [2, 9, 3]}] * 3)
    told = r"E748 input_ids \[2, 9, 3\]: .* \(400: a text of 1,048,577 bytes, at most 1,048,576 are read\)"
    with pytest.raises(UserError, match=told):
        first_answers(record, Traffic(tokens, "three rows"))


def test_a_text_of_a_file_is_named_by_its_line(tmp_path):
    """Also where the model takes its tokens; the rows of a file are sent in random order."""
    lines = [f"text {number}" if number % 5 else "" for number in range(1, 41)]
    (tmp_path / "texts").write_text("\n".join(lines))
    client = SimpleNamespace(config=lambda model: {"input": [{"name": "TEXT", "data_type": "TYPE_STRING"}]})
    traffic = traffic_of(client, "m", texts=tmp_path / "texts")
    sent = [row["TEXT"].item().decode() for row in traffic.rows]
    assert sorted(sent) == sorted(filter(None, lines)) and sent != list(filter(None, lines))
    numbers = [text.removeprefix("text ") for text in sent]
    assert [traffic.name_of(row) for row in range(32)] == [f"{tmp_path / 'texts'}:{number}" for number in numbers]


def test_rows_that_are_mixed_up_fail_the_test():
    (first, header), (second, _) = http_answer(1, 5), http_answer(5, 1)
    expected = [outputs_of(first, header), outputs_of(second, header)]
    answers = {(0, header, first): 98, (0, header, second): 2}
    checked = check_answers(expected, [Record(answers=answers)])
    assert (checked.answers, checked.wrong, checked.max_difference) == (100, 2, pytest.approx(0.8))
    with pytest.raises(CheckError, match="E750 4 clients: 2 of 100 answers under load differ"):
        require_answers([{"load": "4 clients", "requests": 100, "errors": {}, "answers": vars(checked)}])


def test_a_level_without_an_answer_fails_the_test():
    answered = vars(Checked(answers=7))  # while it warmed up
    level = {"load": "4 clients", "requests": 4, "errors": {TIMED_OUT: 4}, "answers": vars(check_answers([], [Record()]))}
    for lost in (level, level | {"answers": answered}):
        with pytest.raises(CheckError, match="E750 4 clients: no request was answered"):
            require_answers([lost])


@pytest.mark.parametrize(("mode", "load", "did"), [("closed", "4 clients", "ended"), ("open", "0.1 requests/s", "was due")])
def test_a_level_in_which_no_request_came_to_its_end_was_too_short(mode, load, did):
    """A model whose answers take longer than the level, or a rate of less than one request: nothing is wrong with a server."""
    level = {"load": load, "mode": mode, "seconds": 2.0, "requests": 0, "errors": {}, "answers": vars(Checked(answers=7))}
    with pytest.raises(UserError, match=rf"E751 {load}: no request {did} within the 2 s that were measured\. .*--seconds"):
        require_answers([level])


NO_ANSWERS = {
    "a page": (b"<html>maintenance</html>", 0),
    "nothing": (b"", 0),
    "no outputs": (b'{"model_name": "m"}', 0),
    "a list": (b"[]", 0),
    "cut": (http_answer(1, 5)[0][:-3], http_answer(1, 5)[1]),
    "shape": (b'{"outputs": [{"name": "logits", "datatype": "FP32", "shape": [1, 2], "data": [1]}]}', 0),
    "no message": (b"\xff\xff", -1),
    "text": (b'{"outputs": [{"name": "logits", "datatype": "BYTES", "shape": [1, 2], "data": ["a", "b"]}]}', 0),
}
"""What a load balancer, or a server of another kind, may answer with status 200."""


@pytest.mark.parametrize("kind", NO_ANSWERS)
def test_what_is_no_answer_of_triton_is_a_wrong_one(kind):
    body, header = NO_ANSWERS[kind]
    good, length = http_answer(1, 5)
    checked = check_answers([outputs_of(good, length)], [Record(answers={(0, length, good): 2, (0, header, body): 1})])
    assert (checked.answers, checked.wrong, checked.max_difference) == (3, 1, np.inf)


def test_a_row_alone_that_gets_no_answer_of_triton_is_named():
    (body, header), rows = NO_ANSWERS["a page"], text_rows({"input": [{"name": "TEXT"}]}, [("a film",)])
    with pytest.raises(UserError, match=r"E748 'a film': .* not an answer of Triton"):
        first_answers(Record(errors=[""], answers={(0, header, body): 1}), Traffic(rows, "a row"))


def test_a_difference_that_is_no_number_is_told_as_such():
    answers = {"answers": 2, "near": 0, "wrong": 1, "changed": 0, "unchecked": 0, "max_difference": None}
    assert answer_notes([{"answers": answers}]) == ["answers: of 2, 1 wrong; largest difference not finite"]


def test_recorded_answers_must_be_those_of_the_server(tmp_path):
    inputs = [tensor("TEXT", np.array([["für"]], dtype=object), "BYTES")]
    write_answers(tmp_path, [Answer(inputs, [tensor("logits", np.array([[1.0, 5.0]]), "FP32")])])
    rows, recorded = recorded_rows(tmp_path)
    assert rows[0]["TEXT"].tolist() == [["für".encode()]] and recorded[0]["logits"].dtype == np.float32
    require_recorded(recorded, [{"logits": np.array([[1.004, 5.0]], np.float32)}])
    with pytest.raises(CheckError, match=r"E750 1 of 1 rows are not answered as recorded \(row 0 differs by 0.01\)"):
        require_recorded(recorded, [{"logits": np.array([[1.05, 5.0]], np.float32)}])
    assert recorded_rows(tmp_path / "none") == ([], [])


def test_rows_of_texts_and_tokens(tmp_path):
    (tmp_path / "texts").write_text("a fine film\tit is good\n\nfür\tdich\n", encoding="utf-8")
    texts = read_texts(tmp_path / "texts")
    assert list(texts) == [1, 3]
    config = {"input": [{"name": name, "data_type": "TYPE_STRING"} for name in ("PAIR", "TEXT")]}
    rows = text_rows(config, list(texts.values()))
    assert rows[1]["TEXT"].tolist() == [["für".encode()]] and rows[1]["PAIR"].tolist() == [[b"dich"]]
    body, header = http_body(rows[0])
    assert json.loads(body[:header])["inputs"][0] == {
        "name": "TEXT",
        "shape": [1, 1],
        "datatype": "BYTES",
        "parameters": {"binary_data_size": 15},
    }
    assert body[header : header + 15] == b"\x0b\0\0\0a fine film"
    with pytest.raises(UserError, match=r"E745 .*takes TEXT and PAIR, and a row has 1 texts"):
        text_rows(config, [("alone",)])
    with pytest.raises(UserError, match="E745 the model expects an input 'pixels'"):
        token_rows({"input": [{"name": "pixels", "data_type": "TYPE_FP32"}]}, [{"input_ids": [1]}])
    (tmp_path / "texts").write_bytes("\ufeffa\u2028b\tc\x0c\r\n\x85\td".encode())
    assert read_texts(tmp_path / "texts") == {1: ("a\u2028b", "c\x0c"), 2: ("\x85", "d")}
    (tmp_path / "texts").write_bytes(b"one\rstill one\r\ntwo\r\n")
    assert read_texts(tmp_path / "texts") == {1: ("one\rstill one",), 2: ("two",)}
    (tmp_path / "texts").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"E745 .*no file of texts"):
        read_texts(tmp_path / "texts")
    (tmp_path / "texts").write_text("\n")
    with pytest.raises(UserError, match=r"E745 .*no text in the file"):
        read_texts(tmp_path / "texts")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (generator_config("writer-text"), "'m' generates text, which comes in parts"),
        (text_config("m", DEFAULT, replace(FACTS, task="tasks", labels=(), tasks=({"name": "a"},)), KNOBS), "an input 'TASK'"),
    ],
)
def test_a_model_that_load_tests_cannot_ask_is_told_before_its_rows_are_made(tmp_path, config, told):
    """Not with the advice to remove a row, or to give pairs."""
    (tmp_path / "texts").write_text("a film")
    client = SimpleNamespace(config=lambda model: json_format.MessageToDict(config, preserving_proto_field_name=True))
    with pytest.raises(UserError, match=f"E745 .*{told}"):
        traffic_of(client, "m", texts=tmp_path / "texts")


@pytest.mark.parametrize(
    ("pair", "line", "takes"), [(False, "a film\tgood", "single texts"), (True, "a film", "pairs of texts")]
)
def test_texts_for_a_model_of_tokens_have_the_parts_it_takes(tmp_path, monkeypatch, pair, line, takes):
    (tmp_path / "texts").write_text(line)
    (tmp_path / VERSION_FILE).write_text(replace(FACTS, pair=pair).to_json())
    client = SimpleNamespace(config=lambda model: {"input": [{"name": "input_ids", "data_type": "TYPE_INT64"}]})
    with pytest.raises(UserError, match=f"E745 .*the model takes {takes}, and a row has"):
        traffic_of(client, "m", texts=tmp_path / "texts", tokenizer=tmp_path)


def test_the_tokenizer_is_that_of_a_version(tmp_path):
    """Not the folder of a run, nor that of a model."""
    (tmp_path / "texts").write_text("a film")
    client = SimpleNamespace(config=lambda model: {"input": [{"name": "input_ids", "data_type": "TYPE_INT64"}]})
    with pytest.raises(UserError, match=r"E728 .*no version of a model. Give --tokenizer the folder of a version"):
        traffic_of(client, "m", texts=tmp_path / "texts", tokenizer=tmp_path)


def test_errors_that_differ_in_figures_are_one_kind():
    assert kind_of_error(400, "id 17 of\n row 3") == kind_of_error(400, "id 5 of row 99") == "400: id N of row N"
    assert kind_of_error("UNAVAILABLE", "") == "UNAVAILABLE"
    assert kind_of_error(503, "E737 the server is starting; 2 of m_0_1") == "503: E737 the server is starting; N of m_N_N"


def test_a_token_is_sent_and_certificates_are_checked():
    address = parse_url("https://[::1]:8443")
    (request,) = HttpPool(Endpoint(address, "a model", token="secret"), [{"x": np.zeros((1, 2), np.int64)}]).requests
    head = request.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    assert head[:3] == ["POST /v2/models/a%20model/infer HTTP/1.1", "Host: [::1]:8443", "Authorization: Bearer secret"]
    context = Endpoint(address, "m").context()
    assert context.check_hostname and Endpoint(parse_url("h:1"), "m").context() is None


def test_connections_that_the_server_closes_are_opened_again():
    accepted = []

    async def answer(reader, writer):
        accepted.append(writer)
        await reader.readuntil(b"\r\n\r\n")
        last = len(accepted) == 3
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok" if not last else b"HTTP/1.1 200 OK\r\n\r\nok")
        writer.close()

    async def ask():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        endpoint = Endpoint(parse_url(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"), "m")
        connections = HttpPool(endpoint, text_rows({"input": [{"name": "TEXT", "data_type": "TYPE_STRING"}]}, [("a",)]))
        answers = []
        for _ in range(3):
            answers.append(await connections.ask(0))
            await asyncio.sleep(0.05)
        connections.close()
        server.close()
        return answers

    first, second, third = asyncio.run(ask())
    assert (first.body, first.header, second.error, len(accepted)) == (b"ok", 0, "", 3)
    assert third.error == "connection: ValueError"  # an answer without a length
