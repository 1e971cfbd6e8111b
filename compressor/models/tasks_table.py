"""The tasks whose models are read: the Hub's word for each, its Auto class, and what exports and peft call it.

Which of them the models of an architecture have is asked here, too. optimum's `TasksManager` maps model classes to tasks and
tasks to Auto classes; only this module uses it. It loads torch and transformers, so it is imported only when a model is needed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import UserError

if TYPE_CHECKING:
    from compressor.models.architectures import Architecture


@dataclass(frozen=True)
class HeadTask:
    """A task by the Hub's word. `auto_class` is what files of this project store, `kind` what export.json says, `peft` what
    adapter_config.json does."""

    name: str
    auto_class: str
    kind: str
    peft: str


HEAD_TASKS = (
    HeadTask("text-classification", "AutoModelForSequenceClassification", "sequence classification", "SEQ_CLS"),
    HeadTask("token-classification", "AutoModelForTokenClassification", "token classification", "TOKEN_CLS"),
    HeadTask("text-generation", "AutoModelForCausalLM", "generation", "CAUSAL_LM"),
    HeadTask("text2text-generation", "AutoModelForSeq2SeqLM", "generation", "SEQ_2_SEQ_LM"),
)
BY_AUTO_CLASS = {task.auto_class: task for task in HEAD_TASKS}


def require_head(row: Architecture, auto_class: str, folder: Path) -> None:
    """Raise UserError E309 where an architecture, that of the model in `folder`, has no head of an Auto class."""
    task = BY_AUTO_CLASS[auto_class].name
    if task == "token-classification" and not row.bidirectional:
        what = f"a '{row.model_type}' has no token-classification head here"
        raise UserError("E309", what, "Use an encoder, such as a BERT", str(folder))
    if task == "text-generation" and not row.head_on_tokens:
        what = f"a '{row.model_type}' is not trained to generate here"
        fix = "Say kind: text2text" if row.has_decoder else "Use a decoder: a GPT-2, a Llama or a Qwen3"
        raise UserError("E309", what, fix, str(folder))
    if task == "text2text-generation" and not row.has_decoder:
        what = f"a '{row.model_type}' has no decoder behind an encoder, as a task of kind text2text needs"
        raise UserError("E309", what, "Use a T5; a GPT-2, a Llama or a Qwen3 is for kind: generation", str(folder))


def auto_model_of(task: HeadTask) -> type:
    """The Auto class of a task."""
    from optimum.exporters.tasks import TasksManager

    return TasksManager.get_model_class_for_task(task.name, framework="pt")


def task_of_class(model_class: type) -> HeadTask | None:
    """The task of a model class, or of the stock class that it extends; None for any other class."""
    return next(filter(None, map(_task_of_stock, model_class.__mro__)), None)


@functools.cache
def _task_of_stock(model_class: type) -> HeadTask | None:
    from optimum.exporters.tasks import TasksManager

    try:
        name = TasksManager.infer_task_from_model(model_class)
    except ValueError:  # not a model class of transformers
        return None
    return next((task for task in HEAD_TASKS if task.name == name), None)
