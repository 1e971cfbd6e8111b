"""Stage `export`: the dense and the compressed model for each runtime and precision, each file proven against PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from compressor.errors import UserError
from export.half import FOR_CUDA
from pipelines.stage import Entry, Inputs, Problem, Stage, StageConfig, Workspace

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import onnx
    from torch import nn

    from compressor.account import Plan
    from pipelines.hops import Answers
    from pipelines.loading import Data


WORDS = {"onnxruntime": "ONNX", "openvino": "OpenVINO"}
"""What a runtime is called in names of hops and variants."""
CALIBRATION_ROWS, CALIBRATION_BATCH = 128, 8
AUTO, BUDGET = "auto", 0.5
OF_AUTO = ("accuracy_budget", "batch", "length")
"""Keys that say how `precision: auto` chooses."""


class ExportConfig(StageConfig):
    """`precision` and `runtime` list what is written, each precision for each runtime. int8 is dynamic in ONNX Runtime and
    static in OpenVINO: calibrated on `calibration_rows` training rows (default 128), drawn at random with the seed.

    fp16 and bf16 are files for CUDA: ONNX Runtime's alone.

    `precision: auto` writes one compressed file: the fastest, over the runtimes named, that loses at most `accuracy_budget`
    points (default 0.5) of the metric; timed at `batch` x `length` (default 8 x 128, or the task's max_length where less).

    `merge: false` takes a model that is not merged, and keeps its deltas apart in the compressed graphs."""

    precision: list[Literal["fp32", "int8", "fp16", "bf16", "auto"]] = Field(
        default=["fp32", "int8"], min_length=1, description="what is written; auto chooses the fastest"
    )
    runtime: list[Literal["onnxruntime", "openvino"]] = Field(
        default=["onnxruntime"], min_length=1, description="for which runtimes"
    )
    calibration_rows: int | None = Field(default=None, ge=1, description="training rows that static int8 is calibrated on")
    accuracy_budget: float | None = Field(default=None, ge=0, le=1, description="points that precision: auto may lose")
    merge: bool = Field(default=True, description="false: deltas stay apart, as products of their own")
    batch: int | None = Field(default=None, ge=1, description="rows of a call that precision: auto times")
    length: int | None = Field(default=None, ge=2, description="tokens a row there")

    @field_validator("precision", "runtime", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @property
    def auto(self) -> bool:
        """Whether the stage chooses."""
        return AUTO in self.precision

    @property
    def possible(self) -> list[str]:
        """The precisions that may come out."""
        return ["fp32", "int8"] if self.auto else self.precision

    def precisions_of(self, runtime: str) -> list[str]:
        """What is written for one runtime."""
        return [name for name in self.precision if runtime == "onnxruntime" or name not in FOR_CUDA]


def check(config: ExportConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    models = [entry for entry in earlier if entry.name in ("tune", "prune", "recover", "merge")]
    if models and models[-1].name == "merge" and not config.merge:
        yield Problem("E644", "the model is merged: no delta is left to keep apart", "Remove the merge", ("merge",))
    if models and models[-1].name != "merge" and config.merge:
        yield Problem(
            "E504", f"'{models[-1].id}' leaves deltas that are not merged", "Put a merge before export, or merge: false in it"
        )
    if config.calibration_rows and not ("openvino" in config.runtime and "int8" in config.possible):
        mend = "Remove it, or export int8 for the runtime openvino"
        yield Problem("E606", "nothing here is calibrated", mend, ("calibration_rows",))
    if config.auto and len(config.precision) > 1:
        mend = "Write precision: auto alone, or list precisions"
        yield Problem("E640", "auto chooses among fp32 and int8; beside it nothing is to be listed", mend, ("precision",))
    if idle := [WORDS[name] for name in config.runtime if not config.precisions_of(name)]:
        mend = "Add the runtime onnxruntime alone, or fp32 or int8 to precision"
        yield Problem("E642", f"{' and '.join(config.precision)} are files for CUDA, none for {idle[0]}", mend, ("runtime",))
    for key in OF_AUTO:
        if getattr(config, key) is not None and not config.auto:
            yield Problem("E641", "nothing is chosen here", "Remove it, or write precision: auto", (key,))


def plan(config: ExportConfig, plan: Plan) -> Plan:
    """Raises UserError E644 where `merge: false` cannot be, E646 what cannot be for a model that generates."""
    from compressor.factored import require_factorable
    from compressor.models import GENERATES, auto_class_of

    if auto_class_of(plan.model) == GENERATES:
        check_generating(config)
    if not config.merge:
        if plan.sparsity:
            raise UserError(
                "E644", "a mask over single weights lies over the sum of base and delta", "Put a merge before export"
            )
        require_factorable(plan.model, trained=False)
    return plan


def check_generating(config: ExportConfig) -> None:
    """Raises UserError E646 for what a model with a cache is not exported to."""
    asked = [*config.precision, *(WORDS[name] for name in config.runtime), *(["merge: false"] if not config.merge else [])]
    if odd := [one for one in asked if one not in ("fp32", "int8", WORDS["onnxruntime"])]:
        what = f"a model that generates is exported in fp32 and int8 for ONNX Runtime, merged; not as {', '.join(odd)}"
        raise UserError("E646", what, "Leave that out; compress export writes int4 of a merged folder")


def run(config: ExportConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Export the dense model (the last tuned one, merged) and the compressed one, and prove both."""
    from dataclasses import asdict

    from compressor.deltas import merge_all
    from compressor.factored import apart_of, require_factorable
    from pipelines.generators import export_generator
    from pipelines.loading import load_data, load_model
    from pipelines.precision import choose_precision

    data = load_data(inputs)
    dense = merge_all(load_model(inputs.dense, inputs.base))
    compressed = load_model(inputs.nearest("model"), inputs.base)
    apart = {}
    if not config.merge:
        require_factorable(compressed)
        apart = {"apart": asdict(apart_of(compressed))}
    if not config.auto:
        parity, files = [], {}
        one = export_generator if data.kind.generates else export_one
        for name, model in (("dense", dense), ("compressed", compressed)):
            records, files[name] = one(name, model, config, data, workspace, inputs)
            parity += records
        return {"files": files, "parity": parity, "labels": data.label_names, "runtimes": config.runtime, **apart}
    records, ours, account = choose_precision(compressed, config, data, workspace, inputs)
    # what the compressed file is compared with in the report
    plain = config.model_copy(update={"precision": ["fp32"], "runtime": list(ours)})
    parity, theirs = export_one("dense", dense, plain, data, workspace, inputs)
    files = {"dense": theirs, "compressed": ours}
    facts = {"labels": data.label_names, "runtimes": list(ours), "auto": account, **apart}
    return {"files": files, "parity": parity + records, **facts}


def export_one(
    name: str, model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, inputs: Inputs
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write NAME/model* for every runtime and precision and compare each with PyTorch on all validation rows.

    Returns the parity records and the files: runtime -> precision -> {"path", "bytes", "quality"}. Raises CheckError E6xx.
    """
    from compressor.tasks.features import torch_forward
    from pipelines.hops import ask, compare_graph

    # before its deltas are taken apart for the graph: that is to be proven as well
    reference = ask(torch_forward(model), data.validation, data, workspace, f"{name} in PyTorch")
    paths = write(name, model, config, data, workspace, inputs.seed)
    parity, files = [], {}
    for (runtime, precision), path in paths.items():
        hop = hop_of(name, runtime, precision)
        answers = answers_of(path, precision, hop, data, workspace, inputs.threads)
        result = compare_graph(hop, kind_of(precision), model, reference, path, answers, data.validation, data)
        parity.append(result.to_json())
        files.setdefault(runtime, {})[precision] = record(name, path, answers, data)
    return parity, files


def hop_of(name: str, runtime: str, precision: str) -> str:
    """What the comparison of a file is called."""
    emulated = " (the CPU has no kernels: in fp32, each result rounded)" if precision == "bf16" else ""
    return f"{name}: PyTorch -> {WORDS[runtime]} {precision}{emulated}"


def kind_of(precision: str) -> str:
    """The row of the table of bounds."""
    return "onnx" if precision == "fp32" else precision


def answers_of(path: Path, precision: str, hop: str, data: Data, workspace: Workspace, threads: int | None) -> Answers:
    """What a file says of all validation rows. Raises CheckError E611 where it does not run, UserError E602."""
    from export.half import proving_session
    from export.sessions import run as run_session
    from pipelines.hops import ask, runs

    live = proving_session(path, precision, threads)
    with runs(hop):
        return ask(partial(run_session, live), data.validation, data, workspace, hop)


def record(name: str, path: Path, answers: Answers, data: Data) -> dict[str, Any]:
    """What is known of a file in the folder NAME."""
    quality = data.kind.quality(*data.kind.judged(answers.logits, data.validation.labels))
    return {"path": f"{name}/{path.name}", "bytes": stored_bytes(path), "quality": quality}


def stored_bytes(path: Path) -> int:
    """Bytes of a graph and of the weights beside it, where they are not inside."""
    weights = path.with_suffix(".bin") if path.suffix == ".xml" else path.with_name(f"{path.name}.data")
    return sum(file.stat().st_size for file in (path, weights) if file.is_file())


def write(
    name: str, model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, seed: int
) -> dict[tuple[str, str], Path]:
    """Trace once and write every file: (runtime, precision) -> path."""
    folder, paths = workspace.folder / name, {}
    with workspace.progress(f"exporting {name}", 1 + len(config.runtime)) as bar:
        graph = traced(model, data)
        bar.advance()
        for runtime in config.runtime:
            rows = calibration(config, data, seed)
            made = write_runtime(runtime, graph, model, folder, config.precisions_of(runtime), rows)
            paths |= {(runtime, precision): path for precision, path in made.items()}
            bar.advance()
    return paths


def traced(model: nn.Module, data: Data) -> onnx.ModelProto:
    """The unfused graph of a model. Where it still has deltas these become products of their own, in the model too."""
    from compressor.deltas import chains
    from compressor.factored import factor_all
    from compressor.tasks.features import pad
    from export.onnx import trace

    return trace(factor_all(model) if any(chains(model)) else model, pad(data.validation.sample(2).tokens, data.pad_id))


def calibration(config: ExportConfig, data: Data, seed: int) -> list[dict[str, np.ndarray]]:
    """The training rows that static int8 is calibrated on, in padded batches as they come: so a server's batches are."""
    from compressor.tasks.features import pad

    drawn = data.train.draw(config.calibration_rows or CALIBRATION_ROWS, seed).tokens
    starts = range(0, len(drawn), CALIBRATION_BATCH)
    return [pad(drawn[start : start + CALIBRATION_BATCH], data.pad_id) for start in starts]


def write_runtime(
    runtime: str,
    graph: onnx.ModelProto,
    model: nn.Module,
    folder: Path,
    precisions: Sequence[str],
    rows: Sequence[dict[str, np.ndarray]],
    excluded: Sequence[str] = (),
) -> dict[str, Path]:
    """The files of one runtime from the graph of `model`: precision -> path."""
    from compressor.factored import factored
    from export.onnx import can_fuse, write_onnx
    from export.openvino import export_openvino

    options = {"precisions": precisions, "excluded": excluded}
    if runtime == "onnxruntime":
        # fusions would join the deltas of several matrices, and their names would go
        return write_onnx(graph, folder, fuse=can_fuse(model) and not any(factored(model)), **options)
    return export_openvino(graph, folder, rows=rows, **options)


def surroundings(config: ExportConfig) -> dict[str, Any]:
    """What decides which file is the fastest."""
    from compressor.processor import processor

    return processor() if config.auto else {}


STAGE = Stage(
    name="export",
    summary="write fp32, int8, fp16, bf16 for ONNX Runtime or OpenVINO, dense and compressed, proven against PyTorch",
    config=ExportConfig,
    produces="onnx",
    needs=("model",),
    uses_dense=True,
    packages=("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime"),
    extras=lambda config: ("openvino", "nncf") if "openvino" in config.runtime else (),
    version=4,
    run=run,
    check=check,
    plan=plan,
    lengths=lambda config: [(("length",), config.length)] if config.length else [],
    surroundings=surroundings,
)
