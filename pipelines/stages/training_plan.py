"""The closed-form account of a training stage: what tune and recover would train, counted before anything runs."""

from __future__ import annotations

from compressor.account import Plan, Trained
from compressor.cost import ModelShape, added_by
from compressor.errors import UserError
from compressor.methods import (
    Method,
    Options,
    method,
)
from pipelines.stages.training_config import TrainingConfig


def planned(config: TrainingConfig, name: str, plan: Plan) -> tuple[Trained, ModelShape]:
    """What a stage with this config and method would train at this point of the plan, and the shape it leaves.

    Raises UserError E104 (a rank above that of every matrix), E302 and E407.
    """
    from compressor.methods import apply

    options = config.options(plan.places.ground if plan.places else None, None, group=str(len(plan.trainable) + 1))
    check_rank(method(name), options, plan.shape)
    apply(plan.model, name, options)
    return Trained(name, options, plan.places), plan.shape.with_inserts(added_by(options.group, plan.model))


def check_rank(row: Method, options: Options, shape: ModelShape) -> None:
    """Raises UserError E104 for a rank that no matrix of the method's modules can have."""
    if not ((row.low_rank and row.rank_limited) or options.on == "lora"):
        return
    full = max((min(out, into) for _, out, into in shape.matrices(options.modules)), default=options.rank)
    if options.rank > full:
        what = f"rank {options.rank:,}, where the matrices have at most {full:,} rows and columns"
        raise UserError("E104", what, f"Use at most {full:,}; 4 to 64 are usual")


def counted(stage: str, own: Trained, shape: ModelShape) -> tuple[str, int]:
    """A row of the plan: what the stage trains, and in its name how much of that is left, where that is less."""
    count, kept = own.count(shape), own.kept(shape)
    return (stage if kept == count else f"{stage}, {kept:,} kept", count)
