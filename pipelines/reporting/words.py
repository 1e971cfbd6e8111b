"""Sentences of a report: the headline, and notes that prevent wrong conclusions."""

from __future__ import annotations

from collections.abc import Iterable

from compressor.cost import human_bytes
from compressor.tasks.task_kind import Metric
from export.latency.core_time import disturbance
from export.runtimes.runtime_registry import RUNNABLE, RUNTIMES
from pipelines.reporting.candidates import Record, find, p50
from pipelines.reporting.format import (
    GAIN,
    Speed,
    digits_of_points,
    factor,
    faster,
    faster_between,
    giga,
    hundredths,
    percent,
    points,
    points_between,
    sentence,
    smaller,
    verdict,
)
from pipelines.reporting.latency_tables import ORDER_WORDS
from pipelines.reporting.summary import change_of, control_words, is_pruned, masks_of_base, speed_of, speedup
from pipelines.stages.training_plan import PASSES_OF_LABELS

TAUGHT = {"logits": "outputs", "hidden": "hidden states", "both": "outputs and hidden states"}
"""What of its teacher a recovery with texts learns, by its `distill`."""


def headline(
    roles: dict[str, Record],
    usable: list[Record],
    cells: list[tuple[int, int]],
    metric: Metric,
    control: Record | None = None,
    waited: float = 0.0,
) -> str:
    """The run in one sentence: against dense PyTorch, the fastest of the `usable` dense files, and the `control`.

    A speed is claimed only where its interval excludes 1, and said to be disturbed where the processes `waited` too long.
    """
    dense, compressed, cell = roles["dense"], roles["compressed"], cells[-1]
    speed = speedup(dense, compressed, cell)
    than = f"{speed.words('faster', 'slower', 'no faster')} {'against' if speed.is_open else 'than'} dense PyTorch"
    alone, further = against_fastest(usable, compressed, cell), ""
    if dense.get("further_tokens"):
        each = faster(speedup(dense, compressed, cell, "further_tokens"))
        further = f", {each} for each further token{against_fastest(usable, compressed, cell, 'further_tokens')}"
    disturbed = ", in disturbed times" if disturbance(waited) else ""
    ours, theirs = (hundredths(record["quality"][metric.key], metric.unit) for record in (compressed, dense))
    difference = verdict(*compressed["difference_interval"]).removesuffix(" from dense").removesuffix(" than dense")
    if control:
        theirs += (
            f" dense and {hundredths(control['quality'][metric.key], metric.unit)} of the control ({control_words(control)})"
        )
        difference = f"{verdict(*compressed['difference_interval'])}, {verdict(*control['difference_interval'], 'the control')}"
    else:
        theirs += " dense"
    return (
        f"{sentence(than)} at batch {cell[0]}{alone}{further}{disturbed}, {smaller(dense['bytes'], compressed['bytes'])}, "
        f"{metric.name} {ours} against {theirs}: {difference} on {compressed['quality']['rows']:,} rows"
    )


def against_fastest(usable: list[Record], compressed: Record, cell: tuple[int, int], of: str = "latency") -> str:
    """' (1.93 × faster against the fastest dense file, ONNX int8)', of prompts or of further tokens; '' without such a file."""
    if not usable:
        return ""
    rival = min(usable, key=lambda row: p50(row, cell, of))
    return f" ({faster(speedup(rival, compressed, cell, of))} against the fastest dense file, {file_of(rival)})"


def control_note(control: Record | None, compressed: Record, metric: Metric) -> list[str]:
    """Note on the quality against the control, which shows what pruning costs: the recovery alone may gain more than that."""
    if control is None:
        return []
    on_labels = control.get("learned") == "labels"
    what = f"the dense model, trained {'further on the labels' if on_labels else 'as long as the recovered one'}"
    between = control.get("difference_interval", ())
    change = f"Against the control ({what}) {metric.name} changes by {change_of(control['difference'], metric, *between)}"
    if not between:
        return [f"{change}." if metric.of_texts else f"{change}; a benchmark tells the interval."]
    return [
        f"{change} (95 % interval {points_between(*between, ' points')}, paired over the same "
        f"{compressed['quality']['rows']:,} rows): {verdict(*between, 'the control')}."
    ]


