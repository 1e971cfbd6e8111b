"""What a model costs whatever computes it: parameters, FLOPs, bytes, and the share of the machine's limit that it reaches."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from compressor.cost import ModelShape, paper_flops_ratio, shape_of
from compressor.deltas.kinds.sparse import Sparse
from compressor.deltas.links import chain, merge_all
from compressor.methods import method
from compressor.models.anatomy import layers_of
from compressor.models.first_token import reads_first_token
from compressor.models.modules import REST, STRUCTURES
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
    apart: dict[str, int] | None = None


def facts_of_models(dense: nn.Module, inputs: Inputs) -> dict[str, ModelFacts]:
    """The facts of the dense model, which is merged, and of the compressed one."""
    artifact = inputs.nearest("model")
    compressed = load_model(artifact, inputs.base)
    density = density_of(artifact, compressed)
    if filled_by_merge(compressed) is None:
        merge_all(compressed)
    apart = inputs.nearest("onnx").metadata.get("apart")
    return {"dense": _facts(dense, []), "compressed": _facts(compressed, density, apart)}


def _facts(model: nn.Module, density: list[dict[str, Any]], apart: dict[str, int] | None = None) -> ModelFacts:
    return ModelFacts(shape_of(model), nonzeros(model), reads_first_token(model), density, apart)


def cost_of(
    shape: ModelShape, dense: ModelShape, lengths: list[int], delta: dict[str, Any], apart: dict[str, int] | None = None
) -> dict[str, Any]:
    """Parameters, FLOPs of one row by length, the papers' FLOPs ratio (unmerged delta of tune, linear layers only), and the
    part of adapters, prefixes and deltas that were kept `apart` (their parameters and multiply-adds per token)."""
    bare, apart = shape.bare, apart or {"parameters": 0, "macs": 0}
    beside = {length: 2 * length * apart["macs"] for length in lengths}
    flops = {length: shape.flops(length) + beside[length] for length in lengths}
    return {
        "parameters": shape.parameters + apart["parameters"],
        "flops": {str(length): count for length, count in flops.items()},
        "flops_ratio": {str(length): count / dense.flops(length) for length, count in flops.items()},
        "apart": {"parameters": apart["parameters"], "flops": {str(length): count for length, count in beside.items()}},
        "paper_flops_ratio": paper_flops_ratio(shape, dense, **delta),
        "inserted": {
            "kinds": shape.inserted_kinds,
            "parameters": shape.inserted,
            "bytes": shape.bytes - bare.bytes,
            "flops": {str(length): shape.flops(length) - bare.flops(length) for length in lengths},
        },
        "layers": [{name: layer.units(name) for name in STRUCTURES} for layer in shape.layers],
    }


def delta_of_dense(inputs: Inputs) -> dict[str, Any]:
    """Cost of the dense model's unmerged delta, for the papers' FLOPs: modules, rank and positions (empty after full tuning).

    A training that continues older deltas does not describe them: the one that created them does. Of positions in everything
    those in the blocks' matrices count.
    """
    if method(inputs.dense.metadata["method"]).trains_base:
        return {"modules": (), "rank": 0, "places": 0}
    before = itertools.takewhile(lambda artifact: artifact.id != inputs.dense.id, inputs.artifacts)
    made = next(artifact for artifact in reversed([*before, inputs.dense]) if "places" in artifact.metadata)
    delta = {key: made.metadata[key] for key in ("modules", "rank", "places")}
    return {**delta, "places": _in_blocks(load_model(made, inputs.base))} if REST in delta["modules"] else delta


def _in_blocks(model: nn.Module) -> int:
    """|Ω| in the blocks' linear layers: a value on an embedding, a norm or a bias is no multiply-add of these."""
    linears = {layer.linear(name) for layer in layers_of(model) for name in layer.names}
    return sum(len(link.support()) for linear in linears for link in chain(linear) if isinstance(link, Sparse))


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
