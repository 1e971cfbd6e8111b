"""An encoder with its decoder on a live server: texts of many requests in one batch, each as the bare loop generates it."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import processors
from writer_parts import bare_words, export_writer, generate, make_writer, serve_writer

from compressor.errors import UserError
from serving.generator_repository import Source, write_generator
from serving.layout.version_file import read_version

pytestmark = pytest.mark.slow

START, END = 1, 2
"""Of the tiny T5's config, and of the tokenizer here."""
PREFIX, MAX_LENGTH = "w3 w4 ", 8
SOURCES = ["w5 w6 w7 w8 w9", "w8 w9", "w5 w7 w9 w11 w13 w15 w17 w19 w21", "w20"]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A T5's export, and the folder of its tokenizer and config."""
    root = tmp_path_factory.mktemp("t5")
    model = make_writer("t5", seed=10)
    model.lm_head.weight.data[[0, END]] /= 2
    closed = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", END)])
    return export_writer(model, root, {0: "<pad>", END: "</s>"}, END, closed, pad_token="<pad>", eos_token="</s>")


@pytest.fixture(scope="module")
def server(exported, tmp_path_factory, triton):
    with serve_writer(exported, tmp_path_factory.mktemp("served"), source=Source(MAX_LENGTH, PREFIX)) as running:
        yield running


def bare(exported, source, count):
    """The words that the bare loop generates: the source is cut behind its prefix, and ends with the end token."""
    ids = [*(int(word[1:]) for word in (PREFIX + source).split()[: MAX_LENGTH - 1]), END]
    return bare_words(exported, ids, count, END)


@pytest.mark.parametrize("source", SOURCES)
def test_a_stream_is_what_the_bare_loop_generates(server, exported, source):
    expected = bare(exported, source, 24)
    assert len(set(expected)) > 3, "a text that shows something"
    pieces, tokens, finish = generate(server, f" {source}\n", MAX_TOKENS=24)
    assert "".join(pieces).split() == expected
    assert (finish, tokens) == (("length", 24) if len(expected) == 24 else ("end", len(expected) + 1))


def test_many_at_a_time_are_as_alone(server, exported):
    """They join and leave one batch at different tokens, with sources of different lengths."""
    asked = [(SOURCES[number % 4], 3 + 5 * (number % 5)) for number in range(20)]
    with ThreadPoolExecutor(10) as pool:
        given = list(pool.map(lambda one: generate(server, one[0], MAX_TOKENS=one[1]), asked))
    for (source, count), (pieces, _, _) in zip(asked, given, strict=True):
        assert "".join(pieces).split() == bare(exported, source, count)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [(" ", {}, "0 characters"), ("w5", {"MAX_TOKENS": 4096}, "at most 2048"), ("w5", {"TOP_P": 0.0}, "TOP_P is 0.0")],
)
def test_requests_that_are_wrong_are_refused_alone(server, exported, text, options, words):
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException, match=words):
        generate(server, text, **{"MAX_TOKENS": 4, **options})
    assert "".join(generate(server, SOURCES[1], MAX_TOKENS=4)[0]).split() == bare(exported, SOURCES[1], 4)


def test_an_export_without_a_mask_of_the_decoder_is_not_served(exported, tmp_path):
    """As they were written before: texts that are computed together would be wrong."""
    facts = json.loads((exported[0] / "export.json").read_text())
    del facts["files"]["decoder_model"]["inputs"]["attention_mask"]
    (tmp_path / "export.json").write_text(json.dumps(facts))
    with pytest.raises(UserError, match=r"E602 .*takes no attention_mask.*Export it again"):
        write_generator(tmp_path / "repository", "writer", tmp_path, exported[1])


def test_a_version_holds_both_files_and_how_a_source_is_read(exported, tmp_path):
    version = write_generator(tmp_path, "writer", *exported, source=Source(MAX_LENGTH, PREFIX)) / "1"
    for served, written in (("model.onnx", "decoder_model.onnx"), ("encoder.onnx", "encoder_model.onnx")):
        assert (version / served).read_bytes() == (exported[0] / written).read_bytes()
    facts = read_version(version)
    assert (facts.task, facts.start, facts.prefix, facts.max_length) == ("text2text", START, PREFIX, MAX_LENGTH)
    assert json.loads((version / "serving.json").read_text())["start"] == START
