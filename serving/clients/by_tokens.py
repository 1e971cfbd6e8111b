"""Predictions by a served model that takes tokens: texts are tokenized here, with the files of the served version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Encoding, Tokenizer
from tritonclient.utils import triton_to_np_dtype

from compressor.errors import UserError
from compressor.tasks import KINDS
from compressor.tasks.task_kind import TaskKind, kind_of
from serving.backends.door import ENCODING_FIELDS, VERSION_FILE, cut_end
from serving.client import Client
from serving.clients.by_choice import KIND as CHOICES
from serving.clients.text_bytes import Text, as_utf8, check_texts
from serving.layout.text_outputs import LOGITS
from serving.layout.version_file import VersionFacts, read_version
from serving.repository import TOKENIZER, tokenizer_sha256
from serving.server_registry import served_repository

if TYPE_CHECKING:
    from compressor.tasks.kinds.classification import Prediction
    from compressor.tasks.kinds.regression import Estimate
    from compressor.tasks.kinds.tokens import Tagged


PASS_FOLDER = "Pass --tokenizer with the version's folder, NAME/1 of the repository"


class TokenPredictor:
    """The predictions of one version of a model, for texts of any number."""

    def __init__(self, client: Client, model: str, version_folder: Path | None = None):
        """Raises UserError E713, E714, E716, E728."""
        config = client.config(model)
        self.client, self.model, self.size = client, model, config["max_batch_size"]
        self.version = client.versions(model)[-1]
        folder = Path(version_folder or find_version(client, model, self.version))
        if version_folder is not None and not (folder / VERSION_FILE).is_file():
            raise UserError("E714", f"not a version's folder: it has no {VERSION_FILE}", PASS_FOLDER, str(folder))
        check_version(folder, model, self.version)
        facts = read_version(folder)
        self.kind, self.labels = kind_served(model, facts), list(facts.labels)
        self.of_choices, self.pair = facts.task == CHOICES, facts.pair
        check_labels(folder, model, config, facts)
        self.encoder = TextEncoder(model, config, facts, folder / TOKENIZER)

    def __call__(self, texts: Sequence[Text], first: int = 0) -> list[Prediction] | list[Estimate] | list[Tagged]:
        """One prediction per text, in order; `first` is the number of the first one in errors, from 0.

        Raises UserError E717 for a text that cannot be predicted, E715.
        """
        rows, predictions, size = [self.kind.written(text) for text in texts], [], self.size or max(len(texts), 1)
        check_texts(rows, self.pair, self.model, first)
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            encodings = self.encoder.encode(batch, first + start)
            logits = self.client.infer(self.model, self.encoder.features(encodings), self.version)[LOGITS].astype(np.float64)
            for row, text, encoding in zip(logits, batch, encodings, strict=True):
                check_finite(row, encoding, first + len(predictions), text)
                predictions.append(self.kind.prediction(self.labels, row, text, encoding))
        return predictions


class TextEncoder:
    """Texts -> the integer arrays (batch, longest sequence) that a model declares, right-padded, cut at its `max_length`."""

    def __init__(self, model: str, config: Mapping[str, Any], facts: VersionFacts, folder: Path):
        """Raises UserError E714 when the folder's tokenizer is not the model's, E716 for inputs that no tokenizer produces."""
        self.types = {
            tensor["name"]: triton_to_np_dtype(tensor["data_type"].removeprefix("TYPE_")) for tensor in config["input"]
        }
        if unknown := self.types.keys() - ENCODING_FIELDS:
            raise UserError("E716", f"model '{model}' expects an input '{min(unknown)}'", "Send its tensors with Client.infer")
        self.tokenizer = load_tokenizer(Path(folder), facts)
        self.end = facts.end_id

    def encode(self, texts: Sequence[Text], first: int = 0) -> list[Encoding]:
        """Tokenize texts, the first of which has the number `first` in errors. Raises UserError E717 for a text containing the
        end token at which the model's output is read, or that is not valid Unicode."""
        for number, text in enumerate(texts, first):
            for part in (text,) if isinstance(text, str) else text:
                as_utf8(part, number)
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

    def _check_ends(self, texts: Sequence[Text], encodings: Sequence[Encoding]) -> None:
        expected = self.tokenizer.encode(*["a"] * (1 if isinstance(texts[0], str) else 2)).ids.count(self.end)
        for text, encoding in zip(texts, encodings, strict=True):
            if encoding.ids.count(self.end) != expected:
                what = (
                    f"the text {text!r:.60} holds '{self.tokenizer.id_to_token(self.end)}', the token that the task head reads"
                )
                raise UserError("E717", what, "Remove that token from the text")


