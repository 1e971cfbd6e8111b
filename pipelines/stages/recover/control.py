"""The control of a recovery: the dense model, trained as long as the pruned one, on the same rows in the same order.

A recovery is further training, from which the dense model would gain, too: only the difference from the control is the price
of pruning. Its state is kept for a later recovery of the same pipeline, whose control goes on from it, and in the store for
recoveries of other cuts of the same model.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import dropwhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from torch import nn

from compressor.checkpoint import load_state, save_state
from compressor.deltas.burn_in import renewal_fault
from compressor.digests import sha256_of
from compressor.errors import UserError
from compressor.methods import Options, method
from compressor.pruning.dense_indices import before_pruning
from compressor.tasks import TaskConfig
from compressor.tasks.data import Data, MetricInputs
from compressor.tasks.task_kind import TaskKind, kind_for
from compressor.tensor_file import write_tensors
from compressor.training.processes import announced, announcing, helping, launched
from compressor.training.unfinished import MANIFEST, is_complete, seal
from pipelines.engine.environment import accelerator, distribution
from pipelines.engine.scorers import scored_by
from pipelines.engine.stage import Artifact, Inputs, Workspace
from pipelines.engine.store import digest, fingerprint
from pipelines.reporting.format import scaled
from pipelines.stages.loading import judged, load_model, recorded, score_tests
from pipelines.stages.once import once
from pipelines.stages.recover.config import CONTROL, STAGE, RecoverConfig, rates_of_labels
from pipelines.stages.recover.lessons import Lessons, json_sha256
from pipelines.stages.recover.preparing import prepare, teaching
from pipelines.stages.training_plan import PASSES_OF_LABELS
from pipelines.stages.trainings import load_options, schedule_of, train_model

FINISHED = "finished"
"""Folder of a control in its work folder once it is trained."""
PREDICTED, FACTS = "predicted.safetensors", "facts.json"
"""What its metrics are computed from, row by row, and the metadata."""


def train_control(
    config: RecoverConfig, inputs: Inputs, workspace: Workspace, data: Data, lessons: Lessons
) -> dict[str, Any] | None:
    """Train the control, write its state and its predictions, and return its metadata; None where there is none.

    A control that another run of the store, or an interrupted attempt, has finished is not trained again. Raises UserError
    E406, E413, E803.
    """
    earlier = recoveries(inputs.artifacts)
    if not config.control or earlier is None:
        return None
    if why := left_out(config, inputs, earlier):
        workspace.say(f"no control: {why}")
        return None
    training = _training(config, inputs, data, lessons, earlier)
    if helping():
        if announced():
            _train(training, inputs, workspace, workspace.unfinished / CONTROL)
        return None
    name = f"control-{training.fingerprint(inputs)[:16]}"
    folder = workspace.folder / CONTROL
    with announcing() as announce:
        packed = once(name, lambda: _pack(_finished(training, inputs, workspace, announce)), workspace, ending="zip")
    _unpack(packed, folder)
    facts, metric = json.loads((folder / FACTS).read_text()), data.kind.metric
    (folder / FACTS).unlink()
    value = scaled(facts["quality"][metric.key], metric.scale, metric.unit)
    workspace.say(f"control: {value if metric.unit else f'{metric.name} {value}'} after {training.told} without pruning")
    return facts | training.learned


def recoveries(artifacts: Iterable[Artifact]) -> list[Artifact] | None:
    """The trainings since something was first removed; None where nothing was: a recovery is then itself of the dense model."""
    since = [*dropwhile(lambda artifact: not artifact.row.removes, artifacts)]
    return [artifact for artifact in since if artifact.row.trains] if since else None


def left_out(config: RecoverConfig, inputs: Inputs, earlier: list[Artifact]) -> str | None:
    """Why this recovery has no control; None if it has one."""
    if earlier and CONTROL not in earlier[-1].metadata:
        return f"{earlier[-1].entry}, from which it would go on, has none"
    if config.method != "same":
        options = load_options(config, inputs, group="")
        if options.omega and options.on != "weights":
            return f"positions chosen in the {options.on} of the pruned model are none of the dense model's"
    return None


@dataclass(frozen=True)
class ControlTraining:
    """All that decides what a control becomes: how it is trained, on what, and where it starts. Not the cut."""

    config: RecoverConfig
    lessons: Lessons
    data: Data
    before: str
    """Method of the training before."""
    positions: dict | None
    earlier: list[Artifact]
    learned: dict[str, str]
    """`learned` where it did not learn what the pruned model does, for the metadata."""

    @property
    def told(self) -> str:
        """In words, how it was trained by this recovery and those before, from whose controls it goes on."""
        on_labels = self.learned or any("learned" in recovery.metadata[CONTROL] for recovery in self.earlier)
        return "further training on the labels" if on_labels else "the same training"

    def fingerprint(self, inputs: Inputs) -> str:
        """sha256 by which recoveries of other cuts find the same control."""
        start = {name: sha for name, sha in self.earlier[-1].files.items() if name.startswith(CONTROL)} if self.earlier else {}
        rows = [(split.tokens, split.labels.tolist()) for split in (self.lessons.data.train, self.data.validation)]
        positions = {path: omega.tolist() for path, omega in (self.positions or {}).items()}
        logits = self.lessons.logits
        return fingerprint(
            {
                "version": STAGE.version,
                "config": self.config.model_dump(mode="json", exclude={"id", "control", "texts", "teacher"}, exclude_none=True),
                "start": [digest(inputs.dense), inputs.base.sha256, start, self.before],
                "rows": json_sha256([rows, positions]),
                "logits": None if logits is None else hashlib.sha256(np.ascontiguousarray(logits)).hexdigest(),
                **_measured_by(inputs.task),
                "run": [inputs.seed, inputs.threads, accelerator(), *map(distribution, STAGE.packages)],
                **({"processes": launched()} if launched() > 1 else {}),
            }
        )


def _measured_by(task: TaskConfig) -> dict[str, Any]:
    """What a task chooses to be measured by, where it does: its metric, how texts are generated for it, and the content of the
    files that are only scored. That of the validation file where texts are compared, which tokens and labels do not hold."""
    tests = {"tests": {name: sha256_of(path) for name, path in task.tests.items()}} if task.tests else {}
    kind = kind_for(task)
    of_texts = kind.metric.of_texts
    decoded = {"decode": task.decode.model_dump(mode="json"), "scores": scored_by([task])} if of_texts else {}
    compared = of_texts or kind.with_texts is not TaskKind.with_texts
    return {
        **({"metric": [task.metric, task.positive], **decoded, **tests} if task.metric or tests else {}),
        **({"validation": sha256_of(task.validation)} if compared else {}),
    }


def _training(config: RecoverConfig, inputs: Inputs, data: Data, lessons: Lessons, earlier: list[Artifact]) -> ControlTraining:
    previous = inputs.nearest("model").metadata
    how, own = lessons_of_control(config, data, lessons, previous["method"])
    learned = {"learned": "labels"} if own.texts < lessons.texts else {}
    return ControlTraining(how, own, data, previous["method"], _positions(config, inputs, previous["kept"]), earlier, learned)


def _finished(training: ControlTraining, inputs: Inputs, workspace: Workspace, announce: Callable[[], None]) -> Path:
    """The folder of the finished control: its state, its predictions and its metadata. Trained, after `announce`, unless it is
    there."""
    work = workspace.unfinished / CONTROL
    finished = work / FINISHED
    if not is_complete(finished):
        inputs.require_unchanged()
        announce()
        _train(training, inputs, workspace, work)
    return finished


def _train(training: ControlTraining, inputs: Inputs, workspace: Workspace, work: Path) -> None:
    """Train, and write the finished control to `work`. A process that helps another one to train does only that."""
    config, lessons, data = training.config, training.lessons, training.data
    model = _start(inputs, training.earlier)

    def options_of(group: str) -> Options:
        options = load_options(config, inputs, group)
        return replace(options, omega=training.positions) if options.omega else options

    row = method(prepare(model, config, training.before, options_of)["method"])
    try:
        taught = teaching(config, model, inputs, lessons.logits)
        trained = train_model(model, config, inputs, lessons.data, workspace, work, row=row, what="the control, ", **taught)
    except UserError as error:
        if error.code not in ("E406", "E413"):
            raise
        what = f"the control (the dense model, trained as the pruned one is): {error.what}"
        raise UserError(error.code, what, f"{error.fix}; control: false leaves the control out") from error
    if helping():
        return
    found, quality = judged(model, data.validation, inputs, data, workspace, "validating the control")
    tests = score_tests(model, inputs, data, workspace)
    inputs.require_unchanged()  # the files that are only scored were read just now
    facts = {"quality": quality, **tests, "recoveries": len(training.earlier) + 1, **trained}
    finished = work / FINISHED
    shutil.rmtree(finished, ignore_errors=True)
    save_state(model, finished, **recorded(inputs, data))
    write_tensors({"predicted": torch.from_numpy(np.ascontiguousarray(found.predicted))}, finished / PREDICTED)
    (finished / FACTS).write_text(json.dumps(facts))
    seal(finished)
    for checkpoint in work.glob("checkpoint-*"):  # nothing goes on from them any more
        shutil.rmtree(checkpoint, ignore_errors=True)


def _pack(folder: Path) -> bytes:
    """The files of a finished control, without their times: equal controls are equal bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(folder.iterdir()):
            if path.name != MANIFEST:
                archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes())
    return packed.getvalue()


