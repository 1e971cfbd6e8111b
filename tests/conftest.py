"""No test reaches beyond this machine, whatever library it calls."""

import gc
import ipaddress
import os
import socket
import sys
import tempfile
from collections import defaultdict
from functools import wraps

import pytest

from tests.fast_rows import MANY, is_fast

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports the hub's client
# a container's setting: every worker would compile all tests, and every process that a test starts the project, in each run
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
LAST = "test_whole_path.py"
"""It needs the run that test_faults.py makes: at the end its process need not wait for it."""
REACHED: list[str] = []
"""The hosts that a test wanted to reach, beside this machine; it fails for them."""


def is_this_machine(host: object) -> bool:
    """Whether a host, by name or number, is this machine's own loopback; None and '' are addresses to listen on."""
    try:
        return host in (None, "", b"", "localhost") or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def guarded(function, host_of):
    @wraps(function)
    def call(*arguments, **options):
        host = host_of(*arguments)
        if not is_this_machine(host):
            REACHED.append(str(host))
            raise ConnectionRefusedError(f"tests reach no other machine: {host}")
        return function(*arguments, **options)

    return call


def pytest_configure(config) -> None:
    if not hasattr(config, "workerinput"):  # a worker has its controller's
        config.add_cleanup(given_cache())
    socket.getaddrinfo = guarded(socket.getaddrinfo, lambda host, *_: host)
    for name in ("connect", "connect_ex"):
        # an address of a Unix socket is no pair
        there = guarded(getattr(socket.socket, name), lambda _, address: address[0] if isinstance(address, tuple) else None)
        setattr(socket.socket, name, there)


def given_cache():
    """Let no test write to the user's cache; returns what ends that."""
    patch, folder = pytest.MonkeyPatch(), tempfile.TemporaryDirectory(prefix="compress-cache-")
    patch.setenv("XDG_CACHE_HOME", folder.name)

    def end() -> None:
        patch.undo()
        folder.cleanup()

    return end


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items) -> None:
    rows = [item for item in items if hasattr(item, "callspec")]
    tried = defaultdict(set)
    for item in rows:
        tried[item.location[0], item.originalname].add(item.callspec.params.get("architecture"))
    for item in rows:
        every = len(tried[item.location[0], item.originalname]) > MANY
        architecture = item.callspec.params.get("architecture") if every else None
        if not is_fast(item.originalname, item.callspec.id, architecture):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.path.name == LAST)


@pytest.fixture(scope="module", autouse=True)
def quick_collections():
    """Trainer collects garbage whenever it starts: what was imported need not be looked through each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call():
    outcome = yield
    reached, REACHED[:] = list(REACHED), []
    assert not reached, f"it wanted to reach {', '.join(reached)}"
    return outcome
