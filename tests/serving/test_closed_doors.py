"""No request loads, unloads or uploads a model, attaches memory, or changes traces and log: tried over both protocols."""

import base64
import http.client
import json
import os
import re
import socket
import stat
import struct
import time
from pathlib import Path

import grpc
import pytest
from triton_parts import QuickServer
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from serving.client import Client
from serving.server import CLOSED_HEADER, EmbeddedServer
from serving.shared_memory import SHARED_MEMORY
from serving.triton_process import connect

EVIL = "import os; os.system('touch /tmp/evil')"
FILES = {"config": json.dumps({"backend": "python"}), "file:1/model.py": base64.b64encode(EVIL.encode()).decode()}

CLOSED_HTTP = [
    ("POST", "repository/index", {}),
    ("POST", "repository/models/reviews/load", {}),
    ("POST", "repository/models/reviews/load", {"parameters": {"config": json.dumps({"max_batch_size": 1})}}),
    ("POST", "repository/models/evil/load", {"parameters": FILES}),
    ("POST", "repository/models/reviews/unload", {}),
    ("POST", "repository/models/reviews/unload", {"parameters": {"unload_dependents": True}}),
    ("GET", "systemsharedmemory/status", None),
    ("GET", "systemsharedmemory/region/all/status", None),
    ("POST", "systemsharedmemory/region/all/register", {"key": "/all", "offset": 0, "byte_size": 64}),
    ("POST", "systemsharedmemory/unregister", {}),
    ("GET", "cudasharedmemory/status", None),
    ("POST", "cudasharedmemory/region/all/register", {"raw_handle": {"b64": "AAAA"}, "device_id": 0, "byte_size": 64}),
    ("POST", "cudasharedmemory/unregister", {}),
    ("GET", "trace/setting", None),
    ("POST", "trace/setting", {"trace_level": ["TENSORS"], "trace_file": "/tmp/evil"}),
    ("POST", "models/reviews/trace/setting", {"trace_level": ["TENSORS"]}),
    ("GET", "logging", None),
    ("POST", "logging", {"log_file": "/tmp/evil", "log_verbose_level": 9}),
]
OPEN_HTTP = ["", "health/live", "health/ready", "models/reviews", "models/reviews/ready", "models/reviews/config"]
OPEN_HTTP += ["models/stats", "models/reviews/stats"]

LOAD = messages.RepositoryModelLoadRequest(model_name="reviews")
UPLOAD = messages.RepositoryModelLoadRequest(model_name="evil")
UPLOAD.parameters["config"].string_param = FILES["config"]
UPLOAD.parameters["file:1/model.py"].bytes_param = EVIL.encode()
CLOSED_GRPC = {
    "RepositoryIndex": [messages.RepositoryIndexRequest()],
    "RepositoryModelLoad": [LOAD, UPLOAD],
    "RepositoryModelUnload": [messages.RepositoryModelUnloadRequest(model_name="reviews")],
    "SystemSharedMemoryStatus": [messages.SystemSharedMemoryStatusRequest()],
    "SystemSharedMemoryRegister": [messages.SystemSharedMemoryRegisterRequest(name="all", key="/all", byte_size=64)],
    "SystemSharedMemoryUnregister": [messages.SystemSharedMemoryUnregisterRequest()],
    "CudaSharedMemoryStatus": [messages.CudaSharedMemoryStatusRequest()],
    "CudaSharedMemoryRegister": [messages.CudaSharedMemoryRegisterRequest(name="all", raw_handle=b"0", byte_size=64)],
    "CudaSharedMemoryUnregister": [messages.CudaSharedMemoryUnregisterRequest()],
    "TraceSetting": [messages.TraceSettingRequest(), messages.TraceSettingRequest(model_name="reviews")],
    "LogSettings": [messages.LogSettingsRequest()],
}
OPEN_GRPC = {
    "ServerLive": messages.ServerLiveRequest(),
    "ServerReady": messages.ServerReadyRequest(),
    "ModelReady": messages.ModelReadyRequest(name="reviews"),
    "ServerMetadata": messages.ServerMetadataRequest(),
    "ModelMetadata": messages.ModelMetadataRequest(name="reviews"),
    "ModelConfig": messages.ModelConfigRequest(name="reviews"),
    "ModelStatistics": messages.ModelStatisticsRequest(),
}
INFERENCE = {"ModelInfer", "ModelStreamInfer"}


