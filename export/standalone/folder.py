"""A model from a folder to ONNX, without a pipeline, a task or data, and proven all the same."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.errors import UserError
from compressor.models.hub import TOKENIZER_FILES
from compressor.processor import weight_bits

if TYPE_CHECKING:
    import onnx

    from compressor.models.hub import Reference
    from export.parity.compare import ParityResult, Unlabelled
    from export.runtimes.tensorrt import Profile
    from export.standalone.source_model import Found

PRECISIONS = ("fp32", "int8", "int4")
SUMMARY = "export.json"


def export_folder(
    reference: str,
    out: Path,
    *,
    precisions: Sequence[str] = ("fp32", "int8"),
    fuse: bool = True,
    force: bool = False,
    tensorrt: Profile | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Write OUT/model.onnx, OUT/model_int8.onnx, the tokenizer and OUT/export.json, which is returned.

    `reference` is a Hugging Face folder, `package:NAME/PATH`, a hub id, or a checkpoint or state of this project: a classifier
    of sequences or tokens, or a model that generates (export/generation/files.py; int8 and int4 are then of its weights alone).
    Every file is compared with PyTorch on random rows. Nothing is written when anything fails. Weights of `limit` bytes and
    more (default: 2 GB) lie beside their graph.

    With a profile for `tensorrt`: OUT/model_fp16.onnx too, the script that builds its engine, and the engine where TensorRT is
    installed.

    Raises UserError E303, E304 and E305 (damaged), E620 (the folder is taken), E621 (no such model), E622 (it cannot be
    traced), E623 (its cache), E624 (not for this kind of model), E631 (TensorRT); CheckError E610.
    """
    from compressor.models.hub import reference_to
    from export.graph.trace import OPSET, SINGLE_FILE_LIMIT, can_fuse
    from export.standalone.source_model import find_model

    require_free(out, force)
    found = find_model(reference)
    with replacing(out, force) as folder:
        fuse = fuse and can_fuse(found.model)
        _check_kind(found, precisions, tensorrt, reference)
        write = write_generating if found.kind == "generation" else _write_classifier
        source, limit = reference_to(reference), SINGLE_FILE_LIMIT if limit is None else limit
        more = write(found, folder, precisions, fuse, limit, tensorrt, source)
        for name in (*TOKENIZER_FILES, "config.json", "generation_config.json"):
            if (found.folder / name).is_file():
                shutil.copyfile(found.folder / name, folder / name)
        summary = {
            "model": reference,
            "kind": found.kind,
            "architecture": found.model.config.model_type,
            "parameters": sum(parameter.numel() for parameter in found.model.parameters()),
            "opset": OPSET,
            "fused": fuse,
            "notes": found.notes,
            **more,
        }
        (folder / SUMMARY).write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return summary


def _check_kind(found: Found, precisions: Sequence[str], tensorrt: Profile | None, reference: str) -> None:
    """Raise UserError E624 for what only the other kind of model can be given."""
    generates = found.kind == "generation"
    if "int4" in precisions and not generates:
        raise UserError("E624", "int4 is for models that generate; this is a classifier", "Take int8", reference)
    if tensorrt and found.kind != "sequence classification":
        raise UserError("E624", "TensorRT is for classifiers of sequences", "Leave out --tensorrt", reference)


