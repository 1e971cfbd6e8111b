"""Stage `select`: choose Ω, the places of the weights that a sparse update may change."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from compressor.account import Places, Plan
from compressor.errors import UserError
from compressor.methods import GROUND, On, ground_of
from compressor.models.modules import Modules
from compressor.selection.score_names import DATA_SCORES, DataScore, Scope, WeightScore
from compressor.selection.settings import SettingName
from pipelines.engine.stage import Entry, Inputs, Problem, Stage, Workspace
from pipelines.file import limits
from pipelines.stages.training_config import DEFAULT_MODULES, GroundConfig, merged_problems
from pipelines.stages.trainings import found_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compressor.models.anatomy import Matrix
    from compressor.tasks.reading import TaskData
    from pipelines.stages.loading import Data


DEFAULT_COUNT = 16
"""Places of each matrix where nothing is said: N of DSEE."""


class SelectConfig(GroundConfig):
    """Score every weight, keep the best places of each matrix, each layer or the whole model.

    With `on: lora` or `on: adapter` the matrices are the tensors that the training after this stage will start with.
    """

    on: On = Field(default="weights", description="where Ω lies: in the weights, or in the tensors of a lora or of adapters")
    score: WeightScore | DataScore = Field(
        default="rpca", description="what ranks the places: the weights (first four), or the gradients of the task"
    )
    scope: Scope = Field(default="matrix", description="what count or ratio is of: each matrix, each layer, or all together")
    count: int | None = Field(default=None, ge=1, le=limits.COUNT, description="places in each scope, default 16 a matrix")
    ratio: float | None = Field(default=None, gt=0, lt=1, description="instead of count: the share of each scope's weights")
    modules: Modules = Field(default=DEFAULT_MODULES, description="linear layers in which places are chosen, or all")
    setting: SettingName | None = Field(default=None, description="of rpca; `released` is what DSEE's code does")
    samples: int | None = Field(
        default=None, ge=1, le=limits.ROWS, description="training rows for fish, sam and d3, default 1024"
    )
    batch_size: int | None = Field(
        default=None, ge=1, le=limits.BATCH, description="rows a gradient; default 1 for fish, 16 for sam and d3"
    )
    mode: Literal["train", "eval"] | None = Field(default=None, description="dropout on or off (default) for fish, sam, d3")
    clip: float | None = Field(
        default=None, gt=0, le=limits.SCALE, description="clip each batch's gradient to this norm: fish, sam, d3"
    )
    exp: float | None = Field(
        default=None, ge=-limits.EXPONENT, le=limits.EXPONENT, description="exponent of d3's |g|/(|θ|+eps)^exp, default 0"
    )
    eps: float | None = Field(default=None, gt=0, le=limits.SCALE, description="eps of d3, default 1")

    @property
    def places(self) -> Places:
        count = DEFAULT_COUNT if self.count is None and self.ratio is None else self.count
        return Places(self.ground(), self.scope, count, self.ratio)


OF_RPCA, OF_DATA, OF_D3 = ("setting",), ("samples", "batch_size", "mode", "clip"), ("exp", "eps")
DRAWN_AND_ZERO = {"lora": ("A", "B"), "adapter": ("down", "up")}
"""How the two factors of a fresh change start: at random and at 0."""


def check(config: SelectConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    yield from merged_problems("select", earlier)
    if config.count is not None and config.ratio is not None:
        yield Problem("E403", "count and ratio are both given", "Keep one of them", ("ratio",))
    if config.scope != "matrix" and config.count is None and config.ratio is None:
        yield Problem("E403", f"scope {config.scope} needs a count or a ratio", "Say how many, e.g. ratio: 0.005", ("scope",))
    unread = (
        *(OF_RPCA if config.score != "rpca" else ()),
        *(OF_DATA if config.score not in DATA_SCORES else ()),
        *(OF_D3 if config.score != "d3" else ()),
    )
    for key in unread:
        if getattr(config, key) is not None:
            yield Problem("E403", f"{key} means nothing to score {config.score}", "Remove it, or name another score", (key,))
    yield from ground_problems(config)


def ground_problems(config: SelectConfig) -> Iterable[Problem]:
    """Keys that mean nothing to where Ω lies, and scores that say nothing of it."""
    for key in GROUND:
        if key in config.model_fields_set and getattr(config, key) is not None and key not in ground_of(config.on):
            yield Problem("E403", f"{key} means nothing to a select on {config.on}", "Remove the key", (key,))
    if config.on == "weights":
        return
    if config.score == "rpca":
        yield Problem("E403", f"score rpca means nothing on {config.on}", "Name another score, e.g. score: pafi", ("score",))
    drawn, zero = DRAWN_AND_ZERO[config.on]
    blind = {"magnitude": zero, **dict.fromkeys(DATA_SCORES, drawn)}.get(config.score)
    if blind and config.scope == "matrix":
        what = f"{zero} starts at 0, so score {config.score} is 0 throughout {blind}: scope matrix finds no place there"
        yield Problem("E403", what, "Use scope: layer or global", ("scope",))


def plan(config: SelectConfig, plan: Plan) -> Plan:
    """Raises UserError E302 where the architecture lacks a module, E401 where a scope has fewer places than asked for, or
    where the share comes to none at all."""
    from compressor.models.anatomy import matrices_of

    matrices_of(plan.model, config.modules)
    smallest = min(config.places.scopes(plan.shape))
    if config.places.of(smallest) > smallest:
        what = f"a {config.scope} has {smallest:,} places only, {config.places.count:,} were asked"
        raise UserError("E401", what, "Ask for a smaller select.count, or a select.ratio")
    if not config.places.total(plan.shape):
        what = f"ratio {config.ratio:g} is less than one of the {smallest:,} places of a {config.scope}"
        raise UserError("E401", what, "Ask for a larger select.ratio, or a select.count")
    return replace(plan, places=config.places)


def seed_of(seed: int, path: str) -> int:
    """A seed of each matrix's own."""
    return int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:4])


