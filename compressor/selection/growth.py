"""Ω that grows during training: ID3's step-by-step unmasking, and for comparison a new choice at every step.

One vector holds the values of all positions, of whatever matrix. Nothing is masked: unchosen weights are not parameters, so
they keep their bits. A position added late has its own step count, so Adam's bias correction is right from its first update
(with a count shared by the tensor that update would be up to 3.2 times too large).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from compressor.deltas.kinds.sparse import Sparse, add_at
from compressor.deltas.links import Change, Delta
from compressor.deltas.sources import top_mask
from compressor.errors import UserError
from compressor.models.anatomy import Matrix
from compressor.selection.allocation import RECORDED, recorded_steps, sparsity_entropy, tensor_sparsity
from compressor.selection.budget import require_unmasked
from compressor.selection.finite import require_finite
from compressor.selection.gradients import Heuristic

COHORTS = 32
"""Largest number of times that Ω grows with `schedule: cohorts`."""

NEVER = -1.0
"""Score of an entry that is not to be chosen; all others have 0 or more."""


def choice_steps(steps: int, schedule: str) -> list[int]:
    """The steps (from 1) in which entries are chosen: all with `exact`, with `cohorts` at most 32, evenly spaced."""
    times = steps if schedule == "exact" else min(COHORTS, steps)
    return [1 + number * steps // times for number in range(times)]


def growth_targets(budget: int, steps: int, schedule: str, stops: Collection[int] = ()) -> dict[int, int]:
    """Step (from 1) -> number of entries chosen from then on; the last target is `budget`.

    `exact` grows at every step by B/T (ID3 section 3), `cohorts` at most 32 times. If B is smaller than the number of times,
    positions are added evenly spaced, one at a time. Each of `stops` that a step would skip is a target, too.
    """
    at = choice_steps(steps, schedule)
    natural = [budget * (number + 1) // len(at) for number in range(len(at))]
    halts = _halts(natural, sorted(stops))
    targets: dict[int, int] = {}
    for number, target in enumerate(natural):
        reached = max(targets.values(), default=0)
        ahead = min((stop for place, stop in halts.items() if place > number), default=budget + 1)
        target = halts.get(number, target)
        if reached < target < ahead:
            targets[at[number]] = target
    return targets


def _halts(natural: list[int], stops: list[int]) -> dict[int, int]:
    """For each stop the index of the growth step with the nearest target, in order; the last growth step is left free."""
    halts: dict[int, int] = {}
    first = 0
    for remaining, stop in zip(range(len(stops), 0, -1), stops, strict=True):
        free = range(first, len(natural) - remaining)
        if not free:
            break
        number = min(free, key=lambda place: abs(natural[place] - stop))
        halts[number], first = stop, number + 1
    return halts


class Growth(Change):
    """The chosen entries of `matrices` and their values.

    `values` (B,) is the one parameter; `matrix` (B,) is the number of an entry's matrix, `index` (B,) its flat index there;
    the first `count` are in use. `schedule` determines when their number grows; with `repeat` all are chosen again each time,
    and deselected entries return to their initial value. With `freeze` they stop at the value that they have: it is then in
    `stopped_N` (out, in) of matrix N, from which it goes on if the entry is chosen again. `allotted` (RECORDED, 1 + matrices)
    holds steps, from 1, and how many entries each matrix had then; 0 behind the last one.
    """

    kind = "growth"

    @property
    def moving(self) -> tuple[str, ...]:
        stopped = (f"stopped_{number}" for number in range(len(self.matrices) * self.freeze))
        return ("matrix", "index", "count", "allotted", *stopped)

    def __init__(
        self,
        matrices: Sequence[Matrix],
        budget: int,
        *,
        heuristic: Heuristic,
        schedule: str = "cohorts",
        repeat: bool = False,
        freeze: bool = False,
        group: str = "",
    ):
        super().__init__()
        like = matrices[0].original
        self.matrices, self.schedule = tuple(matrices), schedule
        self.values = nn.Parameter(like.new_zeros(budget))
        self.register_buffer("matrix", torch.zeros(budget, dtype=torch.int32, device=like.device))
        self.register_buffer("index", torch.zeros(budget, dtype=torch.int64, device=like.device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("allotted", torch.zeros(RECORDED, 1 + len(matrices), dtype=torch.int64, device=like.device))
        self.heuristic, self.repeat, self.freeze, self.group = heuristic, repeat, freeze, group
        for number, matrix in enumerate(matrices if freeze else ()):
            self.register_buffer(f"stopped_{number}", torch.zeros_like(matrix.original, memory_format=torch.contiguous_format))
        self.gradients: dict[int, Tensor] = {}
        self.listening = False

    def slots(self, number: int) -> Tensor:
        """Positions in `values` of the entries of matrix `number`."""
        used = int(self.count)
        if not used:  # also for a weightless model, whose values cannot be read
            return torch.empty(0, dtype=torch.int64, device=self.values.device)
        return (self.matrix[:used] == number).nonzero().flatten()

    def stopped_values(self, number: int) -> Tensor | None:
        """Values (out, in) at which deselected entries of matrix `number` stopped, 0 elsewhere; None without `freeze`."""
        return self.get_buffer(f"stopped_{number}") if self.freeze else None

    def record(self, row: int, step: int) -> None:
        """Write into a row of `allotted` how many entries each matrix has in a step; those that stopped moved, too."""
        numbers = self.matrix[: int(self.count)].long()
        counts = torch.zeros_like(self.allotted[row, 1:]).index_add_(0, numbers, torch.ones_like(numbers))
        if self.freeze:
            counts += torch.stack([self.stopped_values(number).count_nonzero() for number in range(len(self.matrices))])
        self.allotted[row, 0], self.allotted[row, 1:] = step, counts

    @property
    def allocation(self) -> dict[str, Any]:
        """The recorded steps and their statistics, as JSON: the `budget`; `matrices` with path, module and entries; of each of
        `steps` the entries of Ω in all, the share of matrices without any, the entropy of the shares, and the entries in each
        matrix."""
        sizes = [matrix.original.numel() for matrix in self.matrices]
        rows = [(step, counts) for step, *counts in self.allotted.tolist() if step]
        return {
            "budget": len(self.values),
            "matrices": [
                {"path": matrix.path, "module": matrix.name, "entries": size}
                for matrix, size in zip(self.matrices, sizes, strict=True)
            ],
            "steps": [
                {
                    "step": step,
                    "chosen": sum(counts),
                    "tensor_sparsity": tensor_sparsity(counts),
                    "entropy": sparsity_entropy(counts, sizes),
                    "entries": counts,
                }
                for step, counts in rows
            ],
        }

    def by_matrix(self, values: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Path of each matrix, and the part of a vector (B,) that belongs to its chosen entries."""
        return ((matrix.path, values[self.slots(number)]) for number, matrix in enumerate(self.matrices))

    def scores(self, matrix: Matrix, gradient: Tensor, step: int) -> Tensor:
        """Scores (out, in) of the entries of a matrix by its gradient, NEVER where a mask hides them.

        Raises UserError E409 where one is not finite.
        """
        scores = self.heuristic(gradient, matrix.weight)
        require_finite(scores, f"in step {step} the scores |g|/(|θ|+eps)^exp of {matrix.path}", "Use an exp closer to 0")
        return scores if matrix.mask is None else torch.where(matrix.mask.keep, scores, NEVER)

    def gradient(self, number: int) -> Tensor:
        """This step's gradient (out, in) of matrix `number`; 0 where the forward pass does not use it."""
        total = self.gradients.get(number)
        return torch.zeros_like(self.matrices[number].original) if total is None else total

    def add_gradient(self, number: int, gradient: Tensor) -> None:
        """Accumulate a micro-batch's gradient (out, in) of matrix `number`."""
        total = self.gradients.get(number)
        self.gradients[number] = gradient.detach().clone() if total is None else total + gradient.detach()


