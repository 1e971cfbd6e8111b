"""Many tasks tuned together: one base, a file of what they share, and a small file for each task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compressor import load
from compressor.methods import apply, method, trainable_counts
from compressor.models.build import build
from compressor.storage.task_files import SHARED, write_tasks
from compressor.tasks.data import Data
from compressor.tasks.features import torch_forward
from compressor.training.moved_weights import as_deltas, trained_weights
from compressor.training.multitask import Mixture, join_heads, probabilities, trained_parts
from compressor.training.processes import helping
from compressor.training.trainer import train
from pipelines.engine.stage import TASKS, Inputs, Workspace
from pipelines.stages.generated_texts import with_texts
from pipelines.stages.loading import judge_rows, load_data, score_tests
from pipelines.stages.training_verdicts import verdicts
from pipelines.stages.trainings import (
    load_options,
    rounded_in,
    rows_of,
    schedule_of,
    settings_of,
    stepping,
    together,
    with_start,
)
from pipelines.stages.tune.config import TuneConfig

TEMPERATURE = 10.0
"""Default temperature of drawing tasks, as in ProPETL appendix C.2."""


def tune_tasks(config: TuneConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Train one model for all of `inputs.tasks`, write the task files, and measure each stored task.

    Each task has a head of its own; those that generate use the pretrained one.
    """
    data = {name: load_data(inputs.of_task(name)) for name in inputs.tasks}
    pad_id = next(iter(data.values())).pad_id
    row, temperature = method(config.method), config.temperature or TEMPERATURE
    built = (
        (name, build(inputs.base.folder, task.label_names, inputs.seed, task.kind.auto_class)) for name, task in data.items()
    )
    model = join_heads((name, with_start(model, inputs.tasks[name], data[name])) for name, model in built)
    options = config.of_tasks(load_options(config, inputs, group="1"), len(data))
    apply(model, row.name, options)

    before = trained_weights(model) if row.trains_base else {}
    mixture = Mixture([rows_of(config, task) for task in data.values()], temperature)
    schedule, trainable = schedule_of(config, row, inputs.seed), trainable_counts(model)
    inputs.require_unchanged()
    with workspace.progress(f"training {trainable['body']:,} parameters{together()}", schedule.steps(len(mixture))) as bar:
        losses = train(model, mixture, pad_id, schedule, workspace.unfinished, stepping(bar))

    if helping():
        return {}
    if row.trains_base:
        as_deltas(model, before, options.group)
    labels = {name: task.label_names for name, task in data.items()}
    folder, base = workspace.folder / TASKS, inputs.base
    files = write_tasks(model, folder, base=base.reference, base_sha256=base.sha256, label_names=labels)
    return {
        "method": row.name,
        "merged": False,
        "weights_moved": False,
        "kept": {},
        "tasks": measure(files, data, temperature, inputs, workspace),
        "shared_file": {"file": f"{TASKS}/{SHARED}", "bytes": (folder / SHARED).stat().st_size},
        "trainable": {**trainable, **trained_parts(model)},
        "formula": row.formula,
        "losses": losses,
        **rounded_in(config),
        **settings_of(row, options, model),
        **({"combine": options.combine} if row.task_masks else {}),
        "temperature": temperature,
    }


def measure(
    files: dict[str, Path], data: dict[str, Data], temperature: float, inputs: Inputs, workspace: Workspace
) -> list[dict[str, Any]]:
    """Quality on all validation rows, size and share of training steps of every task, each from its file on one live base."""
    rows, model = [], inputs.base.folder
    shares = probabilities([len(task.train) for task in data.values()], temperature)
    for (name, task), share in zip(data.items(), shares, strict=True):
        model = load(model, delta=files[name])
        metric_inputs = judge_rows(torch_forward(model), task.validation, task, workspace, f"validating {name}")
        judged = {"quality": metric_inputs.quality, "constant": task.kind.constant(task.validation.labels.tolist())}
        for verdict in verdicts(task.kind, judged):
            workspace.say(f"{name}: {verdict}")
        published, of_task = {"quality": metric_inputs.quality}, inputs.of_task(name)
        rows.append(
            {
                "task": name,
                "file": f"{TASKS}/{files[name].name}",
                "bytes": files[name].stat().st_size,
                "metric": task.kind.metric.key,
                **with_texts(published, model, of_task, task, workspace, name),
                **score_tests(model, of_task, task, workspace),
                **({} if judged["constant"] is None else {"constant": judged["constant"]}),
                "labels": task.label_names,
                "rows": len(task.train),
                "probability": float(share),
            }
        )
    return rows
