"""The work of `compress deploy`: a run's models as new versions in a repository that servers read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from compressor.errors import UserError
from pipelines.cli.shown import note, say
from pipelines.cli.unused_options import require_unused
from pipelines.runs.served import repository_in_use
from serving.deployment.manifests import (
    check_compose,
    check_kserve,
    check_precisions,
    lasting_models,
    needs_gpu,
    stock_models,
    write_compose,
    write_kserve,
)
from serving.deployment.publish import Published, State, deploy, roll_back, status
from serving.deployment.source import Options
from serving.deployment.target import Target
from serving.deployment.triton_control import Control
from serving.repository import model_names, read_config, version_folders

UNFINISHED = (
    "unfinished: its deployment or rollback is at work, or was interrupted: "
    "then the next deployment or --rollback takes it away"
)


def run(
    run: Path,
    to: str,
    url: str | None,
    token_file: Path | None,
    ca: Path | None,
    max_ms: float | None,
    keep: int,
    rollback: bool,
    show: bool,
    kserve: Path | None,
    compose: Path | None,
    as_json: bool,
) -> None:
    """Deploy, roll back, or show the versions."""
    _check_options(url, rollback, show, kserve, compose)
    control = _control_at(url, ca, token_file)
    to = os.path.expanduser(to)
    if show:
        _show_versions(to, control, as_json)
        return
    tell = (lambda line: None) if as_json else say
    name = Path(os.path.abspath(run)).name  # of . too, and of a link its own
    options, files = Options(name, max_ms, keep, tell), StartFiles(to, kserve, compose, tell)
    with repository_in_use(run) as served:
        note(served.outdated)
        names = _loadable(served.repository)
        files.check(names)
        if rollback:
            target, done = _roll_back(names, files, control, options)
        else:
            target, done = _deploy(served.repository, names, files, control, options)
    if as_json:
        click.echo(json.dumps([published.to_json() for published in done], indent=1))
    files.write(target)


def _check_options(url: str | None, rollback: bool, show: bool, kserve: Path | None, compose: Path | None) -> None:
    """Raises UserError E112 for options that exclude each other, and for those that this use of the command does not read."""
    if rollback and show:
        raise UserError("E112", "--rollback and --status exclude each other", "Give one of them")
    if url is None:
        require_unused(["max_ms", "token_file", "ca"], "without --url")
    if show:
        require_unused(["max_ms", "keep", "kserve", "compose"], "with --status")
    if rollback:
        require_unused(["max_ms", "keep"], "with --rollback")
    if kserve is not None and kserve == compose:
        raise UserError("E112", "--kserve and --compose name the same file", "Give each its own", str(kserve))


def _control_at(url: str | None, ca: Path | None, token_file: Path | None) -> Control | None:
    """The server at --url; None without one. Raises UserError E112, E711, and of the address as `Control.at`."""
    if url is None:
        return None
    control = Control.at(url, ca=ca, header=header_of(token_file))
    if not control.tls:
        require_unused(["ca"], "without https://")
    return control


def _show_versions(to: str, control: Control | None, as_json: bool) -> None:
    """Print the versions in the repository at `to`."""
    target = Target.at(to, create=False)
    with target.storage_errors():
        states = status(target, control)
    click.echo(json.dumps([state.to_json() for state in states], indent=1) if as_json else table(states))


def _deploy(
    repository: Path, names: Sequence[str], files: StartFiles, control: Control | None, options: Options
) -> tuple[Target, Sequence[Published]]:
    """Publish the models `names` of a run's repository as new versions."""
    if files.kserve is not None:
        check_precisions(Target.at(str(repository)), names)
    target = Target.at(files.to)
    with target.storage_errors():
        files.check_others(target, names)
        done = deploy(repository, target, control, options)
    if control is None:
        options.say(f"no --url: a server that polls {files.to} loads it; others load it by /v2/repository/models/NAME/load")
    return target, done


