"""Triton model repositories: FOLDER/NAME takes tokens, FOLDER/NAME-text takes texts; both hold the same version folder.

    NAME/  config.pbtxt, labels.txt, warmup/, 1/{model.onnx, or model.xml and model.bin; tokenizer/; serving.json}

A repository contains nothing specific to the machine it was written on, and no code: the same folder runs on a production
Triton (NAME by the stock onnxruntime or openvino backend, NAME-text by this project's backend) and on the embedded server. Two
writes of the same model are equal byte for byte.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from compressor.arguments import NAME_FIX, NAME_PATTERN, require_all_of
from compressor.errors import UserError
from compressor.models.files.model_folder import TOKENIZER_FILES
from export.runtimes.runtime import Runtime
from export.runtimes.runtime_registry import runtime_of
from serving.backends.door import VERSION_FILE
from serving.layout.knobs import DEFAULT_KNOBS, INTERFACES, Knobs
from serving.layout.model_config import text_config, token_config
from serving.layout.text_outputs import LABELS_FILE, TEXT_SUFFIX
from serving.layout.version_file import VersionFacts
from serving.layout.warmup import FOLDER as WARMUP
from serving.layout.warmup import add_text_samples, add_token_samples

TOKENIZER = "tokenizer"
"""Folder of the tokenizer's files, in a version's folder."""
CONFIG_FILE = "config.pbtxt"
"""The config of a model, beside its versions."""
STATES = "initial_state"
"""The folder in a model's that has the files of the states that a sequence begins with."""
NO_VERSIONS = (WARMUP, STATES)
"""Folders that Triton reads beside a model's versions."""


@dataclass(frozen=True)
class ServedModel:
    """What a model's folder holds beside its versions: the config, and files by their relative path."""

    config: ModelConfig
    files: Mapping[str, bytes] = field(default_factory=dict)


def write_repository(
    folder: Path,
    name: str,
    path: Path,
    *,
    runtime: Runtime | None = None,
    facts: VersionFacts | None = None,
    tokenizer_folder: Path | None = None,
    interfaces: Sequence[str] = ("tokens",),
    knobs: Knobs = DEFAULT_KNOBS,
) -> Path:
    """Add the model `name` to the repository `folder`, as its version 1; returns the folder of its first interface.

    `path` is a model file of `runtime` (default: by its ending, an ONNX file or OpenVINO's .xml with its .bin beside it).
    Tensors, types and dims come from it; with `max_batch_size` > 0 its first axis must be dynamic and is left out of the
    config. Without `facts` it is a model of unknown use: its requests are not checked, and it takes no texts. Raises UserError
    E720 (name), E721 (model file), E722 (labels), E723 (tokenizer), E901 (packages of the runtime); ValueError for other
    interfaces, or texts without facts.
    """
    path, runtime = Path(path), runtime or runtime_of(Path(path))
    models = models_of(
        name, path, runtime=runtime, facts=facts, tokenizer_folder=tokenizer_folder, interfaces=interfaces, knobs=knobs
    )
    for model in models:
        if Path(folder, model).exists():
            raise UserError("E720", f"the repository already holds a model '{model}'", "Choose another name", str(folder))
    for model, content in models.items():
        write_version(Path(folder, model, "1"), path, runtime, facts, tokenizer_folder)
        for relative, data in content.files.items():
            Path(folder, model, relative).parent.mkdir(exist_ok=True)
            Path(folder, model, relative).write_bytes(data)
        write_config(content.config, Path(folder, model))
    return Path(folder, next(iter(models)))


def check_name(name: str) -> None:
    """Raises UserError E720 for what is no model's name: it becomes a folder's."""
    if not re.fullmatch(NAME_PATTERN, name):
        raise UserError("E720", f"'{name}' is not a model name", NAME_FIX)
    if name.endswith(TEXT_SUFFIX):
        raise UserError("E720", f"'{name}' ends as the names of models that take texts do", f"Leave out {TEXT_SUFFIX}")


