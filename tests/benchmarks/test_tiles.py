"""benchmarks/tiles.py on a tiny model, in earnest but for the times."""

import pytest

from benchmarks import tiles
from compressor.models.anatomy import layers_of
from compressor.models.build import build
from export.latency.measure import summarize
from tests.tiny import write_model


@pytest.mark.slow
@pytest.mark.parametrize(("again", "waited", "code"), [(10.1, 0.0, 0), (11.0, 0.0, 3), (10.1, 0.5, 3)])
def test_every_width_is_timed_against_the_dense_file(tmp_path, monkeypatch, again, waited, code):
    def measured(variants, shapes, rounds, threads):
        assert [one.name for one in variants] == ["24", "16", "again"]
        assert all(one.path.is_file() for one in variants)
        times = zip(variants, (10.0, 12.0, again), strict=True)
        return [summarize(one.name, *shapes[0], [ms] * rounds, waited) for one, ms in times]

    folder = write_model(tmp_path / "model")
    assert layers_of(build(folder, ["0", "1"]))[0].neurons == 24
    monkeypatch.setattr(tiles, "measure", measured)
    monkeypatch.setattr(tiles, "CPU_RUNTIMES", ["onnxruntime"])
    monkeypatch.setattr(tiles, "precisions", lambda runtime: ["fp32", "int8"])
    options = ["--step", "8", "--least", "0.6", "--batch", "2", "--length", "8", "--rounds", "4", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["tiles.py", str(folder), *options])
    assert tiles.main() == code
    same, wider = "1.000 (1.000 to 1.000)", "1.200 (1.200 to 1.200)"
    page = (tmp_path / "tiles.md").read_text()
    assert ("Void: the measured processes waited for a core 50% of their time" in page) == bool(waited)
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert rows[1:3] == [f"| {width} | {cell} | {cell} |" for width, cell in (("24", same), ("16", wider))]
    assert rows[3].startswith("| dense, again (A/A) | ")
