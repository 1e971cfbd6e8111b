"""The top level of a pipeline file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from compressor.arguments import NAME_PATTERN
from compressor.tasks import TaskConfig
from pipelines.file import limits


class PipelineFile(BaseModel):
    """The top level of a pipeline file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=NAME_PATTERN, max_length=limits.NAME, description="name of the run's folder")
    model: str = Field(
        min_length=1,
        max_length=limits.REFERENCE,
        description="pretrained: a hub id, a folder (or that of a run with a merge), package:NAME/PATH",
    )
    architecture: Path | None = Field(
        default=None,
        description="a file with the row of the model's architecture, where none is built in: "
        "compress list architectures --discover MODEL --json",
    )
    task: TaskConfig | None = Field(default=None, description="the task: kind, files and columns")
    tasks: dict[str, TaskConfig] | None = Field(
        default=None, min_length=1, max_length=limits.TASKS, description="many tasks by name, instead of task"
    )
    seed: int = Field(default=0, ge=0, lt=2**32, description="seed of every random number")
    threads: int | None = Field(default=None, ge=1, le=1024, description="default: OMP_NUM_THREADS, or the physical cores")
    stages: list[Any] = Field(min_length=1, max_length=limits.STAGES, description="the stages, run from top to bottom")
