"""The Triton server inside the nvidia-pytriton wheel: paths of its parts, and whether this Python can run it.

Only the server binary of the wheel is used, with ordinary model repositories; `pytriton` is never imported.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from compressor.errors import UserError
from export.runtimes.runtime_registry import DEFAULT, RUNTIMES
from serving.backend_files import backend_names, copy_backend


@dataclass(frozen=True)
class Bundle:
    """Paths: the server binary, the python backend's folder, the stub for the running Python, their libraries' folders."""

    server: Path
    python_backend: Path
    stub: Path
    library_folders: tuple[Path, ...]


def install(extra: str) -> str:
    """The command that installs a missing extra."""
    return f"Run: pip install 'compress-pipeline[{extra}]'"


def find_bundle() -> Bundle:
    """The installed Triton, after checking that it fits this Python.

    Raises UserError E701 (not installed), E702 (Python version), E703 (libpython), E704 (numpy 2 breaks the stub's tensors).
    """
    for package, extra in (("pytriton", "triton"), *((package, DEFAULT.extra) for package in DEFAULT.packages)):
        if importlib.util.find_spec(package) is None:
            raise UserError("E701", f"the embedded Triton server needs {package}", install(extra))
    root = Path(importlib.util.find_spec("pytriton").submodule_search_locations[0], "tritonserver")
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        versions = ", ".join(sorted(path.name for path in stub.parents[1].iterdir()))
        raise UserError("E702", f"the embedded Triton has no stub for Python {version}", f"Use one of its versions: {versions}")
    numpy_version = importlib.metadata.version("numpy")
    if int(numpy_version.split(".")[0]) >= 2:
        raise UserError("E704", f"the embedded Triton cannot exchange tensors with numpy {numpy_version}", install("triton"))
    libraries = (find_libpython(), root.parents[1] / "nvidia_pytriton.libs")
    return Bundle(root / "bin" / "tritonserver", root / "backends" / "python", stub, libraries)


def find_libpython() -> Path:
    """The folder of the running interpreter's shared libpython. Raises UserError E703 when there is none."""
    name = f"libpython{sysconfig.get_config_var('LDVERSION')}.so.1.0"
    for folder in (sysconfig.get_config_var("LIBDIR"), Path(sys.base_prefix, "lib")):
        if folder and Path(folder, name).is_file():
            return Path(folder)
    fix = f"Debian: apt install {name.partition('.so')[0]}. pyenv: build Python with --enable-shared"
    raise UserError("E703", f"the embedded Triton needs {name}, and this Python has none", fix, sys.executable)


def stage_backends(bundle: Bundle, folder: Path) -> None:
    """Create in `folder` the layout for Triton's --backend-directory: the python backend with its stub, and our backends."""
    shutil.copytree(bundle.python_backend, folder / "python", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(bundle.stub, folder / "python")
    for name in backend_names():
        copy_backend(name, folder)


def environment(bundle: Bundle) -> dict[str, str]:
    """The environment of the server: its stub finds libpython through LD_LIBRARY_PATH and its Python prefix through PATH."""
    variables = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}
    if not any(runtime.offers("cuda") for runtime in RUNTIMES.values()):
        variables["CUDA_VISIBLE_DEVICES"] = ""  # else Triton would place models on a GPU that no runtime here can use
    for key, first in (("LD_LIBRARY_PATH", bundle.library_folders), ("PATH", (Path(sys.prefix, "bin"),))):
        variables[key] = ":".join(filter(None, (*map(str, first), os.environ.get(key))))
    return variables
