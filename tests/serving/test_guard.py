"""No HTTP request ends the server, and what is right with HTTP works through the guard: each row went wrong, or could."""

import contextlib
import gzip
import http.client
import json
import re
import socket
import zlib
from types import SimpleNamespace

import numpy as np
import pytest

from serving.client import Client
from serving.guard import request_limits
from serving.guard.request_limits import MAX_DEPTH, SIZE, Refused, check_depth, check_shapes
from serving.server import MAX_BODY

INFER, GENERATE = "/v2/models/bare/infer", "/v2/models/bare/generate"
DATA = {"input_ids": [4, 5], "attention_mask": [1, 1]}
TENSORS = [{"name": name, "shape": [1, 2], "datatype": "INT64", "data": data} for name, data in DATA.items()]
GOOD = json.dumps({"inputs": TENSORS}).encode()
EMPTY = GOOD.replace(b"[4, 5]", b"[]").replace(b"[1, 1]", b"[]")
HUGE = EMPTY.replace(b"[1, 2]", b"[1099511627776, 1099511627776]")
DEEP = b"[" * 60000 + b"]" * 60000
FORM = "Content-Type: application/x-www-form-urlencoded\r\n"


def sent(server, pieces, service="http", timeout=20):
    """What comes back on a new connection for bytes sent in pieces, until the server closes it."""
    with socket.create_connection(("127.0.0.1", server.ports[service]), timeout=timeout) as connection:
        for piece in pieces:
            connection.sendall(piece)
        received = b""
        with contextlib.suppress(ConnectionResetError):  # a later piece came after the answer and the close
            while piece := connection.recv(1 << 16):
                received += piece
    return received


def head(length="", extra="", close=True, method="POST", path=INFER):
    lines = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{extra}{'Connection: close' if close else 'Connection: keep-alive'}\r\n"
    return (lines + (f"Content-Length: {length}\r\n" if length != "" else "") + "\r\n").encode()


def whole(body, extra="", **options):
    return [head(len(body), extra, **options), body]


def chunked(body, size):
    pieces = b"".join(b"%x\r\n%s\r\n" % (len(body[at : at + size]), body[at : at + size]) for at in range(0, len(body), size))
    return [head(extra="Transfer-Encoding: chunked\r\n"), pieces, b"0\r\n\r\n"]


