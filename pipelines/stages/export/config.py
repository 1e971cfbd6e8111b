"""Stage `export`: the dense and the compressed model for each runtime and precision, each file checked against PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from compressor.errors import UserError
from compressor.processor import weight_bits
from export.runtimes.runtime_registry import CPU_PRECISIONS, DEFAULT, PRECISIONS, RUNNABLE, RUNTIMES, packages_of
from pipelines.engine.stage import Entry, Problem, Stage, StageConfig, each_once
from pipelines.file import limits
from pipelines.stages.training_config import last_training, trains_base

if TYPE_CHECKING:
    from compressor.account import Plan
    from export.runtimes.runtime import Device

AUTO = "auto"
GENERATING = ("fp32", "int8")
"""Precisions of a generating model that the stage can export."""
OF_AUTO = ("accuracy_budget", "batch", "length")
"""Keys of `precision: auto`."""


class ExportConfig(StageConfig):
    """`precision` and `runtime` list what is written, each precision for each runtime that has it. int8 is dynamic in ONNX
    Runtime and static in OpenVINO: calibrated on `calibration_rows` training rows (default 128), drawn at random with the seed.

    bf16 is for CPUs with AMX or AVX-512 BF16 in OpenVINO. In ONNX Runtime fp16 and bf16 are files for CUDA.

    `precision: auto` writes one compressed file: the fastest, over the runtimes named, that loses at most `accuracy_budget`
    points (default 0.5) of the metric; timed at `batch` x `length` (default 8 x 128, or the task's max_length where less).

    `merge: false` exports an unmerged model, with its deltas as separate products in the compressed graphs."""

    precision: list[Literal[*PRECISIONS, AUTO]] = Field(
        default=["fp32", "int8"],
        min_length=1,
        max_length=limits.LIST,
        description="the precisions that are written; auto chooses the fastest",
    )
    runtime: list[Literal[*RUNNABLE]] = Field(
        default=[DEFAULT.key], min_length=1, max_length=limits.LIST, description="the runtimes that files are written for"
    )
    calibration_rows: int | None = Field(
        default=None, ge=1, le=limits.ROWS, description="training rows that static int8 is calibrated on"
    )
    accuracy_budget: float | None = Field(default=None, ge=0, le=1, description="points that precision: auto may lose")
    merge: bool = Field(default=True, description="false: deltas are computed separately, beside their matrices")
    batch: int | None = Field(default=None, ge=1, le=limits.BATCH, description="rows of a call when precision: auto is timed")
    length: int | None = Field(default=None, ge=2, le=limits.TOKENS, description="tokens a row there")

    @field_validator("precision", "runtime", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    _each_once = field_validator("precision", "runtime")(each_once)

    @classmethod
    def amend_schema(cls, schema: dict[str, Any]) -> None:
        for key in ("precision", "runtime"):  # a single word means a list of one
            form = schema["properties"][key]
            form["anyOf"] = [form["items"], {part: form.pop(part) for part in ("type", "items", "minItems")}]

    @property
    def auto(self) -> bool:
        """Whether the stage chooses the precision."""
        return AUTO in self.precision

    @property
    def possible(self) -> list[str]:
        """The precisions that may be written."""
        return list(CPU_PRECISIONS) if self.auto else self.precision

    @property
    def calibrates(self) -> bool:
        """Whether a static int8 may be written."""
        return "int8" in self.possible and any(RUNTIMES[name].calibrated for name in self.runtime)

    @property
    def devices(self) -> set[Device]:
        """The devices that any file that is written is for."""
        rows = [(RUNTIMES[name], precision) for name in self.runtime for precision in self.precisions_of(name)]
        return {device for row, precision in rows for device in row.precisions[precision]}

    def precisions_of(self, runtime: str) -> list[str]:
        """What may be written for one runtime; `precision: auto` chooses among what this CPU computes."""
        row = RUNTIMES[runtime]
        if self.auto:
            return [name for name in self.possible if "cpu" in row.precisions.get(name, ()) and row.computes(name)]
        return [name for name in self.possible if name in row.precisions]


def check(config: ExportConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    models = [entry for entry in earlier if entry.row.publishes_model]
    if models and models[-1].row.merges and not config.merge:
        yield Problem("E644", "the model is merged: there is no delta to keep separate", "Remove the merge", ("merge",))
    if models and not models[-1].row.merges and config.merge:
        trained = last_training(earlier)
        fix = "Put a merge before export"
        if trained is None or not trains_base(trained.config):
            fix += ", or merge: false in it"
        yield Problem("E504", f"'{models[-1].id}' leaves deltas that are not merged", fix)
    if config.calibration_rows and not config.calibrates:
        static = " or ".join(name for name in RUNNABLE if RUNTIMES[name].calibrated)
        fix = f"Remove it, or export int8 for the runtime {static}"
        yield Problem("E606", "no exported file is calibrated", fix, ("calibration_rows",))
    if config.auto and len(config.precision) > 1:
        fix = "Write precision: auto alone, or list precisions"
        yield Problem("E640", f"precision: auto chooses among {', '.join(CPU_PRECISIONS)} itself", fix, ("precision",))
    if idle := [RUNTIMES[name].title for name in config.runtime if not config.precisions_of(name)]:
        able = " or ".join(name for name in RUNNABLE if config.precisions_of(name))
        fix = f"Name the runtime {able} alone, or add fp32 or int8 to precision"
        yield Problem(
            "E642",
            f"{' and '.join(config.precision)} are precisions for CUDA, which {idle[0]} does not run",
            fix,
            ("runtime",),
        )
    for key in OF_AUTO:
        if getattr(config, key) is not None and not config.auto:
            yield Problem("E641", "only precision: auto uses this key", "Remove it, or write precision: auto", (key,))


def warns(config: ExportConfig, later: Sequence[Entry]) -> Iterable[str]:
    """Where int8 is asked for that is no gain on this machine; `auto` measures that."""
    if config.auto or weight_bits() == 8:
        return
    for row in (RUNTIMES[name] for name in config.runtime if "int8" in config.precisions_of(name)):
        if row.int8_wants_vnni:
            yield f"this processor has no VNNI: without it {row.title} int8 takes longer than {row.title} fp32"


def plan(config: ExportConfig, plan: Plan) -> Plan:
    """Raises UserError E644 where `merge: false` is impossible, E646 for what a generative model does not support, E622 and
    E623 for a model that is not exported at all."""
    from compressor.deltas.factored import require_factorable
    from compressor.models.build import GENERATIVE, auto_class_of
    from export.graph.exportable import require_growing_cache, require_traceable

    require_traceable(plan.model.config)
    if auto_class_of(plan.model) in GENERATIVE:
        check_generating(config)
        require_growing_cache(plan.model.config)
    for runtime in config.runtime:
        for precision in config.precisions_of(runtime):
            RUNTIMES[runtime].require_instructions(precision)
    if not config.merge:
        if any(masked.hides == "both" for masked in plan.sparsity):
            raise UserError(
                "E644", "a mask over single weights lies over the sum of base and delta", "Put a merge before export"
            )
        require_factorable(plan.model, trained=False)
    return plan


def check_generating(config: ExportConfig) -> None:
    """Raises UserError E646 for exports that a model with a cache does not support."""
    odd = [precision for precision in config.precision if precision not in GENERATING]
    odd += [RUNTIMES[name].title for name in config.runtime if not RUNTIMES[name].generating]
    odd += [] if config.merge else ["merge: false"]
    if odd:
        able = " and ".join(RUNTIMES[name].title for name in RUNNABLE if RUNTIMES[name].generating)
        what = f"a model that generates is exported in {' and '.join(GENERATING)} for {able}, merged; not as {', '.join(odd)}"
        raise UserError("E646", what, "Leave that out; compress export writes int4 of a merged folder")


def surroundings(config: ExportConfig) -> dict[str, Any]:
    """Facts of the machine that decide which file is the fastest, and how many bits a weight has."""
    from compressor.processor import processor

    bits = {"weight_bits": weight_bits()} if "int8" in config.possible else {}
    return {**(processor() if config.auto else {}), **bits}


TITLES = " or ".join(RUNTIMES[name].title for name in RUNNABLE)


SECONDS_A_FILE = 6.0
"""Estimated seconds to trace, write and load a file."""
COPIES, COPIES_OF_INT8 = 7, 10
"""Bytes of memory over those of the dense model. Measured: both models in torch, and of the dense one the traced graph and the
copies that its rewrites make; for int8 further ones that onnxruntime saves and loads (9.3 with a model that is cut to half)."""


def estimate(config: ExportConfig, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    """Every file, dense and compressed, computes all validation rows."""
    files = 2 * sum(len(config.precisions_of(runtime)) for runtime in config.runtime)
    return {
        "flops": files * rows["validation"] * plan.shape.flops(rows["mean"]),
        "seconds": files * SECONDS_A_FILE,
        "memory": (COPIES_OF_INT8 if "int8" in config.possible else COPIES) * before.dense.bytes,
        "disk": files * before.dense.bytes,
    }


STAGE = Stage(
    name="export",
    summary=f"write {', '.join(PRECISIONS)} for {TITLES}, dense and compressed, proven against PyTorch",
    config=ExportConfig,
    produces="onnx",
    needs=("model",),
    uses_dense=True,
    packages=("torch", "transformers", "tokenizers", "onnx", "onnx-ir", "onnxscript", *DEFAULT.packages),
    extras=lambda config: packages_of(config.runtime, writing=True),
    version=14,
    run="pipelines.stages.export.run:run",
    check=check,
    warns=warns,
    plan=plan,
    estimate=estimate,
    lengths=lambda config: [(("length",), config.length)] if config.length else [],
    surroundings=surroundings,
)
