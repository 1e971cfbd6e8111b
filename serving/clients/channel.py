"""Options of gRPC channels to a Triton server."""

from __future__ import annotations

import contextlib
import ipaddress

MOST_BYTES = (1 << 31) - 1
"""Of a message, either way: tritonclient's own limit, which it leaves out where options are given."""
UNACKNOWLEDGED_MS, RECONNECT_MS = 5_000, 2_000
PING_MS = 310_000
"""Triton's server ends a connection that is pinged more often than every 300 s while a request takes long (too_many_pings)."""

LASTING = [
    # with keepalive gRPC also sets the time (TCP_USER_TIMEOUT) after which sent data that no host acknowledges ends a
    # connection; else the kernel sends it again for a quarter of an hour
    ("grpc.keepalive_time_ms", PING_MS),
    ("grpc.keepalive_timeout_ms", UNACKNOWLEDGED_MS),
    ("grpc.max_reconnect_backoff_ms", RECONNECT_MS),
]
"""Options of a channel that outlives its server: one whose host vanished is soon given up, and soon found when it is back."""


def channel_options(host: str) -> list[tuple[str, int]]:
    """All options of a channel to `host`: no proxy of the environment stands between this machine and itself."""
    options = [("grpc.max_send_message_length", MOST_BYTES), ("grpc.max_receive_message_length", MOST_BYTES)]
    return [*options, ("grpc.enable_http_proxy", 0)] if is_loopback(host) else options


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, by its name or address."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"
