"""grpcs:// trusts what https:// trusts: the system's certificates, not a list of gRPC's own."""

import subprocess
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from triton_parts import self_signed

from compressor.errors import UserError
from serving.client import Client
from serving.clients.connections import GRPC_ROOTS, system_certificates

NO_AUTHORITY = ("-addext", "basicConstraints=critical,CA:FALSE")


@pytest.fixture(params=[(), NO_AUTHORITY], ids=["authority", "no authority"])
def folder(request, tmp_path):
    """Has ca.pem and key.pem, and beside them a folder of certificates as OpenSSL reads it."""
    certificate, _ = self_signed(tmp_path, *request.param)
    shown = ["openssl", "x509", "-in", certificate, "-noout", "-hash"]
    name = subprocess.run(shown, check=True, capture_output=True, text=True).stdout.strip()
    (tmp_path / "hashed").mkdir()
    (tmp_path / "hashed" / f"{name}.0").write_bytes(certificate.read_bytes())
    (tmp_path / "hashed" / f"{name}.1").symlink_to("removed.pem")
    return tmp_path


@pytest.fixture
def port(folder):
    """Of a server with that certificate and without any service."""
    server = grpc.server(ThreadPoolExecutor(1))
    chain, key = ((folder / name).read_bytes() for name in ("ca.pem", "key.pem"))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, chain)]))
    server.start()
    yield port
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("variable", "place", "trusted"),
    [
        ("SSL_CERT_FILE", "ca.pem", True),
        ("SSL_CERT_DIR", "hashed", True),
        ("SSL_CERT_DIR", "none:{}/hashed", True),
        ("SSL_CERT_FILE", "key.pem", False),
    ],
)
def test_the_systems_certificates_are_trusted(folder, port, monkeypatch, variable, place, trusted):
    monkeypatch.delenv(GRPC_ROOTS, raising=False)
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "none"))
    monkeypatch.setenv("SSL_CERT_DIR", str(folder / "none"))
    monkeypatch.setenv(variable, str(folder / place.format(folder)))
    with Client(f"grpcs://localhost:{port}") as client, pytest.raises(UserError) as error:
        client.config("reviews")
    assert (error.value.code != "E729") is trusted, str(error.value)


def test_grpcs_own_variable_goes_before_them(monkeypatch):
    """Nothing is given to gRPC, which then reads the file itself, once a process."""
    monkeypatch.setenv(GRPC_ROOTS, "of-my-company.pem")
    assert system_certificates() is None
