"""`prune: {refit: ROWS}`: refit the outgoing matrices of a pruned model on training rows."""

from __future__ import annotations

from dataclasses import asdict
from statistics import fmean
from typing import Any

from torch import nn

from compressor.accelerator import accelerated
from compressor.pruning.refit import RIDGE, passes, refit
from compressor.tasks.data import Data, tensor_batches
from pipelines.engine.stage import Workspace


def refitted(count: int, before: nn.Module, model: nn.Module, data: Data, workspace: Workspace) -> dict[str, Any]:
    """Refit `model` in place to what `before`, merged, computes on `count` training rows; returns the record.

    Raises UserError E521.
    """
    rows = data.train.sample(count)
    batches = [inputs for inputs, _ in tensor_batches(rows, data.pad_id, data.batch_size)]
    with workspace.progress("refitting outgoing matrices", passes(model) * len(rows)) as bar, accelerated(before, model):
        sublayers = refit(before, model, batches, bar.advance)
    errors = [fmean([getattr(sublayer, when) for sublayer in sublayers] or [0]) for when in ("before", "after")]
    sentence = "refit on {} rows: mean squared error of a sublayer {:.1%} -> {:.1%}".format(len(rows), *errors)
    workspace.say(sentence)
    return {"rows": len(rows), "ridge": RIDGE, "sublayers": [asdict(sublayer) for sublayer in sublayers], "told": sentence}
