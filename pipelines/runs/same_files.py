"""Whether files and facts of an artifact are those that its run wrote."""

from __future__ import annotations

import filecmp
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tritonclient.grpc.model_config_pb2 import ModelConfig

from compressor.errors import CheckError
from pipelines.engine.stage import Inputs
from pipelines.stages.deploy.config import DeployConfig
from pipelines.stages.deploy.generating import source_of
from pipelines.stages.served_checks import Served
from serving.generator_repository import write_generator
from serving.layout.version_file import read_version
from serving.repository import TOKENIZER, complete_facts, models_of, read_config, tokenizer_files


def require_same(what: str, value: Any, expected: Any) -> None:
    """Raises CheckError E612 when a fact of an artifact differs from the run's."""
    if value != expected:
        raise CheckError(
            "E612", f"{what}: {_short(value)}, this run has {_short(expected)}", "Run its stage again with --force"
        )


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def require_same_files(expected: Sequence[Path], folder: Path, what: str) -> None:
    """Raises CheckError E612 where a file is missing from `folder`, or has other content there."""
    for path in expected:
        copy = folder / path.name
        if not copy.is_file() or not filecmp.cmp(path, copy, shallow=False):
            fault = "is not the run's" if copy.is_file() else "is missing"
            raise CheckError("E612", f"{what} file '{path.name}' {fault}", "Run its stage again with --force", str(folder))


def require_same_repository(served: Served, options: dict[str, Any]) -> None:
    """Check that a deployed model's files are those that the run wrote from `options`. Raises CheckError E612, UserError E724,
    E728."""
    sources = served.runtime.files(served.path)
    for name, expected in models_of(served.name, served.path, runtime=served.runtime, **options).items():
        folder, tokenizer = served.repository / name, options["tokenizer_folder"]
        version = folder / "1"
        if not all(filecmp.cmp(source, version / target, shallow=False) for target, source in sources.items()):
            raise CheckError("E612", "the deployed model differs from the exported one", "Deploy it again", str(folder))
        _require_same_config(read_config(folder), expected.config, folder)
        for relative, content in expected.files.items():
            if not (folder / relative).is_file() or (folder / relative).read_bytes() != content:
                raise CheckError("E612", f"{relative} is not the run's", "Run its stage again with --force", str(folder))
        facts = complete_facts(options["facts"], served.runtime, tokenizer)
        require_same(f"serving.json of {name}", asdict(read_version(version)), asdict(facts))
        require_same_files(tokenizer_files(tokenizer), version / TOKENIZER, "tokenizer")


def require_same_generator(repository: Path, config: DeployConfig, exported: Path, inputs: Inputs, precision: str) -> None:
    """Check that a deployed generating model's files are those that deploying it again writes. Raises CheckError E612."""
    options = {"precision": precision, "threads": config.threads, "source": source_of(inputs.task), "stripped": True}
    with tempfile.TemporaryDirectory() as scratch:
        again = write_generator(Path(scratch), config.name, exported, inputs.base.folder, **options)
        files = [path.relative_to(again) for path in sorted(again.rglob("*")) if path.is_file()]
        for path in files:
            require_same_files([again / path], repository / again.name / path.parent, "deployed")


def _require_same_config(config: ModelConfig, expected: ModelConfig, folder: Path) -> None:
    if config != expected:
        keys = {descriptor.name for message in (config, expected) for descriptor, _ in message.ListFields()}
        odd = ", ".join(sorted(key for key in keys if getattr(config, key) != getattr(expected, key)))
        raise CheckError("E612", f"config.pbtxt does not match the model: {odd}", "Deploy it again", str(folder))
