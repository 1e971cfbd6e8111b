"""The guard as its parent sees it: a process of its own, so that neither a busy parent nor its death holds up requests."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from compressor.child_program import program
from compressor.errors import UserError
from export.latency.programs import worker_environment
from serving.child_status import status_of
from serving.server_log import open_log
from serving.triton_process import ending

START_SECONDS = 30


class GuardProcess:
    """The process that listens on the sockets `http` and `metrics` for the Triton whose Unix sockets are in `folder`."""

    def __init__(
        self, folder: Path, http: socket.socket, metrics: socket.socket, max_body: int, control: dict[str, Any] | None
    ):
        self.folder, self.sockets = folder, (http, metrics)
        self.settings = {"http": http.fileno(), "metrics": metrics.fileno(), "max_body": max_body, "control": control}
        self.process: subprocess.Popen[bytes] | None = None
        self._said = b""

    def start(self, log_path: Path) -> None:
        """Start, and wait until it serves; it answers 503 until `tell("up")`. Raises UserError E742, E710."""
        with open_log(log_path) as log:
            self.process = subprocess.Popen(
                program("serving.guard.guard_main"),
                cwd=self.folder,
                env=worker_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=[each.fileno() for each in self.sockets],
                start_new_session=True,
            )
        self._said = b""
        self.tell(json.dumps(self.settings))  # not as arguments, which every user of the machine can read
        if not self.heard("listening", START_SECONDS):
            self.process.kill()  # one that runs without listening would pass for a guard
            self.process.wait()
            raise UserError("E742", "the process in front of Triton did not start", f"See its log, {log_path}")

    def tell(self, line: str) -> None:
        """Send a command; one that has ended does not get it."""
        with contextlib.suppress(OSError):
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()

    def heard(self, line: str, seconds: float) -> bool:
        """Whether it has printed `line`, at the latest after `seconds`."""
        deadline = time.monotonic() + seconds
        while line.encode() not in self._said.splitlines():
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self.process.stdout], [], [], left)[0]:
                return False
            piece = os.read(self.process.stdout.fileno(), 4096)
            self._said += piece
            if not piece:
                return False
        return True

    def fault(self) -> UserError | None:
        """E742 if it has ended, else None."""
        status = status_of(self.process)
        return None if status is None else UserError("E742", f"the process in front of Triton {ending(status)}", "See the log")

    def stop(self) -> None:
        """End it at once. Has no effect when it does not run."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            with contextlib.suppress(OSError):
                self.process.stdin.close()
            self.process.stdout.close()
            self.process = None
