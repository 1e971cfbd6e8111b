"""Repositories of models that continue texts: FOLDER/NAME-text/{config.pbtxt, 1/{model.onnx, tokenizer/, serving.json}}."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path

from compressor.errors import UserError
from compressor.models.architectures import row_of
from compressor.models.build import config_of
from compressor.new_folder import becoming
from export.generation.greedy import decoder_in, facts_of
from export.runtimes.runtime_registry import GENERATING
from serving.layout.generator_config import generator_config
from serving.layout.text_outputs import TEXT_SUFFIX
from serving.layout.version_file import VersionFacts
from serving.repository import check_name, tokenizer_files, write_config, write_version

DEFAULT_POSITIONS = 2048


@dataclass(frozen=True)
class Source:
    """How a decoder's texts are read by the encoder before it: cut to `max_length` tokens, behind the task's `prefix`."""

    max_length: int = DEFAULT_POSITIONS
    prefix: str = ""


def write_generator(
    folder: Path,
    name: str,
    exported: Path,
    tokenizer_folder: Path,
    *,
    precision: str = "fp32",
    threads: int | None = None,
    source: Source | None = None,
    stripped: bool = False,
) -> Path:
    """Add the model NAME-text to the repository `folder`; returns its folder.

    `exported` is a folder of `compress export` of a model that generates, `tokenizer_folder` one with its tokenizer and
    config.json, `source` for one with an encoder; `stripped`: white space around a prompt is left out, as kind generation
    trains (a chat's template may end in it). Raises UserError E602 (not such an export, or not of that precision), E301 (an
    encoder and decoder of an architecture without a row), E720 (name), E723 (tokenizer).
    """
    check_name(name)
    exported, tokenizer_folder = Path(exported), Path(tokenizer_folder)
    facts, target = facts_of(exported), Path(folder, f"{name}{TEXT_SUFFIX}")
    if not tokenizer_folder.is_dir():
        raise UserError("E723", "no such folder", "Give the folder of the model's tokenizer", str(tokenizer_folder))
    tokenizer_files(tokenizer_folder)
    if target.exists():
        raise UserError("E720", f"the repository already holds a model '{target.name}'", "Choose another name", str(folder))
    decoder = decoder_in(facts, precision, exported)
    if facts["generation"]["start"] is not None and "attention_mask" not in decoder.get("inputs", ()):
        what = "the decoder takes no attention_mask, without which texts that are computed together are wrong"
        raise UserError("E602", what, "Export it again", str(exported))
    version = version_facts(facts["generation"], tokenizer_folder, precision, source, stripped)
    with becoming(target) as made:
        write_version(made / "1", exported / decoder["path"], GENERATING, version, tokenizer_folder)
        write_config(generator_config(target.name, threads=threads), made)
    return target


def version_facts(
    generation: dict, folder: Path, precision: str, source: Source | None = None, stripped: bool = False
) -> VersionFacts:
    """What the backend must know of a decoder, and of the `source` of one behind an encoder."""
    import compressor.models.auto  # noqa: F401 - the config.json of a pruned model has a type of its own

    config = config_of(folder)
    positions = getattr(config, "max_position_embeddings", None) or DEFAULT_POSITIONS
    facts = VersionFacts(
        task="generation",
        labels=(),
        max_length=positions,
        pad_id=generation["pad"],
        vocabulary=config.vocab_size,
        positions=positions,
        ends=tuple(generation["ends"]),
        precision=precision,
        stripped=stripped and generation["start"] is None,
    )
    if generation["start"] is None:
        return facts
    row_of(config.model_type)  # of others a decoder may count positions from its cache, and is wrong beside longer rows
    # its positions are relative: no table ends
    facts = replace(facts, positions=DEFAULT_POSITIONS)
    return replace(facts, task="text2text", start=generation["start"], **asdict(source or Source()))
