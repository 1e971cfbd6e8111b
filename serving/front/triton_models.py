"""The Triton server behind the front: text models over gRPC, with one deadline for every request to it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc.aio import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from compressor.errors import UserError
from serving.clients.by_text import ROW
from serving.clients.channel import LASTING, channel_options
from serving.front.shapes import Prediction
from serving.layout.text_outputs import PAIR, TASK, TEXT, TEXT_SUFFIX

STATUS = {"INVALID_ARGUMENT": 400, "NOT_FOUND": 404, "UNAVAILABLE": 503, "DEADLINE_EXCEEDED": 504}
"""gRPC's status -> HTTP's; any other is 502."""
NO_ROWS = range(0)
KNOWN_SECONDS = 2.0
"""How long the config of a model counts as known: that of a new version may be another."""


class Failed(Exception):
    """A request that Triton did not answer: the HTTP status and a coded error."""

    def __init__(self, status: int, error: UserError):
        self.status, self.error = status, error
        super().__init__(str(error))


@dataclass(frozen=True)
class TextModel:
    """What the server says of a text model."""

    name: str
    pairs: bool
    most: int
    """Rows of one request."""
    outputs: tuple[str, ...]
    tasks: bool = False
    """Whether each row names its task, which reads one text or two."""
    generates: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> TextModel:
        inputs = {field["name"] for field in config["input"]}
        return cls(
            name=config["name"],
            pairs=PAIR in inputs,
            most=config.get("max_batch_size") or 1,
            outputs=tuple(field["name"] for field in config["output"]),
            tasks=TASK in inputs,
            generates=bool(config.get("model_transaction_policy", {}).get("decoupled")),
        )

    def require(self, texts: Sequence[str], pairs: Sequence[str] | None, task: str | None) -> None:
        """Raises Failed for what this model does not take."""
        if self.generates:
            what = f"'{self.name}' generates text, which comes in parts"
            raise Failed(400, UserError("E767", what, "Ask Triton itself: POST /v2/models/NAME/generate_stream"))
        if self.tasks != (task is not None):
            what = f"'{self.name}' has many tasks" if self.tasks else f"'{self.name}' has one task only"
            raise Failed(400, UserError("E778", what, "Name one of them as `task`" if self.tasks else "Leave out `task`"))
        paired = pairs is not None
        if (self.pairs != paired and not self.tasks) or (paired and len(pairs) != len(texts)):
            what = f"'{self.name}' takes {'pairs of texts' if self.pairs else 'single texts'}"
            fix = "Give `pairs`, as many as `texts`" if self.pairs else "Leave out `pairs`"
            raise Failed(400, UserError("E767", what, fix))

    def predictions(self, outputs: Mapping[str, np.ndarray]) -> list[Prediction]:
        """One per row, whichever of its outputs the model has."""
        rows = len(next(iter(outputs.values())))
        return [Prediction(**self._prediction({name: array[row] for name, array in outputs.items()})) for row in range(rows)]

    def _prediction(self, row: Mapping[str, np.ndarray]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if "LABEL" in row:
            fields |= {"label": row["LABEL"][0].decode(), "score": float(row["SCORE"][0])}
            fields["scores"] = scores_of(row)
        if "PREDICTED" in row:
            fields["scores"] = scores_of(row)
            fields["labels"] = json.loads(row["PREDICTED"][0])
        if "ANSWER" in row:
            start, end = row["SPAN"].tolist()
            fields |= {"answer": row["ANSWER"][0].decode(), "start": start, "end": end, "score": float(row["SCORE"][0])}
        if "MATCH" in row:
            fields["score"] = float(row["MATCH"][0])
        if "VALUE" in row:
            fields["value"] = float(row["VALUE"][0])
        if "ENTITIES" in row:
            fields["entities"] = json.loads(row["ENTITIES"][0])
        return fields


def scores_of(row: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The score of every label; in a model of many tasks, the outputs that only other tasks have are without a name."""
    scores = zip((label.decode() for label in row["LABELS"]), map(float, row["SCORES"]), strict=True)
    return {label: score for label, score in scores if label}


