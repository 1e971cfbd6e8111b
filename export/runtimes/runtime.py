"""What every runtime says of itself and can do: the base class of the rows in export/runtimes/runtime_registry.py.

Rows import only the standard library (export/runtimes/runtime_registry.py says why); other packages are imported in the
methods that need them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from compressor.errors import UserError
from compressor.processor import processor

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from torch import nn
    from tritonclient.grpc.model_config_pb2 import ModelConfig

Device = Literal["cpu", "cuda"]
ENCODER, DECODER = "encoder_model", "decoder_model"
"""How the names of the two files begin, and the names of their graphs."""


def encoder_of(path: Path) -> Path | None:
    """The file of the encoder that a decoder's file is behind; None for any other file."""
    return path.with_name(path.name.replace(DECODER, ENCODER, 1)) if path.name.startswith(DECODER) else None


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type (a numpy name such as int64, or the file's own word where numpy has none) and shape of an input or
    output of a model file; a dynamic axis is -1."""

    name: str
    type: str
    shape: list[int]


class Session(Protocol):
    """A model file that is open for inference, with the methods of ONNX Runtime's InferenceSession that are used here."""

    def get_inputs(self) -> Sequence[Any]: ...

    def get_outputs(self) -> Sequence[Any]: ...

    def run(self, outputs: Sequence[str] | None, feeds: dict[str, np.ndarray]) -> list[np.ndarray]: ...


class Work(StrEnum):
    """The kinds of work of operators, as reports call them; a runtime's table maps its operator types to them."""

    PRODUCTS_FP32 = "matrix products, fp32"
    PRODUCTS_BF16 = "matrix products, bf16"
    PRODUCTS_INT8 = "matrix products, int8"
    PRODUCTS_INT4 = "matrix products, int4 weights"
    ATTENTION = "attention"
    PROJECTED_ATTENTION = "attention with its projections"
    SOFTMAX = "softmax"
    NORMALIZATION = "normalization"
    ACTIVATION = "activation"
    GATHER = "embeddings and gather"
    CONVERSION = "quantization and conversion"
    LAYOUT = "layout"
    ELEMENTWISE = "sums and other elementwise"
    OTHER = "other"


@dataclass(frozen=True)
class OperatorTimes:
    """Milliseconds of one operator in each of some forward passes; `type` is the runtime's own word."""

    work: Work
    type: str
    ms: tuple[float, ...]


@dataclass(frozen=True)
class PassProfile:
    """Milliseconds of some forward passes with the profiler on, and those of every operator in them."""

    ms: tuple[float, ...]
    operators: tuple[OperatorTimes, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Runtime:
    """One runtime: what it is called, what it can do, and how its files are written, opened and served.

    A new runtime is one file with a subclass and an instance of it, `RUNTIME`, and its name in runtime_registry.py.
    """

    key: str
    """Its name in pipeline files, metadata and Python."""
    title: str
    """Its display name in sentences."""
    label: str
    """Its short name before a precision in comparisons and measurements: 'ONNX int8'."""
    precisions: Mapping[str, tuple[Device, ...]]
    """Precisions of exported classifiers -> devices that such a file is meant for."""
    generating: tuple[str, ...] = ()
    """Precisions of exported generating models."""
    suffix: str = ".onnx"
    """Suffix of its model files. The first runtime of the registry with a suffix is the default for such a file."""
    packages: tuple[str, ...]
    """Distributions that running a file needs; their versions affect the outputs."""
    writers: tuple[str, ...] = ()
    """Distributions that writing a file needs, in addition to those that every export needs."""
    alternatives: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Distribution of `packages` -> others that install the same module."""
    on_gpu: tuple[str, ...] = ()
    """What pip installs instead of `packages` to compute on a GPU, where that differs."""
    extra: str
    """The extra of this project that installs its packages."""
    reporters: tuple[str, ...] = ()
    """Modules through which its packages would send usage data: they are never imported."""
    runs: bool = True
    """Whether its files are opened, compared and timed here; otherwise they are built for another machine."""
    emulated: tuple[str, ...] = ()
    """Precisions that it does not compute in on the CPU: such a file is compared with PyTorch by what emulates it there."""
    instructions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Precision -> instruction sets (of `compressor.processor`) of which the CPU needs one to compute in it."""
    tiles: Mapping[str, int] = field(default_factory=dict)
    """Precision -> columns of a matrix that its CPU kernels compute at a time, where other widths are slower (measured)."""
    int8_wants_vnni: bool = False
    """Whether its int8 takes longer than its fp32 on an x86 processor without VNNI (measured: docs/results/peers_avx2.md)."""
    calibrated: bool = False
    """Whether the activations of its int8 have scales that are calibrated on training rows (static int8)."""
    optimizes: bool = False
    """Whether `open_plain` opens a file without the optimization that `open` applies."""
    symbols: Mapping[str, str] = field(default_factory=dict)
    """Precision -> plotly's marker symbol in a report's figures."""
    backend: str = ""
    """The Triton backend that serves its files."""
    threads_parameter: str = ""
    """Parameter of a Triton model config with the number of threads of an instance."""
    instances: int = 1
    """Instances of a served model, where nothing else is asked for (docs/serving.md has the measurements)."""
    text_tokens: int = 1024
    """Padded tokens of a sub-batch of texts, likewise."""
    streams: bool = False
    """Whether one session computes several sub-batches at the same time, and on one thread each is faster than on many."""

    def file_name(self, precision: str) -> str:
        """File name of a precision in an exported folder."""
        return f"model{self.suffix}" if precision == "fp32" else f"model_{precision}{self.suffix}"

    def files(self, path: Path) -> dict[str, Path]:
        """Name in a model repository's version folder -> source, of a model file, of the encoder that a decoder's file is
        behind, and of the weights beside them."""
        return {f"model{self.suffix}": path}

    def write(
        self,
        graph: onnx.ModelProto,
        folder: Path,
        *,
        precisions: Sequence[str],
        rows: Sequence[dict[str, np.ndarray]] = (),
        excluded: Sequence[str] = (),
        fuse: bool = True,
    ) -> dict[str, Path]:
        """Write the files of some precisions into `folder`; returns precision -> path. Equal inputs give equal bytes.

        `graph` is the unfused fp32 graph of `export.graph.trace.trace`. `rows` are padded batches, int64 (batch, length), that
        static int8 is calibrated on; the matrices `excluded` (names of `export.graph.trace.matrices`) stay fp32 in int8. `fuse`
        allows the fusions that are part of a file (`can_fuse`).
        Raises UserError E605 (static int8 without rows), E901 (packages are missing).
        """
        raise NotImplementedError(f"{self.title} has no files that are written here; its own module does")

    def open(self, path: Path, device: Device, threads: int | None, swapped: Mapping[str, np.ndarray]) -> Session:
        """A session of an existing file; `export.runtimes.sessions.session` says the rest."""
        raise NotImplementedError(f"{self.title} is not run here: its files need the GPU that they were built for")

    def open_plain(self, path: Path) -> Session:
        """A session on the CPU without optimizations, so that every value of the graph is computed as it is written."""
        return self.open(path, "cpu", None, {})

    def open_for_parity(self, path: Path, precision: str, threads: int | None) -> Session:
        """A session on the CPU whose outputs a file of a precision is compared by. Raises UserError E602 (damaged)."""
        return self.open(path, "cpu", threads, {})

    def bound(self, session: Session, feeds: dict[str, np.ndarray], device: Device) -> Callable[[], object]:
        """One batch, already copied to `device`: each call computes it there, and is finished when it returns."""
        return lambda: session.run(["logits"], feeds)

    def values(self, path: Path, encoding: dict[str, np.ndarray]) -> list[np.ndarray] | None:
        """Every float value of three axes that a file computes from `encoding`, in order; None where it shows none of them."""
        return None

    def profile(
        self, path: Path, encoding: dict[str, np.ndarray], threads: int | None, *, warm: int, passes: int
    ) -> PassProfile | None:
        """The time of a file's operators on the CPU over some passes after `warm` untimed ones; None where it gives none."""
        return None

    def failures(self) -> tuple[type[Exception], ...]:
        """What is raised where a graph cannot be opened or does not run."""
        return (RuntimeError,)

    def is_for(self, precision: str, device: Device) -> bool:
        """Whether a file of a precision is meant for a device."""
        return device in self.precisions.get(precision, ())

    def computes_with(self, device: Device) -> str:
        """What computes on a device, for the record of a benchmark; a session has asserted it."""
        return device.upper()

    def offers(self, device: Device) -> bool:
        """Whether the runtime as it is installed here can compute on a device."""
        return device == "cpu"

    def computes(self, precision: str, instructions: Sequence[str] | None = None) -> bool:
        """Whether a CPU has the instructions that a precision needs: with `instructions`, by default the CPU here."""
        needed = self.instructions.get(precision)
        return not needed or bool(set(needed) & set(processor()["instructions"] if instructions is None else instructions))

    def require_instructions(self, precision: str) -> None:
        """Raises UserError E904 where the CPU here cannot compute in a precision."""
        if not self.computes(precision):
            what = f"{self.title} computes in {precision} by {' or '.join(self.instructions[precision])}, which this CPU lacks"
            raise UserError("E904", what, "Leave that precision out, or run on a CPU that has one of them")

    def weight_bits(self) -> int:
        """Bits of a weight in int8 files that are written on this machine."""
        return 8

    def attentions_apart(self, path: Path) -> int:
        """How many attentions a file computes by several operators, where the runtime has one that is faster."""
        return 0

    def products(self, precision: str, size: int, threads: int) -> Iterator[tuple[str, Callable[[], object]]]:
        """What multiplies square matrices of a precision fastest on the CPU here, and one call of it: for the machine's limits.

        Nothing where PyTorch's product is as fast, or packages are missing. `threads` 0: as many as the runtime chooses.
        """
        return iter(())

    def can_fuse(self, model: nn.Module) -> bool:
        """Whether the fusions that are part of a file leave what a model computes."""
        return False

    def tensors(self, path: Path) -> tuple[list[TensorSpec], list[TensorSpec]]:
        """(inputs, outputs) of a model file. Raises UserError E721 (not readable), E901 (packages are missing)."""
        raise NotImplementedError(f"{self.title} does not show the tensors of a file")

    def configure(self, config: ModelConfig, path: Path) -> None:
        """Add to a Triton model config what the backend needs beside inputs, outputs and batching to serve the file `path`."""

    def require(self, *, writing: bool = False) -> None:
        """Raises UserError E901 with the extra to install where a package is missing that running, or writing, a file needs."""
        needed = (*self.packages, *self.writers) if writing else self.packages
        if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
            fix = f"Run: pip install 'compress-pipeline[{self.extra}]'"
            raise UserError("E901", f"the runtime {self.key} needs the package {' and '.join(missing)}", fix)

    def devices(self) -> set[Device]:
        """The devices that any of its files is for."""
        return {device for devices in self.precisions.values() for device in devices}

    def stored_bytes(self, path: Path) -> int:
        """Bytes of a model: of its `files`."""
        return sum(file.stat().st_size for file in self.files(path).values())

    def remove(self, path: Path) -> None:
        """Delete a model's `files`; what is missing already is no error."""
        for file in self.files(path).values():
            file.unlink(missing_ok=True)
