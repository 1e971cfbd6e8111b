"""Keys that are set in a pipeline's data before it is validated: by `--set`, and by the rows and columns of a table."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from compressor.errors import UserError
from compressor.tasks.sources.hub_set import HUB, is_hub
from compressor.text_files import from_home, written_as_path
from pipelines.engine import stage as stage_table
from pipelines.engine.stage import load_stage
from pipelines.file.faults import models_in, nearest
from pipelines.file.pipeline_file import PipelineFile
from pipelines.file.task_keys import names_path
from pipelines.file.yaml_source import SET, KeyPath, YamlSource, dotted, parse

TRAININGS = "trainings."
"""Start of a key that every stage which trains takes: a preset's unless the stage has its own value, that of --set always."""

IMPLIED = ("items", "search")
"""Keys of a stage whose own keys may stand in their place, as those of `prune`."""

NAME = r'(?:"[^"]+"|[^."]+)'
KEY = re.compile(rf"{NAME}(?:\.{NAME})*")
"""A key of --set: names with dots between them; one that holds a dot itself stands in double quotes."""

Preset = tuple[str, Mapping[str, Any]]
"""Where keys come from, in words, and the keys with their values."""


def split_key(key: str) -> list[str]:
    """The names in a key: 'tasks."a.b".max_length' -> tasks, a.b, max_length; [] of a text that is no key."""
    return [name.strip('"') for name in re.findall(NAME, key)] if KEY.fullmatch(key) else []


def join_key(names: Sequence[str]) -> str:
    """The key with these names in it: the reverse of `split_key`."""
    return ".".join(f'"{name}"' if "." in name else name for name in names)


def normalize(source: YamlSource) -> None:
    """Rewrite stages given as a bare word, `- merge`, as the mapping `merge:` without values."""
    stages = source.data.get("stages")
    for number, item in enumerate(stages if isinstance(stages, list) else ()):
        if isinstance(item, str):
            stages[number] = {item: None}


def raw_stages(source: YamlSource) -> list[tuple[int, str, Any]]:
    """(index, stage name, raw config) of every item that has the form of a stage."""
    stages = source.data.get("stages")
    items = enumerate(stages) if isinstance(stages, list) else ()
    return [(place, *next(iter(item.items()))) for place, item in items if isinstance(item, dict) and len(item) == 1]


def stage_ids(source: YamlSource) -> dict[int, str]:
    """Index -> id of every stage: the one given, or its name, or name-2, name-3, ... when those are taken."""
    raw = raw_stages(source)
    explicit = {
        place: config["id"] for place, _, config in raw if isinstance(config, dict) and isinstance(config.get("id"), str)
    }
    taken, ids, last = set(explicit.values()), dict(explicit), {}
    for place, name, _ in raw:
        if place in explicit:
            continue
        number = last.get(name, 0) + 1
        while (candidate := name if number == 1 else f"{name}-{number}") in taken:
            number += 1
        ids[place], last[name] = candidate, number
        taken.add(candidate)
    return dict(sorted(ids.items()))


def stage_paths(source: YamlSource) -> dict[str, KeyPath]:
    """Id of every stage -> where its config stands."""
    return {
        entry_id: ("stages", place, next(iter(source.data["stages"][place]))) for place, entry_id in stage_ids(source).items()
    }


def override(source: YamlSource, text: str, giver: str = SET) -> None:
    """Apply one KEY=VALUE of --set, or of a sweep (a word of GIVERS). Unknown keys inside a config are left to validation.
    Raises UserError E109."""
    mark = f"{giver} {text}"
    key, equals, value_text = text.partition("=")
    names = split_key(key)
    if not equals or not names:
        fix = 'Write it as tune.rank=8 or seed=1; a name with a dot in double quotes: tasks."a.b".max_length=64'
        raise UserError("E109", "not KEY=VALUE", fix, mark)
    value = parse(value_text, mark).data
    # paths of the command line are relative to the current folder, not to the pipeline file
    _put(source, _paths_of(source, names, mark), value, mark, partial(with_folder, Path.cwd()))


def _put(
    source: YamlSource,
    paths: Sequence[KeyPath],
    value: Any,
    mark: str,
    placed: Callable[[KeyPath, Any], Any] = lambda path, value: value,
) -> None:
    """Give a value to the keys at some paths, each its own copy; null drops those that the file has, and asks nothing of others
    that may be given."""
    if value is None and (there := _keys_of_file(source, paths)):
        for path in there:  # null is no value of any key: its default holds
            source.drop(path)
        return
    for path in paths:
        if value is not None or path[-1] not in _fields_at(path[:-1]):
            source.put(path, placed(path, deepcopy(value)), mark)


def _keys_of_file(source: YamlSource, paths: Sequence[KeyPath]) -> list[KeyPath]:
    """Those of the paths that the file has as keys; a whole stage is none, which may be null: one without keys."""
    stages = stage_paths(source).values()
    return [path for path in paths if path not in stages and source.has(path) and isinstance(source.get(path[:-1]), dict)]


