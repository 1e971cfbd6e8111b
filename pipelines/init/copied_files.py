"""`compress init`: the line of a pipeline file that names the copies of the user's data beside it, written and read again.

Without it a second `init` in the same folder would take an earlier copy, such as the training part of a split, for the data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

START = "# Copies of the data, which another `compress init` leaves out: "
FIRST = 4
"""Lines of a pipeline file among which this one is."""


def copies_line(names: Sequence[str]) -> str:
    """The comment that names these files."""
    return f"{START}{json.dumps(names)}"


def copies_in(folder: Path) -> set[str]:
    """Names of the files in a folder that a pipeline file there says are copies."""
    names: set[str] = set()
    for path in (*folder.glob("*.yaml"), *folder.glob("*.yml")):
        if not path.is_file():  # a pipe is not opened: reading it may never end
            continue
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                found = [line.removeprefix(START) for line in islice(file, FIRST) if line.startswith(START)]
            names.update(*map(json.loads, found))
        except (OSError, ValueError, TypeError):  # no permission, or a line that somebody has changed
            continue
    return names
