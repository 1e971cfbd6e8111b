"""Where do two models part? The first block whose output differs, for the line that tells of a failed comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compressor.errors import UserError
from compressor.tasks.features import Encoding

if TYPE_CHECKING:
    from torch import Tensor, nn

SHARE = 0.1
"""A block is suspected when its difference is this share of the largest; rounding before the fault is far below it."""

BEFORE, AFTER, UNKNOWN = "the embeddings", "the pooler or the task head, behind the last block", "cannot be told"
Outputs = dict[str, np.ndarray]


def suspect_module(reference: nn.Module, candidate: nn.Module, encoding: Encoding) -> str:
    """The first block, and the first matrix in it, whose output differs between two PyTorch models; both get `encoding`."""
    try:
        ours, theirs = outputs_of(reference, encoding), outputs_of(candidate, encoding)
    except UserError as error:  # no row in the anatomy: blocks are unknown
        return f"{UNKNOWN} ({error.what})"
    shared = [name for name in ours if name in theirs and ours[name].shape == theirs[name].shape]
    blocks = [name for name in shared if "/" not in name]
    block = _first_apart({name: _difference(ours[name], theirs[name]) for name in blocks})
    # the matrices of the block in the anatomy's order, which is that of the computation
    inside = [name for name in shared if name.startswith(f"{block}/")]
    matrix = next((name for name in inside if _difference(ours[name], theirs[name]) > 1e-5), None)
    return f"{block}, from its {matrix.partition('/')[2]} on" if matrix else block


def suspect_in_graph(model: nn.Module, path: Path, encoding: Encoding) -> str:
    """The first block of the PyTorch `model` whose output no value in the ONNX graph at `path` comes near to.

    Fusion and quantization rename values and equal initializers are stored once, so values are matched by content, not by name.
    """
    from export.runtimes.sessions import failures, runtime_of

    if runtime_of(path) != "onnxruntime":
        return f"{UNKNOWN} ({runtime_of(path)} shows no values between the blocks)"
    try:
        ours = {name: value for name, value in outputs_of(model, encoding).items() if "/" not in name}
        values = graph_values(path, encoding)
    except (UserError, *failures()) as error:
        return f"{UNKNOWN} ({getattr(error, 'what', 'its graph does not run with every value shown')})"
    nearest, there = {}, encoding["attention_mask"] == 1
    for name, wanted in ours.items():
        # in padding a graph that generates has positions of its own, which say nothing
        where = there if wanted.shape[:2] == there.shape else ...
        alike = [_difference(wanted[where], value[where]) for value in values if value.shape == wanted.shape]
        if not alike:
            return f"{UNKNOWN} (no value of the graph has the shape of {name}'s output)"
        nearest[name] = min(alike)
    return _first_apart(nearest)


def outputs_of(model: nn.Module, encoding: Encoding) -> Outputs:
    """Output of the embeddings, of every block and (as BLOCK/MATRIX) of its matrices, in the anatomy's order.

    Blocks are numbered as in the dense model. Raises UserError E301 for an architecture without a row.
    """
    from compressor.tasks.features import torch_forward

    with _watching(model) as seen:
        torch_forward(model)(encoding)
    return {name: tensor.float().cpu().numpy() for name, tensor in seen.items()}


@contextlib.contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Hooks on the blocks and their matrices; what they saw is in the dict when the model has run."""
    from compressor.models.anatomy import layers_of
    from compressor.pruning.surgery import kept_of

    seen: dict[str, Tensor] = {}
    handles, layers = [], layers_of(model)
    numbers = list(kept_of(model)) or [str(number) for number in range(len(layers))]

    def see(name: str):
        # a sublayer with no unit left gives None, a block gives a tuple
        def hook(_module: object, _inputs: object, output: Tensor | tuple) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            if tensor is not None:
                seen[name] = tensor.detach()

        return hook

    def enter(_module: object, inputs: tuple, keywords: dict) -> None:
        seen[BEFORE] = (inputs[0] if inputs else keywords["hidden_states"]).detach()

    handles.append(layers[0].module.register_forward_pre_hook(enter, with_kwargs=True))
    for number, layer in zip(numbers, layers, strict=True):
        name = f"block {number}"
        handles.append(layer.module.register_forward_hook(see(name)))
        handles += [layer.linear(part).register_forward_hook(see(f"{name}/{part}")) for part in layer.names]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def graph_values(path: Path, encoding: Encoding) -> list[np.ndarray]:
    """Every float value of three axes that the graph computes from `encoding`, in order; nothing is optimized away."""
    import onnx

    from export.runtimes.sessions import plain_session, taken

    proto = onnx.load(path)
    names = [name for node in proto.graph.node for name in node.output if name]
    shown = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in shown)
    live = plain_session(proto.SerializeToString())
    values = live.run(None, taken(live, encoding))
    return [value for value in values if isinstance(value, np.ndarray) and value.dtype == np.float32 and value.ndim == 3]


def _difference(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Largest difference against the spread of the reference; infinite for a NaN."""
    difference = np.abs(candidate - reference).max() / max(float(reference.std()), 1e-12)
    return float(difference) if np.isfinite(difference) else float("inf")


def _first_apart(differences: dict[str, float]) -> str:
    """The first whose difference is a good share of the largest; behind all of them when they are all alike."""
    largest = max(differences.values(), default=0.0)
    if largest < 1e-4:
        return AFTER
    return next(name for name, difference in differences.items() if difference >= SHARE * largest)
