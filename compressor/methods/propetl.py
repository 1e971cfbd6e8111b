"""ProPETL (Zeng et al. 2023): all blocks share one prototype adapter, LoRA or prefix; each block learns a mask over it.

In a model of many tasks (`compressor.training.multitask.join_heads`), every task also learns a mask, shared by all blocks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compressor.compression import Tasks, compression_of
from compressor.cost import ModelShape
from compressor.errors import UserError
from compressor.methods import Method, Options, adapter, prefix

if TYPE_CHECKING:
    from torch import Tensor, nn

    from compressor.deltas.sources import Masked, Prototype
    from compressor.training.multitask import TaskScores


class Prototypes:
    """The prototypes of one model by name, created at first use, and the masks of `tasks` over each."""

    def __init__(self, options: Options, tasks: Tasks | None = None):
        self.options, self.tasks, self.made, self.task_scores = options, tasks, {}, {}

    def masked(self, name: str, tensors: dict[str, Tensor]) -> Masked:
        """The prototype called `name` behind a newly initialized mask. `tensors` initialize the prototype if it is new.

        Raises UserError E407 if a block would need a prototype of another size.
        """
        from compressor.deltas.sources import Masked, Prototype, Scores

        prototype = self.made.setdefault(name, Prototype(f"{self.options.group}.{name}", tensors, self.options.group))
        if any(prototype.size(part) != tensor.shape for part, tensor in tensors.items()):
            raise UserError("E407", f"the blocks' {name} differ in size: one prototype cannot serve all", "Use adapter or lora")
        layer = Scores(prototype, self.options.keep)
        return Masked(prototype, layer, self._of_tasks(name, prototype), self.options.combine)

    def _of_tasks(self, name: str, prototype: Prototype) -> TaskScores | None:
        """Scores of the tasks' masks over a prototype, one object shared by all blocks; None with a single task."""
        from compressor.training.multitask import TaskScores

        if self.tasks is not None and name not in self.task_scores:
            self.task_scores[name] = TaskScores(self.tasks, prototype, self.options.keep)
        return self.task_scores.get(name)


def attach_prototypes(model: nn.Module, options: Options) -> None:
    """Attach the masked prototype to every block. Each of `modules` has its own prototype, as q and v in the paper."""
    ATTACH[options.shared](model, options, Prototypes(options, compression_of(model).tasks))


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
        insert(attention, Prefix(prototypes.masked("prefix", Prefix.tensors(key, options.length)), options.group))


ATTACH = {"adapter": _share_adapter, "lora": _share_lora, "prefix": _share_prefix}


def count(shape: ModelShape, options: Options, places: int) -> int:
    """Number of trainable parameters: n + n' (L + T), prototype and one score per maskable entry (no bias), block and task."""
    if options.shared == "adapter":
        (_, hidden, _), *_ = behind = shape.matrices(adapter.BEHIND["pfeiffer"])
        return adapter.size(hidden, options.bottleneck) + (len(behind) + options.tasks) * 2 * options.bottleneck * hidden
    if options.shared == "prefix":
        keys = [2 * options.length * rows for _, rows, _ in shape.matrices(("key",))]
        return (1 + options.tasks) * keys[0] + sum(keys)
    sizes: dict[str, list[int]] = {}
    for name, rows, columns in shape.matrices(options.modules):
        sizes.setdefault(name, []).append(options.rank * (rows + columns))
    return sum((1 + options.tasks) * entries[0] + sum(entries) for entries in sizes.values())


METHOD = Method(
    name="propetl",
    summary="one prototype adapter, LoRA or prefix for all blocks, a learned mask in each",
    formula="n + n'L (n prototype, n' what is masked), of T tasks n + n'(L + T)",
    attach=attach_prototypes,
    count=count,
    learning_rate=1e-3,
    source="Zeng et al. 2023 (ProPETL), sections 3.2 to 3.4",
    reads=("modules", "rank", "alpha", "bottleneck", "length", "shared", "keep", "mask_learning_rate"),
    many_tasks=True,
    scores=("learned masks",),
    strategies=("at every step",),
    scopes=("matrix",),
    mergeable={"adapter": False, "lora": True, "prefix": False},
    identity=False,
    kind_key="shared",
    variants={"adapter": ("bottleneck",), "lora": ("modules", "rank", "alpha"), "prefix": ("length",)},
)
