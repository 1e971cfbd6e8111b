"""Everything that can be known before a run writes its first byte: the user's mistakes are found here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.digests import sha256_of
from compressor.errors import UserError, UserErrors
from pipelines.config import Pipeline, with_place
from pipelines.environment import package_versions
from pipelines.stage import BaseModelReference, Entry, Stage, load_stage
from serving.bundle import install

if TYPE_CHECKING:
    from compressor.account import Plan


EXTRAS = {"openvino": "openvino", "nncf": "openvino"}
"""Which extra of this project installs a package that only some configs need."""


@dataclass(frozen=True)
class Ready:
    """A pipeline whose model and data are there: the resolved base and the data files' sha256, by path."""

    pipeline: Pipeline
    base: BaseModelReference
    data: dict[Path, str]


def check_inputs(pipeline: Pipeline) -> Ready:
    """Resolve the model and read the data. Raises UserErrors with all E113, E2xx and E3xx faults."""
    from compressor.models import resolve
    from compressor.tasks import check_data, data_files

    faults: list[UserError] = []
    base = None
    try:
        base = resolve(pipeline.model, relative_to=pipeline.source_folder)
        faults += length_faults(pipeline, base.folder)
    except UserError as error:
        faults += with_place(error, pipeline.source.where(("model",))).errors
    for path, task in pipeline.all_tasks.items():
        try:
            check_data(task)
        except UserError as error:
            faults += with_place(error, pipeline.source.where(path)).errors
    if base is None or faults:
        raise UserErrors(faults)
    reference = BaseModelReference(base.reference, base.folder, base.sha256)
    files = (file for task in pipeline.all_tasks.values() for file in data_files(task))
    return Ready(pipeline, reference, {file: sha256_of(file) for file in files})


def length_faults(pipeline: Pipeline, model: Path) -> Iterator[UserError]:
    """E113 for every length that the absolute positions of the model in this folder cannot number."""
    from compressor.architectures import row_of

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    most = row_of(config["model_type"]).most_tokens(config)
    asked = [((*path, "max_length"), task.max_length) for path, task in pipeline.all_tasks.items()]
    for number, entry in enumerate(pipeline.stages):
        for key, length in load_stage(entry.name).lengths(entry.config):
            asked.append((pipeline.source.locate(("stages", number, entry.name, *key)), length))
    for path, length in asked:
        if most is not None and length > most:
            what = f"{length} tokens, where the model has positions for {most}"
            yield UserError("E113", what, f"Use at most {most}", pipeline.source.where(path))


def make_plan(ready: Ready) -> Plan | None:
    """Walk the stages' closed-form account. Raises UserErrors with the place of the stage that cannot be (E5xx), UserError E304
    where transformers cannot make a model or a tokenizer of the base.

    None when no stage changes it: building the account is the one check that has to import torch.
    """
    from compressor.account import Plan

    pipeline = ready.pipeline
    if all(load_stage(entry.name).plan is Stage.plan for entry in pipeline.stages):
        return None
    from compressor.models import config_of, tokenizer_of
    from compressor.multitask import start_plan

    # here rather than in the first stage that reads rows: nothing is written yet
    config_of(ready.base.folder)
    tokenizer_of(ready.base.folder)
    plan = start_plan(ready.base.folder, pipeline.tasks) if pipeline.tasks else Plan.start(ready.base.folder, pipeline.task)
    for number, entry in enumerate(pipeline.stages):
        try:
            plan = load_stage(entry.name).plan(entry.config, plan)
        except UserError as error:
            raise with_place(error, pipeline.where(number)) from None
    return plan


def check_folder(out: Path, name: str) -> None:
    """Raise UserError E801 unless the run folder `out`/`name` and the store can be written. Writes nothing."""
    for folder in (out / name, out / name / "logs", out / ".store"):
        there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists() or path.is_symlink())
        if not there.is_dir():
            raise UserError("E801", "a file, where a folder is needed", "Choose another folder with --out", str(there))
        if not os.access(there, os.W_OK | os.X_OK):
            raise UserError("E801", "no permission to write here", "Choose another folder with --out", str(there))


def check_packages(entries: Sequence[Entry]) -> None:
    """Raise UserErrors E901 for every package that the stages need and this environment lacks."""
    faults = {}
    for entry in entries:
        stage = load_stage(entry.name)
        extras = stage.extras(entry.config)
        for name in (name for name, found in package_versions(stage, extras).items() if not found):
            mend = install(EXTRAS[name]) if name in extras else f"Install it: pip install {name}"
            faults[name] = UserError("E901", f"stage '{entry.id}' needs the package {name}", mend)
    if faults:
        raise UserErrors(list(faults.values()))
