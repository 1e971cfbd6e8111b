"""The JSON schema of a whole pipeline file, for editors, and of one stage, for tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from compressor.models.modules import MODULES
from compressor.tasks import KINDS
from compressor.tasks.sources.glue import PREFIX, TASKS
from compressor.tasks.task_kind import kind_of
from pipelines.engine.stage import all_stages, load_stage
from pipelines.file.pipeline_file import PipelineFile

DIALECT = "http://json-schema.org/draft-07/schema#"
"""The dialect with the best support in editors."""
SHARE = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
NO_BOUND = 10**9
"""Larger bounds only catch typing errors, and are not shown in tables."""
REFERENCE = "#/$defs/{model}"

Schema = dict[str, Any]


def schema_text() -> str:
    """The JSON schema of a pipeline file as text."""
    return json.dumps(pipeline_schema(), indent=1, ensure_ascii=False) + "\n"


def pipeline_schema() -> Schema:
    """JSON schema of a pipeline file: everything that `compress check` accepts, except checks in code (order, methods)."""
    top, forms = _tidy(PipelineFile.model_json_schema(ref_template=REFERENCE)), {}
    definitions = top.pop("$defs")
    _allow_glue(top["properties"], definitions)
    for stage in all_stages():
        forms[stage.name], more = stage_schema(stage.name)
        definitions |= more
    definitions["TaskConfig"]["properties"]["metric"]["anyOf"][0] = {"enum": metric_names()}
    bare = [name for name, form in forms.items() if {"type": "null"} in form["anyOf"]]
    mapping = {"type": "object", "properties": forms, "additionalProperties": False, "minProperties": 1, "maxProperties": 1}
    top["properties"]["stages"]["items"] = {"anyOf": [mapping, {"enum": bare}]}
    several = {"oneOf": [{"required": ["task"]}, {"required": ["tasks"]}]}
    return {"$schema": DIALECT, "title": "A pipeline of compress", **top, **several, "$defs": definitions}


def metric_names() -> list[str]:
    """The metrics of all kinds of tasks; which of them a kind has is checked in code."""
    return list(dict.fromkeys(metric.key for name in KINDS for metric in kind_of(name).choices))


def _allow_glue(properties: Schema, definitions: dict[str, Schema]) -> None:
    """Add GLUE's names of tasks, which are replaced by a task's keys before validation."""
    keys = {
        "glue": {"enum": list(TASKS), "description": "a task of GLUE: its files, columns, kind and metric"},
        "folder": {"type": "string", "description": "folder of the GLUE download; default: glue beside this file, or the hub"},
    }
    task = definitions["TaskConfig"]
    definitions["Glue"] = {**task, "properties": {**keys, **task["properties"]}, "required": ["glue"]}
    forms = [{"$ref": REFERENCE.format(model="Glue")}, {"enum": [f"{PREFIX}{name}" for name in TASKS]}]
    properties["task"]["anyOf"][1:1] = forms
    several = next(form for form in properties["tasks"]["anyOf"] if "additionalProperties" in form)
    several["additionalProperties"] = {"anyOf": [several["additionalProperties"], *forms]}


def stage_schema(name: str) -> tuple[Schema, dict[str, Schema]]:
    """(schemas of what may follow the name of a stage, the definitions that they refer to)."""
    stage, config = load_stage(name), config_schema(name)
    definitions, own_name = config.pop("$defs", {}), stage.config.__name__
    definitions[own_name] = config
    forms: list[Schema] = [{"$ref": REFERENCE.format(model=own_name)}]
    for short, form in stage.config.short_forms(definitions):
        if short:
            definitions[short], form = form, {"$ref": REFERENCE.format(model=short)}
        forms.append(form)
    if len(forms) == 1 and not config.get("required"):
        forms.append({"type": "null"})
    return {"description": stage.summary, "anyOf": forms}, definitions


def config_schema(name: str) -> Schema:
    """The schema of a stage's config, including what its validators accept besides."""
    config = load_stage(name).config
    schema = _tidy(config.model_json_schema(ref_template=REFERENCE))
    config.amend_schema(schema)
    return schema


