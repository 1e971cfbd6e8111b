"""NIST (Doddington 2002) as nltk's `corpus_nist` computes it, from figures of each item, so that items can be resampled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

ORDERS = 5
Tokens = Sequence[str]


def nist_statistics(texts: Sequence[Tokens], references: Sequence[Sequence[Tokens]]) -> np.ndarray:
    """(items, 2 · ORDERS + 2): information of the matched n-grams by order, n-grams by order, reference words, words.

    An n-gram's information is that in the references of all items; of several references the best one counts, in each order.
    """
    information = _information(references)
    return np.array([_of_item(text, options, information) for text, options in zip(texts, references, strict=True)])


def nist(figures: np.ndarray) -> float:
    """The score of summed `nist_statistics`; 0 is the minimum, there is no upper limit."""
    from nltk.translate.nist_score import nist_length_penalty

    matched, total, (reference_words, words) = figures[:ORDERS], figures[ORDERS:-2], figures[-2:]
    precision = sum(hit / count for hit, count in zip(matched, total, strict=True) if count)
    return float(precision * nist_length_penalty(reference_words, words)) if reference_words else 0.0


def _ngrams(tokens: Tokens, order: int) -> Counter:
    return Counter(tuple(tokens[start : start + order]) for start in range(len(tokens) - order + 1))


def _information(references: Sequence[Sequence[Tokens]]) -> dict[tuple[str, ...], float]:
    """log2 (occurrences without the last word / occurrences) of every n-gram: equation 2."""
    counts, words = Counter(), 0
    for tokens in (tokens for options in references for tokens in options):
        words += len(tokens)
        for order in range(1, ORDERS + 1):
            counts.update(_ngrams(tokens, order))
    return {ngram: math.log2((counts[ngram[:-1]] if len(ngram) > 1 else words) / count) for ngram, count in counts.items()}


def _of_item(text: Tokens, references: Sequence[Tokens], information: dict[tuple[str, ...], float]) -> list[float]:
    matched, total, reference_words = [], [], 0
    for order in range(1, ORDERS + 1):
        ours = _ngrams(text, order)
        count = sum(ours.values())
        options = []
        for reference in references:
            found = sum(information[ngram] * hits for ngram, hits in (ours & _ngrams(reference, order)).items())
            options.append((found / count if count else 0, found, len(reference)))
        _, best, length = max(options)
        matched.append(best)
        total.append(count)
        reference_words += length
    return [*matched, *total, reference_words, ORDERS * len(text)]