def _fields_at(path: KeyPath) -> dict[str, list[Any]]:
    """The keys that may be given at a path of a pipeline file, and the types that each may have: in a union, those of every
    form."""
    of_stage = path[:1] == ("stages",) and len(path) > 2 and path[2] in stage_table.STAGE_NAMES
    config, location = (load_stage(path[2]).config, path[3:]) if of_stage else (PipelineFile, path)
    forms = [config, *(form for name in IMPLIED if of_stage for form in _forms(config, name))]
    # the names of several tasks are no fields, and neither are the places in a list
    names = [part for place, part in enumerate(location) if isinstance(part, str) and (location[0], place) != ("tasks", 1)]
    for name in names:
        forms = [inner for form in forms for inner in _forms(form, name)]
    return {
        name: [form.model_fields[name].annotation for form in forms if name in form.model_fields]
        for form in forms
        for name in form.model_fields
    }


def _forms(config: type[BaseModel], name: str) -> list[type[BaseModel]]:
    """The configs that a key of a config may hold."""
    return list(models_in(config.model_fields[name].annotation)) if name in config.model_fields else []


def _holds_keys(annotation: Any) -> bool:
    """Whether a type is, or may be, a mapping."""
    return get_origin(annotation) is dict or any(models_in(annotation)) or any(map(_holds_keys, get_args(annotation)))


def preset_wholes(source: YamlSource, presets: Sequence[Preset]) -> None:
    """Set top-level keys: a later preset's replace those of an earlier one, `stages` and `task` as a whole;
    null drops a key."""
    for mark, keys in presets:
        for key in filter(PipelineFile.model_fields.get, keys):
            _put(source, [(key,)], keys[key], mark)


def preset_keys(source: YamlSource, presets: Sequence[Preset]) -> None:
    """Set single keys, a later preset's last; then those of TRAININGS, where neither a stage nor a later preset has any, and
    where no preset has null, which asks for the default.

    Raises UserError E109.
    """
    nulls: set[KeyPath] = set()
    for mark, keys in presets:
        for key, value in keys.items():
            if key not in PipelineFile.model_fields and not key.startswith(TRAININGS):
                path = _path_of(source, split_key(key) or [key], mark)
                _put(source, [path], value, mark)
                # a value takes the place of an earlier null, at its path and below
                nulls = {other for other in nulls if other[: len(path)] != path} | ({path} if value is None else set())
    for mark, keys in reversed(presets):
        for key, value in keys.items():
            if key.startswith(TRAININGS):
                _fill(source, key.removeprefix(TRAININGS), value, mark, nulls)


def _fill(source: YamlSource, key: str, value: Any, mark: str, nulls: set[KeyPath]) -> None:
    """Give a key to each stage that trains and lacks it, but for the paths in `nulls`, which keep the default; null adds to
    these."""
    for place, name, config in raw_stages(source):
        path = ("stages", place, name, key)
        lacks = config is None or (isinstance(config, dict) and key not in config)
        if not _trains(name) or not lacks or path in nulls:
            continue
        if value is None:
            nulls.add(path)
        else:
            source.put(path, value, mark)


def _paths_of(source: YamlSource, names: list[str], mark: str) -> list[KeyPath]:
    """Path of a key, or those that a key of TRAININGS has. Raises UserError E109."""
    ids = stage_ids(source)
    if len(names) == 1 or names[0] != TRAININGS[:-1] or names[0] in ids.values():
        return [_path_of(source, names, mark)]
    trains = [place for place, name, _ in raw_stages(source) if _trains(name)]
    if not trains:
        raise UserError("E109", "no stage of this pipeline trains", "Set the key of another stage", mark)
    return [_path_of(source, [ids[place], *names[1:]], mark) for place in trains]


def _trains(name: str) -> bool:
    return name in stage_table.STAGE_NAMES and load_stage(name).trains


def _path_of(source: YamlSource, names: list[str], mark: str) -> KeyPath:
    """Path of a key such as tune.rank, whose parents may be missing where the file may have them. Raises UserError E109."""
    path, remaining = _start_of(source, names, mark)
    for part in remaining[:-1]:
        path = _step(source, path, part, mark)
    if not remaining:
        return path
    current = source.get(path) if source.has(path) else None
    if isinstance(current, list) or _place_of_items(current, remaining[-1]):
        return _step(source, path, remaining[-1], mark)
    if not isinstance(current, dict | None):
        raise UserError("E109", f"'{dotted(path)}' holds a value, not keys", "Set it as a whole", mark)
    return (*path, remaining[-1])


