"""Threads and streams of a model instance: by default all instances together have one thread per core of this server.

The server copies this file into each backend's folder; like model.py there it imports nothing of this project.
"""

import math
import os
from pathlib import Path

QUOTA = Path("/sys/fs/cgroup/cpu.max")
"""CPU time of this container, as "QUOTA PERIOD" in microseconds, or "max PERIOD"."""


def threads_of(config, settings, key):
    """`settings[key]` where given (and not 0), else the cores of this process divided by the model's instances."""
    instances = sum(group.get("count", 1) for group in config.get("instance_group", ())) or 1
    return int(settings.get(key, 0)) or threads_each(instances)


def threads_each(instances):
    """The cores of this process, shared equally by so many instances."""
    return max(1, cores() // instances)


def streams_of(settings, threads):
    """`settings["streams"]`, the runs that one session computes at the same time: by default 1, with "0" one a thread."""
    return int(settings.get("streams", 1)) or threads


def cores():
    """Cores that this process may use: of its CPU set, within its container's quota."""
    usable = len(os.sched_getaffinity(0))
    try:
        quota, period = QUOTA.read_text(encoding="ascii").split()
        return usable if quota == "max" else max(1, min(usable, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):
        return usable
