"""Peers in one table: what other tools make of the same tuned model, beside the files of a run of ours.

    compress run quickstart --set 'export.runtime=[onnxruntime, openvino]' --set 'export.precision=[fp32, int8, bf16]'
    python benchmarks/peers.py runs/quickstart --cache ~/.cache/peers --threads 2 --out docs/results

The dense model of the run is saved as a Hugging Face folder. Each peer (benchmarks/peer_environments.py) gets an environment of
its own and makes its files from that folder by the script that a user would write (benchmarks/peers/). Environments and files
stay in --cache and are used again; --again makes them anew. A peer that fails is a row with its error, and the others go on.

All files are opened in this environment, by one version of each runtime, and timed in one process a runtime: in every round
each file runs each workload once, in shuffled order. Milliseconds are of one batch. `1 x 128` and `8 x 128` have no padding;
`real` are validation rows in batches of 8, in the order of the file. The factor is the median over the rounds of the time of
our dense file of the same runtime and precision over the file's own: above 1 it is faster than ours. A second session of our
dense fp32 file is the A/A control: where it is more than 3 % off, a column is void. Writes peers.json and peers.md; exit code
3 if a column is void, 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.arguments import round_count
from benchmarks.onnx_speed import Encoding
from benchmarks.peer_environments import PEERS, ROOT, Account, Peer, account_of, lines_of, plain_error
from benchmarks.peer_tables import markdown, void
from benchmarks.record import plain, write_record
from compressor.deltas.links import merge_all
from compressor.models.files.model_folder import TOKENIZER_FILES
from compressor.processor import default_threads, processor
from compressor.tasks import TaskConfig
from compressor.tasks.data import Data
from compressor.tasks.features import pad, predict, torch_forward
from compressor.tasks.reading import read_task
from export.runtimes.feeds import feeds_of
from export.runtimes.openvino import OpenVINOSession
from export.runtimes.runtime import Session
from export.runtimes.runtime_registry import RUNTIMES, runtime_of
from export.runtimes.sessions import session
from pipelines.engine.environment import distribution
from pipelines.engine.stage import Artifact, Inputs
from pipelines.engine.store import write_atomic
from pipelines.runs.finished import FinishedRun, open_run
from pipelines.stages.loading import load_data, load_model

BATCH, LENGTH, WARM_UP = 8, 128, 2
AGAIN, IN_BF16 = ", again", ", in bf16"
CALLS = {"1 x 128": 5, "8 x 128": 2}
"""Batches of a workload in a round: short ones are repeated."""


@dataclass(frozen=True)
class Candidate:
    """A file to measure. `compute` is the type that OpenVINO is told to compute in, None for the file's own."""

    name: str
    runtime: str
    precision: str
    path: Path
    minutes: float | None
    lines: int
    pruned: bool = False
    ours: bool = False
    compute: str | None = None
    failure: str = ""
    """Why there is no such file."""

    @property
    def key(self) -> str:
        return f"{self.runtime} {self.precision} {self.name}"

    @property
    def baseline(self) -> bool:
        """Whether other files of the runtime and precision are compared with this one."""
        return self.ours and not self.pruned and self.compute is None

    def to_json(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name not in ("path", "compute")}
        # weights beside an ONNX file may be in NAME.onnx.data or NAME.onnx_data
        parts = {*RUNTIMES[self.runtime].files(self.path).values(), *self.path.parent.glob(f"{self.path.name}*")}
        return {**facts, "bytes": 0 if self.failure else sum(part.stat().st_size for part in parts)}

    def open(self, threads: int) -> Session:
        """A session: ours as `export` opens it; a peer's, and ours `in bf16`, as OpenVINO does, only its type is explicit."""
        if self.compute is None:
            return session(self.path, threads=threads)
        options = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": str(threads)}
        live = OpenVINOSession(self.path, options | {"INFERENCE_PRECISION_HINT": self.compute})
        live.model.filler = None  # our sessions pad rows
        return live


