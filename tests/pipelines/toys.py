"""Toy stages: real files, artifacts, noise and failures in milliseconds, behind the names that the runner knows."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import subprocess
import sys
import time
import types
import warnings
import weakref
from pathlib import Path

from pydantic import Field

from compressor.errors import CheckError, UserError
from pipelines.engine import stage as stage_table
from pipelines.engine.stage import Inputs, Stage, StageConfig, Workspace

PIPELINE = """\
name: toy
model: ./model
task: {train: train.tsv, validation: dev.tsv, text: sentence}
threads: 1
stages:
  - select: {text: places}
  - tune: {files: 2}
  - prune:
  - report: {text: all}
"""


class ToyConfig(StageConfig):
    text: str = "x"
    files: int = Field(default=1, ge=1)


def run(config: ToyConfig, inputs: Inputs, workspace: Workspace) -> dict:
    """Write files whose bytes tell what the stage was given; do what `trouble` beside the store says."""
    name = workspace.folder.name.split("-")[1]
    trouble = workspace.log_folder.parents[1] / f"trouble-{name}"
    with (workspace.log_folder.parents[1] / "calls").open("a") as calls:
        calls.write(f"{name}\n")
    given = {
        "artifacts": [[one.kind, one.stage, one.metadata] for one in inputs.artifacts],
        "dense": inputs.dense and inputs.dense.metadata,
        "run": inputs.run,
    }
    (workspace.folder / "deep" / "er").mkdir(parents=True)
    with workspace.progress("writing", config.files) as bar:
        for number in range(config.files):
            (workspace.folder / "deep" / "er" / f"{number}.bin").write_bytes(f"{config.text}{number}".encode())
            bar.note(str(number))
            bar.advance()
    (workspace.folder / "report.json").write_text(json.dumps({**REPORT, **given}))
    if trouble.exists():
        TROUBLES[trouble.read_text()](trouble)
    return {"text": config.text, "seed": inputs.seed, "given": given}


REPORT = {
    "headline": "smaller",
    "measured": None,
    "deployed": "merge",
    "summary": [{"metric": "accuracy", "dense": "0.90", "compressed": "0.89", "change": "-1.0 points"}],
}


def noise(_: Path) -> None:
    """Speak on every channel that a library has."""
    print("from print")
    print("from stderr", file=sys.stderr)
    os.write(1, b"from native code\n")
    subprocess.run(["echo", "from a child"], check=True)
    logging.getLogger("some.library").warning("from logging")
    warnings.warn("from warnings", stacklevel=1)


def user_error(_: Path) -> None:
    raise UserError("E501", "too much is removed", "Remove less")


def check_error(_: Path) -> None:
    raise CheckError("E601", "logits differ", "Look at row 3")


def bug(_: Path) -> None:
    raise ZeroDivisionError("a bug of ours")


MODELS: list[weakref.ref[Model]] = []
"""What `failing_with_a_model` has made."""


class Model:
    """In a reference cycle, as a training and its model are."""

    def __init__(self):
        self.training = self


def failing_with_a_model(_: Path) -> None:
    model = Model()
    MODELS.append(weakref.ref(model))
    bug(_)  # pytest keeps what is logged: a coded error, with its frames


def full_card(_: Path) -> None:
    """As transformers wraps what torch says."""
    try:
        raise RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.5 GiB")
    except RuntimeError as error:
        raise ValueError("the model could not be moved") from error


def used_card(_: Path) -> None:
    """What torch says where another program leaves no room for its own context."""
    raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call")


def full_memory(_: Path) -> None:
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] data. DefaultCPUAllocator: can't allocate memory")


def full_disk(_: Path) -> None:
    raise OSError(28, "No space left on device")


def wrapped_full_disk(_: Path) -> None:
    """As torch.save says it."""
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 128 vs 22")


def denied(_: Path) -> None:
    raise PermissionError(13, "Permission denied", "/a/file")


def new_data(trouble: Path) -> None:
    """What the run was given is written anew while it runs: another label, equal in size."""
    path = trouble.parents[1] / "project" / "train.tsv"
    path.write_bytes(path.read_bytes().replace(b"yes", b"no "))


def new_weights(trouble: Path) -> None:
    flip_weight(trouble.parents[1] / "project" / "model")


def new_generation(trouble: Path) -> None:
    """What no digest of a model folder has."""
    (trouble.parents[1] / "project" / "model" / "generation_config.json").write_text('{"repetition_penalty": 2.0}')


def exchanged_data(trouble: Path) -> None:
    exchange(trouble.parents[1] / "project" / "train.tsv")


def exchanged_weights(trouble: Path) -> None:
    exchange(trouble.parents[1] / "project" / "model" / "model.safetensors")


def exchanged_config(trouble: Path) -> None:
    exchange(trouble.parents[1] / "project" / "model" / "config.json")


def exchange(path: Path) -> None:
    """Give a file another content for a moment: bytes, size and mtime are as they were."""
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(content[::-1])
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def deleted_data(trouble: Path) -> None:
    (trouble.parents[1] / "project" / "train.tsv").unlink()


def flip_weight(model: Path) -> None:
    """One bit of the last weight of a model folder: it stays as sound as it was."""
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-4] ^= 1
    (model / "model.safetensors").write_bytes(content)


def hang(trouble: Path) -> None:
    """Until the file of trouble is removed."""
    trouble.with_name("hanging").touch()
    while trouble.exists():
        time.sleep(0.01)


TROUBLES = {
    one.__name__: one
    for one in (
        noise,
        user_error,
        check_error,
        bug,
        failing_with_a_model,
        full_card,
        used_card,
        full_memory,
        full_disk,
        wrapped_full_disk,
        denied,
        new_data,
        new_weights,
        new_generation,
        exchanged_data,
        exchanged_weights,
        exchanged_config,
        deleted_data,
        hang,
    )
}

RUN = f"{__name__}:run"

STAGES = [
    Stage("select", "", ToyConfig, "omega", RUN, reads_data=False, packages=("click",)),
    Stage("tune", "", ToyConfig, "model", RUN, accepts=("omega",), packages=("click",), trains=True),
    Stage("prune", "", ToyConfig, "model", RUN, needs=("model",), uses_dense=True, packages=("click",), removes=True),
    Stage("deploy", "", ToyConfig, "repository", RUN, needs=("model",), packages=("click",)),
    Stage("report", "", ToyConfig, "report", RUN, needs=("model",), accepts=("*",), packages=("click",)),
]


def install(monkeypatch) -> None:
    """Put the toys in the place of the real stages."""
    monkeypatch.setattr(stage_table, "STAGE_NAMES", ())
    for stage in STAGES:
        add(monkeypatch, stage)


def add(monkeypatch, stage: Stage) -> None:
    """Put one more stage into the table until the test ends."""
    monkeypatch.setattr(stage_table, "STAGE_NAMES", (*stage_table.STAGE_NAMES, stage.name))
    module, place = types.ModuleType(stage.name), f"pipelines.stages.{stage.name}.config"
    with contextlib.suppress(ModuleNotFoundError):  # what commands import of the real one stays there
        vars(module).update(vars(importlib.import_module(place)))
    module.STAGE = stage
    monkeypatch.setitem(sys.modules, place, module)


def replace(monkeypatch, name: str, run=None, **traits) -> None:
    """Give a toy stage other traits until the test ends; `run` is a function."""
    if run is not None:
        own = f"run_of_{name}"
        monkeypatch.setattr(sys.modules[__name__], own, run, raising=False)
        traits["run"] = f"{__name__}:{own}"
    stage = next(one for one in STAGES if one.name == name)
    monkeypatch.setattr(sys.modules[f"pipelines.stages.{name}.config"], "STAGE", dataclasses.replace(stage, **traits))


def write_project(folder: Path, pipeline: str = PIPELINE) -> Path:
    """A pipeline file with all that it names: a model folder that is only ever checked and hashed, and two data files."""
    write_model(folder / "model")
    for name in ("train", "dev"):
        (folder / f"{name}.tsv").write_text("sentence\tlabel\na good film\tyes\na bad film\tno\n")
    path = folder / "pipeline.yaml"
    path.write_text(pipeline)
    return path


def write_model(folder: Path) -> None:
    """What the door asks of a model folder, in milliseconds and without torch: no toy stage builds a model."""
    import numpy as np
    from safetensors.numpy import save_file
    from tokenizers import Tokenizer, models

    folder.mkdir(parents=True)
    sizes = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8, "vocab_size": 2}
    (folder / "config.json").write_text(json.dumps({"model_type": "bert", "max_position_embeddings": 512, **sizes}))
    Tokenizer(models.WordLevel({"[UNK]": 0, "film": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    save_file({"embeddings.word_embeddings.weight": np.ones((2, 4), np.float32)}, folder / "model.safetensors")


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
