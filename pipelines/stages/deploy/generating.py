"""Stage `deploy` for a model that generates: its repository, and what it streams against the bare loop on the same file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from compressor.errors import CheckError
from compressor.tasks import TaskConfig
from compressor.tasks.data import Data
from compressor.tasks.reading import read_task
from export.generation.greedy import facts_of, generate, open_live
from export.runtimes.runtime_registry import GENERATING
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.deploy.config import DeployConfig
from serving.deployment.triton_control import Control, Refused
from serving.generator_repository import version_facts, write_generator
from serving.layout.text_outputs import TEXT_SUFFIX
from serving.server import EmbeddedServer

PROMPTS, TOKENS = 8, 16
HOP = "local session -> Triton, generated texts"


def deploy_generator(config: DeployConfig, inputs: Inputs, data: Data, workspace: Workspace) -> dict[str, Any]:
    """Write repository/NAME-text and compare what a live server generates. Raises CheckError E610, E616."""
    exported, precision = exported_folder(config, inputs)
    repository = workspace.folder / "repository"
    write_generator(repository, config.name, exported, inputs.base.folder, precision=precision, threads=config.threads)
    with workspace.progress("generating, locally and through the live server", PROMPTS) as bar:
        compare_streamed(repository, config.name, exported, precision, inputs, workspace.log_folder / "triton.log", bar.advance)
    how = {"runtime": GENERATING.key, "precision": precision}
    return {"model": config.name, "interfaces": ["text"], **how, "parity": []}


def exported_folder(config: DeployConfig, inputs: Inputs) -> tuple[Path, str]:
    """The folder of the compressed model's export, and the precision to deploy. Raises CheckError E616."""
    exported = inputs.nearest("onnx")
    files = exported.metadata["files"]["compressed"]
    runtime, precision = config.chosen(exported.metadata.get("runtimes") or list(files), files)
    return (exported.folder / files[runtime][precision]["path"]).parent, precision


def compare_streamed(
    repository: Path, name: str, exported: Path, precision: str, inputs: Inputs, log: Path, advance=lambda steps: None
) -> None:
    """Require that a live server continues validation prompts as a local session does.

    Raises CheckError E610, UserError E7xx."""
    facts = vars(version_facts(facts_of(exported)["generation"], inputs.base.folder, precision))
    tokenizer = Tokenizer.from_file(str(inputs.base.folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True  # as the backend: special tokens spelt in a text are text
    live = open_live(exported, precision, threads=inputs.threads)
    with EmbeddedServer(repository, log_path=log) as server:
        for prompt in prompts_of(inputs.task):
            expected = local_text(live, tokenizer, prompt, facts)
            given = served_text(Control.at(server.url), f"{name}{TEXT_SUFFIX}", prompt)
            if given != expected:
                what = f"{HOP}: after {prompt!r:.60} the server generates {given!r:.60}, the local session {expected!r:.60}"
                raise CheckError("E610", what, f"See {log.name}; compress verify RUN repeats the comparison")
            advance(1)


def prompts_of(task: TaskConfig) -> list[str]:
    """The first validation prompts."""
    return [prompt for (prompt,) in read_task(task).validation.texts[:PROMPTS]]


def local_text(live: Any, tokenizer: Tokenizer, prompt: str, facts: dict[str, Any]) -> str:
    """The greedy continuation, put together as the backend does."""
    from serving.backends.decoding import Settings, Text, prompt_ids

    ids = np.array([prompt_ids(tokenizer, prompt)])
    text, pieces = Text(tokenizer, Settings(max_tokens=TOKENS), frozenset(facts["ends"])), []
    for token in generate(live, ids, np.ones_like(ids), TOKENS, ends=facts["ends"], pad=facts["pad_id"])[0].tolist():
        pieces.append(text.add(token))
        if text.finish:
            break
    return "".join(pieces)


def served_text(control: Control, model: str, prompt: str) -> str:
    """What the server generates. Raises CheckError E610 with its reason where it refuses."""
    try:
        return control.generate(model, {"TEXT": prompt, "MAX_TOKENS": TOKENS, "STREAM": False})["TEXT"]
    except Refused as refusal:
        raise CheckError("E610", f"{HOP}: the server refuses {prompt!r:.60} ({refusal.reason})", "See its log") from refusal