def http_request(server, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.ports["http"], timeout=10)
    try:
        connection.request(method, f"/v2/{path}".rstrip("/"), None if body is None else json.dumps(body), headers or {})
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


@pytest.fixture
def stub(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel:
        yield GRPCInferenceServiceStub(channel)


def secret_of(server):
    """What every user of the machine can read: the value that Triton compares with."""
    command = Path("/proc", str(server.triton.process.pid), "cmdline").read_text()
    return re.search(rf"--http-restricted-api=.*?:{CLOSED_HEADER}=(\w+)", command)[1]


@pytest.mark.parametrize(("method", "path", "body"), CLOSED_HTTP, ids=[f"{one[0]}-{one[1]}" for one in CLOSED_HTTP])
def test_http_refuses(server, method, path, body):
    status, answer = http_request(server, method, path, body)
    assert (status, "This API is restricted" in answer) == (403, True), answer
    # a name that http.client would not send, and the same names with other cases and blanks
    secret = secret_of(server)
    for reach in (of_the_guard, of_triton):
        for header in (CLOSED_HEADER, CLOSED_HEADER.lower(), "Closed", "Closed:", f"{CLOSED_HEADER}\t"):
            assert not allowed(raw_http(reach(server), method, path, f"{header}: {secret}")), header
        assert not allowed(raw_http(reach(server), method, path, f"{CLOSED_HEADER}={secret}"))


def of_the_guard(server):
    return socket.create_connection(("127.0.0.1", server.ports["http"]), timeout=10)


def of_triton(server):
    return connect(server.stage / "http.sock")


def raw_http(connection, method, path, header):
    with connection:
        head = f"{method} /v2/{path} HTTP/1.1\r\nHost: x\r\n{header}\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}"
        connection.sendall(head.encode())
        return received(connection)


def received(connection):
    pieces = []
    try:
        while piece := connection.recv(65536):
            pieces.append(piece)
    except ConnectionResetError:
        pass
    return b"".join(pieces)


def allowed(answer):
    return answer.startswith(b"HTTP/1.1 200")


def test_http_still_predicts_and_tells(server):
    assert {path: http_request(server, "GET", path)[0] for path in OPEN_HTTP} == dict.fromkeys(OPEN_HTTP, 200)
    with Client(server.url) as client:
        assert client.models() == ["bare", "reviews", "reviews-text"]
    metrics = http.client.HTTPConnection("127.0.0.1", server.ports["metrics"], timeout=10)
    metrics.request("GET", "/metrics")
    assert b"nv_inference_request_success" in metrics.getresponse().read()
    metrics.close()


@pytest.mark.parametrize("method", CLOSED_GRPC)
def test_grpc_refuses(server, stub, method):
    for request in CLOSED_GRPC[method]:
        with pytest.raises(grpc.RpcError) as caught:
            getattr(stub, method)(request, timeout=10)
        assert "This protocol is restricted" in caught.value.details()
    path = f"/inference.GRPCInferenceService/{method}"
    for prefix in ("triton-grpc-protocol-", ""):
        answer = raw_grpc(server, path, prefix + CLOSED_HEADER, secret_of(server), CLOSED_GRPC[method][0])
        assert GRPC_FINE not in answer


def test_grpc_still_predicts_and_tells(server, stub):
    for method, request in OPEN_GRPC.items():
        getattr(stub, method)(request, timeout=10)
    ready = "/inference.GRPCInferenceService/ServerReady"  # the frames below are understood
    assert GRPC_FINE in raw_grpc(server, ready, "any", "thing", messages.ServerReadyRequest())
    request = messages.ModelInferRequest(model_name="bare")
    for name in ("input_ids", "attention_mask"):
        request.inputs.add(name=name, datatype="INT64", shape=[1, 2]).contents.int64_contents.extend([1, 1])
    assert stub.ModelInfer(request, timeout=10).outputs[0].name == "logits"


def test_every_method_of_triton_is_judged():
    methods = {method.name for method in messages.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods}
    assert methods == CLOSED_GRPC.keys() | OPEN_GRPC.keys() | INFERENCE


@pytest.mark.parametrize("service", ["reflection.v1", "reflection.v1alpha", "channelz.v1"])
def test_grpc_tells_nothing_of_itself(server, service):
    name = {"channelz.v1": "Channelz/GetServers"}.get(service, "ServerReflection/ServerReflectionInfo")
    with grpc.insecure_channel(f"127.0.0.1:{server.ports['grpc']}") as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.unary_stream(f"/grpc.{service}.{name}")(b"", timeout=10))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


