"""Keeps a server working: what has ended is started again, up to a limit; and the logs of earlier servers are bounded."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from compressor.errors import UserError
from serving.server import EmbeddedServer

POLL_SECONDS = 0.2
RESTARTS, WINDOW_SECONDS = 3, 60
REFUSED = ("E724", "E727")
"""What is wrong with a repository itself: trying again does not help."""
KEPT_LOGS = 10
PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of the stubs of a Triton that died, so that they can be reaped; without it PID 1 has to."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def watch(
    server: EmbeddedServer, tell: Callable[[str], None], also: Callable[[Callable[[str], None]], None] = lambda tell: None
) -> None:
    """Keep a started server working until an exception such as KeyboardInterrupt; `tell` gets a line for each event.

    `also` is called every POLL_SECONDS, to keep other processes.

    Raises UserError E738 when it ends again after RESTARTS restarts within WINDOW_SECONDS, and E724, E727 for a repository that
    is not served any more.
    """
    restarts: list[float] = []
    failure = None
    while True:
        fault = failure or server.fault()
        if fault is None:
            server.follow_loads()
            also(tell)
            time.sleep(POLL_SECONDS)
            continue
        now = time.monotonic()
        restarts = lately(restarts, now)
        if len(restarts) > RESTARTS:
            what = f"the server failed {len(restarts)} times within {WINDOW_SECONDS} s; the last time: {fault.what}"
            raise UserError("E738", what, fault.fix, fault.where)
        tell(f"{fault.what}; starting again")
        ports = dict(server.ports)
        try:
            server.restart()
            failure = None
            moved = "".join(f"; {name} is now on port {port}" for name, port in server.ports.items() if port != ports[name])
            tell(f"serving again after {time.monotonic() - now:.1f} s{moved}")
        except UserError as error:
            if error.code in REFUSED:
                raise
            failure = error


def lately(moments: list[float], now: float) -> list[float]:
    """Those of the moments that are not WINDOW_SECONDS ago, and now; times of the monotonic clock."""
    return [*(moment for moment in moments if now - moment < WINDOW_SECONDS), now]


def _modified(path: Path) -> float:
    """When a file was changed last; 0 where another process has just removed it."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def new_log(folder: Path) -> Path:
    """The path of a new log in `folder`, serve-TIME-PID.log; of those of servers that have ended the newest stay, each with the
    log of its front, front-TIME-PID.log. The time (UTC, to the microsecond) is in the name because in containers every server
    is process 1."""
    logs = sorted(folder.glob("serve-*.log"), key=_modified, reverse=True)
    for path in logs[KEPT_LOGS - 1 :]:
        with contextlib.suppress(OSError), path.open() as log:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its server lives
            path.unlink()
    for path in folder.glob("front-*.log"):
        if not path.with_name(path.name.replace("front", "serve", 1)).exists():
            path.unlink(missing_ok=True)
    return folder / f"serve-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{os.getpid()}.log"
