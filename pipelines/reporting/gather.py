"""From a run's artifacts to one JSON account: `report.json`, from which the tables, figures and pages are made."""

from __future__ import annotations

from typing import Any

from compressor.cost import human_bytes
from compressor.methods import method
from compressor.models import HEAD_ORIGINS
from compressor.tasks.kinds import Metric, kind_of
from pipelines.reporting.format import (
    factor,
    faster,
    gain,
    hundredths,
    interval,
    milliseconds,
    percent,
    points,
    sentence,
    significant,
    smaller,
    verdict,
)
from pipelines.reporting.kept import layers_left
from pipelines.stage import Artifact, Inputs

Record = dict[str, Any]

RUNTIMES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
"""What a runtime is called in a sentence."""

NARROWEST = ("int8", "fp16", "bf16", "fp32")
"""Precisions, the first that is there being what is shown where nothing is deployed."""

DONE = {"tune": "tuned", "prune": "pruned", "recover": "recovered", "merge": "merged"}
"""What a stage leaves behind, in words."""


def gather(inputs: Inputs, measurements: Record) -> Record:
    """The whole account of a run. `measurements` is what the benchmark wrote; stages that did not run leave empty lists."""
    candidates = measurements["candidates"]
    roles = roles_of(inputs, measurements)
    cells = cells_of(roles["dense"])
    # what full tuning would move: adapters and prefixes of the dense model came with its tune
    tunable = roles["dense"]["parameters"] - roles["dense"]["inserted"]["parameters"]
    trainable, metric = trainable_rows(inputs, tunable), kind_of(inputs.task.kind).metric
    return {
        "name": inputs.run.get("name", inputs.base.reference),
        "model": inputs.base.reference,
        "task": task_facts(inputs),
        "metric": metric_facts(inputs),
        "seed": inputs.seed,
        "head": next((HEAD_ORIGINS[a.metadata["head"]] for a in inputs.artifacts if "head" in a.metadata), ""),
        "headline": headline(roles, cells, metric),
        "notes": notes(roles, cells, candidates, metric) + left_out_note(measurements),
        "baseline": roles["dense"]["name"],
        "deployed": roles["compressed"]["name"],
        "cells": [{"batch": batch, "length": length} for batch, length in cells],
        "summary": summary(roles, cells, trainable, tunable, metric),
        "variants": [without_samples(row) for row in candidates],
        "steps": gain_steps(roles, cells, candidates, metric),
        "precision": precision(inputs),
        "parity": [{"stage": a.entry, **record} for a in inputs.artifacts for record in a.metadata.get("parity", [])],
        "trainable": trainable,
        "stages": [{"id": a.entry, "stage": a.stage, "artifact": a.id} for a in inputs.artifacts],
        "pruning": pruning(inputs, roles),
        "targets": targets(inputs, candidates),
        "losses": {a.entry: a.metadata["losses"] for a in inputs.artifacts if a.metadata.get("losses")},
        "density": density(roles),
        "flops": flops(roles),
        "quality_by_stage": quality_by_stage(inputs, candidates),
        "measured": {"device": measurements["device"], "rounds": measurements["rounds"]},
        "machine": measurements["machine"],
    }


def task_facts(inputs: Inputs) -> Record:
    """The task without the folders of one person's disk."""
    task = inputs.task
    files = {"train": task.train.name, "validation": task.validation.name}
    return {"kind": task.kind, **files, "text": list(task.text_columns), "label": task.label, "max_length": task.max_length}


def metric_facts(inputs: Inputs) -> Record:
    """What the main metric is called: the key of its values here, in a sentence, over a column, beside an axis; and what agrees
    where two models do."""
    kind = kind_of(inputs.task.kind)
    metric = kind.metric
    return {
        "key": metric.key,
        "name": metric.name,
        "unit": metric.unit,
        "title": metric.name if metric.unit else f"{metric.name} × 100",
        "axis": f"{metric.name}, {metric.unit.strip() or '× 100'}",
        "agreement": kind.agreement.name if metric.unit else f"{kind.agreement.name} × 100",
    }