GRPC_FINE = b"\x0bgrpc-status\x010"


def raw_grpc(server, path, key, value, message):
    """What comes back for a call with a header that gRPC's own clients would not send, as HTTP/2 frames."""

    def frame(kind, flags, stream, payload):
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    def literal(name, content):
        return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(content)]) + content.encode()

    fixed = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "x", "te": "trailers"}
    headers = b"".join(literal(*pair) for pair in (*fixed.items(), ("content-type", "application/grpc"), (key, value)))
    body = message.SerializeToString()
    with socket.create_connection(("127.0.0.1", server.ports["grpc"]), timeout=10) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, headers))
        connection.sendall(frame(0, 1, 1, b"\0" + struct.pack(">I", len(body)) + body))
        answer = b""
        while b"grpc-status" not in answer and (piece := connection.recv(65536)):
            answer += piece
        return answer


def listening(*pids):
    """(address, port) of every TCP socket on which processes listen, addresses in the kernel's hexadecimal."""
    links = [link for pid in pids for link in Path("/proc", str(pid), "fd").iterdir()]
    sockets = {os.readlink(link) for link in links if link.exists() or link.is_symlink()}
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    found = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return {(address, int(port, 16)) for address, port in found}


def opened(server, seconds=10):
    """`listening` of a server, once it listens on all ports that it should, or after `seconds`: metrics come last."""
    end = time.monotonic() + seconds
    pids = (server.triton.process.pid, server.guard.process.pid)
    while len(found := listening(*pids)) < len(server.ports) and time.monotonic() < end:
        time.sleep(0.05)
    return found


LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F"}
"""127.0.0.1, and the same as an IPv6 socket has it."""


def test_it_listens_on_this_machine_alone(server):
    """Triton's own HTTP and metrics are Unix sockets in a folder that other users cannot enter."""
    found = opened(server)
    assert {port for _, port in listening(server.triton.process.pid)} == {server.ports["grpc"]}
    assert stat.S_IMODE(server.stage.stat().st_mode) == 0o700
    assert {address for address, _ in found} <= LOOPBACK
    assert {port for _, port in found} == set(server.ports.values())


def test_other_users_read_no_text(server):
    """Triton creates its shared memory with mode 0644. A large request makes it grow."""
    regions = list(SHARED_MEMORY.glob(f"{server.stage.name}*"))
    size = sum(region.stat().st_size for region in regions)
    text = {"name": "TEXT", "shape": [4, 1], "datatype": "BYTES", "data": ["great " * 100_000] * 4}
    assert http_request(server, "POST", "models/reviews-text/infer", {"inputs": [text]})[0] == 200
    assert len(regions) == 4 and sum(region.stat().st_size for region in regions) > size  # three models, and the lock
    assert {stat.S_IMODE(path.stat().st_mode) for path in (*regions, server.log_path)} == {0o600}


@pytest.mark.usefixtures("triton")
def test_the_environment_opens_nothing(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("AIP_MODE", "PREDICTION")
    monkeypatch.setenv("AIP_HTTP_PORT", "0")
    with QuickServer(repository, log_path=tmp_path / "log", models=()) as embedded:
        assert {port for _, port in opened(embedded)} == set(embedded.ports.values())


@pytest.mark.usefixtures("triton")
def test_only_the_named_models_are_loaded_and_no_secret_is_logged(repository, tmp_path):
    with EmbeddedServer(repository, log_path=tmp_path / "log", models=["bare"]) as embedded, Client(embedded.url) as client:
        assert client.models() == ["bare"]
        secret = secret_of(embedded)
    assert len(secret) == 64 and secret not in (tmp_path / "log").read_text()
