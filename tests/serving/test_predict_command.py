"""`compress predict`: every way to a server and every source of texts, and a coded error for what cannot be sent."""

import contextlib
import json
import re
import socket
import ssl
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner
from triton_parts import LABELS, of_pairs

from compressor.errors import UserError
from pipelines.cli.commands import main
from serving.client import Client, Refusal
from serving.clients.address import Address, parse_url
from serving.clients.by_text import TextPredictor, of_a_text
from serving.predict import predict

TEXTS = ["great", "the plot was dull"]


def compress(*arguments, stdin=None):
    done = CliRunner().invoke(main, ["predict", *arguments], input=stdin)
    return done.exit_code, done.output


@contextlib.contextmanager
def relay(host, port, context=None, token=None):
    """A port on `host` that forwards to 127.0.0.1:port, by TLS with a `context`; with a `token`, HTTP without it gets 401."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)

    def copy(source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve(plain):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            near = stack.enter_context(context.wrap_socket(plain, server_side=True) if context else plain)
            if token is not None and f"Authorization: Bearer {token}".encode() not in near.recv(65536, socket.MSG_PEEK):
                near.recv(65536)
                near.sendall(b'HTTP/1.1 401 Unauthorized\r\nContent-Length: 15\r\n\r\n{"error":"who?"}'[:-1])
                return
            far = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            back = threading.Thread(target=copy, args=(far, near), daemon=True)
            back.start()
            copy(near, far)
            back.join()

    def accept():
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.close()


@pytest.mark.parametrize("command", [["predict", "127.0.0.1:1", "reviews", "a"], ["loadtest", "grpc://127.0.0.1:1", "reviews"]])
def test_a_certificate_is_not_taken_for_a_connection_without_tls(command, certificate):
    """Else the token would go out readable, without a word."""
    done = CliRunner().invoke(main, [*command, "--ca", str(certificate[0]), "--token", "secret"])
    assert done.exit_code == 2 and "E112 --ca is not used without https:// or grpcs://" in done.output


def test_texts_come_from_arguments_a_file_or_stdin(server, tmp_path):
    code, shown = compress(server.url, "reviews", *TEXTS)
    assert code == 0 and shown.splitlines()[0].endswith("  great") and shown.startswith(LABELS)
    (tmp_path / "texts.txt").write_text("\ufeffgreat\r\n\nthe plot was dull\n", encoding="utf-8")
    (tmp_path / "texts.jsonl").write_text('"great"\n{"text": "the plot was dull", "id": 3}\n')
    for source in ("texts.txt", "texts.jsonl"):
        assert compress(server.url, "reviews", "--file", str(tmp_path / source)) == (0, shown)
    assert compress(server.url, "reviews", stdin="\n".join(TEXTS)) == (0, shown)
    jsonl = "\n".join(map(json.dumps, TEXTS))
    assert compress(server.url, "reviews", "--file", "-", "--format", "jsonl", stdin=jsonl) == (0, shown)


def test_json_is_an_object_a_line(server, version_folder, tmp_path):
    code, shown = compress(server.url, "reviews", "--json", stdin="\n".join(TEXTS * 600))
    rows = [json.loads(line) for line in shown.splitlines()]
    assert code == 0 and [row["text"] for row in rows] == TEXTS * 600
    assert set(rows[0]) == {"text", "label", "scores"} and tuple(rows[0]["scores"]) == LABELS
    pair = ["--pair", "b", "--tokenizer", str(of_pairs(version_folder, tmp_path / "1")), "--json"]
    code, shown = compress(server.url, "reviews", "a", *pair)
    assert code == 0 and {"text": "a", "pair": "b"}.items() <= json.loads(shown).items()


@pytest.mark.parametrize(
    ("arguments", "stdin", "words"),
    [
        ([], b"a\n\xff\n", "E731 stdin:2: not UTF-8: byte 1 of the line is 0xff"),
        (["--format", "jsonl"], b"{", "E731 stdin:1: not JSON"),
        (["--format", "jsonl"], b"[1]", "E731 stdin:1: neither a text nor an object with one"),
        (["--format", "jsonl"], b'{"text": 3}', "E731 stdin:1: neither a text"),
        (["--format", "jsonl"], b'"\\ud800"', "E717 text 1 is not valid Unicode: character 1 is '\\ud800'"),
        (["--file", "absent.txt"], None, "E731 absent.txt: cannot be read (No such file or directory)"),
        (["--file", "."], None, "E731 .: cannot be read (Is a directory)"),
        (["--file", "a", "text"], None, "E112 --file and texts on the command line"),
        (["a", "--format", "jsonl"], None, "E112 --format is not used with texts on the command line"),
        (["a", "--pair", "b", "--pair", "c"], None, "E112 2 --pair for 1 texts"),
        ([], b"a\n" * 1030 + b"x" * 1_100_000, "E717 text 1031, 'x"),
        (["a", "--pair", "b"], None, "E717 model 'reviews-text' takes single texts"),
        (["caf\udce9"], None, "E717 text 1 is not valid Unicode: character 4 is '\\udce9'"),
        (["a", "--token", "gehe\u00edm"], None, "E730 the token holds characters that no header can hold"),
        (["a", "--ca", "absent.pem"], None, "E729 absent.pem: no certificates in PEM format"),
    ],
)
def test_what_cannot_be_sent_has_a_code(server, tmp_path, monkeypatch, arguments, stdin, words):
    monkeypatch.chdir(tmp_path)
    code, shown = compress(server.url, "reviews", *arguments, stdin=stdin)
    assert (code, words in shown) == (2, True), shown


@pytest.mark.parametrize(
    ("reason", "wrong", "told"),
    [
        ("row 1: not UTF-8", True, "E717 text 34, 'b': not UTF-8. Correct it"),
        ("onnx runtime error: row 1: not finite", False, "E717 text 34, 'b': not finite. Leave it out; see the server's log"),
        ("onnx runtime error: row 0: not finite", False, "E717 text 33, 'a': not finite. Leave it out"),
        ("onnx runtime error: out of memory", False, "E715 .*onnx runtime error: out of memory"),
    ],
)
def test_a_text_is_named_by_its_place_among_all(reason, wrong, told):
    """The 33rd and 34th; a failure that names no row may be of neither."""
    assert re.search(told, str(of_a_text(Refusal(reason, "", wrong=wrong), ["a", "b"], 32)))


def test_large_texts_are_sent_a_few_at_a_time():
    """A server takes 16 MiB in one request, unless it is started with another limit."""
    sent = []

    def infer(_model, features):
        sent.append([len(text) for text in features["TEXT"][:, 0]])
        return {"VALUE": np.array([[len(text)] for text in features["TEXT"][:, 0]], np.float32)}

    config = {"max_batch_size": 4, "input": [{"name": "TEXT"}], "output": [{"name": "VALUE"}]}
    predict_texts = TextPredictor(SimpleNamespace(infer=infer), "m", config)
    sizes = [1, 2, 3, 4, 5, 9 << 20, 6, 3 << 20, 3 << 20, 3 << 20]
    assert [estimate.value for estimate in predict_texts(["a" * size for size in sizes])] == sizes
    assert sent == [[1, 2, 3, 4], [5], [9 << 20], [6, 3 << 20, 3 << 20], [3 << 20]]
    assert predict_texts([]) == []


def test_a_name_that_is_none_has_a_code(server):
    assert compress(server.url, "\udcff", "a")[0] == 2


def test_addresses():
    assert parse_url("127.0.0.1:8000") == parse_url("http://127.0.0.1:8000/") == Address("http", "127.0.0.1", 8000, False)
    assert parse_url("grpcs://h:1") == Address("grpc", "h", 1, True) and parse_url("https://h:1").tls
    assert parse_url("[::1]:8000") == Address("http", "::1", 8000, False) and str(parse_url("[::1]:8000")) == "[::1]:8000"


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_ipv6(server, protocol):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    with relay("::1", server.ports[protocol]) as port:
        assert predict(f"{protocol}://[::1]:{port}", "reviews", TEXTS) == predict(server.url, "reviews", TEXTS)


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_an_encrypted_connection_is_checked(server, certificate, protocol):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.set_alpn_protocols(["h2"] if protocol == "grpc" else ["http/1.1"])
    with relay("127.0.0.1", server.ports[protocol], context) as port:
        url = f"{protocol}s://localhost:{port}"
        assert predict(url, "reviews", TEXTS, ca=certificate[0]) == predict(server.url, "reviews", TEXTS)
        code, shown = compress(url, "reviews", "a")
        assert code == 2 and "E729" in shown and "--ca" in shown
        code, shown = compress(f"{protocol}s://127.0.0.1:{server.ports[protocol]}", "reviews", "a")
        assert code == 2 and "E729" in shown, "the server is not encrypted"


def test_a_token_is_sent_and_a_missing_one_is_said(server, monkeypatch):
    with relay("127.0.0.1", server.ports["http"], token="secret") as port:
        assert compress(f"127.0.0.1:{port}", "reviews", "a", "--token", "secret")[0] == 0
        code, shown = compress(f"127.0.0.1:{port}", "reviews", "a")
        assert code == 2 and "E730" in shown and "--token" in shown
        monkeypatch.setenv("COMPRESS_TOKEN", "secret")
        assert compress(f"127.0.0.1:{port}", "reviews", "a")[0] == 0


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("service", ["metrics", "grpc", "http"])
def test_the_port_of_another_service_is_said(server, scheme, service):
    if scheme == service:
        pytest.skip("the right one")
    code, shown = compress(f"{scheme}://127.0.0.1:{server.ports[service]}", "reviews", "a")
    assert code == 2 and "E712" in shown


def test_grpc_says_what_http_says(server):
    with Client(f"grpc://127.0.0.1:{server.ports['grpc']}") as client:
        assert client.models() == ["bare", "reviews", "reviews-text"] and client.versions("reviews") == ["1"]
        assert client.ready("reviews") and not client.ready("absent")
        with pytest.raises(UserError, match=r"E713 .*Loaded models: bare, reviews, reviews-text"):
            client.config("absent")