def roles_of(inputs: Inputs, measurements: Record) -> dict[str, Record]:
    """Who is compared: `dense` (PyTorch fp32), `compressed` (as deployed) and, where exported, `runtime`, dense fp32 in the
    runtime of `compressed`: the baseline that tells what compression gives beyond a change of runtime."""
    candidates, repository = measurements["candidates"], inputs.nearest("repository")
    compressed = {(row["runtime"], row["precision"]): row for row in candidates if row["model"] == "compressed"}
    first = next(iter(compressed))[0]
    wanted = [(repository.metadata["runtime"], repository.metadata["precision"])] if repository else []
    roles = {
        "dense": next(row for row in candidates if row["name"] == measurements["baseline"]),
        "compressed": next(compressed[key] for key in (*wanted, *((first, name) for name in NARROWEST)) if key in compressed),
    }
    runtime = find(candidates, "dense", "fp32", roles["compressed"]["runtime"])
    return {**roles, "runtime": runtime} if runtime else roles


def without_samples(candidate: Record) -> Record:
    """A candidate without the time of every round, which the measurements keep."""
    timings = [{key: value for key, value in row.items() if key != "samples_ms"} for row in candidate["latency"]]
    return {**candidate, "latency": timings}


def find(candidates: list[Record], model: str, precision: str, runtime: str) -> Record | None:
    """The candidate of a model, precision and runtime, None where it was not exported."""
    wanted = (model, runtime, precision)
    return next((row for row in candidates if (row["model"], row["runtime"], row["precision"]) == wanted), None)


def cells_of(candidate: Record) -> list[tuple[int, int]]:
    """The (batch, length) pairs that the summary shows: batch 1 and 8 where measured, else the least and the most; the last
    is the headline's. Length 128 where measured, else the longest."""
    batches, lengths = ({timing[key] for timing in candidate["latency"]} for key in ("batch", "length"))
    length = 128 if 128 in lengths else max(lengths)
    small, large = (1 if 1 in batches else min(batches)), (8 if 8 in batches else max(batches))
    return [(batch, length) for batch in sorted({small, large})]


def timing(candidate: Record, cell: tuple[int, int]) -> Record:
    """The latency record of one (batch, length)."""
    return next(row for row in candidate["latency"] if (row["batch"], row["length"]) == cell)


def p50(candidate: Record, cell: tuple[int, int]) -> float:
    """Median latency in milliseconds."""
    return timing(candidate, cell)["p50"]


def headline(roles: dict[str, Record], cells: list[tuple[int, int]], metric: Metric) -> str:
    """The run in one sentence; what the runtime alone would give stands beside what compression gives."""
    dense, compressed, cell = roles["dense"], roles["compressed"], cells[-1]
    speed = gain(p50(dense, cell) / p50(compressed, cell), "faster", "slower", "No faster", 2)
    alone = ""
    if "runtime" in roles:
        name = roles["runtime"]["name"].removesuffix(" fp32")
        alone = f" ({faster(p50(roles['runtime'], cell), p50(compressed, cell), 2)} against {name})"
    ours, theirs = (hundredths(record["quality"][metric.key], metric.unit) for record in (compressed, dense))
    judged = verdict(*compressed["difference_interval"]).removesuffix(" from dense").removesuffix(" than dense")
    return (
        f"{speed} than dense PyTorch at batch {cell[0]}{alone}, {smaller(dense['bytes'], compressed['bytes'], 2)}, "
        f"{metric.name} {ours} against {theirs} dense: {judged} on {compressed['quality']['rows']:,} rows"
    )


