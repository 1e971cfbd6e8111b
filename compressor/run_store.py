"""Where the store of a run's artifacts lies: beside the folder of the run, from wherever that is reached."""

from __future__ import annotations

import os
from pathlib import Path

STORE = ".store"


def store_of(folder: Path, name: str, artifact: str) -> Path:
    """The store with an artifact of the run called `name`, whose `folder` may be given as a link to it, or end in `..`.

    The name is the path below the folder of all runs: a sweep's run has two parts. Where no place has the artifact, it is the
    store beside the folder as it is given.
    """
    above = len(Path(name).parts) - 1
    given, real = folder.absolute(), folder.resolve()
    # a run's folder may itself be a link to another disk: then the store is beside the link
    places = [given.parents[above] / STORE, *([real.parents[above] / STORE] if len(real.parents) > above else [])]
    # Path.is_dir raises where the name is too long
    return next((place for place in places if os.path.isdir(place / artifact)), places[0])
