"""The files of a python-based Triton backend of this project: its model.py, and those that all backends share."""

from __future__ import annotations

import shutil
from pathlib import Path

from compressor.arguments import require_one_of

# not by `import export`: where the current folder has a plain folder `export`, `python -m` and `-c` import that, without a file
ROOT = Path(__file__).parents[1]
BACKENDS = Path(__file__).parent / "backends"
SHARED = (
    *sorted(BACKENDS.glob("*.py")),
    # how OpenVINO's files run, in a local session and on the server: both give equal logits
    ROOT / "export" / "runtimes" / "padded_model.py",
    ROOT / "compressor" / "tasks" / "first_tokens.py",
    ROOT / "compressor" / "tasks" / "kinds" / "best_spans.py",
    ROOT / "compressor" / "tasks" / "kinds" / "span_marks.py",
)
"""Files that each backend's folder gets beside its model.py."""


def backend_names() -> list[str]:
    """Names of this project's backends, sorted."""
    return sorted(path.parent.name for path in BACKENDS.glob("*/model.py"))


def copy_backend(name: str, folder: Path) -> Path:
    """Write `folder`/NAME, a backend as Triton reads it: for --backend-directory, or to be mounted in a container. Files of one
    that is there are replaced. Raises ValueError for another name."""
    require_one_of("name", name, backend_names())
    target = Path(folder) / name
    target.mkdir(parents=True, exist_ok=True)
    for file in (BACKENDS / name / "model.py", *SHARED):
        shutil.copy2(file, target)
    return target
