"""The guard before a Triton that streams, stalls and dies, played by a Unix socket."""

import asyncio
import contextlib
import json

import pytest

from serving.guard.connection import Server
from serving.guard.model_control import Control
from serving.guard.proxy import UP, WHOLE, Limits, Proxy
from serving.guard.upstream import PIECE, PROBE, Upstream

TOKEN = "a-token-of-sixteen-or-more"
REQUEST = b"GET /%s HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n"
FIRST = b"5\r\nfirst\r\n"
CHUNKED = b"POST /well HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


class Played:
    """Answers by the path's last part: `stream` sends two chunks, the second when told; `stall` nothing; `die` half a
    response, `cut` of a large one, `broken` and `ended` half of a stream."""

    def __init__(self):
        self.told, self.gone, self.connections, self.heads = asyncio.Event(), asyncio.Event(), 0, []

    async def serve(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head)
                await getattr(self, head.split()[1].decode().rpartition("/")[2])(reader, writer)
        writer.close()

    async def well(self, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nfine")

    load = index = well

    async def stream(self, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        await self.told.wait()
        writer.write(b"6\r\nsecond\r\n0\r\n\r\n")

    async def stall(self, reader, writer):
        await reader.read()
        self.gone.set()

    async def die(self, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nhalf")
        writer.close()

    async def cut(self, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % (WHOLE + 1) + b"x" * PIECE + b"half")
        await writer.drain()
        writer.close()

    async def broken(self, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n6\r\nsec")
        writer.close()

    async def ended(self, reader, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nfirst\r\n")
        writer.close()

    async def close(self, reader, writer):
        writer.close()


def played(tmp_path, check):
    """Run `check(played, connect, proxy)` with a guard before a played Triton; `connect` opens a connection of a client."""

    async def run():
        triton, path = Played(), str(tmp_path / "u")
        upstream = await asyncio.start_unix_server(triton.serve, path)
        proxy = Proxy(Upstream(path), Upstream(path), Limits(1 << 20))
        proxy.state = UP
        server = Server(proxy.handle)
        door = await asyncio.get_running_loop().create_server(server, "127.0.0.1", 0)
        port = door.sockets[0].getsockname()[1]
        async with asyncio.timeout(20):
            await check(triton, lambda: asyncio.open_connection("127.0.0.1", port), proxy)
        door.close()
        upstream.close()
        await server.shutdown(0)
        proxy.upstream.close_idle()

    asyncio.run(run())


async def status(reader):
    """The status of a response with a length, whose body is read, too."""
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]))
    return int(head.split()[1])


def test_a_stream_passes_piece_by_piece(tmp_path):
    async def check(triton, connect, proxy):
        reader, writer = await connect()
        writer.write(REQUEST % b"stream")
        assert b"chunked" in await reader.readuntil(b"\r\n\r\n")
        assert await reader.readuntil(b"first\r\n") == b"5\r\nfirst\r\n"
        assert proxy.in_flight == 1 and not proxy.idle.is_set()
        triton.told.set()
        assert await reader.readuntil(b"0\r\n\r\n") == b"6\r\nsecond\r\n0\r\n\r\n"
        writer.write(REQUEST % b"well")
        assert await status(reader) == 200 and triton.connections == 1
        writer.close()

    played(tmp_path, check)


def test_the_connection_of_a_request_whose_client_is_gone_is_closed(tmp_path):
    async def check(triton, connect, proxy):
        _, writer = await connect()
        writer.write(REQUEST % b"stall")
        while not proxy.in_flight:
            await asyncio.sleep(0.01)
        writer.close()
        await triton.gone.wait()
        await proxy.idle.wait()

    played(tmp_path, check)


def test_a_probe_that_the_server_ends_is_in_flight_no_more(tmp_path):
    """Else every later load of a model would wait for it."""

    async def check(triton, _connect, proxy):
        triton.live = triton.die
        proxy.upstream.blocking = True
        with pytest.raises(EOFError):
            await proxy.upstream.send(REQUEST % b"well")
        assert not proxy.upstream.busy and proxy.upstream._quiet.is_set()

    played(tmp_path, check)


@pytest.mark.parametrize(("path", "expected"), [(b"die", 503), (b"close", 503), (b"well", 200)])
def test_a_server_that_ends_midway_is_a_503_and_an_old_connection_is_none(tmp_path, path, expected):
    async def check(triton, connect, proxy):
        reader, writer = await connect()
        writer.write(REQUEST % b"well")
        assert await status(reader) == 200
        proxy.upstream.idle[0].writer.close()  # as the connections of a Triton that was started again
        writer.write(REQUEST % path)
        assert await status(reader) == expected
        writer.close()

    played(tmp_path, check)


@pytest.mark.parametrize(("path", "sent"), [(b"cut", b"x" * PIECE), (b"broken", FIRST), (b"ended", FIRST)])
def test_a_server_that_ends_within_a_response_ends_the_connection(tmp_path, caplog, path, sent):
    """Another response behind half of one would be read as a part of it, and what is missing waited for."""

    async def check(triton, connect, proxy):
        reader, writer = await connect()
        writer.write(REQUEST % path)
        await reader.readuntil(b"\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), 1) == sent
        writer.close()

    played(tmp_path, check)
    assert not caplog.records


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([CHUNKED + b"ZZZ\r\nabc\r\n"], "chunk size"),
        ([CHUNKED, b"ZZZ\r\nabc\r\n"], "a chunk of the body is malformed"),
        ([CHUNKED + b"3\r\nabc\r\n", b"ZZZ\r\n0\r\n\r\n"], "a chunk of the body is malformed"),
        ([CHUNKED, b"3\r\nabcdefgh\r\n"], "a chunk of the body is malformed"),
        ([REQUEST % b"well" + CHUNKED, b"ZZZ\r\n"], "a chunk of the body is malformed"),
        ([REQUEST % b"well" + b"\x16\x03\r\n\r\n"], "is not HTTP"),
    ],
)
def test_what_is_not_http_is_refused_at_once_and_as_everything_else(tmp_path, caplog, pieces, words):
    async def check(triton, connect, proxy):
        reader, writer = await connect()
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.05)
        answer = (await reader.read()).decode()  # to the end of the connection
        head, _, body = answer[answer.rindex("HTTP/1.") :].partition("\r\n\r\n")
        assert head.split()[1] == "400" and "aiohttp" not in answer
        assert json.loads(body)["error"].startswith("E736") and words in body
        writer.close()

    played(tmp_path, check)
    assert not [record for record in caplog.records if record.name.startswith("aiohttp")]


