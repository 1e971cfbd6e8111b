"""A front as a child process of `compress serve`: started with the server, started again when it ends, stopped before it.

It ends with the thread that starts it, at the latest, even where that is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from compressor.child_program import program
from compressor.errors import UserError
from export.latency.programs import worker_environment
from serving.bundle import install
from serving.child_status import status_of
from serving.front.__main__ import DRAIN_SECONDS
from serving.server_log import open_log
from serving.triton_process import bound_to_us
from serving.watch import RESTARTS, WINDOW_SECONDS, lately

PACKAGES = ("fastapi", "uvicorn", "prometheus_client")
END_SECONDS = 5
"""How long it may take to end, once requests are not answered any more, before it is killed."""


def require_packages() -> None:
    """Raises UserError E701 where the extra is not installed, without which a front ends again and again."""
    if missing := [package for package in PACKAGES if importlib.util.find_spec(package) is None]:
        raise UserError("E701", f"the HTTP front needs {missing[0]}", install("front"))


class FrontProcess:
    """One front on `port`, in front of the gRPC endpoint `triton` (host:port); its output goes to `log`. At its end requests
    in flight are answered for `drain` seconds. Its packages must be there: `require_packages`."""

    def __init__(self, triton: str, port: int, keys: Path | None, log: Path, drain: float = DRAIN_SECONDS):
        self.triton, self.port, self.keys, self.log = triton, port, keys, log
        self.drain = drain
        self.ended: list[float] = []

    @property
    def command(self) -> list[str]:
        options = {"--triton": self.triton, "--port": str(self.port), "--drain": str(self.drain)}
        options |= {"--keys": str(self.keys)} if self.keys else {}
        arguments = (part for option in options.items() for part in option)
        return bound_to_us(*program("serving.front", *arguments))

    def start(self) -> None:
        """Raises UserError E710 where its log cannot be written."""
        with open_log(self.log) as log:
            options = {"env": worker_environment(), "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(self.command, **options)

    def keep(self, tell: Callable[[str], None]) -> None:
        """Start it again if it has ended. Raises UserError E771 when it ends again and again, E710."""
        if (status := status_of(self.process)) is None:
            return
        self.ended = lately(self.ended, time.monotonic())
        if len(self.ended) > RESTARTS:
            what = f"the HTTP front ended {len(self.ended)} times within {WINDOW_SECONDS} s (exit status {status})"
            raise UserError("E771", what, f"See {self.log}; is port {self.port} free?")
        tell(f"the HTTP front ended (exit status {status}); starting again")
        self.start()

    def follow(self, triton: str) -> None:
        """Start it again in front of another gRPC endpoint, unless it is there already."""
        if triton != self.triton:
            self.triton = triton
            self._end(END_SECONDS)  # what is in flight there is lost with its Triton
            self.start()

    @contextlib.contextmanager
    def running(self) -> Iterator[FrontProcess]:
        """Context in which it runs."""
        self.start()
        try:
            yield self
        finally:
            self._end(self.drain + END_SECONDS)

    def _end(self, seconds: float) -> None:
        self.process.terminate()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
        finally:  # also where a second signal ends the wait
            self.process.kill()
            self.process.wait()
