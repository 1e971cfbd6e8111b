"""How a command finds its work: by a dotted path that is followed when the command runs, so that every `--help` is instant."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import Any

import click

from pipelines.cli.launch import require_launch


def work(path: str, distributed: bool = False) -> Callable[[Callable[[], None]], Callable[..., Any]]:
    """Decorate the declaration of a command (its name, its help) with the function at `path`, "module:function", that does it.

    The module is imported only when the command runs, so it may have heavy imports. Only commands that are `distributed` run
    under torchrun.
    """

    def decorate(declaration: Callable[[], None]) -> Callable[..., Any]:
        @functools.wraps(declaration)
        def run(**parameters: Any) -> Any:
            require_launch(click.get_current_context().command_path, distributed)
            return pkgutil.resolve_name(path)(**parameters)

        return run

    return decorate
