"""The folder of a file of many tasks: the model, the base's tokenizer, and a description of its tasks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from compressor.models.files.model_folder import TOKENIZER_FILES, files_to_copy
from export.many.stacked_tasks import stack_files
from export.runtimes.runtime import Runtime
from export.runtimes.runtime_registry import DEFAULT
from export.standalone.folder import replacing, require_free, write_summary


def stack_folder(
    paths: Sequence[Path], out: Path, *, base: str | None = None, runtime: Runtime = DEFAULT, force: bool = False
) -> dict[str, Any]:
    """Write the model file of a runtime into OUT (`export.many.stacked_tasks.stack_files`), the tokenizer, config.json, and
    OUT/export.json, which is returned. Nothing is written if anything fails.

    Raises UserError E620 (the folder exists) and as `stack_files`.
    """
    if not paths:
        raise UserError("E777", "no delta file is given", "Give one for each task", str(out))
    require_free(out, force)
    with replacing(out, force) as folder:
        made = stack_files(paths, folder, base=base, runtime=runtime)
        shutil.copyfile(made.base.folder / "config.json", folder / "config.json")
        for path in files_to_copy(made.base.folder, TOKENIZER_FILES):
            shutil.copyfile(path, folder / path.name)
        inputs, outputs = ([tensor.name for tensor in side] for side in runtime.tensors(made.path))
        file = {"path": made.path.name, "precision": "fp32", "bytes": runtime.stored_bytes(made.path)}
        summary = {**made.to_json(), "runtime": runtime.key, **file, "inputs": inputs, "outputs": outputs}
        write_summary(folder, summary)
    return summary