@contextmanager
def _tracing(reference: Path) -> Iterator[None]:
    """Any fault of the exporter is a UserError E622."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # it raises whatever its parts raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError("E622", f"this model cannot be traced ({reason})", "Try another one", str(reference)) from error


def _write_classifier(
    found: Found,
    folder: Path,
    precisions: Sequence[str],
    fuse: bool,
    limit: int,
    tensorrt: Profile | None,
    source: Reference,
) -> dict[str, Any]:
    """The files of a classifier, and what the summary tells of them."""
    from compressor.tasks.features import pad
    from export.graph.trace import stamp, trace, write_onnx

    with _tracing(found.folder):
        graph = stamp(trace(found.model, pad([found.rows[0], found.rows[-1]], found.pad_id)), found.model, source)
    if "int8" in precisions and weight_bits() < 8:
        found.notes.append("this processor has no VNNI: int8 has weights of 7 bits, because products of 8 bits overflow on it")
    paths = write_onnx(graph, folder, precisions=precisions, fuse=fuse, limit=limit, weight_bits=weight_bits())
    engine = write_tensorrt(graph, folder, tensorrt, paths) if tensorrt else None
    labels = found.model.config.id2label
    return {
        "labels": [labels[number] for number in sorted(labels)],
        "files": {precision: describe(path, precision) for precision, path in paths.items()},
        "parity": [{"precision": one, **prove(found, one, path).to_json()} for one, path in paths.items()],
        "tensorrt": engine,
    }


def write_generating(
    found: Found,
    folder: Path,
    precisions: Sequence[str],
    fuse: bool,
    limit: int,
    tensorrt: None = None,
    source: Reference | None = None,
    *,
    required: Sequence[str] = PRECISIONS,
) -> dict[str, Any]:
    """The files of a model that generates, and what the summary tells of them. Raises UserError E622, E623, and CheckError E610
    for a precision of those `required`; of another the summary says that it failed."""
    from export.generation.files import prove_generator, special_tokens, write_generator
    from export.graph.decoder import trace_generator
    from export.graph.trace import stamp

    with _tracing(found.folder):
        graphs = {name: stamp(graph, found.model, source) for name, graph in trace_generator(found.model).items()}
    paths = write_generator(graphs, folder, precisions=precisions, fuse=fuse, limit=limit)
    return {
        "generation": special_tokens(found),
        "files": {path.stem: describe(path, one) for one, parts in paths.items() for path in parts},
        "parity": [
            {"precision": one, **prove_generator(found, one, parts, required=one in required)} for one, parts in paths.items()
        ],
        "tensorrt": tensorrt,
    }


def write_tensorrt(graph: onnx.ModelProto, folder: Path, profile: Profile, paths: dict[str, Path]) -> dict[str, Any]:
    """Add the fp16 graph to `paths`, write its script, and build its engine where TensorRT is installed."""
    from export.graph.half import half
    from export.graph.trace import carry_over, file_name, save
    from export.runtimes import tensorrt

    paths["fp16"], sparse = folder / file_name("fp16"), tensorrt.has_two_of_four(graph)
    narrow = half(graph)
    carry_over(graph, narrow)
    save(narrow, paths["fp16"])
    script = tensorrt.write_script(paths["fp16"], folder, profile, sparse=sparse)
    module = tensorrt.find_module()
    facts = {"script": script.name, "sparse": sparse, "profile": asdict(profile), "engine": None}
    if module is not None:
        plan = tensorrt.build_engine(paths["fp16"], folder, profile, sparse=sparse)
        # its answers are never asked for: that needs the GPU it is for
        built = {"engine": plan.name, "compared": False}
        facts |= {**built, "library": tensorrt.library_of(module), "version": module.__version__}
    return facts


def require_free(out: Path, force: bool) -> None:
    """Raise UserError E620 where something is at `out` that is not to be replaced."""
    taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken and not (force and (out / SUMMARY).is_file()):
        mend = "Give another --out" if force else "Give another --out, or --force to replace an export"
        what = f"holds no {SUMMARY}: it is not replaced" if force else "is there already"
        raise UserError("E620", f"the folder {what}", mend, str(out))


@contextmanager
def replacing(out: Path, force: bool) -> Iterator[Path]:
    """A new folder that takes the place of `out` when all went well. Raises UserError E620 where something else is there."""
    require_free(out, force)
    try:
        out.absolute().parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.absolute().parent))
    except OSError as error:
        raise UserError("E620", f"cannot be written ({error.strerror})", "Give another --out", str(out)) from None
    try:
        beside.chmod(0o755)
        yield beside
        if out.exists():
            shutil.rmtree(out)
        beside.rename(out)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def prove(found: Found, precision: str, path: Path) -> ParityResult:
    """Compare an exported classifier with its model. Raises CheckError E610 with the block where they part."""
    from compressor.tasks.answers import every_token
    from compressor.tasks.features import pad, predict, torch_forward
    from compressor.tasks.kinds import kind_with
    from export.parity.compare import Unlabelled, compare, in_other_batches, require
    from export.parity.suspects import suspect_in_graph
    from export.parity.token_outputs import compare_tokens
    from export.runtimes.sessions import run, session

    sides, worst = [torch_forward(found.model), partial(run, session(path))], found.rows[-1]
    kind = {"fp32": "onnx", "int8": "int8 on random rows"}.get(precision, precision)
    hop = f"PyTorch -> {path.name}"
    asked = every_token(found.rows) if found.kind == "token classification" else None
    logits = [predict(side, found.rows, found.pad_id, labels=asked) for side in sides]
    batches = tuple(in_other_batches(side, found.rows, found.pad_id, labels=asked) for side in sides)
    if asked is not None:
        result = compare_tokens(hop, kind, *logits, batches=batches)
    else:  # there are no labels: the reference's own answers stand for them
        task = kind_with(logits[0].shape[1])
        more = _rounded(found) if precision == "int8" else Unlabelled()
        result = compare(hop, kind, *logits, task.answers(logits[0]), task=task, batches=batches, unlabelled=more)
        worst = found.rows[result.worst_row]
    require(result, lambda: suspect_in_graph(found.model, path, pad([worst, found.rows[-1]], found.pad_id)))
    return result


def _rounded(found: Found) -> Unlabelled:
    """What the model says of its rows with all its matrices in int8, in PyTorch."""
    from compressor.tasks.features import predict, torch_forward
    from export.auto.sensitivity import rounded
    from export.parity.compare import Unlabelled

    with rounded(found.model, bits=weight_bits()):
        return Unlabelled(rounded=predict(torch_forward(found.model), found.rows, found.pad_id))


def describe(path: Path, precision: str) -> dict[str, Any]:
    """Name, precision, bytes (external data included), inputs and outputs of an ONNX file."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    shapes = {
        side: {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in getattr(graph, side)
        }
        for side in ("input", "output")
    }
    size = sum(file.stat().st_size for file in (path, path.with_name(f"{path.name}.data")) if file.is_file())
    return {"path": path.name, "precision": precision, "bytes": size, "inputs": shapes["input"], "outputs": shapes["output"]}
