"""`compress verify`: repeats every check of a finished run from its artifacts. Nothing is trained and nothing is written."""

from __future__ import annotations

import contextlib
import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from compressor.checkpoint import load
from compressor.deltas.factored import factor_all
from compressor.deltas.links import chains, merge_all, merged_copy
from compressor.digests import sha256_of
from compressor.errors import CheckError, CompressError, UserError
from compressor.models.files.model_folder import COPIED
from compressor.models.reference import Reference, resolve
from compressor.pruning.refit import groups_of, unfitted
from compressor.pruning.surgery import removals_to, silence
from compressor.pruning.weights import unmasked
from compressor.run_store import LOCK_FILE
from compressor.tasks.data import Data, read_test_rows
from compressor.tasks.features import torch_forward
from compressor.tasks.task_kind import TaskKind
from export.generation.generator_files import compare_generated
from export.parity.bounds import METRIC_DRIFT
from export.parity.compare import ParityResult, require
from export.parity.sides import runs
from export.runtimes.runtime import Runtime
from export.runtimes.runtime_registry import DEFAULT, RUNTIMES
from pipelines.engine.attempt import last_attempt
from pipelines.engine.preflight import copied_digests
from pipelines.engine.stage import Artifact, Inputs, Progress
from pipelines.runs.finished import FinishedRun, open_run
from pipelines.runs.same_files import require_same, require_same_files, require_same_generator, require_same_repository
from pipelines.stages.deploy.chosen_file import chosen_file
from pipelines.stages.deploy.config import DeployConfig
from pipelines.stages.deploy.generating import compare_streamed
from pipelines.stages.deploy.run import deployed_as
from pipelines.stages.export.generators import with_prompts
from pipelines.stages.export.proving import Prover
from pipelines.stages.loading import PARITY_ROWS, judge_rows, load_data, load_model
from pipelines.stages.parity_checks import compare_modules
from pipelines.stages.served_checks import compare_served
from pipelines.terminal.capture import captured
from pipelines.terminal.console_table import parity_cells
from serving.repository import tokenizer_files


@dataclass(frozen=True)
class Check:
    """The result of one check. `parity` is the record of a comparison, `fault` the error's line if it failed."""

    stage: str
    hop: str
    passed: bool
    code: str | None = None
    fault: str = ""
    parity: dict[str, Any] | None = None

    def cells(self) -> tuple[str, ...]:
        """The row of the table for this check."""
        passed = (self.parity or {}).get("verdict", "passed")
        verdict = passed if self.passed else f"FAILED {self.code}"
        _, *figures, _ = parity_cells(self.stage, self.parity or {})
        return (f"{self.stage}: {self.hop}", *figures, verdict)


@dataclass(frozen=True)
class _Quiet:
    """A workspace without output; Triton's log goes into a scratch folder."""

    log_folder: Path
    log: logging.Logger = field(default_factory=lambda: logging.getLogger("compress.verify"))

    @contextlib.contextmanager
    def progress(self, _description: str, _total: int) -> Iterator[Progress]:
        yield self

    def advance(self, _steps: int = 1) -> None: ...
    def note(self, _text: str) -> None: ...
    def proven(self, _record: dict[str, Any]) -> None: ...


Hop = tuple[str, str, Callable[[], "ParityResult | None"]]
"""(id of the stage, name of the check, function that runs it and returns a record or None, or raises)."""


def verify(folder: Path, *, serve: bool = True, model: str | None = None, stage: str | None = None) -> list[Check]:
    """Repeat every check of the run in `folder`; one that fails is a Check that did not pass, and the others go on.

    If the last attempt did not finish, the first Check says so and has failed; the others are of the last finished run, if
    any. Checks that failed in the run itself have failed here. `model` is the new folder of the pretrained model, if it has
    moved. `serve=False` starts no server. With the id of a `stage`, only its checks run. Raises UserError E805 (no run), E803
    (its lock or run.json is damaged), E111 (no such stage).
    """
    checks = list(_unfinished(folder))
    if checks and not (folder / LOCK_FILE).is_file():
        return checks
    run = open_run(folder)
    checks += [Check(failure.stage, "as the run found", False, failure.code, failure.line()) for failure in run.failures]
    with run.in_use(), tempfile.TemporaryDirectory() as scratch, captured(Path(scratch, "verify.log")):
        if stage not in (None, *(row["id"] for row in run.lock["stages"])):
            fix = f"Stages: {', '.join(row['id'] for row in run.lock['stages'])}"
            raise UserError("E111", f"--stage: this run has no stage '{stage}'", fix)
        verification = Verification(run, _Quiet(Path(scratch)), model)
        for entry, hop, check in verification.hops(serve, stage):
            checks.append(_carried_out(entry, hop, check))
    return checks


