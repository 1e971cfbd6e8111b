"""Tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under a header: the first column to the left, figures to the right. 120 wide where there is no terminal."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD)
    for place, title in enumerate(header):
        # a name goes on in the next line: what is cut off may be what tells two of them apart
        table.add_column(title, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console = Console()
    Console(width=None if console.is_terminal else 120).print(table, markup=False)
