"""The report of a run whose model was not timed, such as one that is not exported: quality and sizes, no latency."""

from __future__ import annotations

from compressor.cost import shape_of
from compressor.deltas.links import merge_all
from compressor.models.modules import STRUCTURES
from compressor.pruning.weights import filled_by_merge, nonzeros
from compressor.tasks.task_kind import Metric, kind_for
from pipelines.engine.environment import machine
from pipelines.engine.stage import Artifact, Inputs, Stage
from pipelines.reporting.candidates import Record
from pipelines.reporting.format import giga, points, scaled
from pipelines.reporting.gather import (
    control_facts,
    failure_notes,
    kept_notes,
    proof_notes,
    pruning,
    quality_by_file,
    quality_by_stage,
    targets,
    teacher_notes,
    trainable_rows,
    trained_facts,
    unlearnt_notes,
    unshown_losses,
    unshown_note,
)
from pipelines.reporting.generated import changed, difference_in_words, scores_of
from pipelines.reporting.roles import measured_export
from pipelines.reporting.summary import (
    comparison_row,
    control_row,
    control_words,
    nonzeros_row,
    quality_cell,
    relative,
    trainable_row,
)
from pipelines.reporting.words import apart_note, control_note
from pipelines.stages.loading import density_of, load_model
from pipelines.stages.recover.config import CONTROL
from pipelines.stages.recover.control import control_of


def gather_unmeasured(inputs: Inputs, stage: Stage, why: str) -> Record:
    """The whole record of a run without measurements, and `why` there are none; `stage` is the one that asks, whose packages
    are told."""
    metric = kind_for(inputs.task).metric
    last = inputs.nearest("model")
    exported = measured_export(inputs)
    apart = exported.metadata.get("apart") if exported else None
    roles = {"dense": _record(inputs.dense, inputs), "compressed": _record(last, inputs, apart)}
    trainable = trainable_rows(inputs, roles["dense"]["tunable"])
    score = next(scores_of(last, inputs.dense, [metric.key])) if metric.of_texts else {}
    control, length = _control(inputs, roles["compressed"], metric), str(inputs.task.max_length)
    unlearnt, untimed = unlearnt_notes(inputs), [f"Latency was not measured: {why}."]
    return {
        **trained_facts(inputs),
        "headline": _headline(roles, metric, score, control),
        "brief": unlearnt + unshown_losses(inputs) + untimed,
        "notes": failure_notes(inputs)
        + unlearnt
        + control_note(control, roles["compressed"], metric)
        + apart_note(roles["compressed"], length)
        + teacher_notes(inputs)
        + kept_notes(inputs)
        + proof_notes(inputs)
        + unshown_note(inputs)
        + untimed,
        "baseline": "dense",
        "control": control,
        "deployed": last.entry,
        "summary": [
            _quality_row(roles, metric, score),
            *([control_row(control, roles["compressed"], metric)] if control else []),
            *(trainable_row(row, roles["dense"]["tunable"]) for row in trainable),
            comparison_row(roles, "parameters", lambda row: row["parameters"], "{:,}".format, relative),
            nonzeros_row(roles),
            comparison_row(roles, f"FLOPs of a row of {length} tokens", lambda row: row["flops"][length], giga, relative),
        ],
        "trainable": trainable,
        "pruning": pruning(inputs, roles),
        "targets": targets(inputs, []),
        "density": [row for row in roles["compressed"]["density"] if row["pattern"]],
        "quality_by_stage": quality_by_stage(inputs, []),
        "quality_by_file": quality_by_file(inputs, []),
        "measured": None,
        "machine": machine([stage], inputs.threads),
    }


def _control(inputs: Inputs, compressed: Record, metric: Metric) -> Record | None:
    """The control of the last recovery. Its difference has no interval: the compressed model's
    answers to each row are not kept."""
    recovery = control_of(inputs.artifacts)
    if recovery is None:
        return None
    return control_facts(inputs, {"stage": recovery.entry, **recovery.metadata[CONTROL]}, compressed, metric.key)


def _record(artifact: Artifact, inputs: Inputs, apart: dict[str, int] | None = None) -> Record:
    """Quality and sizes of one model; merged, so that its deltas do not count, unless that would fill what its masks hide, or
    they are exported `apart` (their parameters and multiply-adds per token)."""
    apart = apart or {"parameters": 0, "macs": 0}
    length = inputs.task.max_length
    beside = 2 * length * apart["macs"]
    model = load_model(artifact, inputs.base)
    shape, density = shape_of(model), density_of(artifact, model)
    return {
        "quality": artifact.metadata["quality"],
        "parameters": shape.parameters + apart["parameters"],
        "tunable": shape.parameters - shape.inserted,
        "nonzeros": nonzeros(merge_all(model) if filled_by_merge(model) is None else model),
        "density": density,
        "flops": {str(length): shape.flops(length) + beside},
        "apart": {"parameters": apart["parameters"], "flops": {str(length): beside}},
        "layers": [{name: layer.units(name) for name in STRUCTURES} for layer in shape.layers],
    }


def _quality_row(roles: dict[str, Record], metric: Metric, score: Record) -> Record:
    """Row of the main metric, each with its interval; `score` is that of generated texts (`scores_of`), if it is of texts."""
    dense, compressed = (role["quality"][metric.key] for role in roles.values())
    title = f"{metric.name} ({', '.join(filter(None, (metric.times, '95 % interval')))})"
    cells = {name: quality_cell(role, metric) for name, role in roles.items()}
    return {"metric": title, **cells, "change": changed(score) if metric.of_texts else points(compressed - dense)}


def _headline(roles: dict[str, Record], metric: Metric, score: Record, control: Record | None) -> str:
    """The run in one sentence."""
    values = (roles[name]["quality"][metric.key] for name in ("compressed", "dense"))
    ours, theirs = (scaled(value, metric.scale, metric.unit) for value in values)
    sizes = f"{roles['compressed']['parameters']:,} of {roles['dense']['parameters']:,} parameters"
    difference = f", {difference_in_words(score)}," if "change" in score else ""
    number = f"{roles['compressed']['quality']['rows']:,} {'prompts' if metric.of_texts else 'rows'}"
    besides = ""
    if control:
        value = scaled(control["quality"][metric.key], metric.scale, metric.unit)
        besides = f" and {value} of the control ({control_words(control)})"
    return f"{sizes}, {metric.name} {ours} against {theirs} dense{difference}{besides} on {number}"
