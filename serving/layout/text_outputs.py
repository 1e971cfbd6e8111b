"""Names in model configs, and the outputs of a model that takes texts, by kind of task.

A new kind is a row here, and one of FORMATS in serving/backends/text_answers.py, which computes them.
"""

from __future__ import annotations

LOGITS = "logits"
"""The output of a model that takes tokens."""
LABELS_FILE = "labels.txt"
TEXT_SUFFIX, TEXT_BACKEND = "-text", "compress_text"
"""A model that takes texts is called NAME-text, and runs in this backend."""
GENERATE_BACKEND = "compress_generate"
"""The backend of one that continues them."""
TEXT, PAIR = "TEXT", "PAIR"
"""Its inputs: a text, and the second one of a pair."""
TASK = "TASK"
"""Input of a model of many tasks: the name of the row's task. Among tokens it is `task`, its number."""
ANY_KIND = "tasks"
"""Kind of a model of many tasks whose outputs are classes or numbers, as each row's task has it."""

CLASSES = -1
"""In place of a number of values: as many as the model has labels."""

CLASS_OUTPUTS = (
    ("LABEL", "TYPE_STRING", 1),
    ("SCORE", "TYPE_FP32", 1),
    ("SCORES", "TYPE_FP32", CLASSES),
    ("LABELS", "TYPE_STRING", CLASSES),
)
TEXT_OUTPUTS: dict[str, tuple[tuple[str, str, int], ...]] = {
    "classification": CLASS_OUTPUTS,
    "marked": CLASS_OUTPUTS,
    "regression": (("VALUE", "TYPE_FP32", 1),),
    "tokens": (("ENTITIES", "TYPE_STRING", 1),),
    "multilabel": (
        ("PREDICTED", "TYPE_STRING", 1),
        ("SCORES", "TYPE_FP32", CLASSES),
        ("LABELS", "TYPE_STRING", CLASSES),
    ),
    "spans": (("ANSWER", "TYPE_STRING", 1), ("SPAN", "TYPE_INT64", 2), ("SCORE", "TYPE_FP32", 1)),
    "choices": (("MATCH", "TYPE_FP32", 1),),
    ANY_KIND: CLASS_OUTPUTS,
}
"""(name, type, values of a row) of every output; a row of SCORES is in the order of LABELS."""
