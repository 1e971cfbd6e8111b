"""The most likely answer in a context, from the logits of its beginning and of its end at each token.

Used by the kind of task and by the Triton backend for texts, which it is copied beside: so it imports nothing of this project.
"""

import numpy as np

MOST_TOKENS = 30
"""Longest answer, in tokens."""


def candidate_tokens(offsets, sequence_ids):
    """The tokens where an answer may begin or end: the row's first one, which stands for no answer, and those of its second
    text that have characters."""
    inside = [token for token, (start, end) in enumerate(offsets) if sequence_ids[token] == 1 and end > start]
    return [0, *(token for token in inside if token)]


def best_span(logits):
    """(first, last, probability) of the most likely answer among candidates, from their logits (candidates, 2).

    It has the largest sum of the logit of its beginning and that of its end, and at most MOST_TOKENS tokens; (0, 0, ...) is no
    answer. The probability is the product of both softmaxes.
    """
    starts, ends = logits[:, 0], logits[:, 1]
    first = last = 0
    best = starts[0] + ends[0]
    for more in range(min(MOST_TOKENS, len(logits) - 1)):
        sums = starts[1 : len(starts) - more] + ends[1 + more :]
        place = int(sums.argmax())
        if sums[place] > best:
            best, first, last = sums[place], 1 + place, 1 + place + more
    normalizers = [values.max() + np.log(np.exp(values - values.max()).sum()) for values in (starts, ends)]
    return first, last, float(np.exp(best - sum(normalizers)))


def answer_characters(text, offsets, first, last):
    """The characters [start, end) in a text of the answer from one candidate to another; (0, 0) is no answer. `offsets` are
    those of the candidates. White space around it is left out: some tokenizers count the space before a word as part of it.
    """
    if not first:
        return 0, 0
    part = text[offsets[first][0] : offsets[last][1]]
    start = offsets[first][0] + len(part) - len(part.lstrip())
    return (start, start + len(part.strip())) if part.strip() else (0, 0)
