"""How the texts of a merged batch are computed: rows of similar length together, so that there is little padding.

The server copies this file into the backend's folder, so it imports nothing of this project; the comparison of a deployed model
with a local session takes the same sub-batches.
"""


def sub_batches(lengths, most_tokens):
    """Row numbers in batches of at most `most_tokens` padded tokens (or one row), longest first."""
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches, start = [], 0
    while start < len(order):
        size = max(1, most_tokens // lengths[order[start]])
        batches.append(order[start : start + size])
        start += size
    return batches
