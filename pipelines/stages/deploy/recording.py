"""Record what the live server answers to some validation rows, for deployments elsewhere to be checked against."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from compressor.tasks import TaskConfig
from compressor.tasks.data import Data
from compressor.tasks.features import pad
from compressor.tasks.reading import read_task
from pipelines.stages.served_checks import Served, as_sent
from serving.deployment.answers import Answer, Tensors, tensor, write_answers
from serving.deployment.triton_control import Control
from serving.layout.text_outputs import PAIR, TEXT, TEXT_SUFFIX
from serving.repository import read_config

RECORDED = 16
"""Rows, each a request, or several if it is more rows of the model than one request may have."""


def record_answers(served: Served, task: TaskConfig, data: Data, url: str) -> None:
    """Write the answers of every interface, once they are compared, beside its version's files. Raises UserError E712."""
    control, places = Control.at(url), data.compared_places(RECORDED)
    requests = {"tokens": token_requests, "text": text_requests}
    for interface in served.interfaces:
        name = served.name + (TEXT_SUFFIX if interface == "text" else "")
        made = list(requests[interface](served, task, data, places))
        answers = [Answer(inputs, control.infer(name, inputs)) for inputs in made]
        write_answers(served.repository / name / "1", answers)


def token_requests(served: Served, _: TaskConfig, data: Data, places: list[int]) -> Iterator[Tensors]:
    """Rows as tokens, in the types that the model declares."""
    declared = {field.name: field.data_type for field in read_config(served.repository / served.name).input}
    types = {name: type_names()[number].removeprefix("TYPE_") for name, number in declared.items()}
    for place in places:
        for arrays in served.requests_of(pad([data.validation.tokens[place]], data.pad_id)):
            yield [tensor(name, arrays[name], type_) for name, type_ in types.items()]


def type_names() -> dict[int, str]:
    """Triton's data types by their numbers."""
    from tritonclient.grpc.model_config_pb2 import DataType

    return {number: name for name, number in DataType.items()}


def text_requests(served: Served, task: TaskConfig, data: Data, places: list[int]) -> Iterator[Tensors]:
    """Rows as texts."""
    split = read_task(task).validation
    for place in places:
        first, *others = texts if not isinstance(texts := as_sent(split.texts[place]), str) else (texts,)
        columns = {TEXT: [first] * max(len(others), 1), **({PAIR: others} if others else {})}
        cells = {name: np.array(column, dtype=object)[:, None] for name, column in columns.items()}
        for arrays in served.requests_of(cells):
            yield [tensor(name, values, "BYTES") for name, values in arrays.items()]
