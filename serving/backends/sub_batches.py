"""How the texts of a merged batch are computed: rows of similar length together, so that there is little padding.

The server copies this file into the backend's folder, so it imports nothing of this project; the comparison of a deployed model
with a local session takes the same sub-batches.
"""

from bisect import bisect_left


def sub_batches(lengths, most_tokens, streams=1):
    """Row numbers in batches of at most `most_tokens` padded tokens (or one row), longest first.

    With several `streams`, which compute at the same time, each gets as many of them, and those of the fewest tokens.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = filled(order, lengths, most_tokens)
    if streams == 1:
        return batches
    count = -(-len(batches) // streams) * streams
    return filled(order, lengths, bisect_left(range(most_tokens), True, key=lambda n: len(filled(order, lengths, n)) <= count))


def filled(order, lengths, most_tokens):
    """Consecutive rows of `order`, longest first, in as few batches as hold at most so many padded tokens, or one row."""
    batches, start = [], 0
    while start < len(order):
        size = max(1, most_tokens // lengths[order[start]])
        batches.append(order[start : start + size])
        start += size
    return batches
