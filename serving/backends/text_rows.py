"""Texts -> tokens -> logits -> answers, for the rows of all requests that arrived together; a wrong row is refused alone.

The server copies this file into the backend's folder, so it imports nothing of this project but the files beside it.
"""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

import numpy as np
from door import ENCODING_FIELDS, TASK_NUMBER, Refused, cut_end
from sub_batches import sub_batches
from text_answers import FORMATS
from text_tasks import task_number

# the instances of a model share the cores, with one thread each for what the runtime does not compute
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
from tokenizers import Tokenizer

MOST_BYTES = 2**20
"""Largest text, and of several those tokenized at a time: tokenizing takes about a hundred times the memory of the text."""
GENERATED = ("generation", "text2text")
"""The kinds of tasks of models that write texts."""
CHARACTERS = 32
"""Characters for each token that a model reads, several times as many as usual: the rest of a text may be left out."""
SPACE = re.compile(r"[ \t\n\r]")


@dataclass
class Row:
    """One text, or pair of texts, of a request; `text` is the first one. `places` are the first tokens of its words, `task` the
    number of its task in a model of many."""

    text: str
    written: str | tuple[str, str]
    size: int
    task: int | None = None
    encoding: Any = None
    places: list[int] = field(default_factory=list)


class NotFinite(ValueError):
    """A row for which the model computes numbers that are not finite."""


class TextModel:
    """The tokenizer of a version, and its answers to rows of text."""

    def __init__(self, version, facts, engine, inputs, most_tokens):
        """`inputs` are {name: numpy type} of the model file. Raises ValueError for a version that it cannot serve."""
        if facts.get("task") not in FORMATS:
            raise ValueError(f"serving.json is missing or of the task '{facts.get('task')}', not one of {', '.join(FORMATS)}")
        self.tasks = facts.get("tasks") or []
        if unknown := set(inputs) - set(ENCODING_FIELDS) - ({TASK_NUMBER} if self.tasks else set()):
            raise ValueError(f"the model expects an input '{min(unknown)}', which a tokenizer does not produce")
        self.facts, self.engine, self.inputs, self.most_tokens = facts, engine, inputs, most_tokens
        self.format = FORMATS[facts["task"]]
        self.pool = ThreadPoolExecutor(engine.streams) if engine.streams > 1 else None
        self.tokenizer = open_tokenizer(version / "tokenizer" / "tokenizer.json", facts)
        # no answer needs the characters of tokens but that about words
        self.encode_batch = self.tokenizer.encode_batch if self.format.offsets else self.tokenizer.encode_batch_fast
        # by the number of texts of a row
        frames = {count: self.tokenizer.encode(*["a"] * count) for count in ((1, 2) if self.tasks else (1 + facts["pair"],))}
        self.ends = {count: frame.ids.count(facts["end_id"]) for count, frame in frames.items()}

    def row(self, cells, task=None):
        """A row from the bytes of its text, or of both texts, and of the name of its task. Raises Refused."""
        texts = [text_of(cell) for cell in cells]
        written = [self.format.written(text) for text in texts]
        number = None if task is None else task_number(self.facts, task)
        return Row(texts[0], written[0] if len(written) == 1 else tuple(written), sum(map(len, cells)), number)

    def tokenize(self, rows):
        """Give every row its encoding; returns the errors of those that cannot have one, by row number."""
        errors = {}
        for batch in parts(rows, MOST_BYTES):
            errors |= self._encoded(rows, batch)
        for number, row in enumerate(rows):
            try:
                if number not in errors:
                    self.check(row)
            except Refused as error:
                errors[number] = forgotten(error)
        return errors

    def check(self, row):
        """Raises Refused for a row whose tokens the model cannot read."""
        if not row.encoding.ids:
            raise Refused("the tokenizer produces no token for the text")
        ends = self.ends[1 if isinstance(row.written, str) else 2]
        if self.facts["end_id"] is not None and row.encoding.ids.count(self.facts["end_id"]) != ends:
            end = self.tokenizer.id_to_token(self.facts["end_id"])
            raise Refused(f"the text holds '{end}', the token that the task head reads")
        self.format.check(row)

    def answers(self, rows):
        """The outputs {name: array (1, values)} of every tokenized row, in order, or the runtime's error."""
        batches = sub_batches([len(row.encoding.ids) for row in rows], self.most_tokens, self.engine.streams)
        # one alone is not worth the way to another thread
        each = self.pool.map if self.pool and len(batches) > 1 else map
        found = each(self.computed, [[rows[number] for number in batch] for batch in batches])
        answers = dict(zip(chain(*batches), chain.from_iterable(found), strict=True))
        return [answers[number] for number in range(len(rows))]

    def computed(self, rows):
        """The outputs of rows in one run, or the runtime's error for each of them; NotFinite for a row that has no answer."""
        try:
            (logits,) = self.engine.infer(["logits"], self.features(rows))
            logits = logits.astype(np.float64)
            answered = self.answered(rows, logits)
            outputs = self.format.answer(self.facts, logits[answered], [rows[place] for place in answered])
        except Exception as error:  # a runtime raises many types; each becomes an error response
            return [forgotten(error)] * len(rows)
        found = [NotFinite("the model's outputs are not finite")] * len(rows)
        for number, place in enumerate(answered):
            found[place] = {name: values[number : number + 1] for name, values in outputs.items()}
        return found

    def answered(self, rows, logits):
        """The places of the rows whose logits are finite, as far as an answer is made of them: of others the likeliest label
        would be any one."""
        if np.isfinite(logits).all():
            return list(range(len(rows)))
        read = (self.format.read(self.facts, row, values) for row, values in zip(rows, logits, strict=True))
        return [place for place, values in enumerate(read) if np.isfinite(values).all()]

    def features(self, rows):
        """The model's inputs, arrays (rows, longest), right-padded: input_ids with `pad_id`, everything else with 0."""
        length = max(len(row.encoding.ids) for row in rows)
        features = {}
        for name, type_ in self.inputs.items():
            if name == TASK_NUMBER:
                features[name] = np.array([row.task for row in rows], dtype=type_)
                continue
            filler = self.facts["pad_id"] if name == "input_ids" else 0
            features[name] = array = np.full((len(rows), length), filler, dtype=type_)
            for values, row in zip(array, rows, strict=True):
                values[: len(row.encoding.ids)] = getattr(row.encoding, ENCODING_FIELDS[name])
        return features

    def _encodings(self, texts):
        """The encodings of texts, or of pairs of texts."""
        return self.encode_batch([self._short(text) for text in texts])

    def _short(self, written):
        """A text, or both of a pair, without the rest that is not read."""
        if isinstance(written, str):
            return self.shortened(written)
        first, second = written
        return self.shortened(first, second), self.shortened(second, first)

    def shortened(self, text, other=""):
        """The beginning of a long text, if that alone makes more tokens than the model reads: the others would be dropped.

        It ends before a space: no token there depends on what follows. In a pair the `other` text must make fewer: where the
        room is odd, the longer one keeps a token more, and stays the longer one.
        """
        if self.tokenizer.truncation["direction"] == "left":  # the end of the text is what is read
            return text
        end = self.facts["max_length"] * CHARACTERS
        space = SPACE.search(text, end, 2 * end)
        if space is None or len(other) > end or self._overflows(other) or not self._overflows(text[: space.start()]):
            return text
        return text[: space.start()]

    def _overflows(self, text):
        """Whether a text alone makes more tokens than the model reads."""
        return bool(self.tokenizer.encode(text).overflowing)

    def _encoded(self, rows, batch):
        """Tokenize the rows of these numbers together, or one by one where that fails; returns the errors."""
        try:
            for number, encoding in zip(batch, self._encodings([rows[number].written for number in batch]), strict=True):
                rows[number].encoding = encoding
        except BaseException as error:  # a panic of the tokenizer is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            if len(batch) == 1:
                return {batch[0]: RuntimeError(f"the tokenizer failed: {error}")}
            return {number: error for one in batch for number, error in self._encoded(rows, [one]).items()}
        return {}


