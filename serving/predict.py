"""Texts in, and labels, numbers or tags out, with a served model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compressor.errors import UserError
from serving.client import Client
from serving.clients.by_choice import best_choices
from serving.clients.text_bytes import Text
from serving.layout.text_outputs import GENERATE_BACKEND, TEXT_BACKEND, TEXT_SUFFIX


def predict(
    url: str,
    model: str,
    texts: Sequence[Text],
    version_folder: Path | None = None,
    *,
    ca: Path | None = None,
    token: str | None = None,
    task: str | None = None,
) -> list[Any]:
    """Predict texts, or pairs of texts, with a served model: one Prediction per text, in order; Estimate for a regression,
    Tagged for token classification, whose words are separated by spaces; LabelsFound for several labels, Answer for questions
    with a context, Choice for a text with its choices, (text, choice, choice, ...).

    As `predictor`, which raises what it says, for one call. ValueError for one text in place of several.
    """
    if isinstance(texts, (str, bytes)):
        raise ValueError("texts is one text: give a list of them")
    with Client(url, ca=ca, token=token) as client:
        return predictor(client, model, version_folder, task=task)(texts)


def predictor(
    client: Client, model: str, version_folder: Path | None = None, *, task: str | None = None
) -> Callable[[Sequence[Text]], list[Any]]:
    """A function of texts, or pairs of texts, that predicts them with the served `model`.

    It uses the model that takes texts (NAME-text, or `model` itself if it is one) where that is served. Otherwise, or with
    `version_folder` (NAME/1 of the repository), texts are tokenized here: with the files in that folder, or in the repository
    when the server runs on this machine. Raises UserError E712 (no server), E713 (no such model), E714 (tokenizer), E715
    (refused), E716 (unsupported kind of model), E717 (invalid text), E728 (facts of the version), E778 (`task` is the name of
    one in a model of many).
    """
    if not model.isprintable():  # no lone surrogates either
        raise UserError("E713", f"{model!a:.100} is not the name of a model", "Give the name as the server lists it")
    # imported here: each loads only what its own way needs
    if version_folder is None:
        for name in (f"{model}{TEXT_SUFFIX}", model):
            config = client.config(name) if client.ready(name) else {}
            if config.get("backend") == GENERATE_BACKEND:
                # not Client.infer: Triton refuses a request with one answer for a model whose answers come in parts
                fix = "Send its prompts to the server's generate_stream"
                raise UserError("E716", f"model '{name}' continues texts", fix)
            if config.get("backend") == TEXT_BACKEND:
                from serving.clients.by_text import TextPredictor

                return _of_rows(TextPredictor(client, name, config, task))
    if task is not None:
        from serving.clients.by_text import check_task

        check_task(model, task, many=False)
    from serving.clients.by_tokens import TokenPredictor

    return _of_rows(TokenPredictor(client, model, version_folder))


def _of_rows(predict_texts: Any) -> Callable[[Sequence[Text]], list[Any]]:
    """The predictor; for multiple choice one of rows, each a text with its choices."""
    return partial(best_choices, predict_texts) if predict_texts.of_choices else predict_texts
