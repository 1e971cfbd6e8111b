"""Collects a run's artifacts in one JSON record, `report.json`, from which the tables, figures and pages are made."""

from __future__ import annotations

from compressor.methods import method
from compressor.models.build import HEAD_ORIGINS
from compressor.tasks.task_kind import Metric, kind_for
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine.stage import Artifact, Inputs
from pipelines.reporting.candidates import Record, cells_of, find, p50, without_samples
from pipelines.reporting.format import milliseconds
from pipelines.reporting.generated import generated_record
from pipelines.reporting.growth_report import allocation_record
from pipelines.reporting.kept import layers_left
from pipelines.reporting.roles import measured_export, roles_of, served_note, usable_dense_files
from pipelines.reporting.summary import density, gain_steps, summary
from pipelines.reporting.words import (
    disturbed_note,
    headline,
    kept_note,
    left_out_note,
    notes,
    own_lengths_note,
    rival_note,
    teacher_note,
)
from pipelines.stages.training_verdicts import UNLEARNT, below_constant


def gather(inputs: Inputs, measurements: Record) -> Record:
    """The whole record of a run. `measurements` come from the benchmark; stages that did not run leave empty lists."""
    candidates = measurements["candidates"]
    roles = roles_of(inputs, measurements)
    cells = cells_of(roles["dense"])
    usable = usable_dense_files(inputs, candidates)
    fastest = min(usable, key=lambda row: p50(row, cells[-1]), default=None)
    # what full tuning would train: adapters and prefixes of the dense model were added by its tune
    tunable = roles["dense"]["parameters"] - roles["dense"]["inserted"]["parameters"]
    trainable, metric = trainable_rows(inputs, tunable), kind_for(inputs.task).metric
    control = control_record(inputs, measurements, roles["compressed"], metric.key)
    waited = measurements["waited"]
    first = unlearnt_notes(inputs) + served_note(inputs, roles["compressed"], measurements["device"])
    first += disturbed_note(waited, inputs.nearest("measurements").entry)
    against_rival = rival_note(usable, roles["compressed"], measurements, cells)
    return {
        **trained_facts(inputs),
        "headline": headline(roles, usable, cells, metric, control, waited),
        "brief": first + against_rival + unshown_losses(inputs),
        "notes": failure_notes(inputs)
        + first
        + notes(roles, cells, candidates, metric, control)
        + teacher_notes(inputs)
        + kept_notes(inputs)
        + against_rival
        + own_lengths_note(usable, roles["compressed"], candidates)
        + timing_note(metric, roles["dense"])
        + proof_notes(inputs)
        + left_out_note(measurements)
        + unshown_note(inputs),
        "baseline": roles["dense"]["name"],
        "rival": fastest["name"] if fastest else None,
        "control": control,
        "deployed": roles["compressed"]["name"],
        "cells": [{"batch": batch, "length": length} for batch, length in cells],
        "summary": summary(roles, cells, trainable, tunable, metric, control),
        "variants": [without_samples(row) for row in candidates],
        "steps": gain_steps(roles, cells, candidates, metric),
        "trainable": trainable,
        "pruning": pruning(inputs, roles),
        # a target is a time on the CPU
        "targets": targets(inputs, candidates if measurements["device"] == "cpu" else []),
        "density": density(roles),
        "flops": flops(roles),
        "quality_by_stage": quality_by_stage(inputs, candidates),
        "quality_by_file": quality_by_file(inputs, candidates),
        "measured": {
            "device": measurements["device"],
            "rounds": measurements["rounds"],
            "providers": measurements["providers"],
            # None on a GPU
            "limits": measurements["limits"],
            "waited": waited,
        },
        "machine": measurements["machine"],
    }


def trained_facts(inputs: Inputs) -> Record:
    """The part of the record that comes from the run and its artifacts alone."""
    return {
        **run_facts(inputs),
        "task": task_facts(inputs),
        "metric": metric_facts(inputs),
        "precision": precision(inputs),
        **allocation_record(inputs),
        **({"generated": generated} if (generated := generated_record(inputs)) else {}),
    }


def run_facts(inputs: Inputs) -> Record:
    """The same for one task or many: command, base, stages and their checks and losses."""
    return {
        "name": inputs.run.get("name", inputs.base.reference),
        "command": inputs.run.get("command", ""),
        "product": inputs.run.get("product", ""),
        "model": inputs.base.reference,
        "seed": inputs.seed,
        "head": next((HEAD_ORIGINS[a.metadata["head"]] for a in inputs.artifacts if "head" in a.metadata), ""),
        "failures": inputs.run.get("failures", []),
        "parity": [{"stage": a.entry, **record} for a in inputs.artifacts for record in a.metadata.get("parity", [])],
        "stages": [{"id": a.entry, "stage": a.stage, "artifact": a.id} for a in inputs.artifacts],
        "losses": {a.entry: a.metadata["losses"] for a in inputs.artifacts if a.metadata.get("losses")},
    }


