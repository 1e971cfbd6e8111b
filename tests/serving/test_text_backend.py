"""Texts in, answers out, on the real server: equal to a local session, merged, and a wrong text refused alone."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from test_triton_client import statistics
from tokenizers import Tokenizer
from triton_parts import FACTS, LABELS, WORDS, QuickServer, write_tagger

from compressor.errors import UserError
from serving.client import Client, Refusal
from serving.layout.knobs import Knobs
from serving.predict import predict
from serving.repository import write_repository

MODEL = "reviews-text"


def texts(count, seed=0):
    """Texts of 0 to 20 words; some are cut at max_length, 8 tokens."""
    draw = np.random.default_rng(seed)
    return [" ".join(draw.choice(WORDS[4:], size=draw.integers(0, 20))) for _ in range(count)]


def as_input(rows):
    return {"TEXT": np.array([[row if isinstance(row, bytes) else row.encode()] for row in rows], dtype=object)}


def url_of(server, protocol):
    return server.url if protocol == "http" else f"grpc://127.0.0.1:{server.ports['grpc']}"


@pytest.fixture(scope="module")
def expected(tokenizer_folder, session):
    """Probabilities by a local session, each text alone."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.enable_truncation(FACTS.max_length)
    tokenizer.encode_special_tokens = True

    def scores(rows):
        ids = [np.array([tokenizer.encode(row).ids]) for row in rows]
        logits = [session.run(["logits"], {"input_ids": row, "attention_mask": np.ones_like(row)})[0] for row in ids]
        weights = np.exp(np.concatenate(logits))
        return weights / weights.sum(axis=1, keepdims=True)

    return scores


@pytest.mark.parametrize("protocol", ["http", "grpc"])
@pytest.mark.parametrize("batch", [1, 2, 17, 64])
def test_answers_equal_a_local_session(server, expected, protocol, batch):
    rows = texts(batch, seed=batch)
    with Client(url_of(server, protocol)) as client:
        answers = client.infer(MODEL, as_input(rows))
    scores = expected(rows)
    np.testing.assert_allclose(answers["SCORES"], scores, atol=1e-5, rtol=0)
    np.testing.assert_allclose(answers["SCORE"][:, 0], scores.max(axis=1), atol=1e-5, rtol=0)
    assert answers["LABEL"][:, 0].tolist() == [LABELS[best].encode() for best in scores.argmax(axis=1)]
    assert answers["LABELS"].tolist() == [[label.encode() for label in LABELS]] * batch


def send(url, rows):
    with Client(url) as client:
        try:
            return client.infer(MODEL, as_input(rows))["SCORES"]
        except UserError as error:
            return error


def test_concurrent_texts_are_merged_and_a_wrong_one_is_refused_alone(server, expected):
    requests = [texts(1 + seed % 3, seed) for seed in range(48)]
    requests[5], requests[11] = ["a film", b"\xff\xfe"], [b"x" * 2**20 + b"y"]
    before = statistics(server.url, MODEL)
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda rows: send(server.url, rows), requests))
    counted, executions = statistics(server.url, MODEL) - before
    assert counted == 48 and executions <= 24, "requests of texts of any length share a batch"
    for number, reason in ((5, "row 1: the text is not UTF-8: byte 0 is 0xff"), (11, "a text of 1,048,577 bytes")):
        assert isinstance(answers[number], Refusal) and answers[number].wrong and reason in answers[number].reason
    for number in set(range(48)) - {5, 11}:
        np.testing.assert_allclose(answers[number], expected(requests[number]), atol=1e-5, rtol=0)


def test_special_tokens_in_a_text_are_text(server, expected):
    spelt, plain = predict(server.url, "reviews", ["a [SEP] film", "a film"])
    assert list(spelt.scores.values()) == pytest.approx(expected(["a [SEP] film"])[0], abs=1e-5)
    assert spelt != plain


