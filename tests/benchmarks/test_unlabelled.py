"""benchmarks/unlabelled.py on a tiny model: what it times."""

from types import SimpleNamespace

from benchmarks import unlabelled
from compressor.checkpoint import save_state
from compressor.models.build import build
from compressor.models.reference import resolve
from tests.tiny import write_model


def test_a_step_is_timed_in_every_variant(tmp_path):
    base = write_model(tmp_path / "model")
    facts = {"base": str(base), "base_sha256": resolve(str(base)).sha256, "label_names": ["0", "1"]}
    save_state(build(base, ["0", "1"]), tmp_path / "cut", **facts)
    times = unlabelled.step_times(SimpleNamespace(folder=tmp_path / "cut"), base, length=4, rounds=1)
    assert list(times) == list(unlabelled.VARIANTS) and all(ms > 0 for ms in times.values())
