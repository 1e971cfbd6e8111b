"""Generated texts with their references and scores: the metrics with intervals, examples, and figures of every item."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from compressor.tasks.decoding.answer_extraction import answer_of
from compressor.tasks.decoding.decode_config import EXACT, DecodeConfig
from compressor.tasks.decoding.prompt_items import PromptItem
from compressor.tasks.decoding.text_metrics import TEXT_METRICS, TextMetric
from compressor.tasks.metrics import difference_interval, interval

EXAMPLES = 5
"""Texts that are recorded as examples, evenly spread over the items."""
SHOWN_REFERENCES = 3
"""References of an example that are recorded."""
AT_ONCE = 16
"""Items that are scored between two steps of a bar: by TER they take some seconds."""

Statistics = dict[str, np.ndarray]
"""Figures (items, ...) of each metric, by its key: `TextMetric.statistics`."""


@dataclass(frozen=True)
class ScoredTexts:
    """The text of every item and, by metric, the figures that its scores are made of."""

    items: Sequence[PromptItem]
    texts: Sequence[str]
    statistics: Statistics

    @property
    def values(self) -> dict[str, float]:
        """Every metric over all items."""
        return {key: TEXT_METRICS[key].value(figures) for key, figures in self.statistics.items()}

    @property
    def intervals(self) -> dict[str, list[float]]:
        """The 95 % bootstrap interval of every metric, over items."""
        return {
            key: list(interval(TEXT_METRICS[key].value, figures, np.zeros(len(figures))))
            for key, figures in self.statistics.items()
        }

    @property
    def record(self) -> dict[str, Any]:
        """The metadata of the texts: their number, the metrics with intervals, examples."""
        chosen = np.linspace(0, len(self.items) - 1, min(EXAMPLES, len(self.items))).astype(int)
        return {
            "prompts": len(self.items),
            "references": sum(len(item.references) for item in self.items),
            "values": self.values,
            "intervals": self.intervals,
            "examples": [
                {
                    "prompt": self.items[place].prompt,
                    "text": self.texts[place],
                    "references": list(self.items[place].references[:SHOWN_REFERENCES]),
                }
                for place in chosen
            ],
        }

    def write(self, path: Path) -> None:
        """Write one JSON line per item: prompt, text, references, and the figures of every metric."""
        with path.open("w", encoding="utf-8") as file:
            for place, (item, text) in enumerate(zip(self.items, self.texts, strict=True)):
                figures = {key: of[place].tolist() for key, of in self.statistics.items()}
                row = {"prompt": item.prompt, "text": text, "references": item.references, "figures": figures}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


def score_texts(
    items: Sequence[PromptItem], texts: Sequence[str], config: DecodeConfig, advance: Callable[[int], None] = lambda _: None
) -> ScoredTexts:
    """Compare the text of every item with its references, by the metrics of the config. `advance` gets the number of items that
    were scored by one more metric."""
    statistics = {}
    for key in config.metrics:
        answer = config.answer if key == EXACT else None
        ours = [_compared(text, answer, config.lowercase) for text in texts]
        theirs = [[_compared(reference, answer, config.lowercase) for reference in item.references] for item in items]
        statistics[key] = _figures(TEXT_METRICS[key], ours, theirs, advance)
    return ScoredTexts(items, texts, statistics)


def _figures(metric: TextMetric, texts: list, references: list, advance: Callable[[int], None]) -> np.ndarray:
    """The metric's statistics of all items, some items at a time where they do not depend on one another."""
    step, parts = max(len(texts), 1) if metric.joint else AT_ONCE, []
    for start in range(0, len(texts), step):
        part = slice(start, start + step)
        parts.append(metric.statistics(texts[part], references[part]))
        advance(len(parts[-1]))
    return np.concatenate(parts)


def _compared(text: str, answer: str | None, lowercase: bool) -> str | None:
    """The part of a text that is compared; None for a text without an answer."""
    # the pattern of an answer may have capitals, so it is searched in the text as it is
    part = text if answer is None else answer_of(text, answer)
    return part.lower() if part and lowercase else part


def read_statistics(path: Path) -> Statistics:
    """The figures in a file that `ScoredTexts.write` wrote."""
    rows = [json.loads(line)["figures"] for line in path.read_text(encoding="utf-8").split("\n") if line]
    return {key: np.array([row[key] for row in rows]) for key in rows[0]}


def change(key: str, candidate: np.ndarray, reference: np.ndarray) -> tuple[float, tuple[float, float]]:
    """A metric's difference of two models on the same items, and its 95 % paired bootstrap interval."""
    metric = TEXT_METRICS[key]
    apart = metric.value(candidate) - metric.value(reference)
    return apart, difference_interval(metric.value, candidate, reference, np.zeros(len(candidate)))
