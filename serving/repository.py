"""Triton model repositories: FOLDER/NAME/{config.pbtxt, labels.txt, tokenizer/, 1/model.onnx}, or 1/model.xml and model.bin.

A repository contains nothing specific to the machine it was written on: the same folder runs on a production Triton (stock
onnxruntime or openvino backend) and on the embedded server, and two writes of the same model are equal byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from compressor.errors import UserError
from compressor.models.hub import TOKENIZER_FILES
from export.runtimes.runtime import Runtime, TensorSpec
from export.runtimes.runtime_registry import runtime_of
from serving.bundle import BACKENDS

LOGITS = "logits"
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


def write_repository(
    folder: Path,
    name: str,
    path: Path,
    *,
    runtime: Runtime | None = None,
    labels: Sequence[str] = (),
    tokenizer_folder: Path | None = None,
    max_batch_size: int = 32,
    max_queue_delay_us: int = 500,
    parameters: Mapping[str, object] | None = None,
) -> Path:
    """Add the model `name` to the repository `folder` and return its folder. Call again for further models.

    `path` is a model file of `runtime` (default: by its ending, an ONNX file or OpenVINO's .xml with its .bin beside it).
    Tensors, types and dims come from it; with `max_batch_size` > 0 its first axis must be dynamic and is left out of the
    config. `parameters` are written as strings, in addition to `labels` (JSON list), `tokenizer_sha256` and others; the client
    reads `max_length` (tokens), `pad_id` and `end_id` (a token that must occur equally often in every text), the backend
    `intra_op_thread_count` (onnxruntime) or `INFERENCE_NUM_THREADS` (openvino). Raises UserError E720 (name), E721 (model
    file), E722 (labels), E723 (tokenizer), E901 (packages of the runtime).
    """
    model_folder = Path(folder) / name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError("E720", f"'{name}' is not a model name", "Use letters, digits, '_', '-' and '.'")
    if model_folder.exists():
        raise UserError("E720", f"the repository already holds a model '{name}'", "Choose another name", str(folder))

    path, runtime = Path(path), runtime or runtime_of(Path(path))
    config = make_config(
        name,
        path,
        runtime=runtime,
        labels=labels,
        tokenizer_folder=tokenizer_folder,
        max_batch_size=max_batch_size,
        max_queue_delay_us=max_queue_delay_us,
        parameters=parameters,
    )
    (model_folder / "1").mkdir(parents=True)
    for target, source in runtime.files(path).items():
        shutil.copyfile(source, model_folder / "1" / target)
    write_config(config, model_folder)
    if labels:
        (model_folder / "labels.txt").write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
    if tokenizer_folder is not None:
        (model_folder / "tokenizer").mkdir()
        for file in tokenizer_files(tokenizer_folder):
            shutil.copyfile(file, model_folder / "tokenizer" / file.name)
    return model_folder


def make_config(
    name: str,
    path: Path,
    *,
    runtime: Runtime | None = None,
    labels: Sequence[str] = (),
    tokenizer_folder: Path | None = None,
    max_batch_size: int = 32,
    max_queue_delay_us: int = 500,
    parameters: Mapping[str, object] | None = None,
) -> ModelConfig:
    """The complete config that `write_repository` writes for these arguments. Raises UserError E721, E722, E723."""
    config = base_config(path, runtime or runtime_of(path), name, max_batch_size, max_queue_delay_us)
    values = {key: str(value) for key, value in (parameters or {}).items()}
    if labels:
        set_labels(config, labels)
        values["labels"] = json.dumps(list(labels), ensure_ascii=False)
    if tokenizer_folder is not None:
        values["tokenizer_sha256"] = tokenizer_sha256(tokenizer_folder)
    for key, value in values.items():
        config.parameters[key].string_value = value
    return config


def base_config(path: Path, runtime: Runtime, name: str, max_batch_size: int, max_queue_delay_us: int) -> ModelConfig:
    """The config of a model file without labels and parameters. Raises UserError E721."""
    config = ModelConfig(name=name, backend=runtime.backend, max_batch_size=max_batch_size)
    for fields, tensors in zip((config.input, config.output), runtime.tensors(path), strict=True):
        for tensor in tensors:
            fields.add(**fields_of(tensor, path, batched=max_batch_size > 0))
    config.instance_group.add(count=1)
    if max_batch_size > 0:
        config.dynamic_batching.max_queue_delay_microseconds = max_queue_delay_us
    runtime.configure(config, path)
    return config


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
    logits.label_filename = "labels.txt"


def tokenizer_sha256(folder: Path) -> str:
    """sha256 over names and contents of the folder's tokenizer files. Raises UserError E723 without a tokenizer.json."""
    digest = hashlib.sha256()
    for path in tokenizer_files(folder):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def tokenizer_files(folder: Path) -> list[Path]:
    """The tokenizer files in a folder that may hold others, sorted. Raises UserError E723 without a tokenizer.json."""
    if not Path(folder, "tokenizer.json").is_file():
        raise UserError("E723", "no tokenizer.json", "Save the tokenizer there with save_pretrained", str(folder))
    return [path for name in TOKENIZER_FILES if (path := Path(folder, name)).is_file()]


def write_config(config: ModelConfig, model_folder: Path) -> None:
    """Write config.pbtxt. The text format sorts maps, so equal configs give equal bytes."""
    (model_folder / "config.pbtxt").write_text(text_format.MessageToString(config), encoding="utf-8")


def read_config(model_folder: Path) -> ModelConfig:
    """The parsed config.pbtxt of a model folder. Raises UserError E724 when it is missing or invalid."""
    path = Path(model_folder, "config.pbtxt")
    try:
        return text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise UserError("E724", f"not a model config ({error})", "Deploy the model again", str(path)) from error


OWN_CODE = "EXECUTION_ENV_PATH"
"""Parameter with which a model brings its own Python environment, which the server would unpack and start."""


def refuse_code(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError E724 where a model of the repository `folder` would run its own code on the embedded server.

    Triton's backend `python` executes model.py from the repository, and completes a config without a backend from the files
    there; the backends of this project read only model files.
    """
    ours = sorted(path.parent.name for path in BACKENDS.glob("*/model.py"))
    for name in names:
        config, fix = read_config(folder / name), "Deploy the model again; the embedded server runs no code of a repository"
        if config.backend not in ours:
            what = f"the backend is '{config.backend}', not one of {', '.join(ours)}"
            raise UserError("E724", what, fix, str(folder / name / "config.pbtxt"))
        if OWN_CODE in config.parameters:
            what = f"the parameter {OWN_CODE} loads a Python environment"
            raise UserError("E724", what, fix, str(folder / name / "config.pbtxt"))


def model_names(folder: Path) -> list[str]:
    """Names of the repository's models, sorted: the folders with a config.pbtxt."""
    return sorted(path.parent.name for path in Path(folder).glob("*/config.pbtxt"))
