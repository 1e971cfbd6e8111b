"""Stage `export`: the dense and the compressed model for each runtime and precision, each file proven against PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from compressor.errors import CheckError, CompressError, UserError
from compressor.processor import weight_bits
from export.graph import trace as onnx_files
from export.graph.half import FOR_CUDA
from export.runtimes import openvino as openvino_files
from pipelines.engine.stage import BaseModelReference, Entry, Inputs, Problem, Stage, StageConfig, Workspace
from pipelines.file import limits
from pipelines.stages.export.proving import COMPRESSED, Judged, Prover, repaired

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import onnx
    from torch import nn

    from compressor.account import Plan
    from export.parity.compare import ParityResult
    from pipelines.stages.loading import Data


WORDS = {"onnxruntime": "ONNX", "openvino": "OpenVINO"}
"""What a runtime is called in names of hops and variants."""
RUNTIME_FILES = {"onnxruntime": onnx_files.file_name, "openvino": openvino_files.file_name}
"""Names of files by precision."""
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
        default=["fp32", "int8"], min_length=1, max_length=limits.LIST, description="what is written; auto chooses the fastest"
    )
    runtime: list[Literal["onnxruntime", "openvino"]] = Field(
        default=["onnxruntime"], min_length=1, max_length=limits.LIST, description="for which runtimes"
    )
    calibration_rows: int | None = Field(
        default=None, ge=1, le=limits.ROWS, description="training rows that static int8 is calibrated on"
    )
    accuracy_budget: float | None = Field(default=None, ge=0, le=1, description="points that precision: auto may lose")
    merge: bool = Field(default=True, description="false: deltas stay apart, as products of their own")
    batch: int | None = Field(default=None, ge=1, le=limits.BATCH, description="rows of a call that precision: auto times")
    length: int | None = Field(default=None, ge=2, le=limits.TOKENS, description="tokens a row there")

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
    from compressor.deltas.factored import require_factorable
    from compressor.models.hub import GENERATES, auto_class_of

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
    """Export the dense model (the last tuned one, merged) and the compressed one, and prove what is shipped.

    A compressed file that fails is repaired, or left out and told among the `failures`; a dense one is a row that says so.
    Raises CheckError E610, E611 where fp32 fails, or where no compressed file is left.
    """
    from dataclasses import asdict

    from compressor.deltas.factored import apart_of, require_factorable
    from compressor.deltas.links import merge_all
    from pipelines.stages.export.generators import export_generator
    from pipelines.stages.export.precision import choose_precision
    from pipelines.stages.loading import load_data, load_model

    data = load_data(inputs)
    dense = merge_all(load_model(inputs.dense, inputs.base))
    compressed = load_model(inputs.nearest("model"), inputs.base)
    apart = {}
    if not config.merge:
        require_factorable(compressed)
        apart = {"apart": asdict(apart_of(compressed))}
    if not config.auto:
        one = export_generator if data.kind.generates else export_one
        made = {
            name: one(name, model, config, data, workspace, inputs)
            for name, model in (("dense", dense), (COMPRESSED, compressed))
        }
        facts = {"labels": data.label_names, "runtimes": config.runtime, **apart}
        return {**_together(made), **facts}
    ours, account = choose_precision(compressed, config, data, workspace, inputs)
    # what the compressed file is compared with in the report
    plain = config.model_copy(update={"precision": ["fp32"], "runtime": list(ours.files)})
    theirs = export_one("dense", dense, plain, data, workspace, inputs)
    facts = {"labels": data.label_names, "runtimes": list(ours.files), "auto": account, **apart}
    return {**_together({"dense": theirs, COMPRESSED: ours}), **facts}


@dataclass
class Exported:
    """The files of one model: `files` is runtime -> precision -> {"path", "bytes", "quality", ..}, `parity` the comparison of
    each, `failures` what was left out."""

    files: dict[str, Any] = field(default_factory=dict)
    parity: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)


def _together(made: dict[str, Exported]) -> dict[str, Any]:
    """The metadata of both models. `failures` only where there are some: an artifact that is whole says nothing of them."""
    failures = [failure for one in made.values() for failure in one.failures]
    return {
        "files": {name: one.files for name, one in made.items()},
        "parity": [record for one in made.values() for record in one.parity],
        **({"failures": failures} if failures else {}),
    }


def export_one(name: str, model: nn.Module, config: ExportConfig, data: Data, workspace: Workspace, inputs: Inputs) -> Exported:
    """Write NAME/model* for every runtime and precision and compare each with PyTorch on all validation rows."""
    prover = Prover(name, model, data, workspace, inputs.threads, inputs.seed)
    _ = prover.reference
    folder, exported = workspace.folder / name, Exported()
    with workspace.progress(f"exporting {name}", 1 + len(config.runtime)) as bar:
        graph = traced(model, data, inputs.base)
        bar.advance()
        rows = calibration(config, data, inputs.seed)
        for runtime in config.runtime:
            write_runtime(runtime, graph, model, folder, config.precisions_of(runtime), rows)
            bar.advance()
    for runtime in config.runtime:
        for precision in config.precisions_of(runtime):
            work = OneFile(prover, graph, folder, runtime, precision, rows)
            if (kept := work.proven(exported)) is not None:
                exported.parity.append(kept.result.to_json())
                exported.files.setdefault(runtime, {})[precision] = record(name, kept, data, **bits_told(runtime, precision))
    if not exported.files and prover.gated:
        raise CheckError(**exported.failures[0])
    return exported


@dataclass(frozen=True)
class OneFile:
    """One precision of one model for one runtime, as it is proven, repaired or left out."""

    prover: Prover
    graph: onnx.ModelProto
    folder: Path
    runtime: str
    precision: str
    rows: Sequence[dict[str, np.ndarray]]

    @property
    def hop(self) -> str:
        return hop_of(self.prover.name, self.runtime, self.precision)

    def proven(self, exported: Exported) -> Judged | None:
        """The file that is kept; None where none is, which is then among the failures where it was to be shipped.

        Raises CheckError E610, E611 for a compressed file in fp32.
        """
        judged, say = None, self.prover.workspace.say
        try:
            judged = self.judged(self.path)
            if judged.result.passed or not self.prover.gated:
                told(judged.result, say)
                return judged
            error = self.prover.failure(judged.result, judged.path, bits=bits_of(self.runtime))
        except (CheckError, UserError) as fault:
            error = fault
        if self.precision == "fp32" and self.prover.gated:
            raise error
        better = self.repaired(judged) if judged and self.precision == "int8" else None
        if better is not None:
            return better
        remove(self.path)
        say(f"{self.hop}: left out ({error.what})")
        if self.prover.gated:
            exported.failures.append(left_out(error))
        return None

    @property
    def path(self) -> Path:
        return self.folder / RUNTIME_FILES[self.runtime](self.precision)

    def judged(self, path: Path, excluded: tuple[str, ...] = ()) -> Judged:
        """A file with its comparison. Raises CheckError E611, UserError E602 where it does not run."""
        answers = self.prover.answers(path, self.precision, self.hop)
        bits, static = bits_of(self.runtime), self.runtime == "openvino"
        result = self.prover.compare(self.hop, self.precision, answers, excluded, bits, static=static)
        return Judged(path, answers, result, excluded)

    def repaired(self, whole: Judged) -> Judged | None:
        """The first file that passes with its most sensitive matrices in fp32, in the place of the one that did not."""
        from export.graph.trace import matrices
        from export.parity.compare import why_refused

        def again(excluded: tuple[str, ...]) -> Judged:
            write_runtime(self.runtime, self.graph, self.prover.model, self.folder, ["int8"], self.rows, excluded)
            return self.judged(self.path, excluded)

        say, static = self.prover.workspace.say, self.runtime == "openvino"
        say(f"{self.hop}: refused ({why_refused(whole.result)}); sensitive matrices are left in fp32")
        for better in repaired(self.prover, matrices(self.graph), static=static, make=again):
            if better.result.passed:
                say(f"{self.hop}: passes with {in_fp32(len(better.excluded))}")
                return replace(better, repaired=why_refused(whole.result))
        return None


def in_fp32(count: int) -> str:
    """'2 matrices in fp32'."""
    return f"{count} {'matrix' if count == 1 else 'matrices'} in fp32"


def told(result: ParityResult, say: Callable[[str], None]) -> None:
    """One line for what is not shown either way, and for a file that is only compared with and lies beyond its bound."""
    from export.parity.compare import why_refused

    if result.told and result.gated:
        say(result.told)
    if not result.passed:
        say(f"{result.hop} is beyond its bound ({why_refused(result)}); it is only compared with, not shipped")


def left_out(error: CompressError) -> dict[str, str]:
    """A file that was to be shipped and is not, as it stands among the failures of an artifact."""
    what = f"{f'{error.where}: ' if error.where else ''}{error.what}. The file is left out, the rest of the run went on"
    return {"code": error.code, "what": what, "mend": "Leave that precision out of export.precision, or tune for longer"}


def remove(path: Path) -> None:
    """A graph with the weights beside it."""
    for file in (path, path.with_suffix(".bin"), path.with_name(f"{path.name}.data")):
        file.unlink(missing_ok=True)


def hop_of(name: str, runtime: str, precision: str) -> str:
    """What the comparison of a file is called."""
    emulated = " (the CPU has no kernels: in fp32, each result rounded)" if precision == "bf16" else ""
    return f"{name}: PyTorch -> {WORDS[runtime]} {precision}{emulated}"


def record(name: str, judged: Judged, data: Data, **more: Any) -> dict[str, Any]:
    """What is known of a file in the folder NAME."""
    quality = data.kind.quality(*data.kind.judged(judged.answers.logits, data.validation.labels))
    spared = {"excluded": list(judged.excluded)} if judged.excluded else {}
    why = {"repaired": judged.repaired} if judged.repaired else {}
    return {
        "path": f"{name}/{judged.path.name}",
        "bytes": stored_bytes(judged.path),
        "quality": quality,
        **spared,
        **why,
        **more,
    }


def bits_told(runtime: str, precision: str) -> dict[str, int]:
    """What a record says of the bits of a weight: only where they are fewer than int8 says."""
    bits = bits_of(runtime)
    return {"weight_bits": bits} if precision == "int8" and bits < 8 else {}


def stored_bytes(path: Path) -> int:
    """Bytes of a graph and of the weights beside it, where they are not inside."""
    weights = path.with_suffix(".bin") if path.suffix == ".xml" else path.with_name(f"{path.name}.data")
    return sum(file.stat().st_size for file in (path, weights) if file.is_file())


def traced(model: nn.Module, data: Data, base: BaseModelReference | None = None) -> onnx.ModelProto:
    """The unfused graph of a model, with a note of its base. Where it still has deltas these become products of their own, in
    the model too."""
    from compressor.deltas.factored import factor_all
    from compressor.deltas.links import chains
    from compressor.tasks.features import pad
    from export.graph.trace import stamp, trace

    whole = factor_all(model) if any(chains(model)) else model
    return stamp(trace(whole, pad(data.validation.sample(2).tokens, data.pad_id)), whole, base)


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
    from compressor.deltas.factored import factored
    from export.graph.trace import can_fuse, write_onnx
    from export.runtimes.openvino import export_openvino

    options = {"precisions": precisions, "excluded": excluded}
    if runtime == "onnxruntime":
        # fusions would join the deltas of several matrices, and their names would go
        fuse = can_fuse(model) and not any(factored(model))
        return write_onnx(graph, folder, fuse=fuse, weight_bits=bits_of(runtime), **options)
    return export_openvino(graph, folder, rows=rows, **options)


def bits_of(runtime: str) -> int:
    """Bits of a weight in int8 files of a runtime that are made on this machine."""
    return weight_bits() if runtime == "onnxruntime" else 8


def surroundings(config: ExportConfig) -> dict[str, Any]:
    """What decides which file is the fastest, and how many bits a weight has."""
    from compressor.processor import processor

    dynamic = "onnxruntime" in config.runtime and "int8" in config.possible
    return {**(processor() if config.auto else {}), **({"weight_bits": weight_bits()} if dynamic else {})}


STAGE = Stage(
    name="export",
    summary="write fp32, int8, fp16, bf16 for ONNX Runtime or OpenVINO, dense and compressed, proven against PyTorch",
    config=ExportConfig,
    produces="onnx",
    needs=("model",),
    uses_dense=True,
    packages=("torch", "transformers", "tokenizers", "onnx", "onnxscript", "onnxruntime"),
    extras=lambda config: ("openvino", "nncf") if "openvino" in config.runtime else (),
    version=6,
    run=run,
    check=check,
    plan=plan,
    lengths=lambda config: [(("length",), config.length)] if config.length else [],
    surroundings=surroundings,
)
