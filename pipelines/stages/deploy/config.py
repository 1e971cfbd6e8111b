"""Stage `deploy`: a Triton model repository, checked on a live Triton server before it is published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from compressor.errors import CheckError, UserError
from export.runtimes.runtime_registry import CPU_PRECISIONS, CPU_RUNTIMES, DEFAULT, packages_of
from pipelines.engine.stage import Entry, Problem, Stage, StageConfig
from pipelines.file import limits

if TYPE_CHECKING:
    from compressor.account import Plan


class DeployConfig(StageConfig):
    """`name` is the model's name on the server; `runtime` is its Triton backend, by default the first that export names;
    `precision` defaults to int8 where it was exported."""

    name: str = Field(
        default="model",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=limits.NAME,
        description="the model's name on the server",
    )
    runtime: Literal[*CPU_RUNTIMES] | None = Field(
        default=None, description="the runtime that serves it, default the first that export names"
    )
    precision: Literal[*CPU_PRECISIONS] | None = Field(
        default=None, description="precision of the file, default int8 where exported"
    )
    max_batch_size: int = Field(default=32, ge=1, le=limits.BATCH, description="maximum rows of a batch")
    max_queue_delay_us: int = Field(
        default=500, ge=0, le=limits.MICROSECONDS, description="maximum queue delay of dynamic batching, µs"
    )

    def chosen(self, runtimes: Sequence[str], files: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
        """The runtime and the precision to deploy, out of the compressed `files` (runtime -> precision -> file) that passed.
        Raises CheckError E616 if the requested one was left out."""
        written = [name for name in runtimes if name in files and self.runtime in (None, name)]
        for runtime in written:
            for precision in ("int8", "bf16", "fp32"):
                if precision in files[runtime] and self.precision in (None, precision):
                    return runtime, precision
        requested = " ".join(filter(None, (self.runtime, self.precision))) or "int8, bf16 or fp32"
        what = f"nothing to deploy: {requested} did not pass its comparison and was left out by the export"
        raise CheckError("E616", what, "See what failed in the report, or deploy another precision")


def check(config: DeployConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    exports = [entry for entry in earlier if entry.row.exports]
    for key in ("runtime", "precision") if exports else ():
        requested, exported = getattr(config, key), exports[-1].config
        if requested and exported.auto:
            yield Problem("E725", f"'{exports[-1].id}' chooses the {key} itself (precision: auto)", "Remove it", (key,))
        elif requested and requested not in getattr(exported, key):
            yield Problem("E725", f"{requested} is not exported", f"Add it to export.{key}", (key,))

    if exports and "cpu" not in exports[-1].config.devices:
        fix = f"Add fp32 to precision in '{exports[-1].id}'"
        yield Problem("E643", "every exported file is for CUDA, and Triton is tried on the CPU here", fix)


def plan(config: DeployConfig, plan: Plan) -> Plan:
    """Raises UserError E726 for a generative model."""
    from compressor.models.hub import GENERATES, auto_class_of

    if auto_class_of(plan.model) == GENERATES:
        what = "a model that generates is not served: its cache would have to live on the server from token to token"
        raise UserError("E726", what, "Leave out deploy; `export.generation.greedy` generates with what export writes")
    return plan


SECONDS_A_SERVER = 15.0


def estimate(config: DeployConfig, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    return {"seconds": SECONDS_A_SERVER, "disk": plan.shape.bytes}


STAGE = Stage(
    name="deploy",
    summary="write a Triton model repository and prove it on a live server",
    config=DeployConfig,
    produces="repository",
    needs=("onnx",),
    packages=(*DEFAULT.packages, "nvidia-pytriton", "tritonclient", "tokenizers"),
    version=3,
    extras=lambda config: packages_of([config.runtime]),
    run="pipelines.stages.deploy.run:run",
    check=check,
    plan=plan,
    estimate=estimate,
    optional=True,
)
