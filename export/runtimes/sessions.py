"""The one place that opens model files, of any runtime: device asserted, idle threads asleep, errors with a code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from compressor.arguments import require_one_of, require_whole
from compressor.errors import UserError
from export.runtimes.decoders import EncoderDecoder
from export.runtimes.feeds import run
from export.runtimes.runtime import Device, Runtime, Session, encoder_of
from export.runtimes.runtime_registry import RUNTIMES, runtime_of

if TYPE_CHECKING:
    import numpy as np

__all__ = ("failures", "parity_session", "plain_session", "run", "session")


def session(
    path: Path,
    *,
    runtime: Runtime | None = None,
    device: Device = "cpu",
    threads: int | None = None,
    swapped: Mapping[str, np.ndarray] | None = None,
) -> Session:
    """A session with every graph optimization; `threads` defaults to one a core. That of a decoder behind an encoder opens both
    (`EncoderDecoder`).

    `runtime` defaults to the first with the suffix of `path`. `swapped` replaces the file's weights of those names, in ONNX
    Runtime: another delta on the same file, if it was exported with unmerged deltas.

    Raises UserError E602 (file missing or of another kind), E645 (`swapped` is not of this file), E904 (an unavailable device:
    ONNX Runtime would silently fall back to the CPU; OpenVINO supports only the CPU here) and E901 (packages are missing).
    ValueError for another device, or for threads below 1.
    """
    path = Path(path)
    _require_file(path)
    require_one_of("device", device, get_args(Device))
    if threads is not None:
        require_whole("threads", threads)
    return _whole(path, partial((runtime or runtime_of(path)).open, device=device, threads=threads, swapped=swapped or {}))


def parity_session(runtime: Runtime, path: Path, precision: str, threads: int | None = None) -> Session:
    """A session on the CPU whose outputs a file of a precision is compared by: of the file, or of what emulates it there.

    Raises UserError E602, E901, E904; ValueError for a precision that the runtime does not have.
    """
    path = Path(path)
    _require_file(path)
    require_one_of("precision", precision, runtime.precisions)
    return _whole(path, partial(runtime.open_for_parity, precision=precision, threads=threads))


def plain_session(runtime: Runtime, path: Path) -> Session:
    """A session on the CPU without the runtime's optimizations (`Runtime.open_plain`). Raises what the runtime raises."""
    return _whole(path, runtime.open_plain)


def _whole(path: Path, opened: Callable[[Path], Session]) -> Session:
    """The session of a file, or of an encoder and the decoder behind it. Raises UserError E602 where the encoder is missing."""
    encoder = encoder_of(path)
    if encoder is None:
        return opened(path)
    _require_file(encoder)
    return EncoderDecoder(opened(encoder), opened(path))


def _require_file(path: Path) -> None:
    if not path.is_file():
        raise UserError("E602", "no such model file", "Check the path, or export the model again", str(path))


def failures() -> tuple[type[Exception], ...]:
    """What any runtime raises when a graph cannot be opened or does not run."""
    return tuple({error: None for runtime in RUNTIMES.values() for error in runtime.failures()})
