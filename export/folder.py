"""A sequence classifier from a folder to ONNX, without a pipeline, a task or data, and proven all the same."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import UserError
from compressor.models import TOKENIZER_FILES, find_folder, tokenizer_of

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from export.parity import ParityResult
    from export.tensorrt import Profile

PRECISIONS = ("fp32", "int8")
SUMMARY = "export.json"
ROWS, MAX_LENGTH = 128, 128
"""Random rows that are compared, and the tokens of the longest."""

Row = dict[str, list[int]]


@dataclass
class Classifier:
    """A live model without chains, its folder, rows to try it on, the id that pads them, and what a user should know of it."""

    model: nn.Module
    folder: Path
    rows: list[Row]
    pad_id: int
    notes: list[str] = field(default_factory=list)


def export_folder(
    reference: str,
    out: Path,
    *,
    precisions: Sequence[str] = ("fp32", "int8"),
    fuse: bool = True,
    force: bool = False,
    tensorrt: Profile | None = None,
) -> dict[str, Any]:
    """Write OUT/model.onnx, OUT/model_int8.onnx, the tokenizer and OUT/export.json, which is returned.

    With a profile for `tensorrt`: OUT/model_fp16.onnx too, the script that builds its engine, and the engine where TensorRT is
    installed.

    `reference` is a Hugging Face folder, `package:NAME/PATH`, a hub id, or a checkpoint or state of this project. Every file is
    compared with PyTorch on random rows. Nothing is written when anything fails.

    Raises UserError E303, E305, E620 (the folder is taken), E621 (no classifier), E622 (it cannot be traced), E631 (TensorRT);
    CheckError E610.
    """
    from compressor.tasks.features import pad
    from export.onnx import OPSET, can_fuse, trace, write_onnx

    with replacing(out, force) as folder:
        found = load_classifier(reference)
        fuse = fuse and can_fuse(found.model)
        sample = pad([found.rows[0], found.rows[-1]], found.pad_id)
        try:
            graph = trace(found.model, sample)
        except Exception as error:  # the exporter raises whatever its parts raise
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            raise UserError("E622", f"this model cannot be traced ({reason})", "Try another one", reference) from error
        paths = write_onnx(graph, folder, precisions=precisions, fuse=fuse)
        engine = write_tensorrt(graph, folder, tensorrt, paths) if tensorrt else None
        records = [prove(found, precision, path) for precision, path in paths.items()]
        for name in (*TOKENIZER_FILES, "config.json"):
            if (found.folder / name).is_file():
                shutil.copyfile(found.folder / name, folder / name)
        labels = found.model.config.id2label
        summary = {
            "model": reference,
            "architecture": found.model.config.model_type,
            "parameters": sum(parameter.numel() for parameter in found.model.parameters()),
            "labels": [labels[number] for number in sorted(labels)],
            "opset": OPSET,
            "fused": fuse,
            "files": {precision: describe(path) for precision, path in paths.items()},
            "parity": [record.to_json() for record in records],
            "tensorrt": engine,
            "notes": found.notes,
        }
        (folder / SUMMARY).write_text(json.dumps(summary, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return summary


def write_tensorrt(graph: onnx.ModelProto, folder: Path, profile: Profile, paths: dict[str, Path]) -> dict[str, Any]:
    """Add the fp16 graph to `paths`, write its script, and build its engine where TensorRT is installed."""
    from export import tensorrt
    from export.half import half
    from export.onnx import file_name, save

    paths["fp16"], sparse = folder / file_name("fp16"), tensorrt.is_two_of_four(graph)
    save(half(graph), paths["fp16"])
    script = tensorrt.write_script(paths["fp16"], folder, profile, sparse=sparse)
    module = tensorrt.find_module()
    facts = {"script": script.name, "sparse": sparse, "profile": asdict(profile), "engine": None}
    if module is not None:
        plan = tensorrt.build_engine(paths["fp16"], folder, profile, sparse=sparse)
        facts |= {"engine": plan.name, "library": tensorrt.library_of(module), "version": module.__version__}
    return facts


@contextmanager
def replacing(out: Path, force: bool) -> Iterator[Path]:
    """A new folder that takes the place of `out` when all went well. Raises UserError E620 where something else is there."""
    taken = out.exists() and (not out.is_dir() or any(out.iterdir()))
    if taken and not (force and (out / SUMMARY).is_file()):
        mend = "Give another --out" if force else "Give another --out, or --force to replace an export"
        what = f"holds no {SUMMARY}: it is not replaced" if force else "is there already"
        raise UserError("E620", f"the folder {what}", mend, str(out))
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


def load_classifier(reference: str) -> Classifier:
    """The model behind a reference with random rows for it. Raises UserError E303, E305, E621."""
    from compressor.architectures import ARCHITECTURES

    folder = find_folder(reference)
    model = _ours(folder) or _stock(folder)
    notes = []
    if model.config.model_type not in ARCHITECTURES:
        notes.append(f"'{model.config.model_type}' is not in the anatomy: it can be exported, not pruned")
    source = folder if (folder / "tokenizer.json").is_file() else _base_of(folder)
    tokenizer = tokenizer_of(source)
    pad_id = tokenizer.pad_token_id
    if pad_id is None:
        pad_id = tokenizer.eos_token_id or 0
        notes.append(f"the tokenizer has no padding token: token {pad_id} pads")
    if model.config.pad_token_id is None:
        model.config.pad_token_id = pad_id  # decoders look for the last token before it
    return Classifier(model, source, random_rows(model, tokenizer), pad_id, notes)


def _ours(folder: Path) -> nn.Module | None:
    """A state, or a checkpoint that stock transformers refuses; None for any other folder."""
    from compressor.checkpoint import INSERTS_FILE, STATE_FILE, load
    from compressor.deltas import merge_all
    from compressor.pruning.sizes import BY_STACK

    config = folder / "config.json"
    unequal = config.is_file() and any(name in json.loads(config.read_text(encoding="utf-8")) for name in BY_STACK)
    if unequal or any((folder / name).is_file() for name in (STATE_FILE, INSERTS_FILE)):
        return merge_all(load(folder))
    return None


def _base_of(folder: Path) -> Path:
    """Where a state's tokenizer is. Raises UserError E304 for any other folder without one."""
    from compressor.checkpoint import STATE_FILE

    if not (folder / STATE_FILE).is_file():
        raise UserError("E304", "no tokenizer.json", "Save the fast tokenizer beside the weights", str(folder))
    return find_folder(json.loads((folder / STATE_FILE).read_text())["base"]["reference"])