def models_of(
    name: str,
    path: Path,
    *,
    runtime: Runtime,
    facts: VersionFacts | None = None,
    tokenizer_folder: Path | None = None,
    interfaces: Sequence[str] = ("tokens",),
    knobs: Knobs = DEFAULT_KNOBS,
) -> dict[str, ServedModel]:
    """Everything that `write_repository` writes for these arguments but version folders: model's name -> its content.

    Raises UserError E720 to E723.
    """
    check_name(name)
    require_all_of("interfaces", interfaces, INTERFACES)
    if "text" in interfaces and facts is None:
        raise ValueError("interfaces has text, and facts is None: what the texts are for is not known")
    if tokenizer_folder is not None:
        tokenizer_files(tokenizer_folder)
    elif "text" in interfaces:
        raise UserError("E723", "a model that takes texts needs a tokenizer", "Give the folder of its tokenizer")
    labels = "".join(f"{label}\n" for label in facts.labels) if facts else ""
    models, warm = {}, knobs.warmup and facts is not None and tokenizer_folder is not None
    for interface in interfaces:
        if interface == "tokens":
            config = token_config(name, path, runtime, facts, knobs)
            samples = add_token_samples(config, facts, tokenizer_folder) if warm else {}
        else:
            config = text_config(f"{name}{TEXT_SUFFIX}", runtime, facts, knobs)
            samples = add_text_samples(config, facts, tokenizer_folder) if warm else {}
        files = {f"{WARMUP}/{file}": data for file, data in samples.items()}
        if any(output.label_filename for output in config.output):
            files[LABELS_FILE] = labels.encode()
        models[config.name] = ServedModel(config, files)
    return models


def write_version(
    folder: Path, path: Path, runtime: Runtime, facts: VersionFacts | None, tokenizer_folder: Path | None
) -> None:
    """Create a version's folder: the model file, the tokenizer and the facts. Raises UserError E723."""
    Path(folder).mkdir(parents=True)
    for target, source in runtime.files(path).items():
        shutil.copyfile(source, folder / target)
    if tokenizer_folder is not None:
        (folder / TOKENIZER).mkdir()
        for file in tokenizer_files(tokenizer_folder):
            shutil.copyfile(file, folder / TOKENIZER / file.name)
    if facts is not None:
        (folder / VERSION_FILE).write_text(complete_facts(facts, runtime, tokenizer_folder).to_json(), encoding="utf-8")


def complete_facts(facts: VersionFacts, runtime: Runtime, tokenizer_folder: Path | None) -> VersionFacts:
    """The facts with the runtime's name and the digest of the tokenizer."""
    return replace(
        facts,
        runtime=runtime.key,
        tokenizer_sha256="" if tokenizer_folder is None else tokenizer_sha256(tokenizer_folder),
    )


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


def config_bytes(config: ModelConfig) -> bytes:
    """The content of config.pbtxt. The text format sorts maps, so equal configs give equal bytes."""
    return text_format.MessageToString(config).encode()


def write_config(config: ModelConfig, model_folder: Path) -> None:
    """Write config.pbtxt."""
    (model_folder / CONFIG_FILE).write_bytes(config_bytes(config))


def read_config(model_folder: Path) -> ModelConfig:
    """The parsed config.pbtxt of a model folder. Raises UserError E724 when it is missing or invalid."""
    path = Path(model_folder, CONFIG_FILE)
    return config_in(path.read_bytes, str(path))


def config_in(read: Callable[[], bytes], where: str) -> ModelConfig:
    """The config in a config.pbtxt that `read` reads, from wherever it lies. Raises as `read_config`."""
    try:
        return text_format.Parse(read().decode(), ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise UserError("E724", f"not a model config ({error})", "Deploy the model again", where) from error


def version_folders(model_folder: Path) -> list[Path]:
    """The version folders of a model, oldest first; hidden folders and those in NO_VERSIONS are none.

    Raises UserError E727 for another folder, such as `01`: Triton would leave it out, and serve another version or none.
    """
    versions = []
    for folder in sorted(path for path in Path(model_folder).iterdir() if path.is_dir() and path.name[0] != "."):
        if folder.name in NO_VERSIONS:
            continue
        if not re.fullmatch(r"[1-9][0-9]{0,17}", folder.name):
            what = f"'{folder.name}' is not the name of a version: Triton would leave it out"
            fix = "Name it with a number from 1 on without leading zeros, or move it away"
            raise UserError("E727", what, fix, str(folder))
        versions.append(folder)
    if not versions:
        raise UserError("E727", "the model has no version folder", "Deploy the model again", str(model_folder))
    return sorted(versions, key=lambda folder: int(folder.name))


def model_names(folder: Path) -> list[str]:
    """Names of the repository's models, sorted: the folders with a config.pbtxt."""
    return sorted(path.parent.name for path in Path(folder).glob(f"*/{CONFIG_FILE}"))
