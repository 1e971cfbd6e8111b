"""Triton model repositories: FOLDER/NAME/{config.pbtxt, labels.txt, tokenizer/, 1/model.onnx}, or 1/model.xml and model.bin.

A repository holds nothing of the machine it was written on: the same folder runs on a production Triton (stock onnxruntime
or openvino backend) and on the embedded server, and two writes of the same model are equal byte for byte.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compressor.errors import UserError
from compressor.models.hub import TOKENIZER_FILES
from serving.bundle import BACKENDS, install

if TYPE_CHECKING:
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
    "f16": "TYPE_FP16",
    "f32": "TYPE_FP32",
    "f64": "TYPE_FP64",
    "i8": "TYPE_INT8",
    "i32": "TYPE_INT32",
    "i64": "TYPE_INT64",
    "u8": "TYPE_UINT8",
    "boolean": "TYPE_BOOL",
}
"""Triton's word for an element type of ONNX or OpenVINO."""


def write_repository(
    folder: Path,
    name: str,
    path: Path,
    *,
    labels: Sequence[str] = (),
    tokenizer_folder: Path | None = None,
    max_batch_size: int = 32,
    max_queue_delay_us: int = 500,
    parameters: Mapping[str, object] | None = None,
) -> Path:
    """Add the model `name` to the repository `folder` and return its folder. Call again for further models.

    `path` is an ONNX file, or OpenVINO's .xml with its .bin beside it. Tensors, types and dims come from it; with
    `max_batch_size` > 0 its first axis must be dynamic and is left out of the config. `parameters` are written as strings
    beside those that are added here, `labels` (JSON list) and `tokenizer_sha256` among them; the client reads `max_length`
    (tokens), `pad_id` and `end_id` (a token that every text must make equally often), the backend `intra_op_thread_count`
    (onnxruntime) or `INFERENCE_NUM_THREADS` (openvino).
    Raises UserError E720 (name), E721 (model file), E722 (labels), E723 (tokenizer).
    """
    model_folder = Path(folder) / name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError("E720", f"'{name}' is not a model name", "Use letters, digits, '_', '-' and '.'")
    if model_folder.exists():
        raise UserError("E720", f"the repository already holds a model '{name}'", "Choose another name", str(folder))

    config = make_config(
        name,
        Path(path),
        labels=labels,
        tokenizer_folder=tokenizer_folder,
        max_batch_size=max_batch_size,
        max_queue_delay_us=max_queue_delay_us,
        parameters=parameters,
    )
    (model_folder / "1").mkdir(parents=True)
    for target, source in files_of(Path(path)).items():
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
    labels: Sequence[str] = (),
    tokenizer_folder: Path | None = None,
    max_batch_size: int = 32,
    max_queue_delay_us: int = 500,
    parameters: Mapping[str, object] | None = None,
) -> ModelConfig:
    """The whole config that `write_repository` writes for these arguments. Raises UserError E721, E722, E723."""
    config = describe(path, name, max_batch_size, max_queue_delay_us)
    values = {key: str(value) for key, value in (parameters or {}).items()}
    if labels:
        set_labels(config, labels)
        values["labels"] = json.dumps(list(labels), ensure_ascii=False)
    if tokenizer_folder is not None:
        values["tokenizer_sha256"] = tokenizer_sha256(tokenizer_folder)
    for key, value in values.items():
        config.parameters[key].string_value = value
    return config


def files_of(path: Path) -> dict[str, Path]:
    """Name in the version folder -> source, of a model file and of the weights beside it."""
    if path.suffix == ".xml":
        return {"model.xml": path, "model.bin": path.with_suffix(".bin")}
    # the graph knows its data file by name
    data = path.with_name(f"{path.name}.data")
    return {"model.onnx": path, **({data.name: data} if data.is_file() else {})}


