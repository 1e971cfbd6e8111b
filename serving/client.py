"""Triton client: tensors in and out (`Client`), or texts in and labels or numbers out (`predict`)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np
from tokenizers import Encoding, Tokenizer
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, triton_to_np_dtype

from compressor.errors import UserError
from compressor.tasks import KINDS
from compressor.tasks.task_kind import TaskKind, kind_of
from serving.repository import tokenizer_sha256
from serving.running import served_repository

if TYPE_CHECKING:
    from compressor.tasks.kinds.classification import Prediction
    from compressor.tasks.kinds.regression import Estimate
    from compressor.tasks.kinds.tokens import Tagged

CONNECT_SECONDS = 10.0
ENCODING_FIELDS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}


class Client:
    """An HTTP client of a Triton server at `url` (host:port or http://host:port). Use it in the thread that created it.

    Every call raises UserError E712 when no Triton server responds, and E715 when the server refuses the request.
    """

    def __init__(self, url: str):
        """Raises UserError E711 for a bad URL. Connects with the first call."""
        # imported here: it loads gevent, which only clients need
        from tritonclient.http import InferenceServerClient

        self.host, self.port = parse_url(url)
        self._client = InferenceServerClient(f"{self.host}:{self.port}", connection_timeout=CONNECT_SECONDS)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def infer(self, model: str, features: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Every output of `model` for one batch. Shapes and types are as the model's config declares them."""
        from tritonclient.http import InferInput

        inputs = [InferInput(name, array.shape, np_to_triton_dtype(array.dtype)) for name, array in features.items()]
        for tensor, array in zip(inputs, features.values(), strict=True):
            tensor.set_data_from_numpy(array)
        with self._errors(model):
            result = self._client.infer(model, inputs)
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}

    def config(self, model: str) -> dict[str, Any]:
        """The config of a loaded model, as JSON. Raises UserError E713, naming the loaded models, when it is not loaded."""
        with self._errors(model):
            return self._client.get_model_config(model)

    def ready(self, model: str) -> bool:
        """Whether `model` is loaded and ready."""
        with self._errors(model):
            return self._client.is_model_ready(model)

    def models(self) -> list[str]:
        """Names of the loaded models, sorted."""
        with self._errors():
            loaded = self._client.get_inference_statistics()  # `compress serve` does not list the models of the repository
        return sorted({entry["name"] for entry in loaded["model_stats"]})

    @contextlib.contextmanager
    def _errors(self, model: str | None = None) -> Iterator[None]:
        """Convert exceptions of tritonclient to coded errors."""
        from geventhttpclient.response import HTTPParseError

        where = f"{self.host}:{self.port}"
        try:
            yield
        except InferenceServerException as error:
            if not self._client.is_server_live():
                raise UserError("E712", "this is not a Triton server", "Start one: compress serve RUN", where) from error
            if model is not None and model not in (loaded := self.models()):
                fix = f"Loaded models: {', '.join(loaded) or 'none'}"
                raise UserError("E713", f"no model '{model}' is loaded", fix, where) from error
            raise UserError("E715", f"Triton refused the request: {error.message()}", "See the server's log", where) from error
        except (OSError, HTTPParseError, json.JSONDecodeError) as error:
            raise UserError("E712", f"no Triton server responds ({error})", "Start one: compress serve RUN", where) from error


def predict(
    url: str, model: str, texts: Sequence[str] | Sequence[tuple[str, str]], tokenizer_folder: Path | None = None
) -> list[Prediction] | list[Estimate] | list[Tagged]:
    """Predict texts, or pairs of texts, with a served model: one Prediction per text, in order; Estimate for a regression,
    Tagged for token classification, whose words are separated by spaces.

    The tokenizer comes from `tokenizer_folder`, or from the repository when the server runs on this machine. Raises UserError
    E711 (URL), E712 (no server), E713 (no such model), E714 (tokenizer), E715 (refused), E716 (unsupported kind of model),
    E717 (invalid text).
    """
    with Client(url) as client:
        config = client.config(model)
        parameters = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        kind = kind_served(model, parameters)
        labels, output = labels_of(model, config, parameters)
        encoder = TextEncoder(model, config, parameters, tokenizer_folder or find_tokenizer(client, model))
        size, predictions = config["max_batch_size"] or max(len(texts), 1), []
        for start in range(0, len(texts), size):
            batch = [kind.written(text) for text in texts[start : start + size]]
            encodings = encoder.encode(batch)
            logits = client.infer(model, encoder.features(encodings))[output].astype(np.float64)
            for row, text, encoding in zip(logits, batch, encodings, strict=True):
                predictions.append(kind.prediction(labels, row, text, encoding))
    return predictions


