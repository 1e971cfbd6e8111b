"""Selective tuning: W + P_Ω(S) alone. Ω is chosen beforehand by the stage `select` (SAM, Fish, PaFi, MagPruning, random), or
while training (ID3). W is the frozen weights, or A and B of a LoRA, or the tensors of adapters, frozen at their start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.cost import ModelShape, share, spendable
from compressor.errors import UserError
from compressor.methods import GROUND, Method, Options, adapter, lora, method
from compressor.models.modules import REST
from compressor.selection.score_names import SCOPES, SCORES, without_eps

if TYPE_CHECKING:
    from torch import nn

    from compressor.models.anatomy import Matrix


def ground(model: nn.Module, options: Options) -> list[Matrix]:
    """The tensors that Ω indexes. Those of a LoRA or of adapters are initialized here as by that method, and frozen."""
    from compressor.models.anatomy import matrices_of
    from compressor.selection.within import freeze

    if options.on == "weights":
        return matrices_of(model, options.modules)
    existing = set(model.modules())
    method(options.on).attach(model, options)
    return freeze(model, existing)


def sizes(shape: ModelShape, options: Options) -> list[int]:
    """Number of entries of each tensor of `ground` in a model of `shape`; those of REST as one."""
    if options.on == "weights":
        matrices = [rows * columns for _, rows, columns in shape.matrices(options.modules)]
        return [*matrices, shape.rest] if REST in options.modules else matrices
    return {"lora": lora.sizes, "adapter": adapter.sizes}[options.on](shape, options)


def attach_sparse(model: nn.Module, options: Options) -> None:
    """Add a Sparse link to every tensor in which Ω has entries. Raises UserError E404 where it has some in others."""
    from compressor.deltas.kinds.sparse import Sparse

    matrices, omega = ground(model, options), options.omega or {}
    if strange := sorted(omega.keys() - {matrix.path for matrix in matrices}):
        what = f"positions are chosen in {len(strange)} tensors that are not tuned, e.g. {strange[0]}"
        raise UserError("E404", what, "Choose them again, in this model and these modules: run the select with --force")
    for matrix in matrices:
        if len(omega.get(matrix.path, ())):
            matrix.attach(Sparse.start(matrix.original, omega[matrix.path], options.group))


def attach_selected(model: nn.Module, options: Options) -> None:
    """Attach Sparse links at the selected entries, or growing ones for a strategy that chooses while training."""
    if options.strategy == "static":
        attach_sparse(model, options)
        return
    from compressor.selection.gradients import Heuristic
    from compressor.selection.growth import Growth, plant

    matrices = ground(model, options)
    growth = Growth(
        matrices,
        share(options.budget, sum(matrix.original.numel() for matrix in matrices)),
        heuristic=Heuristic(options.exp, options.eps),
        schedule=options.schedule,
        repeat=options.strategy == "repeat",
        freeze=options.deselected == "freeze",
        group=options.group,
    )
    plant(model, growth)


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: |Ω|."""
    return places if options.strategy == "static" else places_of(shape, options)


def places_of(shape: ModelShape, options: Options) -> int:
    """|Ω| of a budget over all entries that Ω may index. Raises UserError E401."""
    return spendable(options.budget, sum(sizes(shape, options)))


def kept(shape: ModelShape, options: Options) -> int:
    """|Ω| that is chosen while training (with `deselected: freeze`, of each choice); 0 where it is chosen before."""
    return 0 if options.strategy == "static" else places_of(shape, options)


def unused(settings: object) -> dict[str, str]:
    """The key that ID3's heuristic |g|/(|θ|+eps)^exp leaves without use: `eps` (but its default) where it is |g|."""
    grows = settings.strategy in ("increment", "repeat")
    return {"eps": "exp: 0"} if grows and without_eps(settings.exp, settings.eps) else {}


METHOD = Method(
    name="selective",
    summary="values on the chosen positions of the weights, of a lora or of adapters, everything else frozen",
    formula="|Ω|",
    attach=attach_selected,
    count=count,
    learning_rate=1e-3,
    source="Fu et al. 2023 (SAM), section 3; Liao et al. 2023 (PaFi); Agarwal et al. 2024 (ID3), section 3",
    reads=(*GROUND, "on", "strategy", "budget", "checkpoints", "schedule", "exp", "eps", "deselected"),
    uses_omega=True,
    kept=kept,
    scores=tuple(SCORES),
    strategies=("static", "increment", "repeat"),
    scopes=SCOPES,
    mergeable={"weights": True, "lora": True, "adapter": False},
    omega_kinds=("static",),
    unused=unused,
    kind_key="strategy",
    variants={
        "static": (),
        "increment": ("budget", "checkpoints", "schedule", "exp", "eps"),
        "repeat": ("budget", "schedule", "exp", "eps", "deselected"),
    },
)
