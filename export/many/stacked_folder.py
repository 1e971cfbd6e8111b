"""The folder of a file of many tasks: the model, the base's tokenizer, and a description of its tasks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from compressor.models.hub import TOKENIZER_FILES
from export.many.stacked_tasks import stack_files
from export.runtimes.onnxruntime import RUNTIME
from export.standalone.folder import SUMMARY, describe_file, replacing, require_free


def stack_folder(paths: Sequence[Path], out: Path, *, base: str | None = None, force: bool = False) -> dict[str, Any]:
    """Write OUT/model.onnx (`export.many.stacked_tasks.stack_files`), the tokenizer, config.json and OUT/export.json, which is
    returned. Nothing is written if anything fails.

    Raises UserError E620 (the folder exists) and as `stack_files`.
    """
    if not paths:
        raise UserError("E777", "no delta file is given", "Give one for each task", str(out))
    require_free(out, force)
    with replacing(out, force) as folder:
        made = stack_files(paths, folder, base=base)
        for name in (*TOKENIZER_FILES, "config.json"):
            if (made.base.folder / name).is_file():
                shutil.copyfile(made.base.folder / name, folder / name)
        summary = {**made.to_json(), "runtime": RUNTIME.key, **describe_file(made.path, "fp32")}
        (folder / SUMMARY).write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return summary
