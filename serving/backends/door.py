"""Checks of a request's tokens before anything is computed: a wrong request is refused alone, and costs no computation.

The server copies this file into each backend's folder; like model.py there it imports nothing of this project.
"""

import json

import numpy as np

VERSION_FILE = "serving.json"
ENCODING_FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
"""Inputs of a model of tokens, and the fields of a tokenizer's encoding that they take."""
TOKEN_INPUTS = tuple(ENCODING_FIELDS)
TASK_NUMBER = "task"
"""Input of a model of many tasks: the number of each row's task."""


class Refused(ValueError):
    """A request that the caller must correct: Triton's INVALID_ARG, which is HTTP 400."""


def read_facts(version):
    """The serving.json of a version folder; empty for a repository of another origin, which has none."""
    path = version / VERSION_FILE
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def cut_end(tokenizer, folder):
    """The end of a long text that is cut off, "left" or "right", as in training: what transformers reads in the tokenizer's
    `folder`."""
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return settings.get("truncation_side") or (tokenizer.truncation or {}).get("direction", "right").lower()


class Door:
    """Checks arrays of tokens, {input name: array}, against what a version of a model can compute (its serving.json)."""

    def __init__(self, inputs, facts):
        self.tasks = len(facts.get("tasks") or ())
        tokens = set(inputs) - {TASK_NUMBER} if self.tasks else set(inputs)
        self.tokens = tokens <= set(TOKEN_INPUTS) and "input_ids" in tokens
        self.positions = facts.get("positions")
        # the model looks these ids up in tables: (input, number of rows)
        tables = (("input_ids", facts.get("vocabulary")), ("token_type_ids", facts.get("type_vocabulary")))
        self.tables = [(name, size) for name, size in tables if name in inputs and size]

    def check(self, feed):
        """Raises Refused for arrays that the model cannot compute. Inputs other than tokens are left to the runtime."""
        if not self.tokens:
            return
        tokens = {name: array for name, array in feed.items() if name != TASK_NUMBER}
        shapes = {array.shape for array in tokens.values()}
        if len(shapes) > 1:
            sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in tokens.items())
            raise Refused(f"the inputs differ in shape: {sizes}")
        (shape,) = shapes
        if 0 in shape:
            raise Refused(f"a batch of shape {list(shape)} holds no tokens")
        if self.positions and shape[-1] > self.positions:
            raise Refused(f"a row of {shape[-1]} tokens, this model takes at most {self.positions}")
        for name, size in self.tables:
            if (least := int(feed[name].min())) < 0 or (most := int(feed[name].max())) >= size:
                raise Refused(f"{name} holds {least if least < 0 else most}, not an id from 0 to {size - 1}")
        if "attention_mask" in feed:
            check_mask(feed["attention_mask"])
        if self.tasks:
            check_tasks(feed[TASK_NUMBER], shape[0], self.tasks)


def check_tasks(tasks, rows, count):
    """Raises Refused for numbers of tasks that are not one for each of the rows, or not of one of `count` tasks."""
    if tasks.shape != (rows,):
        raise Refused(f"{TASK_NUMBER} {list(tasks.shape)} is not one number for each of {rows} rows")
    if (least := int(tasks.min())) < 0 or (most := int(tasks.max())) >= count:
        raise Refused(f"{TASK_NUMBER} holds {least if least < 0 else most}, not a task from 0 to {count - 1}")


def check_mask(mask):
    """Raises Refused for a mask of other values than 0 and 1, and for a row without any token: attention is undefined there."""
    if not np.isin(mask, (0, 1)).all():
        raise Refused("attention_mask holds other values than 0 and 1")
    if not mask.any(axis=-1).all():
        raise Refused(f"row {int(mask.any(axis=-1).argmin())} of attention_mask is all 0")