def run(config: SelectConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Write omega.safetensors: path of each matrix -> its sorted flat int32 indices. After a prune: in the cut shapes."""
    from safetensors.torch import save_file

    from compressor.models.anatomy import layers_of, modules_of
    from compressor.selection.choice import choose_all

    judged = _by_gradients if config.score in DATA_SCORES else _by_weights
    model, matrices, scores = judged(config, inputs, workspace)
    layers = [(number, f"{layer.path}.") for number, layer in enumerate(layers_of(model))]
    layer_of = {path: number for number, start in layers for path in scores if path.startswith(start)}
    omega = choose_all(scores, layer_of, config.places)
    save_file(omega, workspace.folder / "omega.safetensors")
    return {
        "score": config.score,
        "scope": config.scope,
        "modules": modules_of(model, config.modules),
        "ground": {key: getattr(config.ground(), key) for key in ("on", *ground_of(config.on), "modules")},
        "matrices": len(omega),
        "places": sum(len(places) for places in omega.values()),
        "of": sum(matrix.original.numel() for matrix in matrices),
    }


Judged = tuple["nn.Module", "list[Matrix]", "dict[str, Tensor]"]
"""The model, the tensors in which Ω lies, and their scores by path."""


def start(config: SelectConfig, inputs: Inputs, data: Data | TaskData) -> tuple[nn.Module, list[Matrix]]:
    """The model as the next stage will train it, and the tensors in which Ω lies: bit for bit those that it will start with."""
    from compressor.deltas.links import merge_deltas
    from compressor.methods.selective import ground

    model = found_model(inputs, data)
    return model, ground(merge_deltas(model) if config.on == "weights" else model, config.ground())


def _by_weights(config: SelectConfig, inputs: Inputs, workspace: Workspace) -> Judged:
    """Scores of the pretrained weights in the shapes that are left, or of a fresh LoRA's or adapter's tensors.

    What a mask hides scores 0: it is no candidate.
    """
    from compressor.checkpoint import load_state
    from compressor.models.anatomy import matrices_of
    from compressor.models.hub import build
    from compressor.selection.choice import weight_score
    from compressor.tasks.reading import read_task

    earlier = inputs.nearest("model")
    if config.on != "weights":
        model, matrices = start(config, inputs, read_task(inputs.task))
    else:
        base = inputs.base.folder
        model = build(base, ["0", "1"]) if earlier is None else load_state(earlier.folder, base, changes=False)
        matrices = matrices_of(model, config.modules)
    settings = {key: getattr(config, key) for key in OF_RPCA if getattr(config, key) is not None}
    scores = {}
    with workspace.progress(f"scoring by {config.score}", len(matrices)) as bar:
        for matrix in matrices:
            # equal shapes would draw equal places from one seed; RPCA only starts from its draw
            seed = seed_of(inputs.seed, matrix.path) if config.score == "random" else inputs.seed
            score = weight_score(matrix.original, config.score, seed, path=matrix.path, **settings)
            scores[matrix.path] = score if matrix.mask is None else matrix.mask.change(score)
            bar.advance()
    return model, matrices, scores


def _by_gradients(config: SelectConfig, inputs: Inputs, workspace: Workspace) -> Judged:
    """Scores by the task's gradients, at the model as the next stage will train it: tuned so far, with its head."""
    from compressor.selection.gradients import Asking, Heuristic, gradient_scores
    from pipelines.stages.loading import load_data, tensor_batches

    data = load_data(inputs)
    model, matrices = start(config, inputs, data)
    rows = data.train.draw(config.samples or 1024, inputs.seed)
    size = config.batch_size or (1 if config.score == "fish" else 16)
    heuristic = Heuristic(**{key: getattr(config, key) for key in OF_D3 if getattr(config, key) is not None})
    with workspace.progress(f"scoring by {config.score}", len(rows)) as bar:
        scores = gradient_scores(
            model,
            matrices,
            config.score,
            tensor_batches(rows, data.pad_id, size),
            asking=Asking(config.mode == "train", config.clip),
            heuristic=heuristic,
            kind=data.kind,
            on_batch=bar.advance,
        )
    return model, matrices, scores


STAGE = Stage(
    name="select",
    summary="choose the places of the sparse update (Ω), e.g. by robust PCA",
    config=SelectConfig,
    produces="omega",
    accepts=("model",),
    reads_data=lambda config: config.score in DATA_SCORES or config.on != "weights",
    packages=("torch", "transformers", "tokenizers"),
    version=4,
    check=check,
    run=run,
    plan=plan,
)
