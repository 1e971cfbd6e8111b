"""The control groups of this process, by which containers and job systems limit its CPU time and its memory.

Used by the pipeline and by the Triton backends, which it is copied beside: both count the same cores. So it imports nothing of
this project.
"""

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where control groups are mounted."""
MEMBERSHIP = Path("/proc/self/cgroup")
"""The file that lists the control groups of this process, as NUMBER:CONTROLLERS:PATH; version 2 names no controllers."""


def threads_each(instances):
    """The cores of this process, shared equally by so many instances of a model."""
    return max(1, cores() // instances)


def cores(root=CGROUP, membership=MEMBERSHIP):
    """Logical cores that this process may use: of its CPU set, within the quotas of its control groups (`docker --cpus`)."""
    allowed, quota = len(os.sched_getaffinity(0)), cpu_quota(root, membership)
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def cpu_quota(root=CGROUP, membership=MEMBERSHIP):
    """Cores' worth of CPU time that the control groups of this process allow (docker --cpus, Kubernetes limits), None for no
    limit."""
    return min(filter(None, map(_quota, groups_of("cpu", root, membership))), default=None)


def groups_of(controller, root, membership):
    """The folders, in versions 1 and 2, of the control groups of this process that have a controller, and of their parents.

    `root` is where control groups are mounted, `membership` the file that lists those of this process.
    """
    lines = [line.split(":", 2) for line in _lines(membership) if line.count(":") > 1]
    ours = {controllers: path for _, controllers, path in lines}
    folders = _upwards(root, ours.get("", "/"))
    for controllers, path in ours.items():
        if controller in controllers.split(","):
            folders += [folder for mount in (controllers, controller) for folder in _upwards(root / mount, path)]
    return folders


def words_of(path):
    """The words of a file; none of a file that cannot be read."""
    return [word for words in rows_of(path) for word in words]


def rows_of(path):
    """The words of every line of a file; none of a file that cannot be read."""
    return [line.split() for line in _lines(path)]


def _quota(folder):
    """Cores that one control group allows: QUOTA over PERIOD in µs, of version 2 in one file, of version 1 in two; None without
    a limit, where the quota is max, or -1 in version 1."""
    words = words_of(folder / "cpu.max") or words_of(folder / "cpu.cfs_quota_us") + words_of(folder / "cpu.cfs_period_us")
    limited = len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words)
    return int(words[0]) / int(words[1]) if limited else None


def _upwards(root, path):
    """The folder of a control group and its parents: each may set a limit."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:length]) for length in range(len(parts), -1, -1)]


def _lines(path):
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
