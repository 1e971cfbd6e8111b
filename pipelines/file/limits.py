"""Upper bounds of config values: far beyond any use, so that a typing mistake is rejected instead of run for a year.

Every number and every list of a config has an upper bound; a test walks all stages and names the key that lacks one.
"""

from __future__ import annotations

from compressor.tasks import MOST_TOKENS

EPOCHS = 1_000
STEPS = 10_000_000
"""Optimizer steps of a training."""
RANK = 8_192
"""Rank of a low-rank part: the smaller side of the widest known matrix."""
WIDTH = 16_384
"""Inner width of an adapter."""
BATCH = 4_096
"""Rows of a forward pass."""
BATCHES = 100_000
"""Batches of an optimizer step."""
TOKENS = MOST_TOKENS
"""Tokens of a row: as in `task.max_length`."""
ROWS = 10_000_000
"""Rows of a data file that are used."""
COUNT = 2**31 - 1
"""Positions, weights or units: the largest index of an int32."""
UNITS = 1_000_000
"""Heads, neurons or layers of a block."""
VARIANTS = 100
"""Random variants of a text."""
ROUNDS = 10_000
"""Rounds of a measurement."""
RATE = 1_000.0
"""A learning rate."""
DECAY = 100.0
"""A weight decay."""
SCALE = 1e9
"""Any other factor: a scale, a penalty, a norm, a temperature."""
EXPONENT = 100.0
SPEEDUP = 10_000.0
MILLISECONDS = 3_600_000.0
MICROSECONDS = 60_000_000
"""One minute: the longest queue delay of dynamic batching."""
QUEUE = 1_000_000
"""Requests that wait on a server."""
THREADS = 1_024
"""Threads, or instances of a model, on a server."""
BATCH_TOKENS = 10_000_000
"""Padded tokens of a forward pass."""
NAME = 64
"""Characters of a name, which is used in names of folders."""
REFERENCE = 1_000
"""Characters of a path or another reference to a model."""
LIST = 100
"""Members of a list: sizes of a grid, checkpoints, items."""
STAGES = 200
TASKS = 1_000
