"""Stage `deploy` for a model that generates: its repository, and what it streams against the bare loop on the same file."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import CheckError, UserError
from compressor.tasks import TaskConfig
from compressor.tasks.data import Data, task_tokenizer
from compressor.tasks.reading import read_task
from compressor.tasks.task_kind import kind_of
from export.generation.greedy import facts_of, generate, open_live
from export.runtimes.runtime_registry import GENERATING
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.deploy.chosen_file import chosen_file, deployment
from pipelines.stages.deploy.config import DeployConfig
from serving.deployment.answers import Answer, tensor, write_answers
from serving.deployment.triton_control import Control, Refused
from serving.generator_repository import Source, version_facts, write_generator
from serving.layout.generator_config import PIECES
from serving.layout.text_outputs import TEXT, TEXT_SUFFIX
from serving.server import EmbeddedServer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROMPTS, TOKENS = 8, 16
HOP = "local session -> Triton, generated texts"


def deploy_generator(config: DeployConfig, inputs: Inputs, data: Data, workspace: Workspace) -> dict[str, Any]:
    """Write repository/NAME-text and compare what a live server generates. Raises CheckError E610, E616."""
    _, precision, path = chosen_file(config, inputs)
    exported, repository = path.parent, workspace.folder / "repository"
    options = {"precision": precision, "threads": config.threads, "source": source_of(inputs.task)}
    write_generator(repository, config.name, exported, inputs.base.folder, stripped=True, **options)
    with workspace.progress("generating, locally and through the live server", PROMPTS) as bar:
        log = workspace.log_folder / "triton.log"
        answers = compare_streamed(repository, config.name, exported, precision, inputs, log, bar.advance)
    write_answers(repository / f"{config.name}{TEXT_SUFFIX}" / "1", answers)
    return deployment(config, GENERATING.key, precision, ["text"], [])


def compare_streamed(
    repository: Path, name: str, exported: Path, precision: str, inputs: Inputs, log: Path, advance=lambda steps: None
) -> list[Answer]:
    """What a live server generates after validation prompts, which must be what a local session does.

    Raises CheckError E610, UserError E113, E7xx."""
    generation, source = facts_of(exported)["generation"], source_of(inputs.task)
    facts = vars(version_facts(generation, inputs.base.folder, precision, source))
    tokenizer = tokenizer_of_prompts(inputs.base.folder)
    live, answers = open_live(exported, precision, threads=inputs.threads), []
    with EmbeddedServer(repository, log_path=log) as server:
        for prompt, room in prompts_of(inputs.task, lambda prompt: room_behind(prompt, tokenizer, facts)):
            most = min(TOKENS, room)
            expected = local_text(live, tokenizer, prompt, facts, most)
            answer = served_answer(Control.at(server.url), f"{name}{TEXT_SUFFIX}", prompt, most)
            (given,) = answer.outputs[0]["data"]
            answers.append(answer)
            if given != expected:
                what = f"{HOP}: after {prompt!r:.60} the server generates {given!r:.60}, the local session {expected!r:.60}"
                raise CheckError("E610", what, f"See {log.name}; compress verify RUN repeats the comparison")
            advance(1)
    return answers


def source_of(task: TaskConfig) -> Source | None:
    """How the server reads a text of an encoder; None for a decoder alone."""
    return None if kind_of(task.kind).continues else Source(task.max_length, task.prefix or "")


def prompts_of(task: TaskConfig, room: Callable[[str], int]) -> list[tuple[str, int]]:
    """The first validation prompts that leave room for a token, each once, with that room in tokens; sources without their
    prefix, which the server puts before them. Raises UserError E113 where each fills all positions."""
    prompts = dict.fromkeys(prompt.removeprefix(task.prefix or "") for (prompt,) in read_task(task).validation.texts)
    found = list(islice(((prompt, left) for prompt in prompts if (left := room(prompt)) > 0), PROMPTS))
    if not found:
        what = "every validation prompt fills all positions of the model (max_position_embeddings of its config.json)"
        raise UserError("E113", what, "Give shorter prompts: nothing can be generated behind these", str(task.validation))
    return found


def tokenizer_of_prompts(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer in a folder, as training reads prompts; not the backend's own, whose tokens it is compared with."""
    return task_tokenizer(folder, kind_of("generation"))


def ids_of(tokenizer: PreTrainedTokenizerFast, prompt: str, facts: dict[str, Any]) -> list[int]:
    """The tokens of a prompt that is to be continued, or of a source, as training reads them."""
    from serving.backends.decoding import not_ended

    if facts["start"] is None:
        return not_ended(tokenizer(prompt).encodings[0])
    return tokenizer(facts["prefix"] + prompt, truncation=True, max_length=facts["max_length"])["input_ids"]


def room_behind(prompt: str, tokenizer: PreTrainedTokenizerFast, facts: dict[str, Any]) -> int:
    """How many tokens a model can generate: all its positions behind an encoder, else those that the prompt leaves."""
    return facts["positions"] - (0 if facts["start"] is not None else len(ids_of(tokenizer, prompt, facts)))


def local_text(live: Any, tokenizer: PreTrainedTokenizerFast, prompt: str, facts: dict[str, Any], most: int = TOKENS) -> str:
    """What greedy generation of at most `most` tokens gives, put together as the backend does."""
    from serving.backends.decoding import Settings, Text

    ids = np.array([ids_of(tokenizer, prompt, facts)])
    text, pieces = Text(tokenizer.backend_tokenizer, Settings(max_tokens=most), frozenset(facts["ends"])), []
    options = {"ends": facts["ends"], "pad": facts["pad_id"], "start": facts["start"]}
    for token in generate(live, ids, np.ones_like(ids), most, **options)[0].tolist():
        pieces.append(text.add(token))
        if text.finish:
            break
    return "".join(pieces)


def served_answer(control: Control, model: str, prompt: str, most: int = TOKENS) -> Answer:
    """What the server generates, at most so many tokens: TEXT first. Raises CheckError E610 with its reason where it
    refuses."""
    asked = {TEXT: (prompt, "BYTES"), "MAX_TOKENS": (most, "INT32"), "STREAM": (False, "BOOL")}
    try:
        given = control.generate(model, {name: value for name, (value, _) in asked.items()})
    except Refused as refusal:
        raise CheckError("E610", f"{HOP}: the server refuses {prompt!r:.60} ({refusal.reason})", "See its log") from refusal
    inputs = [tensor(name, np.array([value], dtype=object), type_) for name, (value, type_) in asked.items()]
    types = {name: type_.replace("TYPE_STRING", "BYTES").removeprefix("TYPE_") for name, type_, _ in PIECES}
    outputs = [tensor(name, np.array([given[name]], dtype=object), type_) for name, type_ in types.items()]
    return Answer(inputs, outputs, generated=True)
