"""What a model costs whatever computes it: parameters, FLOPs, bytes, and the share of the machine's limit that it reaches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from compressor.cost import ModelShape, paper_flops_ratio, shape_of
from compressor.deltas.factored import delta_macs
from compressor.deltas.links import merge_all
from compressor.models.first_token import reads_first_token
from compressor.models.modules import STRUCTURES
from compressor.pruning.surgery import restore_kept
from compressor.pruning.weights import filled_by_merge, nonzeros
from export.latency.machine_limits import Limits
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine.stage import Inputs
from pipelines.stages.benchmark.measured_files import Candidate
from pipelines.stages.loading import density_of, load_model


@dataclass(frozen=True)
class ModelFacts:
    """What all files of a model have in common. `apart`: parameters and multiply-adds per token of what was not merged."""

    shape: ModelShape
    nonzeros: int
    reads_first: bool
    """Whether its head reads the first token alone."""
    density: list[dict[str, Any]]
    deltas: int
    """Multiply-adds of the dense model's deltas for one token, had they not been merged: part of the papers' FLOPs."""
    apart: dict[str, int] | None = None


def facts_of_models(dense: nn.Module, inputs: Inputs) -> dict[str, ModelFacts]:
    """The facts of the dense model, which is merged, and of the compressed one.

    In the papers' FLOPs the dense model's deltas count as if they were not merged: all of them, in what is left of its blocks.
    """
    artifact = inputs.nearest("model")
    tuned = load_model(inputs.dense, inputs.base)
    whole = delta_macs(tuned)
    restore_kept(tuned, artifact.metadata["kept"])
    left = delta_macs(tuned)
    del tuned
    compressed = load_model(artifact, inputs.base)
    density = density_of(artifact, compressed)
    if filled_by_merge(compressed) is None:
        merge_all(compressed)
    apart = inputs.nearest("onnx").metadata.get("apart")
    return {
        "dense": _facts(dense, [], whole),
        "compressed": _facts(compressed, density, left, apart),
    }


def _facts(model: nn.Module, density: list[dict[str, Any]], deltas: int, apart: dict[str, int] | None = None) -> ModelFacts:
    return ModelFacts(shape_of(model), nonzeros(model), reads_first_token(model), density, deltas, apart)


def cost_of(
    shape: ModelShape, dense: ModelShape, lengths: list[int], deltas: int, apart: dict[str, int] | None = None
) -> dict[str, Any]:
    """Parameters, FLOPs of one row by length, the papers' FLOPs ratio (linear layers only, multiply-adds of unmerged `deltas`),
    and the part of adapters, prefixes and deltas that were kept `apart` (their parameters and multiply-adds per token)."""
    bare, apart = shape.bare, apart or {"parameters": 0, "macs": 0}
    beside = {length: 2 * length * apart["macs"] for length in lengths}
    flops = {length: shape.flops(length) + beside[length] for length in lengths}
    return {
        "parameters": shape.parameters + apart["parameters"],
        "flops": {str(length): count for length, count in flops.items()},
        "flops_ratio": {str(length): count / dense.flops(length) for length, count in flops.items()},
        "apart": {"parameters": apart["parameters"], "flops": {str(length): count for length, count in beside.items()}},
        "paper_flops_ratio": paper_flops_ratio(shape, dense, deltas),
        "inserted": {
            "kinds": shape.inserted_kinds,
            "parameters": shape.inserted,
            "bytes": shape.bytes - bare.bytes,
            "flops": {str(length): shape.flops(length) - bare.flops(length) for length in lengths},
        },
        "layers": [{name: layer.units(name) for name in STRUCTURES} for layer in shape.layers],
    }


def share_of(
    limits: Limits | None,
    ms: float,
    calls: Iterable[tuple[int, int]],
    row: Candidate,
    shape: ModelShape,
    apart: dict[str, int] | None = None,
    first: bool = False,
) -> dict[str, Any]:
    """The share of the machine's limit that a candidate reaches by calls that take `ms` together, each of (rows, tokens a row
    that it computes); empty where it is unknown. `first`: the head reads the first token alone, and so do files. A runtime
    projects relative positions once, when it opens a file."""
    if limits is None:
        return {}
    beside, of_file = apart["macs"] if apart else 0, row.runtime in RUNTIMES

    def flops(rows: int, length: int) -> float:
        unread = rows * shape.unread_flops(length) if first and of_file else 0
        return shape.flops(length, rows, stored=of_file) + 2 * rows * length * beside - unread

    return limits.share(row.precision, [flops(*call) for call in calls], shape.read_weights + beside, ms)