def notes(roles: dict[str, Record], cells: list[tuple[int, int]], candidates: list[Record], metric: Metric) -> list[str]:
    """What a reader has to know to judge the headline: the share of the runtime, of int8, and the doubt in the quality."""
    dense, compressed = roles["dense"], roles["compressed"]
    batch = cells[-1][0]
    low, high = compressed["difference_interval"]
    change = compressed["quality"][metric.key] - dense["quality"][metric.key]
    lines = [
        f"{sentence(metric.name)} changes by {points(change)} (95 % interval {points(low, '')} to {points(high)}, paired over "
        f"the same {compressed['quality']['rows']:,} rows): {verdict(low, high)}."
    ]
    runtime = compressed["runtime"]
    if "runtime" in roles:
        alone = faster(p50(dense, cells[-1]), p50(roles["runtime"], cells[-1]))
        ours = faster(p50(roles["runtime"], cells[-1]), p50(compressed, cells[-1]))
        words = f"{RUNTIMES[runtime]} alone, dense and in fp32: {alone} at batch {batch}. Compression on top of it: {ours}."
        lines.append(words)
    else:
        name = roles["compressed"]["name"].split()[1]
        lines.append(f"Dense {name} fp32 was not exported: how much of the gain the runtime alone would give is not known.")
    fp32, int8 = (find(candidates, "compressed", precision, runtime) for precision in ("fp32", "int8"))
    if fp32 and int8:
        lines.append(int8_note(fp32, int8, cells))
    quantized = find(candidates, "dense", "int8", runtime)
    if quantized and int8:
        speed = faster(p50(quantized, cells[-1]), p50(int8, cells[-1]))
        lines.append(f"Against int8 of the dense model, pruned and int8 is {speed} at batch {batch}.")
    lines += fastest_note(compressed, candidates, cells[-1])
    length = str(cells[-1][1])
    return lines + zeros_note(compressed) + inserts_note(compressed, length) + apart_note(compressed, length)


def left_out_note(measurements: Record) -> list[str]:
    """Which exported files were not measured, and why."""
    skipped = measurements.get("left_out", [])
    names = ", ".join(row["name"] for row in skipped)
    return [f"Not measured on this device: {names} ({skipped[0]['why']})."] if skipped else []


def zeros_note(compressed: Record) -> list[str]:
    """Says what zeros that stay where they are do not give."""
    masked = [row for row in compressed["density"] if row["pattern"]]
    if not masked:
        return []
    entries, left = (sum(row[key] for row in masked) for key in ("entries", "nonzeros"))
    return [
        f"{entries - left:,} of the {entries:,} weights in the masked matrices are zero. They are stored and computed like any "
        "other: the file is no smaller and ONNX Runtime no faster. Only 2:4 can be faster, on GPUs with kernels for it."
    ]


def fastest_note(compressed: Record, candidates: list[Record], cell: tuple[int, int]) -> list[str]:
    """Where several runtimes were measured: against the fastest that the dense model can be had, whatever runtime."""
    if len({row["runtime"] for row in candidates if row["model"] == "dense"}) < 3:
        return []
    fastest = min((row for row in candidates if row["model"] == "dense"), key=lambda row: p50(row, cell))
    speed = faster(p50(fastest, cell), p50(compressed, cell))
    return [f"Against the fastest dense variant of any runtime, {fastest['name']}: {speed} at batch {cell[0]}."]


def apart_note(compressed: Record, length: str) -> list[str]:
    """Says what deltas cost that were not merged."""
    apart = compressed.get("apart") or {"parameters": 0}
    if not apart["parameters"]:
        return []
    flops = apart["flops"][length]
    return [
        f"The deltas are kept apart (merge: false): {apart['parameters']:,} parameters and {giga(flops)} FLOPs for a row of "
        f"{length} tokens ({percent(flops / compressed['flops'][length])}), which merging would save. All figures include them."
    ]


