"""Files that start a production Triton on a repository: an InferenceService of KServe, and a compose file.

Neither is tried here. Both match their published schemas.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from compressor.errors import UserError
from export.runtimes.onnxruntime import NO_KERNELS_BY_SHAPE, RUNTIME
from export.runtimes.runtime_registry import RUNTIMES
from serving.backend_files import backend_names, renew_backend
from serving.backends.door import VERSION_FILE
from serving.deployment.target import CONFIG, Target
from serving.layout.version_file import facts_in
from serving.repository import config_in

TRITON = "24.12"
"""Least version of the official container: its ONNX Runtime (1.19) reads IR 10 and opset 20, its Triton python-based backends,
and its Python (3.12) has wheels of the ONNX Runtime that files are proven with here."""
IMAGE = f"nvcr.io/nvidia/tritonserver:{TRITON}-py3"
BACKENDS = "compress-backends"
"""The folder beside a compose file whose content is replaced with it."""
LABEL = 63
"""Longest name of a service in Kubernetes, which begins with a letter."""


AS_PROVEN = dict([("NVIDIA_TF32_OVERRIDE", "0"), NO_KERNELS_BY_SHAPE])
"""What the backends of this project ask of ONNX Runtime on a GPU, for Triton's own (docs/export.md)."""


def lasting_models(repository: Target) -> list[str]:
    """Names of the models that a server can load, sorted; not those that a deployment has only begun, or that are on trial: the
    next deployment may take them away."""
    repository.files.invalidate_cache()
    return [
        name
        for name in repository.models()
        if repository.files.exists(repository.path(name, CONFIG))
        and any(repository.finished(name, version) for version in repository.versions(name))
    ]


def needs_gpu(repository: Target, models: Sequence[str]) -> bool:
    """Whether any of the models is to be placed on a GPU. Raises UserError E724."""
    configs = [_config(repository, name) for name in models]
    return any(group.kind == ModelInstanceGroup.KIND_GPU for config in configs for group in config.instance_group)


def _config(repository: Target, model: str) -> ModelConfig:
    """The config of a model, which may be another program's. Raises UserError E724."""
    path = repository.path(model, CONFIG)
    try:
        return config_in(partial(repository.files.cat_file, path), path)
    except UserError as error:
        raise UserError(error.code, error.what, "Correct it, or move that model out of the repository", path) from error


def packages(*, gpu: bool = False) -> str:
    """What the backends of this project import, as arguments of pip."""
    served = [runtime for runtime in RUNTIMES.values() if runtime.backend in backend_names()]
    needed = [package for runtime in served for package in ((gpu and runtime.on_gpu) or runtime.packages)]
    return shlex.join([*map(_as_here, [*needed, "tokenizers"]), "numpy<2"])


def _as_here(package: str) -> str:
    """A package in the version that is installed here, with which the served files were proven."""
    try:
        return f"{package}=={importlib.metadata.version(package.partition('[')[0])}"
    except importlib.metadata.PackageNotFoundError:
        return package


def _options(models: Sequence[str], repository: str) -> list[str]:
    """Triton's arguments: these models, and no others unless they are asked for through the repository API; a version that
    loads, or does not load, is no reason not to be ready."""
    loaded = [f"--load-model={name}" for name in models]
    return [f"--model-repository={repository}", "--model-control-mode=explicit", "--strict-readiness=false", *loaded]


def kserve(location: str, models: Sequence[str], *, gpu: bool = False) -> dict[str, Any]:
    """An InferenceService on the repository at the URL `location`: KServe's own Triton runtime with the `stock_models`."""
    served = stock_models(models)
    model = {
        "modelFormat": {"name": "triton"},
        "protocolVersion": "v2",
        "runtimeVersion": f"{TRITON}-py3",
        "storageUri": location,
        "args": _options(served, "/mnt/models")[1:],
    }
    if gpu:
        model["env"] = [{"name": name, "value": value} for name, value in AS_PROVEN.items()]
        model["resources"] = {"limits": {"nvidia.com/gpu": "1"}}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": {"name": _service_name(served[0])},
        "spec": {"predictor": {"model": model}},
    }


def stock_models(models: Sequence[str]) -> list[str]:
    """Those that need no backend of this project."""
    return [model for model in models if not model.endswith("-text")]


def _service_name(model: str) -> str:
    name = re.sub(r"[^a-z0-9-]+", "-", model.lower()).strip("-")
    return (name if name[:1].isalpha() else f"model-{name}")[:LABEL].strip("-")


def compose(location: str, models: Sequence[str], *, gpu: bool = False) -> dict[str, Any]:
    """A compose file of the official container on the local folder `location`, its ports on this machine alone."""
    mounted = {"type": "bind", "read_only": True}
    backends = [
        {**mounted, "source": f"./{BACKENDS}/{name}", "target": f"/opt/tritonserver/backends/{name}"}
        for name in backend_names()
    ]
    started = shlex.join(_options(models, "/models")).replace("$", "$$")  # compose reads $NAME as a variable
    service = {
        "image": IMAGE,
        # the container is there for Triton alone: what pip would protect from its packages
        "environment": {"PIP_BREAK_SYSTEM_PACKAGES": "1"},
        "entrypoint": ["/bin/sh", "-c"],
        "command": [f"pip install --quiet {packages(gpu=gpu)} && exec tritonserver {started}"],
        "ports": ["127.0.0.1:8000:8000", "127.0.0.1:8001:8001", "127.0.0.1:8002:8002"],
        "shm_size": "1gb",
        "volumes": [{**mounted, "source": location.replace("$", "$$"), "target": "/models"}, *backends],
        "healthcheck": {
            "test": ["CMD", "curl", "-sf", "localhost:8000/v2/health/ready"],
            "interval": "10s",
            "start_period": "60s",
        },
        "restart": "unless-stopped",
    }
    if gpu:
        card = {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [card]}}}
    return {"services": {"triton": service}}


