"""A model of many tasks in a Triton repository: NAME takes tokens and the number of each row's task, NAME-text texts and the
name of the task.

A version holds the model file, the tokenizer, and serving.json with the name, the labels and the kind of every task. Another
set of tasks is another version.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from export.runtimes.runtime import Runtime
from export.runtimes.runtime_registry import RUNTIMES
from export.standalone.folder import SUMMARY
from serving.backends.door import VERSION_FILE
from serving.deployment.target import Target
from serving.layout.knobs import DEFAULT_KNOBS, INTERFACES, Knobs
from serving.layout.model_limits import limits_of
from serving.layout.text_outputs import ANY_KIND, TEXT_SUFFIX
from serving.layout.version_file import VersionFacts, read_version
from serving.repository import CONFIG_FILE, ServedModel, config_bytes, models_of, read_config, version_folders, write_version

MOST_TOKENS = 512
"""Tokens at which texts are cut where the model itself would take more."""


def write_many_tasks(
    folder: Path,
    name: str,
    stacked: Path,
    *,
    interfaces: Sequence[str] = INTERFACES,
    knobs: Knobs | None = None,
    max_length: int | None = None,
) -> list[Path]:
    """Add the model of many tasks in `stacked`, a folder of `compress delta stack`, to the repository `folder` as `name`.

    Returns the version folders. Where the repository has the model, it gets another version, and keeps the settings of its
    config; `knobs` that are given must be these.

    Texts are cut at `max_length` tokens, by default where the version before cuts them, of a first version as many as the
    model takes, at most MOST_TOKENS. Raises UserError E113 (`max_length` is more than the model takes), E720 to E723 as
    `write_repository`, E727 and E728 (the versions before are damaged), E756 (a deployment is at work there), E757 (the
    repository cannot be opened), E779 (not such a folder, or a model with another config).
    """
    summary = read_summary(stacked)
    runtime, path = RUNTIMES[summary["runtime"]], stacked / summary["path"]
    facts = facts_of(stacked, summary, max_length, MOST_TOKENS if max_length else _length_before(folder, name))
    options = {"facts": facts, "tokenizer_folder": stacked, "interfaces": interfaces, "knobs": knobs or DEFAULT_KNOBS}
    models = models_of(name, path, runtime=runtime, **options)
    homes = {model: Path(folder, model) for model in models}
    target = Target.at(str(folder))
    with target.locked():  # another writer would take the same number
        _finish(homes)
        number = _next_number(homes, models)
        if number > 1:
            models = {model: _as_before(homes[model], content, knobs) for model, content in models.items()}
        with contextlib.ExitStack() as undo:
            for model, home in homes.items():
                # complete before a server can see it: hidden folders are no versions
                staged = home / f".{number}"
                undo.callback(_discard, staged, models[model])
                _discard(staged, models[model])  # of one that was killed
                write_version(staged, path, runtime, facts, stacked)
            for model, content in models.items():
                # before there is a first version: without a config it could not be served
                target.set_beside(model, {**content.files, CONFIG_FILE: config_bytes(content.config)})
            undo.pop_all()
        return [_complete(home, str(number)) for home in homes.values()]


def _finish(homes: Mapping[str, Path]) -> None:
    """Complete the version of the one model where who wrote it was killed after that of the other: what was written under the
    hidden name is whole where it has the facts, its last file, of that version."""
    for home, other in itertools.permutations(homes.values(), 2):
        for published in other.glob("[1-9]*"):
            number, facts = published.name, published / VERSION_FILE
            staged = home / f".{number}" / VERSION_FILE
            written = staged.is_file() and facts.is_file() and not (home / number).exists()
            if written and filecmp.cmp(staged, facts, shallow=False):
                _complete(home, number)


def _next_number(homes: Mapping[str, Path], models: Mapping[str, ServedModel]) -> int:
    """The number of the next version of all models. Raises UserError E779 where the repository has one of them alone."""
    there = [model for model, home in homes.items() if _is_there(home, models[model])]
    if there and len(there) < len(models):
        what = f"the repository has '{there[0]}' alone, of {' and '.join(models)}"
        raise UserError("E779", what, "Give the interfaces that it has, or another name", str(homes[there[0]].parent))
    return max(1 + int(version_folders(home)[-1].name) if there else 1 for home in homes.values())


def _is_there(home: Path, content: ServedModel) -> bool:
    """Whether a folder holds more than what was left of a first version that was never complete."""
    beside = {CONFIG_FILE, *(relative.parts[0] for relative in map(Path, content.files))}
    return home.exists() and not (home.is_dir() and all(path.name[0] == "." or path.name in beside for path in home.iterdir()))


def _discard(staged: Path, content: ServedModel) -> None:
    """Remove a version that is not complete, and the folder of a model that has nothing else."""
    shutil.rmtree(staged, ignore_errors=True)
    if not _is_there(staged.parent, content):
        shutil.rmtree(staged.parent, ignore_errors=True)


def _complete(home: Path, number: str) -> Path:
    """Make a version that was written under its hidden name one of the model; returns its folder."""
    return (home / f".{number}").rename(home / number)


def read_summary(stacked: Path) -> dict[str, Any]:
    """The export.json of a folder of `compress delta stack`. Raises UserError E779."""
    try:
        summary = json.loads((stacked / SUMMARY).read_text(encoding="utf-8"))
        if not summary["tasks"] or not (stacked / summary["path"]).is_file() or summary["runtime"] not in RUNTIMES:
            raise KeyError("a model file with tasks")
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = f"not a folder of `compress delta stack` ({type(error).__name__}: {error})"
        raise UserError("E779", what, "Give the folder that was its --out", str(stacked)) from error
    return summary


def _length_before(folder: Path, name: str) -> int:
    """Tokens at which the newest version of a model in the repository `folder` cuts texts; MOST_TOKENS where none says it.
    Raises UserError E727, E728."""
    both = Path(folder, name), Path(folder, f"{name}{TEXT_SUFFIX}")
    homes = [home for home in both if any(home.glob(f"[1-9]*/{VERSION_FILE}"))]
    return read_version(version_folders(homes[0])[-1]).max_length if homes else MOST_TOKENS


def facts_of(stacked: Path, summary: dict[str, Any], max_length: int | None, default: int = MOST_TOKENS) -> VersionFacts:
    """What the server and its clients must know of the version."""
    limits = text_limits(stacked, max_length, default)
    tasks = tuple({key: task[key] for key in ("name", "labels", "kind")} for task in summary["tasks"])
    tags = tasks[0]["kind"] == "tokens"
    return VersionFacts(
        task="tokens" if tags else ANY_KIND,
        labels=(),
        pad_id=summary["pad_id"],
        tasks=tasks,
        precision=summary["precision"],
        **limits,
    )


def text_limits(folder: Path, max_length: int | None, default: int = MOST_TOKENS) -> dict[str, Any]:
    """`max_length`, by default `default` where the model takes as many tokens, and the other limits of a version, from the
    config and the tokenizer in a model's folder. Raises UserError E113 where the model has positions for fewer tokens."""
    limits = limits_of(folder, max_length or default)
    if max_length is None:
        max_length = min(default, limits["positions"])
    elif max_length > limits["positions"]:
        what = f"{max_length} tokens, where the model has positions for {limits['positions']}"
        raise UserError("E113", what, f"Use at most {limits['positions']}", "max_length")
    return {**limits, "max_length": max_length}