def teacher_notes(inputs: Inputs) -> list[str]:
    """Notes on the recoveries that learned from texts without labels, or from another model than the dense one."""
    facts = [(artifact.entry, artifact.metadata) for artifact in inputs.artifacts if artifact.row.trains]
    named = inputs.run.get("beside", {})
    return [teacher_note(name, of, **named.get(name, {})) for name, of in facts if {"texts", "teacher"} & of.keys()]


def kept_notes(inputs: Inputs) -> list[str]:
    """Notes on the trainings whose best parameters were kept instead of the last."""
    return [kept_note(artifact.entry, artifact.metadata) for artifact in inputs.artifacts if "kept_step" in artifact.metadata]


def unlearnt_notes(inputs: Inputs) -> list[str]:
    """Notes on trainings that learned nothing. They come first: no figure below means much then."""
    kind = kind_for(inputs.task)
    taught = [a for a in trained(inputs) if a.row.trains]
    unlearnt = [f"After {a.entry} {UNLEARNT}." for a in taught if kind.unlearnt(a.metadata["quality"])]
    return unlearnt + [f"After {a.entry} {note}." for a in taught if (note := below_constant(kind, a.metadata))]


def failure_notes(inputs: Inputs) -> list[str]:
    """Notes on failed checks, which come before everything else."""
    return [f"FAILED: {failure['code']} {failure['what']}. {failure['fix']}." for failure in inputs.run.get("failures", [])]


def proof_notes(inputs: Inputs) -> list[str]:
    """Notes on comparisons without a clear result, on what is unusual about files, and on files that are only compared with."""
    exported = measured_export(inputs)
    if exported is None:
        return []
    notes, records = [], exported.metadata["parity"]
    for name, file in exported_files(exported, "compressed"):
        if why := file.get("repaired"):
            spared = ", ".join(file["excluded"])
            notes.append(f"{name} was refused with every matrix in int8 ({why}) and passes with these in fp32: {spared}.")
        if bits := file.get("weight_bits"):
            notes.append(f"{name} has weights of {bits} bits: this processor has no VNNI, and products of 8 bits overflow.")
        if apart := file.get("attentions_apart"):
            notes.append(f"{name} computes {apart} attentions by several operators each, which is slower than by one.")
    for name, file in exported_files(exported, "dense"):
        if why := file.get("repaired"):
            beyond = f"Dense {name} exceeds its bound with every matrix in int8 ({why})"
            notes.append(f"{beyond} and is within it with these in fp32: {', '.join(file['excluded'])}.")
    notes += unshown_losses(inputs)
    beyond = [row["hop"] for row in records if not row["passed"]]
    return notes + [f"{hop} exceeds its bound: that file is a baseline here and is not deployed." for hop in beyond]


def unshown_losses(inputs: Inputs) -> list[str]:
    """Notes on the loss that so few validation rows could not show of a compressed file."""
    exported = measured_export(inputs)
    records = exported.metadata["parity"] if exported else []
    return [f"{row['told']}." for row in records if row.get("told") and row["gated"]]


def exported_files(exported: Artifact, model: str) -> list[tuple[str, Record]]:
    """(runtime and precision, record) of every file of a model."""
    runtimes = exported.metadata["files"].get(model, {})
    return [(f"{RUNTIMES[key].title} {name}", file) for key, files in runtimes.items() for name, file in files.items()]


def timing_note(metric: Metric, dense: Record) -> list[str]:
    """Note on what was timed of a model that generates: not every benchmark times the further tokens, too."""
    further = " The tokens generated behind it, on a cache, are timed apart." if dense.get("further_tokens") else ""
    return [f"{metric.note}{further}"] if metric.note else []


def unshown_note(inputs: Inputs) -> list[str]:
    """Note on earlier benchmarks and reports of the run: a report shows the last benchmark, and the run's folder has the last
    report."""
    measured = [artifact for artifact in inputs.artifacts if artifact.kind == "measurements"]
    files = [f"{artifact.id}/measurements.json" for artifact in measured[:-1]]
    files += [f"{artifact.id}/report.html" for artifact in inputs.artifacts if artifact.kind == "report"]
    return [f"Earlier results of this run are not shown here, but kept in the store: {', '.join(files)}."] if files else []


