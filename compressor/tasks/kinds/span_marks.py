"""What marks spans in a text, and whether a model has read the marks.

Used by the kind of task and by the Triton backend for texts, which it is copied beside: so it imports nothing of this project.
"""

MARKS = (("[ ", " ]"), ("{ ", " }"))
"""What stands before and behind the first span, and the second."""


def has_read_marks(text, offsets):
    """Whether the last mark of a text is within the characters of its tokens, `offsets` [start, end) of each; True of a text
    without marks."""
    last = max(text.rfind(mark.strip()) for _, mark in MARKS)
    return last < max((end for _, end in offsets), default=0) or last < 0
