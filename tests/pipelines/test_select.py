"""The select stage by gradients: how many rows it scores on, and over which tensors a gradient is clipped."""

import torch
from safetensors.torch import load_file

from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
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
