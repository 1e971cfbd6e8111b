"""The config.pbtxt of a repository's models: NAME takes tokens and gives logits, NAME-text takes texts and gives answers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelQueuePolicy

from compressor.arguments import require_one_of
from compressor.errors import UserError
from export.runtimes.runtime import Device, Runtime, TensorSpec
from serving.backends.door import TASK_NUMBER
from serving.layout.knobs import DEFAULT_KNOBS, Knobs, batch_tokens, instances, streams
from serving.layout.text_outputs import (
    ANY_KIND,
    CLASSES,
    LABELS_FILE,
    LOGITS,
    PAIR,
    TASK,
    TEXT,
    TEXT_BACKEND,
    TEXT_OUTPUTS,
)
from serving.layout.version_file import VersionFacts

DATA_TYPES = {
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "int8": "TYPE_INT8",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "uint8": "TYPE_UINT8",
    "bool": "TYPE_BOOL",
}
"""Triton's word for an element type."""


def token_config(
    name: str, path: Path, runtime: Runtime, facts: VersionFacts | None = None, knobs: Knobs = DEFAULT_KNOBS
) -> ModelConfig:
    """The config of the model that takes tokens, for a stock Triton backend; tensors, types and dims come from the model file.

    Nothing merges its requests: rows of different lengths cannot share a batch. Raises UserError E721 (file), E722 (labels).
    """
    config = ModelConfig(name=name, backend=runtime.backend, max_batch_size=knobs.max_batch_size)
    for fields, tensors in zip((config.input, config.output), runtime.tensors(path), strict=True):
        for tensor in tensors:
            if facts is not None and facts.tasks and tensor.name == TASK_NUMBER:
                add_task_number(config)
            else:
                fields.add(**fields_of(tensor, path, batched=knobs.max_batch_size > 0))
    _add_instances(config, runtime, facts, knobs)
    runtime.configure(config, path)
    if facts is not None and facts.tasks:
        # the most outputs of any task may be another number in the next version
        config.output[0].dims[-1] = -1
    elif facts is not None and facts.labels:
        set_labels(config, facts.labels)
    return config


def add_task_number(config: ModelConfig) -> None:
    """Add the input with the number of each row's task: one number a row, which the model file takes as (batch,)."""
    config.input.add(name=TASK_NUMBER, data_type="TYPE_INT64", dims=[1]).reshape.SetInParent()


def text_config(name: str, runtime: Runtime, facts: VersionFacts, knobs: Knobs) -> ModelConfig:
    """The config of the model that takes texts, for this project's backend; dynamic batching merges its requests. Raises
    ValueError for facts of another kind of task."""
    require_one_of("task", facts.task, TEXT_OUTPUTS)
    config = ModelConfig(name=name, backend=TEXT_BACKEND, max_batch_size=knobs.max_batch_size)
    for tensor in (TEXT, PAIR) if facts.pair or facts.task == ANY_KIND else (TEXT,):
        # each request to a model of many tasks may be of one that reads pairs or not
        config.input.add(name=tensor, data_type="TYPE_STRING", dims=[1], optional=tensor == PAIR and bool(facts.tasks))
    if facts.tasks:
        config.input.add(name=TASK, data_type="TYPE_STRING", dims=[1])
    for tensor, type_, values in TEXT_OUTPUTS[facts.task]:
        dims = [(len(facts.labels) or -1) if values == CLASSES else values]
        output = config.output.add(name=tensor, data_type=type_, dims=dims)
        if tensor == "SCORES" and facts.labels:
            output.label_filename = LABELS_FILE
    _add_instances(config, runtime, facts, knobs)
    config.parameters["max_batch_tokens"].string_value = str(batch_tokens(knobs, runtime))
    config.parameters["streams"].string_value = str(streams(knobs, runtime))
    if len(facts.labels) == 1:
        # what a number is called, for clients
        config.parameters["label"].string_value = facts.labels[0]
    if knobs.max_batch_size > 0:
        config.dynamic_batching.max_queue_delay_microseconds = knobs.max_queue_delay_us
        _add_queue_policy(config, knobs)
    return config


def _add_queue_policy(config: ModelConfig, knobs: Knobs) -> None:
    """Limits of the queue, only where they are set: with any of them, Triton 2.51 lets some requests wait up to 500 ms.

    Its batcher then sleeps unless an instance is idle when a request comes, and is not woken when one becomes idle.
    """
    if knobs.max_queue_size or knobs.timeout_ms:
        policy = config.dynamic_batching.default_queue_policy
        policy.timeout_action = ModelQueuePolicy.REJECT
        policy.allow_timeout_override = True
        policy.max_queue_size = knobs.max_queue_size
        policy.default_timeout_microseconds = round(1000 * (knobs.timeout_ms or 0))


def _add_instances(config: ModelConfig, runtime: Runtime, facts: VersionFacts | None, knobs: Knobs) -> None:
    group = config.instance_group.add(count=instances(knobs, runtime))
    devices = _devices(runtime, facts, knobs)
    if len(devices) == 1:
        # without a kind, a server with a GPU would place int8 there, and one without would compute fp16 with casts
        group.kind = ModelInstanceGroup.KIND_CPU if devices == ("cpu",) else ModelInstanceGroup.KIND_GPU
    if knobs.threads:
        config.parameters[runtime.threads_parameter].string_value = str(knobs.threads)


def _devices(runtime: Runtime, facts: VersionFacts | None, knobs: Knobs) -> tuple[Device, ...]:
    """Where a model may be placed: on the device that is asked for, or on those of its file; () where neither is known."""
    if knobs.device:
        return (knobs.device,)
    return runtime.precisions.get(facts.precision, ()) if facts is not None else ()


def fields_of(tensor: TensorSpec, path: Path, *, batched: bool) -> dict[str, object]:
    """An input or output as written in a config, without the batch axis when `batched`. Raises UserError E721."""
    if tensor.type not in DATA_TYPES:
        raise UserError("E721", f"'{tensor.name}' is a tensor of {tensor.type}", "Export it with a number type", str(path))
    if batched and (len(tensor.shape) < 2 or tensor.shape[0] != -1):
        fix = "Export it with a dynamic first axis, or use max_batch_size 0"
        raise UserError("E721", f"'{tensor.name}' has no batch axis: its shape is {tensor.shape}", fix, str(path))
    dims = tensor.shape[1:] if batched else tensor.shape
    return {"name": tensor.name, "data_type": DATA_TYPES[tensor.type], "dims": dims}


def set_labels(config: ModelConfig, labels: Sequence[str]) -> None:
    """Name the classes of the output `logits`. Raises UserError E722 when their number differs from the labels'."""
    logits = next((output for output in config.output if output.name == LOGITS), None)
    fix = "Give one label a class, in the order of the model's classes"
    if logits is None:
        names = ", ".join(output.name for output in config.output)
        raise UserError("E722", f"labels need an output '{LOGITS}', and the model's outputs are: {names}", fix)
    if logits.dims[-1] not in (-1, len(labels)):
        raise UserError("E722", f"{len(labels)} labels for a model of {logits.dims[-1]} classes", fix)
    if broken := [label for label in labels if not label or len(label.splitlines()) != 1]:
        raise UserError("E722", f"{broken[0]!r} is not a label", "A label is one line of text")
    if len(set(labels)) < len(labels):
        raise UserError("E722", f"the labels repeat: {', '.join(labels)}", fix)
    logits.dims[-1] = len(labels)
    logits.label_filename = LABELS_FILE