ENDED_THE_SERVER = {
    "4 MiB as curl sends them": (whole(b"x" * (5 << 20), FORM), 400, "failed to parse"),
    "brackets": (whole(DEEP), 400, "E736"),
    "brackets that nobody closes": (whole(DEEP[:60000]), 400, "E736"),
    "brackets as a tensor": (whole(GOOD.replace(b"[4, 5]", DEEP)), 400, "E736"),
    "brackets, compressed": (whole(gzip.compress(DEEP), "Content-Encoding: gzip\r\n"), 400, "E736"),
    "brackets before a binary tensor": (whole(DEEP + b"12", f"Inference-Header-Content-Length: {len(DEEP)}\r\n"), 400, "E736"),
    "brackets behind a header that only inference heeds": (
        whole(b"[" * (8 << 20), "Inference-Header-Content-Length: 0\r\n", path="/v2/models/bare/generate"),
        400,
        "E736",
    ),
    "a shape beyond 64 bits": (whole(HUGE), 400, "E736"),
    "one of two shapes beyond 64 bits": (whole(HUGE.replace(b'"INT64"', b'"INT64", "shape": [1, 2]')), 400, "E736"),
    "more elements than there is memory": (whole(EMPTY.replace(b"[1, 2]", b"[1, 68719476736]")), 400, "E736"),
    "three sizes of six digits": (whole(EMPTY.replace(b"[1, 2]", b"[999999, 999999, 999999]")), 400, "E736"),
    "half a million chunks": (chunked(b"x" * (1 << 20), 2), 400, "failed to parse"),
}
REFUSED = {
    "too large": (whole(b"x" * (MAX_BODY + 1)), 413, "E735"),
    "too large, in chunks": (chunked(b"x" * (MAX_BODY + 1), 1 << 20), 413, "E735"),
    "too large when uncompressed": (whole(gzip.compress(b" " * (MAX_BODY + 1)), "Content-Encoding: gzip\r\n"), 413, "E735"),
    "not gzip": (whole(GOOD, "Content-Encoding: gzip\r\n"), 400, "E736"),
    "half of gzip": (whole(gzip.compress(GOOD)[:-9], "Content-Encoding: gzip\r\n"), 400, "E736"),
    "another compression": (whole(GOOD, "Content-Encoding: br\r\n"), 415, "E736"),
    "a header longer than the body": (whole(GOOD, "Inference-Header-Content-Length: 9999\r\n"), 400, "E736"),
    "a header of no length": (whole(GOOD, "Inference-Header-Content-Length: -1\r\n"), 400, "E736"),
    "malformed JSON": (whole(b'{"inputs": [}'), 400, "failed to parse"),
    "no inputs": (whole(b"{}"), 400, "Unable to parse 'inputs'"),
    "an unknown data type": (whole(GOOD.replace(b"INT64", b"INT65")), 400, "invalid datatype"),
    "a list to generate from": (whole(b"[]", path=GENERATE), 400, "attempt to get members for non-object"),
    "nothing to generate from": (whole(b"null", path=GENERATE), 400, "attempt to get members for non-object"),
    "parameters that are a number": (whole(b'{"parameters": 5}', path=GENERATE), 400, "Expected JSON object for keyword"),
    "less than no class": (
        whole(GOOD[:-1] + b', "outputs": [{"name": "logits", "parameters": {"classification": -1}}]}'),
        400,
        "Unable to set 'classification'",
    ),
    "two lengths": ([head(5, "Transfer-Encoding: chunked\r\n"), b"0\r\n\r\n"], 400, ""),
    "no HTTP": ([b"\x16\x03\x01\x02\x00\r\n\r\n"], 400, ""),
    "another method": (whole(b"", method="PUT"), 405, "GET and POST"),
    "the URL of a proxy": (whole(b"", method="GET", path="http://elsewhere/v2"), 405, "GET and POST"),
    "an unknown model": (whole(GOOD, path="/v2/models/none/infer"), 404, "none"),
}
ACCEPTED = {
    "as a form, as curl says": whole(GOOD, FORM),
    "in chunks": chunked(GOOD, 7),
    "gzip": whole(gzip.compress(GOOD), "Content-Encoding: gzip\r\n"),
    "deflate": whole(zlib.compress(GOOD), "Content-Encoding: deflate\r\n"),
    "slowly": [head(len(GOOD)), *(GOOD[at : at + 1] for at in range(len(GOOD)))],
    "a long number": whole(GOOD[:-1] + b', "parameters": {"seed": 12345678}}'),
    "many brackets in a string": whole(GOOD[:-1] + b', "id": "' + b'[{\\"' * 500 + b'"}'),
    "deep enough": whole(GOOD.replace(b"[4, 5]", b"[" * 40 + b"4, 5" + b"]" * 40)),
}


@pytest.mark.parametrize(("pieces", "status", "words"), [*ENDED_THE_SERVER.values(), *REFUSED.values()],
                         ids=[*ENDED_THE_SERVER, *REFUSED])  # fmt: skip
def test_a_bad_request_is_refused_and_ends_nothing(server, pieces, status, words):
    answer = sent(server, pieces).decode()
    assert re.match(rf"HTTP/1\.[01] {status} ", answer) and words in answer and "Traceback" not in answer
    assert sent(server, whole(GOOD)).startswith(b"HTTP/1.1 200 ")
    assert server.fault() is None


@pytest.mark.parametrize("pieces", ACCEPTED.values(), ids=ACCEPTED)
def test_a_good_request_is_served_however_it_is_sent(server, pieces):
    answer = sent(server, pieces)
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"logits"' in answer


def test_the_client_that_waits_for_100_is_told_to_continue(server):
    with socket.create_connection(("127.0.0.1", server.ports["http"]), timeout=10) as connection:
        connection.sendall(head(len(GOOD), "Expect: 100-continue\r\n"))
        assert connection.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(GOOD)
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(server):
    requests = [*whole(GOOD, close=False), *whole(b"{}", close=False), *whole(GOOD)]
    answers = sent(server, [b"".join(requests)])
    assert [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]] == [b"200", b"400", b"200"]


