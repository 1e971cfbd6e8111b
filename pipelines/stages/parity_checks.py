"""The parity check of each conversion: run by stages before they publish a file, and by `compress verify` afterwards."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from torch import nn

from compressor.tasks.data import Data, TokenRows
from compressor.tasks.features import Encoding, Forward, torch_forward
from export.parity.compare import ParityResult, in_other_batches, require
from export.parity.sides import Outputs, compare_outputs, runs, telling_rows
from export.parity.suspects import suspect_module
from export.runtimes.runtime import Runtime
from export.runtimes.sessions import run, session
from pipelines.engine.stage import Workspace
from pipelines.stages.loading import predict_rows
from serving.client import Client
from serving.repository import read_config
from serving.server import EmbeddedServer


def outputs_of(
    forward: Forward,
    rows: TokenRows,
    data: Data,
    workspace: Workspace,
    description: str,
    most: int | None = None,
    more: TokenRows | None = None,
) -> Outputs:
    """Compute the predictions of a model, with a progress bar; `most` is the largest batch, by default that of the data, and
    `more` are rows beside those that are compared."""
    most = most or data.batch_size
    logits = predict_rows(forward, rows, data, workspace, description, most)
    joined = None if more is None else predict_rows(forward, more, data, workspace, f"{description}, training rows", most)
    return Outputs(logits, in_other_batches(forward, rows.tokens, data.pad_id, most, rows.labels), joined)


def compare_modules(
    hop: str, kind: str, reference: nn.Module, candidate: nn.Module, rows: TokenRows, data: Data, workspace: Workspace
) -> ParityResult:
    """Compare two PyTorch models on `rows`, also in other batches. Raises CheckError E610 with the block where they diverge."""
    sides = [outputs_of(torch_forward(model), rows, data, workspace, hop) for model in (reference, candidate)]
    result = compare_outputs(hop, kind, *sides, rows)
    workspace.proven(result.to_json())
    require(result, lambda: suspect_module(reference, candidate, telling_rows(result, rows, data)))
    return result


def compare_served(
    repository: Path,
    name: str,
    runtime: Runtime,
    path: Path,
    rows: TokenRows,
    data: Data,
    workspace: Workspace,
    threads: int | None,
) -> ParityResult:
    """A live Triton server on `repository` and a local session of `runtime` on the file at `path`.

    Raises CheckError E610, E611 and UserError E7xx.
    """
    hop = "local session -> Triton"
    # one batch size on both sides: dynamic int8 scales depend on the other rows of a batch
    most = min(32, read_config(repository / name).max_batch_size or 32)
    with runs(hop):
        local = partial(run, session(path, runtime=runtime, threads=threads))
        local = outputs_of(local, rows, data, workspace, "local session", most)
    with (
        EmbeddedServer(repository, log_path=workspace.log_folder / "triton.log") as server,
        Client(server.url) as client,
    ):
        names = {field["name"] for field in client.config(name)["input"]}

        def forward(encoding: Encoding) -> np.ndarray:
            features = {key: values for key, values in encoding.items() if key in names}
            return client.infer(name, features)["logits"]

        served = outputs_of(forward, rows, data, workspace, "through the live server", most)
    result = compare_outputs(hop, "served", local, served, rows)
    workspace.proven(result.to_json())
    require(result)
    return result
