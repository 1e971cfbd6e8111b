"""Greedy generation over ONNX Runtime sessions: the most likely token is fed back until every row has ended. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from export.runtimes.feeds import PAST
from export.runtimes.sessions import session

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, OrtValue

PRESENT, PROOF = "present.", "export.json"

Live = "InferenceSession | tuple[InferenceSession, InferenceSession]"
"""Session of a decoder, or of an encoder and its decoder (export/graph/decoder.py)."""


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
    if isinstance(live, tuple):
        decoder = Decoder(live[1], rows, encode(live[0], input_ids, attention_mask))
        fed, mask = np.full((rows, 1), start, np.int64), np.ones((rows, 1), np.int64)
    else:
        decoder, fed, mask = Decoder(live, rows), input_ids, attention_mask
    last = mask.shape[1] - 1 - mask[:, ::-1].argmax(axis=1)
    tokens, going = [], np.ones(rows, bool)
    while len(tokens) < max_new_tokens and going.any():
        likeliest = decoder(fed, mask)[np.arange(rows), last].argmax(axis=-1)
        tokens.append(np.where(going, likeliest, pad))
        going &= ~np.isin(likeliest, list(ends))
        fed, mask, last = tokens[-1][:, None], np.ones((rows, 1), np.int64), 0
    return np.stack(tokens, axis=1) if tokens else np.zeros((rows, 0), np.int64)


class Decoder:
    """A decoder session with the key and value cache of one batch; a call with the next tokens returns their logits.

    `source` is the result of `encode` for the input texts, if there is an encoder.
    """

    def __init__(self, session: InferenceSession, rows: int, source: Mapping[str, OrtValue] | None = None):
        self.session, self.source = session, dict(source or {})
        self.names = [value.name for value in session.get_outputs()]
        inputs = {value.name: value for value in session.get_inputs()}
        past = [value for name, value in inputs.items() if name.startswith(PAST) and name not in self.source]
        self.past = {value.name: _value(np.zeros((rows, value.shape[1], 0, value.shape[3]), np.float32)) for value in past}
        self.mask = np.zeros((rows, 0), np.int64) if "attention_mask" in inputs else None

    def __call__(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Logits (batch, tokens, vocabulary) of int64 ids (batch, tokens); the mask is 0 where there is no token."""
        feeds = {"input_ids": _value(input_ids), **self.source, **self.past}
        if self.mask is not None:
            self.mask = np.concatenate([self.mask, attention_mask], axis=1)
            # a position is the number of tokens before it, wherever the padding is
            positions = np.maximum(self.mask.cumsum(axis=1) - 1, 0)[:, -input_ids.shape[1] :]
            feeds |= {"attention_mask": _value(self.mask), "position_ids": _value(positions)}
        logits, *present = self.session.run_with_ort_values(self.names, feeds)
        self.past = {f"{PAST}{name.removeprefix(PRESENT)}": value for name, value in zip(self.names[1:], present, strict=True)}
        return logits.numpy()


def encode(encoder: InferenceSession, input_ids: np.ndarray, attention_mask: np.ndarray) -> dict[str, OrtValue]:
    """The encoder's keys and values for int64 texts (batch, length), under the names of the decoder's inputs."""
    names = [value.name for value in encoder.get_outputs()]
    mask = _value(attention_mask)
    states = encoder.run_with_ort_values(names, {"input_ids": _value(input_ids), "attention_mask": mask})
    cache = {f"{PAST}{name.removeprefix(PRESENT)}": value for name, value in zip(names, states, strict=True)}
    return {**cache, "encoder_attention_mask": mask}


def _value(array: np.ndarray) -> OrtValue:
    from onnxruntime import OrtValue

    return OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))


def open_generator(
    folder: Path, precision: str = "fp32", *, threads: int | None = None
) -> Callable[[np.ndarray, np.ndarray, int], np.ndarray]:
    """`generate` on a folder of `compress export`, with its model's end tokens: (ids, mask, most tokens) -> tokens.

    Raises UserError E602 if the folder is not an export of a generating model, or not of that precision.
    """
    return partial(generate, open_live(folder, precision, threads=threads), **facts_of(folder)["generation"])


def open_live(folder: Path, precision: str = "fp32", *, threads: int | None = None) -> Live:
    """The ONNX Runtime sessions of an exported generative model. Raises UserError E602."""
    folder = Path(folder)
    files = facts_of(folder)["files"]
    paths = [folder / entry["path"] for entry in files.values() if entry["precision"] == precision]
    if not paths:
        precisions = ", ".join(sorted({entry["precision"] for entry in files.values()}))
        raise UserError("E602", f"no model was exported in {precision}", f"It has {precisions}", str(folder))
    live = tuple(session(path, threads=threads) for path in paths)
    return live if len(live) > 1 else live[0]


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
