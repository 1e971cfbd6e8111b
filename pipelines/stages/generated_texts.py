"""Scoring by decoding: texts that a stage's model generates for the prompts of a file, where the task has `decode`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from compressor.tasks.data import Data, TokenRows, task_tokenizer
from compressor.tasks.decoding.generate_texts import generate_texts
from compressor.tasks.decoding.text_metrics import TEXT_METRICS
from compressor.tasks.decoding.text_quality import ScoredTexts, score_texts
from compressor.tasks.task_kind import Metric
from pipelines.engine.stage import TASKS, TEXTS, Inputs, Workspace
from pipelines.reporting.format import scaled


def with_texts(
    published: dict[str, Any], model: nn.Module, inputs: Inputs, data: Data, workspace: Workspace, task: str = ""
) -> dict[str, Any]:
    """A model's metadata with the scores of the texts it generates: in `quality` and, with intervals and examples, in
    `generated`. Writes the texts into the artifact; `task` names one of many. Unchanged where the task has no `decode`."""
    if inputs.task.decode is None:
        return published
    scored = score_model(model, data.validation, inputs, data, workspace)
    scored.write(workspace.folder / (f"{TASKS}/{task}.{TEXTS}" if task else TEXTS))
    record = scored.record
    shown = (f"{TEXT_METRICS[key].name} {value_in_words(key, value)}" for key, value in record["values"].items())
    of_task = f"{task}: " if task else ""
    workspace.say(f"{of_task}{len(scored.texts):,} generated texts: {', '.join(shown)}")
    return {**published, "quality": with_scores(published["quality"], record, data.kind.metric), "generated": record}


def score_model(
    model: nn.Module, rows: TokenRows, inputs: Inputs, data: Data, workspace: Workspace, what: str = "generating"
) -> ScoredTexts:
    """The texts that a model generates for the prompts of a file, with their scores. Shows a bar for each of the two."""
    config, tokenizer = inputs.task.decode, task_tokenizer(inputs.base.folder, data.kind)
    with workspace.progress(what, len(rows.items)) as bar:
        texts = generate_texts(model, tokenizer, rows.prompts, config, data.pad_id, bar.advance)
    with workspace.progress("scoring the texts", len(rows.items) * len(config.metrics)) as bar:
        return score_texts(rows.items, texts, config, bar.advance)


def with_scores(quality: dict[str, Any], record: dict[str, Any], metric: Metric) -> dict[str, Any]:
    """The metrics of outputs and those of texts (`ScoredTexts.record`). If the main metric is of texts it comes first, and the
    interval and the number of `rows` are its own, over prompts."""
    values = {**quality, **record["values"]}
    if not metric.of_texts:
        return values
    own = {"interval": record["intervals"][metric.key], "rows": record["prompts"]}
    others = {key: value for key, value in values.items() if key not in (metric.key, *own)}
    return {metric.key: values[metric.key], "interval": own["interval"], **others, "rows": own["rows"]}


def main_score(inputs: Inputs, data: Data) -> Callable[[nn.Module], float]:
    """The measure of a model by a main metric of texts, generated for the validation prompts."""
    metric, rows, tokenizer = data.kind.metric, data.validation, task_tokenizer(inputs.base.folder, data.kind)
    config = inputs.task.decode.model_copy(update={"metrics": [metric.key]})

    def measure(model: nn.Module) -> float:
        texts = generate_texts(model, tokenizer, rows.prompts, config, data.pad_id)
        return score_texts(rows.items, texts, config).values[metric.key]

    return measure


def value_in_words(key: str, value: float) -> str:
    """A metric as libraries and papers print it: BLEU 0.6841 -> '68.4', NIST 8.623 -> '8.62'."""
    return scaled(value, TEXT_METRICS[key].scale)
