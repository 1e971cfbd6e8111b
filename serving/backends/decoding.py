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
MOST_LOGITS = 2**27
"""Numbers that one call may give back (512 MiB): a decoder gives those of every token of a prompt, over its vocabulary."""
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
        """The next token from logits (vocabulary,). Raises ValueError for logits that are not finite."""
        likeliest = int(logits.argmax())  # or the first NaN
        if not np.isfinite(logits[likeliest]):
            raise ValueError("the model's outputs are not finite")
        if self.temperature == 0:
            return likeliest
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
            return self._of_stream(token)
        except Exception as error:  # tokenizers raises no type of its own
            if not str(error).startswith(REFUSED_BY_STREAM):
                raise
        self.decoder = DecodeStream(ids=[before], skip_special_tokens=True)
        return self._of_stream(token)

    def _of_stream(self, token):
        """What the stream gives for a token."""
        return without_panic(self.decoder.step, self.tokenizer, token) or ""

    def end(self, why):
        """The rest of the text."""
        self.finish, rest, self.held = why, self.held, ""
        return rest


def without_panic(call, *arguments):
    """What a call of the tokenizer gives. Its panics are no Exceptions, and would end the thread: they are raised as
    RuntimeErrors, which end one request."""
    try:
        return call(*arguments)
    except BaseException as error:
        if isinstance(error, Exception | KeyboardInterrupt | SystemExit):
            raise
        raise RuntimeError(f"the tokenizer failed: {error}") from None


def prompt_ids(tokenizer, prompt):
    """The tokens of a text that is to be continued."""
    return not_ended(without_panic(tokenizer.encode, prompt))


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
    """The rows that are being generated, each with its text and its cache, over the session of a decoder.

    Behind an `encoder`, a session too, a row's tokens are its text, and the decoder begins with the token `start`.
    """

    def __init__(self, session, encoder=None, start=None):
        self.session, self.encoder, self.start = session, encoder, start
        self.names = [value.name for value in session.get_outputs()]
        vocabulary = session.get_outputs()[0].shape[-1]
        self.piece = max(MOST_LOGITS // vocabulary, 1) if isinstance(vocabulary, int) else MOST_LOGITS
        self.states = [value.name for value in encoder.get_outputs()] if encoder else []
        sources = {named_past(name) for name in self.states}
        inputs = {value.name: value for value in session.get_inputs()}
        self.masked, self.placed = "attention_mask" in inputs, "position_ids" in inputs
        shapes = {name: (value.shape[1], value.shape[3]) for name, value in inputs.items() if name.startswith(PAST)}
        self.shapes = {name: shape for name, shape in shapes.items() if name not in sources}
        self.source_shapes = {name: shapes[name] for name in sources}
        self.clear()

    def clear(self):
        """Remove every row."""
        self.rows, self.tokens = [], []
        self.past, self.mask = empty(self.shapes, 0), np.zeros((0, 0), np.int64)
        self.source, self.source_mask = empty(self.source_shapes, 0), np.zeros((0, 0), np.int64)

    def join(self, row, ids):
        """Compute a prompt, piece by piece if it is very long, or a text of the encoder, and add its row; returns its first
        token."""
        source, source_mask = self._encoded(ids)
        first = [self.start] if self.encoder else ids
        past, mask = empty(self.shapes, 1), np.ones((1, 0), np.int64)
        for start in range(0, len(first), self.piece):
            part = np.array([first[start : start + self.piece]], np.int64)
            mask = np.ones((1, start + part.shape[1]), np.int64)
            logits, past = self._run(part, mask, past, source, source_mask)
        token = row.settings.choose(logits[0, -1])
        both = joined(self.past, self.mask, past, mask)
        sources = joined(self.source, self.source_mask, source, source_mask)
        (self.past, self.mask), (self.source, self.source_mask) = both, sources  # none of them, or all
        self.rows.append(row)
        self.tokens.append(token)
        return token

    def step(self):
        """The next token of every row; in place of one that cannot be chosen its ValueError: that row must leave."""
        mask = np.concatenate([self.mask, np.ones((len(self.rows), 1), np.int64)], axis=1)
        ids = np.array(self.tokens, np.int64)[:, None]
        logits, self.past = self._run(ids, mask, self.past, self.source, self.source_mask)
        self.mask = mask
        self.tokens = [chosen(row.settings, values) for row, values in zip(self.rows, logits[:, -1], strict=True)]
        return self.tokens

    def leave(self, gone):
        """Remove these rows (their numbers), and columns that no row needs any more."""
        kept = [number for number in range(len(self.rows)) if number not in gone]
        self.rows, self.tokens = ([values[number] for number in kept] for values in (self.rows, self.tokens))
        self.past, self.mask = only(self.past, self.mask, kept)
        self.source, self.source_mask = only(self.source, self.source_mask, kept)

    def _encoded(self, ids):
        """What the encoder makes of one text, under the names of the decoder's inputs, and its mask."""
        mask = np.ones((1, len(ids) if self.encoder else 0), np.int64)
        if not self.encoder:
            return {}, mask
        feeds = {"input_ids": value(np.array([ids], np.int64)), "attention_mask": value(mask)}
        states = self.encoder.run_with_ort_values(self.states, feeds)
        return {named_past(name): state for name, state in zip(self.states, states, strict=True)}, mask

    def _run(self, ids, mask, past, source, source_mask):
        """Logits (rows, tokens, vocabulary), and the cache behind them."""
        feeds = {"input_ids": value(ids), **past, **source}
        if self.encoder:
            feeds["encoder_attention_mask"] = value(source_mask)
        if self.masked:
            feeds["attention_mask"] = value(mask)
        if self.placed:  # a position is the number of tokens before it, wherever the padding is
            feeds["position_ids"] = value(np.maximum(mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :])
        logits, *present = self.session.run_with_ort_values(self.names, feeds)
        named = zip(self.names[1:], present, strict=True)
        return logits.numpy(), {named_past(name): array for name, array in named}


def chosen(settings, logits):
    """The next token, or the ValueError where there is none."""
    try:
        return settings.choose(logits)
    except ValueError as error:
        return error


def named_past(name):
    """The decoder's input that takes an output of keys or values."""
    return f"{PAST}{name.removeprefix(PRESENT)}"


def empty(shapes, rows):
    """The cache of so many rows without a token; `shapes` are (heads, width) by name."""
    return {name: value(np.zeros((rows, heads, 0, width), np.float32)) for name, (heads, width) in shapes.items()}


def joined(cache, mask, other, other_mask):
    """The rows of one cache, then those of another, with their masks; the shorter ones are padded on the left."""
    length = max(mask.shape[1], other_mask.shape[1])
    mine, theirs = length - mask.shape[1], length - other_mask.shape[1]
    both = {
        name: value(np.concatenate([left(array.numpy(), mine, 2), left(other[name].numpy(), theirs, 2)]))
        for name, array in cache.items()
    }
    return both, np.concatenate([left(mask, mine, 1), left(other_mask, theirs, 1)])


def only(cache, mask, kept):
    """Some rows of a cache and of its mask, without the columns on the left that none of them needs."""
    mask = mask[kept]
    first = int(mask.any(axis=0).argmax()) if mask.size else mask.shape[1]
    return {name: value(array.numpy()[kept][:, :, first:]) for name, array in cache.items()}, mask[:, first:]


def left(array, count, axis):
    """An array with `count` zeros before it along an axis."""
    widths = [(0, 0)] * array.ndim
    widths[axis] = (count, 0)
    return np.pad(array, widths) if count else array


def value(array):
    return ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(array))
