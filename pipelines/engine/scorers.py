"""What the scores of generated texts depend on besides their task: part of fingerprints."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from compressor.tasks import TaskConfig
from compressor.tasks.decoding.answer_extraction import READING
from compressor.tasks.decoding.decode_config import NUMBER, PACKAGES
from compressor.tasks.decoding.text_metrics import ROUGE_TOKENS
from pipelines.engine.environment import distribution


def scored_by(tasks: Iterable[TaskConfig]) -> dict[str, Any]:
    """What scores of generated texts depend on besides their task: versions of the packages that compute them, how numbers are
    read, and how texts are cut for ROUGE. Empty where no texts are generated."""
    decodes = [task.decode for task in tasks if task.decode is not None]
    packages = sorted({package for decode in decodes for metric in decode.metrics for package in PACKAGES[metric]})
    numbers = {NUMBER: READING} if any(decode.answer == NUMBER for decode in decodes) else {}
    tokens = {"rouge_tokens": ROUGE_TOKENS} if "rouge_score" in packages else {}
    return {**{name: distribution(name) for name in packages}, **numbers, **tokens}
