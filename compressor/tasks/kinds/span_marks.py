"""What marks spans in a text, and whether a model has read the marks.

Used by the kind of task and by the Triton backend for texts, which it is copied beside: so it imports nothing of this project.
"""

MARKS = (("[ ", " ]"), ("{ ", " }"))
"""What stands before and behind the first span, and the second."""


def has_read_marks(text, offsets):
    """Whether the marks of a text, from the first to the last, are within the characters of its tokens, `offsets` [start, end)
    of each; True of a text without marks. A tokenizer may cut off either end of a text."""
    first, last = ends_of_marks(text)
    read = [(start, end) for start, end in offsets if start < end]  # special tokens have no characters
    return last < 0 or (bool(read) and min(read)[0] <= first and last < max(end for _, end in read))


def ends_of_marks(text):
    """The characters at which the marks of a text begin and end; an end of -1 for a text without marks."""
    begins = [place for before, _ in MARKS if (place := text.find(before.strip())) >= 0]
    return min(begins, default=0), max(text.rfind(behind.strip()) for _, behind in MARKS)
