"""grpcs:// trusts what https:// trusts: the system's certificates, not a list of gRPC's own."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from compressor.errors import UserError
from serving.client import Client


@pytest.fixture
def folder(certificate, tmp_path):
    """Has ca.pem and key.pem, and beside them a folder of certificates as OpenSSL reads it."""
    for path in certificate:
        shutil.copy(path, tmp_path)
    shown = ["openssl", "x509", "-in", certificate[0], "-noout", "-hash"]
    name = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "hashed").mkdir()
    (tmp_path / "hashed" / f"{name}.0").write_bytes(certificate[0].read_bytes())
    (tmp_path / "hashed" / f"{name}.1").symlink_to("removed.pem")
    return tmp_path


@pytest.fixture
def port(certificate):
    """Of a server with that certificate and without any service."""
    server = grpc.server(ThreadPoolExecutor(1))
    authority, key = (path.read_bytes() for path in certificate)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, authority)]))
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
