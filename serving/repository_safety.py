"""What is refused of a model repository that others made: code that Triton would run from it, and paths that leave it.

Triton runs more than the backend that a config names: it looks for libraries and for a program in a model's folder, and starts
that program, or its own, by a shell command with names from the repository, which it does not quote. Paths in a config are
followed wherever they lead.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from compressor.errors import UserError
from compressor.inside import is_inside
from serving.backend_files import backend_names
from serving.layout.warmup import FOLDER as WARMUP
from serving.repository import CONFIG_FILE, STATES, read_config, version_folders

PARAMETERS = {"EXECUTION_ENV_PATH": "a Python environment", "TRITON_BATCH_STRATEGY_PATH": "a library"}
"""Parameters of a model, and the code that each makes Triton load."""
STUB = "triton_python_backend_stub"
"""The program that runs a model's Python code: one in the model's folder takes the place of Triton's own."""
PYTHON_RUNTIME = "model.py"
"""The `runtime` of this project's backends: the file of that name in their own folder."""
ASKED_BY = re.compile(r"[\w.-]+", re.ASCII)
"""A model's name that stands in the path of a request as it is."""
NO_CODE = "Move that model out of the repository; no code of a repository is run"


def refuse_unsafe(folder: Path, names: Sequence[str]) -> None:
    """Raise UserError E724 where a model of the repository `folder` would make a server run code of the repository or read a
    file outside it, E727 for version folders that a server would leave out."""
    for name in names:
        home = folder / name
        config, where = read_config(home), str(home / CONFIG_FILE)
        if what := next(_code_in(config), None):
            raise UserError("E724", what, NO_CODE, where)
        if what := next(_odd_names(name, config), None):
            raise UserError("E724", what, "Use letters a to z, digits, '_', '-' and '.'", where)
        if path := next(_code_beside(home), None):
            raise UserError("E724", "Triton would load or run this file", NO_CODE, str(path))
        if file := next(_outside(home, config, version_folders(home)), None):
            what = f"it names {file!r}, which leads out of the repository"
            raise UserError("E724", what, "Name a file in the model's own folder, without '..'", where)


def _code_in(config: ModelConfig) -> Iterator[str]:
    """What of a config makes Triton run other code than a backend of this project: those read only model files. Without a
    backend it takes one that fits the model's files, such as `python`, which executes a model.py."""
    ours = backend_names()
    if config.backend not in ours:
        yield f"the backend is '{config.backend}', not one of {', '.join(ours)}"
    for parameter, code in PARAMETERS.items():
        if parameter in config.parameters:
            yield f"the parameter {parameter} loads {code}"
    libraries = {
        "runtime": config.runtime not in ("", PYTHON_RUNTIME),
        "model_operations": config.model_operations.op_library_filename,
        "model_repository_agents": config.model_repository_agents.agents,
    }
    yield from (f"{field} loads a library" for field, is_given in libraries.items() if is_given)


def _odd_names(name: str, config: ModelConfig) -> Iterator[str]:
    """What Triton writes into the command that starts its program, and a shell may take for more than a word; and a name by
    which a model is not found."""
    words = [("the model's name", name), ("default_model_filename", config.default_model_filename)]
    words += [("the name of an instance group", group.name) for group in config.instance_group]
    for what, word in words:
        if word and shlex.quote(word) != word:
            yield f"{what} is {word!r}, and Triton writes it unquoted into a shell command"
    if not ASKED_BY.fullmatch(name):
        yield f"the model's name is {name!r}, which clients quote in a path, and Triton does not take so"


def _code_beside(home: Path) -> Iterator[Path]:
    """Libraries and programs that Triton takes from the folders of a model and its versions, without being told to."""
    for path in chain(home.glob("*"), home.glob("*/*")):
        if ".so" in path.suffixes or path.name == STUB:
            yield path


def _outside(home: Path, config: ModelConfig, versions: Sequence[Path]) -> Iterator[str]:
    """The files that a model's config names and that are not in its repository."""
    yield from (name for name in named_files(config) if leads_out(name, home, home))
    models = [name for name in (config.default_model_filename, *config.cc_model_filenames.values()) if name]
    yield from (name for version in versions for name in models if leads_out(name, version, home))


def named_files(config: ModelConfig) -> list[str]:
    """The files beside a model's versions that its config names, by their paths in the model's folder."""
    labels = [output.label_filename for output in config.output if output.label_filename]
    inputs = [value.input_data_file for sample in config.model_warmup for value in sample.inputs.values()]
    states = [first.data_file for state in config.sequence_batching.state for first in state.initial_state]
    return [*labels, *(f"{folder}/{name}" for folder, names in ((WARMUP, inputs), (STATES, states)) for name in names if name)]


def leads_out(name: str, folder: Path, home: Path) -> bool:
    """Whether the path `name` in `folder` leads out of that, the model's folder `home` and its repository, links followed; also
    where it cannot be followed."""
    if ".." in Path(name).parts:
        return True
    try:
        return not any(is_inside(folder / name, root) for root in (folder, home, home.parent))
    except (OSError, RuntimeError, ValueError):  # circular links, or an invalid character
        return True