def inserts_note(compressed: Record, length: str) -> list[str]:
    """Says that the method cannot be merged, and what that costs the deployed model."""
    inserted = compressed["inserted"]
    if not inserted["kinds"]:
        return []
    flops, size = inserted["flops"][length], f"{inserted['parameters']:,}"
    return [
        f"The tuning is not mergeable: its {inserted['kinds']} stay in the deployed model. They are {size} of its parameters "
        f"({human_bytes(inserted['bytes'])} in fp32) and {giga(flops)} of its FLOPs for a row of {length} tokens "
        f"({percent(flops / compressed['flops'][length])}); all sizes and latencies here include them."
    ]


def int8_note(fp32: Record, int8: Record, cells: list[tuple[int, int]]) -> str:
    """Says plainly where int8 buys no time."""
    ratios = [p50(fp32, cell) / p50(int8, cell) for cell in cells]
    words = [gain(ratio, "the speed", "slower", "nothing here") for ratio in ratios]
    speeds = ", ".join(f"{word} at batch {cell[0]}" for word, cell in zip(words, cells, strict=True))
    return f"int8 over fp32 (both compressed) gives {speeds}; its file is {smaller(fp32['bytes'], int8['bytes'])}."


def summary(
    roles: dict[str, Record], cells: list[tuple[int, int]], trainable: list[Record], tunable: int, metric: Metric
) -> list[Record]:
    """Rows of strings: metric, dense PyTorch, dense fp32 in the deployed runtime, compressed, and the change against either."""
    length = str(cells[-1][1])
    rows = [
        quality_row(roles, metric),
        *(trainable_row(row, tunable) for row in trainable),
        compare(roles, "parameters", lambda row: row["parameters"], "{:,}".format, relative),
        *inserted_row(roles),
        compare(roles, "non-zeros of the merged weights", lambda row: row["nonzeros"], "{:,}".format, relative),
        compare(roles, "stored bytes", lambda row: row["bytes"], human_bytes, smaller),
        compare(roles, f"FLOPs of a row of {length} tokens", lambda row: row["flops"][length], giga, relative),
        papers_row(roles["compressed"]["paper_flops_ratio"]),
        *(latency_row(roles, cell) for cell in cells),
    ]
    throughput = f"throughput, batch {cells[-1][0]} × {cells[-1][1]}"
    return [*rows, compare(roles, throughput, lambda row: timing(row, cells[-1])["throughput"], rows_per_second, more)]


def inserted_row(roles: dict[str, Record]) -> list[Record]:
    """The parameters of adapters and prefixes, where there are some."""
    kinds = roles["compressed"]["inserted"]["kinds"]
    if not kinds:
        return []
    shown = {role: f"{record['inserted']['parameters']:,}" for role, record in roles.items()}
    return [{"metric": f"of these {kinds}", **shown, "change": "not mergeable"}]


def giga(count: float) -> str:
    return f"{significant(count / 1e9)} G"


def rows_per_second(value: float) -> str:
    return f"{significant(value)} rows/s"


def relative(before: float, after: float) -> str:
    return factor(after / before)


def more(before: float, after: float) -> str:
    return gain(after / before, "more", "less", "no gain")


def compare(roles: dict[str, Record], metric: str, value, show, change) -> Record:
    """One row: `value` of each role, shown by `show`; `change(before, after)` against dense PyTorch and the runtime alone."""
    row = {"metric": metric, **{role: show(value(record)) for role, record in roles.items()}}
    row["change"] = change(value(roles["dense"]), value(roles["compressed"]))
    if "runtime" in roles:
        row["change_runtime"] = change(value(roles["runtime"]), value(roles["compressed"]))
    return row


def papers_row(ratio: float) -> Record:
    """The papers divide by the dense linear layers without deltas, so dense is 1 by definition; four digits, as printed."""
    return {"metric": "FLOPs, the papers' way", "dense": "1 ×", "compressed": factor(ratio, 4), "change": factor(ratio, 4)}