def check_kserve(path: Path, location: str, models: Sequence[str]) -> None:
    """Raises UserError E757 for a location that no cluster reaches, and if KServe's own Triton can serve none of the models;
    E801 where the file cannot be written."""
    if "://" not in location:
        raise UserError("E757", "KServe needs the repository at a URL", "Deploy --to s3://BUCKET/FOLDER", location)
    if not stock_models(models):
        what = f"KServe's own Triton has no backend for {', '.join(models)}"
        raise UserError("E757", what, "Deploy with interfaces: [tokens, text], or leave --kserve out", location)
    _check_file(path)


def check_precisions(repository: Target, models: Sequence[str]) -> None:
    """Raises UserError E757 for a model whose newest file KServe's own Triton opens and cannot compute; E728."""
    for name in stock_models(models):
        folder = repository.path(name, repository.versions(name)[-1])
        path = f"{folder}/{VERSION_FILE}"
        if not repository.files.exists(path):  # another program's model
            continue
        facts = facts_in(partial(repository.files.cat_file, path), path)
        if facts.runtime == RUNTIME.key and facts.precision == "fp16":
            what = f"KServe's own Triton cannot compute '{name}' in fp16: that needs ONNX Runtime 1.28, it has 1.19"
            raise UserError("E757", what, "Deploy fp32, or write a compose file, which installs its own", folder)


def check_compose(path: Path, location: str, models: Sequence[str]) -> None:
    """Raises UserError E757 for a URL, or a model with a link to what the container does not have, E801 where the file, or a
    backend beside it, cannot be written."""
    if "://" in location:
        raise UserError("E757", "a compose file mounts a local folder", "Deploy --to DIR", location)
    for name in models:
        _check_mounted(Path(location), name)
    _check_file(path)
    for name in backend_names():
        _check_file(path.parent / BACKENDS / name / "model.py")


def _check_mounted(repository: Path, model: str) -> None:
    """Raises UserError E757 where a model, or a folder or file in it, is a link that leads nowhere where only the repository is
    mounted."""
    ahead, seen = [repository / model], set()
    while ahead:
        path = ahead.pop()
        if path.is_symlink() and not _leads_inside(path, repository):
            what = f"a link to {os.path.realpath(path)}, which a container with the repository alone does not have"
            raise UserError("E757", what, "Move that to this place, or leave --compose out", str(path))
        if path.is_dir() and (place := path.resolve()) not in seen:  # links may go round in circles
            seen.add(place)
            ahead.extend(path.iterdir())


def _leads_inside(link: Path, root: Path) -> bool:
    """Whether a link in the folder `root` leads to something by way of relative links that never leave that folder: this is
    found wherever `root` is mounted."""
    if not link.exists():  # it may be circular
        return False
    ahead, place = list(reversed(link.relative_to(root).parts)), root
    while ahead:
        step = ahead.pop()
        if step == "..":
            if place == root:
                return False
            place = place.parent
        elif (place / step).is_symlink():
            target = (place / step).readlink()
            if target.is_absolute():
                return False
            ahead.extend(reversed(target.parts))
        else:
            place /= step
    return True


def _check_file(path: Path) -> None:
    """Raises UserError E801 unless a file can be written at `path`, in folders that may be missing. Writes nothing."""
    fix = "Name another file, or change its permissions"
    try:
        existing = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    except OSError as error:
        raise UserError("E801", f"no file can be written here ({error.strerror})", fix, str(path)) from error
    if existing == path.absolute() and existing.is_dir():
        raise UserError("E801", "a folder, where a file is to be written", fix, str(path))
    if existing != path.absolute() and not existing.is_dir():
        raise UserError("E801", "a file, where a folder is needed", fix, str(existing))
    if not os.access(existing, os.W_OK):
        raise UserError("E801", "no permission to write here", fix, str(existing))


def write_kserve(path: Path, location: str, models: Sequence[str], *, gpu: bool = False) -> list[str]:
    """Write the InferenceService; returns the models that it serves. Raises as `check_kserve`."""
    check_kserve(path, location, models)
    _write(path, kserve(location, models, gpu=gpu))
    return stock_models(models)


def write_compose(path: Path, location: str, models: Sequence[str], *, gpu: bool = False) -> list[str]:
    """Write the compose file, and beside it the backends that it mounts; returns the models. Raises as `check_compose`."""
    check_compose(path, location, models)
    _write(path, compose(str(Path(location).resolve()), models, gpu=gpu))
    for name in backend_names():
        renew_backend(name, path.parent / BACKENDS)
    return list(models)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
