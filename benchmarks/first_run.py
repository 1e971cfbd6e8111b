"""Does the first run succeed everywhere? The bundled recipes over seeds, thread counts and capped instruction sets.

    python benchmarks/first_run.py --out runs/first_run
    python benchmarks/first_run.py --out runs/first_run --confirm more.tsv --record docs/results

Each row of the matrix is `compress run RECIPE` in a process of its own, as a newcomer would type it, with its own seed, threads
and environment; --lanes of them at a time. What is finished stands in OUT/first_run.json and is not run again; a row that was
killed, or ended with another exit code than 0 or 3, is. A row is green where the command ends with 0. With --confirm, a file of
other labelled sentences (columns sentence and label, as the recipes have them), the int8 file that each run ships is compared
with its model on those rows, too: that tells a red row that is right from a false alarm. --record writes first_run.md and
first_run.json there. Exit code 3: a row is red; 2: a wrong argument.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.record import keep, read_record, write_record
from compressor.processor import default_threads, processor
from pipelines.engine.attempt import last_attempt
from pipelines.engine.store import write_atomic

ROOT = Path(__file__).resolve().parent.parent
SEEDS, OTHERS, THREADS = 10, 3, (2, 1, 4)
CAPS = (
    ("no AVX", {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}),
    ("AVX2", {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    ("AVX-512 without VNNI", {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}),
    ("AVX-512 with VNNI, no AMX", {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"}),
)
"""Instruction sets that PyTorch and OpenVINO are held to. ONNX Runtime has no such switch: it takes what the processor has."""
FINISHED = (0, 3)
"""Exit codes that tell of the recipe; others tell of what stopped it: a full disk, a signal."""
COLUMNS = ("recipe", "seed", "threads", "instructions", "ended", "minutes", "dense", "compressed", "of rounding", "repaired")


@dataclass(frozen=True)
class Row:
    """One run of the matrix."""

    recipe: str
    seed: int
    threads: int
    cap: str = ""

    @property
    def name(self) -> str:
        return "-".join((self.recipe, f"s{self.seed}", f"t{self.threads}", *([self.slug] if self.cap else [])))

    @property
    def slug(self) -> str:
        """The cap as part of a file's name."""
        return self.cap.replace(" ", "_").replace(",", "")

    def folder(self, out: Path) -> Path:
        """`--out` of the run: another instruction set is no reason for the store to make anything anew, so it gets its own."""
        return out / self.slug if self.cap else out


def matrix() -> Iterator[Row]:
    """The quickstart on ten seeds, whose threads differ in turn, on seed 0 with every number, and under every cap; the other
    recipes on three seeds."""
    yield from (Row("quickstart", seed, THREADS[seed % len(THREADS)]) for seed in range(SEEDS))
    yield from (Row("quickstart", 0, threads) for threads in THREADS[1:])
    yield from (Row("quickstart", 0, 2, cap) for cap, _ in CAPS)
    yield from (Row(recipe, seed, 2) for recipe in ("paper", "twice_as_fast") for seed in range(OTHERS))


def carried_out(row: Row, out: Path) -> dict[str, Any]:
    """Run one row, its output in OUT/NAME.log, and tell what it came to."""
    place = ("--out", str(row.folder(out)), "--set", f"name={row.name}")
    command = [sys.executable, "-m", "pipelines.cli", "run", row.recipe, *place]
    settings = {"seed": row.seed, "threads": row.threads}
    command += [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **dict(CAPS).get(row.cap, {})}
    clock = time.monotonic()
    with (out / f"{row.name}.log").open("wb") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment, check=False).returncode
    last = (out / f"{row.name}.log").read_text(errors="replace").strip().splitlines()[-1:]
    account = account_of(row.folder(out) / row.name) if ended in FINISHED else {}
    return {"ended": ended, "seconds": time.monotonic() - clock, "last": last, **account}


def account_of(folder: Path) -> dict[str, Any]:
    """Quality, comparisons and repairs of a run, from what it left; {} where a check has ended it: its report is an earlier
    run's then."""
    path, attempt = folder / "report.json", last_attempt(folder)
    if attempt is None or not attempt.finished or not path.is_file():
        return {}
    report = json.loads(path.read_text())
    key, variants = report["metric"]["key"], {row["name"]: row["quality"] for row in report["variants"]}
    return {
        "dense": variants[report["baseline"]][key],
        "compressed": variants[report["deployed"]][key],
        "parity": [{key: row.get(key) for key in ("hop", "verdict", "distance", "rounding")} for row in report["parity"]],
        "repaired": [note for note in report["notes"] if "was refused with every matrix in int8" in note],
        "failures": report.get("failures", []),
    }


