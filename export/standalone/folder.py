"""Export of a model folder to ONNX without a pipeline, a task or data, checked against PyTorch all the same."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from compressor.checkpoint import write_config
from compressor.errors import UserError
from compressor.models.files.model_folder import CONFIG, COPIED, TOKENIZER_FILES, files_to_copy
from compressor.models.reference import Reference, reference_to
from compressor.new_folder import SCRATCH, becoming
from compressor.processor import weight_bits
from compressor.tasks.features import Forward, pad, predict, torch_forward
from compressor.tasks.predictions import every_token
from compressor.tasks.task_kind import kind_of_head
from export.auto.sensitivity import rounded
from export.generation.generator_files import prove_generator, special_tokens, write_generator
from export.graph.decoder import trace_generator
from export.graph.files import SINGLE_FILE_LIMIT
from export.graph.rewrite import can_fuse
from export.graph.trace import OPSET, stamp, trace, tracing
from export.parity.bounds import kind_on
from export.parity.compare import Batches, ParityResult, Unlabelled, compare, in_other_batches
from export.parity.sides import require_file, runs
from export.parity.suspects import suspect_in_graph
from export.parity.token_outputs import compare_tokens
from export.runtimes import tensorrt as engines
from export.runtimes.onnxruntime import RUNTIME, write_onnx
from export.runtimes.sessions import parity_session, run
from export.standalone.source_model import LoadedModel, find_model, most_tokens

SUMMARY = "export.json"


def export_folder(
    reference: str,
    out: Path,
    *,
    precisions: Sequence[str] = ("fp32", "int8"),
    fuse: bool = True,
    force: bool = False,
    engine: engines.Profile | None = None,
    limit: int = SINGLE_FILE_LIMIT,
) -> dict[str, Any]:
    """Write OUT/model.onnx, OUT/model_int8.onnx, the tokenizer and OUT/export.json, which is returned.

    `reference` is a Hugging Face folder, `package:NAME/PATH`, a hub id, or a checkpoint or state of this project: a classifier
    of sequences or tokens, or a model that generates (export/generation/generator_files.py; int8 and int4 are then those of
    its weights alone). Every file is compared with PyTorch on random rows. Nothing is written if anything fails. Weights of
    `limit` bytes and more are stored beside their graph.

    With a profile for a TensorRT `engine`: OUT/model_fp16.onnx too, the script that builds the engine, and the engine where
    TensorRT is installed.

    Raises UserError E303, E304 and E305 (damaged), E620 (the folder exists), E621 (unsupported model), E622 (it cannot be
    traced), E623 (its cache), E624 (not for this kind of model), E631 (TensorRT); CheckError E610, E611.
    """
    require_free(out, force)
    loaded = find_model(reference)
    copied = files_to_copy(loaded.folder, (*TOKENIZER_FILES, CONFIG, *COPIED))
    with replacing(out, force) as folder:
        fuse = fuse and can_fuse(loaded.model)
        _check_kind(loaded, precisions, engine, reference)
        write = _write_generating if loaded.kind == "generation" else _write_classifier
        more = write(loaded, folder, precisions, fuse, limit, engine, reference_to(reference))
        for path in copied:
            shutil.copyfile(path, folder / path.name)
        if loaded.of_state:  # that of its base knows neither labels nor sizes
            write_config(loaded.model, folder)
        summary = {
            "model": reference,
            "kind": loaded.kind,
            "architecture": loaded.model.config.model_type,
            "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
            "opset": OPSET,
            "fused": fuse,
            "notes": loaded.notes,
            **more,
        }
        write_summary(folder, summary)
    return summary


def _check_kind(loaded: LoadedModel, precisions: Sequence[str], engine: engines.Profile | None, reference: str) -> None:
    """Raise UserError E624 for options that this kind of model does not support."""
    generates = loaded.kind == "generation"
    if "int4" in precisions and not generates:
        raise UserError("E624", "int4 is for models that generate; this is a classifier", "Take int8", reference)
    if engine and loaded.kind != "sequence classification":
        raise UserError("E624", "TensorRT is for classifiers of sequences", "Leave out --tensorrt", reference)
    if engine and engine.most[1] > (most := most_tokens(loaded.model)):
        raise UserError(
            "E624", f"the model takes {most} tokens, fewer than {engine.most[1]}", "Give a smaller --length", reference
        )


def _write_classifier(
    loaded: LoadedModel,
    folder: Path,
    precisions: Sequence[str],
    fuse: bool,
    limit: int,
    engine: engines.Profile | None,
    source: Reference,
) -> dict[str, Any]:
    """Write the files of a classifier; returns their part of the summary."""
    with tracing(str(loaded.folder)):
        graph = stamp(trace(loaded.model, pad([loaded.rows[0], loaded.rows[-1]], loaded.pad_id)), loaded.model, source)
    if "int8" in precisions and weight_bits() < 8:
        loaded.notes.append("this processor has no VNNI: int8 has weights of 7 bits, because products of 8 bits overflow on it")
    paths = write_onnx(graph, folder, precisions=precisions, fuse=fuse, limit=limit)
    built = None
    if engine:
        paths["fp16"], built = engines.write_engine(graph, folder, engine)
    labels = loaded.model.config.id2label
    return {
        "labels": [labels[number] for number in sorted(labels)],
        "files": {precision: describe_file(path, precision) for precision, path in paths.items()},
        "parity": [{"precision": precision, **prove(loaded, precision, path).to_json()} for precision, path in paths.items()],
        engines.RUNTIME.key: built,
    }


def _write_generating(
    loaded: LoadedModel,
    folder: Path,
    precisions: Sequence[str],
    fuse: bool,
    limit: int,
    _engine: None,
    source: Reference,
) -> dict[str, Any]:
    """Write and compare the files of a generative model; returns their part of the summary."""
    facts, paths = write_generating(loaded, folder, precisions, fuse, limit, source)
    for precision, parts in paths.items():
        facts["parity"].append({"precision": precision, **prove_generator(loaded, precision, parts, require_file)})
    return facts


def write_generating(
    loaded: LoadedModel, folder: Path, precisions: Sequence[str], fuse: bool, limit: int, source: Reference | None = None
) -> tuple[dict[str, Any], dict[str, tuple[Path, ...]]]:
    """Write the files of a generative model: (their part of the summary, whose list of comparisons is empty, precision ->
    paths). Raises UserError E622, E623."""
    with tracing(str(loaded.folder)):
        graphs = {name: stamp(graph, loaded.model, source) for name, graph in trace_generator(loaded.model).items()}
    paths = write_generator(graphs, folder, precisions=precisions, fuse=fuse, limit=limit)
    files = {path.stem: describe_file(path, precision) for precision, parts in paths.items() for path in parts}
    return {"generation": special_tokens(loaded), "files": files, "parity": [], engines.RUNTIME.key: None}, paths


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Write FOLDER/export.json, and into it the names of all files: what `--force` may replace."""
    summary["written"] = sorted(path.name for path in folder.iterdir())
    (folder / SUMMARY).write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _written(out: Path) -> tuple[set[str], bool]:
    """The names of the files of an earlier export, with those that its script builds, and whether it lists its own: one of an
    earlier version does not, and of one whose list is damaged only the others are known."""
    names, listed = set(), True
    with suppress(ValueError, TypeError):
        summary = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
        listed = not isinstance(summary, dict) or "written" in summary
        names = {str(name) for name in summary["written"]} if listed else names
    return {SUMMARY, *engines.BUILT, *names}, listed


