"""The files that `compress deploy` writes for KServe and for compose, and what is refused before anything is deployed."""

import pytest
import yaml
from triton_parts import FACTS, write_classifier

from compressor.errors import UserError
from pipelines.cli.work import deploy_work
from serving.deployment.answers import write_answers
from serving.repository import write_repository

BUCKET = "memory://bucket/models"


@pytest.fixture
def deployed(tmp_path, tokenizer_folder):
    """Deploys a repository with a model of tokens and one of texts, and what stands in a compose file's place before it."""
    model = write_classifier(tmp_path / "m.onnx")
    options = {"facts": FACTS, "tokenizer_folder": tokenizer_folder, "interfaces": ("tokens", "text")}
    write_repository(tmp_path / "run", "4-reviews", model, **options)
    for version in (tmp_path / "run").glob("*/1"):
        write_answers(version, [])

    def call(to, kserve=None, compose=None):
        options = dict.fromkeys(("url", "token_file", "ca", "max_ms"))
        shown = {"keep": 2, "rollback": False, "show": False, "as_json": False}
        deploy_work.run(tmp_path / "run", to, kserve=kserve, compose=compose, **options, **shown)

    return call


def test_a_service_of_the_models_that_kserves_triton_can_serve(deployed, tmp_path, capsys):
    deployed(BUCKET, kserve=tmp_path / "service.yaml")
    service = yaml.safe_load((tmp_path / "service.yaml").read_text())
    assert service["metadata"]["name"] == "model-4-reviews", "a service's name begins with a letter"
    model = service["spec"]["predictor"]["model"]
    assert model["args"] == ["--model-control-mode=explicit", "--load-model=4-reviews"] and model["storageUri"] == BUCKET
    assert "without 4-reviews-text, for which KServe's Triton has no backend" in capsys.readouterr().out


def test_a_compose_file_has_its_own_folder_beside_it(deployed, tmp_path):
    kept = tmp_path / "here" / "backends" / "onnxruntime" / "mine.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    deployed(str(tmp_path / "served"), compose=tmp_path / "here" / "compose.yaml")
    (triton,) = yaml.safe_load((tmp_path / "here" / "compose.yaml").read_text())["services"].values()
    assert kept.read_text() == "mine"
    sources = [volume["source"] for volume in triton["volumes"]]
    backends = [tmp_path / "here" / source / "model.py" for source in sources[1:]]
    assert sources[0] == str(tmp_path / "served") and all(backend.is_file() for backend in backends)
    assert "--load-model=4-reviews --load-model=4-reviews-text" in triton["command"][0]


@pytest.mark.parametrize(("kind", "of_url"), [("kserve", False), ("compose", True)])
def test_what_cannot_be_written_is_told_before_anything_is_deployed(deployed, tmp_path, kind, of_url):
    to = "memory://elsewhere/models" if of_url else str(tmp_path / "served")
    with pytest.raises(UserError, match="E757"):
        deployed(to, **{kind: tmp_path / "file.yaml"})
    assert not (tmp_path / "file.yaml").exists() and not list((tmp_path / "served").glob("*"))


def test_a_run_of_texts_alone_has_nothing_for_kserve(tmp_path, tokenizer_folder):
    model = write_classifier(tmp_path / "m.onnx")
    options = {"facts": FACTS, "tokenizer_folder": tokenizer_folder, "interfaces": ("text",)}
    write_repository(tmp_path / "run", "reviews", model, **options)
    arguments = dict.fromkeys(("url", "token_file", "ca", "max_ms", "compose"))
    with pytest.raises(UserError, match=r"E757 .*KServe's own Triton has no backend for reviews-text"):
        deploy_work.run(
            tmp_path / "run", BUCKET, kserve=tmp_path / "f", keep=2, rollback=False, show=False, as_json=False, **arguments
        )
