"""What compress deploy tries before it serves it, on a server that does what a test says: no Triton."""

import itertools
import shutil
from pathlib import Path

import pytest
from triton_parts import NAME

from compressor.errors import CheckError, UserError
from serving.deployment.answers import Answer
from serving.deployment.candidate import ROUNDS, WARM_UP, _require_latency
from serving.deployment.publish import Options, deploy, roll_back, status
from serving.deployment.target import LOCK, Target, new_record
from tests.foreign import for_reading_alone

CANDIDATE = f"{NAME}-candidate"


class Server:
    """Serves the latest version of what it loads. Models in `wrong` answer otherwise than recorded, `stops` is raised instead
    of an answer, and a server that is `gone` unloads nothing."""

    def __init__(self, target):
        self.target, self.served, self.loads = target, {}, []
        self.wrong, self.stops, self.gone = (), None, False

    def require_live(self):
        pass

    def load(self, model):
        self.served[model] = self.target.versions(model)[-1]
        self.loads.append((model, self.served[model]))

    def unload(self, model):
        if self.gone:
            raise UserError("E712", "no Triton server responds", "Start one")
        self.served.pop(model, None)

    def ready(self, model, version=None):
        return self.served.get(model) == version if version else model in self.served

    def ask(self, model, answer, version=None):
        if self.stops:
            raise self.stops
        return [] if model in self.wrong else answer.outputs

    def seconds(self, model, answer):
        return 0.001


@pytest.fixture
def target(tmp_path):
    return Target.at(str(tmp_path / "target"))


@pytest.fixture
def server(target):
    return Server(target)


@pytest.fixture
def published(make_run, target, server):
    """A run whose version 2 is published only, beside version 1, which is served; its labels are others."""
    deploy(make_run(0), target, server, Options("first"))
    run = make_run(1, labels=("one", "two", "three"))
    deploy(run, target, None, Options("second"))
    server.loads.clear()
    return run


def labels(target):
    return target.files.cat_file(target.path(NAME, "labels.txt")).decode().split()


def test_a_version_that_was_published_only_is_tried_before_it_serves(published, target, server):
    (done,) = deploy(published, target, server, Options("second"))
    assert (done.version, done.before, done.fresh, done.median_ms) == (2, 1, False, 1.0)
    deploy(published, target, server, Options("second"))  # it is proven now: not tried again
    assert server.loads == [(CANDIDATE, 1), (NAME, 2), (NAME, 2)] and server.served == {NAME: 2}


@pytest.mark.parametrize("wrong", [CANDIDATE, NAME])
def test_a_version_that_was_published_only_and_fails_is_taken_back(published, target, server, wrong):
    server.wrong = (wrong,)
    with pytest.raises(CheckError, match=r"E758 .*4 of 4 recorded answers differ.* What was served before goes on"):
        deploy(published, target, server, Options("second"))
    assert server.served == {NAME: 1} and target.versions(NAME) == [1] and labels(target) == ["bad", "fair", "good"]
    assert ((NAME, 2) in server.loads) == (wrong == NAME)


def test_a_version_that_a_server_found_by_itself_is_unloaded_if_it_fails(published, target, server):
    server.load(NAME)
    server.wrong = (CANDIDATE,)
    with pytest.raises(CheckError, match="E758"):
        deploy(published, target, server, Options("second"))
    assert server.served == {NAME: 1}


def test_a_version_that_was_published_only_stays_if_it_could_not_be_tried(published, target, server):
    server.stops = UserError("E712", "no Triton server responds", "Start one")
    with pytest.raises(UserError, match="E712"):
        deploy(published, target, server, Options("second"))
    assert target.versions(NAME) == [1, 2] and labels(target) == ["one", "two", "three"] and server.served == {NAME: 1}


@pytest.mark.parametrize("stop", [None, KeyboardInterrupt()])
def test_a_server_that_is_gone_does_not_hide_why_the_trial_ended(make_run, target, server, stop):
    server.wrong, server.stops, server.gone, said = (CANDIDATE,), stop, True, []
    with pytest.raises(KeyboardInterrupt if stop else CheckError):
        deploy(make_run(0), target, server, Options("run", say=said.append))
    assert f"{CANDIDATE} is not unloaded: E712 no Triton server responds. Start one" in said


