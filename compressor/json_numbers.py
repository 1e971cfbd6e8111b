"""Numbers that JSON lacks: infinity and not-a-number are null in every record, as no reader but Python takes `Infinity`."""

from __future__ import annotations

import math
from typing import Any


def without_infinity(value: Any) -> Any:
    """JSON data with None in place of every number that is not finite."""
    if isinstance(value, dict):
        return {key: without_infinity(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_infinity(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
