"""A repository with a tiny classifier, and one real server for the whole session."""

import importlib.util

import pytest
from triton_parts import LABELS, PARAMETERS, write_classifier, write_tokenizer

from serving.repository import write_repository
from serving.server import EmbeddedServer


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("onnx") / "classifier.onnx")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("saved") / "tokenizer")


@pytest.fixture(scope="session")
def repository(tmp_path_factory, classifier, tokenizer_folder):
    folder = tmp_path_factory.mktemp("served") / "repository"
    # a delay long enough that concurrent requests really share a batch
    options = {"labels": LABELS, "tokenizer_folder": tokenizer_folder, "max_queue_delay_us": 5000, "parameters": PARAMETERS}
    write_repository(folder, "reviews", classifier, **options)
    write_repository(folder, "bare", classifier, max_batch_size=0)
    return folder


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory):
    """A cache folder of the session's own, so that no test sees or touches the user's servers."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="session")
def triton():
    """Skips where the extra `triton` is not installed."""
    if importlib.util.find_spec("pytriton") is None:
        pytest.skip("nvidia-pytriton is not installed")


@pytest.fixture(scope="session")
def server(repository, tmp_path_factory, triton):
    with EmbeddedServer(repository, log_path=tmp_path_factory.mktemp("log") / "triton.log") as running:
        yield running