def _roll_back(
    names: Sequence[str], files: StartFiles, control: Control | None, options: Options
) -> tuple[Target, Sequence[Published]]:
    """Remove the latest versions of a run's models."""
    target = Target.at(files.to, create=False)
    with target.storage_errors():
        files.check_others(target, names)
        return target, roll_back(names, target, control, options)


def _loadable(repository: Path) -> list[str]:
    """The names of the models in a run's repository. Raises for one that no server could load."""
    names = model_names(repository)
    for name in names:
        read_config(repository / name)
        version_folders(repository / name)
    return names


@dataclass(frozen=True)
class StartFiles:
    """The files to write that start a Triton on the repository at `to`, with all its models: those of other runs, too."""

    to: str
    kserve: Path | None
    compose: Path | None
    tell: Callable[[str], None]

    @property
    def wanted(self) -> bool:
        return self.kserve is not None or self.compose is not None

    def check(self, names: Sequence[str]) -> None:
        """Raise what `write` would raise of a run's models."""
        for path, check in ((self.kserve, check_kserve), (self.compose, check_compose)):
            if path is not None:
                check(path, self.to, names)

    def check_others(self, target: Target, names: Sequence[str]) -> None:
        """Raise what `write` would raise afterwards of the models there that are not the run's `names`: they start, too."""
        if not self.wanted:
            return
        others = sorted(set(lasting_models(target)) - set(names))
        if self.kserve is not None:
            check_precisions(target, others)
        if self.compose is not None:
            check_compose(self.compose, self.to, others)
        needs_gpu(target, others)

    def write(self, target: Target) -> None:
        """Write them. Raises UserError E724, E728, E757, E801."""
        if not self.wanted:
            return
        with target.storage_errors():
            names = lasting_models(target)
            if self.kserve is not None:
                check_precisions(target, names)  # of what a rollback brought back, too
            # KServe's own Triton starts some of them alone
            for path, write, started in ((self.kserve, write_kserve, stock_models), (self.compose, write_compose, list)):
                if path is not None and not names:
                    note(f"not written: {path} (the repository holds no model any more)")
                elif path is not None:
                    gpu = needs_gpu(target, started(names))
                    left_out = sorted(set(names) - set(write(path, self.to, names, gpu=gpu)))
                    missing = f", without {', '.join(left_out)}, for which KServe's Triton has no backend" if left_out else ""
                    self.tell(f"written, not tried here: {path}{missing}")


def header_of(path: Path | None) -> tuple[str, str] | None:
    """The header in a token file: one line NAME: VALUE, or a bare token for Authorization: Bearer. Raises UserError E711."""
    if path is None:
        return None
    try:
        line = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("E711", f"the token file cannot be read ({error})", "Give a readable text file", str(path)) from error
    if not line or len(line.splitlines()) > 1:
        raise UserError("E711", "not one line of text", "Write the token, or HEADER: VALUE", str(path))
    name, colon, value = line.partition(":")
    if colon and value[:1].strip():
        fix = "Write a space behind the colon of HEADER: VALUE; a token holds no colon, or write Authorization: Bearer TOKEN"
        raise UserError("E711", "holds a colon without a space behind it", fix, str(path))
    header = (name.strip(), value.strip()) if colon else ("Authorization", f"Bearer {line}")
    if not (re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", header[0], re.ASCII) and header[1].isascii() and header[1].isprintable()):
        fix = "Write the token, or HEADER: VALUE, in printable ASCII"
        raise UserError("E711", "holds what no HTTP header can", fix, str(path))
    return header


def table(states: list[State]) -> str:
    """A line for each version."""
    shown = {True: "ready", False: "not loaded", None: "?"}
    rows = [("model", "version", "server", "proven", "published", "run")]
    for state in states:
        proven = "unfinished" if not state.finished else "yes" if state.proven else "no"
        rows.append((state.model, str(state.version), shown[state.ready], proven, state.published, state.run))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    note = "" if all(state.finished for state in states) else f"\n{UNFINISHED}"
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows) + note