@dataclass(frozen=True)
class Run:
    """A finished run with its rows, and the model folder that peers start from."""

    finished: FinishedRun
    data: Data
    inputs: Inputs
    dense: Artifact

    @classmethod
    def open(cls, folder: Path) -> Run:
        finished = open_run(folder)
        inputs = finished.inputs()
        return cls(finished, load_data(inputs), inputs, inputs.dense)

    def save(self, folder: Path) -> np.ndarray:
        """Write FOLDER/model and FOLDER/train.tsv (text, label) if they are not there; returns the model's logits."""
        model = merge_all(load_model(self.dense, self.inputs.base)).eval()
        if not (folder / "train.tsv").is_file():
            model.save_pretrained(folder / "model")
            for name in TOKENIZER_FILES:
                if (self.inputs.base.folder / name).is_file():
                    shutil.copy(self.inputs.base.folder / name, folder / "model" / name)
            write_training_rows(self.inputs.task, folder / "train.tsv")
        return self.logits(torch_forward(model))

    def logits(self, forward) -> np.ndarray:
        rows = self.data.validation
        return predict(forward, rows.tokens, self.data.pad_id, labels=rows.labels, batch_size=self.data.batch_size)

    def minutes(self, dense: bool) -> float | None:
        """Of the stages that make our files: export for the dense ones, everything after the tuning for the pruned ones."""
        records = self.finished.attempt.stages if self.finished.attempt else []
        names = [record.artifact for record in records]
        later = records[names.index(self.dense.id) + 1 :] if self.dense.id in names else []
        made = [record for record in later if record.stage not in ("deploy", "benchmark", "report")]
        counted = [record for record in made if not dense or record.stage == self.exported.stage]
        return None if any(record.reused for record in counted) else sum(record.seconds for record in counted) / 60

    @property
    def exported(self) -> Artifact:
        return self.inputs.nearest("onnx")

    def candidates(self, pipeline: Path) -> Iterator[Candidate]:
        """Our files that this CPU computes."""
        for model, runtimes in self.exported.metadata["files"].items():
            dense = model == "dense"
            for runtime, files in runtimes.items():
                row = RUNTIMES[runtime]
                for precision, file in files.items():
                    if "cpu" not in row.precisions[precision] or not row.computes(precision):
                        continue
                    path, name = self.exported.folder / file["path"], f"ours, {model}"
                    facts = (name, runtime, precision, path, self.minutes(dense), lines_of(pipeline))
                    candidate = Candidate(*facts, pruned=not dense, ours=True)
                    yield candidate
                    if (runtime, precision) == ("openvino", "int8") and row.computes("bf16"):
                        yield in_bf16(candidate)


def write_training_rows(task: TaskConfig, path: Path) -> None:
    """Write the rows that a run of single texts trains on as columns text and label, the class by its number.

    Raises UserErrors with E2xx faults.
    """
    train = read_task(task).train
    # the peers' scripts read a row a line
    texts = (" ".join(text.split()) for (text,) in train.texts)
    with path.open("w", encoding="utf-8", newline="") as target:
        csv.writer(target, delimiter="\t").writerows([("text", "label"), *zip(texts, train.labels, strict=True)])


def in_bf16(candidate: Candidate) -> Candidate:
    """The same file opened as OpenVINO opens it by default on a CPU with bf16: an fp32 file is then one in bf16."""
    precision = {"fp32": "bf16"}.get(candidate.precision, candidate.precision)
    return replace(candidate, name=candidate.name + IN_BF16, precision=precision, compute="bf16")


def candidates_of(peer: Peer, account: Account) -> Iterator[Candidate]:
    """The files that a peer makes, those that it failed to make, too."""
    for file in peer.files:
        path = account.folder / file.path
        runtime, name = runtime_of(path), f"{peer.name} {file.title}".strip()
        missing = "" if path.is_file() else account.failure or "it is not written"
        candidate = Candidate(name, runtime.key, file.precision, path, account.minutes, account.lines, file.pruned)
        if runtime.key != "openvino":
            yield replace(candidate, failure=missing)
            continue
        yield replace(candidate, failure=missing, compute="f32")
        if runtime.computes("bf16") and not missing:
            yield in_bf16(candidate)


@dataclass(frozen=True)
class Rows:
    """The validation rows as a process of their own gets them, and how long to measure: `real` has the first `count` rows."""

    tokens: list[dict[str, list[int]]]
    pad_id: int
    batch_size: int
    count: int
    rounds: int
    threads: int


@dataclass
class Measured:
    """The files of one runtime: logits or the error of each, and workload -> file -> milliseconds of a batch in every round."""

    logits: dict[str, np.ndarray] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    times: dict[str, dict[str, list[float]]] = field(default_factory=dict)


