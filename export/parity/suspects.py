"""Locating where two models diverge: the first block whose output differs, for the message of a failed comparison."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.pruning.surgery import kept_of
from compressor.tasks.features import Encoding, torch_forward
from export.parity.bounds import BLOCKS_AGREE, MATRIX_DIFFERS, SUSPECT_SHARE
from export.runtimes.runtime import Runtime, encoder_of
from export.runtimes.runtime_registry import runtime_of

BEFORE, AFTER, UNKNOWN = "the embeddings", "the pooler or the task head, behind the last block", "not known"
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
    matrix = next((name for name in inside if _difference(ours[name], theirs[name]) > MATRIX_DIFFERS), None)
    return f"{block}, from its {matrix.partition('/')[2]} on" if matrix else block


def suspect_in_graph(model: nn.Module, path: Path, encoding: Encoding, runtime: Runtime | None = None) -> str:
    """The first block of the PyTorch `model` whose output no value in the file at `path` comes near to.

    Fusion and quantization rename values and equal initializers are stored once, so values are matched by content, not by name.
    """
    runtime = runtime or runtime_of(path)
    if encoder_of(path) is not None:
        return f"{UNKNOWN} (encoder and decoder are two graphs)"
    try:
        values = runtime.values(path, encoding)
        if values is None:
            return f"{UNKNOWN} ({runtime.title} shows no values between the blocks)"
        ours = {name: value for name, value in outputs_of(model, encoding).items() if "/" not in name}
    except (UserError, *runtime.failures()) as error:
        return f"{UNKNOWN} ({getattr(error, 'what', 'its graph does not run with every value shown')})"
    nearest, real = {}, encoding["attention_mask"] == 1
    for name, expected in ours.items():
        # at padding a generating graph uses other positions, which are irrelevant
        where = real if expected.shape[:2] == real.shape else ...
        alike = [_difference(expected[where], value[where]) for value in values if value.shape == expected.shape]
        # of the last block a graph may compute the first token alone
        first = expected[:, :1]
        alike += [_difference(first, value) for value in values if value.shape == first.shape]
        if not alike:
            return f"{UNKNOWN} (no value of the graph has the shape of {name}'s output)"
        nearest[name] = min(alike)
    return _first_apart(nearest)


def outputs_of(model: nn.Module, encoding: Encoding) -> Outputs:
    """Outputs of the embeddings, of every block and (as BLOCK/MATRIX) of its matrices, in the order of `MODULES`.

    Blocks are numbered as in the dense model. Raises UserError E301 for an architecture without a row.
    """
    with _watching(model) as seen:
        torch_forward(model)(encoding)
    return {name: tensor.float().cpu().numpy() for name, tensor in seen.items()}


@contextlib.contextmanager
def _watching(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context with hooks on the blocks and their matrices; their outputs are in the dict after the model has run."""
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


def _difference(reference: np.ndarray, candidate: np.ndarray) -> float:
    """Largest difference relative to the spread of the reference; infinite for a NaN."""
    difference = np.abs(candidate - reference).max() / max(float(reference.std()), 1e-12)
    return float(difference) if np.isfinite(difference) else float("inf")


def _first_apart(differences: dict[str, float]) -> str:
    """The first name whose difference is a large share of the largest; AFTER if all differences are negligible."""
    largest = max(differences.values(), default=0.0)
    if largest < BLOCKS_AGREE:
        return AFTER
    return next(name for name, difference in differences.items() if difference >= SUSPECT_SHARE * largest)
