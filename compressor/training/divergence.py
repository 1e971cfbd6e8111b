"""Detection of a training that diverged: gradients and masks at every step, all trained tensors before they are stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from compressor.deltas.kinds.dense import dense_links, gates_of
from compressor.deltas.sources import Scores
from compressor.errors import UserError
from compressor.selection.finite import finite_fault
from compressor.training.schedule import Schedule

Read = Callable[[nn.Parameter], "Tensor | None"]
"""What is looked at of a parameter: its values, or its gradient if it has one."""

Fault = tuple[str, "nn.Parameter | None"]
"""What is not finite, and the parameter it belongs to."""


def mask_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The scores and gates in training, from which masks are computed."""
    scores = [parameter for module in model.modules() if isinstance(module, Scores) for parameter in module.parameters()]
    return [*scores, *(alpha for link in gates_of(dense_links(model)) for alpha in link.alphas)]


@dataclass(frozen=True)
class Watch:
    """Raises UserError E406, which names the step and the tensor, where numbers of a training are no longer finite.

    `masks` are its scores and gates: a mask of a NaN is finite, so that neither the loss nor a gradient shows it.
    """

    model: nn.Module
    schedule: Schedule
    steps: int
    masks: Sequence[nn.Parameter]

    def gradient_norm(self, step: int) -> Tensor:
        """Norm of all gradients together in `step` (from 1). Raises UserError E406 if it, or a score or gate, is not finite."""
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None])
        if not math.isfinite(norm + nn.utils.get_total_norm(self.masks, 1.0)):  # a sum: large squares would overflow
            self.require_trained(step - 1)
            raise self._gradient_fault(step)
        return norm

    def clip(self, step: int, most: float) -> Tensor:
        """Clip all gradients together to the norm `most`; returns the norm before. Raises UserError E406.

        Not by Trainer, which multiplies all gradients by a norm that is NaN: the tensor at fault could no longer be named.
        """
        norm = self.gradient_norm(step)
        nn.utils.clip_grads_with_norm_(self.model.parameters(), most, norm)
        return norm

    def require(self, step: int, values: Tensor, name: str) -> None:
        """Raise UserError E406 where values computed in `step` (from 1), called `name`, are not finite."""
        if fault := finite_fault(values, name):
            raise self._diverged(f"in step {step}", step - 1, [(fault, None)])

    def require_trained(self, step: int) -> None:
        """Raise UserError E406 where a trained tensor is not finite after `step`."""
        if faults := self._faults(lambda parameter: parameter.detach(), "the values of"):
            raise self._diverged(f"after step {step}", step, faults)

    def _gradient_fault(self, step: int) -> UserError:
        faults = self._faults(lambda parameter: parameter.grad, "the gradients of")
        if not faults:
            tensors = self._tensors(lambda parameter: parameter.grad)
            name, _, parameter = max(tensors, key=lambda row: float(row[1].double().norm()))
            faults = [(f"the gradients of {name} are so large that their norm is infinite", parameter)]
        return self._diverged(f"in step {step}", step - 1, faults)

    def _faults(self, read: Read, called: str) -> list[Fault]:
        """What is wrong with every tensor that is not finite, in the order of the model."""
        tensors = self._tensors(read)
        return [
            (fault, parameter) for name, values, parameter in tensors if (fault := finite_fault(values, f"{called} {name}"))
        ]

    def _tensors(self, read: Read) -> Iterator[tuple[str, Tensor, nn.Parameter]]:
        """Name, `read` and parameter of all that is trained; the one vector of a growing Ω in parts, named by matrix."""
        growth = getattr(self.model, "growth", None)
        for name, parameter in self.model.named_parameters():
            values = read(parameter) if parameter.requires_grad else None
            if values is None:
                continue
            parts = growth.by_matrix(values) if growth is not None and parameter is growth.values else [(name, values)]
            yield from ((part, entries, parameter) for part, entries in parts)

    def _diverged(self, where: str, finished: int, faults: Sequence[Fault]) -> UserError:
        """The error for `faults` after `finished` steps. It names the last one: nearest to the loss, from where NaN spreads."""
        what, parameter = faults[-1]
        more = f", as do those of {len(faults) - 1} tensors before it" if len(faults) > 1 else ""
        what = f"training diverged at {self._rate(parameter)}, {where} of {self.steps}: {what}{more}"
        if finished:
            return UserError("E406", what, "Lower it, e.g. to a third of that")
        return UserError("E406", what, "Nothing was trained yet: use a model whose weights and outputs are finite")

    def _rate(self, parameter: nn.Parameter | None) -> str:
        """The key of the learning rate of a parameter, and its value."""
        rate = self.schedule.learning_rate
        if any(parameter is mask for mask in self.masks):
            return f"mask_learning_rate {self.schedule.mask_learning_rate or rate:g}"
        if any(link.projected for link in gates_of(dense_links(self.model))):
            return f"final_learning_rate {self.schedule.final_learning_rate or rate:g}"
        return f"learning_rate {rate:g}"
