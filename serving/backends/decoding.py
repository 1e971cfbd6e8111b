"""Text generation, token by token, for many requests at a time: each joins the batch when it comes, and leaves at its end.

`Batch` holds the key and value cache of all rows; shorter ones are padded on the left and masked. The server copies this file
into the backend's folder, so it imports nothing of this project.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort
from tokenizers.decoders import DecodeStream

PAST, PRESENT = "past_key_values.", "present."
END, STOP, LENGTH = "end", "stop", "length"
"""Why a text ended: the model's own end, a stop word, or the most tokens."""
REFUSED_BY_STREAM = "Invalid prefix encountered"


@dataclass
class Settings:
    """How a text is continued. `temperature` 0 takes the likeliest token; else one is drawn, among the `top_k` likeliest (0:
    all) and the fewest that have `top_p` of the probability together."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    def __post_init__(self):
        self.random = np.random.default_rng(self.seed)

    def choose(self, logits):
        """The next token from logits (vocabulary,)."""
        if self.temperature == 0:
            return int(logits.argmax())
        order = np.argsort(-logits, kind="stable")[: self.top_k or None]
        scaled = logits[order].astype(np.float64) / self.temperature
        weights = np.exp(scaled - scaled.max())
        weights /= weights.sum()
        kept = int(np.searchsorted(weights.cumsum(), self.top_p)) + 1
        weights = weights[:kept] / weights[:kept].sum()
        return int(order[self.random.choice(len(weights), p=weights)])


@dataclass
class Text:
    """The text of one request as its tokens come; what could still become a stop word is held back."""

    tokenizer: Any
    settings: Settings
    ends: frozenset
    held: str = ""
    tokens: int = 0
    finish: str = ""
    decoder: Any = field(default_factory=lambda: DecodeStream(skip_special_tokens=True))
    last: int | None = None

    def add(self, token):
        """The text that is certain after this token; `finish` is set with the last one."""
        self.tokens += 1
        if token in self.ends:
            return self.end(END)
        self.held += self.decoded(token)
        places = [place for stop in self.settings.stop if (place := self.held.find(stop)) >= 0]
        if places:
            self.held = self.held[: min(places)]
            return self.end(STOP)
        if self.tokens >= self.settings.max_tokens:
            return self.end(LENGTH)
        keep = max((overlap(self.held, stop) for stop in self.settings.stop), default=0)
        certain, self.held = self.held[: len(self.held) - keep], self.held[len(self.held) - keep :]
        return certain

    def decoded(self, token):
        """What a token adds to the text.

        A stream refuses a token by which earlier text, already sent, would be decoded otherwise: with bytes as tokens, what
        follows a character that stays incomplete. Another stream then goes on behind the last token.
        """
        before, self.last = self.last, token
        try:
            return self.decoder.step(self.tokenizer, token) or ""
        except Exception as error:  # tokenizers raises no type of its own
            if not str(error).startswith(REFUSED_BY_STREAM):
                raise
        self.decoder = DecodeStream(ids=[before], skip_special_tokens=True)
        return self.decoder.step(self.tokenizer, token) or ""

    def end(self, why):
        """The rest of the text."""
        self.finish, rest, self.held = why, self.held, ""
        return rest


def prompt_ids(tokenizer, prompt):
    """The tokens of a text that is to be continued."""
    return not_ended(tokenizer.encode(prompt))


def not_ended(encoding):
    """The tokens of an encoded text without the special ones that the tokenizer appends, which end a text."""
    ids, offsets = encoding.ids, encoding.offsets
    while offsets and offsets[-1] == (0, 0):
        ids, offsets = ids[:-1], offsets[:-1]
    return ids


def overlap(text, stop):
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


class Batch:
    """The rows that are being generated, each with its text and its cache, over one session of a decoder."""

    def __init__(self, session):
        self.session = session
        self.names = [value.name for value in session.get_outputs()]
        inputs = {value.name: value for value in session.get_inputs()}
        self.masked, self.placed = "attention_mask" in inputs, "position_ids" in inputs
        self.shapes = {name: (value.shape[1], value.shape[3]) for name, value in inputs.items() if name.startswith(PAST)}
        self.rows, self.tokens = [], []
        self.past, self.mask = self._empty(0), np.zeros((0, 0), np.int64)

    def _empty(self, rows):
        return {name: value(np.zeros((rows, heads, 0, width), np.float32)) for name, (heads, width) in self.shapes.items()}

    def join(self, row, ids):
        """Compute a prompt, and add its row; returns its first token."""
        mask = np.ones((1, len(ids)), np.int64)
        logits, past = self._run(np.array([ids], np.int64), mask, self._empty(1))
        token = row.settings.choose(logits[0, -1])
        self._merge(past, mask)
        self.rows.append(row)
        self.tokens.append(token)
        return token

    def step(self):
        """The next token of every row."""
        mask = np.concatenate([self.mask, np.ones((len(self.rows), 1), np.int64)], axis=1)
        logits, self.past = self._run(np.array(self.tokens, np.int64)[:, None], mask, self.past)
        self.mask = mask
        self.tokens = [row.settings.choose(values) for row, values in zip(self.rows, logits[:, -1], strict=True)]
        return self.tokens

    def leave(self, gone):
        """Remove these rows (their numbers), and columns that no row needs any more."""
        kept = [number for number in range(len(self.rows)) if number not in gone]
        self.rows, self.tokens = ([values[number] for number in kept] for values in (self.rows, self.tokens))
        mask = self.mask[kept]
        first = int(mask.any(axis=0).argmax()) if len(kept) else mask.shape[1]
        self.mask = mask[:, first:]
        self.past = {name: value(array.numpy()[kept][:, :, first:]) for name, array in self.past.items()}

    def _merge(self, past, mask):
        """Put one more row behind the others; the shorter side is padded on the left."""
        length = max(self.mask.shape[1], mask.shape[1])
        mine, other = length - self.mask.shape[1], length - mask.shape[1]
        self.mask = np.concatenate([left(self.mask, mine, 1), left(mask, other, 1)])
        self.past = {
            name: value(np.concatenate([left(array.numpy(), mine, 2), left(past[name].numpy(), other, 2)]))
            for name, array in self.past.items()
        }

    def _run(self, ids, mask, past):
        """Logits (rows, tokens, vocabulary), and the cache behind them."""
        feeds = {"input_ids": value(ids), **past}
        if self.masked:
            feeds["attention_mask"] = value(mask)
        if self.placed:  # a position is the number of tokens before it, wherever the padding is
            feeds["position_ids"] = value(np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :])
        logits, *present = self.session.run_with_ort_values(self.names, feeds)
        named = zip(self.names[1:], present, strict=True)
        return logits.numpy(), {f"{PAST}{name.removeprefix(PRESENT)}": array for name, array in named}


def left(array, count, axis):
    """An array with `count` zeros before it along an axis."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (count, 0)
    return np.pad(array, widths) if count else array


def value(array):
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