def _unpack(packed: bytes, folder: Path) -> None:
    folder.mkdir()
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        archive.extractall(folder)


def lessons_of_control(config: RecoverConfig, data: Data, lessons: Lessons, before: str) -> tuple[RecoverConfig, Lessons]:
    """What the control learns, and how: the same, but where texts have the dense model as teacher, of which it could learn
    nothing: then the labels of the task's training rows. `before` is the method of the training before.

    At a higher rate than is usual with labels, a model that is tuned already would lose quality, and be a weaker baseline. A
    `burn_in` that does not end within the fewer steps on labels is the default, half of them; a `renew` that would never come
    before it is left out, as are `checkpoints`, of which nothing is kept of a control, and which may be more than these steps.
    """
    if not lessons.texts or config.teacher is not None:
        return config, lessons
    passes = min(config.passes(len(lessons.data.train)) * len(lessons.data.train) / len(data.train), PASSES_OF_LABELS)
    usual = rates_of_labels(config, before).items()
    rates = {key: min(given, most) for key, most in usual if (given := getattr(config, key)) is not None}
    of_labels = {"texts": None, "augment": None, "distill": False, "steps": None, "epochs": passes, **rates}
    of_control = config.model_copy(update={**of_labels, "checkpoints": None})
    if config.burn_in is not None and config.burn_in >= _steps(of_control, len(data.train)):
        of_control = of_control.model_copy(update={"burn_in": None})
    if config.renew is not None:
        first = of_control.burn_in or _steps(of_control, len(data.train)) // 2
        if renewal_fault(config.renew, first):
            of_control = of_control.model_copy(update={"renew": None})
    return of_control, Lessons(data)


