"""Whether a child process has ended, asked so that a signal cannot spoil a later wait."""

from __future__ import annotations

import contextlib
import os
import subprocess


def status_of(process: subprocess.Popen) -> int | None:
    """A child's exit status, None while it runs: `Popen.poll`, called only once the child has ended.

    What is looked at again and again is where a signal arrives. An exception of its handler within `poll` can leave the lock of
    the Popen held, and `wait` waits for ever.
    """
    if process.returncode is None:
        with contextlib.suppress(ChildProcessError):
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
    return process.poll()