def confirmed(folder: Path, more: Path) -> dict[str, float] | None:
    """What the shipped int8 file of a run changes of accuracy, in points, against its model in PyTorch on other rows; None of a
    run without such a file."""
    from compressor.tasks.features import predict, torch_forward
    from compressor.tasks.metrics import accuracy, difference_interval
    from export.runtimes.sessions import run as run_session
    from export.runtimes.sessions import session
    from pipelines.runs.finished import open_run
    from pipelines.stages.loading import load_data, load_model

    inputs = open_run(folder).inputs()
    inputs = replace(inputs, task=inputs.task.model_copy(update={"validation": more}))
    exported = inputs.nearest("onnx")
    if (file := exported.metadata["files"]["compressed"].get("onnxruntime", {}).get("int8")) is None:
        return None
    rows = load_data(inputs)
    outputs_of = partial(predict, rows=rows.validation.tokens, pad_id=rows.pad_id)
    live = partial(run_session, session(exported.folder / file["path"]))
    ours, theirs = outputs_of(torch_forward(load_model(inputs.nearest("model"), inputs.base))), outputs_of(live)
    labels = rows.validation.labels
    low, high = difference_interval(accuracy, theirs, ours, labels)
    change = accuracy(theirs, labels) - accuracy(ours, labels)
    return {"rows": len(labels), "change": 100 * change, "low": 100 * low, "high": 100 * high}


def cells(row: Row, account: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    rounding = [
        comparison["distance"] / comparison["rounding"]
        for comparison in account.get("parity", [])
        if comparison.get("rounding")
    ]
    verdicts = {0: "green", 3: "a check failed"}
    quality = (f"{100 * account[key]:.1f} %" if key in account else "" for key in ("dense", "compressed"))
    more = account.get("confirmed")
    return (
        row.recipe,
        str(row.seed),
        str(row.threads),
        row.cap or "all",
        verdicts.get(account["ended"], f"exit {account['ended']}: {' '.join(account.get('last', ()))[:80]}"),
        f"{account['seconds'] / 60:.1f}",
        *quality,
        " and ".join(f"{ratio:.2f}" for ratio in rounding),
        "yes" if account.get("repaired") else "",
        *((f"{more['change']:+.2f} ({more['low']:+.2f} to {more['high']:+.2f})",) if more else ("",)),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the runs, and of first_run.json")
    parser.add_argument("--only", nargs="+", help="names of rows, as OUT/first_run.json and the logs have them")
    parser.add_argument("--lanes", type=int, default=1, help="runs at a time")
    parser.add_argument("--confirm", type=Path, help="other labelled sentences, .tsv")
    parser.add_argument("--record", type=Path, help="folder for first_run.md and first_run.json")
    options = parser.parse_args(arguments)
    rows = list(matrix())
    if unknown := set(options.only or ()) - {row.name for row in rows}:
        parser.error(f"no row {', '.join(sorted(unknown))}; rows: {', '.join(row.name for row in rows)}")
    for folder in filter(None, (options.out, options.record)):
        folder.mkdir(parents=True, exist_ok=True)
    path, facts = options.out / "first_run.json", {"processor": processor()["cpu"]}
    try:
        record = read_record(path, "facts", facts) or {"facts": facts, "rows": {}}
    except ValueError as error:
        parser.error(str(error))
    ended = {name: account["ended"] for name, account in record["rows"].items()}
    asked = [row for row in rows if not options.only or row.name in options.only]
    missing = [row for row in asked if ended.get(row.name) not in FINISHED]
    with ThreadPoolExecutor(options.lanes) as lanes:
        accounts = lanes.map(partial(carried_out, out=options.out.absolute()), missing)
        for row, account in zip(missing, accounts, strict=True):
            keep(path, record, "rows", row.name, account)
            print(" | ".join(cells(row, account)), flush=True)
    finished = [row for row in rows if row.name in record["rows"]]
    for row in finished if options.confirm else ():
        account = record["rows"][row.name]
        folder = row.folder(options.out) / row.name
        if "confirmed" not in account and "compressed" in account and folder.is_dir():
            if (figures := confirmed(folder, options.confirm)) is None:
                print(f"{row.name}: no int8 file, so nothing to confirm", flush=True)
                continue
            keep(path, record, "rows", row.name, account | {"confirmed": figures})
    text = markdown(record, finished)
    print(text)
    if options.record:
        # the last line of a run's output names folders of this machine
        plain = {
            name: {key: value for key, value in account.items() if key != "last"} for name, account in record["rows"].items()
        }
        write_record(options.record / "first_run.json", {**record, "rows": plain})
        write_atomic(options.record / "first_run.md", text.encode())
    return 3 if any(account["ended"] for account in record["rows"].values()) else 0


def markdown(record: dict[str, Any], rows: Sequence[Row]) -> str:
    """The table in Markdown."""
    columns = (*COLUMNS, "int8 on other rows, points")
    green = sum(record["rows"][row.name]["ended"] == 0 for row in rows)
    lines = [columns, ["---"] * len(columns), *(cells(row, record["rows"][row.name]) for row in rows)]
    where = f"{record['facts']['processor']}, {default_threads()} cores"
    head = "# First runs\n\n`python benchmarks/first_run.py --out DIR --record docs/results`\n\n"
    head += f"{where}: {green} of {len(rows)} rows are green.\n\n"
    return head + "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