def task_facts(inputs: Inputs) -> Record:
    """The task, without the folders of the user's disk."""
    task = inputs.task
    files = {"train": task.train.name, "validation": task.validation.name}
    facts = {"kind": task.kind, **files, "text": list(task.text_columns), "label": task.label, "max_length": task.max_length}
    return facts | ({"tests": [path.name for path in task.tests.values()]} if task.tests else {})


def metric_facts(inputs: Inputs) -> Record:
    """Names of the main metric: the key of its values, in a sentence, as a column title, as an axis title; those of every
    metric; and the name of the agreement of two models. If the main metric is of generated texts, also the factor by which it
    is printed, and the metric of the checks, which compare outputs."""
    kind = kind_for(inputs.task)
    metric, outputs = kind.metric, kind.output_metric
    every = [one for one in kind.choices if one is metric or not one.of_texts]
    of_texts = {"scale": metric.scale, "outputs": {"title": title_of(outputs), "unit": outputs.unit}}
    return {
        "key": metric.key,
        "name": metric.name,
        "unit": metric.unit,
        "title": title_of(metric),
        "every": [{"key": one.key, "title": title_of(one), "unit": one.unit} for one in every],
        "axis": ", ".join(filter(None, (metric.name, metric.unit.strip() or metric.times))),
        "agreement": kind.agreement.name if outputs.unit else f"{kind.agreement.name} × 100",
        **(of_texts if metric.of_texts else {}),
    }


def title_of(metric: Metric) -> str:
    """Heading of a column of a metric's values."""
    return f"{metric.name} {metric.times}".strip()


def control_record(inputs: Inputs, measurements: Record, compressed: Record, key: str) -> Record | None:
    """The control of the last recovery, and the main metric's difference of the deployed model from it, with its interval; None
    where there is none (in measurements made before there were controls, too)."""
    control = measurements.get("control")
    if control is None:
        return None
    # the benchmark may be of an earlier run, in which the stage had another id
    stage = next((a.entry for a in reversed(inputs.artifacts) if a.metadata.get("control")), control["stage"])
    facts = control_facts(inputs, {**control, "stage": stage}, compressed, key)
    return {**facts, "difference_interval": compressed["control_interval"]}


def control_facts(inputs: Inputs, control: Record, compressed: Record, key: str) -> Record:
    """The control of the last recovery (its stage and metadata), and the main metric's difference of the compressed model from
    it. It has `learned` where it, or one from which it went on, did not learn what the pruned model did."""
    facts = {name: control[name] for name in ("stage", "recoveries", "quality") if name in control}
    every = [control, *(artifact.metadata.get("control", {}) for artifact in inputs.artifacts)]
    learned = [{"learned": one["learned"]} for one in every if "learned" in one]
    return {**facts, **(learned[0] if learned else {}), "difference": compressed["quality"][key] - control["quality"][key]}


def trainable_rows(inputs: Inputs, dense_parameters: int) -> list[Record]:
    """Trainable parameters of every training stage: counted on the live model, and by the closed form of its method."""
    rows = []
    for artifact in inputs.artifacts:
        if "trainable" not in artifact.metadata:
            continue
        counts = artifact.metadata["trainable"]
        rows.append(
            {
                "stage": artifact.entry,
                "method": artifact.metadata["method"],
                "modules": artifact.metadata.get("modules", []),
                "formula": artifact.metadata["formula"],
                "closed_form": closed_form(artifact, inputs),
                "precision": artifact.metadata.get("precision", "fp32"),
                **counts,
                "share_of_dense": counts["body"] / dense_parameters,
            }
        )
    return rows


def closed_form(training: Artifact, inputs: Inputs) -> str:
    """The parameter count by the method's formula; for methods with two factors a matrix over the matrices in their shapes at
    that stage, e.g. '12 × 16 (384 + 384) + 192 = 147,648' (VeRA's matrices are shared: the count alone).

    Empty for full tuning, and if a stage continues older deltas, whose positions were pruned with their rows.
    """
    facts = training.metadata
    if "closed_form" not in facts or method(facts["method"]).trains_base:
        return ""
    total, rank = f"{facts['closed_form']:,}", facts["rank"]
    if not facts["matrices"] or not method(facts["method"]).rank_limited:
        return total
    terms = [f"{number} × {rank} ({rows:,} + {columns:,})" for number, rows, columns in facts["matrices"]]
    return f"{' + '.join(terms + [str(facts['places'])] * bool(facts['places']))} = {total}"


