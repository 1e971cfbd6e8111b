"""Every number and every list of every config has an upper bound: a slip of the keyboard is refused, not run for a year."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

import pytest
from annotated_types import MaxLen
from pydantic import BaseModel, TypeAdapter, ValidationError

from pipelines.engine.stage import all_stages
from pipelines.file.faults import models_in
from pipelines.file.pipeline_file import PipelineFile

HUGE = (10**30, 1e300, -(10**30), -1e300)
ANY_LENGTH = {"text": "one column or two, by its validator", "modules": "names of the anatomy, each once, by its validator"}


def configs() -> set[type[BaseModel]]:
    """The config of every stage, the top level of a file, and every config inside them."""
    found, waiting = set(), [PipelineFile, *(stage.config for stage in all_stages())]
    while waiting:
        model = waiting.pop()
        if model not in found:
            found.add(model)
            waiting += [inner for field in model.model_fields.values() for inner in models_in(field.annotation)]
    return found


FIELDS = [
    pytest.param(name, field, id=f"{model.__name__}.{name}")
    for model in sorted(configs(), key=lambda one: one.__name__)
    for name, field in model.model_fields.items()
    if field.annotation != list[Any]  # the stages themselves, each a config of its own
]


def parts(kind: Any, metadata: tuple = ()) -> Iterator[tuple[Any, tuple]]:
    """Every type inside an annotation, configs apart, each with what is said of it there."""
    if get_origin(kind) is Annotated:
        yield from parts(get_args(kind)[0], (*metadata, *kind.__metadata__))
        return
    yield kind, metadata
    if get_origin(kind) is not typing.Literal:
        for inner in get_args(kind):
            yield from parts(inner)


def accepts(adapter: TypeAdapter, value: object) -> bool:
    with contextlib.suppress(ValidationError):
        adapter.validate_python(value)
        return True
    return False


@pytest.mark.parametrize(("name", "field"), FIELDS)
def test_no_number_and_no_list_is_without_an_upper_bound(name, field):
    """A new key fails here until it says how large it may be: `le=` or `max_length=` with a word of file/limits.py."""
    whole = Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    adapter = TypeAdapter(whole)
    for huge in HUGE:
        assert not any(accepts(adapter, value) for value in (huge, [huge], {"key": huge})), f"{name} takes {huge:g}: add le="
    for kind, metadata in parts(whole):
        holds = get_origin(kind) in (list, tuple) or (get_origin(kind) is dict and get_args(kind)[0] is str)
        if holds and name not in ANY_LENGTH:
            said = [one for item in (*field.metadata, *metadata) for one in (item, *getattr(item, "metadata", ()))]
            assert any(isinstance(one, MaxLen) for one in said), f"{name} is a list of any length: add max_length="
