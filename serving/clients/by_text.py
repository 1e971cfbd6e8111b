"""Predictions by a served model that takes texts: neither a tokenizer nor files of the repository are needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from serving.client import Client, Refusal
from serving.clients.text_bytes import Text, as_utf8, batches, encoded
from serving.layout.text_outputs import PAIR, TASK, TEXT

if TYPE_CHECKING:
    from compressor.tasks.kinds.classification import Prediction
    from compressor.tasks.kinds.multilabel import LabelsFound
    from compressor.tasks.kinds.regression import Estimate
    from compressor.tasks.kinds.spans import Answer
    from compressor.tasks.kinds.tokens import Tagged

MATCH = "MATCH"
"""The score of a pair, of a model for multiple choice."""
Outputs = Mapping[str, np.ndarray]
ROW = re.compile(r"(?:\[.*?\] )?(?:[a-z ]+ error: )?row (\d+): (.*)", re.DOTALL)
"""A refusal, or a failure, that names a row of the request."""
NO_TASK = re.compile(r"no task .* in this version; it has (.*)", re.DOTALL)
"""A refusal because of the task, which all rows of a request have in common."""


class TextPredictor:
    """The predictions of one model, for texts of any number."""

    def __init__(self, client: Client, model: str, config: Mapping[str, Any], task: str | None = None):
        """`task` is the name of one for a model of many. Raises UserError E716 for a model with outputs that are not known
        here, E778 where a task is missing, or given to a model that has only one."""
        self.client, self.model, self.task = client, model, task
        self.inputs = [tensor["name"] for tensor in config["input"]]
        check_task(model, task, TASK in self.inputs)
        self.size = config["max_batch_size"]
        outputs = {tensor["name"] for tensor in config["output"]}
        self.of_choices = MATCH in outputs
        self.read = next((read for output, read in READERS.items() if output in outputs), None)
        self.name = config.get("parameters", {}).get("label", {}).get("string_value", "")
        if self.read is None:
            what = f"model '{model}' gives {', '.join(sorted(outputs))}, which is not known here"
            raise UserError("E716", what, f"Deploy one that gives {', '.join(READERS)}, or use Client.infer")

    def __call__(self, texts: Sequence[Text], first: int = 0) -> list[Prediction] | list[Estimate] | list[Tagged]:
        """One prediction per text, in order; `first` is the number of the first one in errors, from 0.

        Raises UserError E717 for a text that cannot be predicted, E778 for a task that the model does not have, E715.
        """
        # each task of many may read one text or two
        pairs = isinstance(texts[0], tuple) if self.task is not None and texts else PAIR in self.inputs
        predictions = []
        for batch in batches(encoded(texts, pairs, self.model, first), self.size or len(texts)):
            features = {name: batch[:, [place]] for place, name in enumerate((TEXT, PAIR)[: 1 + pairs])}
            if self.task is not None:
                features[TASK] = np.full((len(batch), 1), as_utf8(self.task, 0), dtype=object)
            try:
                outputs = self.client.infer(self.model, features)
            except Refusal as refusal:
                done = len(predictions)
                raise self._refused(refusal, texts[done : done + len(batch)], first + done) from refusal
            predictions += [
                self.read(self.name, {key: array[row] for key, array in outputs.items()}) for row in range(len(batch))
            ]
        return predictions

    def _refused(self, refusal: Refusal, batch: Sequence[Text], first: int) -> UserError:
        if self.task is not None and (unknown := NO_TASK.search(refusal.reason)):
            what = f"model '{self.model}' has no task {self.task!r:.80}; it has {unknown[1]}"
            return UserError("E778", what, "Name one of them with --task")
        return of_a_text(refusal, batch, first)


def of_a_text(refusal: Refusal, batch: Sequence[Text], first: int) -> UserError:
    """E717 with the text, for a refusal or a failure because of one of a batch; else the refusal itself. A refusal of one text
    names no row; a failure that names none need not be because of it."""
    named = ROW.fullmatch(refusal.reason)
    if named is None and (not refusal.wrong or len(batch) > 1):
        return refusal
    row, reason = (int(named[1]), named[2]) if named else (0, refusal.reason)
    fix = "Correct it, or leave it out" if refusal.wrong else "Leave it out; see the server's log"
    return UserError("E717", f"text {first + row + 1}, {batch[row]!r:.60}: {reason}", fix)


def check_task(model: str, task: str | None, many: bool) -> None:
    """Raises UserError E778 where a task is missing, or given to a model that does not have `many`."""
    if many and task is None:
        raise UserError("E778", f"model '{model}' has many tasks", "Name one of them with --task")
    if task is not None and not many:
        raise UserError("E778", f"model '{model}' has one task only, or takes no texts", "Leave out --task")


def read_classes(_name: str, row: Outputs) -> Prediction:
    from compressor.tasks.kinds.classification import Prediction

    scores = zip((label.decode() for label in row["LABELS"]), row["SCORES"].tolist(), strict=True)
    # in a model of many tasks, the outputs that only other tasks have are without a name
    return Prediction(row["LABEL"][0].decode(), {label: score for label, score in scores if label})


def read_number(name: str, row: Outputs) -> Estimate:
    from compressor.tasks.kinds.regression import Estimate

    return Estimate(name, float(row["VALUE"][0]))


def read_entities(_name: str, row: Outputs) -> Tagged:
    from compressor.tasks.kinds.tokens import Tagged

    words = json.loads(row["ENTITIES"][0])
    return Tagged(tuple(word["text"] for word in words), tuple(word["tag"] for word in words))


def read_labels(_name: str, row: Outputs) -> LabelsFound:
    from compressor.tasks.kinds.multilabel import LabelsFound

    names = [label.decode() for label in row["LABELS"]]
    return LabelsFound(tuple(json.loads(row["PREDICTED"][0])), dict(zip(names, row["SCORES"].tolist(), strict=True)))


def read_answer(_name: str, row: Outputs) -> Answer:
    from compressor.tasks.kinds.spans import Answer

    return Answer(row["ANSWER"][0].decode(), *row["SPAN"].tolist(), float(row["SCORE"][0]))


READERS: dict[str, Callable[[str, Outputs], Any]] = {
    "LABEL": read_classes,
    "VALUE": read_number,
    "ENTITIES": read_entities,
    "PREDICTED": read_labels,
    "ANSWER": read_answer,
    MATCH: lambda _name, row: float(row[MATCH][0]),
}
"""An output that only one kind of task has -> its prediction, from the label's name and one row of all outputs."""
