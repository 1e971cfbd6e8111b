"""The work of `compress export`: a model folder as ONNX files, compared on random rows, without a pipeline."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from compressor.errors import UserError
from compressor.models.reference import local_folder
from export.runtimes.runtime_registry import GENERATING
from export.runtimes.tensorrt import RUNTIME, profile_of
from pipelines.cli.shown import near, say
from pipelines.terminal.capture import captured
from pipelines.terminal.console_table import figure, table


def export(
    folder: str,
    out: Path,
    precision: str,
    no_fuse: bool,
    tensorrt: bool,
    batch: Sequence[int],
    length: Sequence[int],
    force: bool,
    as_json: bool,
) -> None:
    """Write the files and show how near each is to PyTorch."""
    precisions = [word.strip() for word in precision.split(",")]
    if odd := [word for word in precisions if word not in GENERATING.generating]:
        raise UserError("E109", f"--precision: unknown '{odd[0]}'", f"One or more of: {', '.join(GENERATING.generating)}")
    for option, given in (("--batch", batch), ("--length", length)):
        if given and not tensorrt:
            raise UserError(
                "E624", f"{option} is not used: only an engine is made for shapes", "Leave it out, or add --tensorrt"
            )
    local_folder(folder)  # before an import of torch, which takes seconds
    from export.standalone.folder import export_folder

    engine = profile_of(batch or (1, 8, 32), length or (128,)) if tensorrt else None
    with tempfile.TemporaryDirectory() as scratch, captured(Path(scratch, "export.log")):
        options = {"fuse": not no_fuse, "force": force, "engine": engine}
        summary = export_folder(folder, out, precisions=precisions, **options)
    if as_json:
        click.echo(json.dumps(summary, indent=1, ensure_ascii=False))
        return
    records = {row["precision"]: row for row in summary["parity"]}
    files = list(summary["files"].values())
    rows = [(facts["path"], f"{facts['bytes']:,}", *_parity_cells(records[facts["precision"]])) for facts in files]
    last = ("generated alike",) if summary["kind"] == "generation" else ()
    table(("file", "bytes", "max |Δlogit|", "mean |Δlogit|", "agree", *last), rows)
    for facts in files:
        if facts["precision"] == files[0]["precision"]:
            say(f"inputs of {facts['path']}: {_shapes(facts['inputs'])}")
    unit = "rows" if summary["kind"] == "sequence classification" else "tokens"
    say(f"opset {summary['opset']}; {summary['parity'][0]['rows']} random {unit}")
    if engine := summary[RUNTIME.key]:
        made = "{engine}, by {library} {version}, compiled and not run: only {parity} was compared"
        built = made.format(**engine, parity=files[-1]["path"]) if engine["engine"] else "not installed here"
        say(f"{RUNTIME.title}: {built}; {engine['script']} builds the engine in the target container")
    for note in summary["notes"]:
        say(f"note: {note}")
    say(f"export: {near(out.absolute())}")


def _parity_cells(record: dict[str, Any]) -> tuple[str, ...]:
    generated = (f"{record['generated_agreement']:.1%}",) if "generated_agreement" in record else ()
    differences = (figure(record[key], ".1e") for key in ("max_difference", "mean_difference"))
    return (*differences, f"{record['agreement']:.1%}", *generated)


def _shapes(inputs: dict[str, list]) -> str:
    """Format the inputs of a graph; the past of a decoder is only counted."""
    texts = {name: dims for name, dims in inputs.items() if not name.startswith("past_key_values.")}
    past = f"; past_key_values of {len(inputs) - len(texts)} tensors" if len(texts) < len(inputs) else ""
    return ", ".join(f"{name} {' x '.join(map(str, dims))}" for name, dims in texts.items()) + f" (int64){past}"
