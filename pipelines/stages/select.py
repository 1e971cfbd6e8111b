"""Stage `select`: choose Ω, the places of each matrix that the sparse part of a delta may change."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from compressor.cost import Plan
from compressor.modules import Modules
from pipelines.stage import Inputs, Stage, StageConfig, Workspace
from pipelines.stages.tune import merged_problems


class SelectConfig(StageConfig):
    """Score every weight, keep the best `count` places of each matrix."""

    score: Literal["rpca", "magnitude", "pafi", "random"] = "rpca"
    scope: Literal["matrix"] = "matrix"
    count: int = Field(default=16, ge=1, description="places per matrix")
    modules: Modules = ("query", "value")


def plan(config: SelectConfig, plan: Plan) -> Plan:
    return replace(plan, places=config.count, modules=config.modules)


def seed_of(seed: int, path: str) -> int:
    """A seed of each matrix's own."""
    return int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:4])


def run(config: SelectConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Write omega.safetensors: path of each matrix -> its sorted flat int32 indices. After a prune: in the cut shapes."""
    from safetensors.torch import save_file

    from compressor.anatomy import layers_of
    from compressor.checkpoint import load_state
    from compressor.models import build
    from compressor.selection import select

    earlier = inputs.nearest("model")
    if earlier is None:
        model = build(inputs.base.folder, ["0", "1"])
    else:
        model = load_state(earlier.folder, inputs.base.folder, changes=False)
    matrices = [(layer.linear_path(name), layer.linear(name).weight) for layer in layers_of(model) for name in config.modules]
    omega = {}
    with workspace.progress(f"choosing {config.count} places of each matrix", len(matrices)) as bar:
        for path, weight in matrices:
            # equal shapes would draw equal places from one seed; RPCA only starts from its draw
            seed = seed_of(inputs.seed, path) if config.score == "random" else inputs.seed
            omega[path] = select(weight, config.score, config.count, seed)
            bar.advance()
    save_file(omega, workspace.folder / "omega.safetensors")
    return {"score": config.score, "count": config.count, "modules": list(config.modules), "matrices": len(omega)}


STAGE = Stage(
    name="select",
    summary="choose the places of the sparse update (Ω), e.g. by robust PCA",
    config=SelectConfig,
    produces="omega",
    accepts=("model",),
    reads_data=False,
    check=lambda config, earlier: merged_problems("select", earlier),
    run=run,
    plan=plan,
)
