"""W + diag(b) B diag(d) A with frozen random A and B: VeRA, two trained vectors a matrix."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from compressor.deltas.kinds.low_rank import MOST_ENTRIES, LowRank
from compressor.deltas.links import Delta, Factor, Stack
from compressor.deltas.sources import PlainTensors, Prototype, Shared

START = 0.1
"""Initial value of every entry of d; b starts at 0 (Kopiczko et al. 2024, section 3.2 and table 6)."""


class Drawn(Prototype):
    """Frozen random A (rank, in) and B (out, rank) that all matrices of one shape share; a file holds their seed alone.

    Kaiming uniform in float32 on the CPU, A first: bit for bit what peft draws for a model whose matrices have the same shape.
    Raises ValueError for unreasonable sizes.
    """

    kind = "drawn"

    def __init__(self, name: str, group: str = "", *, seed: int, rank: int, out: int, into: int):
        super().__init__(name, {}, group)
        if not (rank > 0 and min(out, into) > 0 and rank * (out + into) <= MOST_ENTRIES):
            raise ValueError(f"random matrices of rank {rank} for {out} x {into}")
        self.names, self.seed, self.rank, self.shape = ("A", "B"), seed, rank, (out, into)
        generator = torch.Generator("cpu").manual_seed(seed)
        for letter, shape in (("A", (rank, into)), ("B", (out, rank))):
            bound = math.sqrt(6 / shape[1])
            drawn = torch.empty(shape, dtype=torch.float32, device="cpu").uniform_(-bound, bound, generator=generator)
            self.register_buffer(letter, drawn, persistent=False)

    def settings(self) -> dict:
        out, into = self.shape
        return {**super().settings(), "kind": self.kind, "seed": self.seed, "rank": self.rank, "out": out, "into": into}

    def to_tensors(self) -> dict[str, Tensor]:
        return {}

    @classmethod
    def from_tensors(cls, name: str, tensors: Mapping[str, Tensor], **settings) -> Drawn:
        return cls(name, **settings)


class Vera(Delta):
    """W + diag(b) B diag(d) A (Kopiczko et al. 2024, equation 2): b (out,) and d (rank,) are trained, A and B are `drawn`.

    After pruning, `rows` (out,) and `columns` (in,) are the rows of B and the columns of A that are left (int32); None: all.
    """

    kind = "vera"
    factorable = True

    def __init__(
        self, drawn: Drawn, b: Tensor, d: Tensor, rows: Tensor | None = None, columns: Tensor | None = None, group: str = ""
    ):
        super().__init__()
        self.drawn, self.group = drawn.to(b), group
        self.b, self.d = nn.Parameter(b), nn.Parameter(d)
        self.register_buffer("rows", rows)
        self.register_buffer("columns", columns)

    @classmethod
    def start(cls, weight: Tensor, drawn: Drawn, group: str = "") -> Vera:
        """A fresh link for `weight` (out, in)."""
        return cls(drawn, weight.new_zeros(weight.shape[0]), weight.new_full((drawn.rank,), START), group=group)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], shared: Shared | None = None, **settings) -> Vera:
        return cls(shared.prototype, **tensors, **settings)

    @property
    def prototype_name(self) -> str:
        return self.drawn.name

    @property
    def A(self) -> Tensor:
        """(rank, in), frozen."""
        return self.drawn.A if self.columns is None else self.drawn.A[:, self.columns]

    @property
    def B(self) -> Tensor:
        """(out, rank), frozen."""
        return self.drawn.B if self.rows is None else self.drawn.B[self.rows]

    def change(self, weight: Tensor) -> Tensor:
        return torch.addmm(weight, self.b[:, None] * self.B, self.d[:, None] * self.A)

    def cut(self, shape: tuple[int, int], rows: Tensor, columns: Tensor) -> Vera:
        b, d = self.b.detach()[rows].clone(), self.d.detach().clone()
        return Vera(self.drawn, b, d, _chosen(self.rows, rows), _chosen(self.columns, columns), self.group)

    def suits(self, shape: torch.Size) -> bool:
        rows, columns = self.drawn.shape
        sizes = _chosen_count(self.rows, rows), _chosen_count(self.columns, columns)
        return sizes == shape and self.b.shape == shape[:1] and self.d.shape == (self.drawn.rank,)

    def entries(self) -> tuple[None, Tensor]:
        return self.to_peft().entries()

    def separable(self, size: int) -> bool:
        return len(self.d) * (self.A.shape[1] + len(self.b)) <= size

    def trained(self) -> tuple[Tensor, ...]:
        return self.b, self.d

    def gradients(self, x: Tensor, gradient: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        b, d = tensors
        inner = x @ self.A.T
        return (gradient * ((inner * d) @ self.B.T)).sum(0), (((gradient * b) @ self.B) * inner).sum(0)

    def factor(self, width: int) -> Factor:
        return self.to_peft().factor(width)

    def stack_key(self) -> tuple:
        drawn = tuple(self.drawn.settings().items())
        return (
            Vera,
            self.place.rows,
            drawn,
            *(None if index is None else tuple(index.tolist()) for index in (self.rows, self.columns)),
        )

    @classmethod
    def stack(cls, links: Sequence[Vera | None], shape: torch.Size) -> Stack:
        return VeraStack(links)

    def to_peft(self) -> LowRank:
        """The same ΔW as a low-rank link: peft's VeRA knows neither pruned matrices nor parts of fused ones."""
        A, B = (self.d[:, None] * self.A).detach(), (self.b[:, None] * self.B).detach()
        link = LowRank(PlainTensors({"A": A, "B": B}), 1.0, self.group)
        link.place = self.place
        return link


class VeraStack(Stack):
    """y + (((x Aᵀ) d[slot]) Bᵀ) b[slot]: A and B are the same in all tasks, b (slots, out) and d (slots, rank) are not."""

    def __init__(self, links: Sequence[Vera | None]):
        first = next(filter(None, links))
        super().__init__(first.place.rows)
        vectors = {
            name: torch.stack([torch.zeros_like(like) if link is None else getattr(link, name).detach() for link in links])
            for name, like in (("b", first.b.detach()), ("d", first.d.detach()))
        }
        # not copied: all layers share the random matrices
        for name, tensor in {**vectors, "A": first.A.detach().T, "B": first.B.detach().T}.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))

    def product(self, x: Tensor, y: Tensor, slot: Tensor) -> Tensor:
        inner = (x @ self.A) * self.d.index_select(0, slot)[:, None]
        return y + (inner @ self.B) * self.b.index_select(0, slot)[:, None]


def _chosen(before: Tensor | None, kept: Tensor) -> Tensor:
    """The rows or columns of the drawn matrix that are left when `kept` of those `before` are (int32)."""
    return (kept if before is None else before[kept]).to(torch.int32)


def _chosen_count(index: Tensor | None, size: int) -> int | None:
    """How many of `size` rows or columns `index` chooses; None where it names others."""
    if index is None:
        return size
    return len(index) if index.numel() and 0 <= index.min() <= index.max() < size else None