def test_binary_tensors_and_compressed_answers_are_equal_to_json(server):
    with Client(server.url) as client:
        binary = client.infer("bare", {name: np.array([data]) for name, data in DATA.items()})["logits"]
    answer = sent(server, whole(GOOD, "Accept-Encoding: gzip\r\n"))
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert b"Content-Encoding: gzip" in headers
    assert json.loads(gzip.decompress(body))["outputs"][0]["data"] == pytest.approx(binary[0].tolist())


def test_connections_that_do_nothing_hold_up_nobody(server):
    half = head(1000, close=False) + b"x" * 10
    connections = [socket.create_connection(("127.0.0.1", server.ports["http"])) for _ in range(1000)]
    for connection in connections[::50]:
        connection.sendall(half)
    assert sent(server, whole(GOOD)).startswith(b"HTTP/1.1 200 ")
    for connection in connections:
        connection.close()
    assert sent(server, whole(GOOD)).startswith(b"HTTP/1.1 200 ")


def test_the_metrics_port_serves_metrics_alone(server):
    form = whole(b"x" * (5 << 20), FORM, path="/metrics")
    assert sent(server, form, "metrics").startswith(b"HTTP/1.1 404 ")
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["metrics"], timeout=10)
    connection.request("GET", "/metrics")
    assert b"nv_inference_request_success" in connection.getresponse().read()
    connection.close()


@pytest.mark.parametrize(
    "text",
    [
        b"[" * MAX_DEPTH + b"]" * MAX_DEPTH,
        b"[[1,2],[3,4]," * 100 + b"0" + b"]" * 100,  # ]: closed below the limit only where they match
        b'{"a": "' + b"[" * 100 + b'"}',
        b'{"a": "\\"' + b"[" * 100 + b'\\\\"}',
        b'["' + b"]" * 100 + b'", ' + b"[], " * 100 + b"0]",
    ],
)
def test_what_is_nested_deep(text):
    deep = text.startswith(b"[[1,2]")
    if deep:
        with pytest.raises(Refused, match="E736"):
            check_depth(text)
    else:
        check_depth(text)
    with pytest.raises(Refused, match="E736"):
        check_depth(b"[" * MAX_DEPTH + text + b"]" * MAX_DEPTH)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('{"shape": [3, 4], "data": [0]}', False),
        ('{"shape": [3, 5, 7, 11]}', True),
        ('{"shape": [0, 1, -1]}', False),
        ('{"shape": [0, 999999]}', True),
        ('{"shape": [-999999]}', True),
        ('{"shape" :\n[%s]}' % ("9" * 5000), True),
        ('{"shape": [1], "shape": [999]}', True),
        ('{"s\\u0068ape": [999]}', True),
        ('{"shape": [%s1]}' % ("1, " * (MAX_DEPTH - 1)), False),
        ('{"shape": [%s1]}' % ("1, " * MAX_DEPTH), True),
        ('{"shape": [%s1]}' % ("1099511627776, " * 1000), True),
        ('{"id": "\\"shape\\": [999]"}', False),
        ('{"data": [999999999]}', False),
    ],
)
def test_a_shape_has_no_more_elements_than_the_body_has_bytes_and_few_axes(text, refused):
    with pytest.raises(Refused, match="E736 a tensor has more than 64 axes") if refused else contextlib.nullcontext():
        check_shapes(text.encode(), len(text))


def test_a_shape_is_read_only_until_it_is_too_large(monkeypatch):
    """The product of 100,000 sizes takes 13 s, in which nothing else is answered."""
    read = []
    monkeypatch.setattr(request_limits, "SIZE", SimpleNamespace(finditer=lambda sizes: map(seen, SIZE.finditer(sizes))))

    def seen(size):
        read.append(size)
        return size

    for sizes in ("1099511627776," * 100_000, "1," * 100_000):
        read.clear()
        with pytest.raises(Refused):
            check_shapes(f'{{"shape": [{sizes}1]}}'.encode(), 1 << 20)
        assert len(read) <= MAX_DEPTH + 1