def require_free(out: Path, force: bool) -> None:
    """Raise UserError E620 where something at `out` must not be replaced."""
    content = [path for path in sorted(out.iterdir()) if not path.name.startswith(SCRATCH)] if out.is_dir() else []
    taken = bool(content) or (out.exists() and not out.is_dir())
    if taken and not (force and (out / SUMMARY).is_file()):
        fix = "Give another --out" if force else "Give another --out, or --force to replace an export"
        what = f"holds no {SUMMARY}: it is not replaced" if force else "is there already"
        raise UserError("E620", f"the folder {what}", fix, str(out))
    if inner := [path.name for path in content if path.is_dir()]:
        what = f"the folder holds the folder '{inner[0]}', as no export does: it is not replaced"
        raise UserError("E620", what, "Give another --out", str(out))
    if not (content and force):
        return
    written, listed = _written(out)
    others = {path.name for path in content} - written
    if others and not listed:
        what = f"its {SUMMARY}, as that of an earlier version, does not list the files of the export: none is replaced"
        raise UserError("E620", what, "Delete the folder if it holds nothing else, or give another --out", str(out))
    if others:
        what = f"the folder holds '{min(others)}', which no export wrote: it is not replaced"
        raise UserError("E620", what, "Move it, or give another --out", str(out))


