"""Stage `export` for a generative model: its graphs with a cache, checked on real rows and by the tokens they generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from compressor.errors import CheckError, UserError
from compressor.models.reference import Reference
from compressor.models.special_tokens import start_id, tokenizer_of
from compressor.tasks.data import Data
from export.generation.generator_files import prove_generator
from export.graph.files import SINGLE_FILE_LIMIT
from export.parity.compare import require
from export.runtimes.runtime_registry import GENERATING, hop_of
from export.standalone.folder import SUMMARY, write_generating
from export.standalone.source_model import LoadedModel, random_rows
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.export.config import ExportConfig
from pipelines.stages.export.exported import Exported, left_out, nothing_left, require_memory, say_result
from pipelines.stages.export.proving import Prover


def export_generator(
    name: str, model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, inputs: Inputs
) -> Exported:
    """`export_one` for a merged generative model: NAME/ is a folder like that of `compress export`, with weight-only int8.

    Each file is compared with PyTorch on validation rows, prompt and target in one pass on an empty past, and on text that it
    generates after random prompts, token by token. A compressed int8 file that fails is left out, without a repair, and so is
    a dense one that cannot be run. Raises CheckError E610, E611, UserError E602 for a compressed file in fp32, E622, E623.
    """
    folder, prover = workspace.folder / name, Prover(name, model, data, workspace, inputs.threads, inputs.seed)
    _ = prover.reference
    folder.mkdir()
    with workspace.progress(f"exporting {name}", 1) as bar:
        loaded, fuse = with_prompts(model, inputs.base, data), GENERATING.can_fuse(model)
        facts, paths = write_generating(loaded, folder, config.precision, fuse, SINGLE_FILE_LIMIT, inputs.base)
        bar.advance()
    exported = Exported()
    for precision, parts in paths.items():
        proof = _proven(prover, loaded, precision, parts, exported)
        if proof is None:
            facts["files"] = {key: file for key, file in facts["files"].items() if file["precision"] != precision}
        else:
            facts["parity"].append({"precision": precision, **proof})
    if not exported.files and prover.gated:
        raise nothing_left(exported.failures)
    (folder / SUMMARY).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return exported


def _proven(
    prover: Prover, loaded: LoadedModel, precision: str, parts: Sequence[Path], exported: Exported
) -> dict[str, Any] | None:
    """The comparison of the tokens that a file generates, which is also compared on the validation rows. None where it is left
    out, which is a failure if it was to be shipped. `parts`: of an encoder and a decoder, the decoder's file comes last and
    stands for both.

    Raises CheckError E610, E611, UserError E602 for a compressed file in fp32.
    """
    hop, path, say = hop_of(prover.name, GENERATING.key, precision), parts[-1], prover.workspace.say
    required = prover.gated and precision == "fp32"
    try:
        proof = prove_generator(loaded, precision, parts, require if required else None)
        result = prover.compare(hop, precision, prover.outputs(GENERATING, path, precision, hop), GENERATING)
        if prover.gated and not (result.passed and proof["passed"]):
            raise not_generated(hop, proof) if result.passed else prover.failure(result, GENERATING, path)
    except (CheckError, UserError) as error:
        require_memory(error)
        if required:
            raise
        say(f"{hop}: left out ({error.what})")
        if prover.gated:
            exported.failures.append(left_out(error))
        GENERATING.remove(path)
        return None
    say_result(result, say)
    if not proof["passed"]:
        say(f"{not_generated(hop, proof).what}; it is a baseline and is not deployed")
        result = replace(result, passed=False)
    batches = {f"generating, {how}": apart for how, apart in proof["batches"].items()}
    generated = {key: proof[key] for key in ("generated", "generated_agreement")}
    exported.parity.append({**result.to_json(), "batches": {**result.batches, **batches}, **generated})
    quality = prover.quality(GENERATING, path, f"{prover.name} {precision}")
    exported.files.setdefault(GENERATING.key, {})[precision] = {
        "path": f"{prover.name}/{path.name}",
        "bytes": GENERATING.stored_bytes(path),
        "quality": quality,
    }
    return proof


def not_generated(hop: str, proof: dict[str, Any]) -> CheckError:
    """E610 for a file that generates other tokens than its model."""
    shown = f"allowed: {proof['bound']}; {proof['agreement']:.1%} agree"
    what = f"{hop}: the tokens generated after random prompts differ from the model's ({shown})"
    return CheckError("E610", what, "Leave int8 out of export.precision")


def with_prompts(model: nn.Module, base: Reference, data: Data) -> LoadedModel:
    """A merged model with the random prompts for its generated tokens. Behind an encoder it begins as in training, whatever the
    base's generation_config.json says."""
    if model.config.is_encoder_decoder:
        model.generation_config.decoder_start_token_id = start_id(model.config, data.pad_id)
    return LoadedModel(model, "generation", base.folder, random_rows(model, tokenizer_of(base.folder)), data.pad_id)
