"""The work of stage `select`: score every weight and write the chosen positions, one tensor of indices a matrix."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import Tensor, nn

from compressor.accelerator import accelerated, batches_on
from compressor.checkpoint import load_state
from compressor.deltas.links import merge_deltas
from compressor.methods import ground_of
from compressor.methods.selective import ground
from compressor.models.anatomy import Matrix, layers_of, matrices_of, modules_of
from compressor.models.build import build
from compressor.pruning.weights import overwritten
from compressor.selection.choice import choose_all, weight_score
from compressor.selection.gradients import GradientSettings, Heuristic, gradient_scores
from compressor.selection.score_names import DEFAULT_SAMPLES, OF_HEURISTIC
from compressor.tasks.data import Data, tensor_batches
from compressor.tasks.reading import TaskData, read_task
from compressor.tasks.task_kind import kind_of
from compressor.tensor_file import write_tensors
from pipelines.engine.stage import Inputs, Workspace
from pipelines.stages.loading import load_data
from pipelines.stages.select.config import SelectConfig
from pipelines.stages.trainings import starting_model


def seed_of(seed: int, path: str) -> int:
    """A separate seed for each matrix."""
    return int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:4])


def run(config: SelectConfig, inputs: Inputs, workspace: Workspace) -> dict[str, Any]:
    """Write omega.safetensors: path of each matrix -> its sorted flat int32 indices. After a prune: in the pruned shapes."""
    rank = _by_gradients if config.row.batch else _by_weights
    model, matrices, scores = rank(config, inputs, workspace)
    layers = [(number, f"{layer.path}.") for number, layer in enumerate(layers_of(model))]
    layer_of = {path: number for number, start in layers for path in scores if path.startswith(start)}
    omega = choose_all(scores, layer_of, config.places)
    write_tensors(omega, workspace.folder / "omega.safetensors")
    return {
        "score": config.score,
        "scope": config.scope,
        "modules": modules_of(model, config.modules),
        "ground": {key: getattr(config.ground(), key) for key in ("on", *ground_of(config.on), "modules")},
        "matrices": len(omega),
        "places": sum(len(places) for places in omega.values()),
        "of": sum(matrix.original.numel() for matrix in matrices),
    }


ScoredMatrices = tuple["nn.Module", "list[Matrix]", "dict[str, Tensor]"]
"""The model, the tensors in which Ω lies, and their scores by path."""


def start(config: SelectConfig, inputs: Inputs, data: Data | TaskData) -> tuple[nn.Module, list[Matrix]]:
    """The model as the next stage will train it, and the tensors in which Ω lies, bit-equal to their initial values there."""
    model = starting_model(inputs, data)
    return model, ground(merge_deltas(model) if config.on == "weights" else model, config.ground())


def _by_weights(config: SelectConfig, inputs: Inputs, workspace: Workspace) -> ScoredMatrices:
    """Scores of the pretrained weights in their pruned shapes, or of a newly initialized LoRA's or adapter's tensors.

    Entries that a mask hides, of W + ΔW or of W alone, score 0, so they are not candidates.
    """
    if config.on != "weights":
        model, matrices = start(config, inputs, read_task(inputs.task))
    else:
        model = untuned_model(inputs)
        matrices = matrices_of(model, config.modules)
    settings = {key: getattr(config, key) for key in config.row.reads if getattr(config, key) is not None}
    scores = {}
    with workspace.progress(f"scoring by {config.score}", len(matrices)) as bar:
        for matrix in matrices:
            seed = seed_of(inputs.seed, matrix.path) if config.row.own_seed else inputs.seed
            score = weight_score(matrix.used, config.score, seed, path=matrix.path, **settings)
            scores[matrix.path] = overwritten(matrix, score, 0.0)
            bar.advance()
    return model, matrices, scores


def untuned_model(inputs: Inputs) -> nn.Module:
    """The pretrained weights in their pruned shapes, in the class of the task: a T5 that generates has other paths than one
    that classifies."""
    earlier, base = inputs.nearest("model"), inputs.base.folder
    if earlier is not None:
        return load_state(earlier.folder, base, changes=False)
    return build(base, ["0", "1"], auto_class=kind_of(inputs.task.kind).auto_class)


def _by_gradients(config: SelectConfig, inputs: Inputs, workspace: Workspace) -> ScoredMatrices:
    """Scores by the task's gradients, on the model as the next stage will train it: tuned so far, with its head."""
    data = load_data(inputs)
    model, matrices = start(config, inputs, data)
    wanted = config.samples or min(DEFAULT_SAMPLES, len(data.training))
    # more than there are: batches as in a training, which repeats the rows in another order
    again = wanted > len(data.training)
    rows = data.train.repeated(wanted, inputs.seed) if again else data.draw(wanted, inputs.seed)
    size = config.gradient_rows
    heuristic = Heuristic(**{key: getattr(config, key) for key in OF_HEURISTIC if getattr(config, key) is not None})
    with workspace.progress(f"scoring by {config.score}", len(rows)) as bar, accelerated(model) as device:
        scores = gradient_scores(
            model,
            matrices,
            config.score,
            batches_on(device, tensor_batches(rows, data.pad_id, size, in_order=again)),
            batch_size=size,
            settings=GradientSettings(config.mode == "train", config.clip),
            heuristic=heuristic,
            kind=rows.kind,
            on_batch=bar.advance,
        )
    return model, matrices, {path: values.cpu() for path, values in scores.items()}
