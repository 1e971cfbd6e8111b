"""What the stage `export` does for a model that generates: one graph with a cache, proven on real rows and by generating."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.stages.export import hop_of, kind_of, stored_bytes

if TYPE_CHECKING:
    from torch import nn

    from export.found import Found
    from pipelines.loading import Data
    from pipelines.stage import BaseModelReference, Inputs, Workspace
    from pipelines.stages.export import ExportConfig

RUNTIME = "onnxruntime"


def export_generator(
    name: str, model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, inputs: Inputs
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """`export_one` for a merged model that generates: NAME/ is a folder as `compress export` writes it, int8 of its weights.

    Each file is compared with PyTorch on validation rows, prompt and target in one pass on an empty past, and by what it
    generates behind random prompts, token by token. Raises CheckError E610, E611, UserError E622, E623.
    """
    from compressor.tasks.features import torch_forward
    from export.folder import SUMMARY, write_generating
    from export.onnx import SINGLE_FILE_LIMIT, can_fuse
    from export.sessions import run, session
    from pipelines.hops import ask, compare_graph, runs
    from pipelines.loading import judge_rows

    folder, rows = workspace.folder / name, data.compared()
    reference = ask(torch_forward(model), rows, data, workspace, f"{name} in PyTorch")
    folder.mkdir()
    with workspace.progress(f"exporting {name}", 1) as bar:
        found = with_prompts(model, inputs.base, data)
        facts = write_generating(found, folder, config.precision, can_fuse(model), SINGLE_FILE_LIMIT, source=inputs.base)
        bar.advance()
    (folder / SUMMARY).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    parity, files = [], {}
    for file, proof in zip(facts["files"].values(), facts["parity"], strict=True):
        precision, path = file["precision"], Path(folder, file["path"])
        hop, live = hop_of(name, RUNTIME, precision), partial(run, session(path, threads=inputs.threads))
        with runs(hop):
            answers = ask(live, rows, data, workspace, hop)
            judged = judge_rows(live, data.validation, data, workspace, f"{name} {precision}")
        result = compare_graph(hop, kind_of(precision), model, reference, path, answers, rows, data)
        told = {key: proof[key] for key in ("generated", "generated_agreement")}
        batches = {f"generating, {how}": apart for how, apart in proof["batches"].items()}
        parity.append({**result.to_json(), "batches": {**result.batches, **batches}, **told})
        files[precision] = {"path": f"{name}/{path.name}", "bytes": stored_bytes(path), "quality": judged.quality}
    return parity, {RUNTIME: files}


def with_prompts(model: nn.Module, base: BaseModelReference, data: Data) -> Found:
    """A merged model with the random prompts that its graphs generate behind."""
    from compressor.models import tokenizer_of
    from export.found import Found, random_rows

    return Found(model, "generation", base.folder, random_rows(model, tokenizer_of(base.folder)), data.pad_id)
