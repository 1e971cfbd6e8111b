"""Named settings of the robust PCA in rpca.py. Loads no torch: a pipeline file that names one is checked with this table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SettingName = Literal["default", "original", "released", "released_rank1"]


@dataclass(frozen=True)
class Setting:
    """Options of `rpca.decompose`. The defaults are the setting `default`.

    `rank` of the low-rank part, reached from 1 in steps of `rank_step`; `kind` and `threshold` λ of S (in the weight's units);
    `schedule`: λ the same throughout, or falling to `threshold` as the rank grows; `growth`: new rows of V from random
    projections of the error (Zhou & Tao 2013) or from its QR (DSEE's code); `restart`: S back to 0 whenever the rank grows;
    at most `iterations` for each rank, fewer once the objective falls by no more than `tol` of itself.
    """

    rank: int = 16
    rank_step: int = 5
    kind: Literal["hard", "soft"] = "hard"
    threshold: float = 0.01
    schedule: Literal["falling", "constant"] = "falling"
    growth: Literal["random", "qr"] = "random"
    restart: bool = False
    iterations: int = 10
    tol: float = 1e-3


SETTINGS: dict[SettingName, Setting] = {
    "default": Setting(),
    # Zhou & Tao 2013: S is soft and λ constant. Their start from an SVD, over-relaxation and rank estimate only save
    # iterations, and with over-relaxation the objective may rise: left out
    "original": Setting(kind="soft", schedule="constant", iterations=20),
    # DSEE's run_glue.py: 100 outer steps of 2 inner ones, whatever the objective does
    "released": Setting(rank=496, schedule="constant", growth="qr", restart=True, iterations=2, tol=0.0),
    # DSEE's script for heads: the same loop, left after its first outer step
    "released_rank1": Setting(rank=1, schedule="constant", growth="qr", restart=True, iterations=2, tol=0.0),
}
