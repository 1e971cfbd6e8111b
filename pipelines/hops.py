"""The hops of the parity gate: the stages call them before they publish, `compress verify` on what is published."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.errors import CheckError

if TYPE_CHECKING:
    from torch import nn

    from compressor.tasks.features import Encoding, Forward
    from export.parity import ParityResult
    from pipelines.loading import Data, Rows
    from pipelines.stage import Workspace


def compare_modules(
    hop: str, kind: str, reference: nn.Module, candidate: nn.Module, rows: Rows, data: Data, workspace: Workspace
) -> ParityResult:
    """Two PyTorch models on `rows`, and in other batches. Raises CheckError E610 with the block where they part."""
    from compressor.tasks.features import torch_forward
    from export.parity import compare, in_other_batches, require
    from export.suspects import suspect_module
    from pipelines.loading import predict_rows

    ours, theirs = torch_forward(reference), torch_forward(candidate)
    logits = [predict_rows(one, rows, data, workspace, hop) for one in (ours, theirs)]
    batches = in_other_batches(ours, theirs, rows.tokens, data.pad_id)
    result = compare(hop, kind, *logits, rows.labels, batches=batches)
    require(result, lambda: suspect_module(reference, candidate, telling_rows(result, rows, data)))
    return result


def compare_graph(
    hop: str,
    kind: str,
    model: nn.Module,
    reference: np.ndarray,
    path: Path,
    forward: Forward,
    rows: Rows,
    data: Data,
    workspace: Workspace,
) -> tuple[ParityResult, np.ndarray]:
    """A PyTorch model (`reference`: its logits of `rows`) and its ONNX file, run by `forward`, on `rows` and in other batches.

    Returns the record and the file's logits. Raises CheckError E610 (not the same function) and E611 (it does not run).
    """
    from compressor.tasks.features import torch_forward
    from export.parity import compare, in_other_batches, require
    from export.suspects import suspect_in_graph
    from pipelines.loading import predict_rows

    with runs(hop):
        logits = predict_rows(forward, rows, data, workspace, hop)
        batches = in_other_batches(torch_forward(model), forward, rows.tokens, data.pad_id)
    result = compare(hop, kind, reference, logits, rows.labels, batches=batches)
    require(result, lambda: suspect_in_graph(model, path, telling_rows(result, rows, data)))
    return result, logits


def compare_served(
    repository: Path, name: str, path: Path, rows: Rows, data: Data, workspace: Workspace, threads: int | None
) -> ParityResult:
    """A live Triton server on `repository` and a local session on the ONNX file at `path`.

    Raises CheckError E610, E611 and UserError E7xx.
    """
    from export.parity import compare, in_other_batches, require
    from export.sessions import run, session
    from pipelines.loading import predict_rows
    from serving.client import Client
    from serving.repository import read_config
    from serving.server import EmbeddedServer

    hop, live = "local session -> Triton", session(path, threads=threads)
    # one batch size on both sides: dynamic int8 scales depend on what shares a batch
    most = min(32, read_config(repository / name).max_batch_size or 32)
    with (
        EmbeddedServer(repository, log_path=workspace.log_folder / "triton.log") as server,
        Client(server.url) as client,
        runs(hop),
    ):
        wanted = {field["name"] for field in client.config(name)["input"]}

        def local(encoding: Encoding) -> np.ndarray:
            return run(live, encoding)

        def served(encoding: Encoding) -> np.ndarray:
            features = {name: values for name, values in encoding.items() if name in wanted}
            return client.infer(name, features)["logits"]

        logits = [predict_rows(side, rows, data, workspace, hop, most) for side in (local, served)]
        batches = in_other_batches(local, served, rows.tokens, data.pad_id, most)
    result = compare(hop, "served", *logits, rows.labels, batches=batches)
    require(result)
    return result


@contextmanager
def runs(hop: str) -> Iterator[None]:
    """A graph that refuses an input fails its hop. Raises CheckError E611 with ONNX Runtime's reason."""
    from export.sessions import failures

    try:
        yield
    except failures() as error:
        reason = " ".join(str(error).split(" : ", 3)[-1].split())[-200:].strip(" .")
        mend = "A graph must take any number of rows and tokens; export the model again"
        raise CheckError("E611", f"{hop}: the graph does not run ({reason})", mend) from error


def telling_rows(result: ParityResult, rows: Rows, data: Data) -> dict[str, Any]:
    """The worst row beside the longest one, padded: what a search for the layer looks at."""
    from compressor.tasks.features import pad

    longest = max(range(len(rows)), key=lambda row: len(rows.tokens[row]["input_ids"]))
    return pad([rows.tokens[result.worst_row], rows.tokens[longest]], data.pad_id)