def test_any_unicode_is_answered_and_what_is_none_has_a_code(server):
    odd = ["", " ", "\0", "\u202eabc", "😀" * 300, "x" * 1_000_000, "\ufeff", "a\nb"]
    assert len(predict(server.url, "reviews", odd)) == len(odd)
    with pytest.raises(UserError, match=r"E717 text 2 is not valid Unicode: character 3 is '\\ud800'"):
        predict(server.url, "reviews", ["a", "b \ud800"])
    with pytest.raises(UserError, match=r"E717 text 75, 'x+: a text of 1,100,000 bytes"):
        predict(server.url, "reviews", ["a"] * 74 + ["x" * 1_100_000, "b"])
    with pytest.raises(UserError, match=r"E717 text 65, 'x+: a text of 1,100,000 bytes"):  # alone in the second request
        predict(server.url, "reviews", ["a"] * 64 + ["x" * 1_100_000])


def test_a_request_of_another_shape_is_refused(server):
    with Client(server.url) as client, pytest.raises(UserError, match="E715"):
        client.infer(MODEL, {"TEXT": np.array([[b"a", b"b"]], dtype=object)})


@pytest.fixture(scope="module")
def kinds(tmp_path_factory, tokenizer_folder, triton):
    """A server with a tagger of words and a regression on pairs."""
    folder = tmp_path_factory.mktemp("kinds")
    repository, knobs = folder / "repository", Knobs(threads=1, max_batch_tokens=9)
    tags = replace(FACTS, task="tokens", labels=("O", "B-X", "I-X"), max_length=12)
    stars = replace(FACTS, task="regression", labels=("stars",), pair=True, max_length=12, end_id=3)
    options = {"tokenizer_folder": tokenizer_folder, "interfaces": ["text"], "knobs": knobs}
    write_repository(repository, "tags", write_tagger(folder / "tags.onnx", labels=3), facts=tags, **options)
    pooled = write_tagger(folder / "stars.onnx", labels=1, pooled=True)
    write_repository(repository, "stars", pooled, facts=stars, **options)
    with QuickServer(repository, log_path=folder / "triton.log") as running:
        yield running


def test_words_get_their_tags_and_places(kinds):
    rows = ["  the plot\twas  dull ", "great", "a film 😀 fine"]
    with Client(kinds.url) as client:
        answers = client.infer("tags-text", as_input(rows))["ENTITIES"]
        for text, (answer,) in zip(rows, answers, strict=True):
            words = json.loads(answer)
            assert [word["text"] for word in words] == text.split()
            assert all(text[word["start"] : word["end"]] == word["text"] for word in words)
            # the model's tag is its token's id modulo 3
            known = [word for word in words if word["text"] in WORDS]
            assert all(word["tag"] == ("O", "B-X", "I-X")[WORDS.index(word["text"]) % 3] for word in known)
        for wrong, reason in ((" ", "has no words"), ("a " * 11, "longer than the model reads")):
            with pytest.raises(UserError, match=f"row 1: the text .*{reason}"):
                client.infer("tags-text", as_input(["a", wrong]))
    (tagged,) = predict(kinds.url, "tags", ["the  plot"])
    assert (tagged.words, tagged.tags) == (("the", "plot"), ("B-X", "O"))


def test_pairs_get_numbers(kinds):
    pairs = [("the plot", "great"), ("a", "b"), ("", "x")]
    answers = predict(kinds.url, "stars", pairs)
    # [CLS], and [SEP] twice; the model gives the mean of the ids
    ids = [[2, 10, 9, 3, 8, 3], [2, 4, 3, 1, 3], [2, 3, 1, 3]]
    assert [answer.value for answer in answers] == pytest.approx([np.mean(row) for row in ids])
    assert answers[0].name == "stars"
    with pytest.raises(UserError, match="E717 model 'stars-text' takes pairs of texts, text 1 is one"):
        predict(kinds.url, "stars", ["a"])
    with Client(kinds.url) as client, pytest.raises(UserError, match="E715"):
        client.infer("stars-text", as_input(["a"]))


def test_triton_finds_nothing_to_warn_of(server):
    """No folder that it does not know beside the versions, no settings that it ignores."""
    log = server.log_path.read_text().splitlines()
    assert [line for line in log if line.startswith(("W", "E")) and ("reviews" in line or "directory" in line)] == []
