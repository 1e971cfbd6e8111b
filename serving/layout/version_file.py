"""serving.json, the facts of one version of a served model: labels, limits and tokenizer belong to the version.

It lies in the version's folder, NAME/1/serving.json. The backends and the client read it there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from serving.backends.door import VERSION_FILE

IF_SAID = {"start": None, "prefix": "", "stripped": False}
"""Facts that are written only where they say something: not these values (a start of 0 is one)."""


@dataclass(frozen=True, kw_only=True)
class VersionFacts:
    """What a version's backends and clients must know of it.

    - `task`: its kind (`compressor.tasks.KINDS`); `labels`: names of the outputs, in order; `pair`: whether a row is two texts;
    - `max_length`: tokens at which texts are cut; `positions`: most tokens of a row that the model takes;
    - `vocabulary`, `type_vocabulary`: numbers of token ids, and of token type ids (None: the model has none);
    - `pad_id`: the id that pads rows; `end_id`: an id that must occur equally often in every row (None: none);
    - `ends`: ids that end a generated text;
    - `start`: the first id of a decoder behind an encoder (None: there is no encoder); `prefix`: what stands before each of its
      texts; `stripped`: whether a decoder alone was trained on prompts without white space around them;
    - `tasks`: the tasks of a model that computes many, by number, each with `name`, `labels` and `kind`; its own labels are ();
    - `runtime`, `precision`: of the model file; `tokenizer_sha256`: of the files in tokenizer/.
    """

    task: str
    labels: tuple[str, ...]
    max_length: int
    pad_id: int
    vocabulary: int
    positions: int
    type_vocabulary: int | None = None
    end_id: int | None = None
    pair: bool = False
    ends: tuple[int, ...] = ()
    start: int | None = None
    prefix: str = ""
    stripped: bool = False
    tasks: tuple[dict[str, Any], ...] = ()
    runtime: str = ""
    precision: str = ""
    tokenizer_sha256: str = ""

    def to_json(self) -> str:
        """The file's content; equal facts give equal bytes, those of an earlier version of this project too."""
        facts = {name: value for name, value in asdict(self).items() if name not in IF_SAID or value != IF_SAID[name]}
        return json.dumps(facts, indent=1, ensure_ascii=False) + "\n"


def read_version(folder: Path) -> VersionFacts:
    """The facts of a version folder. Raises UserError E728 where its serving.json is missing or invalid."""
    path = Path(folder, VERSION_FILE)
    return facts_in(path.read_bytes, str(path))


def facts_in(read: Callable[[], bytes], where: str) -> VersionFacts:
    """The facts in a serving.json that `read` reads, from wherever it lies. Raises as `read_version`."""
    try:
        return _facts(json.loads(read()))
    except (OSError, ValueError, TypeError, KeyError) as error:
        what = f"not the facts of a version ({type(error).__name__}: {error})"
        raise UserError("E728", what, "Deploy the model again", where) from error


def _facts(values: dict[str, Any]) -> VersionFacts:
    """The facts, of the types that each must have; unknown ones are left out. Raises ValueError, TypeError or KeyError."""
    known = {field.name: values[field.name] for field in fields(VersionFacts) if field.name in values}
    labels, numbers = known["labels"], ("max_length", "pad_id", "vocabulary", "positions")
    if not isinstance(labels, list) or not all(isinstance(label, str) for label in labels):
        raise ValueError("labels is not a list of texts")
    tasks = known.get("tasks", [])
    if not all(isinstance(task["name"], str) and isinstance(task["labels"], list) for task in tasks):
        raise ValueError("tasks is not a list of names and labels")
    if wrong := [key for key in numbers if type(known[key]) is not int]:
        raise ValueError(f"{wrong[0]} is not an integer")
    listed = {key: tuple(known.get(key, ())) for key in ("labels", "tasks", "ends")}
    return VersionFacts(**known | listed)