class Growing(Delta):
    """W + P_Ω(S) with Ω still growing, for one matrix of a `Growth`. Replaced by `Sparse` when training is done."""

    kind = "growing"
    settles_factorable = True

    def __init__(self, growth: Growth, number: int):
        super().__init__()
        # in a tuple, so that it is registered as a submodule only once, not for every link
        self._growth, self.number, self.group = (growth,), number, growth.group

    @property
    def growth(self) -> Growth:
        return self._growth[0]

    def change(self, weight: Tensor) -> Tensor:
        slots, frozen = self.growth.slots(self.number), self.growth.stopped_values(self.number)
        if frozen is not None:  # selected, not added as 0: elsewhere even the sign of a zero is preserved
            weight = torch.where(frozen != 0, weight + frozen, weight)
        changed = add_at(weight, self.growth.index[slots], self.growth.values[slots])
        if self.growth.listening and changed.requires_grad:
            changed.register_hook(lambda gradient: self.growth.add_gradient(self.number, gradient))
        return changed

    def settled(self) -> Sparse:
        """A plain sparse link on the entries chosen so far."""
        slots, frozen = self.growth.slots(self.number), self.growth.stopped_values(self.number)
        index, values = self.growth.index[slots], self.growth.values.detach()[slots]
        if frozen is not None:
            stopped = frozen.flatten().nonzero().flatten()
            index, values = torch.cat([index, stopped]), torch.cat([values, frozen.flatten()[stopped]])
        index, order = index.sort()
        link = Sparse(index, values[order].clone(), self.group)
        link.place = self.place
        return link