def _start_of(source: YamlSource, parts: list[str], mark: str) -> tuple[KeyPath, list[str]]:
    """Where an override begins (a top-level key, or a stage by its id), and the remaining parts of its key."""
    paths, first = stage_paths(source), parts[0]
    if first in PipelineFile.model_fields and parts != ["stages"]:
        return (first,), parts[1:]
    if parts == ["stages"]:
        fix = f"Set one key of a stage, as in {next(iter(paths), 'STAGE')}.KEY=VALUE"
        raise UserError("E109", "the stages are not set as a whole", fix, mark)
    if first not in paths:
        keys = [*paths, *(key for key in PipelineFile.model_fields if key != "stages")]
        raise UserError("E109", f"neither a stage nor a key is called '{first}'", _advice(first, keys), mark)
    if len(parts) == 1:
        raise UserError("E109", f"'{first}' is a whole stage", f"Set one of its keys: {first}.KEY=VALUE", mark)
    return paths[first], parts[1:]


def _step(source: YamlSource, path: KeyPath, part: str, mark: str) -> KeyPath:
    """Follow one part of an override's key. A list stands for its `items`, also where it is written under that key, and a
    mapping without `items` for a list of one. A list is written under that key where another key of its stage is set."""
    value = source.get(path) if source.has(path) else None
    if _place_of_items(value, part):
        return _step(source, (*path, "items"), part, mark)
    if (isinstance(value, list) and part == "items") or (
        isinstance(value, dict) and part in ("items", "0") and part not in value
    ):
        return path
    if isinstance(value, dict) and part in value:
        return (*path, part)
    if isinstance(value, list) and _beside_items(source, path, part):
        source.nest(path, "items")
        return (*path, part)
    # no block is made of a `task` that the file lacks, as one with `tasks`, nor of a task among these
    inside = path != ("tasks",) and (len(path) > 1 or source.has(path))
    blocks = _fields_at(path).get(part, ()) if inside and part not in IMPLIED else ()
    if isinstance(value, dict | None) and any(map(_holds_keys, blocks)):
        return (*path, part)
    # digits are a place in a list alone: in a mapping they are a name, as of a file in task.test
    places = {str(place): place for place in range(len(value))} if isinstance(value, list) else {}
    if part in places:
        return (*path, places[part])
    if places and not part.isdecimal():
        fix = f"It is a list: name an entry by its place, 0 to {len(places) - 1}, as in KEY.0.{part}"
        raise UserError("E109", f"no '{part}' in '{dotted(path)}'", fix, mark)
    keys = list(value) if isinstance(value, dict) else list(places)
    raise UserError("E109", f"no '{part}' in '{dotted(path)}'", _advice(part, keys), mark)


def _place_of_items(value: Any, part: str) -> bool:
    """Whether a part of a key is a place in the list that a mapping has under `items`."""
    return isinstance(value, dict) and isinstance(value.get("items"), list) and part.isdecimal() and part not in value


def _beside_items(source: YamlSource, path: KeyPath, part: str) -> bool:
    """Whether a part of a key is a key of the stage at a path, beside its items, and no key of these."""
    known = path in stage_paths(source).values() and path[2] in stage_table.STAGE_NAMES
    fields = load_stage(path[2]).config.model_fields if known else {}
    return "items" in fields and part in fields and part not in IMPLIED


def _advice(name: str, names: Sequence[str]) -> str:
    """What to write in place of an unknown name: one with a dot, of which it is the start, in quotes."""
    longer = next((other for other in names if other.startswith(f"{name}.")), None)
    return nearest(name, names, "There are") if longer is None else f'Write a name with a dot in double quotes: "{longer}"'


def with_folder(folder: Path, path: KeyPath, value: Any) -> Any:
    """The value at a path of a pipeline file with the files and folders that it names, relative to `folder`, absolute."""
    if isinstance(value, dict):
        return {name: with_folder(folder, (*path, name), inner) for name, inner in value.items()}
    if not isinstance(value, str):
        return value
    named = named_at(path)
    if named == "file" and is_hub(value):
        place = value.removeprefix(HUB)
        return f"{HUB}{folder / from_home(place)}" if written_as_path(place) else value
    if named == "file" or (named == "model" and (written_as_path(value) or os.path.isdir(folder / value))):
        return str(folder / from_home(value))
    return value


def key_path(source: YamlSource, key: str) -> KeyPath:
    """The path that a key in the form of --set names, as `named_at` takes it: a stage's id stands for its config's path."""
    first, *names = split_key(key) or [key]
    return (*stage_paths(source).get(first, (first,)), *names)


def named_at(path: KeyPath) -> Literal["file", "model"] | None:
    """What the value at a path of a pipeline file names, if it is a data file or a model."""
    name = path[2] if path[0] == "stages" and len(path) > 2 else None
    of_stage = load_stage(name) if name in stage_table.STAGE_NAMES else None
    if path[-1] in of_stage.beside.files if of_stage else path == ("architecture",) or names_path(path):
        return "file"
    return "model" if path == ("model",) or (of_stage is not None and path[-1] in of_stage.beside.models) else None
