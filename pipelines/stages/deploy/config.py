"""Stage `deploy`: a Triton model repository, checked on a live Triton server before it is published."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from compressor.arguments import NAME_PATTERN
from compressor.errors import CheckError, UserError
from compressor.tasks.task_kind import kind_of
from export.runtimes.runtime_registry import CPU_RUNTIMES, DEFAULT, PRECISIONS, RUNTIMES, packages_of
from pipelines.engine.environment import accelerator, distribution
from pipelines.engine.stage import Entry, Problem, Stage, StageConfig, one_task_only
from pipelines.file import limits
from serving.layout.knobs import DEFAULT_KNOBS, INTERFACES, Knobs, instances, streams
from serving.layout.text_outputs import TEXT_SUFFIX

if TYPE_CHECKING:
    from compressor.account import Plan
    from pipelines.stages.export.config import ExportConfig


OF_TEXTS = ("max_batch_tokens", "streams", "max_queue_delay_us", "max_queue_size", "timeout_ms")
"""Keys that only NAME-text uses."""
PREFERRED = {"cpu": ("int8", "bf16", "fp32"), "cuda": ("fp16", "bf16", "fp32")}
"""Device -> the precisions that are deployed where none is named, the first that was exported."""


class DeployConfig(StageConfig):
    """`name` is the model's name on the server; `runtime` computes it, by default the first that export names; `precision`
    defaults to int8 where it was exported, on a GPU to fp16. The others are explained in docs/serving.md."""

    name: str = Field(
        default="model",
        pattern=NAME_PATTERN,
        max_length=limits.NAME,
        description="the model's name on the server",
    )
    runtime: Literal[*CPU_RUNTIMES] | None = Field(
        default=None, description="the runtime that serves it, default the first that export names"
    )
    precision: Literal[*PRECISIONS] | None = Field(
        default=None, description="precision of the file, default int8 where exported, with device: cuda fp16"
    )
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="the device that serves it, and that it is tried on")
    interfaces: list[Literal[*INTERFACES]] = Field(
        default=list(INTERFACES),
        min_length=1,
        max_length=len(INTERFACES),
        description="what the server takes: token ids (the model NAME), texts (NAME-text)",
    )
    max_batch_size: int = Field(
        default=DEFAULT_KNOBS.max_batch_size,
        ge=1,
        le=limits.BATCH,
        description="maximum rows of a request, and of a merged batch",
    )
    instances: int | None = Field(
        default=DEFAULT_KNOBS.instances,
        ge=1,
        le=limits.THREADS,
        description="copies of the model that compute at the same time, default by the runtime",
    )
    threads: int | None = Field(
        default=DEFAULT_KNOBS.threads,
        ge=1,
        le=limits.THREADS,
        description="threads of each instance, default the server's cores divided by the instances",
    )
    max_batch_tokens: int | None = Field(
        default=DEFAULT_KNOBS.max_batch_tokens,
        ge=1,
        le=limits.BATCH_TOKENS,
        description="maximum padded tokens of a sub-batch of texts, default by the runtime",
    )
    streams: int | None = Field(
        default=DEFAULT_KNOBS.streams,
        ge=1,
        le=limits.THREADS,
        description="sub-batches of texts that an instance computes at the same time, default by the runtime",
    )
    max_queue_delay_us: int = Field(
        default=DEFAULT_KNOBS.max_queue_delay_us,
        ge=0,
        le=limits.MICROSECONDS,
        description="how long a text waits for others to share its batch, µs",
    )
    max_queue_size: int = Field(
        default=DEFAULT_KNOBS.max_queue_size,
        ge=0,
        le=limits.QUEUE,
        description="requests of texts that wait at most; more are refused (0: any)",
    )
    timeout_ms: float | None = Field(
        default=DEFAULT_KNOBS.timeout_ms,
        gt=0,
        le=limits.MILLISECONDS,
        description="how long a text waits at most, default any time",
    )
    warmup: bool = Field(default=DEFAULT_KNOBS.warmup, description="compute a short and a long row before the server is ready")

    @field_validator("name")
    @classmethod
    def _not_of_texts(cls, name: str) -> str:
        if name.endswith(TEXT_SUFFIX):
            raise ValueError(f"may not end with {TEXT_SUFFIX}, as the names of models that take texts do")
        return name

    @field_validator("interfaces")
    @classmethod
    def _each_once(cls, interfaces: list[str]) -> list[str]:
        if len(set(interfaces)) < len(interfaces):
            raise ValueError("an interface is named twice")
        return interfaces

    @property
    def knobs(self) -> Knobs:
        """The settings of the server."""
        return Knobs(**{field.name: getattr(self, field.name) for field in fields(Knobs)})

    def chosen(self, runtimes: Sequence[str], files: Mapping[str, Mapping[str, Any]]) -> tuple[str, str]:
        """The runtime and the precision to deploy, out of the compressed `files` (runtime -> precision -> file) that passed and
        are for the device. Raises CheckError E616 if the requested one was left out."""
        written = [name for name in runtimes if name in files and self.runtime in (None, name)]
        for runtime in written:
            for precision in PREFERRED[self.device]:
                # bf16 is for the CPU in one runtime and for CUDA in another
                meant = RUNTIMES[runtime].is_for(precision, self.device)
                if precision in files[runtime] and self.precision in (None, precision) and meant:
                    return runtime, precision
        requested = " ".join(filter(None, (self.runtime, self.precision))) or "{}, {} or {}".format(*PREFERRED[self.device])
        what = f"nothing to deploy: {requested} did not pass its comparison and was left out by the export"
        raise CheckError("E616", what, "See what failed in the report, or deploy another precision")

    def of_exported(self, exported: ExportConfig) -> tuple[str, str] | None:
        """The runtime and the precision to deploy where every file passes; None where the export chooses them.

        Raises CheckError E616 where there is no such file.
        """
        if exported.auto:
            return None
        return self.chosen(exported.runtime, {name: dict.fromkeys(exported.precisions_of(name)) for name in exported.runtime})


def with_tasks(config: DeployConfig, many: bool, kinds: Sequence[str]) -> Iterable[Problem]:
    yield from one_task_only(config, many, kinds)
    if not any(kind_of(kind).generates for kind in kinds):
        return
    if "text" not in config.interfaces:
        yield Problem("E403", "a model that generates takes texts", "Remove the key, or add text to it", ("interfaces",))
    yield from unused(config, (knob.name for knob in fields(Knobs) if knob.name != "threads"), "a model that generates")


def unused(config: DeployConfig, keys: Iterable[str], by: str) -> Iterable[Problem]:
    """A fault for each of `keys` that has another value than its default."""
    for key in keys:
        if getattr(config, key) != DeployConfig.model_fields[key].default:
            yield Problem("E403", f"{key} is not used by {by}", "Remove the key", (key,))


def check(config: DeployConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    if "text" not in config.interfaces:
        yield from unused(config, OF_TEXTS, "a model of tokens, and interfaces has no text")
    exports = [entry for entry in earlier if entry.row.exports]
    if not exports:
        return
    exported = exports[-1].config
    for key in ("runtime", "precision"):
        requested = getattr(config, key)
        if requested and exported.auto:
            yield Problem("E725", f"'{exports[-1].id}' chooses the {key} itself (precision: auto)", "Remove it", (key,))
        elif requested and requested not in getattr(exported, key):
            yield Problem("E725", f"{requested} is not exported", f"Add it to export.{key}", (key,))

    if exported.auto and config.device == "cuda":
        fix = f"Name the precisions in '{exports[-1].id}', fp16 among them"
        yield Problem("E643", f"'{exports[-1].id}' chooses among files for the CPU (precision: auto)", fix, ("device",))
        return
    if "text" in config.interfaces:
        yield from streams_problems(config, exported)
    files = [
        (runtime, precision)
        for runtime in exported.runtime
        for precision in exported.precisions_of(runtime)
        if config.runtime in (None, runtime) and config.precision in (None, precision)
    ]
    if files and not any(RUNTIMES[runtime].is_for(precision, config.device) for runtime, precision in files):
        yield _for_the_other_device(config, exports[-1])
    if not files and config.runtime in exported.runtime and config.precision in exported.precision:
        written = " or ".join(exported.precisions_of(config.runtime)) or "another runtime"
        yield Problem("E725", f"{config.runtime} writes no {config.precision}", f"Use {written}", ("precision",))


def streams_problems(config: DeployConfig, exported: ExportConfig) -> Iterable[Problem]:
    """Fault of more sub-batches at a time than the runtime that will be chosen, or a GPU, computes; with `auto`, than any."""
    try:
        chosen = config.of_exported(exported)
        names = exported.runtime if chosen is None else chosen[:1]
        able = [RUNTIMES[name] for name in names]
        streams(config.knobs, next((runtime for runtime in able if runtime.streams), able[0]))
    except CheckError:
        return  # nothing can be deployed: said elsewhere
    except UserError as error:
        yield Problem(error.code, error.what, error.fix, ("streams",))


def _for_the_other_device(config: DeployConfig, export: Entry) -> Problem:
    """What is said where no file that may be deployed is for the device."""
    requested = " ".join(filter(None, (config.runtime, config.precision)))
    which, add = f"the exported {requested}" if requested else "every exported file", f"to precision in '{export.id}'"
    also = ", and deploy that" if requested else ""
    if config.device == "cpu":
        fix = f"Use device: cuda, or add fp32 {add}{also}"
        return Problem("E643", f"{which} is for CUDA, and Triton is tried on the CPU", fix)
    fix = f"Use device: cpu, or add fp16 {add}{also}, with the runtime {DEFAULT.key}"
    return Problem("E643", f"{which} is for the CPU, and Triton is tried on CUDA", fix)


SECONDS_A_SERVER = 15.0


def estimate(config: DeployConfig, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    return {"seconds": SECONDS_A_SERVER, "disk": len(config.interfaces) * plan.shape.bytes}


def processes(config: DeployConfig) -> int:
    """Instances of both models, of the runtime that has the fewest where none is named: the export may choose it."""
    runtimes = [config.runtime] if config.runtime else CPU_RUNTIMES
    return len(config.interfaces) * min(instances(config.knobs, RUNTIMES[name]) for name in runtimes)


def surroundings(config: DeployConfig) -> dict[str, Any]:
    """The card: what was proven on another one is none of this machine. The runtimes that may be chosen, if none is named."""
    card = {"accelerator": accelerator()} if config.device == "cuda" else {}
    return card if config.runtime else {**card, "runtimes": [*map(distribution, packages_of(CPU_RUNTIMES))]}


STAGE = Stage(
    name="deploy",
    summary="write a Triton model repository and prove it on a live server",
    config=DeployConfig,
    produces="repository",
    needs=("onnx",),
    packages=(*DEFAULT.packages, "nvidia-pytriton", "tritonclient", "tokenizers"),
    version=8,
    extras=lambda config: packages_of([config.runtime]),
    run="pipelines.stages.deploy.run:run",
    check=check,
    with_tasks=with_tasks,
    estimate=estimate,
    device=lambda config: config.device,
    processes=processes,
    surroundings=surroundings,
    optional=True,
)