@contextmanager
def replacing(out: Path, force: bool) -> Iterator[Path]:
    """A new folder whose content takes the place of that of `out` if no error occurs. Raises UserError E620 where something
    else is there."""
    require_free(out, force)
    with ExitStack() as stack:
        try:
            made = stack.enter_context(becoming(out))
        except OSError as error:
            raise UserError("E620", f"cannot be written ({error.strerror})", "Give another --out", str(out)) from None
        yield made
        require_free(out, force)  # another export may have written there meanwhile


def prove(loaded: LoadedModel, precision: str, path: Path) -> ParityResult:
    """Compare an exported classifier with its model. Raises CheckError E610 with the block where they diverge, E611 for rows
    that the graph refuses."""
    ours, worst = torch_forward(loaded.model, accelerate=False), loaded.rows[-1]
    theirs = partial(run, parity_session(RUNTIME, path, precision))
    kind = kind_on(precision, "random rows")
    hop = f"PyTorch -> {path.name}"
    positions = every_token(loaded.rows) if loaded.kind == "token classification" else None
    reference = _outputs(ours, loaded, positions)
    with runs(hop):
        candidate = _outputs(theirs, loaded, positions)
    logits, batches = zip(reference, candidate, strict=True)
    if positions is not None:
        result = compare_tokens(hop, kind, *logits, batches=batches)
    else:  # there are no labels: the reference's own predictions are used instead
        task = kind_of_head(loaded.model.config, logits[0].shape[1])
        more = _rounded(loaded) if precision == "int8" else Unlabelled()
        result = compare(hop, kind, *logits, task.predicted_labels(logits[0]), task=task, batches=batches, unlabelled=more)
        worst = loaded.rows[result.worst_row]
    require_file(result, lambda: suspect_in_graph(loaded.model, path, pad([worst, loaded.rows[-1]], loaded.pad_id)))
    return result


def _outputs(side: Forward, loaded: LoadedModel, positions: np.ndarray | None) -> tuple[np.ndarray, Batches]:
    """Logits of one side for all rows, at `positions` if there are any, and for some of them in other batches."""
    rows, pad_id = loaded.rows, loaded.pad_id
    return predict(side, rows, pad_id, labels=positions), in_other_batches(side, rows, pad_id, labels=positions)


def _rounded(loaded: LoadedModel) -> Unlabelled:
    """The model's predictions for its rows with all its matrices rounded to int8 in PyTorch."""
    with rounded(loaded.model, bits=weight_bits()):
        return Unlabelled(rounded=predict(torch_forward(loaded.model, accelerate=False), loaded.rows, loaded.pad_id))


def describe_file(path: Path, precision: str) -> dict[str, Any]:
    """Name, precision, bytes (external data included), inputs and outputs of an ONNX file."""
    graph = onnx.load(path, load_external_data=False).graph
    shapes = {
        side: {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in getattr(graph, side)
        }
        for side in ("input", "output")
    }
    stored = sum(part.stat().st_size for part in (path, path.with_name(f"{path.name}.data")) if part.is_file())
    facts = {"path": path.name, "precision": precision, "bytes": stored}
    return {**facts, "inputs": shapes["input"], "outputs": shapes["output"]}
