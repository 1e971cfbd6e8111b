"""Robust PCA: planted parts recovered, an objective that never rises, DSEE's released settings without their faults."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import settings as fuzz
from hypothesis import strategies as st

from compressor.account import Places
from compressor.errors import UserError
from compressor.methods import Options
from compressor.selection.choice import choose_all, choose_places, weight_score
from compressor.selection.finite import LARGEST_WEIGHT
from compressor.selection.rpca import decompose, penalty, schedule, shrink, sparse_residual
from compressor.selection.settings import SETTINGS, Setting, SettingName
from tests.compressor.conftest import top_places


def noise(*shape: int, seed: int = 0, std: float = 1.0) -> torch.Tensor:
    return std * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(seed: int, rows: int = 64, columns: int = 64, rank: int = 8, spikes: int = 16):
    """A background of the given rank and std 0.19, spikes of ±2 on it, and their places (methods.md's planted matrix)."""
    low = noise(rows, rank, seed=seed) @ noise(rank, columns, seed=seed + 100) * 0.19 / rank**0.5
    places = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(seed))[:spikes].sort().values
    sparse = torch.zeros(rows * columns, dtype=torch.float64)
    sparse[places] = 2.0 * noise(spikes, seed=seed + 200).sign()
    return low, sparse.view(rows, columns), places


@pytest.mark.parametrize("shape", [(64, 64), (48, 80), (96, 56)])
@pytest.mark.parametrize("kind", ["hard", "soft"])
@pytest.mark.parametrize("seed", range(4))
def test_planted_parts_are_recovered(shape, kind, seed):
    """Both parts at the planted rank: to rounding with the hard threshold; the soft one takes λ off every spike."""
    low, sparse, places = planted(seed, *shape)
    result = decompose(low + sparse, Setting(rank=8, kind=kind, iterations=40, tol=1e-12), seed=seed)
    assert torch.equal(result.S.flatten().nonzero().flatten(), places)
    assert (result.U @ result.V - low).norm() < (1e-9 if kind == "hard" else 0.005) * low.norm()
    assert (result.S - sparse).abs().max() < (1e-9 if kind == "hard" else 0.03)


@pytest.mark.parametrize("seed", range(6))
def test_the_default_finds_planted_spikes_at_twice_their_rank(seed):
    low, sparse, places = planted(seed)
    assert torch.equal(top_places(low + sparse, "rpca", 16, seed).long(), places)


def test_a_constant_threshold_below_the_background_finds_no_low_rank_part():
    """Why λ falls by default: at 0.01 from the start, S explains nearly every weight and U V next to nothing."""
    low, sparse, _ = planted(0)
    constant, falling = (decompose(low + sparse, Setting(rank=8, schedule=name)) for name in ("constant", "falling"))
    assert (constant.U @ constant.V - low).norm() > 0.8 * low.norm() > 100 * (falling.U @ falling.V - low).norm()


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_the_sparse_step_is_exact_for_every_entry(kind):
    """No point of a fine grid has a smaller ½(r - s)² + (λ²/2)[s ≠ 0], or + λ|s|."""
    residual, grid = torch.linspace(-0.08, 0.08, 161, dtype=torch.float64)[:, None], torch.arange(-100, 101) / 1000.0

    def cost(s: torch.Tensor) -> torch.Tensor:
        return 0.5 * (residual - s) ** 2 + (0.5 * 0.03**2 * (s != 0) if kind == "hard" else 0.03 * s.abs())

    ours = shrink(residual, 0.03, kind)
    assert (cost(ours) <= cost(grid).amin(1, keepdim=True) + 1e-9).all() and 0 < int((ours == 0).sum()) < 161
    assert 0.5 * float((residual - ours).square().sum()) + penalty(ours, 0.03, kind) == pytest.approx(float(cost(ours).sum()))


@fuzz(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 24),
    columns=st.integers(1, 24),
    setting=st.builds(
        Setting,
        rank=st.integers(1, 30),
        rank_step=st.integers(1, 7),
        kind=st.sampled_from(["hard", "soft"]),
        threshold=st.floats(1e-4, 2.0),
        schedule=st.sampled_from(["falling", "constant"]),
        growth=st.sampled_from(["random", "qr"]),
        restart=st.booleans(),
        iterations=st.integers(1, 12),
        tol=st.sampled_from([0.0, 1e-3, 0.1]),
    ),
    seed=st.integers(0, 3),
)
def test_invariants(rows, columns, setting, seed):
    weight = noise(rows, columns, seed=seed)
    result = decompose(weight, setting, seed=seed)
    rank = min(setting.rank, rows, columns)
    assert result.U.shape == (rows, rank) and result.V.shape == (rank, columns) and result.S.shape == weight.shape
    assert torch.allclose(result.U.T @ result.U, torch.eye(rank, dtype=torch.float64), atol=1e-10)
    slack = 1e-12 * float(weight.square().sum())
    for phase in result.phases:
        assert 1 <= len(phase.objective) <= setting.iterations
        assert all(later <= earlier + slack for earlier, later in pairwise(phase.objective))
    history = [value for phase in result.phases for value in phase.objective]
    # a larger rank and a smaller λ can only lower it, too
    assert setting.restart or all(later <= earlier + slack for earlier, later in pairwise(history))
    error = weight - result.U @ result.V - result.S
    assert history[-1] == pytest.approx(
        0.5 * float(error.square().sum()) + penalty(result.S, setting.threshold, setting.kind), abs=slack
    )


def test_the_convergence_test_and_the_cap():
    def lengths(tol: float) -> list[int]:
        return [len(phase.objective) for phase in decompose(noise(64, 64), Setting(iterations=9, tol=tol)).phases]

    assert set(lengths(0.0)) == {9} and set(lengths(1.0)) == {2}
    assert 2 < max(lengths(0.01)) < 9