def _unfinished(folder: Path) -> Iterator[Check]:
    """A failed Check where the last attempt at the run did not finish."""
    attempt = last_attempt(folder)
    if attempt is not None and not attempt.finished:
        error = attempt.fault()
        yield Check(attempt.stage or "run", "the last attempt", False, error.code, str(error))


def _readable(stage: str, hops: Callable[[], Iterable[tuple[str, Callable]]]) -> Iterator[Hop]:
    """The checks of a stage; if the data that lists them is damaged, a last one that raises the error."""
    try:
        for hop, check in hops():
            yield stage, hop, check
    except Exception as error:
        yield stage, "what it holds", partial(_raise, error)


def _raise(error: Exception) -> None:
    raise error


def _carried_out(stage: str, hop: str, check: Callable[[], ParityResult | None]) -> Check:
    try:
        record = check()
    except CompressError as error:
        return Check(stage, hop, False, error.code, str(error))
    except Exception as error:  # with a damaged file, any library may raise any exception
        fault = CheckError("E614", f"{hop} cannot be run ({type(error).__name__}: {error})", "Run the stage again", stage)
        return Check(stage, hop, False, fault.code, str(fault))
    return Check(stage, hop, True, parity=None if record is None else record.to_json())


class Verification:
    """The checks of one run. Data and models that several of them need are loaded once, at first use."""

    def __init__(self, run: FinishedRun, workspace: _Quiet, model: str | None):
        self.run, self.workspace = run, workspace
        self.place = model or run.model
        self.stages, self.threads = run.lock["stages"], run.lock["threads"]
        self.artifacts: list[Artifact] = []
        self.base: Reference | None = None
        self.data: Data | None = None

    def hops(self, serve: bool, only: str | None) -> Iterator[Hop]:
        """Every check in the order of the run; later ones need the results of those before."""
        for stage in self.stages:
            yield stage["id"], "files and sha256", lambda stage=stage: self._files(stage)
        yield "base", "the pretrained model", self._base
        if "task" not in self.run.lock:  # many tasks: nothing is merged or exported
            return
        yield "data", "rows and labels", self._data
        if self.base is None or self.data is None:
            return
        for number, stage in enumerate(self.stages):
            made = next((artifact for artifact in self.artifacts if artifact.entry == stage["id"]), None)
            if made is None or only not in (None, stage["id"]):
                continue
            hops = {"model": self._model_hops, "onnx": self._onnx_hops, "repository": self._repository_hops}
            of_kind = hops.get(stage["kind"], lambda *_: ())
            yield from _readable(stage["id"], lambda made=made, n=number, of=of_kind: of(made, self._inputs(n), serve))

    def _files(self, stage: dict[str, Any]) -> None:
        with contextlib.suppress(UserError):  # readable parts are also covered by the other checks
            self.artifacts.append(self.run.artifact(stage))
        self.run.verify(stage)

    def _base(self) -> None:
        base, expected = resolve(self.place), self.run.lock["model"]["sha256"]
        self.base = replace(base, reference=self.run.lock["model"]["reference"])
        if base.sha256 != expected:
            raise UserError("E306", f"'{self.place}' is not the base model of this run", "Give it with --model FOLDER")

    def _data(self) -> None:
        for path, sha256 in self.run.lock["data"].items():
            if not Path(path).is_file():
                fix = "Restore it, or run the pipeline again where its data are now: what is finished is kept"
                raise UserError("E201", "the data file is gone", fix, path)
            if sha256_of(Path(path)) != sha256:
                raise UserError("E201", "the data file has changed since the run", "Restore the file that the run used", path)
        if self.base is not None:
            self.data = load_data(self._inputs(0))

    def _inputs(self, number: int) -> Inputs:
        """The inputs of the stage with this number."""
        ids = [stage["id"] for stage in self.stages[:number]]
        earlier = [artifact for artifact in self.artifacts if artifact.entry in ids]
        return self.run.inputs(self.threads, self.base, earlier)

    def _model_hops(self, made: Artifact, inputs: Inputs, _serve: bool) -> Iterator[tuple[str, Callable]]:
        previous = inputs.nearest("model")
        yield "labels", lambda: require_same("its labels", made.metadata["labels"], self.data.label_names)
        if made.row.merges:
            yield "deltas -> merged", lambda: self._merged(previous, made, inputs)
            yield "config and tokenizer", lambda: self._checkpoint(previous, made)
        elif made.row.removes:
            yield "masked -> removed", lambda: self._removed(previous, made, inputs)
        elif previous is not None:
            kept = previous.metadata["kept"]
            yield "units kept", lambda: require_same("what it kept", made.metadata["kept"], kept)
        yield "quality as recorded", lambda: self._quality(made, inputs)

    def _removed(self, previous: Artifact, made: Artifact, inputs: Inputs) -> ParityResult:

        # masks over single weights that shrank with the units: without them both sides must still agree
        before, after = (unmasked(load_model(artifact, inputs.base)) for artifact in (previous, made))
        # a refit follows the removal
        after = unfitted(after, groups_of(after) - groups_of(before))
        removals = removals_to(before, made.metadata["kept"])
        masked = merged_copy(before)
        silence(masked, removals)
        rows = self.data.compared(PARITY_ROWS)
        return compare_modules("masked -> removed", "removed", masked, after, rows, self.data, self.workspace)

    def _merged(self, previous: Artifact, made: Artifact, inputs: Inputs) -> ParityResult:
        rows, model = self.data.compared(PARITY_ROWS), load_model(previous, inputs.base)
        return compare_modules("deltas -> merged", "merged", model, load(made.folder), rows, self.data, self.workspace)

    def _checkpoint(self, previous: Artifact, made: Artifact) -> None:
        config = json.loads((made.folder / "config.json").read_text(encoding="utf-8"))
        labels = [config["id2label"][str(number)] for number in range(len(config["id2label"]))]
        require_same("its config's labels", labels, self.data.label_names)
        require_same("what it kept", made.metadata["kept"], previous.metadata["kept"])
        require_same_files(tokenizer_files(self.base.folder), made.folder, "tokenizer")
        theirs = copied_digests(self.base.folder)
        for name in COPIED:
            require_same(f"its {name}", made.files.get(name), theirs.get(name))

    def _quality(self, made: Artifact, inputs: Inputs) -> None:
        # texts are not generated again: the outputs that decide them are compared
        key, recorded = self.data.kind.output_metric.key, {"": made.metadata["quality"], **made.metadata.get("tests", {})}
        tests = read_test_rows(self.base.folder, inputs.task, self.data.label_names) if len(recorded) > 1 else {}
        forward = torch_forward(load_model(made, inputs.base))
        for name, rows in {"": self.data.validation, **tests}.items():
            arrays = partial(finite_inputs, rows.kind)
            quality = judge_rows(forward, rows, self.data, self.workspace, "quality", arrays).quality
            metric = f"{key}, {name}" if name else key
            require_quality(metric, quality[key], recorded[name][key], rows.kind.grain(rows.labels))

    def _onnx_hops(self, made: Artifact, inputs: Inputs, _serve: bool) -> Iterator[tuple[str, Callable]]:
        yield "labels", lambda: require_same("its labels", made.metadata["labels"], self.data.label_names)
        for name, runtimes in made.metadata["files"].items():
            # the reference is loaded by its first check and freed after the last
            reference = _Reference(name, self, inputs)
            for runtime, files in runtimes.items():
                for precision, file in files.items():
                    yield from self._file_hops(reference, runtime, precision, made.folder / file["path"], file)

    def _file_hops(
        self, of: _Reference, runtime: str, precision: str, path: Path, file: dict[str, Any]
    ) -> Iterator[tuple[str, Callable]]:
        row = RUNTIMES[runtime]
        prefix = "" if row is DEFAULT else f"{runtime} "
        rounding = {"excluded": tuple(file.get("excluded", ())), "bits": file.get("weight_bits", 8)}
        if row.optimizes and precision == "fp32":
            yield f"{of.name} -> {prefix}onnx", lambda: of.graph(row, precision, path, plain=True)
            yield f"{of.name} -> {prefix}fused", lambda: of.graph(row, precision, path)
        else:
            yield f"{of.name} -> {prefix}{precision}", lambda: of.graph(row, precision, path, **rounding)
        if self.data.kind.generates:
            yield f"{of.name} -> {precision}, generating", lambda: of.generating(precision, path)

    def _repository_hops(self, made: Artifact, inputs: Inputs, serve: bool) -> Iterator[tuple[str, Callable]]:
        row = next(stage for stage in self.stages if stage["id"] == made.entry)
        config = DeployConfig(**row["config"])
        if self.data.kind.generates:
            yield from self._generator_hops(config, made, inputs, serve)
            return
        deployed, options = deployed_as(config, inputs, self.data, made.folder / "repository")
        yield "model, config, tokenizer", lambda: require_same_repository(deployed, options)
        for interface in deployed.interfaces if serve else ():

            def served(interface: str = interface) -> ParityResult:
                chosen = replace(deployed, interfaces=(interface,))
                return compare_served(chosen, inputs.task, self.data, self.workspace, self.threads)[0]

            yield SERVED_HOPS[interface], served

    def _generator_hops(
        self, config: DeployConfig, made: Artifact, inputs: Inputs, serve: bool
    ) -> Iterator[tuple[str, Callable]]:
        _, precision, path = chosen_file(config, inputs)
        exported = path.parent
        repository, log = made.folder / "repository", self.workspace.log_folder / "triton.log"
        yield (
            "model, config, tokenizer",
            lambda: require_same_generator(repository, config, exported, inputs, precision),
        )

        def served() -> None:
            compare_streamed(repository, config.name, exported, precision, inputs, log)

        if serve:
            yield "served, generated texts", served