def require_runtime(folder: Path, name: str, runtime: Runtime) -> None:
    """Raises UserError E779 where another runtime computes the versions that the repository `folder` has of `name`: for who is
    about to make the model file, which takes long."""
    home = Path(folder, name)
    # what a killed command left of a first version has a config, too
    served = (home / CONFIG_FILE).is_file() and any(home.glob("[1-9]*"))
    if served and read_config(home).backend != runtime.backend:
        raise _another_config("runtime", home)


def _as_before(home: Path, content: ServedModel, knobs: Knobs | None) -> ServedModel:
    """`content` with the config of the served model, of which only the requests that warm it up are those of the new version.
    Raises UserError E779 where a version cannot have this config, or it has not the `knobs`."""
    before, new = read_config(home), content.config
    if _served_by(before) != _served_by(new):
        raise _another_config("runtime or kind of task", home)
    if knobs is not None and config_bytes(before) != config_bytes(new):
        raise _another_config("setting", home)
    kept = type(before)()
    kept.CopyFrom(before)
    if before.model_warmup:
        del kept.model_warmup[:]
        kept.model_warmup.extend(new.model_warmup)
    return replace(content, config=kept)


def _served_by(config: Any) -> tuple[Any, ...]:
    """What must be the same for all versions of a model: the rest of a config are settings, whose defaults change."""
    return config.backend, config.max_batch_size > 0, list(config.input), list(config.output)


def _another_config(which: str, home: Path) -> UserError:
    what = f"the repository has this model with another config (another {which})"
    return UserError("E779", what, f"Give the {which} that it has, or another name", str(home))