def test_the_threshold_falls_to_its_last_value_as_the_rank_grows():
    weight = noise(64, 64, std=0.042)
    phases = list(schedule(weight, SETTINGS["default"]))
    start = 3 * float(weight.square().mean().sqrt())
    assert [rank for rank, _ in phases] == [1, 6, 11, 16, 16]
    assert [threshold for _, threshold in phases] == pytest.approx([start, start / 2, start / 4, start / 8, 0.01])
    assert list(schedule(weight, replace(SETTINGS["default"], threshold=1.0, rank=3))) == [(1, 1.0), (3, 1.0)]


def test_the_released_settings_reach_rank_496_and_rank_1():
    """100 outer steps of 2 inner ones with λ = 0.01 in DSEE's run_glue.py; one outer step in its script for heads."""
    weight = noise(768, 768, std=0.042)
    assert list(schedule(weight, SETTINGS["released"])) == [(1 + 5 * step, 0.01) for step in range(100)]
    heads = decompose(weight, SETTINGS["released_rank1"])
    assert heads.U.shape == (768, 1) and [len(phase.objective) for phase in heads.phases] == [2]


@pytest.mark.slow
def test_a_released_run_is_arbitrary():
    """At rank 496 two seeds agree on few of the 16 places, and none has one of the 16 largest weights (methods.md: 5 and 0)."""
    weight = noise(768, 768, std=0.042).float()
    runs = [decompose(weight, SETTINGS["released"], seed=seed) for seed in (0, 1)]
    assert all(run.U.shape == (768, 496) and sum(len(phase.objective) for phase in run.phases) == 200 for run in runs)
    first, second = (set(choose_places([run.S.abs()], 16)[0].tolist()) for run in runs)
    assert len(first & second) < 12 and len(first & set(top_places(weight, "magnitude", 16, seed=0).tolist())) < 4


def released_step_by_step(weight: torch.Tensor, outer: int, seed: int) -> torch.Tensor:
    """S of methods.md's description of DSEE's loop, with a whole QR of the error."""
    generator = torch.Generator().manual_seed(seed)
    V = torch.randn(1, weight.shape[1], generator=generator, dtype=weight.dtype)
    for _ in range(outer):
        S = torch.zeros_like(weight)
        for _ in range(2):
            U = torch.linalg.qr((weight - S) @ V.T)[0]
            V = U.T @ (weight - S)
            S = weight - U @ V
            S[S.abs() < 0.01] = 0
        V = torch.cat([V, torch.linalg.qr(weight - U @ V - S)[1][:5]])
    return S


@pytest.mark.parametrize("shape", [(40, 56), (56, 40)])
def test_released_equals_the_published_loop(shape):
    weight = noise(*shape, std=0.042)
    ours = decompose(weight, replace(SETTINGS["released"], rank=21), seed=3).S
    assert torch.allclose(ours, released_step_by_step(weight, outer=5, seed=3), atol=1e-12)


def test_full_rank_leaves_nothing_to_choose():
    """The released code selects every weight then."""
    weight = noise(64, 48, std=0.042)
    residual = sparse_residual(weight, seed=0, setting="released")
    assert not residual.any()
    with pytest.raises(UserError, match="E401"):
        choose_places([residual.abs()], 16)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_repeats(setting):
    weight = noise(40, 32).float()
    assert torch.equal(sparse_residual(weight, seed=3, setting=setting), sparse_residual(weight, seed=3, setting=setting))
    assert not torch.equal(decompose(weight, SETTINGS[setting], seed=3).V, decompose(weight, SETTINGS[setting], seed=4).V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_matrix_of_rank_0_or_1_leaves_nothing_to_choose(setting, rank, dtype):
    """U V explains all of it: finite, with an empty S, which is an error and not an empty choice."""
    weight = 0.19 * (noise(24, rank) @ noise(rank, 18, seed=1)).to(dtype)
    result = decompose(weight, SETTINGS[setting], seed=0)
    assert all(tensor.isfinite().all() for tensor in (result.U, result.V, result.S)) and not result.S.any()
    assert torch.allclose(result.U @ result.V, weight, atol=1e-5)
    scores = weight_score(weight, "rpca", 0, path="layer.0.query", setting=setting)
    with pytest.raises(UserError, match=r"E401 layer\.0\.query: nothing to choose, as all 432 scores are 0, 4 were requested"):
        choose_all({"layer.0.query": scores}, {}, Places(Options(), "matrix", count=4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_spike_on_a_matrix_of_rank_1_is_found(dtype):
    weight = 0.19 * (noise(24, 1) @ noise(1, 18, seed=1)).to(dtype)
    weight[5, 7] += 2.0
    assert top_places(weight, "rpca", 1, seed=0).tolist() == [5 * 18 + 7]


def test_setting_names_load_no_torch():
    from compressor.selection import settings

    assert get_args(SettingName) == tuple(SETTINGS)
    program = f"import runpy, sys; runpy.run_path({settings.__file__!r}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precisions_are_computed_in_float32(dtype):
    weight = noise(24, 16).to(dtype)
    assert torch.equal(decompose(weight).S, decompose(weight.float()).S)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e25])
def test_what_is_not_finite_is_refused(value):
    weight = noise(24, 16)
    weight[3, 4] = value
    with pytest.raises(UserError, match="E409 the weights hold 1 of 384 values"):
        decompose(weight)


def test_the_threshold_falls_from_the_largest_weight():
    assert len(list(schedule(torch.full((4, 4), LARGEST_WEIGHT), SETTINGS["default"]))) < 100
