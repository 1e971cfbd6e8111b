"""Which repository a server on this machine serves: how `predict` finds the tokenizer of a model behind a URL.

One small file a server, `$XDG_CACHE_HOME/compress/servers/127.0.0.1-PORT.json`, there while the server is ready.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from compressor.errors import UserError

LOCAL_HOSTS = ("127.0.0.1", "localhost")


def registry_file(port: int) -> Path:
    """Where the server on this HTTP port is noted."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "compress", "servers", f"127.0.0.1-{port}.json")


def announce(port: int, repository: Path, pid: int) -> None:
    """Note that process `pid` serves `repository` on `port`. Raises UserError E710 when the cache folder is not writable."""
    path = registry_file(port)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"repository": str(repository.resolve()), "pid": pid}), encoding="utf-8")
    except OSError as error:
        fault = f"cannot note the running server ({error.strerror})"
        raise UserError("E710", fault, "Set XDG_CACHE_HOME to a folder you can write", str(path.parent)) from error


def withdraw(port: int) -> None:
    """Forget the server on `port`."""
    registry_file(port).unlink(missing_ok=True)


def served_repository(host: str, port: int) -> Path | None:
    """The repository that a living server of this machine serves on `host:port`, or None."""
    path = registry_file(port)
    if host not in LOCAL_HOSTS or not path.is_file():
        return None
    entry = json.loads(path.read_text(encoding="utf-8"))
    return Path(entry["repository"]) if Path("/proc", str(entry["pid"])).exists() else None  # a killed server leaves its note
