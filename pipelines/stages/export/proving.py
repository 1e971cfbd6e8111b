"""Parity checks of exported files: each is compared with its source model; failures are reported or repaired.

Files that are shipped (the compressed model) must pass. A dense file is a baseline: it is repaired, too, but exceeding its
bound is recorded, and never stops a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import onnx
from torch import nn

from compressor.errors import CheckError
from compressor.tasks.data import Data, TokenRows
from compressor.tasks.features import predict, torch_forward
from export.auto.choose import counts, is_in_vain
from export.auto.sensitivity import Sensitivity, rank, rounded
from export.graph.attention_products import queries_and_keys
from export.graph.trace import matrices
from export.parity.bounds import LEAST_UNLABELLED_ROWS
from export.parity.compare import ParityResult, Unlabelled, failure
from export.parity.sides import Outputs, compare_outputs, runs, telling_rows
from export.parity.suspects import suspect_in_graph
from export.runtimes.runtime import Runtime
from export.runtimes.sessions import parity_session, plain_session, run, session
from pipelines.engine.stage import Workspace
from pipelines.stages.loading import judge_rows, predict_rows
from pipelines.stages.parity_checks import outputs_of


class Judged(Protocol):
    """A file with its comparison; None where it does not run."""

    result: ParityResult | None


Made = TypeVar("Made", bound=Judged)

COMPRESSED = "compressed"
"""The model that is shipped."""
RANKING_ROWS, RANKING_BATCH = 32, 8
"""Training rows on which the sensitivity of each matrix is measured, and how many at a time."""


@dataclass
class Prover:
    """One PyTorch model, its predictions for the validation rows, and the comparison of its files with them.

    Read `reference` before the model's deltas are rewritten as separate products, so that the check covers this rewriting.
    """

    name: str
    model: nn.Module
    data: Data
    workspace: Workspace
    threads: int | None = None
    seed: int = 0
    rankings: dict[bool, list[Sensitivity]] = field(default_factory=dict)
    _rounded: dict[tuple[tuple[str, ...], int], np.ndarray] = field(default_factory=dict)

    @property
    def gated(self) -> bool:
        """Whether the model's files are shipped."""
        return self.name == COMPRESSED

    @cached_property
    def rows(self) -> TokenRows:
        """The validation rows; for generative models, as many as fit into memory."""
        return self.data.compared() if self.data.kind.generates else self.data.validation

    @cached_property
    def more(self) -> TokenRows | None:
        """Training rows for the checks that need no labels, where there are few validation rows."""
        missing = LEAST_UNLABELLED_ROWS - len(self.rows)
        # with logits over a vocabulary, one row has hundreds of predictions
        return self.data.draw(missing, self.seed) if missing > 0 and not self.data.kind.generates else None

    @cached_property
    def reference(self) -> Outputs:
        """The model's predictions in PyTorch."""
        what = f"{self.name} in PyTorch"
        return outputs_of(
            torch_forward(self.model, accelerate=False), self.rows, self.data, self.workspace, what, more=self.more
        )

    def rounded(self, excluded: tuple[str, ...] = (), bits: int = 8) -> np.ndarray:
        """Its predictions with all matrices but those `excluded` rounded to int8 in PyTorch: for all rows, then for `more`."""
        if (excluded, bits) not in self._rounded:
            every = [self.rows] if self.more is None else [self.rows, self.more]
            what = f"{self.name} in PyTorch, rounded"
            with rounded(self.model, excluded, bits):
                forward = torch_forward(self.model, accelerate=False)
                predictions = [predict_rows(forward, rows, self.data, self.workspace, what) for rows in every]
            # one entry is enough: files are checked one after the other
            self._rounded = {(excluded, bits): np.concatenate(predictions)}
        return self._rounded[excluded, bits]

    def outputs(self, runtime: Runtime, path: Path, precision: str, hop: str, *, plain: bool = False) -> Outputs:
        """The outputs of a file for all rows; `plain`: without the runtime's own optimization. Raises CheckError E611 where it
        does not run, UserError E602 where it is damaged."""
        live = parity_session(runtime, path, precision, self.threads)
        with runs(hop):
            live = plain_session(runtime, path) if plain else live
            return outputs_of(partial(run, live), self.rows, self.data, self.workspace, hop, more=self.more)

    def compare(
        self,
        hop: str,
        precision: str,
        outputs: Outputs,
        runtime: Runtime,
        excluded: tuple[str, ...] = (),
        bits: int = 8,
    ) -> ParityResult:
        """Compare the outputs of a runtime's file with the model's; nothing is raised."""
        unlabelled = Unlabelled(self.reference.more, outputs.more)
        if precision == "int8" and not self.data.kind.generates:
            unlabelled = replace(unlabelled, rounded=self.rounded(excluded, bits), static=runtime.calibrated)
        result = replace(compare_outputs(hop, precision, self.reference, outputs, self.rows, unlabelled), gated=self.gated)
        self.workspace.proven(result.to_json())
        return result

    def suspect(self, result: ParityResult, runtime: Runtime, path: Path, excluded: tuple[str, ...] = (), bits: int = 8) -> str:
        """The layer where a failed file diverges from the model: '' where rounding alone explains every difference."""
        if result.failed == ("metric",):
            return ""
        # compared with the unrounded model, every layer of an int8 file differs a little, and the first would be named
        alike = rounded(self.model, excluded, bits) if result.rounding is not None else nullcontext()
        with alike:
            return suspect_in_graph(self.model, path, telling_rows(result, self.rows, self.data), runtime)

    def failure(
        self, result: ParityResult, runtime: Runtime, path: Path, excluded: tuple[str, ...] = (), bits: int = 8
    ) -> CheckError:
        """E610 for a failed comparison."""
        return failure(result, self.suspect(result, runtime, path, excluded, bits))

    def quality(self, runtime: Runtime, path: Path, what: str) -> dict[str, Any]:
        """The metrics of a file on all validation rows, for when not all of them could be compared."""
        live = partial(run, session(path, runtime=runtime, threads=self.threads))
        rows = self.data.validation
        return judge_rows(live, rows, self.data, self.workspace, what, rows.kind.metric_inputs).quality

    def ranking(self, graph: onnx.ModelProto, *, static: bool) -> list[str]:
        """The matrices of the model's graph, the most sensitive to int8 first; measured once, on training rows."""
        if static not in self.rankings:
            rows = self.data.draw(RANKING_ROWS, self.seed)
            how = {"rows": rows.tokens, "pad_id": self.data.pad_id, "labels": rows.labels, "batch_size": RANKING_BATCH}
            names = matrices(graph)
            with self.workspace.progress("sensitivity of each matrix", len(names)) as bar:
                options = {"static": static, "scored": queries_and_keys(graph), "on_step": bar.advance}
                self.rankings[static] = rank(self.model, names, partial(predict, **how), **options)
        return [sensitivity.name for sensitivity in self.rankings[static]]


