"""A pickle that shows when it was opened."""

from pathlib import Path


class Bait:
    """What creates the file at `path` when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")