def _tidy(part: Any) -> Any:
    """Remove titles that only repeat the keys, add the bounds of counts and shares; `oneOf` of kinds that only code can
    distinguish becomes `anyOf`."""
    if isinstance(part, list):
        return [_tidy(item) for item in part]
    if not isinstance(part, dict):
        return part
    tidied = {}
    for key, value in part.items():
        if key == "properties":
            tidied[key] = {name: _tidy(field) for name, field in value.items()}
        elif key == "oneOf":
            tidied["anyOf"] = _tidy(value)
        elif key == "anyOf" and _counts(value):
            tidied[key] = [{**value[0], "minimum": 1}, SHARE, *value[2:]]
        elif key not in ("title", "discriminator", "format"):
            tidied[key] = _tidy(value)
    return tidied


def _counts(forms: list[Schema]) -> bool:
    """Whether this is pydantic's schema of `CountOrShare`, which lacks the lower bounds."""
    return forms[0].get("type") == "integer" and forms[1] == {"type": "number"}


Row = tuple[str, str, str, str, str]


def tables(name: str) -> Iterator[tuple[str, list[Row]]]:
    """(title, rows) of a stage's keys, and of every mapping inside them: key, type, default, bounds, meaning."""
    schema = config_schema(name)
    definitions, todo, seen = schema.get("$defs", {}), [(name, schema)], set()
    while todo:
        title, config = todo.pop(0)
        required = config.get("required", [])
        yield title, [_row(key, form, key in required) for key, form in config["properties"].items()]
        for key, form in config["properties"].items():
            for model in _models(form):
                if model not in seen:
                    seen.add(model)
                    structure = definitions[model]["properties"].get("structure", {}).get("const")
                    kind = f" with structure: {structure}" if structure else ""
                    todo.append((f"{title}.{key}{kind}", definitions[model]))


def _models(form: Schema) -> Iterator[str]:
    """Names of the definitions that a key's values may match."""
    if "$ref" in form:
        yield form["$ref"].rpartition("/")[2]
    for part in (*form.get("anyOf", ()), *([form["items"]] if "items" in form else ())):
        yield from _models(part)


def _row(key: str, form: Schema, required: bool) -> Row:
    default = "required" if required else _value(form.get("default"))
    return key, _type(form), default, ", ".join(dict.fromkeys(_bounds(form))), form.get("description", "")


def _value(value: Any) -> str:
    """Format a default as in a pipeline file; '' for null."""
    if value is None or value == list(MODULES):
        return "" if value is None else "all"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False).replace('"', "")


NAMES = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "object": "keys"}


def _type(form: Schema) -> str:
    """The type of a value, in words."""
    if "anyOf" in form:
        words = list(dict.fromkeys(filter(None, map(_type, form["anyOf"]))))
        if words[1:] == [f"list of {words[0]}"]:
            return f"{words[0]}, or a list of those"
        return (" | " if all("enum" in part for part in form["anyOf"]) else " or ").join(words)
    if "enum" in form:
        return " | ".join(map(_value, form["enum"]))
    if "const" in form:
        return _value(form["const"])
    if "$ref" in form:
        return "keys, see below"
    if form.get("type") == "array":
        inner = _type(form.get("items", {}))
        return f"list of {inner}" if inner else "list"
    return NAMES.get(form.get("type"), "")


BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minItems": "{} or more",
    "pattern": "letters, digits, _ . -",
}


def _bounds(form: Schema) -> Iterator[str]:
    """The bounds of a value, in words; for a count or a share, both."""
    if SHARE in form.get("anyOf", ()) and form["anyOf"][0].get("type") == "integer":
        yield "≥ 1, or a share > 0 and < 1"
        return
    for part in (form, *form.get("anyOf", ()), form.get("items", {})):
        for key, words in BOUNDS.items():
            if key in part and (key == "pattern" or part[key] < NO_BOUND):
                yield words.format(part[key])
