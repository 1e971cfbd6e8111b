"""The exported files of one model: written for each runtime and precision, compared with PyTorch, repaired or left out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from torch import nn

from compressor.deltas.factored import factor_all
from compressor.deltas.links import chains
from compressor.errors import CheckError, CompressError, UserError
from compressor.models.reference import Reference
from compressor.tasks.data import Data
from compressor.tasks.features import pad
from export.graph.trace import stamp, trace, tracing
from export.parity.compare import ParityResult, why_refused
from export.runtimes.runtime import Runtime
from export.runtimes.runtime_registry import RUNTIMES, hop_of
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.export.config import ExportConfig
from pipelines.stages.export.proving import ComparedFile, Prover, repaired

LEFT_OUT = ". The file is left out, the rest of the run went on"
"""What is added to the error of a file that was to be shipped, where another one is."""

WITHOUT_IT = "Leave that precision out of export.precision"
OR_TUNE = f"{WITHOUT_IT}, or tune for longer"
"""What to do about a file that was to be shipped."""

CALIBRATION_ROWS, CALIBRATION_BATCH = 128, 8


@dataclass
class Exported:
    """The files of one model: `files` is runtime -> precision -> {"path", "bytes", "quality", ..}, `parity` the comparison of
    each, `failures` what was left out."""

    files: dict[str, Any] = field(default_factory=dict)
    parity: list[dict[str, Any]] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)


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
                exported.files.setdefault(runtime, {})[precision] = record(name, kept, precision, data)
                say_apart(work.hop, exported.files[runtime][precision], workspace.say)
    if not exported.files and prover.gated:
        raise nothing_left(exported.failures)
    return exported


@dataclass(frozen=True)
class OneFile:
    """One precision of one model for one runtime, which is checked and then kept, repaired or left out."""

    prover: Prover
    graph: onnx.ModelProto
    folder: Path
    runtime: str
    precision: str
    rows: Sequence[dict[str, np.ndarray]]

    @property
    def hop(self) -> str:
        return hop_of(self.prover.name, self.runtime, self.precision)

    def proven(self, exported: Exported) -> ComparedFile | None:
        """The file that is kept; None if there is none, which is recorded as a failure if it was to be shipped.

        Raises CheckError E610, E611 for a compressed file in fp32.
        """
        compared, say = None, self.prover.workspace.say
        try:
            compared = self.compared(self.path)
            if compared.result.passed:
                say_result(compared.result, say)
                return compared
            if self.prover.gated:
                error = self.prover.failure(compared.result, self.row, compared.path, bits=self.row.weight_bits())
        except (CheckError, UserError) as fault:
            require_memory(fault)
            error = fault
        if compared and not self.prover.gated:
            return self.baseline(compared)
        if self.precision == "fp32" and self.prover.gated:
            raise error
        better = self.repaired(compared) if compared and self.precision == "int8" else None
        if better is not None:
            return better
        self.row.remove(self.path)
        say(f"{self.hop}: left out ({error.what})")
        if self.prover.gated:
            # more training moves labels away from the border; it does not help a file that computes another function
            tunable = compared is not None and "rounding" not in compared.result.failed
            exported.failures.append(left_out(error, OR_TUNE if tunable else WITHOUT_IT))
        return None

    @property
    def row(self) -> Runtime:
        return RUNTIMES[self.runtime]

    @property
    def path(self) -> Path:
        return self.folder / self.row.file_name(self.precision)

    def compared(self, path: Path, excluded: tuple[str, ...] = ()) -> ComparedFile:
        """A file with its comparison. Raises CheckError E611, UserError E602 where it cannot be run."""
        outputs = self.prover.outputs(self.row, path, self.precision, self.hop)
        result = self.prover.compare(self.hop, self.precision, outputs, self.row, excluded, self.row.weight_bits())
        return ComparedFile(self.row, path, outputs, result, excluded)

    def write_int8(self, excluded: tuple[str, ...] = ()) -> None:
        """Write int8 with the matrices `excluded` in fp32, in place of the file that is there."""
        write_runtime(self.runtime, self.graph, self.prover.model, self.folder, ["int8"], self.rows, excluded)

    def baseline(self, failed: ComparedFile) -> ComparedFile:
        """What is kept of a file that is only compared with: repaired as one that is shipped would be, so that the speed of
        int8 does not pass for that of compression; where that does not help, the file that failed."""
        if self.precision == "int8":
            if (better := self.repaired(failed)) is not None:
                return better
            self.write_int8()
        say_result(failed.result, self.prover.workspace.say)
        return failed

    def repaired(self, failed: ComparedFile) -> ComparedFile | None:
        """The first file that passes with its most sensitive matrices in fp32, which replaces the one that failed; None if none
        passes, or one cannot be run."""

        def again(excluded: tuple[str, ...]) -> ComparedFile:
            self.write_int8(excluded)
            return self.compared(self.path, excluded)

        say, static = self.prover.workspace.say, self.row.calibrated
        say(f"{self.hop}: {failed.result.verdict} ({why_refused(failed.result)}); sensitive matrices are left in fp32")
        try:
            made = repaired(self.prover, self.graph, failed.result, static=static, make=again)
            better = next((one for one in made if one.result.passed), None)
        except (CheckError, UserError) as fault:
            require_memory(fault)
            say(f"{self.hop}: {fault.what}")
            return None
        if better is None:
            return None
        say_result(better.result, say)
        say(f"{self.hop}: passes with {in_fp32(len(better.excluded))}")
        return replace(better, repaired=why_refused(failed.result))


def in_fp32(count: int) -> str:
    """Format a number of matrices: '2 matrices in fp32'."""
    return f"{count} {'matrix' if count == 1 else 'matrices'} in fp32"


def say_result(result: ParityResult, say: Callable[[str], None]) -> None:
    """Print a line for a result that is shown neither way, and for a file that is only compared with and beyond its bound."""
    if result.inconclusive and result.gated:
        say(result.inconclusive)
    if not result.passed:
        say(f"{result.hop} is beyond its bound ({why_refused(result)}); it is a baseline and is not deployed")


def nothing_left(failures: Sequence[dict[str, str]]) -> CheckError:
    """The error of an export that ships no file: that of the first record of `left_out`, and how many others there are."""
    first = failures[0]
    more = f" ({len(failures) - 1} more failed)" if len(failures) > 1 else ""
    fix = "Add a wider precision to export.precision, such as fp32, or tune for longer"
    return CheckError(first["code"], f"{first['what'].removesuffix(LEFT_OUT)}. No file is left to ship{more}", fix)


def require_memory(fault: CompressError) -> None:
    """Raises the fault of a file if it is E908: memory that is used up says nothing about the file, and the stage must end
    without a result, which later runs would take up."""
    if fault.code == "E908":
        raise UserError("E908", fault.what, f"{fault.fix}, or leave a precision or runtime out of export", fault.where)


def left_out(error: CompressError, fix: str = OR_TUNE) -> dict[str, str]:
    """Failure record of a file that was to be shipped and is left out, with what to do. It names the file without its folder,
    which is gone when the record is read."""
    what = f"{f'{Path(error.where).name}: ' if error.where else ''}{error.what}{LEFT_OUT}"
    return {"code": error.code, "what": what, "fix": fix}


def say_apart(hop: str, file: dict[str, Any], say: Callable[[str], None]) -> None:
    """Print a line for a file whose attentions are not one operator each."""
    if apart := file.get("attentions_apart"):
        say(f"{hop}: {apart} attentions are several operators each, which is slower than one")


def record(name: str, compared: ComparedFile, precision: str, data: Data) -> dict[str, Any]:
    """Metadata record of a file in the folder NAME."""
    return {
        "path": f"{name}/{compared.path.name}",
        "bytes": compared.runtime.stored_bytes(compared.path),
        "quality": data.kind.quality(*data.validation.kind.metric_inputs(compared.outputs.logits, data.validation.labels)),
        **exceptions(compared, precision),
    }


def exceptions(compared: ComparedFile, precision: str) -> dict[str, Any]:
    """What a file has that others lack: matrices in fp32 and why, int8 weights of fewer than 8 bits, attentions of several
    operators each."""
    row = compared.runtime
    bits = row.weight_bits() if precision == "int8" else 8
    facts = {
        "excluded": list(compared.excluded),
        "repaired": compared.repaired,
        "weight_bits": bits if bits < 8 else None,
        "attentions_apart": row.attentions_apart(compared.path),
    }
    return {name: fact for name, fact in facts.items() if fact}


def traced(model: nn.Module, data: Data, base: Reference | None = None) -> onnx.ModelProto:
    """The unfused graph of a model, with its base recorded. Deltas that are still attached become separate products, also in
    the model. Raises UserError E622."""
    factored = factor_all(model) if any(chains(model)) else model
    with tracing(base.reference if base else ""):
        return stamp(trace(factored, data.traced), factored, base)


def calibration(config: ExportConfig, data: Data, seed: int) -> list[dict[str, np.ndarray]]:
    """The training rows that static int8 is calibrated on, in padded batches in the drawn order, like a server's batches; none
    where none is written: the training rows are tokenized for them."""
    if not config.calibrates:
        return []
    drawn = data.draw(config.calibration_rows or CALIBRATION_ROWS, seed).tokens
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
    """Write the files of one runtime from the graph of `model`: precision -> path."""
    row = RUNTIMES[runtime]
    return row.write(graph, folder, precisions=precisions, rows=rows, excluded=excluded, fuse=row.can_fuse(model))
