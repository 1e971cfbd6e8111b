"""What compress deploy says of a server that does not let it in."""

import contextlib
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from compressor.errors import UserError
from serving.deployment.triton_control import Control


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass


class Closed(Handler):
    """A proxy that wants a token."""

    def do_GET(self):
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()


class Slow(Handler):
    """A model that computes for longer than other requests may take."""

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.3)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"outputs": []}')


@contextlib.contextmanager
def control_of(handler):
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield Control.at(f"127.0.0.1:{server.server_address[1]}")
        server.shutdown()


@pytest.fixture
def closed():
    with control_of(Closed) as control:
        yield control


def test_an_answer_is_waited_for_longer_than_a_connection(monkeypatch):
    """A recorded request may be many long rows."""
    monkeypatch.setattr(Control._request, "__defaults__", (None, 0.1))
    with control_of(Slow) as control:
        assert control.infer("reviews", []) == []


def test_a_server_that_wants_a_token_is_not_taken_for_another_program(closed):
    with pytest.raises(UserError, match=r"E755 .*\(status 401\).*--token-file"):
        closed.require_live()
    with pytest.raises(UserError, match=r"E755"):  # of --status: not "not loaded"
        closed.ready("reviews", 1)


def answer_plainly(listener):
    """The answer to one client by a server without TLS."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def test_a_connection_that_cannot_be_encrypted_is_not_a_missing_server(closed, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        answering = threading.Thread(target=answer_plainly, args=(listener,))
        answering.start()
        with pytest.raises(UserError, match=r"E729 .*--ca"):
            Control.at(f"https://127.0.0.1:{listener.getsockname()[1]}").require_live()
        answering.join()
    with pytest.raises(UserError, match=r"E729 .*ca.pem: no certificates"):
        Control.at(f"https://{closed.where}", ca=tmp_path / "ca.pem")