@dataclass(frozen=True)
class Grower:
    """A growth and its size at each step; `on_stop` is called with each of `stops` before Ω grows beyond it. The allocation is
    recorded in the steps `recorded`."""

    growth: Growth
    targets: dict[int, int]
    stops: Collection[int] = ()
    on_stop: Callable[[int], None] = lambda places: None
    recorded: tuple[int, ...] = ()

    def before(self, step: int) -> None:
        """Start recording the gradients of `step` (from 1) if entries are chosen in it."""
        self.growth.listening = step in self.targets
        self.growth.gradients.clear()
        if step in self.targets and int(self.growth.count) in self.stops:
            self.on_stop(int(self.growth.count))

    @torch.no_grad()
    def choose(self, step: int, optimizer: ScalarAdamW, require: Callable[[Tensor, str], None] = require_finite) -> None:
        """Choose entries between backward and the optimizer's step, and give new entries the gradient they would have had.

        `require` is called with the gradients of every matrix and their name, and raises where they are not finite. Raises
        UserError E409 where the scores of finite gradients are not.
        """
        if step not in self.targets:
            return
        growth = self.growth
        gradients = [growth.gradient(number) for number in range(len(growth.matrices))]
        _average(gradients)
        for gradient, matrix in zip(gradients, growth.matrices, strict=True):
            require(gradient, f"the gradients of {matrix.path}")
        scores = torch.cat(
            [
                growth.scores(matrix, gradient, step).flatten()
                for gradient, matrix in zip(gradients, growth.matrices, strict=True)
            ]
        )
        device = growth.index.device
        starts = torch.tensor([0, *[matrix.original.numel() for matrix in growth.matrices]], device=device).cumsum(0)
        used = int(growth.count)
        current = starts[growth.matrix[:used].long()] + growth.index[:used]
        if growth.repeat:
            chosen = top_mask(scores, self.targets[step]).nonzero().flatten()
            kept = torch.isin(current, chosen)
            optimizer.forget((~kept).nonzero().flatten())
            fresh, slots = chosen[~torch.isin(chosen, current)], (~kept).nonzero().flatten()
            slots = torch.cat([slots, torch.arange(used, self.targets[step], device=device)])
        else:
            scores[current] = NEVER
            fresh = top_mask(scores, self.targets[step] - used).nonzero().flatten()
            slots = torch.arange(used, self.targets[step], device=device)
        number = torch.searchsorted(starts, fresh, right=True) - 1
        if growth.freeze:
            _swap_frozen(growth, slots, starts, fresh)
        else:
            growth.values[slots] = 0.0
        growth.matrix[slots], growth.index[slots] = number.to(torch.int32), fresh - starts[number]
        growth.values.grad[slots] = torch.cat([gradient.flatten() for gradient in gradients])[fresh]
        growth.count.fill_(self.targets[step])
        if step in self.recorded:
            growth.record(self.recorded.index(step), step)


