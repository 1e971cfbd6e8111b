"""The work of `compress deploy`: a run's models as new versions in a repository that servers read."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
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
from serving.deployment.publish import State, deploy, roll_back, status
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
    control = None if url is None else Control.at(url, ca=ca, header=header_of(token_file))
    if control is not None and not control.tls:
        require_unused(["ca"], "without https://")
    tell = (lambda line: None) if as_json else say
    name = Path(os.path.abspath(run)).name  # of . too, and of a link its own
    options, to = Options(name, max_ms, keep, tell), os.path.expanduser(to)
    if show:
        target = Target.at(to, create=False)
        with target.storage_errors():
            states = status(target, control)
        click.echo(json.dumps([state.to_json() for state in states], indent=1) if as_json else table(states))
        return
    with repository_in_use(run) as served:
        note(served.outdated)
        names = model_names(served.repository)
        for name in names:
            read_config(served.repository / name)  # these raise for one that no server could load
            version_folders(served.repository / name)
        for path, check in ((kserve, check_kserve), (compose, check_compose)):
            if path is not None:
                check(path, to, names)
        if kserve is not None and not rollback:
            check_precisions(Target.at(str(served.repository)), names)
        target = Target.at(to, create=not rollback)
        with target.storage_errors():
            if kserve is not None or compose is not None:
                _check_others(target, to, names, kserve, compose)
            done = (
                roll_back(names, target, control, options) if rollback else deploy(served.repository, target, control, options)
            )
    if control is None and not rollback:
        tell(f"no --url: a server that polls {to} loads it; others load it by /v2/repository/models/NAME/load")
    if as_json:
        click.echo(json.dumps([published.to_json() for published in done], indent=1))
    if kserve is not None or compose is not None:
        with target.storage_errors():
            _write_files(target, to, kserve, compose, tell)


def _check_others(target: Target, to: str, names: Sequence[str], kserve: Path | None, compose: Path | None) -> None:
    """Raise what `_write_files` would raise afterwards of the models there that are not the run's `names`: they start, too."""
    others = sorted(set(lasting_models(target)) - set(names))
    if kserve is not None:
        check_precisions(target, others)
    if compose is not None:
        check_compose(compose, to, others)
    needs_gpu(target, others)


def _write_files(target: Target, to: str, kserve: Path | None, compose: Path | None, tell: Callable[[str], None]) -> None:
    """Write the files that start a Triton on the repository at `to`, with all its models: those of other runs, too. Raises
    UserError E724, E728, E757, E801."""
    names = lasting_models(target)
    if kserve is not None:
        check_precisions(target, names)  # of what a rollback brought back, too
    # KServe's own Triton starts some of them alone
    for path, write, started in ((kserve, write_kserve, stock_models), (compose, write_compose, list)):
        if path is not None and not names:
            note(f"not written: {path} (the repository holds no model any more)")
        elif path is not None:
            gpu = needs_gpu(target, started(names))
            left_out = sorted(set(names) - set(write(path, to, names, gpu=gpu)))
            missing = f", without {', '.join(left_out)}, for which KServe's Triton has no backend" if left_out else ""
            tell(f"written, not tried here: {path}{missing}")


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
