"""grpcs:// trusts what https:// trusts: the system's certificates, not a list of gRPC's own."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from compressor.errors import UserError
from serving.client import Client

NAMES = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
COMMAND = [
    "openssl",
    "req",
    "-x509",
    "-newkey",
    "ec",
    "-pkeyopt",
    "ec_paramgen_curve:prime256v1",
    "-nodes",
    "-days",
    "2",
    *NAMES,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Has ca.pem and key.pem of localhost, signed by itself, and beside them a folder of certificates as OpenSSL reads it."""
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run([*COMMAND, "-out", "ca.pem", "-keyout", "key.pem"], cwd=folder, check=True, capture_output=True)
    shown = ["openssl", "x509", "-in", "ca.pem", "-noout", "-hash"]
    name = subprocess.run(shown, cwd=folder, check=True, capture_output=True, text=True).stdout.strip()
    (folder / "hashed").mkdir()
    (folder / "hashed" / f"{name}.0").write_bytes((folder / "ca.pem").read_bytes())
    (folder / "hashed" / f"{name}.1").symlink_to("removed.pem")
    return folder


@pytest.fixture(scope="module")
def port(folder):
    """Of a server with that certificate and without any service."""
    server = grpc.server(ThreadPoolExecutor(1))
    pair = (folder / "key.pem").read_bytes(), (folder / "ca.pem").read_bytes()
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    yield port
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("variable", "place", "trusted"),
    [("SSL_CERT_FILE", "ca.pem", True), ("SSL_CERT_DIR", "hashed", True), ("SSL_CERT_FILE", "key.pem", False)],
)
def test_the_systems_certificates_are_trusted(folder, port, monkeypatch, variable, place, trusted):
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "none"))
    monkeypatch.setenv("SSL_CERT_DIR", str(folder / "none"))
    monkeypatch.setenv(variable, str(folder / place))
    with Client(f"grpcs://localhost:{port}") as client, pytest.raises(UserError) as error:
        client.config("reviews")
    assert (error.value.code != "E729") is trusted, str(error.value)
