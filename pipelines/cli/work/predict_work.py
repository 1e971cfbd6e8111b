"""The work of `compress predict`."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from compressor.errors import UserError
from pipelines.cli.shown import say
from pipelines.cli.unused_options import require_unused
from serving.client import Client
from serving.clients.text_bytes import Text
from serving.predict import predictor

LINES, JSON_LINES = "text", "jsonl"
FORMATS = (LINES, JSON_LINES)
"""What a file of texts holds: a text in each line, or a JSON value: a text, or an object with "text" and, for pairs, "pair",
or a list "choices"."""
AT_A_TIME = 1024
"""Texts of a file that are predicted before their results are printed."""
STDIN = "-"


def predict(
    url: str,
    model: str,
    texts: tuple[str, ...],
    pairs: tuple[str, ...],
    file: str | None,
    format_: str | None,
    tokenizer: Path | None,
    ca: Path | None,
    token: str | None,
    task: str | None,
    as_json: bool,
) -> None:
    """Print a line for each text, or a JSON object a line."""
    if file is not None and (texts or pairs):
        raise UserError("E112", "--file and texts on the command line", "Give the texts in one way")
    if texts:
        require_unused(["format_"], "with texts on the command line")
    if pairs and len(pairs) != len(texts):
        raise UserError("E112", f"{len(pairs)} --pair for {len(texts)} texts", "Give --pair once for each text, in order")
    if not texts and file is None and sys.stdin.isatty():
        raise UserError("E112", "no text is given", "Give texts, --file FILE, or pipe them in")
    # before anything is read: a missing server is reported at once
    with Client(url, ca=ca, token=token) as client:
        if not client.address.tls:
            require_unused(["ca"], "without https:// or grpcs://")
        predict_texts = predictor(client, model, tokenizer, task=task)
        rows: Iterable[Text] = zip(texts, pairs, strict=True) if pairs else texts
        if not texts:
            rows = rows_of(file or STDIN, format_)
        for number, some in enumerate(batched(rows, AT_A_TIME)):
            for text, prediction in zip(some, predict_texts(some, number * AT_A_TIME), strict=True):
                show(text, prediction, as_json)


def show(text: Text, prediction: Any, as_json: bool) -> None:
    """Print one prediction."""
    first = text if isinstance(text, str) else text[0]
    if not as_json:
        say(f"{prediction}  {first}")
        return
    pair = {} if isinstance(text, str) else {"pair": text[1]} if len(text) == 2 else {"choices": text[1:]}
    click.echo(json.dumps({"text": first, **pair, **asdict(prediction)}, ensure_ascii=False))


def batched(rows: Iterable[Text], size: int) -> Iterator[list[Text]]:
    """The rows in lists of at most `size`."""
    rows = iter(rows)
    while some := list(itertools.islice(rows, size)):
        yield some


def rows_of(file: str, format_: str | None) -> Iterator[Text]:
    """The texts of a file, or of stdin for "-"; empty lines are left out. Raises UserError E731."""
    where = "stdin" if file == STDIN else file if file.isprintable() else ascii(file)
    of_json = (format_ or (JSON_LINES if file.endswith(".jsonl") else LINES)) == JSON_LINES
    try:
        with contextlib.nullcontext(sys.stdin.buffer) if file == STDIN else Path(file).open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = decoded(line, number, where).strip("\r\n")
                if text.strip():
                    yield json_row(text, f"{where}:{number}") if of_json else text
    except (OSError, ValueError) as error:
        what = f"cannot be read ({error.strerror if isinstance(error, OSError) else error})"
        raise UserError("E731", what, "Name a file with a text in each line, or - for stdin", where) from error


def decoded(line: bytes, number: int, where: str) -> str:
    """A line in UTF-8; the first one may begin with a byte order mark. Raises UserError E731."""
    try:
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        what = f"not UTF-8: byte {error.start + 1} of the line is {line[error.start]:#04x}"
        raise UserError("E731", what, "Convert it, for example with iconv", f"{where}:{number}") from error


def json_row(line: str, where: str) -> Text:
    """The text, or pair, of a JSON line. Raises UserError E731."""
    fix = 'Write a JSON string, or {"text": "..."} with "pair" for a second text or "choices" for several, in each line'
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError("E731", f"not JSON ({error})", fix, where) from error
    others = (row.get("choices") or [row.get("pair")]) if isinstance(row, dict) else []
    cells = [row] if isinstance(row, str) else [row.get("text"), *others] if isinstance(others, list) and others else []
    cells = cells[:1] if cells[1:] == [None] else cells
    if not cells or not all(isinstance(cell, str) for cell in cells):
        raise UserError("E731", "neither a text nor an object with one", fix, where)
    return cells[0] if len(cells) == 1 else tuple(cells)
