"""The type of an option that names a kind of task. The kinds are read when it is used: that loads what --help need not."""

from __future__ import annotations

from typing import Any

import click
from click.shell_completion import CompletionItem


class TaskKindName(click.ParamType):
    """One of the kinds of tasks."""

    name = "kind"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return _choice().convert(value, param, ctx)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """The kinds with this prefix."""
        return _choice().shell_complete(ctx, param, incomplete)


def _choice() -> click.Choice:
    from compressor.tasks import KINDS

    return click.Choice(list(KINDS))