def measured(candidates: Sequence[Candidate], rows: Rows) -> Measured:
    """Open, run and time every file; the first is timed a second time as the control."""
    result, live = Measured(), {}
    for candidate in candidates:
        try:
            opened = candidate.open(rows.threads)
            outputs = predict(partial(outputs_of, opened), rows.tokens, rows.pad_id, batch_size=rows.batch_size)
            result.logits[candidate.key], live[candidate.key] = outputs, opened
        except Exception as error:  # whatever the file of another tool raises is a cell of its row
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            result.failures[candidate.key] = plain_error(said, candidate.path.parent)
        print(f"{candidate.key}: {result.failures.get(candidate.key, 'opened')}", file=sys.stderr, flush=True)
    live[candidates[0].key + AGAIN] = candidates[0].open(rows.threads)
    result.times = timed(live, rows)
    return result


def outputs_of(live: Session, batch: Encoding) -> np.ndarray:
    """The first output: peers do not agree on its name."""
    return live.run([live.get_outputs()[0].name], feeds_of(live, batch))[0]


def full(tokens: list[dict[str, list[int]]], rows: int) -> Encoding:
    """Rows of LENGTH tokens each, without padding, of the ids in `tokens`."""
    ids = np.resize(np.concatenate([row["input_ids"] for row in tokens]), (rows, LENGTH)).astype(np.int64)
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def timed(live: dict[str, Session], rows: Rows) -> dict[str, dict[str, list[float]]]:
    """Workload -> file -> milliseconds of a batch, in every round but the first, which warm up."""
    tokens, order = rows.tokens, random.Random(0)
    workloads = {name: [full(tokens, int(name.split()[0]))] * calls for name, calls in CALLS.items()}
    starts = range(0, min(rows.count, len(tokens)), BATCH)
    workloads["real"] = [pad(tokens[start : start + BATCH], rows.pad_id) for start in starts]
    times: dict[str, dict[str, list[float]]] = {workload: {name: [] for name in live} for workload in workloads}
    for number in range(rows.rounds + WARM_UP):
        for workload, batches in workloads.items():
            for name in order.sample(sorted(live), len(live)):
                milliseconds = turn(live[name], batches)
                if number >= WARM_UP:
                    times[workload][name].append(milliseconds)
        print(f"round {number + 1} of {rows.rounds + WARM_UP}", file=sys.stderr, flush=True)
    return times


def turn(live: Session, batches: Sequence[Encoding]) -> float:
    """Mean milliseconds of a batch, after one that brings the weights back into the caches."""
    feeds, name = [feeds_of(live, batch) for batch in batches], [live.get_outputs()[0].name]
    live.run(name, feeds[0])
    start = time.perf_counter()
    for feed in feeds:
        live.run(name, feed)
    return 1000 * (time.perf_counter() - start) / len(feeds)


def timing(times: dict[str, list[float]], name: str, baseline: str | None) -> dict[str, Any]:
    """One file in one workload."""
    low, median, high = statistics.quantiles(times[name], n=4)
    ratios = [ours / own for ours, own in zip(times[baseline], times[name], strict=True)] if baseline else []
    return {"p50": median, "half_iqr": (high - low) / 2, "over_ours": statistics.median(ratios) if ratios else None}


