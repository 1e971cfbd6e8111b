"""Importance of a unit (a head, an FFN neuron, a whole block): one number each; the lowest are removed first.

Heads are scored on the rows of query, key and value, neurons on the rows of ffn_in (both halves of a GLU) and the columns of
ffn_out, as DSEE section 3.3 sums |ΔW|; a block on all its matrices. Taylor and Fisher use gradients of the task's loss
instead, reconstruction the error of the hidden states.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from compressor.arguments import require_one_of
from compressor.errors import UserError
from compressor.models.anatomy import Layer, Matrix, layers_of
from compressor.models.modules import STRUCTURES
from compressor.pruning.block_passes import BlockPasses, Inputs, require_finite, streams_of
from compressor.pruning.refit import RIDGE
from compressor.pruning_criteria import CRITERIA, LOSS_POWER, SUMS, Criterion, Magnitude, Structure
from compressor.selection import finite
from compressor.tasks.kinds.classification import KIND as CLASSIFICATION
from compressor.tasks.task_kind import TaskKind

Changes = Mapping[str, Tensor]
"""Path of a matrix -> ΔW (out, in)."""


def _change(matrix: Matrix, changes: Changes) -> Tensor:
    return changes[matrix.path] if matrix.path in changes else torch.zeros_like(matrix.original)


VALUES: dict[Magnitude, Callable[[Matrix, Changes], Tensor]] = {
    "change": _change,
    "weight": lambda matrix, changes: matrix.used,
    "sum": lambda matrix, changes: matrix.weight,
}
"""What a criterion takes the absolute values of, (out, in), by its trait `of`."""


def changes_of(model: nn.Module, base: nn.Module | None = None) -> dict[str, Tensor]:
    """ΔW of every matrix that changed: from its chain, or from the difference to `base` after full tuning."""
    result = {}
    for number, layer in enumerate(layers_of(model)):
        for name in layer.names:
            matrix = layer.matrix(name)
            delta = matrix.delta
            if base is not None:
                delta = matrix.weight.detach() - layers_of(base)[number].matrix(name).weight.detach()
            if delta.any():
                result[matrix.path] = delta
    return result


def units_of(model: nn.Module, structure: Structure) -> list[int]:
    """Number of units of each block; a block is one unit of `layers`."""
    return [1 if structure == "layers" else layer.units(structure) for layer in layers_of(model)]


def weight_scores(
    model: nn.Module, structure: Structure, criterion: Criterion, changes: Changes, modules: Collection[str] | None = None
) -> list[Tensor]:
    """Σ|ΔW|, Σ|W| or Σ|W + ΔW| over a unit's rows and columns: one tensor (units,) per block. `modules`: of these alone.

    Of a block where nothing changed the criterion delta is 0. Raises UserError E502 when that is every block, E409 where a
    weight is not finite.
    """
    require_one_of("criterion", criterion, SUMS)
    if CRITERIA[criterion].needs_change:
        _require_tuned(model, structure, criterion, changes, modules)
    scores = []
    for layer, units in zip(layers_of(model), units_of(model, structure), strict=True):
        matrices = [(layer.matrix(name), rows) for name, rows in _scored_matrices(layer, structure, modules)]
        total = torch.zeros(units)
        for matrix, rows in matrices if units else ():
            sums = _magnitudes(matrix, criterion, changes).sum(dim=1 if rows else 0)
            finite.require_finite(sums, f"criterion {criterion}: the scores of {matrix.path}")
            total = total + sums.view(units, -1).sum(dim=1).cpu()
        scores.append(total)
    return scores


def _require_tuned(
    model: nn.Module, structure: Structure, criterion: Criterion, changes: Changes, modules: Collection[str] | None
) -> None:
    """Raise UserError E502 where no matrix that a structure is scored by has changed in any block that has units."""
    blocks = zip(layers_of(model), units_of(model, structure), strict=True)
    scored = [layer.matrix(name) for layer, units in blocks if units for name, _ in _scored_matrices(layer, structure, modules)]
    if scored and not any(matrix.path in changes for matrix in scored):
        names = ", ".join(dict.fromkeys(matrix.name for matrix in scored))
        what = f"{structure} by criterion {criterion}: nothing was tuned on {names}"
        raise UserError("E502", what, "Tune one of these modules, or use taylor or weight")


def _scored_matrices(layer: Layer, structure: Structure, modules: Collection[str] | None = None) -> Iterator[tuple[str, bool]]:
    """(matrix, whether a unit is its rows) for each matrix that counts in a structure's scores."""
    span, names = STRUCTURES.get(structure), [name for name in layer.names if modules is None or name in modules]
    if span is None:
        yield from ((name, True) for name in names)
        return
    yield from ((name, name != span.columns) for name in span.scored if name in names)