def teacher_note(stage: str, recovery: Record, **named: str) -> str:
    """Note on what a recovery learned from: texts without labels, and whose outputs or hidden states. `named` are the names by
    which the pipeline has its `texts` and `teacher` now."""
    other = named.get("teacher", recovery.get("teacher", {}).get("reference"))
    teacher = f"the model {other}" if other else "the dense model"
    if "texts" not in recovery:
        return f"{stage} was distilled from {teacher}, not from the dense one."
    texts = recovery["texts"]
    file = named.get("texts", texts.get("file"))
    learned = [f"{texts['rows']:,} texts without labels ({file})"] if "file" in texts else []
    learned.append(f"the {texts['labelled']:,} training rows")
    if "variants" in texts:
        learned.append(f"{texts['variants']:,} random variants of these texts")
    lines = f"{stage} learned the {TAUGHT[recovery['distill']]} of {teacher} on {' and on '.join(learned)}, and no labels."
    if recovery.get("control", {}).get("learned") == "labels":
        lines += (
            " Its control, to which its own outputs teach nothing, learned the labels of the training rows instead, in at most "
            f"{PASSES_OF_LABELS:g} passes."
        )
    return lines


def kept_note(stage: str, training: Record) -> str:
    """Note on a training whose best parameters were kept: the rows that chose them, if they did, also measure them."""
    control = " (its control likewise)" if "kept_step" in training.get("control", {}) else ""
    count, last = len(training["evaluations"]), training["evaluations"][-1]["step"]
    if count == 1:
        return (
            f"{stage} gives the parameters of its last step{control}: only these were evaluated, so `keep_best` chose nothing."
        )
    return (
        f"{stage} gives the parameters of step {training['kept_step']:,} of {last:,}{control}: the best of {count} evaluations "
        "on the validation rows, so the quality on these rows is slightly too good."
    )


def notes(
    roles: dict[str, Record],
    cells: list[tuple[int, int]],
    candidates: list[Record],
    metric: Metric,
    control: Record | None = None,
) -> list[str]:
    """Notes needed to judge the headline: the share of the runtime, of int8, and the uncertainty of the quality."""
    dense, compressed = roles["dense"], roles["compressed"]
    batch = cells[-1][0]
    low, high = compressed["difference_interval"]
    change = compressed["quality"][metric.key] - dense["quality"][metric.key]
    lines = [
        f"{sentence(metric.name)} changes by {points(change, digits=digits_of_points(low, high))} (95 % interval "
        f"{points_between(low, high, ' points')}, paired over the same {compressed['quality']['rows']:,} rows): "
        f"{verdict(low, high)}.",
        *control_note(control, compressed, metric),
    ]
    runtime = compressed["runtime"]
    if "runtime" in roles:
        alone = faster(speedup(dense, roles["runtime"], cells[-1]))
        ours = faster(speedup(roles["runtime"], compressed, cells[-1]))
        words = (
            f"{RUNTIMES[runtime].title} alone, dense and in fp32: {alone} at batch {batch}. Compression on top of it: {ours}."
        )
        lines.append(words)
    else:
        name = RUNTIMES[runtime].label
        lines.append(f"Dense {name} fp32 was not exported: how much of the gain the runtime alone would give is not known.")
    fp32, int8 = (find(candidates, "compressed", precision, runtime) for precision in ("fp32", "int8"))
    if fp32 and int8:
        lines.append(int8_note(fp32, int8, cells))
    quantized = find(candidates, "dense", "int8", runtime)
    if quantized and int8:
        against = f"against int8 of the dense model: {faster(speedup(quantized, int8, cells[-1]))} at batch {batch}."
        lines.append(f"Pruned and int8 {against}" if is_pruned(roles) else f"int8 {against} Nothing was pruned.")
    length = str(cells[-1][1])
    return lines + zeros_note(compressed) + inserts_note(compressed, length) + apart_note(compressed, length)


