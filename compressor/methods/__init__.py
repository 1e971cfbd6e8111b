"""Tuning methods: each combines changes and a selection, and counts its trainable parameters in closed form.

A new method is one file here (or in a room of `ROOMS`) with a `METHOD` and one word in `NAMES`; the shared test harness then
covers it. Importing this package and its rows loads no torch: pipeline files are checked, and methods listed, without it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal, get_args

from compressor.arguments import require_number, require_one_of, require_whole
from compressor.compression import compression_of
from compressor.cost import ModelShape
from compressor.errors import UserError
from compressor.models.build import head_names
from compressor.models.modules import REST

if TYPE_CHECKING:
    from torch import Tensor, nn


NAMES = (
    "dsee",
    "lora",
    "vera",
    "selective",
    "bitfit",
    "adapter",
    "prefix",
    "propetl",
    "mixout",
    "diff_pruning",
    "child_tuning",
    "full",
    "mam",
)

ROOMS = dict.fromkeys(("mixout", "diff_pruning", "child_tuning"), "dense_deltas.")
"""The sub-packages of methods that belong together."""

Placement = Literal["pfeiffer", "houlsby", "adapterhub"]
Shared = Literal["adapter", "lora", "prefix"]
Combine = Literal["or", "and", "add"]
Strategy = Literal["static", "increment", "repeat"]
Timing = Literal["cohorts", "exact"]
Deselected = Literal["reset", "freeze"]
On = Literal["weights", "lora", "adapter"]
Child = Literal["d", "f", "pruning"]
Masks = Literal["learned", "random"]


@dataclass(frozen=True)
class Options:
    """Options of the tuning methods; each method lists in `reads` those that it uses. `group` names the stage.

    `omega` maps a matrix's path to its Ω (sorted flat int32); a matrix without an entry has no sparse part.
    """

    modules: tuple[str, ...] = ("query", "value")
    rank: int = 16
    alpha: float = 32.0
    bottleneck: int = 64
    """Inner width of an adapter."""
    placement: Placement = "pfeiffer"
    length: int = 64
    """Length of a prefix."""
    reparametrize: bool = False
    """Train a prefix through a network, which is dropped afterwards."""
    shared: Shared = "adapter"
    """What a ProPETL prototype is."""
    keep: float = 0.5
    """Share of a prototype that each block's mask keeps, k in the paper."""
    share: bool = True
    """Whether all blocks share one ProPETL prototype; otherwise each has tensors of its own behind its mask."""
    masks: Masks = "learned"
    """Whether ProPETL learns its masks, or draws them once."""
    on: On = "weights"
    """The tensors that Ω lies in: the frozen weights, or the tensors that this method adds, frozen at their initial values."""
    tasks: int = 0
    """Number of tasks that share the prototype, each with its own mask; 0: a single task, without such a mask."""
    combine: Combine = "or"
    """How a block's mask and a task's mask become one."""
    strategy: Strategy = "static"
    """How Ω is chosen: before training, grown during training (ID3), or chosen again each time."""
    budget: int | float | None = None
    """|Ω| if the method chooses it during training: a count, or a share of the candidate entries."""
    schedule: Timing = "cohorts"
    """When it chooses: at most 32 times, or at every step."""
    exp: float = 0.0
    eps: float = 1.0
    """eps of ID3's score |g| / (|θ| + eps)^exp."""
    deselected: Deselected = "reset"
    """What becomes of a position that is no longer chosen: back to its pretrained value, or frozen at the one it has."""
    mixout: float = 0.9
    """Probability that a step uses the pretrained weights of an input neuron, p in the paper."""
    penalty: float = 1.25e-7
    """Penalty of diff pruning for each gate expected to be open, λ in the paper."""
    group_gates: bool = False
    """Whether every matrix has a gate of diff pruning, too."""
    burn_in: int | None = None
    """Steps after which diff pruning and child pruning fix their positions; None: half of the training."""
    renew: int | None = None
    """Steps between resets of all but the largest entries before that; None: none (diff pruning), after each step (child)."""
    child: Child = "f"
    """Whether the child network is drawn at every step (f), chosen before training (d), or the largest changes (pruning)."""
    reserve: float = 0.3
    """Probability with which a step of Child-Tuning-F keeps a gradient element."""
    top: int | None = None
    """Number of last blocks that full fine-tuning trains; None: the whole model."""
    group: str = "tune"
    omega: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        for name, words in WORDS.items():
            require_one_of(name, getattr(self, name), get_args(words))
        for name in ("rank", "bottleneck", "length"):
            require_whole(name, getattr(self, name))
        require_whole("tasks", self.tasks, 0)
        for name in ("top", "burn_in", "renew"):
            if getattr(self, name) is not None:
                require_whole(name, getattr(self, name))
        require_number("alpha", self.alpha, -math.inf)
        require_number("keep", self.keep, 0, 1, above=True)
        require_number("mixout", self.mixout, 0, 1)
        if self.mixout == 1:  # what is kept is divided by 1 - mixout
            raise ValueError("mixout is 1: a number from 0, below 1")
        require_number("reserve", self.reserve, 0, 1, above=True)
        require_number("penalty", self.penalty, 0)
        require_number("eps", self.eps, 0)
        if self.budget is not None:
            require_number("budget", self.budget, 0, above=True)