def _magnitudes(matrix: Matrix, criterion: Criterion, changes: Changes) -> Tensor:
    """The absolute values that a criterion sums for one matrix, (out, in)."""
    weight = VALUES[CRITERIA[criterion].of](matrix, changes)
    # masked entries do not count
    return (weight if matrix.mask is None else matrix.mask.change(weight)).detach().abs()


def random_scores(model: nn.Module, structure: Structure, seed: int) -> list[Tensor]:
    """Uniform random scores: the control that every criterion must beat."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(units, generator=generator) for units in units_of(model, structure)]


@dataclass
class _Probe:
    """Tensors recorded where a block's units can be masked: (x, the tensor whose gradient is taken)."""

    blocks: list[int]
    seen: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)


def loss_scores(
    model: nn.Module,
    structure: Structure,
    criterion: Criterion,
    encodings: Sequence[tuple[dict[str, Tensor], Tensor]],
    on_batch: Callable[[int], None] = lambda rows: None,
    *,
    kind: TaskKind = CLASSIFICATION,
) -> list[Tensor]:
    """First-order change of the loss when a unit is masked: Σ over rows of |e| (taylor, Molchanov et al. 2019) or of e²
    (fisher, Kwon et al. 2022), where e = Σ_t x · ∂L/∂x.

    `encodings` are batches of (inputs, labels); x is the unit's slice of the input of its outgoing matrix, for a whole block
    what it adds to its input. The sum over tokens and features is signed, the one over rows is not. The model is in eval mode.
    Raises UserError E521 where a gradient is not finite.
    """
    require_one_of("criterion", criterion, LOSS_POWER)
    if not encodings:
        raise ValueError("encodings is empty: scores by the loss need labelled rows")
    totals = [torch.zeros(units) for units in units_of(model, structure)]
    if not any(len(total) for total in totals):  # the block has no such units, or none left
        return totals
    model.eval()
    with _probed(model, structure) as probe:
        for encoding, labels in encodings:
            # with a loss summed over rows, each row has its own gradient
            loss = kind.loss(model(**encoding).logits, labels, "sum")
            seen = [probe.seen[number][1] for number in probe.blocks]
            # 0 where the loss reads none of a block: of an encoder without cross-attention, say
            gradients = torch.autograd.grad(loss, seen, materialize_grads=True)
            for number, gradient in zip(probe.blocks, gradients, strict=True):
                effect = probe.seen[number][0].detach() * gradient
                if effect.dim() == 2:  # an FFN may get the tokens of all rows in one axis (OPT)
                    effect = effect.view(*encoding["input_ids"].shape, -1)
                # of a row of the data: each of its choices is a row of the model
                units = len(totals[number])
                effect = effect.sum(dim=1).view(len(labels), -1, units, effect.shape[-1] // units).sum(dim=(1, 3))
                totals[number] += effect.abs().pow(LOSS_POWER[criterion]).sum(dim=0).cpu()
            on_batch(len(labels))
    for layer, total in zip(layers_of(model), totals, strict=True):
        require_finite(f"criterion {criterion}: gradients at the {structure} of {layer.path}", total)
    return totals


@torch.no_grad()
def reconstruction_scores(
    model: nn.Module, structure: Structure, batches: Sequence[Inputs], on_batch: Callable[[int], None] = lambda rows: None
) -> list[Tensor]:
    """Squared error of the hidden states without a unit, once the rest of its outgoing matrix W is refitted, relative to the
    square of these states: one tensor (units,) per block. For whole blocks nothing is refitted.

    That error is tr(W_u ((H⁻¹)_uu)⁻¹ W_uᵀ) with H = XᵀX + λI over all tokens of `batches` (encodings with an attention_mask),
    in closed form (Hassibi and Stork 1993; for groups of columns Kurtić et al. 2023); λ is that of a refit. `on_batch` is told
    the rows of each batch at each block. It needs no labels. Raises UserError E521 where a hidden state is not finite.
    """
    if structure == "layers":
        return _errors_without_blocks(model, batches, on_batch)
    passes, scores = BlockPasses(model, batches), []
    for place, (layer, units) in enumerate(zip(layers_of(model), units_of(model, structure), strict=True)):
        if not units:
            scores.append(torch.zeros(0))
            continue
        weight = layer.matrix(STRUCTURES[structure].columns).weight.double()
        gram, power = weight.new_zeros(weight.shape[1], weight.shape[1]), weight.new_zeros(())
        with passes.at(place, structure, streams_of(model, place, batches[-1])[structure]) as see:
            for number, inputs in enumerate(batches):
                seen = see(number)
                gram += seen.inputs.double().T @ seen.inputs.double()
                power += (seen.stream + seen.output).double().square().sum()
                on_batch(len(inputs["input_ids"]))
        require_finite(f"criterion reconstruction: hidden states at the {structure} of {layer.path}", gram, power)
        scores.append((_errors_without_units(weight, gram, units) / power).cpu())
    return scores


def _errors_without_units(weight: Tensor, gram: Tensor, units: int) -> Tensor:
    """tr(W_u ((H⁻¹)_uu)⁻¹ W_uᵀ) for each of the `units` equal groups of columns of W (out, in), H from XᵀX (in, in)."""
    eye, penalty = torch.eye(len(gram), dtype=gram.dtype, device=gram.device), RIDGE * gram.diagonal().mean()
    if not penalty > 0:  # the sublayer writes nothing
        return gram.new_zeros(units)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram + penalty * eye))
    width = len(gram) // units
    blocks = inverse.view(units, width, units, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    columns = weight.T.reshape(units, width, -1)
    return (columns * torch.linalg.solve(blocks, columns)).sum(dim=(1, 2))


def _errors_without_blocks(model: nn.Module, batches: Sequence[Inputs], on_batch: Callable[[int], None]) -> list[Tensor]:
    """Σ‖what a block adds‖² / Σ‖its output‖² over all tokens."""
    layers = layers_of(model)
    totals = torch.zeros(len(layers), 2, dtype=torch.float64)
    model.eval()
    with _probed(model, "layers") as probe:
        for inputs in batches:
            model(**inputs)
            for number, (added, after) in probe.seen.items():
                real = layers[number].token_mask(inputs).bool()
                totals[number] += torch.stack([states[real].double().square().sum() for states in (added, after)]).cpu()
            on_batch(len(inputs["input_ids"]) * len(totals))
    for layer, total in zip(layers, totals, strict=True):
        require_finite(f"criterion reconstruction: hidden states of {layer.path}", total)
    return [(added / whole)[None] for added, whole in totals]


@contextmanager
def _probed(model: nn.Module, structure: Structure) -> Iterator[_Probe]:
    """Context with hooks that record the tensors of a forward pass; the hooks are removed afterwards."""
    layers = layers_of(model)
    blocks = [number for number, units in enumerate(units_of(model, structure)) if units]
    probe = _Probe(blocks)

    def keep_input(number: int):
        def hook(module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
            # a leaf would detach the graph below; the frozen base gives no gradient path, so gradients are required here
            states = arguments[0] if arguments[0].requires_grad else arguments[0].requires_grad_(True)
            probe.seen[number] = (states, states)
            return (states,)

        return hook

    def keep_added(number: int):
        def hook(module: nn.Module, arguments: tuple, keywords: dict, output: Tensor | tuple) -> None:
            after = output[0] if isinstance(output, tuple) else output
            before = arguments[0] if arguments else keywords["hidden_states"]
            probe.seen[number] = (after - before, after if after.requires_grad else after.requires_grad_(True))

        return hook

    hooks = [
        layers[number].module.register_forward_hook(keep_added(number), with_kwargs=True)
        if structure == "layers"
        else layers[number].linear(STRUCTURES[structure].columns).register_forward_pre_hook(keep_input(number))
        for number in blocks
    ]
    try:
        yield probe
    finally:
        for hook in hooks:
            hook.remove()


def lowest(scores: Sequence[Tensor], count: Sequence[int]) -> list[list[int]]:
    """For each block the `count` units with the lowest scores, sorted; of equal scores the lowest index is taken first."""
    return [
        sorted(torch.sort(block_scores, stable=True).indices[:number].tolist())
        for block_scores, number in zip(scores, count, strict=True)
    ]


def lowest_of_all(scores: Sequence[Tensor], count: int, stay: Sequence[int], *, normalize: bool = False) -> list[list[int]]:
    """The `count` lowest units of the whole model, block by block and sorted; each block keeps at least `stay` units.

    `normalize` divides a block's scores by their Euclidean norm first (Molchanov et al. 2017, section 2.4). Equal scores: the
    first block and lowest index are removed.
    """
    if normalize:
        scores = [block / block.norm().clamp_min(torch.finfo(block.dtype).tiny) for block in scores]
    order = torch.sort(torch.cat(list(scores)), stable=True).indices.tolist()
    places = [(block, unit) for block, units in enumerate(scores) for unit in range(len(units))]
    gone: list[list[int]] = [[] for _ in scores]
    for block, unit in (places[place] for place in order):
        if count and len(gone[block]) < len(scores[block]) - stay[block]:
            gone[block].append(unit)
            count -= 1
    return [sorted(units) for units in gone]
