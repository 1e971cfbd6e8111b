"""How a run was measured, in the words of its report, and what was trained, for the head of a page."""

from __future__ import annotations

from export.latency.core_time import disturbance
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.reporting.candidates import Record
from pipelines.reporting.format import limits_text
from pipelines.reporting.latency_tables import limits_of


def facts(report: Record) -> list[tuple[str, str]]:
    """How the run was measured, as (name, value)."""
    measured, machine = report["measured"] or {}, report["machine"]
    versions = ", ".join(machine["packages"].values())
    on_cpu = measured.get("device", "cpu") == "cpu"
    computed_by = machine["cpu"] if on_cpu else f"{machine['accelerator']}; {machine['cpu']}"
    latency = "{device}, {rounds} interleaved rounds in shuffled order, one process a variant"
    pruned = "; ".join(removal_text(item) for item in report["pruning"]["items"])
    rows = [
        ("Command", report["command"]),
        ("Base model", report["model"]),
        *(row for name, task in tasks_read(report).items() for row in _task_facts(name, task)),
        ("Task head", report["head"]),
        ("Stages", " → ".join(row["id"] for row in report["stages"])),
        ("Removed", pruned),
        ("Target", "; ".join(aimed(row) for row in report["targets"])),
        ("Latency", latency.format(**measured) if measured else "not measured"),
        ("Machine", f"{computed_by}, {machine['cores']} cores, {machine['threads']} used, {machine['system']}"),
        ("Instructions", instructions_text(machine)),
        ("Limits", limits_text(limits_of(measured)) if measured else ""),
        ("Disturbed", disturbance(measured.get("waited", 0.0))),
        (
            "Computed by",
            "; ".join(f"{RUNTIMES[name].title}: {provider}" for name, provider in measured.get("providers", {}).items()),
        ),
        ("Versions", f"{report['product']}, Python {machine['python']}, {versions}"),
        (
            "Intervals",
            "95 % bootstrap over validation rows, 2,000 draws; differences are paired. One seed, no seed-to-seed spread",
        ),
        ("Seed", str(report["seed"])),
    ]
    return [(name, value) for name, value in rows if value]


def instructions_text(machine: Record) -> str:
    """The processor's instruction sets, and the environment variables that keep libraries from some of them."""
    names = ", ".join(machine["instructions"])
    limits = [f"{name}={value}" for name, value in machine.get("limits", {}).items()]
    return f"{names or 'not known'}; limited by {' and '.join(limits)}" if limits else names


def tasks_read(report: Record) -> dict[str, Record]:
    """What was read of each task by its name; '' is that of a run with one task."""
    return report.get("reads") or {"": report["task"]}


def _task_facts(name: str, task: Record) -> list[tuple[str, str]]:
    columns = f"{task['kind']}, {', '.join(task['text'])} → {task['label']}; {task['train']}, {task['validation']}"
    return [(f"Task {name}".strip(), columns), (f"Only scored {name}".strip(), ", ".join(task.get("tests", ())))]


def about(report: Record) -> str:
    """What was trained, for the head of a page: 'classification on dev.tsv', or '3 tasks: mood, topic, grammar'."""
    tasks = tasks_read(report)
    if "" in tasks:
        return f"{tasks['']['kind']} on {tasks['']['validation']}"
    return f"{len(tasks)} task{'s' * (len(tasks) > 1)}: {', '.join(tasks)}"


def aimed(row: Record) -> str:
    """'target 2.00x, predicted 1.97x, measured 1.94x (ONNX fp32, batch 8 × 128; heads by taylor, neurons by taylor)'."""
    where = ""
    if "table" in row:
        where = f"{RUNTIMES[row['runtime']].label} {row['precision']}, batch {row['batch']} × {row['length'] or 'own lengths'}"
    # whole layers are not ranked by a criterion
    ranked = ", ".join(f"{name} by {criterion}" for name, criterion in row["criterion"].items())
    how = "; ".join(filter(None, (where, ranked)))
    return f"{row['told']} ({how})" if how else row["told"]


def removal_text(item: Record) -> str:
    """'heads by delta, 6 per layer', 'weights by delta_or_weight, unstructured, 1,234 of 6,170 zero'."""
    if item["structure"] == "weights":
        alone = " in W alone" if item.get("hides") == "weight" else ""
        return f"weights by {item['criterion']}, {item['pattern']}, {item['hidden']:,} of {item['entries']:,} zero{alone}"
    everywhere = item["scope"] == "global" or item["structure"] == "layers"
    return f"{item['structure']} by {item['criterion']}, {item['remove']} {'in all' if everywhere else 'per layer'}"
