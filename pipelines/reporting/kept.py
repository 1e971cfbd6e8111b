"""Units left in each layer of a pruned model: as records for the report, and as a table for the terminal."""

from __future__ import annotations

from typing import Any

from compressor.models.modules import STRUCTURES
from pipelines.reporting.figures import left_of, share_by_bin

Record = dict[str, Any]


def layers_left(kept: dict[str, dict[str, list[int]]], dense: list[dict[str, int]]) -> list[Record]:
    """Per layer of the dense model the original indices of the units left, and how many there were.

    `kept` is a model's (compressor.pruning.surgery), `dense` the number of units of each structure before any prune.
    """
    layers = []
    for number, totals in enumerate(dense if kept else ()):
        units_left = kept.get(str(number), {})
        units = {name: {"left": units_left.get(name, []), "of": total} for name, total in totals.items() if total}
        layers.append({"layer": number, "gone": str(number) not in kept, "units": units})
    return layers


def plan_table(layers: list[Record]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of `layers_left` for the terminal: one character per unit, or per bin, filled by the share kept."""
    names = [name for name in STRUCTURES if any(name in row["units"] for row in layers)]
    rows = []
    for row in layers:
        cells = [str(row["layer"])]
        for name in names:
            counts = row["units"].get(name)
            if counts is None:
                cells.append("")
            elif row["gone"]:
                cells.append("gone")
            else:
                bars = "".join(_character(share) for share in share_by_bin(counts["left"], counts["of"]))
                cells.append(f"{bars} {len(counts['left']):,}")
        rows.append(cells)
    return ["layer", *(left_of(layers, name) for name in names)], rows


def _character(share: float) -> str:
    return "·" if not share else "▁▂▃▄▅▆▇█"[max(round(8 * share) - 1, 0)]
