"""A sweep of toys whose quality is known, apart from the tests, so that a process of its own imports little."""

import pytest

from pipelines.sweeps.sweep import sweep
from pipelines.sweeps.sweep_trials import SweepPlan, axes_of
from tests.pipelines import toys

VALUES = {0: 0.1, 1: 0.2, 2: 0.6}
"""Accuracy of the toys by seed: mean 0.3, squared deviations 0.04 + 0.01 + 0.09, so a variance of 0.07."""


def toy(config, inputs, workspace):
    """A toy that measures a quality, and has trouble with one seed only."""
    metadata = toys.run(config, inputs, workspace)
    trouble = workspace.log_folder.parents[2] / f"trouble-{inputs.seed}"
    if trouble.exists():
        toys.TROUBLES[trouble.read_text()](trouble)
    accuracy = VALUES[inputs.task.subset.seed if inputs.task.subset else inputs.seed]
    return {**metadata, "quality": {"accuracy": accuracy, "matthews": -accuracy, "interval": [0.0, 1.0], "rows": 2}}


def measure_quality(monkeypatch):
    """Put toys with a quality in the place of those without one."""
    for stage in toys.STAGES:
        if stage.produces == "model":
            toys.replace(monkeypatch, stage.name, run=toy)


def go(project, out, kind="seeds", runs=3, share=None, over=(), **options):
    return sweep(project, SweepPlan(axes_of(over, None), **{kind: runs}, share=share), out, **options)


def go_measured(project, out):
    """`go` where nothing but the toys is installed."""
    measure_quality(pytest.MonkeyPatch())
    go(project, out)
