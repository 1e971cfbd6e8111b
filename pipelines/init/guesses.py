"""`compress init`: guessing the kind of task and its columns from a table of rows, each guess with its reason."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from compressor.errors import UserError
from compressor.tasks import GENERATED, KINDS, ending
from compressor.tasks.kinds.classification import MANY_CLASSES, most_classes
from compressor.tasks.kinds.multilabel import cells_of
from compressor.tasks.kinds.spans import answer_pairs
from compressor.tasks.kinds.tokens import is_tag
from compressor.tasks.listing import NO_LABEL
from compressor.tasks.reading import WORD_FILES
from pipelines.init.cell_labels import LABELS_IN
from pipelines.init.column_names import LABELS, PAIRS, PROMPTS, TAGS, TEXTS, WORDS
from pipelines.init.data_files import NUMBER, DataTable
from pipelines.init.list_guesses import (
    answer_columns,
    are_tags,
    choice_columns,
    labels_of,
    list_column,
    marked_columns,
    numbers_as_text,
)

MOST_GRADES, SENTENCE = 20, 10
"""Largest number of distinct integers in a column of classes; words on average from which texts are sentences and no names."""
PYTHON_LIST = re.compile(r"""\[\s*(['"].*)?\]""", re.DOTALL)
"""A list of texts as Python, numpy and pandas write it; none as [joy] or [18-24], which may be classes."""
MOSTLY = 0.75
"""Share of the rows above which one class is most of them: accuracy then says little about the others."""


@dataclass(frozen=True)
class Guess:
    """A task's kind and columns, and the reasons."""

    kind: str
    text: tuple[str, ...]
    label: str
    why: dict[str, str]


@dataclass(frozen=True)
class DataColumn:
    """Properties of one column."""

    name: str
    values: Sequence[Any]

    @cached_property
    def texts(self) -> list[str]:
        """The column's values as text, without surrounding whitespace."""
        return ["" if value is None else str(value).strip() for value in self.values]

    @cached_property
    def distinct(self) -> list[str]:
        """The column's distinct values as they are spelt, numbers in numeric order."""
        values = sorted(set(self.texts))
        return sorted(values, key=float) if self.numbers else values

    @cached_property
    def given(self) -> DataColumn:
        """The column without its empty cells."""
        return DataColumn(self.name, [value for value, text in zip(self.values, self.texts, strict=True) if text])

    @cached_property
    def filled(self) -> bool:
        return all(self.texts) and not self.lists

    @cached_property
    def lists(self) -> bool:
        return any(isinstance(value, list | dict) for value in self.values)

    @cached_property
    def members(self) -> DataColumn:
        """The column with each text of a list as a value of its own."""
        lists = [value if isinstance(value, list) else [value] for value in self.values]
        return DataColumn(self.name, [text for texts in lists for text in texts])

    @cached_property
    def numbers(self) -> bool:
        return all(NUMBER.fullmatch(text) for text in self.texts)

    @property
    def fractions(self) -> bool:
        """Whether the values are numbers, at least one of them written with a decimal point."""
        return self.numbers and any(not text.lstrip("+-").isdigit() for text in self.texts)

    @cached_property
    def wordy(self) -> bool:
        """Whether the values have several words on average."""
        words = sum(len(text.split()) for text in self.texts) / max(len(self.texts), 1)
        return not self.lists and not self.numbers and words >= 2.5

    @property
    def free(self) -> bool:
        """Whether the values are sentences, few of which occur twice."""
        return self.wordy and 2 * len(self.distinct) > len(self.texts)

    @property
    def classes(self) -> bool:
        """Whether there are few distinct values, none of them empty, each on several rows."""
        most = min(MANY_CLASSES, max(len(self.texts) // 2, 2))
        return self.filled and not self.free and 2 <= len(self.distinct) <= most

    @property
    def many_classes(self) -> bool:
        """Whether there are so many distinct values, each on several rows, that only a column called a label holds them as
        classes: names, and no sentences."""
        count = len(self.distinct)
        words = sum(len(text.split()) for text in self.distinct) / max(count, 1)
        return self.filled and words < SENTENCE and MANY_CLASSES < count <= most_classes(count, len(self.texts))

    @property
    def counted(self) -> bool:
        """Whether the values are classes 0, 1, .. without a gap."""
        return self.classes and self.distinct == [str(number) for number in range(len(self.distinct))]

    @property
    def able(self) -> bool:
        """Whether the values may be labels whatever the column is called, as far as that tells: classes, or fractions."""
        return self.classes or (self.filled and self.fractions)

    @property
    def labels(self) -> bool:
        """Whether the values may be labels: classes, or numbers. Empty cells are passed over: reading the rows tells where."""
        given = self.given
        return given.classes or given.many_classes or (given.filled and given.numbers and len(given.distinct) > 1)

    def sample(self) -> str:
        """Some of the column's values, for a message."""
        shown = ["".join(letter if letter.isprintable() else " " for letter in text[:30]) for text in self.distinct[:4]]
        return ", ".join(shown) + (", ..." if len(self.distinct) > len(shown) else "")


def named_columns(names: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """The columns that the names of --text mean: one whose own name holds the commas between them, or for each the column of
    this name, else the only one that has white space around it."""
    if names and (joined := ",".join(names)) in columns:
        return (joined,)
    spaced = {name: [column for column in columns if column.strip() == name] for name in names}
    return tuple(spaced[name][0] if name not in columns and len(spaced[name]) == 1 else name for name in names)


def guess(table: DataTable, text: Sequence[str] = (), label: str | None = None, kind: str | None = None) -> Guess:
    """Guess the task of the rows; `text`, `label` and `kind` are the user's choices, if any.

    Raises UserError E205 (a named column does not exist), E131 (unclear what a column is for).
    """
    columns = {name: DataColumn(name, table.values(name)) for name in table.columns}
    for name in (*text, *([label] if label else ())):
        if name not in columns:
            near = difflib.get_close_matches(name, list(columns), n=1)
            fix = f"Did you mean '{near[0]}'?" if near else f"The file has: {', '.join(columns)}"
            raise UserError("E205", f"no column '{name}'", fix, str(table.path))
    given: dict[str, str] = {}
    if kind == "tokens" or (kind is None and _is_tagged(table, columns, text, label)):
        return _tagged(table, columns, text, label)
    if not (text and label):
        prompt_columns = None if label or text or kind not in (None, *GENERATED) else _prompted(columns, kind)
        if prompt_columns:
            why = f"columns called {prompt_columns[0]} and {prompt_columns[1]}"
            why_kind = "as given" if kind else why
            return Guess(
                kind or "generation", prompt_columns[:1], prompt_columns[1], {"kind": why_kind, "text": why, "label": why}
            )
    values = {name: column.values for name, column in columns.items()}
    if not text and not label and kind in (None, "spans") and (found := answer_columns(values)):
        why = f"questions, contexts and answers, as in SQuAD: {', '.join(found)}"
        return Guess("spans", found[:2], found[2], {"kind": why, "text": why, "label": why})
    if not text and not label and kind in (None, "choices") and (choices := choice_columns(values)):
        why = f"choices, and the number of the right one: {', '.join((*choices[0][1:], choices[1]))}"
        return Guess("choices", *choices, {"kind": why, "text": why, "label": why})
    if not text and not label and kind in (None, "marked") and (marked := marked_columns(values)):
        why = f"spans of a text: {', '.join(marked[0][1:])}"
        return Guess("marked", *marked, {"kind": why, "text": why, "label": why})
    lists = list_column(values) if label is None and kind in (None, "multilabel") else None
    named = _all_named(LABELS, columns)
    first = next((name for name in named if name == lists or columns[name].labels), None)
    if lists and (kind or first == lists or not (named or _may_be_offsets(lists, columns, text))):
        label, kind = lists, "multilabel"
        why = f"a column called {lists}" if lists in named else "the only column with lists of labels"
        given = {"kind": f"'{lists}' holds lists of labels", "label": why}
    label, why_label = (label, given.get("label", "as given")) if label else _label(table, columns, text, kind)
    text, why_text = (tuple(text), "as given") if text else _text(table, columns, label)
    kind, why_kind = (kind, given.get("kind", "as given")) if kind else _kind(table, columns[label].given)
    return Guess(kind, text, label, {"kind": why_kind, "text": why_text, "label": why_label})


def _may_be_offsets(name: str, columns: dict[str, DataColumn], text: Sequence[str]) -> bool:
    """Whether a column of lists of numbers, written as text, is perhaps none of labels, because another one may have them."""
    others = [column for column in columns.values() if column.name not in (name, *text)]
    return numbers_as_text(columns[name].values) and any(column.able for column in others)


def _is_tagged(table: DataTable, columns: dict[str, DataColumn], text: Sequence[str], label: str | None) -> bool:
    """Whether the rows are words with tags: a file of words, or two columns of lists, either of tags as they are spelt, or by
    their names and of equal lengths in every row; or by their names alone where nothing else is a text: reading the rows tells
    which of them is damaged."""
    if table.copy or ending(table.path) in WORD_FILES:
        return not table.copy
    lists = {name: column.values for name, column in columns.items() if all(isinstance(v, list) for v in column.values)}
    words, tags = _words_and_tags(columns, text, label)
    if words and tags and columns[words].lists and columns[tags].lists and not _other_texts(columns, words, tags):
        return True
    if words in lists and tags in lists:
        return are_tags(lists[tags]) or list(map(len, lists[words])) == list(map(len, lists[tags]))
    return not text and not label and len(lists) > 1 and any(map(are_tags, lists.values()))


def _other_texts(columns: dict[str, DataColumn], words: str, tags: str) -> bool:
    """Whether a column beside those of words and of tags may be the text."""
    plain = {name: column for name, column in columns.items() if name not in (words, tags) and not column.lists}
    return bool(_all_named(TEXTS, plain)) or any(column.wordy for column in plain.values())


def _words_and_tags(columns: dict[str, DataColumn], text: Sequence[str], label: str | None) -> tuple[str | None, str | None]:
    """The columns of words and of tags: those given, else by their names, among those with lists where there are some."""
    names = [name for name, column in columns.items() if column.lists] or list(columns)
    words = text[0] if text else _named(WORDS, names)
    return words, label or _named(TAGS, [name for name in names if name != words])


def _tagged(table: DataTable, columns: dict[str, DataColumn], text: Sequence[str], label: str | None) -> Guess:
    """Guess for words with tags. Raises UserError E131 where no column has them, or the file has no tags."""
    words, tags = _words_and_tags(columns, text, label)
    if not words or not tags:
        fix = "Name them: --text COLUMN --label COLUMN, or say what else the rows are: --kind KIND"
        raise UserError("E131", f"no columns of words and of tags among {', '.join(columns)}", fix, str(table.path))
    first = next((tag for row in columns[tags].values if isinstance(row, list) for tag in row if not is_tag(tag)), None)
    if first is not None and ending(table.path) in WORD_FILES:
        what = f"{first!r:.60} is not a tag (O, B-TYPE, I-TYPE), and a {ending(table.path)} file has a word and its tag a line"
        fix = "For a table with tabs or commas, let the name end in .tsv or .csv"
        raise UserError("E131", what, fix, str(table.path))
    why = "a word and its tag in each line" if ending(table.path) in WORD_FILES else "lists of words and of tags"
    return Guess("tokens", (words,), tags, {"kind": why, "text": why, "label": why})


def _prompted(columns: dict[str, DataColumn], kind: str | None) -> tuple[str, str] | None:
    """The columns of prompts and of target texts, unless another column has labels."""
    for pair in PROMPTS:
        both = _both(pair, columns)
        if both is None:
            continue
        labels = [name for name in _all_named(LABELS, columns) if name != both[1] and columns[name].labels]
        if (pair[0] == "prompt" or columns[both[1]].members.wordy) and (kind or not labels):
            return both
    return None


def _label(table: DataTable, columns: dict[str, DataColumn], text: Sequence[str], kind: str | None) -> tuple[str, str]:
    """The column of labels: by its name, else the only candidate. Raises UserError E131."""
    free_columns = {name: column for name, column in columns.items() if name not in text}
    for name in _all_named(LABELS, free_columns):
        if free_columns[name].labels:
            return name, f"a column called {name}"
    # without a usual name a column with empty cells is taken for something else, unless they are rows without a label
    judged = [column.given if kind == "multilabel" else column for column in free_columns.values()]
    able = [column for column in judged if column.able]
    for chosen, why in (
        (able, "the only column with few values"),
        ([candidate for candidate in able if candidate.counted], "the only column that counts 0, 1, ..."),
    ):
        if len(chosen) == 1:
            return chosen[0].name, f"{why}: {chosen[0].sample()}"
    seen = "; ".join(f"{column.name} ({column.sample()})" for column in (able or list(free_columns.values()))[:6])
    raise UserError("E131", f"which column holds the labels? {seen}", "Name it: --label COLUMN", str(table.path))


def _text(table: DataTable, columns: dict[str, DataColumn], label: str) -> tuple[tuple[str, ...], str]:
    """The column of the text, or the two columns of a pair. Raises UserError E131."""
    free_columns = {
        name: column for name, column in columns.items() if name != label and not column.lists and not column.numbers
    }
    for pair in PAIRS:
        if both := _both(pair, free_columns):
            return both, f"a pair of columns called {both[0]} and {both[1]}"
    if named := _all_named(TEXTS, free_columns):
        return (named[0],), f"a column called {named[0]}"
    free = [name for name, column in free_columns.items() if column.free]
    if len(free) == 1:
        return (free[0],), "the only column with sentences"
    if len(free) == 2:
        return (free[0], free[1]), f"two columns with sentences: a pair (one alone: --text {free[0]})"
    seen = "; ".join(f"{name} ({columns[name].sample()})" for name in (free or list(columns))[:6])
    fix = "Name it: --text COLUMN, or --text COLUMN,COLUMN for a pair"
    raise UserError("E131", f"which column holds the text? {seen}", fix, str(table.path))


def _kind(table: DataTable, label: DataColumn) -> tuple[str, str]:
    """multilabel, regression or classification, by the labels. Raises UserError E131 if they fit none."""
    if label.values and all(labels_of(value) is not None for value in label.values):
        return "multilabel", f"'{label.name}' holds lists of labels"
    written = label.distinct and not label.lists and all(map(PYTHON_LIST.fullmatch, label.distinct))
    # none is no JSON where only white space around a cell keeps the column from being lists
    if written and (first := next((text for text in label.texts if labels_of(text) is None), None)) is not None:
        what = f"column '{label.name}' holds lists as Python writes them, {first:.60}, and no JSON"
        fix = 'Write them by json.dumps, as ["joy", "love"], or as joy, love; --kind classification makes each one class'
        raise UserError("E131", what, fix, str(table.path))
    count = len(label.distinct)
    grades = sorted(set(map(float, label.distinct))) if label.numbers else []
    if label.numbers and (label.fractions or len(grades) > MOST_GRADES):
        return "regression", f"'{label.name}' holds {len(grades)} different numbers, {grades[0]:g} to {grades[-1]:g}"
    if count <= MANY_CLASSES or label.many_classes:
        more = "; if they are grades, say --kind regression" if label.numbers and count > 3 else ""
        return "classification", f"'{label.name}' holds {count} different labels: {label.sample()}{more}"
    what = f"column '{label.name}' holds {count} different texts: no classes, and no numbers"
    fix = "Name another --label, or say --kind generation if the model is to write these texts, --kind classification if not"
    raise UserError("E131", what, fix, str(table.path))


def _all_named(names: Sequence[str], columns: dict[str, DataColumn]) -> list[str]:
    """The columns with one of these names, in the order of the names, ignoring case."""
    spelt = {name.strip().lower(): name for name in columns}
    return [spelt[name] for name in names if name in spelt]


def _named(names: Sequence[str], columns: Any) -> str | None:
    return next(iter(_all_named(names, dict.fromkeys(columns))), None)


def _both(pair: tuple[str, str], columns: dict[str, DataColumn]) -> tuple[str, str] | None:
    names = _all_named(pair, columns)
    return (names[0], names[1]) if len(names) == 2 else None


def notes_on(table: DataTable, guessed: Guess, text: Sequence[str] = ()) -> list[str]:
    """What a guess leaves open: sentences that are not read, unless the user gave the columns of the `text`; a class -1;
    a class that most rows have."""
    columns = {name: DataColumn(name, table.values(name)) for name in table.columns}
    notes = []
    unread = [name for name, column in columns.items() if name not in (*guessed.text, guessed.label) and column.free]
    if unread and not text:
        pair = len(guessed.text) == 1 and KINDS[guessed.kind].most == 2
        fix = f"; --text {guessed.text[0]},{unread[0]} for a pair" if pair else ""
        notes.append(f"{', '.join(unread)} {'is' if len(unread) == 1 else 'are'} not read{fix}")
    label = columns[guessed.label]
    marks = ("-1",) if label.numbers and label.distinct[:2] == ["-1", "0"] else NO_LABEL
    for mark in (mark for mark in marks if guessed.kind == "classification" and mark in label.distinct):
        count = label.texts.count(mark)
        notes.append(
            f"{mark} in '{label.name}' is read as a class; if it marks missing labels, delete the {count} rows with it"
        )
    most, count = Counter(label.texts).most_common(1)[0]
    if guessed.kind == "classification" and count > MOSTLY * len(label.texts):
        share = f"{count / len(label.texts):.0%} of the labels are {most[:30]!r}"
        notes.append(f"{share}: accuracy says little about the others; metric: macro_f1 in the task counts all classes alike")
    return notes


READ_LISTS = {"multilabel": cells_of, "spans": answer_pairs}
"""Kinds whose label may be an empty list: a cell -> its list, None where it is none."""


def unlabelled(table: DataTable, guessed: Guess, train: DataTable) -> str | None:
    """Why a file called test can be neither scored nor used for validation: it has no labels, or some that do not occur in
    training; None if it can."""
    for name in (*guessed.text, guessed.label):
        if name not in table.columns:
            return f"it has no column '{name}'"
    column = DataColumn(guessed.label, table.values(guessed.label))
    if read := READ_LISTS.get(guessed.kind):
        lists = [read(value) for value in column.values]
        filled, varied = None not in lists, any(lists)
    else:
        filled = all(column.values) if column.lists else column.filled
        varied = column.lists or len(column.distinct) > 1
    if not filled:
        return f"labels are missing in its column '{guessed.label}'"
    if not varied:
        return f"all rows of its column '{guessed.label}' are alike"
    if (labels_in := LABELS_IN.get(guessed.kind)) is None:
        return None
    known, found = ({one for cell in rows.values(guessed.label) for one in labels_in(cell)} for rows in (train, table))
    if not found:  # of words, every one outside: shared tasks hide tags so
        return f"no row of its column '{guessed.label}' has a label"
    unknown = sorted(found - known)
    return f"its label '{unknown[0]:.60}' never occurs in training" if unknown else None
