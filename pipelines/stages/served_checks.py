"""The parity check of a deployed model: what a live Triton server gives against a local session on the same file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import compress
from pathlib import Path

import numpy as np

from compressor.control_groups import threads_each
from compressor.tasks import TaskConfig
from compressor.tasks.data import Data, TokenRows
from compressor.tasks.features import Encoding, Forward, is_grouped, model_rows, predictions_of
from compressor.tasks.kinds.spans import numbers_of, span_of
from compressor.tasks.predictions import IGNORED
from compressor.tasks.reading import read_task
from export.parity.compare import ParityResult, require
from export.parity.sides import Outputs, compare_outputs, runs
from export.runtimes.runtime import Device, Runtime
from export.runtimes.sessions import run, session
from pipelines.engine.stage import Workspace
from pipelines.stages.loading import PARITY_ROWS
from pipelines.stages.parity_checks import outputs_of
from serving.backends.sub_batches import sub_batches
from serving.client import Client
from serving.clients.text_bytes import Text
from serving.deployment.triton_control import LONG_SECONDS
from serving.layout.knobs import Knobs, batch_tokens, instances, streams
from serving.layout.text_outputs import LOGITS
from serving.predict import predictor
from serving.server import EmbeddedServer

MOST = 32
"""Rows of a request in a comparison, at most."""
ALONE = 32
"""Texts that are also sent one by one."""
HALF = ("fp16", "bf16")
"""Precisions with a bound of their own on a GPU."""


@dataclass(frozen=True)
class Served:
    """A deployed model: its repository, name and interfaces, and the file that a local session opens, on the same device."""

    repository: Path
    name: str
    runtime: Runtime
    path: Path
    interfaces: Sequence[str]
    knobs: Knobs
    precision: str = "fp32"

    @property
    def device(self) -> Device:
        """Where server and session compute."""
        return self.knobs.device or "cpu"

    @property
    def bound(self) -> str:
        """The bound's key."""
        return f"served, {self.precision}" if self.precision in HALF and self.device == "cuda" else "served"

    def most(self, rows: TokenRows) -> int:
        """Rows of a request. One number on both sides: dynamic int8 scales depend on the other rows of a batch."""
        return max(min(MOST, self.knobs.max_batch_size or MOST) // len(model_rows(rows.tokens[:1])), 1)

    def requests_of(self, arrays: Mapping[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
        """Rows of the model in requests of as many as the server takes: one row of the data may be more, with its choices."""
        for part in parts_of(len(next(iter(arrays.values()))), self.knobs.max_batch_size):
            yield {name: values[part.start : part.stop] for name, values in arrays.items()}

    @property
    def streams(self) -> int:
        """Sub-batches that an instance computes at the same time in a server on this machine."""
        return streams(self.knobs, self.runtime) or self.knobs.threads or threads_each(instances(self.knobs, self.runtime))


def parts_of(count: int, most: int) -> Iterator[range]:
    """The numbers of so many rows in requests of at most `most` (0: any number)."""
    step = most or count
    return (range(start, min(start + step, count)) for start in range(0, count, step))


def compare_served(
    served: Served,
    task: TaskConfig,
    data: Data,
    workspace: Workspace,
    threads: int | None,
    passed: Callable[[str], None] = lambda url: None,
) -> list[ParityResult]:
    """Compare a live Triton server on the repository with a local session, one result for each interface; `passed` is then
    called with the server's URL.

    Raises CheckError E610, E611 and UserError E7xx.
    """
    places = data.compared_places(PARITY_ROWS)
    opened = session(served.path, runtime=served.runtime, device=served.device, threads=threads)
    local, results = partial(run, opened), []
    with (
        EmbeddedServer(served.repository, log_path=workspace.log_folder / "triton.log") as server,
        Client(server.url, seconds=LONG_SECONDS) as client,
    ):
        for interface in served.interfaces:
            result = COMPARISONS[interface](served, local, client, places, task, data, workspace)
            workspace.proven(result.to_json())
            require(result)
            results.append(result)
        passed(server.url)
    return results


def compare_tokens(
    served: Served, local: Forward, client: Client, places: Sequence[int], _: TaskConfig, data: Data, workspace: Workspace
) -> ParityResult:
    """The logits of the model that takes tokens against those of the local session."""
    hop, rows = "local session -> Triton", data.validation.at(places)
    names = {field["name"] for field in client.config(served.name)["input"]}

    def by_requests(forward: Forward) -> Forward:
        return lambda encoding: np.concatenate([forward(part) for part in served.requests_of(encoding)])

    @by_requests
    def remote(encoding: Encoding) -> np.ndarray:
        return client.infer(served.name, {key: values for key, values in encoding.items() if key in names})[LOGITS]

    with runs(hop):
        reference = outputs_of(by_requests(local), rows, data, workspace, "local session", served.most(rows))
    candidate = outputs_of(remote, rows, data, workspace, "through the live server", served.most(rows))
    return compare_outputs(hop, served.bound, reference, candidate, rows)


def compare_texts(
    served: Served, local: Forward, client: Client, places: Sequence[int], task: TaskConfig, data: Data, workspace: Workspace
) -> ParityResult:
    """The answers of the model that takes texts against those that follow from the local session's logits.

    Requests hold several texts of mixed lengths, and one.
    """
    hop, rows = "local session -> Triton, texts", data.validation.at(places)
    split, answers = read_task(task).validation, ANSWERS[task.kind]
    texts = [as_sent(split.texts[place]) for place in places]
    predict = predictor(client, served.name)
    batched = partial(sub_batches, most_tokens=batch_tokens(served.knobs, served.runtime), streams=served.streams)

    def reference(start: int, end: int) -> np.ndarray:
        logits = local_logits(local, rows, range(start, end), data.pad_id, batched, served.knobs.max_batch_size)
        return answers.expected(logits, rows.at(range(start, end)))

    def candidate(start: int, end: int) -> np.ndarray:
        return answers.given(predict(texts[start:end]), data.label_names, rows.at(range(start, end)))

    sides, most = [], served.most(rows)
    for description, side in (("local session, texts", reference), ("texts through the live server", candidate)):
        with workspace.progress(description, len(rows)) as bar, runs(hop):
            parts = []
            for start in range(0, len(rows), most):
                parts.append(side(start, min(start + most, len(rows))))
                bar.advance(min(most, len(rows) - start))
            alone = {"batch 1": np.concatenate([side(row, row + 1) for row in range(min(ALONE, len(rows)))])}
        sides.append(Outputs(np.concatenate(parts), alone))
    return compare_outputs(hop, served.bound, *sides, rows)


COMPARISONS = {"tokens": compare_tokens, "text": compare_texts}
"""Interface of a deployed model -> its comparison."""


def as_sent(cells: tuple) -> Text:
    """A row's texts as a client sends them: words are joined by spaces."""
    texts = [cell if isinstance(cell, str) else " ".join(cell) for cell in cells]
    return texts[0] if len(texts) == 1 else tuple(texts)


def local_logits(
    local: Forward, rows: TokenRows, chosen: range, pad_id: int, batched: Callable[[list[int]], list[list[int]]], most: int
) -> np.ndarray:
    """Logits (predictions, outputs) of rows in the sub-batches, made of lengths, in which the server computes a request, of at
    most so many rows (0: any number)."""
    logits: dict[int, np.ndarray] = {}
    if is_grouped(rows.tokens[0]):
        parts = model_rows([rows.tokens[row] for row in chosen])
        pairs = TokenRows(parts, np.zeros(len(parts)), rows.kind)
        of_each = [local_logits(local, pairs, part, pad_id, batched, most) for part in parts_of(len(parts), most)]
        return np.concatenate(of_each).reshape(len(chosen), -1)
    for batch in batched([len(rows.tokens[row]["input_ids"]) for row in chosen]):
        numbers = [chosen[place] for place in batch]
        logits |= zip(numbers, predictions_of(local, rows.tokens, numbers, pad_id, rows.labels), strict=True)
    return np.concatenate([logits[row] for row in chosen])


@dataclass(frozen=True)
class Answers:
    """Answers of a kind of task as arrays (predictions, outputs). `expected`: from logits and their rows; `given`: from a
    client's predictions, the labels and the rows."""

    expected: Callable[[np.ndarray, TokenRows], np.ndarray]
    given: Callable[[Sequence, Sequence[str], TokenRows], np.ndarray]


def softmax(logits: np.ndarray, *_: object) -> np.ndarray:
    """Probabilities of the classes."""
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def one_hot(labels: np.ndarray | list[int], count: int) -> np.ndarray:
    """1 at the label of each prediction, 0 elsewhere."""
    return np.eye(count)[labels]


def given_scores(predictions: Sequence, names: Sequence[str], *_: object) -> np.ndarray:
    """The scores; NaN, which no comparison passes, where the label has not the largest score. Several may have it, as logits
    may differ by less than float32 tells."""
    scores = np.array([[prediction.scores.get(name, np.nan) for name in names] for prediction in predictions])
    for row, prediction in zip(scores, predictions, strict=True):
        if prediction.scores.get(prediction.label) != row.max():
            row[:] = np.nan
    return scores


def expected_labels(logits: np.ndarray, *_: object) -> np.ndarray:
    """Probability of each label less a half: as of a logit, what is above 0 is predicted."""
    return 1 / (1 + np.exp(-logits.astype(np.float64))) - 0.5


def given_labels(predictions: Sequence, names: Sequence[str], *_: object) -> np.ndarray:
    """The scores less a half; NaN where the predicted labels are not those with a score above 0.5, to which a logit may be
    rounded."""
    scores = np.array([[prediction.scores.get(name, np.nan) for name in names] for prediction in predictions])
    for row, prediction in zip(scores, predictions, strict=True):
        chosen = [name in prediction.labels for name in names]
        if not (np.where(chosen, row, 1 - row) >= 0.5).all() or prediction.labels != tuple(compress(names, chosen)):
            row[:] = np.nan
    return scores - 0.5


def given_tags(predictions: Sequence, names: Sequence[str], *_: object) -> np.ndarray:
    """The tag of every word."""
    return one_hot([names.index(tag) for prediction in predictions for tag in prediction.tags], len(names))


def chosen_spans(logits: np.ndarray, rows: TokenRows) -> np.ndarray:
    """1 where the best answer of each row begins, and where it ends, (candidate tokens, 2)."""
    sizes, inputs = (rows.labels != IGNORED).sum(axis=1), rows.kind.metric_inputs
    each = zip(numbers_of(rows.labels), np.split(logits, np.cumsum(sizes)[:-1]), strict=True)
    return _marked_spans([inputs.characters(number, values) for number, values in each], rows)


def given_spans(predictions: Sequence, _: Sequence[str], rows: TokenRows) -> np.ndarray:
    """The same for a client's answers."""
    return _marked_spans([(found.start, found.end) for found in predictions], rows)


def _marked_spans(answers: Sequence[tuple[int, int]], rows: TokenRows) -> np.ndarray:
    """The tokens of answers that are given by their characters in the rows' contexts."""
    offsets = rows.kind.metric_inputs.offsets_of(rows.labels)
    spans = [span_of(answer, each) if answer[1] else (0, 0) for answer, each in zip(answers, offsets, strict=True)]
    return np.concatenate([one_hot(list(span), len(each)).T for span, each in zip(spans, offsets, strict=True)])


ANSWERS = {
    "classification": Answers(softmax, given_scores),
    "marked": Answers(softmax, given_scores),
    "regression": Answers(lambda logits, _: logits, lambda predictions, *_: np.array([[one.value] for one in predictions])),
    "tokens": Answers(lambda logits, _: one_hot(logits.argmax(axis=1), logits.shape[1]), given_tags),
    "multilabel": Answers(expected_labels, given_labels),
    "spans": Answers(chosen_spans, given_spans),
    "choices": Answers(softmax, lambda predictions, *_: np.array([one.scores for one in predictions])),
}
"""Kind of task -> how its answers are compared."""
