"""A child that runs is not polled: an exception of a signal's handler in there would leave its lock held."""

import subprocess

from serving.child_status import status_of


def test_a_child_is_polled_only_once_it_has_ended(monkeypatch):
    with subprocess.Popen(["sleep", "60"]) as process:
        with process._waitpid_lock:  # as such an exception leaves it: poll and wait would say nothing
            assert status_of(process) is None
        monkeypatch.setattr(process, "poll", lambda: 1 / 0)
        assert status_of(process) is None
        monkeypatch.undo()
        process.kill()
        while (status := status_of(process)) is None:
            pass
        assert (status, status_of(process)) == (-9, -9)
