"""Registry of the servers on this machine and their repositories, where `predict` finds a model's tokenizer by URL.

One small file for each port (HTTP, gRPC) of a server, `$XDG_CACHE_HOME/compress/servers/127.0.0.1-PORT.json`, which exists
while the server is ready.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from compressor.errors import UserError

LOCAL_HOSTS = ("127.0.0.1", "localhost")
CACHE_FIX = "Set XDG_CACHE_HOME to a folder you can write"


def cache_folder() -> Path:
    """This user's cache folder for this project."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "compress")


def registry_folder() -> Path:
    """Where every server that runs has its files."""
    return cache_folder() / "servers"


def registry_file(port: int) -> Path:
    """The registry file of the server on this port, of HTTP or gRPC."""
    return registry_folder() / f"127.0.0.1-{port}.json"


def log_folder() -> Path:
    """Where the logs of servers go whose repository is in no run."""
    return cache_folder() / "logs"


def announce(port: int, repository: Path, pid: int) -> None:
    """Record that process `pid` serves `repository` on `port`. Raises UserError E710 when the cache folder is not writable."""
    path = registry_file(port)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f"{path.name}.{pid}")
        record = {"repository": str(repository.resolve()), "pid": pid, "started": _started(pid)}
        beside.write_text(json.dumps(record), encoding="utf-8")
        beside.replace(path)  # a client that reads it meanwhile finds a whole record
    except OSError as error:
        fault = f"cannot record the running server ({error.strerror})"
        raise UserError("E710", fault, CACHE_FIX, str(path.parent)) from error


def withdraw(port: int) -> None:
    """Delete the record of the server on `port`. One that cannot be deleted stays: its process is gone, so nobody uses it."""
    with contextlib.suppress(OSError):
        registry_file(port).unlink()


def served_repository(host: str, port: int) -> Path | None:
    """The repository of a running server of this machine on `host:port`, or None."""
    record = _record(host, port)
    return None if record is None else record[0]


def server_pid(host: str, port: int) -> int | None:
    """The process of a server that `compress serve` runs on this machine, or None."""
    record = _record(host, port)
    return None if record is None else record[1]


def _record(host: str, port: int) -> tuple[Path, int] | None:
    """The repository and the process of a server that runs; None if the record is missing, cannot be read, or is that of a
    server that was killed, which leaves it; its pid may be another process's by now."""
    if host not in LOCAL_HOSTS:
        return None
    try:
        entry = json.loads(registry_file(port).read_text(encoding="utf-8"))
        repository, pid = Path(entry["repository"]), int(entry["pid"])
        runs = _started(pid) == entry["started"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (repository, pid) if runs else None


def _started(pid: int) -> int:
    """When a process started, in clock ticks since the machine did. Raises OSError where there is none."""
    return int(Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()[19])
