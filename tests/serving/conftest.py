"""A repository with a tiny classifier, and one real server for the whole session."""

import importlib.util
import sys
from dataclasses import replace

import onnxruntime as ort
import pytest
from triton_parts import (
    FACTS,
    KNOBS,
    NAME,
    TRITON,
    QuickServer,
    answers_of,
    self_signed,
    write_classifier,
    write_served,
    write_tokenizer,
)

from serving.backend_files import SHARED, copy_backend
from serving.deployment.answers import write_answers
from serving.deployment.target import Target
from serving.deployment.triton_control import Control
from serving.repository import write_repository

TOKEN = "a-token-of-this-test-and-no-other"


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
    with QuickServer(repository, log_path=tmp_path_factory.mktemp("log") / "triton.log") as running:
        yield running


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    return self_signed(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def proxied(monkeypatch):
    """The environment of a machine behind a proxy, which does not respond."""
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy", "grpc_proxy", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")


@pytest.fixture
def make_run(tmp_path, tokenizer_folder):
    """A repository as a run writes it, of weights that `seed` draws."""

    def make(seed=0, labels=("bad", "fair", "good"), answered=None, **options):
        folder = tmp_path / f"run-{seed}-{labels[0]}-{answered}" / "repository"
        model = write_classifier(tmp_path / f"{seed}.onnx", seed)
        options = {"facts": replace(FACTS, labels=labels), "tokenizer_folder": tokenizer_folder, "knobs": KNOBS, **options}
        written = write_repository(folder, NAME, model, **options)
        other = model if answered is None else write_classifier(tmp_path / f"{answered}.onnx", answered)
        write_answers(written / "1", answers_of(other))
        return folder

    return make


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The repository of the server below, and the server with model control."""
    return tmp_path_factory.mktemp("published")


@pytest.fixture(scope="module")
def control(published, tmp_path_factory, triton, request):
    log = tmp_path_factory.mktemp("log") / "triton.log"
    with QuickServer(published, log_path=log, token=TOKEN) as server:
        yield Control.at(server.url, header=("Authorization", f"Bearer {TOKEN}"))


@pytest.fixture
def target(published, control):
    """An empty repository."""
    found = Target.at(str(published))
    yield found
    for model in found.models():
        control.unload(model)
        found.remove(found.path(model))


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Imports a file of a backend's folder, as the server copies it."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", TRITON)
    for path in SHARED:
        monkeypatch.delitem(sys.modules, path.stem, raising=False)

    def load(backend, name):
        folder = tmp_path / "backends" / backend
        if not folder.is_dir():
            copy_backend(backend, tmp_path / "backends")
        monkeypatch.syspath_prepend(str(folder))
        spec = importlib.util.spec_from_file_location(f"{backend}_{name}", folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    for path in SHARED:
        sys.modules.pop(path.stem, None)
