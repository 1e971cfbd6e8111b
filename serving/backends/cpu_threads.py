"""Threads and streams of a model instance: by default all instances together have one thread per core of this server.

The server copies this file into each backend's folder; like model.py there it imports nothing of this project.
"""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""
MEMBERSHIP = Path("/proc/self/cgroup")
"""The file that lists the control groups of this process, as NUMBER:CONTROLLERS:PATH; version 2 names no controllers."""


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
    """Cores that this process may use: of its CPU set, within the quotas of its control groups (`docker --cpus`)."""
    return max(1, min([len(os.sched_getaffinity(0)), *map(math.ceil, quotas())]))


def quotas():
    """Cores' worth of CPU time that the control groups of this process and their parents allow, where they limit it.

    The same walk as `compressor.processor.cpu_quota`, which cannot be imported here.
    """
    read = (words_of(folder / "cpu.max") or cfs_words(folder) for folder in groups())
    return [int(words[0]) / int(words[1]) for words in read if len(words) == 2 and all(map(is_positive, words))]


def groups():
    """The folders, in versions 1 and 2, of the control groups of this process that may limit CPU time, and of their parents."""
    lines = [line.split(":", 2) for line in lines_of(MEMBERSHIP) if line.count(":") > 1]
    ours = {controllers: path for _, controllers, path in lines}
    folders = upwards(CGROUP, ours.get("", "/"))
    for controllers, path in ours.items():
        if "cpu" in controllers.split(","):
            folders += [folder for mount in (controllers, "cpu") for folder in upwards(CGROUP / mount, path)]
    return folders


def upwards(root, path):
    """The folder of a control group and its parents."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def cfs_words(folder):
    """[QUOTA, PERIOD] of a control group of version 1."""
    return words_of(folder / "cpu.cfs_quota_us") + words_of(folder / "cpu.cfs_period_us")


def words_of(path):
    """The words of a file; none of a file that cannot be read."""
    return [word for line in lines_of(path) for word in line.split()]


def lines_of(path):
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []


def is_positive(word):
    """Whether a word is a number above 0: "max", and in version 1 "-1", is no limit."""
    return word.isdecimal() and int(word) > 0
