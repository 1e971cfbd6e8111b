"""ProPETL (Zeng et al. 2023): all blocks share one prototype adapter, LoRA or prefix; each block learns a mask over it.

Its ablations: tensors of each block's own behind the mask (`share: false`), masks that are not learned (`masks: random`).

In a model of many tasks (`compressor.training.multitask.join_heads`), every task also learns a mask, shared by all blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from compressor.compression import compression_of
from compressor.cost import ModelShape
from compressor.errors import UserError
from compressor.methods import Method, Options, adapter, prefix

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from torch import Tensor, nn

    from compressor.deltas.sources import FixedMasks, Masked, Prototype, Scores
    from compressor.training.multitask import TaskScores


class Prototypes:
    """The prototypes that one training adds to `model`, by name, created at first use, and the masks of its tasks over each.

    Without `share` every block has a prototype of its own.
    """

    def __init__(self, model: nn.Module, options: Options):
        self.model, self.options, self.tasks = model, options, compression_of(model).tasks
        self.made, self.task_scores, self.views = {}, {}, 0

    def masked(self, name: str, tensors: dict[str, Tensor]) -> Masked:
        """The prototype called `name` behind a newly initialized mask. `tensors` initialize the prototype if it is new.

        Raises UserError E407 if a block would need a prototype of another size.
        """
        from compressor.deltas.sources import Prototype

        sizes = {part: tensor.shape for part, tensor in tensors.items()}
        return self._view(name, lambda full_name: Prototype(full_name, tensors, self.options.group), sizes)

    def masked_prefix(self, key: Tensor) -> Masked:
        """The prototype of all prefixes behind a mask; `key` is the block's key matrix (out, in).

        With `reparametrize` a network computes it (ProPETL equations 12 and 13). Raises UserError E407.
        """
        from compressor.deltas.kinds.prefix import Prefix
        from compressor.deltas.sources import NetworkPrototype

        options = self.options
        if not options.reparametrize:
            return self.masked("prefix", Prefix.tensors(key, options.length))

        def make(full_name: str) -> NetworkPrototype:
            return NetworkPrototype(full_name, prefix.through_network(prefix.network(key, options.length), key), options.group)

        return self._view("prefix", make, dict.fromkeys(("keys", "values"), (options.length, key.shape[0])))

    def _view(self, name: str, make: Callable[[str], Prototype], sizes: Mapping[str, tuple[int, ...]]) -> Masked:
        from compressor.deltas.sources import Masked, unused_name

        name = name if self.options.share else f"{name}.{self.views}"
        self.views += 1
        if name not in self.made:
            self.made[name] = make(unused_name(self.model, f"{self.options.group}.{name}"))
        prototype = self.made[name]
        if any(prototype.size(part) != size for part, size in sizes.items()):
            raise UserError("E407", f"the blocks' {name} differ in size: one prototype cannot serve all", "Use adapter or lora")
        return Masked(prototype, self.mask_over(prototype), self._of_tasks(name, prototype), self.options.combine)

    def mask_over(self, prototype: Prototype) -> Scores | FixedMasks:
        """A newly initialized mask: scores, or a draw that stays; of no tensor where it would hide nothing."""
        from compressor.deltas.sources import FixedMasks, Scores

        if not has_masks(self.options):
            return FixedMasks({})
        make = Scores if learns_masks(self.options) else FixedMasks.drawn
        return make(prototype, self.options.keep)

    def _of_tasks(self, name: str, prototype: Prototype) -> TaskScores | None:
        """The tasks' masks over a prototype, one object shared by all blocks; None with a single task, or without masks."""
        from compressor.training.multitask import TaskScores

        if self.tasks is not None and has_masks(self.options) and name not in self.task_scores:
            self.task_scores[name] = TaskScores(self.tasks, [self.mask_over(prototype) for _ in self.tasks.names])
        return self.task_scores.get(name)


def has_masks(options: Options) -> bool:
    """Whether blocks, and tasks, have masks: with `keep: 1` they would hide nothing, and there are none to store or to join."""
    return options.keep < 1


def learns_masks(options: Options) -> bool:
    """Whether masks have scores that are trained."""
    return options.masks == "learned" and has_masks(options)


def attach_prototypes(model: nn.Module, options: Options) -> None:
    """Attach the masked prototype to every block. Each of `modules` has its own prototype, as q and v in the paper."""
    ATTACH[options.shared](model, options, Prototypes(model, options))


def _share_adapter(model: nn.Module, options: Options, prototypes: Prototypes) -> None:
    from compressor.deltas.inserts import insert
    from compressor.deltas.kinds.adapter import Adapter
    from compressor.models.anatomy import matrices_of

    for matrix in matrices_of(model, adapter.BEHIND["pfeiffer"]):
        # both projections are initialized randomly: a mask over zeros gets no gradient
        tensors = Adapter.tensors(matrix.original[:, 0], options.bottleneck, std=0.02)
        insert(matrix.owner, Adapter(prototypes.masked("adapter", tensors), options.group))


