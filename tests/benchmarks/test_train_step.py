"""benchmarks/train_step.py: its contenders on another device, and what it prints. No time is taken."""

from benchmarks import train_step
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


def test_peak_memory_has_the_unit_that_it_is_measured_in(tmp_path, monkeypatch, capsys):
    """The kernel and torch count in powers of 2."""
    monkeypatch.setattr(train_step, "stepper", lambda *_: None)
    monkeypatch.setattr(train_step, "made", lambda *_: ())
    monkeypatch.setattr(train_step, "interleaved", lambda steps, rounds: {name: [1.0, 2.0] for name in steps})
    monkeypatch.setattr(train_step, "peak_memory", lambda *_: 100.0)
    monkeypatch.setattr("sys.argv", ["train_step.py", "--model", str(write_model(tmp_path)), "--only", "lora"])
    train_step.main()
    heading, first = capsys.readouterr().out.splitlines()[1:3]
    assert heading.endswith(" peak MiB") and first.endswith("       100") and len(heading) == len(first)
