"""`compress list`: what a pipeline can be made of."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, get_args

import click

if TYPE_CHECKING:
    from pydantic import BaseModel

METHOD_KEYS = (
    "name",
    "summary",
    "formula",
    "scores",
    "strategies",
    "scopes",
    "learning_rate",
    "source",
    "reads",
    "uses_omega",
    "trains_base",
    "mergeable",
)
"""What is told of a method."""


@click.group("list", epilog="Example: compress list stages")
def list_() -> None:
    """List what a pipeline can be made of."""


@list_.command(epilog="Example: compress list stages --json")
@click.option("--json", "as_json", is_flag=True, help="Print names, artifacts and the JSON schema of every config.")
def stages(as_json: bool) -> None:
    """List the stages, with the keys of their configs."""
    from pipelines.stage import all_stages

    table = list(all_stages())
    if as_json:
        rows = [
            {
                **{key: getattr(stage, key) for key in ("name", "summary", "needs", "accepts", "produces", "version")},
                "config": stage.config.model_json_schema(),
            }
            for stage in table
        ]
        click.echo(json.dumps(rows, indent=1))
        return
    for stage in table:
        click.echo(f"{stage.name:<10} {stage.summary}")
        click.echo(f"{'':<10} keys: {', '.join(_keys(stage.config))}")


@list_.command(epilog="Example: compress list methods --json")
@click.option("--json", "as_json", is_flag=True, help="Print every property of every method.")
def methods(as_json: bool) -> None:
    """List the tuning methods, with the closed form of what each trains."""
    from compressor.methods import NAMES, method

    rows = [{key: getattr(method(name), key) for key in METHOD_KEYS} for name in NAMES]
    if as_json:
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for row in rows:
        click.echo(f"{row['name']:<12} {row['summary']}")
        merges = _merges(row["mergeable"])
        click.echo(f"{'':<12} trains {row['formula']}{merges}; {row['source']}")
        if row["scores"]:
            click.echo(
                f"{'':<12} Ω: {', '.join(row['strategies'])}, by {', '.join(row['scores'])}; over {', '.join(row['scopes'])}"
            )


def _merges(mergeable: bool | dict[str, bool]) -> str:
    """What a method's line says about merging; nothing where it always can be."""
    if isinstance(mergeable, bool):
        return "" if mergeable else "; not mergeable"
    return f"; mergeable with {', '.join(kind for kind, can in mergeable.items() if can)}"


@list_.command(epilog="Example: compress list architectures --json")
@click.option("--json", "as_json", is_flag=True, help="Print every property of every architecture.")
def architectures(as_json: bool) -> None:
    """List the architectures: what can be tuned in them, and what can be removed."""
    from compressor.architectures import ARCHITECTURES, facts_of

    rows = [facts_of(row) for row in ARCHITECTURES.values()]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        layout = f"; {', '.join(row['layout'])}" if row["layout"] else ""
        click.echo(f"{row['model_type']:<10} {row['models']}{layout}")
        click.echo(f"{'':<10} modules: {', '.join(row['modules'])}")
        click.echo(f"{'':<10} removable: {', '.join(row['structures'])}")
        click.echo(f"{'':<10} tested: {row['tested']}")


def _keys(config: type[BaseModel]) -> Iterator[str]:
    """Keys of a config; a list of mappings is shown by the keys of one of them, as users write it."""
    from pipelines.faults import models_in

    for name, field in config.model_fields.items():
        kinds = list(models_in(field.annotation))
        # keys of several kinds of items once; a value that may be a number as well as a mapping is a key
        if kinds and not set(get_args(field.annotation)) & set(kinds):
            yield from dict.fromkeys(key for kind in kinds for key in _keys(kind))
        else:
            yield name
