"""Stage `select`: choose the support Ω, the indices of the weights that a sparse update may change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from pydantic import Field

from compressor.account import Places, Plan
from compressor.errors import UserError
from compressor.methods import GROUND, On, Options, ground_of
from compressor.models.modules import REST, WideModules
from compressor.selection.score_names import DATA_SCORES, DEFAULT_SAMPLES, SCORES, Scope, Score, without_eps
from compressor.selection.settings import SettingName
from pipelines.engine.stage import Entry, Problem, Stage
from pipelines.file import limits
from pipelines.stages.training_config import DEFAULT_MODULES, GroundConfig, merged_problems

OF_GRADIENTS = ", ".join(DATA_SCORES)
DEFAULT_COUNT = 16
"""Default positions per matrix: N of DSEE."""


class SelectConfig(GroundConfig):
    """Score every weight and keep the best entries of each matrix, each layer or the whole model.

    With `on: lora` or `on: adapter` the matrices are the tensors that the training after this stage will start with.
    """

    on: On = Field(default="weights", description="where Ω lies: in the weights, or in the tensors of a lora or of adapters")
    score: Literal[*SCORES] = Field(
        default="rpca", description=f"what ranks the positions: the weights, or the gradients of the task ({OF_GRADIENTS})"
    )
    scope: Scope = Field(default="matrix", description="scope of count or ratio: each matrix, each layer, or the whole model")
    count: int | None = Field(default=None, ge=1, le=limits.COUNT, description="positions in each scope, default 16 a matrix")
    ratio: float | None = Field(default=None, gt=0, lt=1, description="instead of count: the share of each scope's weights")
    modules: WideModules = Field(
        default=DEFAULT_MODULES,
        description="linear layers in which positions are chosen, or all; everything: embeddings, norms and biases too",
    )
    setting: SettingName | None = Field(default=None, description="settings of rpca; `released` follows DSEE's published code")
    samples: int | None = Field(
        default=None,
        ge=1,
        le=limits.ROWS,
        description=f"training rows for {OF_GRADIENTS}, default {DEFAULT_SAMPLES} or all; "
        "more than there are: repeated, pass after pass",
    )
    batch_size: int | None = Field(
        default=None,
        ge=1,
        le=limits.BATCH,
        description=f"rows per gradient; default {', '.join(f'{SCORES[name].batch} for {name}' for name in DATA_SCORES)}",
    )
    mode: Literal["train", "eval"] | None = Field(default=None, description=f"dropout on or off (default): {OF_GRADIENTS}")
    clip: float | None = Field(
        default=None, gt=0, le=limits.SCALE, description=f"clip each batch's gradient to this norm: {OF_GRADIENTS}"
    )
    exp: float | None = Field(
        default=None, ge=-limits.EXPONENT, le=limits.EXPONENT, description="exponent of d3's |g|/(|θ|+eps)^exp, default 0"
    )
    eps: float | None = Field(default=None, gt=0, le=limits.SCALE, description="eps of d3, default 1")

    def ground(self, selected: Options | None = None) -> Options:
        # of weights, rank is that of rpca's low-rank part, which no training inherits
        keys = self.model_copy(update={"rank": None}) if self.on == "weights" else self
        return GroundConfig.ground(keys, selected)

    @property
    def row(self) -> Score:
        """What is known of the score."""
        return SCORES[self.score]

    @property
    def gradient_rows(self) -> int:
        """Rows of a gradient; 0 for a score of the weights alone."""
        return self.row.batch and (self.batch_size or self.row.batch)

    @property
    def places(self) -> Places:
        count = DEFAULT_COUNT if self.count is None and self.ratio is None else self.count
        return Places(self.ground(), self.scope, count, self.ratio)


FACTORS = {"lora": {"drawn": "A", "zero": "B"}, "adapter": {"drawn": "down", "zero": "up"}}
"""The two factors of a new change: initialized randomly, and with 0."""


def check(config: SelectConfig, earlier: tuple[Entry, ...]) -> Iterable[Problem]:
    yield from merged_problems("select", earlier)
    if config.count is not None and config.ratio is not None:
        yield Problem("E403", "count and ratio are both given", "Keep one of them", ("ratio",))
    if config.scope != "matrix" and config.count is None and config.ratio is None:
        yield Problem("E403", f"scope {config.scope} needs a count or a ratio", "Say how many, e.g. ratio: 0.005", ("scope",))
    of_scores = dict.fromkeys(key for row in SCORES.values() for key in row.reads if key not in GROUND)
    for key in of_scores:
        if key not in config.row.reads and getattr(config, key) is not None:
            yield Problem("E403", f"{key} is not used by score {config.score}", "Remove it, or name another score", (key,))
    if "eps" in config.row.reads and without_eps(config.exp, config.eps):
        what = f"eps is not used by score {config.score} with exp: 0"
        yield Problem("E403", what, "Remove the key, or give an exp", ("eps",))
    yield from ground_problems(config)
    yield from everything_problems(config)


def everything_problems(config: SelectConfig) -> Iterable[Problem]:
    """Faults of `modules: everything`."""
    if REST not in config.modules:
        return
    if config.row.of_blocks or config.on != "weights":
        who = f"a select on {config.on}" if config.on != "weights" else f"score {config.score}"
        what = f"modules: everything is not possible with {who}, which takes matrices of the blocks"
        yield Problem("E411", what, "Use modules: all, or another score on the weights, e.g. score: sam", ("modules",))
    elif config.scope != "global":
        what = f"modules: everything with scope {config.scope}: embeddings are in no block, and short vectors would get nothing"
        yield Problem("E403", what, "Use scope: global, one budget for all of them", ("scope",))


def ground_problems(config: SelectConfig) -> Iterable[Problem]:
    """Faults: keys that are not used where Ω lies, and scores that cannot rank entries there."""
    for key in GROUND:
        if key in config.row.reads and config.on == "weights":
            continue
        if key in config.model_fields_set and getattr(config, key) is not None and key not in ground_of(config.on):
            yield Problem("E403", f"{key} is not used by a select on {config.on}", "Remove the key", (key,))
    if config.on == "weights":
        return
    if config.row.of_blocks:
        what = f"score {config.score} cannot be used on {config.on}"
        yield Problem("E403", what, "Name another score, e.g. score: pafi", ("score",))
    factors, blind = FACTORS[config.on], config.row.blind
    if blind and config.scope == "matrix":
        what = (
            f"{factors['zero']} starts at 0, so score {config.score} is 0 throughout {factors[blind]}: scope matrix finds no "
            "place there"
        )
        yield Problem("E403", what, "Use scope: layer or global", ("scope",))


def plan(config: SelectConfig, plan: Plan) -> Plan:
    """Raises UserError E302 where the architecture lacks a module, E401 where a scope has fewer entries than requested, or
    where the requested share is less than one entry."""
    from compressor.models.anatomy import matrices_of

    matrices_of(plan.model, config.modules)
    smallest = min(config.places.scopes(plan.shape), default=0)
    if config.places.of(smallest) > smallest:
        what = f"a {config.scope} has {smallest:,} positions only, {config.places.count:,} were requested"
        raise UserError("E401", what, "Ask for a smaller select.count, or a select.ratio")
    if not config.places.total(plan.shape):
        what = f"ratio {config.ratio:g} is less than one of the {smallest:,} positions of a {config.scope}"
        raise UserError("E401", what, "Ask for a larger select.ratio, or a select.count")
    return replace(plan, places=config.places)


def reads_data(config: SelectConfig) -> bool:
    """Whether the choice depends on the task's rows."""
    return config.row.batch > 0 or config.on != "weights"


