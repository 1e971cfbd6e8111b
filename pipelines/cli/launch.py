"""Commands started by torchrun: which can be, and what the processes after the first print (nothing)."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from compressor.errors import UserError
from compressor.training.processes import helping, launched

GRACE = 10.0
"""Seconds that a process stays after a failure. If the first one fails, too, it reports that and ends, upon which torchrun ends
this one; the other way round, it would be ended in the middle of its report."""


@contextlib.contextmanager
def led() -> Iterator[None]:
    """Context in which a process that only helps another one to train prints nothing, and ends after it.

    On SIGINT it goes on until the connection to the first one breaks, which stops in order.
    """
    if not helping():
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    interrupts: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    try:
        yield
    except BaseException:
        deadline = time.monotonic() + GRACE
        while not interrupts and time.monotonic() < deadline:
            time.sleep(0.05)
        raise
    finally:
        signal.signal(signal.SIGINT, before)


def require_launch(command: str, distributed: bool) -> None:
    """Raise UserError E906 if torchrun started several processes of a command that runs in one, on several machines, or more
    than there are GPUs. `command` is its name, such as 'compress run'."""
    if launched() == 1:
        return
    if not distributed:
        raise UserError("E906", f"{command} runs in one process, not under torchrun", "Run it without torchrun")
    if os.environ.get("LOCAL_WORLD_SIZE") != os.environ["WORLD_SIZE"]:
        raise UserError("E906", "torchrun started processes on several machines", "Use one machine: --nnodes 1")
    import torch

    cards = torch.cuda.device_count()
    if 0 < cards < launched():
        fix = f"Use --nproc-per-node {cards}, or the CPU: CUDA_VISIBLE_DEVICES= torchrun ..."
        raise UserError("E906", f"{launched()} processes, but {cards} GPUs: each process needs its own", fix)
