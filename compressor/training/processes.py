"""Several processes that train one model together, started by torchrun: each computes its share of every batch.

The first one decides (what is stored, what is best, when a checkpoint is due); the others follow it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

PATIENCE = timedelta(days=7)
"""Longest wait for another process: between two trainings the first may search or export for hours. A process that ends is
noticed at once all the same, because its connections close."""


LAUNCHERS = ("LOCAL_RANK", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Variables of torchrun and MPI by which accelerate, which Trainer uses, connects processes and sets the number of threads."""
SETTINGS = "ACCELERATE_"
"""Beginning of the variables by which accelerate compiles a model, hands it to DeepSpeed or rounds it: `accelerate launch` sets
them from a file of its user, and no pipeline names them."""


def launched() -> int:
    """Number of processes that torchrun started, 1 without it."""
    return int(os.environ["WORLD_SIZE"]) if {"WORLD_SIZE", "RANK", "MASTER_ADDR"} <= os.environ.keys() else 1


def rank() -> int:
    """Number of this process, from 0."""
    return int(os.environ["RANK"]) if launched() > 1 else 0


def helping() -> bool:
    """Whether this process only helps the first one to train: it publishes, prints and measures nothing."""
    return rank() > 0


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Context in which the processes are connected; without torchrun it does nothing."""
    if launched() == 1:
        yield
        return
    import torch
    import torch.distributed as dist

    if os.environ.get("OMP_NUM_THREADS") == "1":  # set by torchrun; only trainings divide the cores, see `divided_cores`
        del os.environ["OMP_NUM_THREADS"]
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    try:
        yield
    finally:
        dist.destroy_process_group()  # or threads of gloo abort the process at its end


def agreed(decide: Callable[[], Any]) -> Any:
    """What the first process decides (as JSON), in all of them; only there `decide` is called. All must call this together."""
    if launched() == 1:
        return decide()
    import torch
    import torch.distributed as dist

    device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
    content = b"" if helping() else json.dumps(decide()).encode()
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, 0)
    data = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else torch.empty(int(size), dtype=torch.uint8)
    data = data.to(device)
    dist.broadcast(data, 0)
    return json.loads(bytes(data.tolist()))


def wait() -> None:
    """Wait until all processes have come here."""
    if launched() > 1:
        import torch.distributed as dist

        dist.barrier()


def in_turn(work: Callable[[], Any]) -> Any:
    """`work()`, first in the first process, then in the others, which find in a file what it has computed."""
    if helping():
        wait()
        return work()
    result = work()
    wait()
    return result


@contextlib.contextmanager
def announcing() -> Iterator[Callable[[], None]]:
    """Context of the first process in which a training may follow, and the function by which it announces that one does.

    The others call `announced`, which returns whether it did.
    """
    told = []

    def announce() -> None:
        told.append(agreed(lambda: True))

    yield announce
    if not told:
        agreed(lambda: False)


def announced() -> bool:
    """In the other processes: whether the first trains within its `announcing`, so that they must train, too."""
    return agreed(lambda: False)


@contextlib.contextmanager
def divided_cores() -> Iterator[None]:
    """Context of a training, in which accelerate finds no settings of its own. Several processes divide torch's threads among
    themselves, instead of each using all cores; one process keeps all of them."""
    with _hidden(_foreign()), _share_of_threads():
        yield


def _foreign() -> list[str]:
    """Variables that are not of this training: accelerate's settings and, in one process, those of a launcher, which are of a
    job around it."""
    return [name for name in os.environ if name.startswith(SETTINGS) or (launched() == 1 and name in LAUNCHERS)]


@contextlib.contextmanager
def _hidden(names: Iterable[str]) -> Iterator[None]:
    """Context in which the environment lacks these variables."""
    hidden = {name: os.environ.pop(name) for name in names}
    try:
        yield
    finally:
        os.environ |= hidden


@contextlib.contextmanager
def _share_of_threads() -> Iterator[None]:
    """Context in which torch has this process's share of the threads."""
    if launched() == 1:
        yield
        return
    import torch

    threads, setting = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    each = max(1, threads // launched())
    os.environ["OMP_NUM_THREADS"] = str(each)  # otherwise accelerate sets another number
    torch.set_num_threads(each)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        del os.environ["OMP_NUM_THREADS"]
        os.environ |= {} if setting is None else {"OMP_NUM_THREADS": setting}


def lost(error: BaseException) -> bool:
    """Whether the error says that the connection to another process broke: that one has failed, or was ended."""
    if launched() == 1:
        return False
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and re.search("gloo|nccl", str(error), re.IGNORECASE) is not None
    )