def test_a_version_that_is_not_ready_after_loading_is_taken_back(published, target, server, monkeypatch):
    monkeypatch.setattr(server, "ready", lambda model, version=None: version != 2)
    with pytest.raises(CheckError, match=r"E758 .*version 2 is not ready after loading"):
        deploy(published, target, server, Options("second"))
    assert server.served == {NAME: 1} and target.versions(NAME) == [1]


def test_another_model_with_the_name_of_a_candidate_stays(make_run, target, server):
    runs = [make_run(seed) for seed in range(2)]
    other = Path(shutil.copytree(runs[0] / NAME, target.path(CANDIDATE)))
    with pytest.raises(UserError, match=f"E720 .*has a model '{CANDIDATE}'"):
        deploy(runs[0], target, server, Options("first"))
    assert target.models() == [CANDIDATE] and not server.loads
    for run in runs:  # published only: nothing is tried
        deploy(run, target, None, Options("run"))
    roll_back([NAME], target, server, Options(""))
    assert {path.name for path in other.iterdir()} == {path.name for path in (runs[0] / NAME).iterdir()}


def test_a_candidate_that_a_killed_deployment_left_is_unfinished_and_removed(make_run, target, server):
    run = make_run(0)
    target.put(run / NAME / "1", CANDIDATE, 1, {}, new_record("killed", "") | {"candidate": True})
    assert [state.finished for state in status(target, None)] == [False]
    deploy(run, target, server, Options("run"))
    assert target.models() == [NAME]
    target.put(run / NAME / "1", CANDIDATE, 1, {}, new_record("killed", "") | {"candidate": True})
    server.load(CANDIDATE)
    deploy(run, target, server, Options("run"))
    assert target.models() == [NAME] and server.served == {NAME: 1}


def test_a_lock_file_of_another_user_is_no_obstacle(make_run, target, monkeypatch):
    """It stays in a repository whose folder a group may write."""
    Path(target.path(LOCK)).touch()
    for_reading_alone(monkeypatch, Path(target.path(LOCK)))
    deploy(make_run(0), target, None, Options("first"))
    with target.locked(), pytest.raises(UserError, match="E756"):
        roll_back([NAME], target, None, Options(""))


class Timed:
    """A server whose models take `seconds`: name -> one latency after the other."""

    def __init__(self, **seconds):
        self.times = {name.replace("_", "-"): itertools.cycle(times) for name, times in seconds.items()}

    def ready(self, model):
        return model in self.times

    def seconds(self, model, answer):
        return next(self.times[model])


MOSTLY_SLOW = [0.001] * 3 + [0.5] * 7


@pytest.mark.parametrize(
    ("times", "most_ms", "told"),
    [
        ({"m_candidate": MOSTLY_SLOW}, 50, "the median latency of a request is 500 ms, allowed 50"),
        ({"m_candidate": MOSTLY_SLOW}, 501, (500, 1)),
        ({"m_candidate": MOSTLY_SLOW, "m": [0.001]}, None, (500, 1)),
        ({"m_candidate": [0.004], "m": [0.001]}, None, (4, 4)),  # 4 times, and 3 ms
        ({"m_candidate": [0.15], "m": [0.1]}, None, (150, 150)),  # 50 ms, and 1.5 times
        ({"m_candidate": [0.001] * 16 * (WARM_UP + 2) + [0.5] * 16 * (ROUNDS - 2)}, None, (500, 500)),  # the first do not count
        ({"m_candidate": [0.1], "m": [0.01]}, None, "the lower quartile of the latencies is 100 ms, 10.0 times that"),
    ],
)
def test_the_median_has_a_limit_and_versions_are_compared_by_their_lower_quartiles(times, most_ms, told):
    def limited():
        return _require_latency("m", "m-candidate", [Answer([], [])] * 16, Timed(**times), Options("run", most_ms))

    if isinstance(told, tuple):
        assert (limited()["median_ms"], limited()["ms"]) == told
        return
    with pytest.raises(CheckError, match=f"E758 .*{told}"):
        limited()