def latency_row(roles: dict[str, Record], cell: tuple[int, int]) -> Record:
    """p50 of one (batch, length), each factor with the 95 % interval that the rounds allow."""
    metric = f"p50 latency, batch {cell[0]} × {cell[1]}"
    row = compare(roles, metric, lambda record: p50(record, cell), milliseconds, faster)
    for key, role in (("change", "dense"), ("change_runtime", "runtime")):
        if role in roles:
            low, high = speedup_interval(timing(roles[role], cell), timing(roles["compressed"], cell))
            low, high = (1 / high, 1 / low) if "slower" in row[key] else (low, high)
            row[key] += f" ({significant(low)} to {significant(high)})"
    return row


def speedup_interval(before: Record, after: Record) -> tuple[float, float]:
    """95 % bootstrap interval of the ratio of medians; rounds are interleaved, so both are judged on the same draws."""
    import numpy as np

    times = np.array([before["samples_ms"], after["samples_ms"]])
    draws = np.random.default_rng(0).integers(0, times.shape[1], size=(2000, times.shape[1]))
    slow, fast = np.median(times[:, draws], axis=2)
    low, high = np.percentile(slow / fast, [2.5, 97.5])
    return float(low), float(high)


def quality_row(roles: dict[str, Record], metric: Metric) -> Record:
    """The main metric with intervals; against dense PyTorch the paired interval and what it allows one to say."""

    def shown(record: Record) -> str:
        quality = record["quality"]
        return f"{hundredths(quality[metric.key], metric.unit)} ({interval(*quality['interval'])})"

    def change(before: float, after: float) -> str:
        return points(after - before)

    title = f"{metric.name} ({'' if metric.unit else '× 100, '}95 % interval)"
    row = compare(roles, title, lambda record: record["quality"][metric.key], str, change)
    low, high = roles["compressed"]["difference_interval"]
    row["change"] += f" ({points(low, '')} to {points(high, '')}): {verdict(low, high)}"
    return {**row, **{role: shown(record) for role, record in roles.items()}}


def trainable_row(row: Record, dense: int) -> Record:
    """Trainable parameters of one training stage beside all that full tuning would move; the task head apart."""
    return {
        "metric": f"trainable in {row['stage']} (task head {row['head']:,} apart)",
        "dense": f"{dense:,}",
        "compressed": f"{row['body']:,}",
        "change": f"{significant(100 * row['share_of_dense'])} % of dense",
    }


def gain_steps(
    roles: dict[str, Record], cells: list[tuple[int, int]], candidates: list[Record], metric: Metric
) -> list[Record]:
    """The way from dense PyTorch to what is deployed, one change at a time; factors are against the step before.

    A change that was not measured on its own is named together with the next one.
    """
    pruned = roles["compressed"]["layers"] != roles["dense"]["layers"] or density(roles)
    runtime, narrow = (roles["compressed"][key] for key in ("runtime", "precision"))
    narrow = "int8" if narrow == "fp32" else narrow
    words = [
        (RUNTIMES[runtime], roles.get("runtime")),
        ("pruning" if pruned else "nothing pruned", find(candidates, "compressed", "fp32", runtime)),
        (narrow, find(candidates, "compressed", narrow, runtime)),
    ]
    there, changes = [("dense PyTorch fp32", roles["dense"])], []
    for change, record in words:
        changes.append(change)
        if record:
            there.append((f"+ {' + '.join(changes)}", record))
            changes = []
    rows = []
    for (step, record), (_, before) in zip(there, [there[0], *there], strict=False):
        speeds = [
            {"batch": cell[0], "p50": p50(record, cell), "speedup": p50(before, cell) / p50(record, cell)} for cell in cells
        ]
        quality = {metric.key: record["quality"][metric.key]}
        rows.append({"step": step, "variant": record["name"], "bytes": record["bytes"], **quality, "latency": speeds})
    return rows