SERVED_HOPS = {"tokens": "served", "text": "served, texts"}
"""Interface of a deployed model -> the name of its check."""


class _Reference:
    """The PyTorch model that the files of one exported model must equal, and its predictions on all validation rows."""

    def __init__(self, name: str, verification: Verification, inputs: Inputs):
        self.name, self.verification, self.inputs = name, verification, inputs

    @cached_property
    def prover(self) -> Prover:
        """The model, loaded for comparisons. Deltas that are separate products in its files are so in it, too, once its
        reference is computed: as in the export, or the names and the rounding of its matrices would differ."""
        inputs, of = self.inputs, self.verification
        dense = self.name == "dense"
        model = load_model(inputs.dense if dense else inputs.nearest("model"), inputs.base)
        prover = Prover(self.name, merge_all(model) if dense else model, of.data, of.workspace, of.threads, inputs.seed)
        if any(chains(model)):
            _ = prover.reference
            factor_all(model)
        return prover

    def graph(self, runtime: Runtime, precision: str, path: Path, *, plain: bool = False, **rounding: Any) -> ParityResult:
        """Compare a file with it; `plain`: as it is written, without the runtime's own optimization. `rounding` says which
        matrices are excluded, and the bits of the others. Raises CheckError E610 for a file that is shipped."""
        hop = f"{self.name} -> {path.name}"
        outputs = self.prover.outputs(runtime, path, precision, hop, plain=plain)
        result = self.prover.compare(hop, precision, outputs, runtime, **rounding)
        if not result.passed and self.prover.gated:
            raise self.prover.failure(result, runtime, path, **rounding)
        return result

    def generating(self, precision: str, path: Path) -> ParityResult:
        """Compare the tokens that a file with a cache generates after random prompts."""
        loaded = with_prompts(self.prover.model, self.inputs.base, self.verification.data)
        with runs(f"{self.name} -> {path.name}, generating"):
            return compare_generated(loaded, precision, [path], require if self.prover.gated else None)[0]


OTHER_MODEL = "The model has changed since it was measured: run its stage again with --force"


def require_finite(logits: np.ndarray) -> None:
    """Raises CheckError E613 for logits that are not finite."""
    if not np.isfinite(logits).all():
        raise CheckError("E613", "logits are not finite", OTHER_MODEL)


def finite_inputs(kind: TaskKind, logits: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The kind's metric inputs. Raises CheckError E613 for logits that are not finite."""
    require_finite(logits)
    return kind.metric_inputs(logits, labels)


def require_quality(metric: str, value: float, recorded: float, grain: float) -> None:
    """Raises CheckError E613 for a metric further from the recorded one than METRIC_DRIFT and `grain`, one answer."""
    if abs(value - recorded) > max(METRIC_DRIFT, grain) + 1e-9:
        raise CheckError("E613", f"{metric} {value:.4f}, recorded {recorded:.4f}", OTHER_MODEL)


def to_json(folder: Path, checks: Sequence[Check]) -> dict[str, Any]:
    """The content of `compress verify --json`."""
    return {"run": str(folder), "passed": all(check.passed for check in checks), "checks": [asdict(check) for check in checks]}
