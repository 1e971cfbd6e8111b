"""The JSON schema of pipeline files, the tables of keys, and the list of recipes."""

import json
import re

import jsonschema
import pytest
import yaml

from compressor.errors import UserErrors
from pipelines.engine.stage import STAGE_NAMES, all_stages
from pipelines.file.config import RECIPES, load_pipeline
from pipelines.file.faults import models_in
from pipelines.file.pipeline_file import PipelineFile
from pipelines.file.schema import pipeline_schema, tables
from pipelines.file.yaml_source import read_yaml

SCHEMA = pipeline_schema()
FRAME = {"name": "a", "model": "./m", "task": {"train": "t.tsv", "validation": "d.tsv"}}
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


def fits(value, schema: dict, root: dict = SCHEMA) -> bool:
    """What a validator of JSON schema says, for the words that ours has."""
    if "$ref" in schema:
        return fits(value, root["$defs"][schema["$ref"].rpartition("/")[2]])
    checks = {
        "type": lambda kind: isinstance(value, TYPES[kind]) and (kind == "boolean" or not isinstance(value, bool)),
        "enum": lambda choices: any(value == one and type(value) is type(one) for one in choices),
        "const": lambda one: value == one,
        "anyOf": lambda forms: any(fits(value, form) for form in forms),
        "oneOf": lambda forms: sum(fits(value, form) for form in forms) == 1,
        "minimum": lambda bound: value >= bound,
        "maximum": lambda bound: value <= bound,
        "exclusiveMinimum": lambda bound: value > bound,
        "exclusiveMaximum": lambda bound: value < bound,
        "minLength": lambda count: len(value) >= count,
        "pattern": lambda pattern: re.search(pattern, value) is not None,
        "maxLength": lambda count: len(value) <= count,
        "minItems": lambda count: len(value) >= count,
        "maxItems": lambda count: len(value) <= count,
        "items": lambda form: all(fits(one, form) for one in value),
        "required": lambda keys: set(keys) <= set(value),
        "minProperties": lambda count: len(value) >= count,
        "maxProperties": lambda count: len(value) <= count,
        "propertyNames": lambda form: all(fits(key, form) for key in value),
        "properties": lambda forms: all(fits(value[key], forms[key]) for key in value if key in forms),
        "additionalProperties": lambda form: all(
            form is not False and fits(value[key], form) for key in value if key not in schema.get("properties", {})
        ),
    }
    silent = {"description", "default", "$schema", "title", "$defs"}
    assert set(schema) <= set(checks) | silent, set(schema) - set(checks) - silent
    ofs = sorted(set(schema) & set(checks), key=lambda key: key != "type")  # its type first: the others rely on it
    return all(checks[key](schema[key]) for key in ofs)


def valid(pipeline: dict) -> bool:
    """By a real validator, too."""
    found = fits(pipeline, SCHEMA)
    assert jsonschema.Draft7Validator(SCHEMA).is_valid(pipeline) == found
    return found


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_fits_the_schema(recipe):
    assert valid(read_yaml(recipe).data)


RIGHT = [
    ["merge", "export", {"report": None}],
    [{"tune": {"modules": "all", "epochs": 0.5}}, {"tune": {"modules": ["query", "value"], "id": "again"}}],
    [{"prune": {"structure": "heads", "remove": 1, "id": "cut"}}, {"prune": [{"structure": "weights", "pattern": "2:4"}]}],
    [{"prune": {"items": [{"structure": "weights", "remove": {"adapted": 0.1, "others": 0.2}}]}}],
    [{"prune": {"target": {"speedup": 2}, "criterion": {"heads": "taylor", "neurons": "weight"}, "refit": 512}}],
    [{"prune": {"structure": "heads", "remove": 1, "refit": 64}}],
    [{"prune": {"items": [{"structure": "weights", "pattern": "2:4"}], "refit": 8}}],
    [{"export": {"precision": "auto", "runtime": ["openvino"]}}, {"recover": {"distill": True}}, {"deploy": {"name": "x"}}],
]
WRONG = [
    [{"tun": None}],
    ["prune"],
    [{"tune": {"epoch": 2}}],
    [{"tune": {"epochs": "2"}}],
    [{"tune": {"method": "dse"}}],
    [{"tune": {"modules": ["querry"]}}],
    [{"tune": None, "merge": None}],
    [{"prune": {"structure": "heads"}}],
    [{"prune": {"structure": "heads", "remove": 0}}],
    [{"prune": {"structure": "heads", "remove": 1, "refit": 0}}],
    [{"prune": {"target": {"flops": 0.5}, "refit": 0.5}}],
    [{"prune": {"structure": "weights", "remove": 0.1, "normalize": True}}],
    [{"export": {"precision": ["fp64"]}}],
    [{"benchmark": {"rounds": 1}}],
    [],
]


