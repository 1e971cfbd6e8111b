"""The `decode:` block of a task: how texts are generated for the validation prompts, and by which metrics they are scored."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

EXACT = "exact_match"
PACKAGES = {
    EXACT: (),
    "bleu": ("sacrebleu",),
    "chrf": ("sacrebleu",),
    "ter": ("sacrebleu",),
    # sacrebleu has the tokenizer
    "nist": ("nltk", "sacrebleu"),
    "meteor": ("nltk", "sacrebleu"),
    "rouge_1": ("rouge_score",),
    "rouge_2": ("rouge_score",),
    "rouge_l": ("rouge_score",),
}
"""The metrics of generated texts, and the packages (of the extra `metrics`) that compute each."""
NUMBER = "number"
"""The word for the last number of a text as its answer."""


class DecodeConfig(BaseModel):
    """Generate a text for each validation prompt and score it against all targets of that prompt. Nothing is sampled."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    beams: int = Field(default=1, ge=1, le=64, description="width of the beam search; 1 is greedy")
    max_new_tokens: int = Field(default=64, ge=1, le=4096, description="most tokens of a generated text")
    length_penalty: float = Field(
        default=1.0, ge=-10, le=10, description="beam search: sums of log-likelihoods are divided by length to this power"
    )
    no_repeat_ngram: int = Field(default=0, ge=0, le=100, description="no n-gram of this size occurs twice; 0: no limit")
    metrics: list[Literal[tuple(PACKAGES)]] = Field(
        default=["bleu", "rouge_l"], min_length=1, max_length=len(PACKAGES), description="the metrics of the texts"
    )
    rows: int | None = Field(default=None, ge=1, le=10**9, description="score so many prompts, evenly spread over the file")
    answer: str | None = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="exact_match compares this part of the texts: number (the last one), or the last match of a regex",
    )
    lowercase: bool = Field(default=False, description="compare texts in lower case")

    @field_validator("metrics")
    @classmethod
    def _each_once(cls, metrics: list[str]) -> list[str]:
        if len(set(metrics)) < len(metrics):
            raise ValueError("each metric at most once")
        return metrics

    @field_validator("answer")
    @classmethod
    def _a_pattern(cls, answer: str | None) -> str | None:
        try:
            pattern = re.compile(answer or "")
        except re.error as error:
            raise ValueError(f"answer is neither '{NUMBER}' nor a regular expression ({error})") from None
        if pattern.groups > 1:
            raise ValueError("a regular expression for the answer has at most one group")
        return answer

    @model_validator(mode="after")
    def _used(self) -> DecodeConfig:
        if self.answer is not None and EXACT not in self.metrics:
            raise ValueError(f"answer is used by the metric {EXACT}: add it to metrics, or remove answer")
        if self.beams == 1 and self.length_penalty != 1:
            raise ValueError("length_penalty is used with beams above 1")
        return self
