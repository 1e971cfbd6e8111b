"""benchmarks/train_step.py: its contenders on another device. No time is taken."""

from benchmarks.train_step import made, optimizer_of
from tests.second_device import second_device
from tests.tiny import write_model


def test_positions_that_grow_are_set_on_the_device_of_the_model(tmp_path):
    """`--device cuda` moves the model before its optimizer is made."""
    model, _ = made("id3 all", write_model(tmp_path))
    with second_device() as device:
        optimizer_of(model.to(device))
        assert {matrix.original.device for matrix in model.growth.matrices} == {device}
    assert int(model.growth.count) == len(model.growth.values)