def _swap_frozen(growth: Growth, slots: Tensor, starts: Tensor, fresh: Tensor) -> None:
    """Store the values of the entries that now leave `slots`, and take those of the `fresh` entries that come there.

    `starts` are the flat positions at which the matrices begin, `fresh` flat positions over all of them.
    """
    left, values = slots[slots < int(growth.count)], torch.zeros_like(growth.values[slots])
    for number in range(len(growth.matrices)):
        frozen, begin, end = growth.stopped_values(number).view(-1), starts[number], starts[number + 1]
        out = left[growth.matrix[left] == number]
        frozen[growth.index[out]] = growth.values[out]
        here = (fresh >= begin) & (fresh < end)
        places = fresh[here] - begin
        values[here] = frozen[places]
        frozen[places] = 0.0
    # only now: a slot may go from an entry of a later matrix to one of an earlier matrix
    growth.values[slots] = values


def _average(gradients: list[Tensor]) -> None:
    """Average over processes, as is done with the parameters' gradients."""
    if dist.is_available() and dist.is_initialized():
        for gradient in gradients:
            dist.all_reduce(gradient)
            gradient /= dist.get_world_size()


def plant(model: nn.Module, growth: Growth) -> None:
    """Attach growing links to the growth's matrices in a frozen model; `model.growth` then holds the trainable values.

    Raises UserError E401 if the budget is zero, or more than the matrices have entries that no mask hides.
    """
    require_unmasked(growth.matrices, len(growth.values))
    model.growth = growth
    for number, matrix in enumerate(growth.matrices):
        matrix.attach(Growing(growth, number))


def grower_of(
    model: nn.Module, steps: int, stops: Collection[int] = (), on_stop: Callable[[int], None] = lambda places: None
) -> Grower:
    """The grower of a model prepared by `plant`, for a training of `steps`. Raises UserError E408 for unreachable stops."""
    growth = model.growth
    budget = len(growth.values)
    if growth.repeat:  # the whole budget in every choice, also where growing would leave some out
        targets = dict.fromkeys(choice_steps(steps, growth.schedule), budget)
        return Grower(growth, targets, recorded=recorded_steps(targets))
    targets = growth_targets(budget, steps, growth.schedule, stops)
    missed = sorted(set(stops) - set(targets.values()))
    if missed:
        what = f"Ω is never exactly {missed[0]} places: it grows {len(targets)} times to {budget}"
        raise UserError("E408", what, "Drop that checkpoint, or train longer")
    return Grower(growth, targets, stops, on_stop, recorded_steps(targets))


class ScalarAdamW(torch.optim.AdamW):
    """AdamW in which every scalar of a `Growth` has its own step count. Other parameters are left to torch."""

    def __init__(self, parameters, growth: Growth, **arguments):
        super().__init__(parameters, **arguments)
        self.growth = growth

    @torch.no_grad()
    def step(self, closure=None):
        values, gradient = self.growth.values, self.growth.values.grad
        values.grad = None
        loss = super().step(closure)
        values.grad = gradient
        if gradient is not None:
            self._step_values(gradient)
        return loss

    def _own_state(self) -> dict[str, Tensor]:
        values = self.growth.values
        if not self.state[values]:
            self.state[values] = {name: torch.zeros_like(values) for name in ("step", "exp_avg", "exp_avg_sq")}
        return self.state[values]

    def _step_values(self, gradient: Tensor) -> None:
        """AdamW's update (Loshchilov and Hutter 2019, algorithm 2) with a step count per scalar."""
        values, state = self.growth.values, self._own_state()
        group = next(group for group in self.param_groups if any(parameter is values for parameter in group["params"]))
        beta1, beta2 = group["betas"]
        used = slice(0, int(self.growth.count))
        step, mean, square, gradient = state["step"][used], state["exp_avg"][used], state["exp_avg_sq"][used], gradient[used]
        step += 1
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        values[used] *= 1 - group["lr"] * group["weight_decay"]
        size = group["lr"] / (1 - beta1**step)
        values[used] -= size * mean / ((square / (1 - beta2**step)).sqrt() + group["eps"])

    def forget(self, slots: Tensor) -> None:
        """Reset the optimizer state of these scalars: they now belong to another entry."""
        for tensor in self._own_state().values():
            tensor[slots] = 0.0
