"""A repository with a tiny classifier, and one real server for the whole session."""

import importlib.util

import onnxruntime as ort
import pytest
from triton_parts import write_classifier, write_served, write_tokenizer

from serving.server import EmbeddedServer


@pytest.fixture(scope="session")
def classifier(tmp_path_factory):
    return write_classifier(tmp_path_factory.mktemp("onnx") / "classifier.onnx")


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("saved") / "tokenizer")


@pytest.fixture(scope="session")
def repository(tmp_path_factory, classifier, tokenizer_folder):
    return write_served(tmp_path_factory.mktemp("served") / "repository", classifier, tokenizer_folder)


@pytest.fixture(scope="session")
def version_folder(repository):
    return repository / "reviews" / "1"


@pytest.fixture(scope="session")
def session(classifier):
    return ort.InferenceSession(classifier, providers=["CPUExecutionProvider"])


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