def forgotten(error):
    """The error without the frames it was raised in: they would keep Triton's requests beyond the life of their shared memory,
    and the stub would crash when it frees them at its end."""
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None)


def open_tokenizer(path, facts):
    """The tokenizer of a version: it truncates at `max_length`, pads nothing, and reads special tokens in a text as text; in a
    prompt that is to be continued they are those of its template, as in training."""
    tokenizer = Tokenizer.from_file(str(path))
    end = cut_end(tokenizer, path.parent)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.enable_truncation(facts["max_length"], direction=end)
    tokenizer.encode_special_tokens = facts["task"] not in GENERATED
    return tokenizer


def text_of(cell):
    """The text of a BYTES element. Raises Refused."""
    if len(cell) > MOST_BYTES:
        raise Refused(f"a text of {len(cell):,} bytes, at most {MOST_BYTES:,} are read")
    try:
        return cell.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(f"the text is not UTF-8: byte {error.start} is {cell[error.start]:#04x}") from None


def parts(rows, most_bytes):
    """Consecutive row numbers in batches of at most so many bytes of text, or one row."""
    ends = np.cumsum([row.size for row in rows]) // max(most_bytes, 1)
    cuts = [0, *(number for number in range(1, len(rows)) if ends[number] != ends[number - 1]), len(rows)]
    return [range(start, end) for start, end in pairwise(cuts) if end > start]


def read_inputs(engine_inputs):
    """{name: numpy type} of a model file's inputs, from Triton's names of types."""
    return {name: np.dtype(type_.removeprefix("TYPE_").lower()) for name, type_ in engine_inputs.items()}
