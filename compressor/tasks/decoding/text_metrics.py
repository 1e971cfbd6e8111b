"""Metrics of generated texts, each computed by a library: one row a metric.

Every metric is a function of summed figures of the items, such as counts of n-grams: the bootstrap resamples items without
scoring a text again.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from compressor.errors import UserError
from compressor.tasks.decoding.decode_config import EXACT, PACKAGES
from compressor.tasks.decoding.nist import nist, nist_statistics

Texts = Sequence[str]
References = Sequence[Sequence[str]]
"""The references of every item, at least one each."""


@dataclass(frozen=True)
class TextMetric:
    """A metric of texts against references.

    `statistics` (texts, references) -> float64 (items, figures); `of_sum` takes their sum (figures,) over any items. The value
    times `scale` is what the libraries and papers print. Larger is better, unless it `falls`. `joint`: the figures of an item
    depend on the references of the others.
    """

    key: str
    name: str
    statistics: Callable[[Texts, References], np.ndarray]
    of_sum: Callable[[np.ndarray], float]
    scale: float = 100.0
    falls: bool = False
    joint: bool = False

    def value(self, statistics: np.ndarray, _: object = None) -> float:
        """The metric of items, of which `statistics` (items, figures) are given; in the form of `Metric.value`."""
        return self.of_sum(statistics.sum(axis=0))


@functools.cache
def _sacrebleu(name: str):
    """A metric object of sacrebleu with its defaults; `force`: do not warn of references that are tokenized."""
    from sacrebleu import metrics

    return metrics.BLEU(force=True) if name == "BLEU" else getattr(metrics, name)()


def _by_sacrebleu(key: str, name: str, **options: bool) -> TextMetric:
    """A metric of sacrebleu, by the statistics that its own significance tests resample."""

    def statistics(texts: Texts, references: References) -> np.ndarray:
        # sacrebleu takes the first references of all items, then the second ones, ...; None where an item has no more
        streams = list(itertools.zip_longest(*references))
        return np.array(_sacrebleu(name)._extract_corpus_statistics(list(texts), streams), dtype=np.float64)

    def of_sum(figures: np.ndarray) -> float:
        return _sacrebleu(name)._compute_score_from_stats(figures.tolist()).score / 100

    return TextMetric(key, {"CHRF": "chrF"}.get(name, name), statistics, of_sum, **options)


def words_of(text: str) -> list[str]:
    """The tokens of a text as mteval-v13a cuts them, which BLEU uses, too."""
    return _sacrebleu("BLEU").tokenizer(text).split()


def _of_words(statistics: Callable[..., np.ndarray]) -> Callable[[Texts, References], np.ndarray]:
    """Statistics of tokens as statistics of texts."""

    def of_texts(texts: Texts, references: References) -> np.ndarray:
        split = [[words_of(reference) for reference in options] for options in references]
        return statistics([words_of(text) for text in texts], split)

    return of_texts


def _mean(figures: np.ndarray) -> float:
    return float(figures[0] / figures[1])


def _of_each(score: Callable[..., float]) -> Callable[..., np.ndarray]:
    """Statistics of a mean over items: the score of each, and how many there are."""

    def statistics(texts: Sequence, references: Sequence) -> np.ndarray:
        scores = [score(text, options) for text, options in zip(texts, references, strict=True)]
        return np.array([(value, 1.0) for value in scores], dtype=np.float64)

    return statistics


class _NoSynonyms:
    """In place of WordNet, whose data nltk would have to download: no word has a synonym."""

    @staticmethod
    def synsets(word: str) -> list:
        return []


def _meteor(text: list[str], references: list[list[str]]) -> float:
    from nltk.translate.meteor_score import meteor_score

    return meteor_score(references, text, wordnet=_NoSynonyms)


ROUGE_TOKENS = 2
"""Version of the tokens of ROUGE, part of the fingerprint of scores: increase it when texts are cut otherwise."""


class _WordsOfEveryScript:
    """Tokens of ROUGE: of ASCII words those of rouge-score, stemmed; other words, of which it drops every letter but a-z, as
    they are."""

    def __init__(self) -> None:
        from rouge_score.tokenizers import DefaultTokenizer

        self._stemming = DefaultTokenizer(use_stemmer=True)

    def tokenize(self, text: str) -> list[str]:
        # vowel signs of Hindi and the like are marks, no letters
        letters = unicodedata.normalize("NFC", text.lower())
        kept = (letter if letter.isalnum() or unicodedata.category(letter)[0] == "M" else " " for letter in letters)
        words = "".join(kept).split()
        return [token for word in words for token in (self._stemming.tokenize(word) if word.isascii() else [word])]


def _rouge(kind: str) -> Callable[[str, Sequence[str]], float]:
    @functools.cache
    def scorer():
        from rouge_score.rouge_scorer import RougeScorer

        return RougeScorer([kind], tokenizer=_WordsOfEveryScript())

    return lambda text, references: scorer().score_multi(references, text)[kind].fmeasure


TEXT_METRICS = {
    metric.key: metric
    for metric in (
        TextMetric(EXACT, "exact match", _of_each(lambda text, references: text in references), _mean),
        _by_sacrebleu("bleu", "BLEU"),
        _by_sacrebleu("chrf", "CHRF"),
        _by_sacrebleu("ter", "TER", falls=True),
        TextMetric("nist", "NIST", _of_words(nist_statistics), nist, scale=1.0, joint=True),
        TextMetric("meteor", "METEOR (exact and stem matches)", _of_words(_of_each(_meteor)), _mean),
        *(
            TextMetric(f"rouge_{kind.lower()}", f"ROUGE-{kind}", _of_each(_rouge(f"rouge{kind}")), _mean)
            for kind in ("1", "2", "L")
        ),
    )
}
"""Every metric by its key; the keys are those of `decode_config.PACKAGES`."""


def require_packages(metrics: Sequence[str]) -> None:
    """Raises UserError E901 for metrics whose packages are not installed."""
    needed = {package: metric for metric in metrics for package in PACKAGES[metric]}
    if missing := [package for package in needed if importlib.util.find_spec(package) is None]:
        what = f"the metric {needed[missing[0]]} needs the package {' and '.join(missing)}"
        raise UserError("E901", what, "Run: pip install 'compress-pipeline[metrics]'")
