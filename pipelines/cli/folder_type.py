"""The type of an option that names a folder to write to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compressor.errors import UserError


class Folder(click.Path):
    """A folder that a command writes to: '' is not accepted as the current folder."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "" or "\0" in str(value):
            raise UserError("E801", "--out: the name of a folder is empty", "Give a folder, or . for this one")
        return super().convert(value, param, ctx)