def quality(run: Run, outputs: np.ndarray, reference: np.ndarray) -> dict[str, Any]:
    """The metric with its interval, and its change from the dense model with its paired interval, in points."""
    kind, labels = run.data.kind, run.data.validation.labels
    ours, theirs = kind.metric_inputs(reference, labels)[0], kind.metric_inputs(outputs, labels)[0]
    measured = kind.quality(theirs, labels)
    change = measured[kind.metric.key] - kind.metric.value(ours, labels)
    bounds = [100 * bound for bound in kind.change(theirs, ours, labels)]
    return {
        "value": 100 * measured[kind.metric.key],
        "interval": [100 * bound for bound in measured["interval"]],
        "change": 100 * change,
        "change_interval": bounds,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is missing, measure, print and write; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run whose export comes after a tune")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the environments and of what peers make")
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--only", nargs="+", default=[], help="peers: " + ", ".join(peer.name for peer in PEERS))
    parser.add_argument("--again", action="store_true", help="make environments and files anew")
    parser.add_argument("--rounds", type=round_count, default=20)
    parser.add_argument("--rows", type=int, default=160, help="validation rows of `real`")
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--limit", type=float, default=30, help="minutes of a peer's script")
    parser.add_argument("--pipeline", type=Path, default=ROOT / "pipelines/recipes/quickstart.yaml", help="file of the run")
    options = parser.parse_args(arguments)
    if unknown := set(options.only) - {peer.name for peer in PEERS}:
        parser.error(f"no peer {', '.join(sorted(unknown))}; peers: {', '.join(peer.name for peer in PEERS)}")
    run = Run.open(options.run)
    task = run.inputs.task
    if task.kind != "classification" or len(task.text_columns) > 1:
        what = f"{task.kind} of {' and '.join(task.text_columns)}"
        parser.error(f"{options.run}: the peers' scripts are for classification of single texts, and this is {what}")
    options.out.mkdir(parents=True, exist_ok=True)
    folder = options.cache.absolute() / "files" / run.dense.id
    reference = run.save(folder)
    accounts: dict[str, Account] = {}
    for peer in PEERS:
        if not options.only or peer.name in options.only:
            print(f"{peer.name} ..", file=sys.stderr, flush=True)
            account = account_of(peer, folder, options.cache.absolute(), options.threads, options.limit, options.again)
            accounts[peer.name] = account
            print(f"{peer.name}: {account.failure or 'done'}", file=sys.stderr, flush=True)
    result = compare(run, accounts, reference, options)
    write_record(options.out / "peers.json", result)
    text = markdown(result)
    write_atomic(options.out / "peers.md", text.encode())
    print(text)
    return 3 if any(void(ratio) for control in result["controls"].values() for ratio in control.values()) else 0


def compare(run: Run, accounts: dict[str, Account], reference: np.ndarray, options: argparse.Namespace) -> dict[str, Any]:
    """Quality and time of every file, and what each peer came to."""
    made = [peer for peer in PEERS if peer.name in accounts]
    candidates = [*run.candidates(options.pipeline)]
    for peer in made:
        candidates += candidates_of(peer, accounts[peer.name])
    rows, controls = {candidate.key: candidate.to_json() for candidate in candidates}, {}
    tokens = (run.data.validation.tokens, run.data.pad_id, run.data.batch_size)
    for runtime in RUNTIMES:
        made_for = [each for each in candidates if each.runtime == runtime and not each.failure]
        made_for.sort(key=lambda each: (not each.baseline, each.precision != "fp32"))
        if not made_for:
            continue
        # a process for each runtime: OpenVINO pins the thread that calls it to a core, and threads started later inherit that
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            settings = Rows(*tokens, options.rows, options.rounds, options.threads)
            found = process.submit(measured, made_for, settings).result()
        baselines = {each.precision: each.key for each in made_for if each.baseline}
        for each in made_for:
            row = rows[each.key]
            row["failure"] = found.failures.get(each.key, "")
            if not row["failure"]:
                row["quality"] = quality(run, found.logits[each.key], reference)
                baseline = baselines.get(each.precision)
                row["times"] = {name: timing(columns, each.key, baseline) for name, columns in found.times.items()}
        first = made_for[0].key
        controls[runtime] = {name: timing(times, first + AGAIN, first)["over_ours"] for name, times in found.times.items()}
    ours = ("onnxruntime", "openvino")
    facts = {**processor(), "threads": options.threads, "rounds": options.rounds, "rows": len(run.data.validation)}
    facts |= {"real_rows": options.rows, "runtimes": [distribution(name) for name in ours], "run": plain(str(options.run))}
    facts |= {"metric": run.data.kind.metric.name, "dense": quality(run, reference, reference)["value"]}
    return {
        "settings": facts,
        "files": rows,
        "controls": controls,
        "peers": {peer.name: account_to_json(peer, accounts[peer.name]) for peer in made},
    }


def account_to_json(peer: Peer, account: Account) -> dict[str, Any]:
    """A peer's row: packages asked for, and those that decide what its files are, as installed."""
    deciding = ("transformers", "onnx", "onnxruntime", "openvino", "nncf", "torch", "numpy")
    versions = {name: version for name, version in account.versions.items() if name.lower() in deciding}
    facts = {"script": f"benchmarks/peers/{peer.script}", "packages": list(peer.packages), "versions": versions}
    facts |= {"minutes": account.minutes, "lines": account.lines, "failure": account.failure}
    return facts | {"note": peer.note, "files": [file.path for file in peer.files]}


if __name__ == "__main__":
    sys.exit(main())