class TextEncoder:
    """Texts -> the integer arrays (batch, longest sequence) that a model declares, right-padded, cut at its `max_length`."""

    def __init__(self, model: str, config: Mapping[str, Any], parameters: Mapping[str, str], folder: Path):
        """Raises UserError E714 when the folder's tokenizer is not the model's, E716 for inputs that no tokenizer produces."""
        self.types = {
            tensor["name"]: triton_to_np_dtype(tensor["data_type"].removeprefix("TYPE_")) for tensor in config["input"]
        }
        if unknown := self.types.keys() - ENCODING_FIELDS:
            raise UserError("E716", f"model '{model}' expects an input '{min(unknown)}'", "Send its tensors with Client.infer")
        self.tokenizer = load_tokenizer(Path(folder), parameters)
        self.end = int(parameters["end_id"]) if "end_id" in parameters else None

    def encode(self, texts: Sequence[str] | Sequence[tuple[str, str]]) -> list[Encoding]:
        """Tokenize texts. Raises UserError E717 for a text containing the end token at which the model's output is read."""
        encodings = self.tokenizer.encode_batch(list(texts))
        if self.end is not None:
            self._check_ends(texts, encodings)
        return encodings

    def features(self, encodings: Sequence[Encoding]) -> dict[str, np.ndarray]:
        """The model's inputs, integer arrays (batch, length) by name."""
        return {
            name: np.array([getattr(encoding, ENCODING_FIELDS[name]) for encoding in encodings], dtype=type_)
            for name, type_ in self.types.items()
        }

    def _check_ends(self, texts: Sequence[str] | Sequence[tuple[str, str]], encodings: Sequence[Encoding]) -> None:
        expected = self.tokenizer.encode(*["a"] * (1 if isinstance(texts[0], str) else 2)).ids.count(self.end)
        for text, encoding in zip(texts, encodings, strict=True):
            if encoding.ids.count(self.end) != expected:
                what = (
                    f"the text {text!r:.60} holds '{self.tokenizer.id_to_token(self.end)}', the token that the task head reads"
                )
                raise UserError("E717", what, "Remove that token from the text")


def load_tokenizer(folder: Path, parameters: Mapping[str, str]) -> Tokenizer:
    """The tokenizer in `folder`, checked against `tokenizer_sha256`. Raises UserError E714."""
    fix = "Pass --tokenizer with the folder NAME/tokenizer of the model's repository"
    if not (folder / "tokenizer.json").is_file():
        raise UserError("E714", "no tokenizer.json", fix, str(folder))
    if tokenizer_sha256(folder) != parameters.get("tokenizer_sha256"):
        raise UserError("E714", "this is not the tokenizer that the model was deployed with", fix, str(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pad_id = int(parameters["pad_id"]) if "pad_id" in parameters else None
    arguments = padding(tokenizer, folder) if pad_id is None else {"pad_id": pad_id, "pad_token": tokenizer.id_to_token(pad_id)}
    tokenizer.enable_padding(**arguments)
    tokenizer.no_truncation()
    if "max_length" in parameters:
        tokenizer.enable_truncation(int(parameters["max_length"]))
    return tokenizer


def padding(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """The tokenizer's padding token, as arguments for right padding to the longest text. Raises UserError E714."""
    if current := tokenizer.padding:
        return {key: current[key] for key in ("pad_id", "pad_token", "pad_type_id")}
    path = folder / "tokenizer_config.json"
    token = json.loads(path.read_text(encoding="utf-8")).get("pad_token") if path.is_file() else None
    token = token["content"] if isinstance(token, dict) else token
    if token is None or tokenizer.token_to_id(token) is None:
        raise UserError("E714", "the tokenizer has no padding token", "Set pad_token, save it and deploy again", str(folder))
    return {"pad_id": tokenizer.token_to_id(token), "pad_token": token}


def find_tokenizer(client: Client, model: str) -> Path:
    """The tokenizer of a model served on this machine. Raises UserError E714 when the server runs elsewhere."""
    repository = served_repository(client.host, client.port)
    if repository is None:
        fault = f"the server at {client.host}:{client.port} was not started by compress on this machine"
        raise UserError("E714", f"{fault}, so the tokenizer of '{model}' is unknown", "Pass --tokenizer FOLDER")
    return repository / model / "tokenizer"


def labels_of(model: str, config: Mapping[str, Any], parameters: Mapping[str, str]) -> tuple[list[str], str]:
    """The names of the outputs and the output tensor's name. Raises UserError E716 when the model has none."""
    output = next((tensor["name"] for tensor in config["output"] if tensor.get("label_filename")), None)
    if output is None or "labels" not in parameters:
        raise UserError("E716", f"model '{model}' has no labels to predict", "Deploy a classifier, or use Client.infer")
    return json.loads(parameters["labels"]), output


def kind_served(model: str, parameters: Mapping[str, str]) -> TaskKind:
    """The kind of task of a model, by default classification. Raises UserError E716 for an unknown one."""
    name = parameters.get("task", "classification")
    if name not in KINDS:
        what = f"model '{model}' is for the task '{name}', which is not known here"
        raise UserError("E716", what, f"Deploy one for {' or '.join(KINDS)}, or use Client.infer")
    return kind_of(name)


def parse_url(url: str) -> tuple[str, int]:
    """Parse host and port from host:port or http://host:port. Raises UserError E711."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port or parts.scheme != "http" or parts.path.strip("/") or parts.query:
        raise UserError("E711", f"'{url}' is not a server's URL", "Give host:port or http://host:port, such as 127.0.0.1:8000")
    return host, port
