"""Scoring by decoding: texts that a stage's model generates for the validation prompts, where the task has `decode`."""

from __future__ import annotations

from typing import Any

from torch import nn

from compressor.tasks.data import Data, task_tokenizer
from compressor.tasks.decoding.generate_texts import generate_texts
from compressor.tasks.decoding.text_metrics import TEXT_METRICS
from compressor.tasks.decoding.text_quality import score_texts
from pipelines.engine.stage import Inputs, Workspace

TEXTS = "generated.jsonl"
"""File of an artifact with the generated texts, one line a prompt."""


def with_texts(published: dict[str, Any], model: nn.Module, inputs: Inputs, data: Data, workspace: Workspace) -> dict[str, Any]:
    """A model's metadata with the scores of the texts it generates: in `quality` and, with intervals and examples, in
    `generated`. Writes the texts into the artifact. Unchanged where the task has no `decode`."""
    config = inputs.task.decode
    if config is None:
        return published
    tokenizer = task_tokenizer(inputs.base.folder, data.kind)
    with workspace.progress("generating", len(data.items)) as bar:
        texts = generate_texts(model, tokenizer, data.prompts, config, data.pad_id, bar.advance)
    scored = score_texts(data.items, texts, config)
    scored.write(workspace.folder / TEXTS)
    record = scored.record
    shown = (f"{TEXT_METRICS[key].name} {value_in_words(key, value)}" for key, value in record["values"].items())
    workspace.say(f"{len(texts):,} generated texts: {', '.join(shown)}")
    return {**published, "quality": {**published["quality"], **record["values"]}, "generated": record}


def value_in_words(key: str, value: float) -> str:
    """A metric as libraries and papers print it: BLEU 0.6841 -> '68.4', NIST 8.623 -> '8.62'."""
    scale = TEXT_METRICS[key].scale
    return f"{scale * value:.{1 if scale > 1 else 2}f}"
