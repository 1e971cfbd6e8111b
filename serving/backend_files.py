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
    ROOT / "compressor" / "control_groups.py",
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
    that is there are replaced, each at once, and the folder stays the same one. Raises ValueError for another name."""
    require_one_of("name", name, backend_names())
    target = Path(folder) / name
    target.mkdir(parents=True, exist_ok=True)
    for file in _files(name):
        beside = target / f".{file.name}"
        shutil.copy2(file, beside)
        beside.replace(target / file.name)
    return target


def renew_backend(name: str, folder: Path) -> Path:
    """`copy_backend`, which then removes what else is in `folder`/NAME: a container that has the folder mounted sees the new
    files, where a new folder in its place would leave the old one mounted, and empty. Raises ValueError for another name."""
    target = copy_backend(name, folder)
    written = {file.name for file in _files(name)}
    for path in [path for path in target.iterdir() if path.name not in written]:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return target


def _files(name: str) -> tuple[Path, ...]:
    return BACKENDS / name / "model.py", *SHARED
