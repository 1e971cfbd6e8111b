"""Upper bounds of config values: far beyond any use, so that a typing mistake is rejected instead of run for a year.

Every number and every list of a config has an upper bound; a test walks all stages and names the key that lacks one.
"""

from __future__ import annotations

EPOCHS = 1_000
RANK = 8_192
"""Of a low-rank part: as large as the smaller side of the widest matrix that is known here."""
WIDTH = 16_384
"""Inner width of an adapter."""
BATCH = 4_096
"""Rows of a forward pass."""
TOKENS = 8_192
"""Tokens of a row: as in `task.max_length`."""
ROWS = 10_000_000
"""Rows of a data file that something looks at."""
COUNT = 2**31 - 1
"""Places, weights or units: the largest index that an int32 holds."""
UNITS = 1_000_000
"""Heads, neurons or layers of a block."""
ROUNDS = 10_000
"""Of a measurement."""
RATE = 1_000.0
"""A learning rate."""
SCALE = 1e9
"""Any other factor: a scale, a penalty, a norm, a temperature."""
EXPONENT = 100.0
SPEEDUP = 10_000.0
MILLISECONDS = 3_600_000.0
MICROSECONDS = 60_000_000
"""One minute, in which a request may wait for others."""
NAME = 64
"""Characters of a name: a folder is called so, with more behind it."""
REFERENCE = 1_000
"""Characters of a path, or of whatever else names a model."""
LIST = 100
"""Members of a list: sizes of a grid, checkpoints, items."""
STAGES = 200
TASKS = 1_000
