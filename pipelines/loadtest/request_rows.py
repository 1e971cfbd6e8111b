"""The rows that a load test sends: a run's validation rows at their real lengths, or the texts of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import UserError
from compressor.models.reference import find_folder
from compressor.tasks.data import read_data
from compressor.tasks.features import model_rows
from compressor.tasks.reading import read_task
from pipelines.runs.finished import open_run
from pipelines.runs.served import find_repository
from serving.answer_bounds import IN_BATCHES, TOLERANCE, tolerance_alone, tolerance_in_batches
from serving.backends.door import VERSION_FILE
from serving.client import Client
from serving.clients.by_tokens import TextEncoder, find_version
from serving.layout.version_file import read_version
from serving.loadtest.traffic import (
    Row,
    Traffic,
    check_parts,
    check_testable,
    read_texts,
    recorded_rows,
    takes_texts,
    text_rows,
    token_rows,
)
from serving.repository import TOKENIZER

MOST_ROWS = 1000
SEED = 0


def traffic_of(
    client: Client, model: str, *, run: Path | None = None, texts: Path | None = None, tokenizer: Path | None = None
) -> Traffic:
    """Up to MOST_ROWS random rows of a run or of a file. Raises UserError E745, E749 (neither given), E714, E805, E2xx."""
    config = client.config(model)
    check_testable(model, config)
    version = version_of(run, model) if run else None
    bound = tolerance_in_batches(version) if version else IN_BATCHES
    if texts is not None:
        numbers, chosen = zip(*drawn(list(read_texts(texts).items())), strict=True)
        source, named = f"{len(chosen)} texts of {texts.name}", {"names": [f"{texts}:{number}" for number in numbers]}
        if takes_texts(config):
            return Traffic(text_rows(config, chosen), source, bound=bound, **named)
        return Traffic(tokens_of(client, model, config, chosen, tokenizer), f"{source}, as tokens", bound=bound, **named)
    if run is None:
        raise UserError("E749", "there are no rows to send", "Give --run RUN for its validation rows, or --texts FILE")
    rows, (first, recorded) = run_rows(config, run), recorded_rows(version) if version else ([], [])
    known = f", the answers of {len(recorded)} as recorded" if recorded else ""
    alone = tolerance_alone(version) if version else TOLERANCE
    return Traffic([*first, *rows], f"{len(rows)} validation rows of {run.name}{known}", recorded, bound, alone)


def version_of(run: Path, model: str) -> Path | None:
    """The folder of the version that the run deployed under this name; None where it did not."""
    try:
        folder = find_repository(run).repository / model
    except UserError as error:
        if error.code != "E805":
            raise
        return None
    versions = [path for path in folder.glob("*") if path.name.isdecimal()]
    return max(versions, key=lambda path: int(path.name), default=None)


def run_rows(config: Mapping[str, Any], run: Path) -> list[Row]:
    """The validation rows of a run as a model's requests."""
    finished = open_run(run)
    if "task" not in finished.lock:
        raise UserError("E745", "a run of several tasks deploys no model", "Give the texts with --texts FILE", str(run))
    task = finished.task
    if takes_texts(config):
        rows = drawn(read_task(task).validation.texts)
        pairs = ([(first, other) for other in others] or [(first,)] for first, *others in rows)
        return text_rows(config, [tuple(map(joined, row)) for row in chain(*pairs)])
    return token_rows(config, model_rows(drawn(read_data(find_folder(finished.model), task, later=True).validation.tokens)))


def tokens_of(
    client: Client, model: str, config: Mapping[str, Any], texts: Sequence[tuple[str, ...]], tokenizer: Path | None
) -> list[Row]:
    """Texts as tokens of the model, each at its own length; `tokenizer` is a version's folder. Raises UserError E714, E728,
    E745 for a text with too few or too many parts."""
    if tokenizer and not (tokenizer / VERSION_FILE).is_file():
        fix = "Give --tokenizer the folder of a version, such as reviews/1 of a repository"
        raise UserError("E728", f"no {VERSION_FILE}, so it is no version of a model", fix, str(tokenizer))
    folder = tokenizer or find_version(client, model, client.versions(model)[-1])
    facts = read_version(folder)
    check_parts(texts, 1 + facts.pair, "pairs of texts" if facts.pair else "single texts")
    encoder = TextEncoder(model, config, facts, folder / TOKENIZER)
    encodings = (encoder.encode([text[0] if len(text) == 1 else text])[0] for text in texts)
    return [dict(encoder.features([encoding])) for encoding in encodings]


def joined(text: str | Sequence[str]) -> str:
    """A text; words of a token task are separated by spaces, as in training."""
    return text if isinstance(text, str) else " ".join(text)


def drawn(rows: Sequence[Any]) -> list[Any]:
    """Up to MOST_ROWS random rows."""
    return [rows[index] for index in np.random.default_rng(SEED).permutation(len(rows))[:MOST_ROWS]]