def describe(path: Path, name: str, max_batch_size: int, max_queue_delay_us: int) -> ModelConfig:
    """The config of a model file without labels and parameters. Raises UserError E721."""
    from tritonclient.grpc.model_config_pb2 import ModelConfig

    backend, read = ("openvino", openvino_tensors) if path.suffix == ".xml" else ("onnxruntime", onnx_tensors)
    config = ModelConfig(name=name, backend=backend, max_batch_size=max_batch_size)
    for fields, tensors in zip((config.input, config.output), read(path), strict=True):
        for tensor in tensors:
            fields.add(**tensor.fields(path, batched=max_batch_size > 0))
    config.instance_group.add(count=1)
    if backend == "openvino" and max_batch_size > 0:
        # the native backend compiles for max_batch_size rows, and without this refuses every smaller request
        config.parameters["ENABLE_BATCH_PADDING"].string_value = "YES"
    if max_batch_size > 0:
        config.dynamic_batching.max_queue_delay_microseconds = max_queue_delay_us
    return config


@dataclass(frozen=True)
class Tensor:
    """An input or output of a model file: name, the file's own word for the type, dims (-1 where dynamic)."""

    name: str
    type: str
    dims: list[int]

    def fields(self, path: Path, *, batched: bool) -> dict[str, object]:
        """As it stands in a config, without the batch axis when `batched`. Raises UserError E721."""
        if self.type not in DATA_TYPES:
            raise UserError("E721", f"'{self.name}' is a tensor of {self.type}", "Export it with a number type", str(path))
        if batched and (len(self.dims) < 2 or self.dims[0] != -1):
            mend = "Export it with a dynamic first axis, or use max_batch_size 0"
            raise UserError("E721", f"'{self.name}' has no batch axis: its shape is {self.dims}", mend, str(path))
        return {"name": self.name, "data_type": DATA_TYPES[self.type], "dims": self.dims[1:] if batched else self.dims}


def onnx_tensors(path: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of an ONNX file. Raises UserError E721."""
    import onnx
    from google.protobuf.message import DecodeError

    try:
        graph = onnx.load(path, load_external_data=False).graph
    except (OSError, DecodeError) as error:
        raise UserError("E721", f"not a readable ONNX file ({error})", "Export the model again", str(path)) from error

    def tensor(value: onnx.ValueInfoProto) -> Tensor:
        kind = value.type.tensor_type
        dims = [axis.dim_value if axis.HasField("dim_value") else -1 for axis in kind.shape.dim]
        return Tensor(value.name, onnx.TensorProto.DataType.Name(kind.elem_type), dims)

    initializers = {value.name for value in graph.initializer}
    return [tensor(value) for value in graph.input if value.name not in initializers], [*map(tensor, graph.output)]


def openvino_tensors(path: Path) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and outputs of an OpenVINO model. Raises UserError E721 and E901 (OpenVINO is not installed)."""
    if importlib.util.find_spec("openvino") is None:
        raise UserError("E901", "the runtime openvino needs the package openvino", install("openvino"))
    import openvino

    try:
        model = openvino.Core().read_model(path)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise UserError("E721", f"not a readable OpenVINO model ({reason})", "Export the model again", str(path)) from error

    def tensor(port: openvino.Output) -> Tensor:
        dims = [-1 if axis.is_dynamic else axis.get_length() for axis in port.partial_shape]
        return Tensor(port.get_any_name(), port.get_element_type().get_type_name(), dims)

    return [*map(tensor, model.inputs)], [*map(tensor, model.outputs)]


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


OWN_CODE = "EXECUTION_ENV_PATH"
"""The parameter with which a model brings a Python environment of its own, which the server would unpack and start."""


def refuse_code(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError E724 where a model of the repository `folder` would run code of its own on the embedded server.

    Triton's backend `python` executes model.py from the repository, and a config without a backend is completed by what lies
    there; the backends of this project read model files alone.
    """
    ours = sorted(path.parent.name for path in BACKENDS.glob("*/model.py"))
    for name in names:
        config, mend = read_config(folder / name), "Deploy the model again; the embedded server runs no code of a repository"
        if config.backend not in ours:
            what = f"the backend is '{config.backend}', none of {', '.join(ours)}"
            raise UserError("E724", what, mend, str(folder / name / "config.pbtxt"))
        if OWN_CODE in config.parameters:
            what = f"the parameter {OWN_CODE} brings a Python environment"
            raise UserError("E724", what, mend, str(folder / name / "config.pbtxt"))


def model_names(folder: Path) -> list[str]:
    """Names of the repository's models, sorted: the folders with a config.pbtxt."""
    return sorted(path.parent.name for path in Path(folder).glob("*/config.pbtxt"))
