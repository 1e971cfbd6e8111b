"""The config.pbtxt of a model that continues texts: decoupled, because a request has many responses."""

from __future__ import annotations

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from serving.layout.text_outputs import GENERATE_BACKEND, TEXT

OPTIONS = (
    ("MAX_TOKENS", "TYPE_INT32", 1),
    ("TEMPERATURE", "TYPE_FP32", 1),
    ("TOP_K", "TYPE_INT32", 1),
    ("TOP_P", "TYPE_FP32", 1),
    ("SEED", "TYPE_INT64", 1),
    ("STOP", "TYPE_STRING", -1),
    ("STREAM", "TYPE_BOOL", 1),
)
"""(name, type, values) of every optional input."""
PIECES = (("TEXT", "TYPE_STRING", 1), ("TOKENS", "TYPE_INT32", 1), ("FINISH", "TYPE_STRING", 1))
"""Outputs of every response: the next piece, the tokens so far, and why the text ended (empty before)."""
STREAMS, WAITING = 8, 256
"""Texts that are computed at a time, and that may wait beside them."""


def generator_config(name: str, *, threads: int | None = None) -> ModelConfig:
    """The config of one instance; `threads` None: one a core."""
    config = ModelConfig(name=name, backend=GENERATE_BACKEND, max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    config.input.add(name=TEXT, data_type="TYPE_STRING", dims=[1])
    for tensor, type_, values in OPTIONS:
        config.input.add(name=tensor, data_type=type_, dims=[values], optional=True)
    for tensor, type_, values in PIECES:
        config.output.add(name=tensor, data_type=type_, dims=[values])
    config.instance_group.add(count=1, kind=ModelInstanceGroup.KIND_CPU)
    config.parameters["max_streams"].string_value = str(STREAMS)
    config.parameters["max_waiting"].string_value = str(WAITING)
    if threads:
        config.parameters["intra_op_thread_count"].string_value = str(threads)
    return config