def disturbed_note(waited: float, benchmark: str) -> list[str]:
    """Note that other work disturbed the times of `benchmark`, without which all others on speed mislead."""
    told = disturbance(waited)
    return [f"The times are disturbed, and so is every speed-up: {told}. --force {benchmark} measures again."] if told else []


def left_out_note(measurements: Record) -> list[str]:
    """Note on the exported files that were not measured, and why."""
    skipped = measurements.get("left_out", [])
    names = ", ".join(row["name"] for row in skipped)
    return [f"Not measured on this device: {names} ({skipped[0]['why']})."] if skipped else []


def zeros_note(compressed: Record) -> list[str]:
    """Note that masked weights, whose zeros are still stored and computed, save neither size nor time."""
    masked = [row for row in compressed["density"] if row["pattern"]]
    if not masked:
        return []
    entries, nonzeros = (sum(row[key] for row in masked) for key in ("entries", "nonzeros"))
    return [
        f"{entries - nonzeros:,} of the {entries:,} weights in the masked matrices are zero. They are stored and computed like "
        f"any other: the file is no smaller and {RUNTIMES[compressed['runtime']].title} no faster. Only 2:4 can be faster, on "
        "GPUs with kernels for it."
    ]


def file_of(record: Record) -> str:
    """The runtime and precision of a file: 'ONNX int8'."""
    return f"{RUNTIMES[record['runtime']].label} {record['precision']}"


def rival_note(usable: list[Record], compressed: Record, measurements: Record, cells: list[tuple[int, int]]) -> list[str]:
    """Note on the speed against the fastest of the `usable` dense files at every shape, which may be another at each, on a
    compressed file that is faster there than the one shown, and on what may be faster and was not measured: files of the
    device's other runtimes, and dense ones of other precisions."""
    if not usable:
        return []
    rivals = [min(usable, key=lambda row, cell=cell: p50(row, cell)) for cell in cells]
    names = [file_of(rival) for rival in rivals]
    gains = [
        f"{faster_between(speedup(rival, compressed, cell))} at batch {cell[0]}"
        for rival, cell in zip(rivals, cells, strict=True)
    ]
    if len(set(names)) == 1:
        speeds = f", {names[0]}: {', '.join(gains)}"
    else:
        speeds = f" of each: {', '.join(f'{gain} ({name})' for gain, name in zip(gains, names, strict=True))}"
    candidates, device = measurements["candidates"], measurements["device"]
    others = [(min(compressed_of(candidates), key=lambda row, cell=cell: p50(row, cell)), cell) for cell in cells]
    told = faster_than_shown(
        (speedup(compressed, other, cell), f"{file_of(other)} at batch {cell[0]}") for other, cell in others
    )
    able, measured = [name for name in RUNNABLE if device in RUNTIMES[name].devices()], {row["runtime"] for row in candidates}
    missing = [RUNTIMES[name].title for name in able if name not in measured]
    unknown = f" No file of {' or '.join(missing)} was exported: a dense one may take less time." if missing else ""
    if lacking := unmeasured_files(usable, compressed, measurements):
        unknown += f" No dense file {' or '.join(lacking)} was measured: it may take less time."
    return [f"Against the fastest dense file{speeds}.{told}{unknown}"]


def compressed_of(candidates: list[Record]) -> list[Record]:
    return [row for row in candidates if row["model"] == "compressed"]


def faster_than_shown(others: Iterable[tuple[Speed, str]]) -> str:
    """' Another compressed file is faster than the one shown: ...', of those (speed over the one shown, file and work) whose
    speed shows it; '' where none does."""
    shown = [
        f"{name}, by {factor(speed.ratio)} {speed.between}"
        for speed, name in others
        if speed.low > 1 and speed.ratio > 1 + GAIN
    ]
    return f" Another compressed file is faster than the one shown: {', '.join(shown)}." if shown else ""