@dataclass(frozen=True)
class ComparedFile:
    """A file with its comparison; `excluded` are the matrices that stay in fp32 in it, `repaired` is the reason, if the file
    without them was refused."""

    runtime: Runtime
    path: Path
    outputs: Outputs
    result: ParityResult
    excluded: tuple[str, ...] = ()
    repaired: str = ""


def repaired(
    prover: Prover,
    graph: onnx.ModelProto,
    failed: ParityResult | None,
    *,
    static: bool,
    make: Callable[[tuple[str, ...]], Made],
) -> Iterator[Made]:
    """Results of `make` for int8 with more and more of the most sensitive matrices in fp32: 1, 2, 4, ..., at most half.

    If a file `failed` because its outputs move further than rounding explains, the file with half of the matrices in fp32 is
    made first. If its outputs do so, too, fewer matrices cannot help: that is said, and the file is the only result.
    """
    ranking = prover.ranking(graph, static=static)
    steps = [tuple(ranking[:count]) for count in counts(len(ranking))]
    if failed is not None and "rounding" in failed.failed and len(steps) > 1:
        most = make(steps[-1])
        if most.result is not None and is_in_vain(failed, most.result):
            prover.workspace.say(
                f"{failed.hop}: no matrices in fp32 help; with {len(steps[-1])} of them its outputs still move "
                f"{most.result.distance / failed.rounding:.1f} times as far as rounding all matrices moves them"
            )
            yield most
            return
    yield from map(make, steps)
