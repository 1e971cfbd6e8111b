"""W + (alpha / rank) · B A: the low-rank link of LoRA, DSEE and ProPETL."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from compressor.deltas.links import Delta, Factor, Sourced, Stack
from compressor.deltas.sources import PlainTensors, TensorSource


class LowRank(Sourced, Delta):
    """W + (alpha / rank) · B A, the low-rank update ΔW_l of DSEE section 3.2 (and of LoRA).

    A is (rank, in), drawn from N(0, 0.02²); B is (out, rank), zero, so ΔW starts at 0 (DSEE algorithm 2).
    """

    kind = "low_rank"
    factorable = True

    def __init__(self, source: TensorSource, scale: float, group: str = ""):
        super().__init__()
        self.source, self.scale, self.group = source, scale, group

    @staticmethod
    def tensors(weight: Tensor, rank: int) -> dict[str, Tensor]:
        """Initial A and B for `weight` (out, in)."""
        out_features, in_features = weight.shape
        A = torch.empty(rank, in_features, dtype=weight.dtype, device=weight.device).normal_(std=0.02)
        return {"A": A, "B": weight.new_zeros(out_features, rank)}

    @classmethod
    def start(cls, weight: Tensor, rank: int, alpha: float, group: str = "") -> LowRank:
        """A newly initialized link for `weight` (out, in)."""
        return cls(PlainTensors(cls.tensors(weight, rank)), alpha / rank, group)

    @property
    def A(self) -> Tensor:
        return self.source.read("A")

    @property
    def B(self) -> Tensor:
        return self.source.read("B")

    def change(self, weight: Tensor) -> Tensor:
        return torch.addmm(weight, self.B, self.A, alpha=self.scale)

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> LowRank:
        # blocks of unequal size cannot share a prototype: each keeps its masked part of it
        A, B = self.A.detach()[:, columns].clone(), self.B.detach()[rows].clone()
        return LowRank(PlainTensors({"A": A, "B": B}), self.scale, self.group)

    def settings(self) -> dict:
        return {**super().settings(), "scale": self.scale}

    def entries(self) -> tuple[None, Tensor]:
        if self.source.size("B")[0] * self.source.size("A")[1] > MOST_ENTRIES:
            raise ValueError("a matrix of more entries than any here has")
        return None, (self.scale * (self.B.double() @ self.A.double())).flatten()

    def suits(self, shape: torch.Size) -> bool:
        (rows, rank), (inner, columns) = self.source.size("B"), self.source.size("A")
        return (rows, columns, rank) == (*shape, inner)

    def separable(self, size: int) -> bool:
        return self.source.plain

    def trained(self) -> tuple[Tensor, ...]:
        return self.A, self.B

    def gradients(self, x: Tensor, gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        A, B = tensors
        inner = self.scale * (gradient @ B)
        return inner.T @ x, gradient.T @ (self.scale * (x @ A.T))

    def factor(self, width: int) -> Factor:
        return LowRankFactor(self)

    def stack_key(self) -> tuple:
        return (LowRank, self.place.rows)

    @classmethod
    def stack(cls, links: Sequence[LowRank | None], shape: torch.Size) -> Stack:
        return LowRankStack(links, shape)

    def to_peft(self) -> LowRank:
        return self


MOST_ENTRIES = 2**28
"""Largest number of entries of a product that is computed: 2 GiB in float64."""


class LowRankFactor(Factor):
    """y + s (x A) B with A (in, rank) and B (rank, out): transposed, the layout that an exported graph stores."""

    def __init__(self, link: LowRank):
        super().__init__(link)
        self.scale = link.scale
        self.A, self.B = (nn.Parameter(factor.detach().T.contiguous(), requires_grad=False) for factor in (link.A, link.B))

    def product(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self.scale * ((x @ self.A) @ self.B)


class LowRankStack(Stack):
    """y + (x A[slot]) B[slot]: A (slots, in, rank) and B (slots, rank, out), padded with zeros to the largest rank."""

    def __init__(self, links: Sequence[LowRank | None], shape: torch.Size):
        first = next(filter(None, links))
        super().__init__(first.place.rows)
        rank = max(link.source.size("A")[0] for link in links if link)
        A, B = first.A.new_zeros(len(links), shape[1], rank), first.B.new_zeros(len(links), rank, shape[0])
        for slot, link in enumerate(links):
            if link:
                inner = link.source.size("A")[0]
                A[slot, :, :inner], B[slot, :inner] = link.A.detach().T, link.scale * link.B.detach().T
        self.A, self.B = (nn.Parameter(factor, requires_grad=False) for factor in (A, B))

    def product(self, x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
        return y + (x @ self.A.index_select(0, slot)) @ self.B.index_select(0, slot)