def pruning(inputs: Inputs, roles: dict[str, Record]) -> Record:
    """The requested prunes, and per layer the original indices of the units left, and how many there were."""
    models = [artifact for artifact in inputs.artifacts if artifact.kind == "model"]
    kept = next((a.metadata["kept"] for a in reversed(models) if a.metadata.get("kept")), {})
    keys = ("structure", "criterion", "scope", "remove", "pattern", "modules", "entries", "hidden", "hides")
    removals = [(a.entry, item) for a in models for item in a.metadata.get("items", [])]
    items = [{"stage": entry, **{key: item[key] for key in keys if key in item}} for entry, item in removals]
    return {"items": items, "layers": layers_left(kept, roles["dense"]["layers"])}


def precision(inputs: Inputs) -> Record | None:
    """The trials of `precision: auto` and its choice; None where the precisions were listed."""
    exported = measured_export(inputs)
    return exported.metadata.get("auto") if exported else None


def targets(inputs: Inputs, candidates: list[Record]) -> list[Record]:
    """Every target that a prune was given: what it says of itself, and beside the last one what the benchmark measured of the
    model as it is deployed, where it has that batch, length, precision and runtime."""
    reached = [{"stage": a.entry, **a.metadata["target"]} for a in inputs.artifacts if "target" in a.metadata]
    if not reached or "table" not in reached[-1]:
        return reached
    last = reached[-1]
    pair = [find(candidates, model, last["precision"], last["runtime"]) for model in ("dense", "compressed")]
    times = [ms for row in pair if row and (ms := time_of(row, last["batch"], last["length"]))]
    if len(times) == len(pair):
        dense, compressed = times
        speedup = last["goal"] == "speedup"
        value, told = (dense / compressed, f"{dense / compressed:.2f}x") if speedup else (compressed, milliseconds(compressed))
        last |= {"benchmark": value, "told": f"{last['told']}, benchmark {told}"}
    return reached


def time_of(candidate: Record, batch: int, length: int | None) -> float | None:
    """The measured milliseconds of a batch of rows of a length, or of their own lengths as they come; None if not measured."""
    if length is not None:
        cell = (batch, length)
        return p50(candidate, cell) if cell in [(row["batch"], row["length"]) for row in candidate["latency"]] else None
    passes = [row for row in candidate.get("real_lengths", ()) if (row["order"], row["batch"]) == ("arrival", batch)]
    # of fewer rows than a batch has all are one, which counts as a whole one
    return passes[0]["p50"] / max(passes[0]["rows"] / batch, 1) if passes else None


def flops(roles: dict[str, Record]) -> list[Record]:
    """Total FLOPs by length (attention scores included) and the papers' ratio (linear layers, tune's deltas unmerged)."""
    dense, compressed = roles["dense"], roles["compressed"]
    return [
        {
            "length": int(length),
            "dense": count,
            "compressed": compressed["flops"][length],
            "ratio": compressed["flops_ratio"][length],
            "paper_ratio": compressed["paper_flops_ratio"],
        }
        for length, count in dense["flops"].items()
    ]


def quality_by_stage(inputs: Inputs, candidates: list[Record]) -> list[Record]:
    """The metrics after every stage that changes the model, then those of each exported compressed file."""
    rows = [(a.entry if a.entry != a.stage else a.row.outcome or a.entry, a.metadata["quality"]) for a in trained(inputs)]
    exported = (row for row in candidates if row["model"] == "compressed")
    rows += [(row["name"].removeprefix("compressed "), row["quality"]) for row in exported]
    return [{"stage": name, **quality} for name, quality in rows]


def quality_by_file(inputs: Inputs, candidates: list[Record]) -> list[Record]:
    """The metrics on the validation rows, and after each stage that scores them on the test files, by the name of the file; of
    a recovery's control, too."""
    rows, stages, made = [], quality_by_stage(inputs, candidates), trained(inputs)
    for artifact, measured in zip(made, stages, strict=False):
        stage, control = measured["stage"], artifact.metadata.get("control")
        models = {stage: artifact.metadata} | ({f"control of {artifact.entry}": control} if control else {})
        for name, facts in models.items():
            files = {"validation": facts["quality"], **facts.get("tests", {})}
            rows += [{"stage": name, "file": file, **quality} for file, quality in files.items()]
    return rows + [{"file": "validation", **row} for row in stages[len(made) :]]


def trained(inputs: Inputs) -> list[Artifact]:
    """The model artifacts with a measured quality."""
    return [artifact for artifact in inputs.artifacts if artifact.kind == "model" and "quality" in artifact.metadata]
