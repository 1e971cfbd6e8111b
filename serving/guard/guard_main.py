"""The guard's process: `python -m serving.guard.guard_main`, started and told what to do by `GuardProcess`.

The first line on stdin is its settings as JSON, each further one a command: up, starting, or drain. It ends with its stdin, so
it does not outlive its parent; SIGTERM and SIGINT, which systemd sends to all processes of a service, are for the parent. On
stdout it says `listening`, and after `drain` at once `draining`, and `drained` when no request is left.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from serving.guard.connection import Server
from serving.guard.model_control import Control
from serving.guard.proxy import DRAINING, STARTING, UP, Limits, Proxy
from serving.guard.upstream import Upstream

HTTP_SOCKET, METRICS_SOCKET = "http.sock", "metrics.sock"
"""Triton's Unix sockets, in the current folder: the path of a socket is bounded at 107 bytes."""
BACKLOG = 1024


def main() -> None:
    """Serve until stdin ends."""
    for number in (signal.SIGTERM, signal.SIGINT):  # the parent answers what is in flight first, through this process
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.ERROR, format="guard: %(message)s")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    settings = json.loads(sys.stdin.buffer.raw.readline())
    asyncio.run(serve(settings))


async def serve(settings: dict[str, Any]) -> None:
    """Serve the two sockets that the parent listens on."""
    control = settings["control"]
    if control is not None:
        control = Control(control["token"], control["secret"], Path(control["repository"]))
    proxy = Proxy(Upstream(HTTP_SOCKET), Upstream(METRICS_SOCKET), Limits(settings["max_body"]), control)
    loop = asyncio.get_running_loop()
    servers = []
    for number, handler in ((settings["http"], proxy.handle), (settings["metrics"], proxy.handle_metrics)):
        server = Server(handler)
        servers.append(server)
        await loop.create_server(server, sock=socket.socket(fileno=number), backlog=BACKLOG)
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print("listening", flush=True)
    draining = None
    while command := (await commands.readline()).decode().strip():
        if command == "drain":
            proxy.state = DRAINING
            print("draining", flush=True)
            draining = asyncio.create_task(drained(proxy, servers))
        elif draining is None:
            proxy.state = {"up": UP, "starting": STARTING}[command]


async def drained(proxy: Proxy, servers: list[Server]) -> None:
    """Tell the parent when no request is left and every response is sent."""
    await proxy.idle.wait()
    while any(unsent(connection) for server in servers for connection in server.connections):
        await asyncio.sleep(0.02)
    for upstream in (proxy.upstream, proxy.metrics):
        upstream.close_idle()  # Triton waits for open connections before it ends
    print("drained", flush=True)


def unsent(connection: asyncio.Protocol) -> int:
    """Bytes of a response that the client has not taken yet."""
    return connection.transport.get_write_buffer_size() if connection.transport else 0


if __name__ == "__main__":
    main()
