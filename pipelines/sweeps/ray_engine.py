"""Trials as tasks of Ray, on this machine or on the nodes of a cluster. A node that joins takes trials at once.

Every node needs this project in equal versions, and the folder of runs and the data under the same paths: docs/sweeps.md.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from compressor.errors import UserError
from compressor.processor import physical_cores
from pipelines.engine.environment import accelerator
from pipelines.sweeps.trial_events import Jobs, TrialEvent, Waiting
from pipelines.sweeps.trial_run import Perform, TrialConsole, TrialJob, TrialOutcome
from serving.bundle import install

POLL = 0.3
"""Seconds between two looks at what the trials say."""
OBJECT_STORE = 100 * 2**20
"""Bytes of Ray's memory for objects: a trial returns a few kB, its model lies in the store of the runs."""


def on_ray(
    jobs: Jobs, perform: Perform, *, workers: int | None, threads: int, address: str | None = None
) -> Iterator[TrialEvent]:
    """The engine of Ray: each trial is a task that reserves `threads` CPUs, and a GPU if this machine has one.

    Without an address a cluster of this machine alone is started, for as long as the sweep; `workers` are the most trials at
    a time. Raises UserError E901 (not installed), E812 (no such cluster, no node with so many CPUs and the GPU,
    or the cluster fails).
    """
    ray, gpus = _ray(), 1 if accelerator() else 0
    connected = ray.is_initialized()  # by the caller: Ray refuses a second connection, and the caller keeps its own
    try:
        _connect(ray, address, workers * threads if workers else max(threads, physical_cores()))
        _require_node(ray, threads, gpus)
        yield from _drive(ray, jobs, perform, workers, threads, gpus)
    except ray.exceptions.RayError as error:
        what = f"the cluster of Ray failed ({type(error).__name__}: {_first_line(error):.200})"
        fix = "Finished stages are kept: start the cluster again, then the same command"
        raise UserError("E812", what, fix, f"--address {address}" if address else "") from None
    finally:
        if not connected:
            ray.shutdown()  # stops the tasks of this sweep, on every node


def _ray() -> ModuleType:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no report to its makers
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError:
        raise UserError("E901", "--engine ray needs the package ray", install("sweep")) from None
    return ray


def _connect(ray: ModuleType, address: str | None, cpus: int) -> None:
    # loopback: nobody else may reach a cluster of this machine alone
    new = {"num_cpus": cpus, "_node_ip_address": "127.0.0.1", "object_store_memory": OBJECT_STORE, "include_dashboard": False}
    before = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **({} if address else new))
    except Exception as error:  # of a node that starts too late: just that class
        reason = _first_line(error) or type(error).__name__
        what = f"no cluster of Ray at '{address}'" if address else "Ray does not start"
        fix = "Start it with `ray start --head`, in the same versions of Ray and Python" if address else "Use --engine local"
        raise UserError("E812", f"{what} ({reason:.200})", fix, f"--address {address}" if address else "") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)  # Ray takes it over: a sweep stops by its own, and says so


def _first_line(error: Exception) -> str:
    return f"{error}".strip().partition("\n")[0]


def _require_node(ray: ModuleType, threads: int, gpus: int) -> None:
    """Raise UserError E812 unless a node offers what a trial takes: Ray would wait for such a node forever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = max((node.get("CPU", 0) for node in nodes), default=0)
    if most < threads:
        what = f"a trial takes {threads} CPUs, and the largest node of the cluster has {most:g}"
        raise UserError("E812", what, "Give fewer --threads, or start the larger nodes first")
    if not any(node.get("CPU", 0) >= threads and node.get("GPU", 0) >= gpus for node in nodes):
        what = f"a trial takes a GPU, and no node of the cluster offers one with {threads} CPUs"
        fix = "Start a node with `ray start --num-gpus`, use --engine local, or the CPU: CUDA_VISIBLE_DEVICES= compress ..."
        raise UserError("E812", what, fix)


class _Board:
    """An actor to which the trials tell where they run and what they do, and which the sweep reads."""

    def __init__(self) -> None:
        self._told: list[TrialEvent] = []

    def tell(self, event: TrialEvent) -> None:
        self._told.append(event)

    def news(self) -> list[TrialEvent]:
        """What was told since the last call."""
        told, self._told = self._told, []
        return told


def _run_remotely(job: TrialJob, perform: Perform, board: Any) -> TrialOutcome:
    """The task: one trial, on whatever node."""
    import ray

    node = ray.get_runtime_context().get_node_id()[:8]
    where = f"{socket.gethostname()} (node {node}, process {os.getpid()})"
    ray.get(board.tell.remote(TrialEvent("started", job.name, where)))
    return perform(job, TrialConsole(lambda kind, text: board.tell.remote(TrialEvent(kind, job.name, where, text))))


def _node_of_driver(ray: ModuleType) -> Any:
    """Places an actor on the node of this process, whose loss ends the sweep anyway; that of another node must not."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def _drive(ray: ModuleType, jobs: Jobs, perform: Perform, workers: int | None, threads: int, gpus: int) -> Iterator[TrialEvent]:
    board = ray.remote(num_cpus=0, scheduling_strategy=_node_of_driver(ray))(_Board).remote()
    task = ray.remote(num_cpus=threads, num_gpus=gpus, max_retries=0)(_run_remotely)
    waiting, running = Waiting(jobs), {}
    while True:
        while (workers is None or len(running) < workers) and (job := waiting.take()) is not None:
            running[task.remote(job, perform, board)] = job
        if not running:
            return
        ready, _ = ray.wait(list(running), timeout=POLL)
        current = {job.name for job in running.values()}
        yield from (event for event in ray.get(board.news.remote()) if event.trial in current)
        for reference in ready:
            job = running.pop(reference)
            result = _result(ray, reference, job)
            if isinstance(result, str):
                yield waiting.lost(job, "ray", result)
            else:
                yield TrialEvent("ended", job.name, "ray", outcome=result)


def _result(ray: ModuleType, reference: Any, job: TrialJob) -> TrialOutcome | str:
    """A task's outcome or, where its worker or node died, how."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        # a run that is ended by SIGTERM raises Stopped, a KeyboardInterrupt, which Ray takes for a cancellation
        if isinstance(error.cause, (ray.exceptions.TaskCancelledError, KeyboardInterrupt)):
            return "was stopped"
        # the trial could not be read there: other versions, a missing package
        what = f"the trial could not be started on its node ({f'{error.cause}'.strip()[:200]})"
        fix = "Install this project there in the same version, with the same packages"
        return TrialOutcome(error=UserError("E811", what, fix, f"trial {job.name}"))
    except ray.exceptions.RayError as error:
        return f"died ({type(error).__name__})"
