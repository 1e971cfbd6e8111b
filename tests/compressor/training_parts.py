"""What the training tests run in this process and, as a program, in two: `python -m tests.compressor.training_parts OUT`."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from compressor.training import Rows, Schedule, trainer_of
from compressor.unfinished import changing
from tests.compressor.conftest import CASES, GROWING, prepared, tiny

MODULES = ("query", "value", "ffn_out")


def rows_of(count: int) -> Rows:
    """Random rows of 4 to 10 tokens; the first tells the label, the last is the end of sentence that T5 wants once in each."""
    generator = torch.Generator().manual_seed(3)
    tokens = [[*torch.randint(4, 99, (3 + i % 7,), generator=generator).tolist(), 3] for i in range(count)]
    rows = [{"input_ids": ids, "attention_mask": [1] * len(ids)} for ids in tokens]
    return Rows(rows, [ids[0] % 3 for ids in tokens])


def one_process(case: str, work: Path, batch_size: int, accumulate: int = 1) -> dict[str, Tensor]:
    """Three steps of 16 rows in float64, in order, on this process's share; returns what moved."""
    model = tiny("bert")
    prepared(model, case, MODULES, places=20)
    schedule = Schedule(epochs=1, learning_rate=1e-2, mask_learning_rate=3e-2, batch_size=batch_size, accumulate=accumulate)
    trainer_of(model, rows_of(48), 1, schedule, work, train_sampling_strategy="sequential", use_cpu=True).train()
    return {name: tensor.detach().clone() for name, tensor in changing(model).items()}


def main(out: Path) -> None:
    gc.freeze()  # Trainer collects garbage at every start
    for case in (*CASES, *GROWING):
        moved = one_process(case, out / "work", batch_size=8)
        if torch.distributed.get_rank() == 0:
            save_file(moved, out / f"{case}.safetensors")
    torch.distributed.destroy_process_group()  # or gloo's threads abort the process at its end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