class Upstream:
    """One gRPC channel, shared by all requests of a front. Start it in the front's event loop."""

    def __init__(self, address: str, *, seconds: float):
        self.address, self.seconds = address, seconds
        options = [*channel_options(address.rpartition(":")[0]), *LASTING]
        self.client = InferenceServerClient(address, channel_args=options)
        self.known: dict[str, tuple[float, TextModel]] = {}

    async def close(self) -> None:
        await self.client.close()

    async def ready(self) -> bool:
        """Whether the server is: from the end of its start on, also while a version loads (--strict-readiness=false)."""
        try:
            return await self.client.is_server_ready(client_timeout=self.seconds)
        except InferenceServerException:
            return False

    async def model(self, name: str | None) -> TextModel:
        """A text model by its name, with or without `-text`; without a name the only one. Raises Failed."""
        if name is None:
            name = await self._only()
        full = name if name.endswith(TEXT_SUFFIX) else f"{name}{TEXT_SUFFIX}"
        since, known = self.known.get(full, (0.0, None))
        if known is None or time.monotonic() - since > KNOWN_SECONDS:
            config = await self._asked(self.client.get_model_config(full, as_json=True, client_timeout=self.seconds), full)
            known = TextModel.of(config["config"])
            self.known[full] = time.monotonic(), known
        return known

    async def _only(self) -> str:
        statistics = await self._asked(self.client.get_inference_statistics(as_json=True, client_timeout=self.seconds), "")
        names = sorted({entry["name"] for entry in statistics.get("model_stats", []) if entry["name"].endswith(TEXT_SUFFIX)})
        if len(names) != 1:
            known = ", ".join(names) or "none"
            raise Failed(400, UserError("E766", "the request names no model", f"Name one of the text models: {known}"))
        return names[0]

    async def predict(
        self, model: TextModel, texts: Sequence[str], pairs: Sequence[str] | None, task: str | None = None
    ) -> list[Prediction]:
        """Predictions in order; more rows than a request may have are sent in several, one after the other, and each has the
        whole deadline: so many rows may take longer. Raises Failed."""
        model.require(texts, pairs, task)
        done: list[Prediction] = []
        for start in range(0, len(texts), model.most):
            columns = {TEXT: texts[start : start + model.most]}
            if pairs is not None:
                columns[PAIR] = pairs[start : start + model.most]
            if task is not None:
                columns[TASK] = [task] * len(columns[TEXT])
            done += await self._rows(model, columns, start)
        return done

    async def _rows(self, model: TextModel, columns: Mapping[str, Sequence[str]], start: int) -> list[Prediction]:
        """Predictions of those rows of a request that begin with number `start`."""
        inputs = []
        for name, texts in columns.items():
            tensor = InferInput(name, [len(texts), 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[text.encode()] for text in texts], dtype=object))
            inputs.append(tensor)
        call = self.client.infer(model.name, inputs, client_timeout=self.seconds)
        result = await self._asked(call, model.name, range(start, start + len(columns[TEXT])))
        return model.predictions({name: result.as_numpy(name) for name in model.outputs})

    async def _asked(self, call: Any, model: str, rows: range = NO_ROWS) -> Any:
        """The result of a call about these rows of a request. Raises Failed."""
        try:
            return await call
        except InferenceServerException as error:
            kind = str(error.status() or "").removeprefix("StatusCode.")
            if kind == "NOT_FOUND":
                self.known.pop(model, None)
            raise Failed(STATUS.get(kind, 502), self._told(kind, error, rows)) from error
        except grpc.aio.UsageError as error:  # the channel is closed: the front is stopping
            raise Failed(503, UserError("E768", "the front is stopping", "Send the request again")) from error

    def _told(self, kind: str, error: InferenceServerException, rows: range) -> UserError:
        reason = str(error.message())
        if kind in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            late = f"did not answer within {self.seconds:g} s"
            how = late if kind == "DEADLINE_EXCEEDED" else f"is not available ({reason:.200})"
            return UserError("E768", f"Triton at {self.address} {how}", "Try again; if it goes on, see the server's log")
        if named := ROW.fullmatch(reason):
            reason = f"row {rows.start + int(named[1])}: {named[2]}"
        elif rows.start and len(rows) == 1 and kind in ("INVALID_ARGUMENT", "INTERNAL"):
            reason = f"row {rows.start}: {reason}"
        return UserError("E715", f"Triton refused the request: {reason}", "See the message; other requests are not concerned")
