"""`compress list`: the building blocks of a pipeline."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compressor.errors import UserError

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
"""Properties of a method that are listed."""


@click.group("list", epilog="Example: compress list stages")
def list_() -> None:
    """List the building blocks of a pipeline."""


@list_.command(epilog="Example: compress list recipes")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def recipes(as_json: bool) -> None:
    """List the bundled pipelines: what each does, how long it takes, and its command; then the tables of papers."""
    from pipelines.file.config import recipe_files

    rows = [_recipe(path) for path in recipe_files()]
    if as_json:
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for row in rows:
        click.echo(f"{row['name']:<20} {row['summary']}")
        time = f"about {row['minutes']} minutes on two cores: " if row["minutes"] else ""
        click.echo(f"{'':<20} {time}{row['command']}")


def _recipe(path: Path) -> dict[str, str | int | None]:
    """Parse the comment at the top of a recipe: its first sentence, and `About N minutes`, which no table has."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text(encoding="utf-8").splitlines())
    comment = " ".join(line.removeprefix("#").strip() for line in lines)
    minutes = re.search(r"About (\d+) minutes on two cores", comment)
    summary = re.split(r"(?<=[^0-9])\. |\.$", comment)[0]
    command = f"compress run {path.stem}" if minutes else f"compress sweep {path.stem} --scale small --folder DATA"
    return {"name": path.stem, "summary": summary, "minutes": int(minutes[1]) if minutes else None, "command": command}


@list_.command(epilog="Example: compress list schema --out pipeline.schema.json")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write it to this file.")
def schema(out: Path | None) -> None:
    """Print the JSON schema of a pipeline file, with which editors complete and check keys (docs/first_steps.md)."""
    from pipelines.file.schema import schema_text

    if out is None:
        click.echo(schema_text(), nl=False)
        return
    try:
        out.write_text(schema_text(), encoding="utf-8")
    except OSError as error:
        raise UserError("E801", f"cannot be written ({error.strerror})", "Choose another --out", str(out)) from None
    click.echo(f"schema: {out}")


@list_.command(epilog="Example: compress list stages tune")
@click.argument("name", required=False, metavar="[STAGE]")
@click.option("--json", "as_json", is_flag=True, help="Print names, artifacts and the JSON schema of every config.")
def stages(name: str | None, as_json: bool) -> None:
    """List the stages and their keys; for one STAGE every key, with type, default, bounds and meaning."""
    from pipelines.engine.stage import all_stages, load_stage

    table = list(all_stages()) if name is None else [load_stage(name)]
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
    if name is not None:
        _keys_of(name, table[0].summary)
        return
    for stage in table:
        click.echo(f"{stage.name:<10} {stage.summary}")
        click.echo(f"{'':<10} keys: {', '.join(_keys(stage.config))}")


def _keys_of(name: str, summary: str) -> None:
    """Show every key of a stage, and of the mappings inside it, in one table each."""
    from pipelines.file.schema import tables

    click.echo(f"{name}: {summary}")
    for title, rows in tables(name):
        click.echo(f"\n{title}")
        for key, kind, default, bounds, meaning in rows:
            value = {"": "", "required": "; required"}.get(default, f"; default {default}")
            click.echo(f"  {key:<22} {kind}{f' ({bounds})' if bounds else ''}{value}")
            click.echo(f"  {'':<22} {meaning}")


@list_.command(epilog="Example: compress list methods --json")
@click.option("--json", "as_json", is_flag=True, help="Print every property of every method.")
def methods(as_json: bool) -> None:
    """List the tuning methods, with the closed form of their trainable parameters."""
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


@list_.command(epilog="Example: compress list metrics")
@click.option("--json", "as_json", is_flag=True, help="Print them as JSON.")
def metrics(as_json: bool) -> None:
    """List the metrics of every kind of task: the values of `task.metric`, the default first."""
    from compressor.tasks import KINDS
    from compressor.tasks.task_kind import kind_of

    rows = [
        {
            "kind": name,
            "metric": metric.key,
            "name": metric.name,
            "default": metric is kind_of(name).metric,
            "of_texts": metric.of_texts,
        }
        for name in KINDS
        for metric in kind_of(name).choices
    ]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        note = " (default)" if row["default"] else " (of the texts of task.decode)" if row["of_texts"] else ""
        click.echo(f"{row['kind']:<15} {row['metric']:<17} {row['name']}{note}")


def _merges(mergeable: bool | dict[str, bool]) -> str:
    """Note on merging for a method's line; empty where it is always possible."""
    if isinstance(mergeable, bool):
        return "" if mergeable else "; not mergeable"
    return f"; mergeable with {', '.join(kind for kind, can in mergeable.items() if can)}"


@list_.command(epilog="Example: compress list architectures --discover ./model --json > row.json")
@click.option("--json", "as_json", is_flag=True, help="Print every property of every architecture.")
@click.option(
    "--discover",
    metavar="MODEL",
    help="Propose a row for the architecture of MODEL, which has none, and prove it. With --json as a file for the key "
    "`architecture` of a pipeline.",
)
def architectures(as_json: bool, discover: str | None) -> None:
    """List the architectures: what can be tuned and what can be removed in each."""
    from compressor.models.architectures import ARCHITECTURES, facts_of

    if discover is not None:
        _discover(discover, as_json)
        return
    rows = [facts_of(row) for row in ARCHITECTURES.values()]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    for row in rows:
        layout = f"; {', '.join(row['layout'])}" if row["layout"] else ""
        click.echo(f"{row['model_type']:<12} {row['models']}{layout}")
        click.echo(f"{'':<12} modules: {', '.join(row['modules'])}")
        click.echo(f"{'':<12} removable: {', '.join(row['structures'])}")
        click.echo(f"{'':<12} tested: {row['tested']}")


def _discover(reference: str, as_json: bool) -> None:
    """Print a verified row for an architecture without one, as Python or JSON. Nothing is registered or written."""
    from compressor.models.architectures import ARCHITECTURES
    from compressor.models.build import config_of
    from compressor.models.discovery.discover import as_code, discover
    from compressor.models.reference import find_folder
    from compressor.models.row_file import ROW

    folder = find_folder(reference)
    model_type = config_of(folder).model_type
    if model_type in ARCHITECTURES:
        click.echo(f"{model_type} is in the list already: compress list architectures", err=True)
        return
    row = discover(folder)
    if as_json:
        click.echo(ROW.dump_json(row, indent=1, exclude_defaults=True).decode())
        return
    for line in (
        f"Proposed for {model_type} from torch-pruning's graph of a small random model of it, on which units that are",
        "removed equal masked ones (1e-12 in float64). To use it, write it to a file with --json and name that file in",
        "a pipeline (architecture: FILE). To build it in, add it to ARCHITECTURES in",
        "compressor/models/architectures.py and run the tests on it: docs/architectures.md, To add one.",
    ):
        click.echo(f"# {line}")
    click.echo(f"{as_code(row)},")


def _keys(config: type[BaseModel]) -> Iterator[str]:
    """Keys of a stage's config, each that holds mappings with their keys in brackets (the keys of several kinds once)."""
    from pipelines.file.faults import models_in

    for name, field in config.model_fields.items():
        inner = dict.fromkeys(key for kind in models_in(field.annotation) for key in kind.model_fields)
        yield f"{name} ({', '.join(inner)})" if inner else name