def unmeasured_files(usable: list[Record], compressed: Record, measurements: Record) -> list[str]:
    """Dense files that were not measured, or are beyond their bound and not `usable`, of runtimes that were measured: of the
    deployed precision, and on a CPU of those narrower than fp32 that it computes."""
    candidates, machine = measurements["candidates"], measurements["machine"]
    files = [(compressed["runtime"], compressed["precision"])]
    for name in [name for name in RUNNABLE if name in {row["runtime"] for row in candidates}]:
        row = RUNTIMES[name]
        able = (one for one in row.precisions if row.is_for(one, "cpu") and row.computes(one, machine["instructions"]))
        files += [(name, one) for one in able if one != "fp32" and measurements["device"] == "cpu"]
    lacking = [(runtime, one) for runtime, one in dict.fromkeys(files) if find(usable, "dense", one, runtime) is None]
    beyond = {(runtime, one) for runtime, one in lacking if find(candidates, "dense", one, runtime)}
    return [f"{RUNTIMES[of[0]].label} {of[1]}{' within its bound' if of in beyond else ''}" for of in lacking]


def own_lengths_note(usable: list[Record], deployed: Record, candidates: list[Record]) -> list[str]:
    """Note on the speed over the fastest of the `usable` dense files on rows of their own lengths, in each way they were timed,
    and on a compressed file that is faster there than the one shown: fixed shapes may hide both."""
    passes = deployed.get("real_lengths")
    if not (usable and passes):
        return []
    speeds, others = [], []
    for timed in passes:
        dense, other = fastest_on_rows(usable, timed), fastest_on_rows(compressed_of(candidates), timed)
        speeds.append(f"{faster_between(speed_of(pass_of(dense, timed), timed))} {way_of(timed)} ({file_of(dense)})")
        others.append((speed_of(timed, pass_of(other, timed)), f"{file_of(other)} {way_of(timed)}"))
    told = faster_than_shown(others)
    return [f"On rows of their own lengths, against the fastest dense file of each: {', '.join(speeds)}.{told}"]


def pass_of(candidate: Record, timed: Record) -> Record:
    """A candidate's timing of the same rows in the same order and batches."""
    same = (timed["order"], timed["batch"])
    return next(row for row in candidate["real_lengths"] if (row["order"], row["batch"]) == same)


def fastest_on_rows(candidates: list[Record], timed: Record) -> Record:
    """The fastest of the candidates on the rows of a timing."""
    return min(candidates, key=lambda row: pass_of(row, timed)["p50"])


def way_of(timed: Record) -> str:
    """How the rows of a timing were batched: 'in batches of 8 sorted by length'."""
    return "one by one" if timed["batch"] == 1 else f"in batches of {timed['batch']} {ORDER_WORDS[timed['order']]}"


def apart_note(compressed: Record, length: str) -> list[str]:
    """Note on the cost of deltas that were not merged."""
    apart = compressed.get("apart") or {"parameters": 0}
    if not apart["parameters"]:
        return []
    flops = apart["flops"][length]
    return [
        f"The deltas are kept apart (merge: false): {apart['parameters']:,} parameters and {giga(flops)} FLOPs for a row of "
        f"{length} tokens ({percent(flops / compressed['flops'][length])}), which merging would save. "
        f"All figures{'' if masks_of_base(compressed) else ' but non-zeros, which are of the merged weights,'} include them."
    ]


def inserts_note(compressed: Record, length: str) -> list[str]:
    """Note that the method cannot be merged, and what that costs the deployed model."""
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
    """Note on the speed and size of int8 against fp32, also where int8 saves no time."""
    words = [speedup(fp32, int8, cell).words("the speed", "slower", "nothing here") for cell in cells]
    speeds = ", ".join(f"{word} at batch {cell[0]}" for word, cell in zip(words, cells, strict=True))
    return f"int8 over fp32 (both compressed) gives {speeds}; its file is {smaller(fp32['bytes'], int8['bytes'])}."
