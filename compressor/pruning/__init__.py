"""Removing heads, FFN neurons, blocks and single weights: scores.py ranks them by importance, surgery.py removes them.

Every import from here needs torch-pruning, which makes the cuts, and so torch. What must load without them takes the words of
pruning from `compressor.pruning_criteria`.
"""

import torch_pruning  # noqa: F401  (one that is missing is told by the first import, not by the first removal)