WORDS = {
    "placement": Placement,
    "shared": Shared,
    "masks": Masks,
    "on": On,
    "combine": Combine,
    "strategy": Strategy,
    "schedule": Timing,
    "deselected": Deselected,
    "child": Child,
}
"""The options that are one of a few words."""

OF_TRAINING = ("mask_learning_rate", "final_learning_rate", "checkpoints")
"""Method-specific keys of the training itself, not of the changes that a method attaches."""

OPTIONS = (
    *(field.name for field in fields(Options) if field.name not in ("group", "omega", "tasks", "combine")),
    *OF_TRAINING,
)
"""Keys of a training stage that only some methods read."""

GROUND = ("modules", "rank", "alpha", "bottleneck", "placement")
"""Keys that determine, with `on`, in which tensors Ω lies."""


def ground_of(on: On) -> tuple[str, ...]:
    """The keys of `GROUND` that are used where Ω lies on `on`."""
    return ("modules",) if on == "weights" else method(on).reads


@dataclass(frozen=True)
class Method:
    """A tuning method. `attach(model, options)` adds what it trains to a frozen model.

    `count(shape, options, places)` is the number of its trainable parameters in closed form, without the task head; `places`
    is |Ω| over all matrices.
    """

    name: str
    summary: str
    formula: str
    attach: Callable[[nn.Module, Options], None]
    count: Callable[[ModelShape, Options, int], int]
    learning_rate: float
    """Default peak learning rate."""
    source: str
    """Paper and section."""
    mask_learning_rate: float | None = None
    """Default peak learning rate of scores or gates; None: ten times `learning_rate`."""
    reads: tuple[str, ...] = ()
    low_rank: bool = False
    """Whether it adds r(m+n) multiply-adds a token to every chosen matrix while unmerged, as counted in the papers' FLOPs."""
    rank_limited: bool = True
    """Whether a rank above the sides of a matrix is useless; it is not if the low-rank factors are not trained themselves."""
    uses_omega: bool = False
    """Whether it trains values on the Ω of a select stage."""
    omega_kinds: tuple[str, ...] = ()
    """The variants that do; empty: all."""
    scores: tuple[str, ...] = ()
    """Scores that Ω can be chosen by; empty if nothing is chosen."""
    strategies: tuple[str, ...] = ()
    """When Ω is chosen."""
    scopes: tuple[str, ...] = ()
    """Scopes within which entries compete for Ω."""
    kept: Callable[[ModelShape, Options], int] | None = None
    """Final |Ω|, if more is trained at first; 0 for a variant that keeps all."""
    continued: Callable[[ModelShape, Options, ModelShape, Collection[str]], int] | None = None
    """Number of those that a later stage trains further with `same`, if others: in a model of the first shape, after a training
    in the second; only the run decides how much of the modules in the collection each block keeps."""
    sized_alike: Callable[[Options], Collection[str]] = lambda options: ()
    """The modules of which every block needs as many rows and columns, since one tensor serves them all."""
    trains_base: bool = False
    """Whether the pretrained weights themselves are trained."""
    many_tasks: bool = False
    """Whether several tasks can be trained together, sharing what the method adds."""
    task_masks: bool = False
    """Whether each of them then has a mask of its own."""
    mergeable: bool | Mapping[str, bool] = True
    """Whether merging gives a model of the base's architecture; for each variant (`on`, `shared`) if they differ."""
    kind_key: str | None = None
    """The option that selects the method's variant, e.g. propetl's `shared`."""
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The keys of `reads` that each variant uses; `unread` lists the others."""
    unused: Callable[[object], Mapping[str, str]] = lambda settings: {}
    """Keys that other keys of the settings (a config, None where not given) leave without use: key -> what does."""
    defaults: Mapping[str | None, Mapping[str, float]] = field(default_factory=dict)
    """The paper's values of a stage's keys where they differ from those of `Options`, by variant (None: without variants)."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Other default peak learning rates, by the option that causes them."""

    def rate(self, settings: object) -> float:
        """Default peak learning rate for a config or options."""
        return next((rate for option, rate in self.rates.items() if getattr(settings, option)), self.learning_rate)

    def kind(self, options: object) -> str | None:
        """The variant that `options` (or a stage's config, where None is the default) selects; None without variants."""
        return (getattr(options, self.kind_key) or getattr(Options, self.kind_key)) if self.kind_key else None

    def takes_places(self, options: object) -> bool:
        """Whether the selected variant uses the Ω of a select stage."""
        return self.uses_omega and (not self.omega_kinds or self.kind(options) in self.omega_kinds)

    def reaches_everything(self, options: object) -> bool:
        """Whether the selected variant trains values on Ω alone, which may then lie in any parameter of the base."""
        # what is projected onto Ω after each step is trained as whole matrices
        chooses = self.uses_omega and "projection" not in self.strategies and self.needs_budget(options)
        return not self.low_rank and options.on == "weights" and (chooses or self.takes_places(options))

    def needs_budget(self, options: object) -> bool:
        """Whether the selected variant chooses Ω during training."""
        kind = self.kind(options)
        return "budget" in self.reads and (kind is None or "budget" in self.variants[kind])

    def unread(self, variant: str) -> tuple[str, ...]:
        """The keys that this variant does not use, although other variants do."""
        of_kinds = {key for keys in self.variants.values() for key in keys}
        return tuple(key for key in self.reads if key in of_kinds and key not in self.variants[variant])

    def reads_on(self, on: On) -> tuple[str, ...]:
        """`reads` without the keys that are unused where Ω lies on `on`."""
        if "on" not in self.reads:
            return self.reads
        return tuple(key for key in self.reads if key not in GROUND or key in ground_of(on))

    def moves_modules(self, options: object, on: On) -> bool:
        """Whether the selected variant adds a ΔW to the matrices that `modules` names, where Ω lies on `on`."""
        return "modules" in self.reads_of(options, on)

    def reads_of(self, options: object, on: On) -> tuple[str, ...]:
        """`reads_on` without the keys that the selected variant does not use."""
        kind = self.kind(options)
        unread = () if kind is None else self.unread(kind)
        return tuple(key for key in self.reads_on(on) if key not in unread)


