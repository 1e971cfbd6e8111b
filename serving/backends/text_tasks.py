"""Many tasks in one model that takes texts: which task a row is of, and its answer with the labels of that task.

The server copies this file into the backend's folder, so it imports nothing of this project but the files beside it.
"""

import numpy as np
from door import Refused


def task_number(facts, cell):
    """The number of a task in a version's serving.json by the bytes of its name. Raises Refused."""
    names = [task["name"] for task in facts["tasks"]]
    name = bytes(cell).decode("utf-8", "replace")
    if name not in names:
        raise Refused(f"no task {name!r:.80} in this version; it has {', '.join(names):.1000}")
    return names.index(name)


def labels_of(facts, row):
    """The names of the outputs for a row: those of its task where the model has many."""
    return facts["labels"] if row.task is None else facts["tasks"][row.task]["labels"]


def of_its_task(facts, row, logits):
    """The logits of a row's task, from (most outputs,): those behind them are of no label."""
    return logits[: len(labels_of(facts, row))]


def of_any_kind(facts, logits, rows):
    """The most likely label and all probabilities, or the number under its name, as each row's task has it.

    `logits` are (rows, most outputs); SCORES and LABELS are filled with 0 and empty names beyond the outputs of a row's task.
    """
    most = logits.shape[1]
    answers = {"LABEL": [], "SCORE": [], "SCORES": [], "LABELS": []}
    for row, values in zip(rows, logits, strict=True):
        names = labels_of(facts, row)
        values = of_its_task(facts, row, values)
        scores = values if facts["tasks"][row.task]["kind"] == "regression" else softmax(values)
        best = int(scores.argmax())
        more = most - len(names)
        answers["LABEL"].append([names[best].encode()])
        answers["SCORE"].append([scores[best]])
        answers["SCORES"].append(np.pad(scores, (0, more)))
        answers["LABELS"].append([*(name.encode() for name in names), *[b""] * more])
    types = {"LABEL": object, "SCORE": np.float32, "SCORES": np.float32, "LABELS": object}
    return {name: np.array(rows_of, dtype=types[name]) for name, rows_of in answers.items()}


def softmax(logits):
    """Probabilities of classes from logits (classes,)."""
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()
