"""Many tasks in one model: every row computes what its own task's merged model does, in mixed batches."""

import pytest
import torch

from compressor.compression import compression_of
from compressor.deltas.links import merged_copy
from compressor.deltas.stacked import NO_OUTPUT
from compressor.deltas.stacking import changes_of_task, stack_tasks
from compressor.storage.live import set_head, strip
from tests.compressor.conftest import APPLIES, TRIED, encoding, tiny, tuned

MIXED = ("dsee", "lora", "bitfit", "adapter", "selective", "vera")
"""Cases that one model holds together, as far as an architecture has them."""
CLASSES = (3, 2, 1)
TASKS = torch.tensor([2, 0, 1, 1, 2, 0])


def new_head(model, classes, seed):
    """Another random task head, for `classes` outputs."""
    generator = torch.Generator().manual_seed(seed)
    head = {}
    for name in compression_of(model).head_parameters:
        shape = model.get_parameter(name).shape
        shape = (classes, *shape[1:]) if shape[0] == model.config.num_labels else shape
        head[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    set_head(model, head, [str(label) for label in range(classes)])


def stacked(name, cases):
    """(the model of the cases, one a task; each task's merged model)."""
    model, tasks, merged = tiny(name), [], []
    for number, case in enumerate(cases):
        new_head(model, CLASSES[number % len(CLASSES)], number)
        tuned(model, case, ("query", "value") if number % 2 == 0 else ("query", "ffn_out"))
        tasks.append(changes_of_task(model, f"task{number}"))
        merged.append(merged_copy(model))
        strip(model)
    return stack_tasks(model, tasks), merged


def rows_of(tasks):
    batch = encoding()
    return {name: values[torch.arange(len(tasks)) % len(values)] for name, values in batch.items()}


def check(model, merged, tasks=TASKS):
    batch = rows_of(tasks)
    with torch.no_grad():
        got = model(**batch, task=tasks)["logits"]
        for row, task in enumerate(tasks.tolist()):
            one = {name: values[row : row + 1] for name, values in batch.items()}
            want = merged[task].eval()(**one).logits[0]
            assert torch.allclose(got[row, : len(want)], want, atol=1e-10, rtol=0)
            assert (got[row, len(want) :] <= NO_OUTPUT / 2).all()


@pytest.mark.parametrize("name", TRIED)
def test_every_row_is_its_own_tasks(name):
    # DeBERTa normalizes its relative positions once for all rows
    cases = [case for case in MIXED if (case, name) in APPLIES and (case, name) != ("bitfit", "deberta-v2")]
    model, merged = stacked(name, cases)
    check(model, merged, torch.arange(2 * len(cases)) % len(cases))