def check_finite(logits: np.ndarray, encoding: Encoding, number: int, text: Text) -> None:
    """Raise UserError E717 where the logits of text `number` (from 0), (values) or (tokens, values), are not finite: the
    likeliest label of these would be any one. Those of padding are not read."""
    read = logits if logits.ndim == 1 else logits[np.array(encoding.attention_mask, dtype=bool)]
    if not np.isfinite(read).all():
        what = f"text {number + 1}, {text!r:.60}: the model's outputs are not finite"
        raise UserError("E717", what, "Leave it out; the weights or the file of this version may be damaged")


def load_tokenizer(folder: Path, facts: VersionFacts) -> Tokenizer:
    """The tokenizer in `folder`, checked against the version's facts; special tokens in a text are read as text. Raises
    UserError E714."""
    if not (folder / "tokenizer.json").is_file():
        raise UserError("E714", "no tokenizer.json", PASS_FOLDER, str(folder))
    if tokenizer_sha256(folder) != facts.tokenizer_sha256:
        raise UserError("E714", "this is not the tokenizer that the model was deployed with", PASS_FOLDER, str(folder))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = cut_end(tokenizer, folder)
    tokenizer.no_truncation()
    tokenizer.enable_padding(pad_id=facts.pad_id, pad_token=tokenizer.id_to_token(facts.pad_id) or "")
    tokenizer.enable_truncation(facts.max_length, direction=end)
    tokenizer.encode_special_tokens = True
    return tokenizer


def find_version(client: Client, model: str, version: str) -> Path:
    """The folder of a version served on this machine. Raises UserError E714 when the server runs elsewhere."""
    repository = served_repository(client.address.host, client.address.port)
    if repository is None:
        fault = f"the server at {client.address} was not started by compress on this machine, and serves no '{model}-text'"
        raise UserError("E714", f"{fault}: the tokenizer of '{model}' is unknown", "Pass --tokenizer NAME/1 of its repository")
    return repository / model / version


def check_version(folder: Path, model: str, version: str) -> None:
    """Raise UserError E714 where a version's folder, by its number, is not that of the `version` that the server predicts with.
    A folder without a number may be of any."""
    number = folder.resolve().name
    if number.isdecimal() and number != version:
        what = f"the folder is of version {number}, and the server predicts with version {version} of '{model}'"
        raise UserError("E714", what, f"Pass --tokenizer with the folder of version {version}", str(folder))


def check_labels(folder: Path, model: str, config: Mapping[str, Any], facts: VersionFacts) -> None:
    """Raise UserError E716 where a served model gives no logits, E714 where it gives others than the folder has labels."""
    logits = next((tensor for tensor in config["output"] if tensor["name"] == LOGITS), None)
    if logits is None:
        raise UserError("E716", f"model '{model}' gives no {LOGITS}", "Use Client.infer")
    classes = int(logits["dims"][-1])  # -1: of any number. In JSON from gRPC it is text
    if classes not in (-1, len(facts.labels)):
        what = f"the folder has {len(facts.labels)} labels, and model '{model}' gives {classes} {LOGITS}"
        raise UserError("E714", what, PASS_FOLDER, str(folder))


def kind_served(model: str, facts: VersionFacts) -> TaskKind:
    """The kind of task of a version. Raises UserError E716 for an unknown one."""
    if facts.task not in KINDS:
        what = f"model '{model}' is for the task '{facts.task}', which is not known here"
        raise UserError("E716", what, f"Deploy one for {' or '.join(KINDS)}, or use Client.infer")
    return kind_of(facts.task)
