"""The work of stage `prune`: carry out every item, or the search for a target, refit if requested, and write the state."""

from __future__ import annotations

from typing import Any

from compressor.checkpoint import load_state
from compressor.deltas.links import merged_copy
from compressor.methods import method
from compressor.models.anatomy import layers_of
from compressor.models.modules import MODULES, STRUCTURES
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.generated_texts import with_texts
from pipelines.stages.loading import load_data, load_model, publish_model
from pipelines.stages.prune import mask_weights, remove_units
from pipelines.stages.prune.config import PruneConfig
from pipelines.stages.prune.meet_target import meet
from pipelines.stages.prune.refit_outgoing import refitted


def modules_tuned(inputs: Inputs) -> set[str]:
    """The modules that the trainings so far tuned in every block, as the plan of weights counts them."""
    names: set[str] = set()
    for facts in (artifact.metadata for artifact in inputs.artifacts):
        if "trainable" in facts:  # of a training
            everything = method(facts["method"]).trains_base and not facts.get("top")
            names.update(MODULES if everything else facts.get("modules", ()))
    return names


def run(config: PruneConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Apply every item or the search, compare removed against masked on validation rows, refit, write the state."""
    data, previous = load_data(inputs), inputs.nearest("model")
    model, moved = load_model(previous, inputs.base), previous.metadata["weights_moved"]
    # after full tuning |ΔW| is the distance from the base, which is pruned in the same way to keep the shapes equal
    base = load_state(previous.folder, inputs.base.folder, changes=False) if moved else None
    units = [{name: layer.units(name) for name in STRUCTURES} for layer in layers_of(model)]
    before = merged_copy(model) if config.refit else None
    steps, tuned = [], modules_tuned(inputs)
    for item in config.items:
        given = (item, model, base, inputs.seed, data, workspace)
        by_weight = item.structure == "weights"
        steps.append(mask_weights.carry_out(*given, tuned) if by_weight else remove_units.carry_out(*given))
    target_record = meet(config.search, model, base, inputs, data, workspace) if config.search else {}
    refit = {} if before is None else {"refit": refitted(config.refit, before, model, data, workspace)}
    published = publish_model(model, inputs, data, workspace)
    if data.kind.metric.of_texts:
        published = with_texts(published, model, inputs, data, workspace)
    parity = [step["parity"] for step in [*steps, target_record] if "parity" in step]
    target = {"target": target_record} if target_record else {}
    record = {"method": previous.metadata["method"], "items": steps, **target, **refit}
    return {**published, **record, "parity": parity, "found": units}
