"""What a program gives to the serving library by mistake is refused before anything is written or asked."""

import re
from dataclasses import replace

import numpy as np
import pytest

from compressor.errors import UserError
from serving.backend_files import backend_names, copy_backend
from serving.client import Client
from serving.clients.by_choice import best_choices
from serving.clients.text_bytes import encoded
from serving.generator_repository import write_generator
from serving.layout.knobs import Knobs
from serving.predict import predict
from serving.repository import write_repository
from serving.server import EmbeddedServer
from tests.serving.triton_parts import FACTS, write_classifier, write_tokenizer


@pytest.fixture
def classifier(tmp_path):
    return write_classifier(tmp_path / "model.onnx")


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path / "words")


@pytest.mark.parametrize("interfaces", ["tokens", "text", (), ("foo",), ("tokens", "foo")])
def test_interfaces_are_known(tmp_path, classifier, tokenizer, interfaces):
    with pytest.raises(ValueError, match="interfaces is"):
        write_repository(
            tmp_path / "served", "reviews", classifier, facts=FACTS, tokenizer_folder=tokenizer, interfaces=interfaces
        )
    assert not (tmp_path / "served").exists()


def test_texts_are_for_something(tmp_path, classifier, tokenizer):
    served = {"tokenizer_folder": tokenizer, "interfaces": ("text",)}
    with pytest.raises(ValueError, match="facts is None"):
        write_repository(tmp_path / "served", "reviews", classifier, **served)
    with pytest.raises(ValueError, match="task is 'poetry'"):
        write_repository(tmp_path / "served", "reviews", classifier, facts=replace(FACTS, task="poetry"), **served)
    assert not (tmp_path / "served").exists()


@pytest.mark.parametrize("name", ["../escaped", "", "a/b", "/tmp/a", "-a"])
def test_a_generator_is_written_below_its_repository(tmp_path, name):
    with pytest.raises(UserError, match="E720"):
        write_generator(tmp_path / "served", name, tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "settings",
    [{"max_batch_size": -1}, {"instances": 0}, {"threads": 0}, {"streams": -1}, {"timeout_ms": 0}, {"max_queue_size": 1.5}],
)
def test_settings_are_numbers_that_triton_takes(settings):
    with pytest.raises(ValueError, match=f"^{next(iter(settings))} is "):
        Knobs(**settings)


def test_one_text_is_not_its_characters():
    for text in ("A fine film", b"A fine film"):
        with pytest.raises(ValueError, match="texts is one text"):
            predict("127.0.0.1:1", "reviews", text)


@pytest.mark.parametrize("odd", [3, None, b"x", ("a", None), 1.5])
def test_what_is_no_text_is_not_called_a_pair(odd):
    with pytest.raises(UserError, match=r"E717 text 2 is .*, not a text"):
        encoded(["a", odd], False, "reviews")


@pytest.mark.parametrize("told", ["text 3, ('b', '2'): too long", "the text holds '</s>'"])
def test_a_choice_that_is_refused_is_named_by_its_row(told):
    def refuse(pairs):
        raise UserError("E717", told, "Correct it")

    with pytest.raises(UserError, match=rf"^E717 {re.escape(told.replace('3', '12'))}\. Correct it"):
        best_choices(refuse, [("a", "0", "1"), ("b", "2", "3")], first=10)
    with pytest.raises(UserError, match="E717 text 12 is not valid Unicode"):
        best_choices(lambda pairs: encoded(pairs, True, "m"), [("a", "0", "1"), ("b", "2", "\ud800")], first=10)


def test_a_backend_is_copied_again(tmp_path):
    for _ in range(2):
        assert (copy_backend("compress_text", tmp_path) / "model.py").is_file()
    with pytest.raises(ValueError, match=f"one of {', '.join(backend_names())}"):
        copy_backend("../model", tmp_path)


def test_ports_are_ports(tmp_path):
    with pytest.raises(ValueError, match="http_port is 99999"):
        EmbeddedServer(tmp_path, log_path=tmp_path / "log", http_port=99999)


def test_features_are_arrays():
    with Client("127.0.0.1:1") as client:
        for odd in ({}, {"input_ids": [[1, 2]]}, {"input_ids": np.zeros((1, 2)), "attention_mask": None}):
            with pytest.raises(ValueError, match="features are"):
                client.infer("reviews", odd)
