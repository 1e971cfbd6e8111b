"""Removing heads, FFN neurons, blocks and single weights: scores.py ranks them by importance, surgery.py removes them.

Every import from here loads torch-pruning, which does the removal, and so torch. Modules that must load without them take the
names of criteria from `compressor.pruning_criteria`.
"""

import torch_pruning  # noqa: F401  (one that is missing is told by the first import, not by the first removal)
