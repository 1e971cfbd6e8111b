"""Settings side by side: each is a model of one embedded server, with links to the versions of the model that is tuned.

Idle models cost memory only, so that rounds of different settings can be interleaved without a restart.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

from compressor.errors import UserError
from compressor.processor import free_memory
from serving import shared_memory
from serving.client import Client
from serving.loadtest.answer_check import check_answers
from serving.loadtest.arrivals import Load
from serving.loadtest.fleet import Fleet
from serving.loadtest.levels import Target, first_pass, window
from serving.loadtest.request_pools import Endpoint
from serving.loadtest.traffic import Outputs
from serving.loadtest.tune.setting_grid import Setting, as_text, configured, runtime_of_model
from serving.loadtest.tune.trials import Probe, Trial
from serving.repository import CONFIG_FILE, NO_VERSIONS, read_config, version_folders
from serving.repository_safety import refuse_unsafe
from serving.server import EmbeddedServer

INSTANCE_BYTES = 250e6
"""Memory of an instance beside its weights: a Python process with a runtime."""
WEIGHT_COPIES = 2.0
MEMORY_SHARE = 0.6
MOST_INSTANCES = 12
"""Processes of models that one server starts at a time."""
READY_SECONDS, READY_SECONDS_EACH = 60.0, 10.0
WARMUP_SECONDS, FIRST_SECONDS = 0.3, 1.0
FEWEST, MOST_SECONDS = 150, 10.0
"""A probe is long enough for so many answers, but not longer than that."""


class Bench:
    """Measures the settings of one model; `folder` is a scratch folder, `seconds` the length of a probe."""

    def __init__(
        self, model_folder: Path, fleet: Fleet, folder: Path, *, protocol: str, seconds: float, say: Callable[[str], None]
    ):
        self.source, self.fleet, self.folder = Path(model_folder), fleet, folder
        self.protocol, self.seconds, self.say = protocol, seconds, say
        self.config = read_config(self.source)
        self.runtime = runtime_of_model(self.source, self.config)
        self.expected: list[Outputs] = []
        self._numbers, self._warm = count(), set()

    def most_instances(self) -> int:
        """Instances of the model for which memory and /dev/shm have space. Raises UserError E739."""
        in_memory = MEMORY_SHARE * free_memory() / self._bytes(Setting(1, 1, None))
        return min(int(in_memory), shared_memory.most_instances(shared_memory.MAX_BODY))

    def evaluate(self, trials: Sequence[Trial], rounds: int) -> None:
        """Add rounds to the trials: every setting once, then all again in the other order. Raises UserError E7xx."""
        each = self._bytes(trials[0].setting) / trials[0].setting.instances
        most = min(MOST_INSTANCES, shared_memory.most_instances(shared_memory.MAX_BODY))
        for group in grouped(trials, each, MEMORY_SHARE * free_memory(), most):
            with self.serve([trial.setting for trial in group]) as targets:
                for number in range(rounds):
                    for trial in group[:: -1 if number % 2 else 1]:
                        trial.repeat(partial(self._measure, targets))
            for trial in group:
                self.say(f"{trial.setting.title}: {trial.score:.4g} answers a second within the limit")

    @contextlib.contextmanager
    def serve(self, settings: Sequence[Setting]) -> Iterator[dict[Setting, Target]]:
        """A server with one model for each setting, and where each is reached."""
        repository = self.folder / f"repository-{next(self._numbers)}"
        names = {setting: f"{self.config.name}-{number}" for number, setting in enumerate(settings)}
        for setting, name in names.items():
            self._write(repository / name, setting)
        ready = READY_SECONDS + READY_SECONDS_EACH * sum(setting.instances for setting in settings)
        log = self.folder / f"{repository.name}.log"
        with contextlib.ExitStack() as open_:
            server = open_.enter_context(EmbeddedServer(repository, log_path=log, ready_timeout=ready))
            client = open_.enter_context(Client(server.url))
            self._warm.clear()
            address = replace(client.address, protocol=self.protocol, port=server.ports[self.protocol])
            targets = {setting: Target(Endpoint(address, name), client) for setting, name in names.items()}
            if not self.expected:
                self.expected = first_pass(self.fleet, next(iter(targets.values())))
            yield targets

    def _write(self, folder: Path, setting: Setting) -> None:
        link_model(self.source, folder)
        (folder / CONFIG_FILE).write_text(self.config_with(setting, folder.name), encoding="utf-8")

    def config_with(self, setting: Setting, name: str | None = None) -> str:
        """The content of the model's config.pbtxt with a setting."""
        return as_text(configured(self.config, setting, self.runtime, name))

    def _measure(self, targets: dict[Setting, Target], setting: Setting, clients: int) -> Probe:
        endpoint = targets[setting].endpoint
        if setting not in self._warm:
            self._warm.add(setting)
            self._send(endpoint, Load(concurrency=2 * setting.instances, warmup=0, seconds=FIRST_SECONDS))
        probe = self._send(endpoint, Load(concurrency=clients, warmup=WARMUP_SECONDS, seconds=self.seconds))
        if len(probe.latencies) < FEWEST:
            seconds = min(MOST_SECONDS, self.seconds * FEWEST / max(len(probe.latencies), 1))
            probe = self._send(endpoint, Load(concurrency=clients, warmup=WARMUP_SECONDS, seconds=seconds))
        return probe

    def _send(self, endpoint: Endpoint, load: Load) -> Probe:
        records, start, _ = self.fleet.run(endpoint, load, lambda start: None)
        measured = window(records, load, start)
        right = not measured.kinds and not check_answers(self.expected, records, self.fleet.traffic.bound).wrong
        return Probe(measured.answered / measured.seconds, measured.latencies, right)

    def _bytes(self, setting: Setting) -> float:
        served = version_folders(self.source)[-1]
        weights = sum(path.stat().st_size for path in served.rglob("*") if path.is_file())
        return setting.instances * (INSTANCE_BYTES + WEIGHT_COPIES * weights)


def link_model(source: Path, folder: Path) -> None:
    """Create a model's folder with links to the versions of the model `source`, and copies of what stands beside them: links to
    that would not be served. Raises UserError E724, E727 where `source` is not served itself."""
    refuse_unsafe(source.parent, [source.name])
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.is_file():
            shutil.copyfile(path, folder / path.name)
        elif path.name in NO_VERSIONS:
            shutil.copytree(path, folder / path.name)
        else:
            (folder / path.name).symlink_to(path.resolve(), target_is_directory=True)


def grouped(trials: Sequence[Trial], each: float, available: float, most: int = MOST_INSTANCES) -> list[list[Trial]]:
    """Trials that are served together: of `most` instances (or one trial), which fit in memory, where each takes so many bytes.
    Raises UserError E752 if one trial alone does not fit."""
    groups: list[list[Trial]] = [[]]
    for trial in trials:
        if trial.setting.instances * each > available:
            what = f"{trial.setting.instances} instances of the model need about {trial.setting.instances * each / 1e9:.1f} GB"
            raise UserError("E752", f"{what}, and {available / 1e9:.1f} GB are free for them", "Free memory")
        taken = sum(other.setting.instances for other in groups[-1])
        instances = taken + trial.setting.instances
        if taken and (instances * each > available or instances > most):
            groups.append([])
        groups[-1].append(trial)
    return groups
