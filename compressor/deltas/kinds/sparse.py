"""W + P_Ω(S): the link of every method that trains single weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compressor.deltas.links import Delta, Factor, Stack

THIN = 1 / 1000
"""Density of Ω up to which gathering a value's columns is cheaper than the gradient of the whole matrix."""

FEW = 128
"""Positions of a slot up to which they are stored as the integers that runtimes index by: converting them takes an operator."""


def add_at(weight: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """`weight` (any shape) with `values` (N,) added at flat indices `index` (N,)."""
    # index_add on the flat view instead of adding a dense matrix: adding 0.0 would turn -0.0 into 0.0 outside Ω
    return weight.flatten().index_add(0, index, values).view(weight.shape)


class Sparse(Delta):
    """W + P_Ω(S): trainable values on a fixed support Ω (DSEE section 3.2; every static selective method).

    `omega` holds the sorted flat indices of Ω as int32. Only its |Ω| values are stored: no dense S and no gradient masks, so
    entries outside Ω stay bit-identical with any optimizer.
    """

    kind = "sparse"
    factorable = True

    def __init__(self, omega: Tensor, values: Tensor, group: str = ""):
        super().__init__()
        self.register_buffer("omega", omega.to(torch.int32))
        self.values, self.group = nn.Parameter(values), group

    @classmethod
    def start(cls, weight: Tensor, omega: Tensor, group: str = "") -> Sparse:
        """A newly initialized link for `weight` (out, in); `omega` (N,) sorted flat indices into it."""
        return cls(omega, weight.new_zeros(omega.numel()), group)

    def change(self, weight: Tensor) -> Tensor:
        return add_at(weight, self.omega, self.values)

    def cut(self, shape: tuple[int, ...], rows: Tensor, columns: Tensor) -> Sparse:
        width, device = math.prod(shape[1:]), self.omega.device
        rows, columns = rows.to(device), columns.to(device) if len(shape) > 1 else rows.new_zeros(1, device=device)
        row, column = self.omega.long() // width, self.omega.long() % width
        kept = torch.isin(row, rows) & torch.isin(column, columns)
        new_row, new_column = torch.searchsorted(rows, row[kept]), torch.searchsorted(columns, column[kept])
        return Sparse(new_row * len(columns) + new_column, self.values.detach()[kept].clone(), self.group)

    def entries(self) -> tuple[Tensor, Tensor]:
        return self.omega, self.values.detach()

    def support(self) -> Tensor:
        return self.omega.long()

    def suits(self, shape: torch.Size) -> bool:
        omega, count = self.omega, self.omega.numel()
        return self.values.shape == omega.shape and (not count or bool(0 <= omega.min() <= omega.max() < shape.numel()))

    def separable(self, size: int) -> bool:
        return self.values.numel() <= THIN * size

    def trained(self) -> tuple[Tensor, ...]:
        return (self.values,)

    def gradients(self, x: Tensor, gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        row, column = self.omega // x.shape[1], self.omega % x.shape[1]
        return ((gradient.index_select(1, row) * x.index_select(1, column)).sum(0),)

    def factor(self, width: int) -> Factor:
        return SparseFactor(self, width)

    def stack_key(self) -> tuple:
        return (Sparse, self.place.rows)

    @classmethod
    def stack(cls, links: Sequence[Sparse | None], shape: torch.Size) -> Stack:
        return SparseStack(links, shape)

    def to_peft(self) -> Sparse:
        return self


class SparseFactor(Factor):
    """y[row] += value · x[column] for every index of Ω; `values` (|Ω|,) in the order of the flat indices."""

    def __init__(self, link: Sparse, width: int):
        super().__init__(link)
        self.register_buffer("rows", link.omega.long() // width)
        self.register_buffer("columns", link.omega.long() % width)
        self.values = nn.Parameter(link.values.detach().clone(), requires_grad=False)

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return y.index_add(-1, self.rows, x.index_select(-1, self.columns) * self.values)


class SparseStack(Stack):
    """y[row] += value · x[column] for every index of each slot: `values`, `rows` and `columns` (slots, 1, |Ω|), padded with
    zeros at position 0 to the largest |Ω|. Many rows and columns are int16 where the matrix allows it."""

    def __init__(self, links: Sequence[Sparse | None], shape: torch.Size):
        first = next(filter(None, links))
        super().__init__(first.place.rows)
        count = max(link.omega.numel() for link in links if link)
        short = torch.int16 if max(shape) <= torch.iinfo(torch.int16).max else torch.int32
        index = torch.int64 if count <= FEW else short
        values = first.values.new_zeros(len(links), 1, count)
        places = {name: torch.zeros_like(values, dtype=index) for name in ("rows", "columns")}
        for slot, link in enumerate(links):
            if link:
                size, omega = link.omega.numel(), link.omega.long()
                values[slot, 0, :size] = link.values.detach()
                places["rows"][slot, 0, :size], places["columns"][slot, 0, :size] = omega // shape[1], omega % shape[1]
        self.values = nn.Parameter(values, requires_grad=False)
        for name, index in places.items():
            self.register_buffer(name, index)

    def product(self, x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
        values, rows, columns = (tensor.index_select(0, slot) for tensor in (self.values, self.rows, self.columns))
        shape = (-1, x.shape[1], -1)
        picked = x.gather(-1, columns.long().expand(*shape)) * values
        # scatter_add is ONNX's ScatterElements; index_put would be ScatterND, whose sums race in ONNX Runtime's threads
        return y.scatter_add(-1, rows.long().expand(*shape), picked)