SECONDS_A_MATRIX = 0.1
"""Estimated seconds of robust PCA per matrix."""


def estimate(config: SelectConfig, plan: Plan, before: Plan, rows: dict[str, Any]) -> dict[str, float]:
    """Three passes for each row with gradients, and every matrix once. Measured: the peak of pafi over a whole BERT is that of
    the model and 34 bytes for each score."""
    scored = (config.samples or min(DEFAULT_SAMPLES, rows["train"])) if config.row.batch else 0
    passes = 3 * scored * rows["sequences"]
    matrices = len(plan.shape.matrices(config.modules))
    ranked, width = config.places.scopes(plan.shape), config.row.width
    # of what is ranked together the scores again, a copy of them with an int64 index, and two masks
    memory = width * sum(ranked) + (2 * width + 10) * max(ranked, default=0) + (2 if config.row.batch else 1) * plan.shape.bytes
    needs = {"flops": passes * plan.shape.flops(rows["mean"]), "seconds": 1 + SECONDS_A_MATRIX * matrices}
    return {**needs, "memory": max(memory, 2 * plan.shape.bytes)}


STAGE = Stage(
    name="select",
    summary="choose the positions of the sparse update (Ω), e.g. by robust PCA",
    config=SelectConfig,
    produces="omega",
    accepts=("model",),
    reads_data=reads_data,
    packages=("torch", "transformers", "tokenizers"),
    version=5,
    check=check,
    run="pipelines.stages.select.run:run",
    plan=plan,
    estimate=estimate,
)