def _stock(folder: Path) -> nn.Module:
    """A Hugging Face folder with a classification head that is in its file. Raises UserError E621."""
    import torch
    from transformers import AutoModelForSequenceClassification

    if not any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        raise UserError("E621", "no model.safetensors", "Pickled weights are not read: convert them", str(folder))
    try:
        model, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (ValueError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())[:160]
        raise UserError("E621", f"not a sequence classifier ({reason})", "Give a folder of one", str(folder)) from error
    if missing := sorted(loading["missing_keys"]):
        what = f"the file lacks {len(missing)} tensors of a classifier, e.g. {missing[0]}: they would be random"
        raise UserError("E621", what, "Give a model that is tuned for classification", str(folder))
    return model.eval()


def random_rows(model: nn.Module, tokenizer: Any, seed: int = 0) -> list[Row]:
    """ROWS rows of random words, of 2 to MAX_LENGTH tokens (or what the model can number)."""
    draw, config = np.random.default_rng(seed), model.config
    most = min(MAX_LENGTH, getattr(config, "max_position_embeddings", None) or MAX_LENGTH)
    # RoBERTa's positions begin behind its padding: two of them number nothing
    most = max(2, most - 2 if most < MAX_LENGTH else most)
    words = sorted(set(range(min(len(tokenizer), config.vocab_size))) - set(tokenizer.all_special_ids))
    rows = []
    for length in np.linspace(2, most, ROWS).astype(int):
        ids = draw.choice(words, size=length).tolist()
        if config.is_encoder_decoder:  # its head reads the state of the end token
            ids[-1] = config.eos_token_id
        row = {"input_ids": ids, "attention_mask": [1] * int(length)}
        if "token_type_ids" in tokenizer.model_input_names:
            row["token_type_ids"] = [0] * int(length)
        rows.append(row)
    return rows


def prove(found: Classifier, precision: str, path: Path) -> ParityResult:
    """Compare an exported file with its model. Raises CheckError E610 with the block where they part."""
    from compressor.tasks.features import pad, predict, torch_forward
    from export.parity import compare, in_other_batches, require
    from export.sessions import run, session
    from export.suspects import suspect_in_graph

    sides = (torch_forward(found.model), partial(run, session(path)))
    logits = [predict(side, found.rows, found.pad_id) for side in sides]
    batches = tuple(in_other_batches(side, found.rows, found.pad_id) for side in sides)
    kind = {"fp32": "onnx", "int8": "int8 on random rows"}.get(precision, precision)
    # there are no labels: the reference's own answers stand for them
    result = compare(f"PyTorch -> {path.name}", kind, *logits, logits[0].argmax(axis=1), batches=batches)
    worst = pad([found.rows[result.worst_row], found.rows[-1]], found.pad_id)
    require(result, lambda: suspect_in_graph(found.model, path, worst))
    return result


def describe(path: Path) -> dict[str, Any]:
    """Name, bytes (external data included), inputs and outputs of an ONNX file."""
    import onnx

    graph = onnx.load(path, load_external_data=False).graph
    shapes = {
        side: {
            value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
            for value in getattr(graph, side)
        }
        for side in ("input", "output")
    }
    size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    return {"path": path.name, "bytes": size, "inputs": shapes["input"], "outputs": shapes["output"]}
