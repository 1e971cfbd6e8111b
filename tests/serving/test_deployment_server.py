"""What compress deploy says of a server that does not let it in."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from compressor.errors import UserError
from serving.deployment.triton_control import Control


class Closed(BaseHTTPRequestHandler):
    """A proxy that wants a token."""

    def do_GET(self):
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def closed():
    with ThreadingHTTPServer(("127.0.0.1", 0), Closed) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield Control.at(f"127.0.0.1:{server.server_address[1]}")
        server.shutdown()


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
