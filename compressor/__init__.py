"""What happens to a transformer's weights: deltas, selection, pruning, training, checkpoints and their cost.

`load(folder)` is the one function most users need; everything else is imported from its own module. Importing the
package loads nothing heavy.
"""

__version__ = "0.1.0"


def load(folder, *, base=None):
    """The model stored in `folder`, pruned shapes and all, ready for inference. See `compressor.checkpoint.load`."""
    from compressor import checkpoint

    return checkpoint.load(folder, base=base)
