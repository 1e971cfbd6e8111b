"""How templates are read: one set of jinja2's settings for reports, load tests and sweeps."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def templates(folder: Path) -> Environment:
    """The jinja2 environment of a folder's templates, which may include those beside this file: HTML is escaped, Markdown
    templates escape for themselves; a name that a template does not get raises jinja2's UndefinedError."""
    return Environment(
        loader=FileSystemLoader([folder, Path(__file__).parent]),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
