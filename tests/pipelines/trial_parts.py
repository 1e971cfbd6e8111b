"""What the workers of a sweep perform in the tests, apart from them, so that a worker imports little."""

import atexit
import os
import signal
import time

from rich.console import Console

from pipelines.engine.invocation import stopping
from pipelines.sweeps.trial_run import TrialJob, TrialOutcome


def toy(job: TrialJob, console: Console) -> TrialOutcome:
    """A trial that says its process; one called `once` kills its first worker, `always` every one."""
    started = job.out / f"{job.name}-{os.getpid()}"
    started.touch()
    atexit.register((job.out / f"ended-{os.getpid()}").touch)
    if job.name == "hang":
        console.print(str(os.getpid()))
        time.sleep(600)
    if job.name == "tidy":
        hang_and_tidy(job, console)
    if job.name == "always" or (job.name == "once" and len(list(job.out.glob("once-*"))) == 1):
        os.kill(os.getpid(), signal.SIGKILL)
    console.print(f"tune in {os.getpid()}")
    return TrialOutcome({"tune": {"accuracy": 0.5}})


def hang_and_tidy(job: TrialJob, console: Console) -> None:
    """Hang as a stage does that ends its servers when it is stopped."""
    with stopping():
        try:
            console.print(str(os.getpid()))
            time.sleep(600)
        finally:
            time.sleep(0.1)
            (job.out / "tidied").touch()
