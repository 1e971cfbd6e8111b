"""What a report compares: the dense and the compressed model, the file that is served, and the dense files it competes with."""

from __future__ import annotations

from export.runtimes.runtime_registry import RUNTIMES, hop_of
from pipelines.engine.stage import Artifact, Inputs
from pipelines.reporting.candidates import Record, find
from pipelines.reporting.words import file_of

NARROWEST = ("int8", "fp16", "bf16", "fp32")
"""Precisions by preference: the first available one is shown if nothing is deployed, or what was not measured."""

DEVICES = {"cpu": "the CPU", "cuda": "a GPU"}


def roles_of(inputs: Inputs, measurements: Record) -> dict[str, Record]:
    """The compared models: `dense` (PyTorch fp32), `compressed` (as deployed, else the narrowest file: see `served_note`) and,
    where exported, `runtime`, dense fp32 in the runtime of `compressed`: the baseline that shows what compression gives beyond
    a change of runtime."""
    candidates = measurements["candidates"]
    compressed = {(row["runtime"], row["precision"]): row for row in candidates if row["model"] == "compressed"}
    first = next(iter(compressed))[0]
    preferred = (served_file(inputs), *((first, name) for name in NARROWEST))
    roles = {
        "dense": next(row for row in candidates if row["name"] == measurements["baseline"]),
        "compressed": next(compressed[key] for key in preferred if key in compressed),
    }
    runtime = find(candidates, "dense", "fp32", roles["compressed"]["runtime"])
    return {**roles, "runtime": runtime} if runtime else roles


def served_file(inputs: Inputs) -> tuple[str, str] | None:
    """Runtime and precision of the file that is deployed; None where nothing is."""
    repository = inputs.nearest("repository")
    return (repository.metadata["runtime"], repository.metadata["precision"]) if repository else None


def served_note(inputs: Inputs, shown: Record, device: str) -> list[str]:
    """Note on a file that is served and was not measured, so that the record `shown` is of another, or that was measured on
    another device than serves it."""
    repository = inputs.nearest("repository")
    if repository is None:
        return []
    if served_file(inputs) == (shown["runtime"], shown["precision"]):
        on = repository.metadata["device"]
        told = f"{repository.entry} serves on {DEVICES[on]}, and all times here are of {DEVICES[device]}."
        return [told] if on != device else []
    served = f"{repository.entry} serves the compressed {file_of(repository.metadata)}, which was not measured"
    return [f"{served}: what stands here as deployed is {shown['name']}."]


def measured_export(inputs: Inputs) -> Artifact | None:
    """The export whose files were timed, the last before the benchmark; without a benchmark the last one."""
    measured = max((place for place, a in enumerate(inputs.artifacts) if a.kind == "measurements"), default=None)
    return next((a for a in reversed(inputs.artifacts[:measured]) if a.kind == "onnx"), None)


def usable_dense_files(inputs: Inputs, candidates: list[Record]) -> list[Record]:
    """The dense files of any exported runtime and precision within its bound, what can be had without compression: the fastest
    of them is the rival."""
    exported = measured_export(inputs)
    parity = exported.metadata["parity"] if exported else []
    beyond = {record["hop"] for record in parity if not record["passed"]}
    files = [row for row in candidates if row["model"] == "dense" and row["runtime"] in RUNTIMES]
    return [row for row in files if hop_of("dense", row["runtime"], row["precision"]) not in beyond]
