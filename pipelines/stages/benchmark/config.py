"""Stage `benchmark`: quality, size, FLOPs and latency of the dense and the compressed model, runtime by runtime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator

from compressor.models.build import TEXT2TEXT
from compressor.tasks.task_kind import kind_of
from export.runtimes.runtime_registry import DEFAULT, RUNNABLE, RUNTIMES
from pipelines.engine.stage import Entry, Problem, Stage, StageConfig, each_once, entries_after, one_task_only
from pipelines.file import limits
from pipelines.stages.generating_cost import BYTES_A_SECOND

if TYPE_CHECKING:
    from compressor.account import Plan


FEWEST_ROUNDS = 6
"""Of fewer rounds even the least and the largest hold the median in less than 95 of 100 cases: no interval could be told."""


class BenchmarkConfig(StageConfig):
    """Interleaved rounds over every runtime, one process per runtime, so that idle thread pools do not interfere."""

    batch: list[Annotated[int, Field(gt=0, le=limits.BATCH)]] = Field(
        default=[1, 8], min_length=1, max_length=limits.LIST, description="rows of a pass that is timed"
    )
    length: list[Annotated[int, Field(gt=0, le=limits.TOKENS)]] = Field(
        default=[128], min_length=1, max_length=limits.LIST, description="tokens a row"
    )
    real_lengths: bool = Field(
        default=True, description="also time validation rows of their own lengths, in batches of these sizes"
    )
    further_tokens: bool = Field(
        default=True, description="generation, text2text: also time the tokens behind a prompt, one at a time on the cache"
    )
    machine_limits: bool = Field(
        default=True, description="also measure the machine's rates, so that each latency has its share of the limit"
    )
    profile: bool = Field(
        default=False, description="also show where the time of each file goes, by kind of operator, at the largest shape"
    )
    rounds: int = Field(default=20, ge=FEWEST_ROUNDS, le=limits.ROUNDS, description="interleaved rounds of timing")
    device: Literal["cpu", "cuda"] = Field(default="cpu", description="the device that computes")

    _each_once = field_validator("batch", "length")(each_once)

    @property
    def real_rounds(self) -> int:
        """Rounds of passes over real rows, and of further tokens: a quarter, because each is many calls."""
        return max(self.rounds // 4, FEWEST_ROUNDS)


def check(config: BenchmarkConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    exports = [entry for entry in earlier if entry.row.exports]
    if exports and (
        changed := next((entry for entry in entries_after(exports[-1], earlier) if entry.row.publishes_model), None)
    ):
        what = f"'{changed.id}' changes the model whose files '{exports[-1].id}' made"
        yield Problem("E107", what, f"Put an export after '{changed.id}', or the benchmark before it")
    if exports and config.device == "cuda":
        yield from _not_for_cuda(exports[-1])
    served = next((entry for entry in reversed(earlier) if entry.row.serves), None)
    if served and any(entry.row.exports for entry in entries_after(served, earlier)):
        what = f"it would measure the files of '{exports[-1].id}', and '{served.id}' before them deploys others"
        yield Problem("E107", what, f"Put a deploy after '{exports[-1].id}', or the benchmark before it")
    if served and served.config.device == "cuda" and config.device == "cpu":
        fix = f"Use device: cuda here, or device: cpu in '{served.id}'"
        yield Problem("E643", f"'{served.id}' serves on CUDA, and this measures on the CPU", fix, ("device",))
    if exports and config.device == "cpu" and "cpu" not in exports[-1].config.devices:
        fix = f"Use device: cuda, or add fp32 to precision in '{exports[-1].id}'"
        yield Problem("E643", "every exported file is for CUDA", fix, ("device",))
    if config.profile and config.device != "cpu":
        what = f"profile is not used with device: {config.device}: operators are timed on the CPU"
        yield Problem("E403", what, "Remove the key, or use device: cpu", ("profile",))


def with_tasks(config: BenchmarkConfig, many: bool, kinds: Sequence[str]) -> Iterable[Problem]:
    yield from one_task_only(config, many, kinds)
    if not any(kind_of(kind).auto_class == TEXT2TEXT for kind in kinds):
        return
    if config.profile:
        what = "a decoder behind an encoder is two files, which no profile is made of"
        yield Problem("E242", what, "Remove the key", ("profile",))
    if config.device != "cpu":
        what = "a decoder behind an encoder is timed on the CPU only"
        yield Problem("E242", what, "Remove the key", ("device",))


def _not_for_cuda(export: Entry) -> Iterable[Problem]:
    """The runtimes, and the precisions of the others, that CUDA does not compute."""
    able = [name for name in RUNNABLE if "cuda" in RUNTIMES[name].devices()]
    for name in export.config.runtime:
        row = RUNTIMES[name]
        if name not in able:
            fix = f"Use device: cpu, or runtime: [{', '.join(able)}] in '{export.id}'"
            yield Problem("E604", f"{row.title} runs on the CPU", fix, ("device",))
    pairs = {(name, precision) for name in able for precision in export.config.possible}
    odd = sorted({precision for name, precision in pairs if "cuda" not in RUNTIMES[name].precisions.get(precision, ("cuda",))})
    if odd:
        computed = [name for name in export.config.possible if name not in odd]
        fix = f"Use device: cpu, or precision: [{', '.join(computed) or 'fp32'}] in '{export.id}'"
        yield Problem("E604", f"dynamic {' and '.join(odd)} would run partly on the CPU", fix, ("device",))


def tokens_behind(config: BenchmarkConfig, kinds: Sequence[str]) -> int:
    """Tokens that are timed one at a time behind a prompt of each length: of a decoder alone, on its cache."""
    if "generation" not in kinds or not config.further_tokens or config.device != "cpu":
        return 0
    from export.latency.measure import TOKENS

    return TOKENS


FILES, SECONDS_A_FILE, SECONDS_OF_LIMITS, SECONDS_OF_PROFILE = 5, 6.0, 4.0, 0.5
"""Estimated number of measured files (PyTorch's, and fp32 and int8 of both models), and seconds to load each, to measure the
machine's rates, and to load a file anew for its profile."""


def estimate(config: BenchmarkConfig, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    """Every round of every shape, as if each file were the dense model, and all validation rows once. Of the dense model a
    checkpoint is written to a temporary folder, from which PyTorch's process reads it."""
    from export.latency.open_files import file_bytes, memory_of

    grid = sum(batch * before.dense.flops(length) for batch in config.batch for length in config.length)
    calls, starts, tokens = config.rounds * grid, 1, 0
    if config.further_tokens and config.device == "cpu" and before.generates:
        from export.latency.measure import TOKENS

        calls += config.real_rounds * grid
        tokens = config.real_rounds * len(config.batch) * len(config.length) * TOKENS
    if config.real_lengths:
        from export.latency.passes import ORDERS, rows_of

        real = sum(min(rows_of(batch), rows["validation"]) for batch in config.batch)
        calls += len(ORDERS) * (config.real_rounds + 1) * real * before.dense.flops(rows["mean"])
        starts += len(ORDERS)
    if config.profile:
        from export.latency.profiling import PASSES, WARM

        calls += (WARM + PASSES) * max(config.batch) * before.dense.flops(max(config.length))
    validation = rows["validation"] * plan.shape.flops(rows["mean"])
    seconds = FILES * SECONDS_A_FILE * starts + SECONDS_OF_LIMITS * config.machine_limits
    seconds += FILES * (SECONDS_OF_PROFILE * config.profile + tokens * before.dense.bytes / BYTES_A_SECOND)
    exported = [file_bytes(shape, precision) for shape in (before.dense, plan.shape) for precision in ("fp32", "int8")]
    memory = 2 * before.dense.bytes + memory_of([before.dense.bytes, *exported])
    needs = {"memory": memory, "temporary": before.dense.bytes}
    return {"flops": FILES * (calls + validation), "seconds": seconds, **needs}


def surroundings(config: BenchmarkConfig) -> dict[str, Any]:
    """The processor: times of another one are none of this machine."""
    from compressor.processor import processor

    return processor()


STAGE = Stage(
    name="benchmark",
    summary="measure quality, bytes, FLOPs and latency of every exported model against dense PyTorch",
    config=BenchmarkConfig,
    produces="measurements",
    needs=("model", "onnx"),
    uses_dense=True,
    packages=("torch", "transformers", *DEFAULT.packages),
    version=14,
    run="pipelines.stages.benchmark.run:run",
    check=check,
    with_tasks=with_tasks,
    estimate=estimate,
    device=lambda config: config.device,
    surroundings=surroundings,
    lengths=lambda config: [(("length", place), length) for place, length in enumerate(config.length)],
    behind=tokens_behind,
)
