"""The select stage: how many rows it scores on by gradients, over which tensors one is clipped; what is no candidate, and what
random positions are drawn by."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from compressor.deltas.kinds.mask import Mask, WeightMask
from compressor.models.anatomy import matrices_of
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.stages.select import run as select_run
from pipelines.stages.select.config import STAGE, SelectConfig
from tests.compressor.conftest import tiny
from tests.tiny import write_pipeline

ROWS = 20
FISH = {"score": "fish", "scope": "global", "count": 400}


def chosen(folder, **keys) -> dict[str, torch.Tensor]:
    """The Ω of a select stage on ROWS training rows."""
    path = write_pipeline(folder, stages=[{"select": {**FISH, **keys}}, {"tune": {"method": "selective"}}], rows=ROWS)
    made = run_pipeline(load_pipeline(path), folder / "out", until="select").artifacts["select"]
    return load_file(made.folder / "omega.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(places, other[path]) for path, places in one.items())


@pytest.mark.parametrize(
    ("keys", "reads"),
    [({}, False), ({"score": "pafi"}, False), ({"score": "sam"}, True), ({"score": "pafi", "on": "lora"}, True)],
)
def test_only_gradients_and_new_tensors_make_a_choice_depend_on_the_rows(keys, reads):
    """Then other rows or labels make it again."""
    assert STAGE.reads_data(SelectConfig(**keys)) is reads


def test_more_samples_than_rows_are_whole_passes_over_them(tmp_path):
    """Σ g² of every row, each as often: the same positions; of a pass and a half, others."""
    once, twice, more, half = (
        chosen(tmp_path / name, samples=samples)
        for name, samples in (("1", ROWS), ("2", 2 * ROWS), ("3", ROWS + ROWS // 2), ("4", ROWS // 2))
    )
    assert equal(once, twice)
    assert not equal(once, more) and not equal(once, half)


def test_a_gradient_of_every_parameter_is_clipped_as_a_whole(tmp_path):
    """With a norm that every row's gradient exceeds, a row counts by its direction: other positions than without; with one
    that none exceeds, the same."""
    free, loose, tight = (
        chosen(tmp_path / name, modules="everything", **keys)
        for name, keys in (("free", {}), ("loose", {"clip": 1e6}), ("tight", {"clip": 1e-3}))
    )
    assert equal(free, loose) and not equal(free, tight)


@pytest.mark.parametrize(("score", "mask"), [("random", Mask), ("pafi", Mask), ("random", WeightMask), ("pafi", WeightMask)])
def test_hidden_weights_are_no_candidates_and_each_matrix_has_a_draw_of_its_own(score, mask, monkeypatch):
    """Or matrices of equal shape would get equal positions; a hidden weight is the smallest of all."""
    model = tiny("bert")
    first, *_ = matrices_of(model, ("query",))
    keep = torch.ones_like(first.original, dtype=torch.bool)
    keep[8:16] = False
    first.attach(mask(keep))
    monkeypatch.setattr(select_run, "untuned_model", lambda inputs: model)
    quiet = SimpleNamespace(progress=lambda *_: nullcontext(SimpleNamespace(advance=lambda: None)))
    config = SelectConfig(score=score, count=4, modules=["query"])
    _, matrices, scores = select_run._by_weights(config, SimpleNamespace(seed=0), quiet)
    hidden, second, third = (scores[matrix.path] for matrix in matrices)
    assert torch.equal(hidden != 0, keep) and not torch.equal(second, third)
