"""ONNX -> TensorRT: an engine where `tensorrt` or TensorRT for RTX is installed, and always the script that builds it.

Networks are strongly typed, which TensorRT 10, 11 and RTX all support: the types are those of the graph, so fp16 is a graph in
fp16 (export/graph/half.py) and int8 a graph with QuantizeLinear and DequantizeLinear; no builder flag decides. An engine runs
only with the version that built it: that is recorded in a file beside it, and checked before loading.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from compressor.digests import sha256_of
from compressor.errors import UserError
from export.runtimes.runtime import Runtime

if TYPE_CHECKING:
    import numpy as np
    import onnx

MODULES = ("tensorrt", "tensorrt_rtx", "tensorrt_rtx_bindings")
"""Names of TensorRT's Python module. The last is what the RTX wheels install: NVIDIA's wrapper `tensorrt_rtx` is not on
PyPI."""
RTX = "tensorrt_rtx"
ENGINE, SCRIPT, CACHE = "model.plan", "build_engine.sh", "timing.cache"
BUILT = (ENGINE, f"{ENGINE}.json", CACHE)
"""What SCRIPT adds to a folder."""


RUNTIME = Runtime(
    key="tensorrt",
    title="TensorRT",
    label="TensorRT",
    precisions={"fp16": ("cuda",)},
    suffix=".plan",
    packages=("tensorrt",),
    extra="tensorrt-rtx",
    # an engine runs on the kind of GPU that it is built for, so here it is only written
    runs=False,
)


@dataclass(frozen=True)
class Profile:
    """The shapes that an engine supports, each (rows, tokens): the smallest, the one it is tuned for, the largest."""

    least: tuple[int, int]
    best: tuple[int, int]
    most: tuple[int, int]


def profile_of(batches: Sequence[int], lengths: Sequence[int]) -> Profile:
    """The profile for a benchmark's shapes: all shapes up to the largest, tuned for the middle one."""
    batches, lengths = sorted(batches), sorted(lengths)
    best = (batches[len(batches) // 2], lengths[len(lengths) // 2])
    return Profile((1, 1), best, (batches[-1], lengths[-1]))


def find_module() -> ModuleType | None:
    """The installed Python module of TensorRT, or None."""
    name = next((name for name in MODULES if importlib.util.find_spec(name)), None)
    return importlib.import_module(name) if name else None


def has_two_of_four(proto: onnx.ModelProto) -> bool:
    """Whether any large matrix that a MatMul or Gemm multiplies with has at most 2 non-zeros in each 4 along its input axis.

    One is enough: TensorRT checks the weights of each layer itself, and a pooler or a task's dense layer is never pruned.
    """
    from onnx import numpy_helper

    weights = {tensor.name: tensor for tensor in proto.graph.initializer if len(tensor.dims) == 2}
    for node in proto.graph.node:
        if node.op_type in ("MatMul", "Gemm") and len(node.input) > 1 and node.input[1] in weights:
            matrix = numpy_helper.to_array(weights[node.input[1]])
            turned = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
            # a task head has few rows, so a few zeros could form the pattern by chance
            if min(matrix.shape) >= 16 and _fits(matrix if turned else matrix.T):
                return True
    return False


def _fits(rows: np.ndarray) -> bool:
    """Whether the matrix (outputs, inputs) has at most 2 non-zeros in each 4 inputs of an output."""
    return rows.shape[1] % 4 == 0 and bool(((rows.reshape(-1, 4) != 0).sum(axis=1) <= 2).all())


def write_engine(graph: onnx.ModelProto, folder: Path, profile: Profile) -> tuple[Path, dict[str, Any]]:
    """Write FOLDER/model_fp16.onnx and the script that builds its engine, and the engine where TensorRT is installed.

    `graph` is the unfused fp32 graph. Returns the path of the fp16 graph and the entry of the engine in export.json.
    """
    from export.graph.files import carry_over, save
    from export.graph.half import half

    path, sparse = folder / "model_fp16.onnx", has_two_of_four(graph)
    # without the fused operators: TensorRT does not support ONNX Runtime's
    narrow = half(graph)
    carry_over(graph, narrow)
    save(narrow, path)
    script = write_script(path, folder, profile, sparse=sparse)
    facts = {"script": script.name, "sparse": sparse, "profile": asdict(profile), "engine": None}
    if (module := find_module()) is not None:
        plan = build_engine(path, folder, profile, sparse=sparse)
        # not compared: that needs its target GPU
        facts |= {"engine": plan.name, "compared": False, "library": library_of(module), "version": module.__version__}
    return path, facts


def build_engine(path: Path, folder: Path, profile: Profile, *, sparse: bool = False) -> Path:
    """Compile the ONNX file at `path` to FOLDER/model.plan, with model.plan.json beside it; no GPU is needed for RTX.

    `sparse` allows the kernels for 2:4 weights. TensorRT's FOLDER/timing.cache is read and written; RTX has none.
    Raises UserError E630 (not installed), E631 (it does not parse or compile).
    """
    trt = find_module()
    if trt is None:
        raise UserError("E630", "TensorRT is not installed", f"Run {SCRIPT} in the target container, or install the extra")
    problems: list[str] = []
    builder = trt.Builder(_logger(trt, problems))
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, builder.logger)
    if not parser.parse_from_file(str(path)):
        reason, fix = parser.get_error(0).desc(), "Export it with --no-fuse, in fp32 or fp16"
        raise UserError("E631", f"TensorRT cannot parse the graph ({reason})", fix, str(path))
    config, cache = _configure(trt, builder, network, profile, sparse, folder / CACHE)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        reason = problems[-1] if problems else "no reason given"
        raise UserError("E631", f"TensorRT cannot compile the graph ({reason[:200]})", "See the reason", str(path))
    if cache is not None:
        (folder / CACHE).write_bytes(bytes(config.get_timing_cache().serialize()))
    plan = folder / ENGINE
    plan.write_bytes(bytes(engine))
    facts = {"library": library_of(trt), "version": trt.__version__, "sha256": sha256_of(plan), "onnx": path.name}
    _notes(plan).write_text(json.dumps({**facts, "sparse": sparse, "profile": asdict(profile)}, indent=1) + "\n")
    return plan


def _logger(trt: ModuleType, problems: list[str]) -> Any:
    """A logger that collects errors for our error message instead of printing them."""

    class Keeper(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                problems.append(" ".join(message.split()))

    return Keeper()


def _configure(
    trt: ModuleType, builder: Any, network: Any, profile: Profile, sparse: bool, cache_path: Path
) -> tuple[Any, Any]:
    """Create the builder's config with profile, sparsity and timing cache: (config, the cache or None)."""
    config, shapes = builder.create_builder_config(), builder.create_optimization_profile()
    for number in range(network.num_inputs):
        shapes.set_shape(network.get_input(number).name, profile.least, profile.best, profile.most)
    config.add_optimization_profile(shapes)
    if sparse:
        config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)
    if library_of(trt) == RTX:  # RTX does not time kernels when building: it chooses them on the GPU that runs the engine
        return config, None
    cache = config.create_timing_cache(cache_path.read_bytes() if cache_path.is_file() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    return config, cache


def library_of(trt: ModuleType) -> str:
    """tensorrt or tensorrt_rtx: each can only read its own engines."""
    return trt.__name__.removesuffix("_bindings")


def _notes(plan: Path) -> Path:
    return plan.with_name(f"{plan.name}.json")


def check_engine(plan: Path, library: str, version: str) -> dict[str, Any]:
    """Recorded facts of an engine, after checking its sha256 and the library and version that built it.

    Raises UserError E632 (damaged, or without its description) and E633 (another library or version).
    """
    try:
        facts = json.loads(_notes(plan).read_text(encoding="utf-8"))
        intact = facts["sha256"] == sha256_of(plan)
        built = (facts["library"], facts["version"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError("E632", f"no {_notes(plan).name} beside the engine", "Build the engine again", str(plan)) from None
    if not intact:
        raise UserError("E632", "the engine is not the one that was built", "Build it again", str(plan))
    if built != (library, version):
        what = f"built by {' '.join(built)}, to be read by {library} {version}"
        raise UserError("E633", what, "Build it in the container that serves it", str(plan))
    return facts


def trtexec(onnx_name: str, inputs: Sequence[str], profile: Profile, *, sparse: bool) -> list[str]:
    """The command that builds the same engine with NVIDIA's trtexec."""

    def shapes(shape: tuple[int, int]) -> str:
        return ",".join(f"{name}:{shape[0]}x{shape[1]}" for name in inputs)

    return [
        "trtexec",
        f"--onnx={onnx_name}",
        f"--saveEngine={ENGINE}",
        "--stronglyTyped",
        f"--minShapes={shapes(profile.least)}",
        f"--optShapes={shapes(profile.best)}",
        f"--maxShapes={shapes(profile.most)}",
        f"--timingCacheFile={CACHE}",
        *(["--sparsity=enable"] if sparse else []),
    ]


def write_script(path: Path, folder: Path, profile: Profile, *, sparse: bool = False) -> Path:
    """Write FOLDER/build_engine.sh, which builds the engine of the ONNX file at `path` in a container that has trtexec."""
    import onnx

    inputs = [value.name for value in onnx.load(path, load_external_data=False).graph.input]
    command = " \\\n  ".join(shlex.quote(word) for word in trtexec(path.name, inputs, profile, sparse=sparse))
    script = folder / SCRIPT
    script.write_text(
        f"""#!/bin/sh
# Builds {ENGINE} from {path.name}. An engine runs on the kind of GPU and with the version of TensorRT that built it:
# give an image with trtexec of the release that serves it: nvcr.io/nvidia/tensorrt:YY.MM-py3 for tritonserver:YY.MM-py3.
#   sh {SCRIPT} IMAGE     in that container, on a machine with docker and the GPU
#   sh {SCRIPT}           here, where trtexec is on the PATH
set -eu
cd "$(dirname "$0")"
if [ $# -gt 0 ]; then
  exec docker run --rm --gpus all -v "$PWD":/engine -w /engine "$1" sh {SCRIPT}
fi
PATH="$PATH:/usr/src/tensorrt/bin"
{command}
""",
        encoding="utf-8",
    )
    script.chmod(0o755)
    return script