def method(name: str) -> Method:
    """The method with this name. Raises UserError E402."""
    if name not in NAMES:
        raise UserError("E402", f"unknown method '{name}'", f"Methods: {', '.join(NAMES)}")
    return importlib.import_module(f"compressor.methods.{ROOMS.get(name, '')}{name}").METHOD


def apply(model: nn.Module, name: str, options: Options) -> None:
    """Freeze the base, attach the method's parameters, and leave exactly those and the task head trainable.

    Poolers of the base stay frozen. Raises UserError E302 and E411 (modules), E407 if the architecture does not support it;
    ValueError where the method needs positions (`omega`), a `budget` or `modules`, and the options have none.
    """
    chosen = method(name)
    _require_given(chosen, options)
    if REST in options.modules and "modules" in chosen.reads and not chosen.reaches_everything(options):
        what = f"modules: everything is not possible with method {name}, which changes matrices of the blocks"
        raise UserError("E411", what, "Use modules: all, or method: selective on the weights")
    chosen.attach(model, options)
    set_trainable(model, base=chosen.trains_base, groups=(options.group,), top=options.top)


def _require_given(chosen: Method, options: Options) -> None:
    """Raises ValueError for options of which the method would attach nothing, or only a part."""
    if chosen.takes_places(options) and options.strategy == "static" and options.omega is None:
        raise ValueError(f"{chosen.name} trains values on chosen positions, and omega is None: see compressor.selection")
    if chosen.needs_budget(options) and options.budget is None and not chosen.takes_places(options):
        raise ValueError(f"{chosen.name} chooses its positions while training, and budget is None")
    if chosen.moves_modules(options, options.on) and not options.modules:
        raise ValueError(f"{chosen.name} changes the matrices that modules names, and it names none")


def set_trainable(model: nn.Module, *, base: bool, groups: Collection[str], top: int | None = None) -> None:
    """Set requires_grad for the task head, the changes of `groups` and, with `base`, the whole base, or its last `top` blocks;
    clear it elsewhere. Raises UserError E414 for more blocks than there are."""
    from compressor.deltas.links import Change
    from compressor.models.anatomy import layers_of

    head = head_names(model)
    compression = compression_of(model)
    compression.weights_moved = base or compression.weights_moved
    layers = layers_of(model) if base and top else []
    if layers and top > len(layers):
        raise UserError("E414", f"top is {top}, the model has {len(layers)} blocks", "Lower it, or leave it out to train all")
    inside = {id(parameter) for layer in layers[-top:] for parameter in layer.module.parameters()} if layers else None
    for name, parameter in model.named_parameters():
        parameter.requires_grad_((base and (inside is None or id(parameter) in inside)) or name in head)
    for module in model.modules():
        if isinstance(module, Change):
            module.requires_grad_(module.group in groups and module.tuned and not module.frozen)


def trainable_counts(model: nn.Module) -> dict[str, int]:
    """Trainable scalars of a live model: {"head": task head, "body": everything else}. Shared tensors count once."""
    head = head_names(model)
    counts = {"head": 0, "body": 0}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            counts["head" if name in head else "body"] += parameter.numel()
    return counts
