"""Compression of a transformer's weights: deltas, selection, pruning, training, checkpoints and their cost.

`load(folder)` is the one function most users need; everything else is imported from its own module. Importing the
package loads nothing heavy.
"""

from pathlib import Path

__version__ = "0.1.0"


def load(folder=None, *, base=None, delta=None):
    """Load the model stored in `folder`, in its pruned shapes, for inference. See `compressor.checkpoint.load`; for
    transformers' Auto classes, `compressor.models.auto`.

    `folder` may be that of a run, such as runs/quickstart: its final model is loaded, see `compressor.load_run.load`.

    With `delta`, a delta file (also of one of many tasks): the model of that task on `base`, which is a folder, a hub id, or a
    live model. A live model is changed in place and returned; its base is not read again. See
    `compressor.storage.live.load`.
    """
    if isinstance(folder, bytes) or (delta is None and not isinstance(folder, (str, Path))):
        raise TypeError(f"load(folder) takes the path of a folder, not {type(folder).__name__}: compressor.load('runs/NAME')")
    if delta is None:
        from compressor import checkpoint, load_run
        from compressor.run_store import is_run
        from compressor.text_files import from_home

        place = from_home(folder)
        return (load_run if is_run(place) else checkpoint).load(place, base=base)
    from compressor.storage import live

    if folder is not None and base is not None:
        raise TypeError("load(base, delta=...) takes one base")
    return live.load(base if folder is None else folder, delta)
