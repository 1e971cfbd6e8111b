"""Estimated work of generating the texts by which models are scored: see `pipelines.check.estimate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compressor.cost import ModelShape

BYTES_A_SECOND = 10e9
"""Estimated rate of reading weights, which the tokens behind a prompt wait for."""


def decided_by_texts(rows: Mapping[str, Any]) -> bool:
    """Whether the main metric is of generated texts, by the account of the rows."""
    return rows.get("generated", {}).get("decides", False)


def work_of_texts(shape: ModelShape, rows: Mapping[str, Any], validation: int, tests: int = 0) -> tuple[float, float]:
    """(FLOPs, seconds) to generate the texts of the validation prompts, and of the test files' where these are scored, so many
    times: in every step each sequence gets a token, and all weights are read. An upper bound: a text may end before."""
    parts = [(rows.get("generated"), validation), (rows.get("generated_tests"), tests)]
    tokens, steps = (sum(part[key] * times for part, times in parts if part) for key in ("tokens", "steps"))
    return tokens * shape.flops(1), steps * shape.bytes / BYTES_A_SECOND
