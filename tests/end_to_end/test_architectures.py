"""The whole product on every architecture: the pipeline of the quickstart's shape, from select to the report."""

import json

import numpy as np
import pytest
import torch

from compressor import load
from compressor.errors import UserError
from compressor.models.architectures import ARCHITECTURES
from compressor.models.special_tokens import tokenizer_of
from compressor.tasks.features import pad
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from serving.predict import predict
from serving.server import EmbeddedServer
from tests.tiny import STAGES, write_pipeline, write_tokenizer

# a group of Llama's heads is most of a tiny matrix: robust PCA, of rank 16, finds nothing sparse in what is left
WHOLE = [*STAGES[:3], {"select": {"count": 4, "modules": "all", "score": "magnitude"}}, *STAGES[4:]]
# BERT's always runs, in test_whole_path.py
RUNS = (*ARCHITECTURES, "t5-gated")
TEXTS = ("the film was great", "a very very dull plot and a poor story", "good")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", RUNS)
def test_a_whole_run(architecture, tmp_path):
    """Every stage passes its own checks; texts of unequal length get one answer in PyTorch and through the live server."""
    result = run_pipeline(load_pipeline(write_pipeline(tmp_path, stages=WHOLE, model_type=architecture)), tmp_path / "out")
    report = json.loads((tmp_path / "out" / "tiny" / "report.json").read_text())
    assert {hop["kind"] for hop in report["parity"]} == {"removed", "merged", "fp32", "int8", "served"}
    # int8 of a tiny dense model, which is not shipped, may move more than the gate allows: without VNNI its weights have 7 bits
    assert all(hop["passed"] for hop in report["parity"] if hop["gated"])
    assert {hop["kind"] for hop in report["parity"] if hop["gated"]} == {"removed", "merged", "fp32", "int8", "served"}
    model, tokenizer = load(result.artifacts["merge"].folder), tokenizer_of(tmp_path / "model")
    rows = pad([dict(tokenizer(text)) for text in TEXTS], model.config.pad_token_id)
    with torch.no_grad():
        logits = model(**{name: torch.from_numpy(values) for name, values in rows.items()}).logits
    expected = logits.softmax(-1).numpy()
    repository = result.artifacts["deploy"].folder / "repository"
    with EmbeddedServer(repository, log_path=tmp_path / "triton.log") as server:
        answers = predict(server.url, "tiny", TEXTS, version_folder=repository / "tiny" / "1")
        assert np.abs([list(one.scores.values()) for one in answers] - expected).max() < 0.05  # int8 is what is served
        for text, token in zip(predict(server.url, "tiny", TEXTS), answers, strict=True):
            assert text.scores == pytest.approx(token.scores, abs=0.05)  # rows share scales of dynamic int8 with others


SHORT = [{"tune": {"method": "lora", "rank": 2, "epochs": 0.1}}]


@pytest.mark.slow
def test_t5_reads_its_answer_at_one_end_of_sentence(tmp_path):
    """Rows that are cut to length keep it, pairs have two; a text that spells it is a line that says so."""
    path = write_pipeline(tmp_path / "pairs", stages=SHORT, model_type="t5", rows=16, pairs=True)
    assert run_pipeline(load_pipeline(path), tmp_path / "out").artifacts
    path = write_pipeline(tmp_path / "cut", stages=SHORT, model_type="t5", rows=16)
    assert run_pipeline(load_pipeline(path, ["task.max_length=5"]), tmp_path / "out").artifacts
    data = path.parent / "train.tsv"
    data.write_text(data.read_text().replace("\tclass1", " [SEP]\tclass1", 1))
    assert run_pipeline(load_pipeline(path), tmp_path / "out").artifacts, "a special token spelt in a text is text"
    # but where the spelling is in the vocabulary itself, as in SentencePiece's
    tokenizer = path.parent / "model" / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"type": "Whitespace"', '"type": "WhitespaceSplit"'))
    with pytest.raises(UserError, match=r"E212 .*train.tsv:3: the text '.* \[SEP\]' makes 2 tokens '\[SEP\]', not 1"):
        run_pipeline(load_pipeline(path), tmp_path / "out")


def test_a_tokenizer_that_ends_no_row_is_not_t5s(tmp_path):
    path = write_pipeline(tmp_path, stages=SHORT, model_type="t5", rows=16)
    write_tokenizer(tmp_path / "model", "gpt2")
    with pytest.raises(UserError, match=r"E212 .*the tokenizer does not end a row with '\[SEP\]'"):
        run_pipeline(load_pipeline(path), tmp_path / "out")
