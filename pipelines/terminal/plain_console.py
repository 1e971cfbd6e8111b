"""The console that everything here prints on."""

from __future__ import annotations

from typing import Any, TextIO

from rich.console import Console


class PlainConsole(Console):
    """A console that shows places such as `pipeline.yaml:100: stages` as they are: rich takes `:100:` for an emoji."""

    def __init__(self, **options: Any):
        super().__init__(emoji=False, **options)


def can_move(stream: TextIO) -> bool:
    """Whether what is written to a stream can be written over: on a terminal that takes escape sequences, so not with
    TERM=dumb. FORCE_COLOR asks for colours in a file too, and rich takes every stream for a terminal then."""
    return stream.isatty() and Console(file=stream).is_interactive