@pytest.mark.parametrize("stages", RIGHT, ids=str)
def test_what_a_pipeline_may_say_fits(stages):
    assert valid({**FRAME, "stages": stages})


@pytest.mark.parametrize(
    ("task", "fits_schema"),
    [
        ("glue/sst2", True),
        ({"glue": "rte", "folder": "glue", "max_length": 64}, True),
        ({"train": "hub:a/b:c/train:9", "validation": "d.parquet", "header": False}, True),
        ("glue/sst3", False),
        ({"glue": "sst2", "foldr": "x"}, False),
        ("sst2", False),
    ],
    ids=str,
)
def test_a_task_may_be_one_of_glue(task, fits_schema):
    assert valid({**FRAME, "task": task, "stages": ["merge"]}) == fits_schema
    assert valid({"name": "a", "model": "./m", "tasks": {"x": task}, "stages": ["merge"]}) == fits_schema


@pytest.mark.parametrize("stages", WRONG, ids=str)
def test_mistakes_do_not(stages, tmp_path):
    """What the schema refuses is refused by the program, too."""
    pipeline = {**FRAME, "stages": stages}
    assert not valid(pipeline)
    (tmp_path / "pipeline.yaml").write_text(yaml.safe_dump(pipeline))
    with pytest.raises(UserErrors):
        load_pipeline(tmp_path / "pipeline.yaml")


@pytest.mark.parametrize("key", ["name", "model", "task", "stages"])
def test_keys_that_must_be_there(key):
    whole = {**FRAME, "stages": ["merge"]}
    assert valid(whole) and not valid({name: value for name, value in whole.items() if name != key})
    assert not valid({**whole, "tasks": {"a": whole["task"]}}) and not valid({**whole, "sed": 1})


def every_model(model, seen):
    if model not in seen:
        seen.add(model)
        for field in model.model_fields.values():
            for inner in models_in(field.annotation):
                every_model(inner, seen)
    return seen


def test_every_key_has_a_description():
    """It is what `list stages`, the schema and an editor show."""
    models = every_model(PipelineFile, set())
    for stage in all_stages():
        every_model(stage.config, models)
    silent = [
        f"{model.__name__}.{name}" for model in models for name, field in model.model_fields.items() if not field.description
    ]
    assert len(models) > 12 and silent == []


@pytest.mark.parametrize("stage", STAGE_NAMES)
def test_the_tables_of_a_stage_have_every_key_of_it(stage):
    found = dict(tables(stage))
    assert {row[0] for row in found[stage]} == set(next(one for one in all_stages() if one.name == stage).config.model_fields)
    assert all(kind and meaning for rows in found.values() for _, kind, _, _, meaning in rows)


def test_list_stages_of_one_stage(compress):
    code, shown, _ = compress("list", "stages", "tune")
    assert code == 0
    assert "  epochs                 number (> 0, ≤ 1000); default 2\n" in shown and "passes over the training rows" in shown
    shown = compress("list", "stages", "prune")[1]
    assert "its name in this pipeline" in shown and "tune" not in shown.split("its name in this pipeline")[1].splitlines()[0]
    assert "prune.search.target" in shown and "prune.items with structure: weights" in shown
    assert "remove                 integer or number (≥ 1, or a share > 0 and < 1); required" in shown
    assert [row["name"] for row in json.loads(compress("list", "stages", "tune", "--json")[1])] == ["tune"]
    code, _, error = compress("list", "stages", "tun")
    assert (code, error[:4]) == (2, "E103")


def test_list_recipes_tells_each_with_its_command(compress):
    rows = json.loads(compress("list", "recipes", "--json")[1])
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    assert [row["name"] for row in rows if row["minutes"]] == [row["name"] for row in rows][: len(names)] == names
    assert all(len(row["summary"]) > 20 for row in rows)
    shown = compress("list", "recipes")[1]
    assert "about 8 minutes on two cores: compress run quickstart" in shown
    assert "compress sweep dsee_table1 --scale small --folder DATA" in shown


def test_list_schema_prints_or_writes_it(compress, tmp_path):
    code, shown, _ = compress("list", "schema")
    assert code == 0 and json.loads(shown) == SCHEMA
    assert compress("list", "schema", "--out", tmp_path / "schema.json")[0] == 0
    assert (tmp_path / "schema.json").read_text() == shown
    code, _, error = compress("list", "schema", "--out", tmp_path / "no" / "schema.json")
    assert (code, error[:4]) == (2, "E801")