@pytest.mark.parametrize("authorized", [False, True])
def test_only_an_authorized_load_waits_for_quiet_and_holds_up_others(tmp_path, authorized):
    async def check(triton, connect, proxy):
        proxy.control = Control(TOKEN, "secret", tmp_path)
        proxy.control._refuse_unsafe = lambda model: None
        method, token = (b"POST", TOKEN.encode()) if authorized else (b"GET", b"another")
        for path in (b"index", b"models/x/load"):
            reader, writer = await connect()
            writer.write(method + b" /v2/repository/%s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n" % (path, token))
            assert await status(reader) == 200
            writer.close()
        assert proxy.upstream.era == authorized  # a request that is sent apart begins another

    played(tmp_path, check)


def test_a_load_whose_client_is_gone_makes_no_other_wait(tmp_path):
    """Triton's thread loads on: until then others go over connections that are answered, and the next load waits."""

    async def check(triton, connect, proxy):
        async def load(reader, writer):
            await triton.told.wait()
            await triton.well(reader, writer)
            await triton.stall(reader, writer)

        triton.load, triton.live = load, triton.well
        proxy.control = Control(TOKEN, "secret", tmp_path)
        proxy.control._refuse_unsafe = lambda model: None
        request = b"POST /v2/repository/models/x/load HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n" % TOKEN.encode()
        _, writer = await connect()
        writer.write(request)
        while not proxy.upstream.blocking or not proxy.upstream._open.is_set():
            await asyncio.sleep(0.01)
        writer.close()
        await proxy.idle.wait()
        reader, writer = await connect()
        writer.write(REQUEST % b"well")
        assert await status(reader) == 200 and PROBE in triton.heads
        next_load = asyncio.create_task(proxy.upstream.send_apart(REQUEST % b"well"))
        await asyncio.sleep(0.05)
        assert proxy.upstream.era == 1 and not next_load.done()
        triton.told.set()
        (await next_load).release()
        await triton.gone.wait()  # the connection of the answer that nobody reads
        assert not proxy.upstream.blocking and not proxy.upstream.busy
        writer.close()

    played(tmp_path, check)


def test_a_length_of_no_body_is_not_passed_on(tmp_path):
    """tritonclient sends that of an earlier request with later ones."""

    async def check(triton, connect, proxy):
        reader, writer = await connect()
        for length in (b"abc", b"99"):
            writer.write(b"GET /well HTTP/1.1\r\nHost: x\r\nInference-Header-Content-Length: %s\r\n\r\n" % length)
            assert await status(reader) == 200
        assert len(triton.heads) == 2 and b"Inference" not in b"".join(triton.heads)
        writer.close()

    played(tmp_path, check)
