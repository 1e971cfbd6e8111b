"""Conversion of pydantic's errors to our codes and plain sentences, each with its location in the pipeline file."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, Tag, ValidationError

from compressor.arguments import NAME_FIX, NAME_PATTERN
from compressor.errors import UserError
from pipelines.file.yaml_source import MOST_FAULTS, KeyPath, YamlSource

Model = TypeVar("Model", bound=BaseModel)

EXPECTED = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "list": "a list",
    "tuple": "a list",
    "model": "a mapping of keys to values",
    "dict": "a mapping of keys to values",
}
"""First word of pydantic's type errors (int_type, int_parsing, int_from_float, ...) -> the expected value."""

BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def nearest(name: str, names: Sequence[str], introduction: str, also: Sequence[str] = ()) -> str:
    """Suggestion for an unknown name: "Did you mean 'rank'?", or the list of known names, without those that may be meant,
    `also`."""
    near = difflib.get_close_matches(name, [*also, *names], n=1)
    return f"Did you mean '{near[0]}'?" if near else f"{introduction}: {', '.join(names) or 'none'}"


def shown(value: Any) -> str:
    """A short form of a value for an error message."""
    if value is None:
        return "empty"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    if isinstance(value, list | dict) and len(text) > 40:
        return "this list" if isinstance(value, list) else "this mapping"
    return text if len(text) <= 60 else f"{text[:57]}..."


def validated(model: type[Model], source: YamlSource, path: KeyPath) -> tuple[Model | None, list[UserError]]:
    """The value at `path` validated as a `model`, and its faults: E102 unknown key, E105 missing key, E104 wrong value."""
    raw = source.get(path)
    raw = {} if raw is None else raw
    value, details = None, []
    try:
        value = model.model_validate(raw)
    except ValidationError as error:
        details = error.errors(include_url=False)[:MOST_FAULTS]
    return value, explain([*details, *coerced(model, raw)[:MOST_FAULTS]], model, source, path)


def coerced(model: type[BaseModel], raw: Any) -> list[dict[str, Any]]:
    """Details of the scalars that pydantic would silently convert: '8' or true where a number belongs, 1 for true."""
    try:
        # as JSON, because strict validation then accepts a list for a tuple and text for a path
        model.model_validate_json(json.dumps(raw), strict=True)
    except ValidationError as error:
        return [
            detail for detail in error.errors(include_url=False) if detail["type"] in ("int_type", "float_type", "bool_type")
        ]
    return []


def explain(details: list[dict[str, Any]], model: type[BaseModel], source: YamlSource, path: KeyPath) -> list[UserError]:
    """Convert pydantic's details to UserErrors, one per mistake."""
    missing = {(path_of(detail, source, path), detail["loc"][-1]) for detail in details if detail["type"] == "missing"}
    faults: list[UserError] = []
    misspelt = set()
    for detail in details:
        if detail["type"] == "extra_forbidden":
            at, key = path_of(detail, source, path), str(detail["loc"][-1])
            keys = list(fields_at(model, detail["loc"][:-1]))
            if near := difflib.get_close_matches(key, keys, n=1):
                misspelt.add((at, near[0]))
            faults.append(UserError("E102", "unknown key", nearest(key, keys, "Keys"), source.where((*at, key))))
    # a misspelt key is one mistake, not an unknown and a missing one
    for at, key in sorted(missing - misspelt, key=str):
        faults.append(UserError("E105", f"key '{key}' is missing", "Add it", source.where(at)))
    return faults + list(wrong_values(details, source, path))


def path_of(detail: dict[str, Any], source: YamlSource, path: KeyPath) -> KeyPath:
    """Key path of a detail in the file; for a missing or unknown key, that of the mapping around it."""
    inner = detail["loc"][:-1] if detail["type"] in ("missing", "extra_forbidden") else detail["loc"]
    return source.locate((*path, *inner))


def wrong_values(details: list[dict[str, Any]], source: YamlSource, path: KeyPath) -> Iterator[UserError]:
    """The E104 faults. The branches of a union (`int | float`) become one sentence, about the deepest fault among them."""
    by_path: dict[KeyPath, list[dict[str, Any]]] = {}
    for detail in details:
        if detail["type"] not in ("missing", "extra_forbidden"):
            by_path.setdefault(path_of(detail, source, path), []).append(detail)
    outer = {at[:length] for at in by_path for length in range(len(at))}
    for at, branches in by_path.items():
        if at not in outer:
            what, fix = sentence(branches, source.get(at))
            yield UserError("E104", what, fix, source.where(at))


def sentence(details: list[dict[str, Any]], value: Any) -> tuple[str, str]:
    """(what, fix) for the faults of one value."""
    for detail in details:
        context, kind = detail.get("ctx", {}), detail["type"]
        if kind in BOUNDS:
            limit, words = BOUNDS[kind]
            return f"must be {words} {context[limit]:,.10g}, not {shown(value)}", "Change the value"
        if kind == "value_error":
            return str(context["error"]), f"It is {shown(value)}"
        if kind == "string_pattern_mismatch":
            fix = NAME_FIX if context["pattern"] == NAME_PATTERN else f"Use text like {context['pattern']}"
            found = detail["input"] if detail["loc"][-1] == "[key]" else value
            return f"{shown(found)} is not allowed here", fix
        if kind in ("too_short", "string_too_short"):
            return "is empty" if not value else f"needs at least {context['min_length']}", "Fill it"
        if kind in ("too_long", "string_too_long"):
            unit = "characters" if isinstance(value, str) else "members"
            return f"has {len(value):,} {unit}, where at most {context['max_length']:,} are allowed", "Shorten it"
    choices = [choice for detail in details if detail["type"] == "literal_error" for choice in quoted(detail)]
    types = dict.fromkeys(EXPECTED[kind] for detail in details if (kind := detail["type"].split("_")[0]) in EXPECTED)
    expected = " or ".join([*types, *(f"'{choice}'" for choice in choices)])
    if not expected:
        return details[0]["msg"].removeprefix("Input ").lower(), "Change the value"
    fix = nearest(value, choices, "Use") if choices and isinstance(value, str) else "Change the value"
    return f"must be {expected}, not {shown(value)}", fix


def quoted(detail: dict[str, Any]) -> list[str]:
    """Parse the choices of a Literal from pydantic's "'a', 'b' or 'c'"."""
    return detail["ctx"]["expected"].split("'")[1::2]


def fields_at(model: type[BaseModel], location: tuple[str | int, ...]) -> dict[str, Any]:
    """Fields of the config at pydantic's location, through lists and unions; a part may be a union's tag."""
    choices: dict[str, type[BaseModel]] = {}
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            annotation = model.model_fields[part].annotation
            model, choices = next(models_in(annotation), model), dict(tagged_in(annotation))
        elif part in choices:
            model = choices[part]
    return model.model_fields


def tagged_in(annotation: Any) -> Iterator[tuple[str, type[BaseModel]]]:
    """(tag, model) for every member of a tagged union, anywhere inside a type."""
    tags = [mark.tag for mark in getattr(annotation, "__metadata__", ()) if isinstance(mark, Tag)]
    yield from ((tag, model) for tag in tags for model in models_in(annotation))
    for inner in get_args(annotation):
        yield from tagged_in(inner)


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Every pydantic model inside a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)
