"""The type of an option that names a kind of task. The kinds are read when it is used: that loads what --help need not."""

from __future__ import annotations

from typing import Any

import click


class TaskKindName(click.ParamType):
    """One of the kinds of tasks."""

    name = "kind"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        from compressor.tasks import KINDS

        return click.Choice(list(KINDS)).convert(value, param, ctx)