def _share_lora(model: nn.Module, options: Options, prototypes: Prototypes) -> None:
    from compressor.deltas.kinds.low_rank import LowRank
    from compressor.models.anatomy import matrices_of

    for matrix in matrices_of(model, options.modules):
        source = prototypes.masked(matrix.name, LowRank.tensors(matrix.original, options.rank))
        matrix.attach(LowRank(source, options.alpha / options.rank, options.group))


def _share_prefix(model: nn.Module, options: Options, prototypes: Prototypes) -> None:
    from compressor.deltas.inserts import insert
    from compressor.deltas.kinds.prefix import Prefix

    for attention, key in prefix.attentions(model):
        insert(attention, Prefix(prototypes.masked_prefix(key), options.group))


ATTACH = {"adapter": _share_adapter, "lora": _share_lora, "prefix": _share_prefix}


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: n + n' (L + T), prototype and one score per maskable entry (no bias), block and task.

    Without sharing (n + n' (1 + T)) L; masks that are random have no scores, and with `keep: 1` there are no masks.
    """
    total = 0
    for entries in views(shape, options).values():
        prototypes = entries if not options.share else entries[:1]
        total += sum(trained for trained, _ in prototypes)
        if learns_masks(options):
            total += sum(masked for _, masked in entries) + options.tasks * sum(masked for _, masked in prototypes)
    return total


def prototypes_alone(shape: ModelShape, options: Options, before: ModelShape, uneven: Collection[str]) -> int:
    """Number of parameters of the stored prototypes: their masks are fixed, and no network computes them any more.

    A block that is smaller than in `before`, where they were trained, has its masked part as tensors of its own; so may every
    block of which an `uneven` module lost rows or columns.
    """
    stored, total = replace(options, reparametrize=False), 0
    whole = {name: entries[0][0] for name, entries in views(before, stored).items() if entries}
    for name, entries in views(shape, stored).items():
        apart = not options.share or ("key" if name == "prefix" else name) in uneven
        own = [trained for trained, _ in entries if apart or trained != whole[name]]
        total += sum(own) + (whole[name] if len(own) < len(entries) else 0)
    return total


def unused(settings: object) -> dict[str, str]:
    """The key that only learned masks use, where none is learned: what leaves it without use."""
    why = "masks: random" if settings.masks == "random" else "keep: 1" if settings.keep == 1 else ""
    return {"mask_learning_rate": why} if why else {}


def sized_alike(options: Options) -> tuple[str, ...]:
    """The modules that fix the size of a prototype which all blocks share; none for adapters, which are of the hidden size."""
    return {"lora": options.modules, "prefix": ("key",), "adapter": ()}[options.shared] if options.share else ()


def views(shape: ModelShape, options: Options) -> dict[str, list[tuple[int, int]]]:
    """(trained scalars of the tensors, entries that are masked) of every block, by the prototype that they share."""
    if options.shared == "adapter":
        b = options.bottleneck
        hidden = [rows for _, rows, _ in shape.matrices(adapter.BEHIND["pfeiffer"])]
        return {"adapter": [(adapter.size(d, b), 2 * b * d) for d in hidden]}
    if options.shared == "prefix":
        keys = [rows for _, rows, _ in shape.matrices(("key",))]
        behind = [prefix.network_size(shape, options.length, (rows,)) for rows in keys]
        plain = [2 * options.length * rows for rows in keys]
        return {"prefix": list(zip(behind if options.reparametrize else plain, plain, strict=True))}
    sizes: dict[str, list[tuple[int, int]]] = {}
    for name, rows, columns in shape.matrices(options.modules):
        entries = options.rank * (rows + columns)
        sizes.setdefault(name, []).append((entries, entries))
    return sizes


METHOD = Method(
    name="propetl",
    summary="one prototype adapter, LoRA or prefix for all blocks, a learned mask in each",
    formula="n + n'L (n prototype, n' what is masked), of T tasks n + n'(L + T); not shared: (n + n')L",
    attach=attach_prototypes,
    count=count,
    continued=prototypes_alone,
    sized_alike=sized_alike,
    learning_rate=1e-3,
    source="Zeng et al. 2023 (ProPETL), sections 3.2 to 3.4, table 4 and appendix A.3",
    reads=(
        *("modules", "rank", "alpha", "bottleneck", "length", "reparametrize", "shared", "keep", "mask_learning_rate"),
        *("share", "masks"),
    ),
    many_tasks=True,
    task_masks=True,
    scores=("learned masks",),
    strategies=("at every step",),
    scopes=("matrix",),
    mergeable={"adapter": False, "lora": True, "prefix": False},
    kind_key="shared",
    variants={"adapter": ("bottleneck",), "lora": ("modules", "rank", "alpha"), "prefix": ("length", "reparametrize")},
    unused=unused,
    defaults={"lora": {"rank": 32, "alpha": 48.0}},
)
