"""Many tasks in one model: every row computes what its own task's merged model does, in mixed batches."""

import copy

import pytest
import torch

from compressor.compression import compression_of
from compressor.deltas.kinds import sparse
from compressor.deltas.kinds.mask import Mask
from compressor.deltas.kinds.refit import Refit
from compressor.deltas.links import attach, merged_copy
from compressor.deltas.stacked import NO_OUTPUT
from compressor.deltas.stacking import changes_of_task, stack_tasks
from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.pruning.emptied import Constant
from compressor.pruning.surgery import Removal, remove
from compressor.storage.live import set_head, strip
from tests.compressor.conftest import APPLIES, HEADS, NEURONS, TRIED, encoding, tiny, tuned

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


def test_many_positions(monkeypatch):
    monkeypatch.setattr(sparse, "FEW", 2)
    check(*stacked("deberta-v2", ("dsee", "selective", "lora")))


def test_a_task_may_change_what_others_do_not():
    model, merged = stacked("bert", ("lora", "bitfit"))
    names = [name for name, buffer in model.named_buffers() if name.endswith("slots") and buffer is not None]
    assert len(names) > 3  # query: only the first task; biases: only the second
    check(model, merged, torch.tensor([1, 0, 0, 1]))


@pytest.mark.parametrize(("case", "kind"), [("prefix", "prefix"), ("mixout", "offset"), ("child_tuning-d", "sparse")])
def test_what_cannot_be_stacked_is_refused(case, kind):
    """A prefix, a matrix of values for every entry; a dense method that keeps few is a sparse delta."""
    model, tasks = tiny("bert"), []
    for number, method in enumerate(("lora", case)):
        tuned(model, method)
        tasks.append(changes_of_task(model, f"task{number}", f"{method}.safetensors"))
        strip(model)
    if kind == "sparse":
        stack_tasks(model, tasks)
        return
    with pytest.raises(UserError, match=rf"E776 {case}.safetensors: task 'task1': a change of kind '{kind}'"):
        stack_tasks(model, tasks)


def with_mask(model, keep):
    layer = layers_of(model)[0].linear("key")
    attach(layer, Mask(keep))
    return model


def test_masks_and_refits_that_all_tasks_share_are_of_the_base():
    model, tasks, merged = tiny("bert"), [], []
    keep = torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) > 0.3
    for number in range(2):
        attach(layers_of(with_mask(tuned(model, "lora"), keep))[1].linear("query"), Refit(torch.full((32, 32), 0.1).double()))
        tasks.append(changes_of_task(model, f"task{number}"))
        merged.append(merged_copy(model))
        strip(model)
    base = copy.deepcopy(model)
    check(stack_tasks(model, tasks), merged, torch.tensor([0, 1, 1]))
    tasks[1].links["bert.encoder.layer.0.attention.self.key"] = [Mask(~keep)]
    with pytest.raises(UserError, match=r"E776 .*'task0': a change of kind 'mask' on bert.encoder.layer.0"):
        stack_tasks(base, tasks)


def test_a_sublayer_without_units_may_be_changed():
    """By the refit of the base, which all tasks have, and by each task."""
    model, tasks, merged = tiny("bert"), [], []
    remove(model, {0: Removal(neurons=range(NEURONS)), 1: Removal(heads=range(HEADS))})
    empty = [module for module in model.modules() if isinstance(module, Constant)]
    for number, case in enumerate(("lora", "bitfit", "adapter")):
        for module in empty:
            attach(module, Refit(torch.full_like(module.bias, 0.3)), "bias")
        tuned(model, case)
        tasks.append(changes_of_task(model, f"task{number}"))
        merged.append(merged_copy(model))
        strip(model)
    assert len(empty) == 2
    check(stack_tasks(model, tasks), merged, torch.tensor([0, 1, 2, 1]))


def test_a_norm_that_is_computed_once_for_all_rows_is_refused():
    model, _ = stacked("deberta-v2", ("bitfit", "lora"))
    with pytest.raises(UserError, match="E776 a LayerNorm that is computed once for all rows"):
        model(**rows_of(TASKS % 2), task=TASKS % 2)
