"""DSEE (Chen et al. 2023, section 3.2): W + (alpha / rank) · B A + P_Ω(S), Ω chosen beforehand by the stage `select`."""

from compressor.anatomy import Layer
from compressor.deltas import Sparse, attach
from compressor.methods import Method, Options, lora


def attach_both(layer: Layer, module: str, options: Options) -> None:
    """Add a LowRank link, and a Sparse one where Ω has places in this matrix."""
    lora.attach_low_rank(layer, module, options)
    omega = (options.omega or {}).get(layer.linear_path(module))
    if omega is not None:
        linear = layer.linear(module)
        attach(linear, Sparse.start(linear.weight, omega, options.group))


def count(out_features: int, in_features: int, options: Options, places: int) -> int:
    """r (m + n) + N (methods.md 1.1; DSEE table 1)."""
    return lora.count(out_features, in_features, options, places) + places


METHOD = Method(
    name="dsee",
    summary="low-rank update plus sparse values on the places RPCA chose",
    formula="r(m+n)+N per matrix",
    attach=attach_both,
    count=count,
    learning_rate=1e-3,
    uses_omega=True,
)
