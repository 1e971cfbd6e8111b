"""benchmarks/methods.py with models that are given: whose logits are compared."""

from types import SimpleNamespace

import numpy as np

from benchmarks import methods


def test_logits_of_another_model_on_the_same_store_are_not_taken(tmp_path, monkeypatch):
    run, predicted = methods.Run(methods.CONTENDERS[0], "sst2", 1e-4, 0), []

    def predict(grid, run):
        predicted.append(grid.model)
        return np.full((2, 2), float(grid.model)), np.zeros(2)

    monkeypatch.setattr(methods, "predict", predict)
    (tmp_path / "sst2").mkdir()
    for model in ("1", "2", "1"):
        made = {run.name: SimpleNamespace(id=f"tune-{model}")}
        logits, _ = methods.logits_of(methods.Grid(model, {}, tmp_path, False, 1, made), run)
        assert logits.mean() == float(model)
    assert predicted == ["1", "2"], "those of a model are kept"