def _steps(config: RecoverConfig, rows: int) -> int:
    """Optimizer steps of a training of another method than `same` on so many rows."""
    return schedule_of(config, method(config.method), seed=0).steps(rows)


def _positions(config: RecoverConfig, inputs: Inputs, kept: dict) -> dict | None:
    """The positions of the nearest select in the dense matrices, where the recovery's method takes them."""
    if config.method == "same" or not (omega := load_options(config, inputs, group="").omega):
        return None
    return before_pruning(omega, kept, load_state(inputs.dense.folder, inputs.base.folder, changes=False))


def _start(inputs: Inputs, earlier: list[Artifact]) -> nn.Module:
    """The dense model, or where an earlier recovery's control has got to; random numbers then follow from the seed."""
    if earlier:
        return load_state(earlier[-1].folder / CONTROL, inputs.base.folder, seed=inputs.seed)
    return load_model(inputs.dense, inputs.base, inputs.seed)


def control_of(artifacts: Iterable[Artifact]) -> Artifact | None:
    """The last recovery, if it has a control."""
    last = (recoveries(artifacts) or [None])[-1]
    return last if last and CONTROL in last.metadata else None


def metric_inputs_of_control(artifact: Artifact, data: Data, labels: np.ndarray) -> MetricInputs:
    """The recorded predictions of a recovery's control on the validation rows, whose `labels` are a kind's metric inputs."""
    predicted = load_file(artifact.folder / CONTROL / PREDICTED)["predicted"]
    return MetricInputs(predicted, labels, data.kind)
