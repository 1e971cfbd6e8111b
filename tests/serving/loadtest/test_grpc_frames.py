"""Calls of the load test's own gRPC client, to a real gRPC server."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from serving.loadtest.grpc_frames import (
    CODES,
    CallFailed,
    GrpcConnection,
    headers_in,
    number_bytes,
    request_headers,
    text_bytes,
)


class Echo(grpc.GenericRpcHandler):
    def service(self, call):
        def answer(request, context):
            if request == b"refuse":
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, "100 % wrong: naïve, 2 rows")
            return request * 2

        return grpc.unary_unary_rpc_method_handler(answer) if call.method == "/echo" else None


@pytest.fixture(scope="module")
def port():
    server = grpc.server(ThreadPoolExecutor(2), handlers=[Echo()], options=[("grpc.max_receive_message_length", -1)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield port
    server.stop(0)


def call(port, messages, path="/echo"):
    """The answers over one connection, one after the other; a failed call is its exception."""

    async def ask():
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        connection, answers = GrpcConnection(reader, writer, request_headers(path, f"127.0.0.1:{port}")), []
        for message in messages:
            try:
                answers.append(await connection.call(message))
            except CallFailed as failed:
                answers.append(failed.args)
        writer.transport.abort()
        return answers

    return asyncio.run(asyncio.wait_for(ask(), 20))


def test_messages_of_every_size_and_refusals_over_one_connection(port):
    large = bytes(range(256)) * 8000  # 2 MB: more than the windows and frames of HTTP/2
    found = call(port, [b"", b"a", b"refuse", large, b"b" * 16_379, b"b" * 16_380])
    assert found[:2] == [b"", b"aa"] and found[2] == ("INVALID_ARGUMENT", "100 % wrong: naïve, 2 rows")
    assert found[3] == large * 2 and [len(answer) for answer in found[4:]] == [32_758, 32_760]


def test_an_unknown_method_is_said_so(port):
    ((code, message),) = call(port, [b"a"], "/other")
    assert code == "UNIMPLEMENTED" and message


def test_codes_are_those_of_grpc():
    assert {code.name: code.value[0] for code in grpc.StatusCode} == {name: number for number, name in enumerate(CODES)}


def test_headers_as_hpack_writes_them():
    assert number_bytes(10, 5, 0x20) == b"\x2a" and number_bytes(1337, 5, 0) == b"\x1f\x9a\x0a"  # RFC 7541, C.1
    assert ("", "Bearer secret") in headers_in(request_headers("/echo", "a:1", "secret", tls=True))
    block = b"\x20\x88\x40" + text_bytes("grpc-status") + text_bytes("3") + b"\x0f\x10" + text_bytes("x" * 200)
    assert list(headers_in(block)) == [("grpc-status", "3"), ("", "x" * 200)]
    assert list(headers_in(b"\x00\x81\xff\x01a")) == [("?", "a")]
