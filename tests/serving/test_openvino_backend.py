"""A stock `backend: "openvino"` repository on the real embedded server, against a local session."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from triton_parts import LABELS, PARAMETERS, WORDS

from compressor.errors import UserError
from export.runtimes.sessions import run, session
from serving.client import Client
from serving.repository import read_config, write_repository
from serving.server import EmbeddedServer

openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")


@pytest.fixture(scope="module")
def model(classifier, tmp_path_factory):
    """The tiny classifier as model.xml and model.bin."""
    path = tmp_path_factory.mktemp("openvino") / "model_int8.xml"
    openvino.save_model(openvino.Core().read_model(classifier), path, compress_to_fp16=False)
    return path


@pytest.fixture(scope="module")
def repository(model, tokenizer_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "repository"
    parameters = {**PARAMETERS, "INFERENCE_NUM_THREADS": 1}
    options = {"labels": LABELS, "tokenizer_folder": tokenizer_folder, "max_queue_delay_us": 5000, "parameters": parameters}
    write_repository(folder, "reviews", model, **options)
    write_repository(folder, "bare", model, max_batch_size=0)
    return folder


@pytest.fixture(scope="module")
def server(repository, tmp_path_factory, triton):
    with EmbeddedServer(repository, log_path=tmp_path_factory.mktemp("log") / "triton.log") as running:
        yield running


def features(batch, length, seed=0):
    """Random ids, right-padded to random lengths."""
    generator = np.random.default_rng(seed)
    mask = (np.arange(length) < generator.integers(1, length + 1, (batch, 1))).astype(np.int64)
    return {"input_ids": generator.integers(0, len(WORDS), (batch, length)) * mask, "attention_mask": mask}


def test_the_repository_is_one_that_the_native_backend_reads(repository, model):
    assert sorted(path.name for path in (repository / "reviews" / "1").iterdir()) == ["model.bin", "model.xml"]
    assert (repository / "reviews" / "1" / "model.bin").read_bytes() == model.with_suffix(".bin").read_bytes()
    batched, bare = (read_config(repository / name) for name in ("reviews", "bare"))
    assert (batched.backend, batched.max_batch_size) == ("openvino", 32)
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in batched.input] == [
        (name, 9, [-1]) for name in ("input_ids", "attention_mask")
    ]
    assert [(tensor.name, tensor.data_type, list(tensor.dims)) for tensor in batched.output] == [("logits", 11, [3])]
    assert batched.parameters["ENABLE_BATCH_PADDING"].string_value == "YES"
    assert list(bare.input[0].dims) == [-1, -1] and "ENABLE_BATCH_PADDING" not in bare.parameters


@pytest.mark.parametrize("name", ["reviews", "bare"])
def test_served_logits_equal_a_local_session(server, model, name):
    live = session(model)
    with Client(f"http://{server.url}") as client:
        for batch, length in ((1, 1), (1, 8), (3, 5), (32, 16)):
            feed = features(batch, length)
            np.testing.assert_allclose(client.infer(name, feed)["logits"], run(live, feed), atol=1e-5, rtol=0)


def infer_or_fail(url, feed):
    with Client(url) as client:
        try:
            return client.infer("reviews", feed)["logits"]
        except UserError as error:
            return error


def test_requests_that_share_a_batch_get_their_own_answers_and_errors(server, model):
    live = session(model)
    feeds = [features(1 + seed % 3, 4 + seed % 2, seed) for seed in range(24)]
    feeds[7]["attention_mask"] = feeds[7]["attention_mask"][:, :2]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda feed: infer_or_fail(server.url, feed), feeds))
    failed = answers.pop(7)
    assert failed.code == "E715" and "openvino error: the inputs differ in shape" in str(failed)
    for feed, answer in zip(feeds[:7] + feeds[8:], answers, strict=True):
        np.testing.assert_allclose(answer, run(live, feed), atol=1e-5, rtol=0)


def test_a_config_that_is_not_the_models_is_refused(tmp_path, model, triton):
    config = write_repository(tmp_path / "repository", "renamed", model) / "config.pbtxt"
    config.write_text(config.read_text().replace("attention_mask", "mask"))
    with pytest.raises(UserError, match=r"E707 .*input 'mask', allowed inputs are: input_ids, attention_mask"):
        EmbeddedServer(tmp_path / "repository", log_path=tmp_path / "log").start()


def test_a_broken_model_is_refused(tmp_path):
    (tmp_path / "model.xml").write_text("<net>")
    with pytest.raises(UserError, match=r"E721 .*model.xml: not a readable OpenVINO model"):
        write_repository(tmp_path / "repository", "broken", tmp_path / "model.xml")
