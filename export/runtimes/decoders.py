"""The sessions of models that generate: a decoder with the cache of one batch, and a decoder behind an encoder as one model.

A decoder behind an encoder is two files of one folder, whose names end alike; that of the decoder stands for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from compressor.tasks.features import DECODER_IDS
from export.runtimes.feeds import PAST, positions_of
from export.runtimes.runtime import TensorSpec

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, OrtValue

    Live = InferenceSession | "EncoderDecoder"
    """Session of a decoder, or of an encoder and the decoder behind it."""

PRESENT = "present."


class EncoderDecoder(NamedTuple):
    """The sessions of an encoder and of the decoder behind it; also a `Session` of both, with an empty cache."""

    encoder: InferenceSession
    decoder: InferenceSession

    def get_inputs(self) -> Sequence[Any]:
        """Those of the encoder, and the decoder's tokens."""
        return [*self.encoder.get_inputs(), TensorSpec(DECODER_IDS, "int64", [-1, -1])]

    def get_outputs(self) -> Sequence[Any]:
        """The logits."""
        return [value for value in self.decoder.get_outputs() if value.name == "logits"]

    def run(self, outputs: Sequence[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
        """[Logits (batch, tokens, vocabulary)] of a decoder's int64 tokens (batch, tokens), padded on the right, behind an
        encoder's inputs (batch, length)."""
        ids = feeds[DECODER_IDS]
        return [self.started(feeds["input_ids"], feeds["attention_mask"])(ids, np.ones_like(ids))]

    def started(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> Decoder:
        """The decoder of one batch behind int64 texts (batch, length)."""
        return Decoder(self.decoder, len(input_ids), encode(self.encoder, input_ids, attention_mask))


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
        self.mask, self.placed = np.zeros((rows, 0), np.int64), "position_ids" in inputs
        self.masked = "attention_mask" in inputs

    def __call__(self, input_ids: np.ndarray, attention_mask: np.ndarray) -> np.ndarray:
        """Logits (batch, tokens, vocabulary) of int64 ids (batch, tokens); the mask is 0 where there is no token."""
        self.mask = np.concatenate([self.mask, attention_mask], axis=1)
        feeds = {"input_ids": _value(input_ids), **self.source, **self.past}
        if self.masked:
            feeds["attention_mask"] = _value(self.mask)
        if self.placed:
            feeds["position_ids"] = _value(positions_of(self.mask)[:, -input_ids.shape[1] :])
        logits, *present = self.session.run_with_ort_values(self.names, feeds)
        self.past = {f"{PAST}{name.removeprefix(PRESENT)}": value for name, value in zip(self.names[1:], present, strict=True)}
        return logits.numpy()


def begun(
    live: Live, input_ids: np.ndarray, attention_mask: np.ndarray, first: np.ndarray
) -> tuple[Decoder, np.ndarray, np.ndarray]:
    """The decoder of one batch of texts (batch, length), and the tokens that it takes first, with their mask: the texts, or
    `first` (batch, tokens) behind an encoder, which takes the texts."""
    if isinstance(live, EncoderDecoder):
        return live.started(input_ids, attention_mask), first, np.ones_like(first)
    return Decoder(live, len(input_ids)), input_ids, attention_mask


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
