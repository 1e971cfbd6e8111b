"""The console that everything here prints on."""

from __future__ import annotations

from typing import Any

from rich.console import Console


class PlainConsole(Console):
    """A console that shows places such as `pipeline.yaml:100: stages` as they are: rich takes `:100:` for an emoji."""

    def __init__(self, **options: Any):
        super().__init__(emoji=False, **options)
