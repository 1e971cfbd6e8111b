"""The tokens that stand for words: a model that tags words predicts at the first token of each.

Used by the tasks here and by the Triton backend for texts, which it is copied beside: so it imports nothing of this project.
"""


def first_tokens(offsets, words):
    """Index of the first token of every word, None for a word without tokens (cut off, or dropped by the tokenizer).

    `offsets` are the characters [start, end) of each token of the row in `words` joined by single spaces; (0, 0) means no
    characters.
    """
    places = []
    token = begin = 0
    for word in words:
        # some tokenizers count the space before a word as part of it
        while token < len(offsets) and offsets[token][1] <= begin:
            token += 1
        covered = token < len(offsets) and offsets[token][0] < begin + len(word)
        places.append(token if covered else None)
        token += covered  # a token over two words belongs to the first
        begin += len(word) + 1
    return places
