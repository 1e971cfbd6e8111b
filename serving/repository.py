"""Triton model repositories: FOLDER/NAME/{config.pbtxt, labels.txt, tokenizer/, 1/model.onnx}.

A repository holds nothing of the machine it was written on: the same folder runs on a production Triton (stock onnxruntime
backend) and on the embedded server, and two writes of the same model are equal byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import UserError
from compressor.models import TOKENIZER_FILES

if TYPE_CHECKING:
    from onnx import ValueInfoProto
    from tritonclient.grpc.model_config_pb2 import ModelConfig

LOGITS = "logits"
DATA_TYPES = {
    "FLOAT16": "TYPE_FP16",
    "FLOAT": "TYPE_FP32",
    "DOUBLE": "TYPE_FP64",
    "INT8": "TYPE_INT8",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "UINT8": "TYPE_UINT8",
    "BOOL": "TYPE_BOOL",
}


def write_repository(
    folder: Path,
    name: str,
    onnx_path: Path,
    *,
    labels: Sequence[str] = (),
    tokenizer_folder: Path | None = None,
    max_batch_size: int = 32,
    max_queue_delay_us: int = 500,
    parameters: Mapping[str, object] | None = None,
) -> Path:
    """Add the model `name` to the repository `folder` and return its folder. Call again for further models.

    Tensors, types and dims come from the ONNX file; with `max_batch_size` > 0 its first axis must be dynamic and is left out
    of the config. `parameters` are written as strings beside the two that are added here, `labels` (JSON list) and
    `tokenizer_sha256`; the client reads `max_length` (tokens), `pad_id` and `end_id` (a token that every text must make equally
    often), the backend `intra_op_thread_count`.
    Raises UserError E720 (name), E721 (ONNX file), E722 (labels), E723 (tokenizer).
    """
    model_folder = Path(folder) / name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError("E720", f"'{name}' is not a model name", "Use letters, digits, '_', '-' and '.'")
    if model_folder.exists():
        raise UserError("E720", f"the repository already holds a model '{name}'", "Choose another name", str(folder))

    config = make_config(
        name,
        Path(onnx_path),
        labels=labels,
        tokenizer_folder=tokenizer_folder,
        max_batch_size=max_batch_size,
        max_queue_delay_us=max_queue_delay_us,
        parameters=parameters,
    )
    (model_folder / "1").mkdir(parents=True)
    shutil.copyfile(onnx_path, model_folder / "1" / "model.onnx")
    write_config(config, model_folder)
    if labels:
        (model_folder / "labels.txt").write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    if tokenizer_folder is not None:
        (model_folder / "tokenizer").mkdir()
        for path in tokenizer_files(tokenizer_folder):
            shutil.copyfile(path, model_folder / "tokenizer" / path.name)
    return model_folder


def make_config(
    name: str,
    onnx_path: Path,
    *,
    labels: Sequence[str] = (),
    tokenizer_folder: Path | None = None,
    max_batch_size: int = 32,
    max_queue_delay_us: int = 500,
    parameters: Mapping[str, object] | None = None,
) -> ModelConfig:
    """The whole config that `write_repository` writes for these arguments. Raises UserError E721, E722, E723."""
    config = describe(onnx_path, name, max_batch_size, max_queue_delay_us)
    values = {key: str(value) for key, value in (parameters or {}).items()}
    if labels:
        set_labels(config, labels)
        values["labels"] = json.dumps(list(labels), ensure_ascii=False)
    if tokenizer_folder is not None:
        values["tokenizer_sha256"] = tokenizer_sha256(tokenizer_folder)
    for key, value in values.items():
        config.parameters[key].string_value = value
    return config


def describe(onnx_path: Path, name: str, max_batch_size: int, max_queue_delay_us: int) -> ModelConfig:
    """The config of an ONNX file without labels and parameters. Raises UserError E721."""
    import onnx
    from google.protobuf.message import DecodeError
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    try:
        graph = onnx.load(onnx_path, load_external_data=False).graph
    except (OSError, DecodeError) as error:
        raise UserError("E721", f"not a readable ONNX file ({error})", "Export the model again", str(onnx_path)) from error
    config = ModelConfig(name=name, backend="onnxruntime", max_batch_size=max_batch_size)
    initializers = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name not in initializers:
            config.input.add(**tensor_fields(value, onnx_path, batched=max_batch_size > 0))
    for value in graph.output:
        config.output.add(**tensor_fields(value, onnx_path, batched=max_batch_size > 0))
    config.instance_group.add(count=1)
    if max_batch_size > 0:
        config.dynamic_batching.max_queue_delay_microseconds = max_queue_delay_us
    return config


def tensor_fields(value: ValueInfoProto, onnx_path: Path, *, batched: bool) -> dict[str, object]:
    """Name, type and dims (-1 where dynamic, without the batch axis) of one input or output. Raises UserError E721."""
    from onnx import TensorProto

    tensor = value.type.tensor_type
    type_name = TensorProto.DataType.Name(tensor.elem_type)
    dims = [axis.dim_value if axis.HasField("dim_value") else -1 for axis in tensor.shape.dim]
    if type_name not in DATA_TYPES:
        raise UserError("E721", f"'{value.name}' is a tensor of {type_name}", "Export it with a number type", str(onnx_path))
    if batched and (len(dims) < 2 or dims[0] != -1):
        mend = "Export it with a dynamic first axis, or use max_batch_size 0"
        raise UserError("E721", f"'{value.name}' has no batch axis: its shape is {dims}", mend, str(onnx_path))
    return {"name": value.name, "data_type": DATA_TYPES[type_name], "dims": dims[1:] if batched else dims}


def set_labels(config: ModelConfig, labels: Sequence[str]) -> None:
    """Name the classes of the output `logits`. Raises UserError E722 when model and labels disagree."""
    logits = next((output for output in config.output if output.name == LOGITS), None)
    mend = "Give one label a class, in the order of the model's classes"
    if logits is None:
        names = ", ".join(output.name for output in config.output)
        raise UserError("E722", f"labels need an output '{LOGITS}', and the model's outputs are: {names}", mend)
    if logits.dims[-1] not in (-1, len(labels)):
        raise UserError("E722", f"{len(labels)} labels for a model of {logits.dims[-1]} classes", mend)
    if broken := [label for label in labels if not label or len(label.splitlines()) != 1]:
        raise UserError("E722", f"{broken[0]!r} is no label", "A label is one line of text")
    if len(set(labels)) < len(labels):
        raise UserError("E722", f"the labels repeat: {', '.join(labels)}", mend)
    logits.dims[-1] = len(labels)
    logits.label_filename = "labels.txt"


def tokenizer_sha256(folder: Path) -> str:
    """sha256 over names and bytes of the folder's tokenizer files. Raises UserError E723 without a tokenizer.json."""
    digest = hashlib.sha256()
    for path in tokenizer_files(folder):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer's files among whatever else the folder holds, sorted. Raises UserError E723 without a tokenizer.json."""
    if not Path(folder, "tokenizer.json").is_file():
        raise UserError("E723", "no tokenizer.json", "Save the tokenizer there with save_pretrained", str(folder))
    return [path for name in TOKENIZER_FILES if (path := Path(folder, name)).is_file()]


def write_config(config: ModelConfig, model_folder: Path) -> None:
    """Write config.pbtxt. The text form sorts its maps, so equal configs are equal bytes."""
    from google.protobuf import text_format

    (model_folder / "config.pbtxt").write_text(text_format.MessageToString(config), encoding="utf-8")


def read_config(model_folder: Path) -> ModelConfig:
    """The parsed config.pbtxt of a model folder. Raises UserError E724 when it is missing or misspelt."""
    from google.protobuf import text_format
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    path = Path(model_folder, "config.pbtxt")
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise UserError("E724", f"not a model config ({error})", "Deploy the model again", str(path)) from error


def model_names(folder: Path) -> list[str]:
    """Names of the repository's models, sorted: the folders with a config.pbtxt."""
    return sorted(path.parent.name for path in Path(folder).glob("*/config.pbtxt"))
