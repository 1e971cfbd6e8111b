"""What a stage is, what it is given and what it gives back: the contract between `stages/*/` and the runner."""

from __future__ import annotations

import importlib
import itertools
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictFloat, StrictInt

from compressor.arguments import NAME_PATTERN
from compressor.errors import UserError
from pipelines.file import limits

if TYPE_CHECKING:
    from compressor.account import Plan
    from compressor.models.reference import Reference
    from compressor.tasks import TaskConfig

STAGE_NAMES = ("select", "tune", "prune", "recover", "merge", "export", "deploy", "benchmark", "report")
"""Every stage, in the order in which a pipeline usually runs them. A new stage is a folder in `stages/` and a word here."""

TASKS = "tasks"
"""Folder of an artifact, and of a run, with the files of many tasks."""

TEXTS = "generated.jsonl"
"""File of an artifact with the texts that its model generated, one line a prompt; of many tasks TASKS/NAME.generated.jsonl."""


def each_once(values: list[Any]) -> list[Any]:
    """Validate a list whose values make a row each. Raises ValueError."""
    if len(set(values)) < len(values):
        raise ValueError("names one twice")
    return values


class StageConfig(BaseModel):
    """Base class of the stages' configs. `id` names a stage that appears twice; it defaults to the kind of the
    stage: `tune`, `tune-2`, ..."""

    # validate_default: `epochs: 2` written or omitted gives the same 2.0, and so the same fingerprint
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    id: str | None = Field(
        default=None,
        pattern=NAME_PATTERN,
        max_length=limits.NAME,
        description="its name in this pipeline, default the kind of the stage, of a second one with -2, ...",
    )

    @classmethod
    def amend_schema(cls, schema: dict[str, Any]) -> None:
        """Write into its JSON schema, in place, what its validators take besides."""

    @classmethod
    def short_forms(cls, definitions: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """(name or '', JSON schema) of other forms of the whole config; `definitions` are those of its JSON schema."""
        return []


def _count_or_share(value: int | float) -> int | float:
    if value <= 0 or (isinstance(value, float) and value >= 1):
        raise ValueError("a share lies in (0, 1); a count is at least 1 and has no decimal point")
    return value


CountOrShare = Annotated[Annotated[StrictInt, Field(le=limits.COUNT)] | StrictFloat, AfterValidator(_count_or_share)]
"""Config type of an amount: 3 is a count, 0.3 a share; 1 is a count of one, never 100 %."""


@dataclass(frozen=True)
class Problem:
    """A fault that a stage finds in its place in the pipeline; `key` is the path inside its config, `()` for the stage."""

    code: str
    what: str
    fix: str
    key: tuple[str | int, ...] = ()


@dataclass(frozen=True)
class Entry:
    """One stage of one pipeline: its id (unique), its stage name and its validated config."""

    id: str
    name: str
    config: StageConfig

    @property
    def row(self) -> Stage:
        """The stage's row of the table, with its traits."""
        return load_stage(self.name)


def entries_after(entry: Entry, entries: Sequence[Entry]) -> Sequence[Entry]:
    """Those of a pipeline's entries that follow one of them."""
    return entries[entries.index(entry) + 1 :]


@dataclass(frozen=True)
class Artifact:
    """A published folder. `files` maps each file's relative path to its sha256; `metadata` is what `run` returned."""

    folder: Path
    id: str
    kind: str
    stage: str
    entry: str
    files: dict[str, str]
    metadata: dict[str, Any]

    @property
    def row(self) -> Stage:
        """The row of the stage that made it, with its traits."""
        return load_stage(self.stage)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a stage: the base, the task (or tasks), the seed and the earlier artifacts that it declares, in order.

    `threads` is for sessions and processes started by a stage; torch in this process already uses it.
    """

    base: Reference
    task: TaskConfig | None
    seed: int
    artifacts: tuple[Artifact, ...] = ()
    dense: Artifact | None = None
    run: dict[str, Any] = field(default_factory=dict)
    """For reports: name of the pipeline, of its model, of its data files, of the stages before this one and of their artifacts,
    the command that runs it, this program's version; `beside`, by stage and key, the names of what its config names beside the
    task's; `failures` where checks of theirs failed."""
    threads: int | None = None
    tasks: dict[str, TaskConfig] = field(default_factory=dict)
    models: dict[str, Reference] = field(default_factory=dict)
    """Other models that the stage's config names, by their references in it."""
    require_unchanged: Callable[[], None] = lambda: None
    """Raises UserError E807 if the data or a model changed since the run began. A stage calls it after reading them and
    before it writes to `Workspace.unfinished`."""

    def of_task(self, name: str) -> Inputs:
        """These inputs with one of the `tasks` as the task."""
        return replace(self, task=self.tasks[name])

    def nearest(self, kind: str) -> Artifact | None:
        """The nearest earlier artifact of a kind, or None."""
        return next((artifact for artifact in reversed(self.artifacts) if artifact.kind == kind), None)


class Progress(Protocol):
    """A progress bar: `advance(n)` moves it, `note` shows a short live figure beside it (a loss, a file name)."""

    def advance(self, steps: int = 1) -> None: ...
    def note(self, text: str) -> None: ...


class Workspace(Protocol):
    """Output interface of a stage. `folder` is empty and private; the runner publishes it when `run` returns.

    `log_folder` takes the logs of programs that a stage starts; it is never published. `unfinished` (it may not exist yet)
    holds checkpoints of an interrupted stage: its next attempt resumes from them; publishing removes it. `cache` (it may not
    exist yet) holds measurements of this machine for all runs; `again` means that the user requested a rerun of this stage.
    `say` prints one permanent line in the terminal. `proven` takes the record of every comparison as soon as there is one, so
    that a failed run has the records so far.
    """

    folder: Path
    log_folder: Path
    unfinished: Path
    cache: Path
    again: bool
    log: logging.Logger

    def progress(self, description: str, total: int) -> AbstractContextManager[Progress]: ...
    def say(self, text: str) -> None: ...
    def proven(self, record: dict[str, Any]) -> None: ...


def one_task_only(config: StageConfig, many: bool, kinds: Sequence[str]) -> Iterable[Problem]:
    """The fault E117 that most stages report for `tasks`."""
    if many:
        fix = "Leave it out, or give the pipeline the task it is about: `task` instead of `tasks`"
        yield Problem("E117", "this stage works on one task, the pipeline has `tasks`", fix)


Models = dict[str, "Reference"]


@dataclass(frozen=True)
class NamedInputs:
    """Data files and models that a stage's config names beside the task's: `files` and `models` are the keys that do.

    Paths are relative to the pipeline file. The content, not the name, is in the fingerprint, and may not change during a run.
    `problems` (config, task, models by key) finds faults without torch; `require_tokens` (config, task, the base's folder,
    models) raises UserErrors for rows that cannot be used once tokenized; `facts` (the same) are for `compress check`, by key:
    of a file its `rows` and their `mean` length in tokens, of a model the `flops` of such a row and its `bytes`, of rows made
    of others their number, `rows`; of all what is `told`.
    """

    files: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    problems: Callable[[Any, TaskConfig, Models], Iterable[Problem]] = lambda config, task, models: ()
    require_tokens: Callable[[Any, TaskConfig, Path, Models], None] = lambda config, task, base, models: None
    facts: Callable[[Any, TaskConfig, Path, Models], dict[str, dict[str, Any]]] = lambda config, task, base, models: {}

    def files_of(self, config: StageConfig) -> dict[str, Path]:
        """The data files that a config names, by key."""
        return {key: path for key in self.files if (path := getattr(config, key)) is not None}

    def models_of(self, config: StageConfig) -> dict[str, str]:
        """References of the models that a config names, by key."""
        return {key: reference for key in self.models if (reference := getattr(config, key)) is not None}


CPU, CUDA = "cpu", "cuda"


@dataclass(frozen=True)
class Stage:
    """One stage of the stage table.

    A stage is described by its traits; no code compares its name. `trains` updates parameters by gradients on the task's
    data, `removes` cuts units or masks weights, `merges` folds deltas into the weights. `outcome` describes the resulting
    model in a word for reports ('tuned'). `needs` are artifact kinds that an earlier stage must publish; `accepts` are
    optional ones. `packages` are the distributions whose versions enter the fingerprint, `extras` those that only some
    configs need; `version` is increased when the stage's own results change. `run` names the function that does the work,
    "module:function": it is imported when the stage runs, because commands that must start fast read this table. The
    function writes into `workspace.folder` and returns JSON metadata. `check` looks at the stage's place in the pipeline;
    `completed` gives values to keys that the file leaves out and that depend on the stages that follow, by the kinds of the
    tasks; `warns` says, for `compress check`, what is allowed before these stages and may surprise.
    `plan` updates the closed-form account of `--dry-run`. `reads_data` puts the data files' hashes into the fingerprint;
    where it depends on the config it is a function of it. `scores_tests`: it also measures quality on the task's files that
    are only scored; `scores_texts`: it does not, but scores generated texts. `lengths` are the tokens per row in the config, by
    key, to be compared with the model's positions, and `behind` how many it generates behind each, by the kinds of the tasks.
    `beside` are the files and models that the config names. `with_tasks` validates the config again, knowing whether the
    pipeline has many tasks, and the kind of each.
    `estimate` returns non-default values (`pipelines.check.estimate.work`) of the `flops`, further `seconds`, bytes of
    `memory`, of `disk` and of `temporary` files that it takes, from the closed forms after and before it and the account of the
    rows. `device` is what such a config computes on, CPU or CUDA; `processes` how many a server that it starts has for its
    models, at least. `surroundings` are facts of this machine that affect the result of such a config. If `optional`, a
    CheckError of `run` does not end the pipeline: it is a failure of the run, and later stages run without its artifact. In
    the metadata that `run` returns, `parity` are the records of its comparisons, and `failures` are failed checks ({"code",
    "what", "fix"}) that did not stop it: the run reports them, and ends with exit code 3.
    """

    name: str
    summary: str
    config: type[StageConfig]
    produces: str
    run: str
    needs: tuple[str, ...] = ()
    accepts: tuple[str, ...] = ()
    uses_dense: bool = False
    reads_data: bool | Callable[[Any], bool] = True
    scores_tests: bool = False
    scores_texts: bool = False
    packages: tuple[str, ...] = ("torch", "transformers")
    extras: Callable[[Any], tuple[str, ...]] = lambda config: ()
    version: int = 1
    check: Callable[[Any, tuple[Entry, ...]], Iterable[Problem]] = lambda config, earlier: ()
    completed: Callable[[Any, Sequence[Entry], Sequence[str]], StageConfig] = lambda config, later, kinds: config
    warns: Callable[[Any, Sequence[Entry]], Iterable[str]] = lambda config, later: ()
    plan: Callable[[Any, Plan], Plan] = lambda config, plan: plan
    estimate: Callable[[Any, Plan, Plan, dict[str, Any]], dict[str, float]] = lambda config, plan, before, rows: {}
    with_tasks: Callable[[Any, bool, Sequence[str]], Iterable[Problem]] = one_task_only
    lengths: Callable[[Any], Iterable[tuple[tuple[str | int, ...], int]]] = lambda config: ()
    behind: Callable[[Any, Sequence[str]], int] = lambda config, kinds: 0
    beside: NamedInputs = NamedInputs()
    device: Callable[[Any], str] = lambda config: CPU
    processes: Callable[[Any], int] = lambda config: 1
    surroundings: Callable[[Any], dict[str, Any]] = lambda config: {}
    optional: bool = False
    trains: bool = False
    removes: bool = False
    merges: bool = False
    outcome: str = ""

    @property
    def publishes_model(self) -> bool:
        """Whether its artifact is a model, in whatever state."""
        return self.produces == "model"

    @property
    def measures(self) -> bool:
        """Whether its artifact is what a benchmark measured."""
        return self.produces == "measurements"

    @property
    def chooses_places(self) -> bool:
        """Whether its artifact is an Ω: positions in the weights that a sparse update may change."""
        return self.produces == "omega"

    @property
    def serves(self) -> bool:
        """Whether its artifact is a model repository; its config says the file that is in it."""
        return self.produces == "repository"

    @property
    def exports(self) -> bool:
        """Whether its artifact is files for a runtime; its config says their precisions and runtimes."""
        return self.produces == "onnx"

    def perform(self, config: StageConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
        """Import what `run` names, and do the work: the metadata of the artifact."""
        return pkgutil.resolve_name(self.run)(config, inputs, workspace)


def load_stage(name: str) -> Stage:
    """The stage with this name. Raises UserError E103 for an unknown name."""
    if name not in STAGE_NAMES:
        raise UserError("E103", f"unknown stage '{name}'", f"Stages: {', '.join(STAGE_NAMES)}")
    return importlib.import_module(f"pipelines.stages.{name}.config").STAGE


def dense_of(earlier: Sequence[Artifact]) -> Artifact | None:
    """The model that all that is removed is measured against: the last one trained before anything is removed."""
    before_removal = itertools.takewhile(lambda artifact: not artifact.row.removes, earlier)
    return next((artifact for artifact in reversed([*before_removal]) if artifact.row.trains), None)


def all_stages() -> Iterator[Stage]:
    """Every stage, in the order of `STAGE_NAMES`."""
    return (load_stage(name) for name in STAGE_NAMES)
