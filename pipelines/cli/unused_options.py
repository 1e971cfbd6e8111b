"""Options that were given on the command line although this use of the command does not read them."""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.core import ParameterSource

from compressor.errors import UserError


def require_unused(names: Iterable[str], use: str) -> None:
    """Raises UserError E112 for a parameter of these names that the running command was given; `use` is what reads none."""
    context = click.get_current_context()
    given = {name for name in names if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    for parameter in context.command.params:
        if parameter.name in given:
            option = max(parameter.opts, key=len)
            raise UserError("E112", f"{option} is not used {use}", "Leave it out")
