"""Warm-up requests: Triton computes them when it loads a model, so that the first caller does not wait for memory and kernels.

Their data are files in NAME/warmup/, of real text: masks of zeros or missing special tokens would be refused.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Encoding, Tokenizer
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig
from tritonclient.utils import serialize_byte_tensor, triton_to_np_dtype

from serving.backends.door import ENCODING_FIELDS, TASK_NUMBER
from serving.layout.text_outputs import PAIR, TASK, TEXT
from serving.layout.version_file import VersionFacts

FOLDER = "warmup"
"""Triton's name of the folder, beside the versions."""
WORD = "a"


def add_token_samples(config: ModelConfig, facts: VersionFacts, tokenizer_folder: Path) -> dict[str, bytes]:
    """Add a short and a long row to a config that takes tokens; returns file name -> content. Nothing for other inputs."""
    inputs = {tensor.name: config_type(tensor.data_type) for tensor in config.input}
    if not set(inputs) <= {*ENCODING_FIELDS, *([TASK_NUMBER] if facts.tasks else [])} or config.max_batch_size == 0:
        return {}
    files = {}
    for size, (_, encoding) in sample_texts(facts, tokenizer_folder).items():
        sample = config.model_warmup.add(name=size, batch_size=1)
        for name, type_ in inputs.items():
            tokens = [0] if name == TASK_NUMBER else getattr(encoding, ENCODING_FIELDS[name])
            values = np.array(tokens, dtype=triton_to_np_dtype(type_))
            files[f"{size}_{name}"] = values.tobytes()
            value = sample.inputs[name]
            value.data_type, value.input_data_file = f"TYPE_{type_}", f"{size}_{name}"
            value.dims.append(len(values))
    return files


def add_text_samples(config: ModelConfig, facts: VersionFacts, tokenizer_folder: Path) -> dict[str, bytes]:
    """Add a short and a long text to a config that takes texts; returns file name -> content."""
    if config.max_batch_size == 0:
        return {}
    files = {}
    for size, (text, _) in sample_texts(facts, tokenizer_folder).items():
        sample = config.model_warmup.add(name=size, batch_size=1)
        contents = {TEXT: text, PAIR: WORD, **({TASK: facts.tasks[0]["name"]} if facts.tasks else {})}
        for name, content in ((tensor.name, contents[tensor.name]) for tensor in config.input if not tensor.optional):
            files[f"{size}_{name}"] = serialize_byte_tensor(np.array([content.encode()], dtype=object)).item()
            value = sample.inputs[name]
            value.data_type, value.input_data_file = "TYPE_STRING", f"{size}_{name}"
            value.dims.append(1)
    return files


def sample_texts(facts: VersionFacts, tokenizer_folder: Path) -> dict[str, tuple[str, Encoding]]:
    """A text and its encoding for each of "short" and "long": one word, and about as many as fit into `max_length`."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    tokenizer.enable_truncation(facts.max_length)
    second = (WORD,) if facts.pair else ()
    samples = {}
    for size, count in (("short", 1), ("long", facts.max_length)):
        # a truncated text would be refused where its words are tagged
        while (encoding := tokenizer.encode(" ".join([WORD] * count), *second)).overflowing and count > 1:
            count -= max(1, count // 16)
        samples[size] = " ".join([WORD] * count), encoding
    return samples


def config_type(number: int) -> str:
    """Triton's short name, such as INT64, of a data type's number in a config."""
    return DataType.Name(number).removeprefix("TYPE_")