def trainable_rows(inputs: Inputs, dense_parameters: int) -> list[Record]:
    """What every training stage trained: counted on the live model, beside the closed form of its method."""
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
                **counts,
                "share_of_dense": counts["body"] / dense_parameters,
            }
        )
    return rows


def closed_form(training: Artifact, inputs: Inputs) -> str:
    """The count that the method's formula gives; for low-rank methods over the matrices in their shapes at that stage, e.g.
    '12 × 16 (384 + 384) + 192 = 147,648'.

    Empty for full tuning, and where a stage goes on with older deltas, whose places were cut with their rows.
    """
    facts = training.metadata
    if "closed_form" not in facts or method(facts["method"]).trains_base:
        return ""
    total, rank = f"{facts['closed_form']:,}", facts["rank"]
    if not facts["matrices"]:
        return total
    terms = [f"{number} × {rank} ({out:,} + {into:,})" for number, out, into in facts["matrices"]]
    return f"{' + '.join(terms + [str(facts['places'])] * bool(facts['places']))} = {total}"


def pruning(inputs: Inputs, roles: dict[str, Record]) -> Record:
    """What was asked, and per layer the original indices of the units that are left, out of how many."""
    models = [artifact for artifact in inputs.artifacts if artifact.kind == "model"]
    kept = next((a.metadata["kept"] for a in reversed(models) if a.metadata.get("kept")), {})
    asked = ("structure", "criterion", "scope", "remove", "pattern", "modules", "entries", "hidden")
    found = [(a.entry, item) for a in models for item in a.metadata.get("items", [])]
    items = [{"stage": entry, **{key: item[key] for key in asked if key in item}} for entry, item in found]
    return {"items": items, "layers": layers_left(kept, roles["dense"]["layers"])}


def precision(inputs: Inputs) -> Record | None:
    """What `precision: auto` tried and kept; None where the precisions were listed."""
    exported = inputs.nearest("onnx")
    return exported.metadata.get("auto") if exported else None


def density(roles: dict[str, Record]) -> list[Record]:
    """What is not zero in the matrices of the merged blocks, by pattern; empty where no weight was masked."""
    rows = roles["compressed"]["density"]
    return rows if any(row["pattern"] for row in rows) else []


def targets(inputs: Inputs, candidates: list[Record]) -> list[Record]:
    """Every target that a prune was given: what it says of itself, and beside the last one what the benchmark measured of the
    model as it is deployed, where it has that batch, length and precision."""
    found = [{"stage": a.entry, **a.metadata["target"]} for a in inputs.artifacts if "target" in a.metadata]
    if not found or "table" not in found[-1]:
        return found
    last = found[-1]
    pair = [find(candidates, model, last["precision"], "onnxruntime") for model in ("dense", "compressed")]
    cell = (last["batch"], last["length"])
    if all(pair) and cell in [(one["batch"], one["length"]) for one in pair[0]["latency"]]:
        dense, compressed = (p50(row, cell) for row in pair)
        value, words = (dense / compressed, "{:.2f}x") if last["goal"] == "speedup" else (compressed, "{:.3g} ms")
        last |= {"benchmark": value, "told": f"{last['told']}, benchmark {words.format(value)}"}
    return found


def flops(roles: dict[str, Record]) -> list[Record]:
    """Whole count by length (attention scores included) and the papers' ratio (linear layers, tune's deltas unmerged)."""
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
    """The metrics after every stage that changes the model, then of each exported compressed file."""
    rows = [(a.entry if a.entry != a.stage else DONE[a.stage], a.metadata["quality"]) for a in trained(inputs)]
    exported = (row for row in candidates if row["model"] == "compressed")
    rows += [(row["name"].removeprefix("compressed "), row["quality"]) for row in exported]
    return [{"stage": name, **quality} for name, quality in rows]


def trained(inputs: Inputs) -> list[Artifact]:
    """The model artifacts that carry a measured quality."""
    return [artifact for artifact in inputs.artifacts if artifact.kind == "model" and "quality" in artifact.metadata]
