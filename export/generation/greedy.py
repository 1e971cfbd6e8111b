"""Greedy generation over ONNX Runtime sessions: the most likely token is fed back until every row has ended. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from export.runtimes.decoders import begun
from export.runtimes.sessions import session

if TYPE_CHECKING:
    from export.runtimes.decoders import Live

PROOF = "export.json"


def generate(
    live: Live,
    input_ids: np.ndarray,
    attention_mask: np.ndarray,
    max_new_tokens: int,
    *,
    ends: Collection[int] = (),
    pad: int = 0,
    start: int | None = None,
) -> np.ndarray:
    """The most likely tokens, int64 (batch, up to `max_new_tokens`); stops when every row contains one of `ends`.

    Prompts are int64 (batch, length), with 0 in the mask wherever a row has no token: on the left, the right, or both. After
    its end a row is filled with `pad`. `start` is the first token of a decoder with an encoder.
    """
    rows = len(input_ids)
    decoder, fed, mask = begun(live, input_ids, attention_mask, np.full((rows, 1), start or 0, np.int64))
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    tokens, going = [], np.ones(rows, bool)
    while len(tokens) < max_new_tokens and going.any():
        likeliest = decoder(fed, mask)[np.arange(rows), last].argmax(axis=-1)
        tokens.append(np.where(going, likeliest, pad))
        going &= ~np.isin(likeliest, list(ends))
        # what pads a row behind its end takes no position
        fed, mask, last = tokens[-1][:, None], going[:, None].astype(np.int64), 0
    return np.stack(tokens, axis=1) if tokens else np.zeros((rows, 0), np.int64)


def open_generator(
    folder: Path, precision: str = "fp32", *, threads: int | None = None
) -> Callable[[np.ndarray, np.ndarray, int], np.ndarray]:
    """`generate` on a folder of `compress export`, with its model's end tokens: (ids, mask, most tokens) -> tokens.

    Raises UserError E602 if the folder is not an export of a generating model, or not of that precision.
    """
    return partial(generate, open_live(folder, precision, threads=threads), **facts_of(folder)["generation"])


def open_live(folder: Path, precision: str = "fp32", *, threads: int | None = None) -> Live:
    """The ONNX Runtime session of an exported generative model. Raises UserError E602."""
    folder = Path(folder)
    return session(folder / decoder_in(facts_of(folder), precision, folder)["path"], threads=threads)


def decoder_in(facts: Mapping[str, Any], precision: str, folder: Path) -> Mapping[str, Any]:
    """The entry of a precision's decoder in the export.json of a `folder`: the last one, which stands for its encoder, too.

    Raises UserError E602 where there is none.
    """
    files = facts["files"].values()
    entries = [entry for entry in files if entry["precision"] == precision]
    if not entries:
        precisions = ", ".join(sorted({entry["precision"] for entry in files}))
        raise UserError("E602", f"no model was exported in {precision}", f"It has {precisions}", str(folder))
    return entries[-1]


def facts_of(folder: Path) -> dict[str, Any]:
    """Read the export.json of an exported generative model. Raises UserError E602 where there is none."""
    folder = Path(folder)
    try:
        facts = json.loads((folder / PROOF).read_text(encoding="utf-8"))
        readable = isinstance(facts["generation"], dict) and all(
            entry["path"] and entry["precision"] for entry in facts["files"].values()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        readable = False
    if not readable:
        raise UserError("E602", "no export of a model that generates", "Export one: compress export", str(folder))
    return facts
