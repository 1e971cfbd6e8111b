"""The files that `compress deploy` writes for KServe and for compose, and what is refused before anything is deployed."""

import contextlib
import json
import os
import shutil
from dataclasses import replace
from importlib import metadata

import certifi
import pytest
import yaml
from triton_parts import FACTS, write_classifier

from compressor.errors import UserError
from pipelines.cli.commands import deploy
from serving.deployment.answers import write_answers
from serving.deployment.manifests import check_compose, compose, write_compose
from serving.deployment.target import Target
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

    return lambda to, *options: run_deploy(tmp_path / "run", to, *options)


def run_deploy(run, to, *options):
    """compress deploy, which raises its errors."""
    deploy.main([str(run), "--to", str(to), *map(str, options)], standalone_mode=False)


def test_a_service_of_the_models_that_kserves_triton_can_serve(deployed, tmp_path, capsys):
    deployed(BUCKET, "--kserve", tmp_path / "service.yaml")
    service = yaml.safe_load((tmp_path / "service.yaml").read_text())
    assert service["metadata"]["name"] == "model-4-reviews", "a service's name begins with a letter"
    model = service["spec"]["predictor"]["model"]
    assert model["args"] == ["--model-control-mode=explicit", "--strict-readiness=false", "--load-model=4-reviews"]
    assert model["storageUri"] == BUCKET
    assert not {"resources", "env"} & model.keys()
    assert "without 4-reviews-text, for which KServe's Triton has no backend" in capsys.readouterr().out


def test_a_compose_file_has_its_own_folder_beside_it(deployed, tmp_path):
    kept = tmp_path / "here" / "backends" / "onnxruntime" / "mine.py"
    kept.parent.mkdir(parents=True)
    kept.write_text("mine")
    deployed(tmp_path / "served", "--compose", tmp_path / "here" / "compose.yaml")
    (triton,) = yaml.safe_load((tmp_path / "here" / "compose.yaml").read_text())["services"].values()
    assert kept.read_text() == "mine"
    sources = [volume["source"] for volume in triton["volumes"]]
    backends = [tmp_path / "here" / source / "model.py" for source in sources[1:]]
    assert sources[0] == str(tmp_path / "served") and all(backend.is_file() for backend in backends)
    assert "--strict-readiness=false --load-model=4-reviews --load-model=4-reviews-text" in triton["command"][0]


def test_a_second_compose_file_keeps_the_folders_that_a_running_container_has_mounted(deployed, tmp_path):
    """A new folder in the place of a mounted one is not seen in the container, which keeps the old one without its files. An
    open handle refers to a folder as a mount does."""
    deployed(tmp_path / "served", "--compose", tmp_path / "compose.yaml")
    for folder in sorted((tmp_path / "compress-backends").iterdir()):
        written = {path.name: path.read_bytes() for path in folder.iterdir()}
        (folder / "model.py").write_text("of an earlier version")
        (folder / "stale.py").touch()
        (folder / "__pycache__").mkdir()
        mounted = os.open(folder, os.O_RDONLY)
        try:
            deployed(tmp_path / "served", "--compose", tmp_path / "compose.yaml")
            assert sorted(os.listdir(mounted)) == sorted(written)
        finally:
            os.close(mounted)
        assert written == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_model_for_a_gpu_is_given_one(tmp_path, tokenizer_folder):
    options = {"facts": replace(FACTS, precision="bf16"), "tokenizer_folder": tokenizer_folder}
    write_repository(tmp_path / "run", "reviews", write_classifier(tmp_path / "m.onnx"), **options)
    write_answers(tmp_path / "run" / "reviews" / "1", [])
    run_deploy(tmp_path / "run", BUCKET, "--kserve", tmp_path / "service.yaml")
    model = yaml.safe_load((tmp_path / "service.yaml").read_text())["spec"]["predictor"]["model"]
    assert model["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
    assert {"name": "NVIDIA_TF32_OVERRIDE", "value": "0"} in model["env"]
    run_deploy(tmp_path / "run", tmp_path / "served", "--compose", tmp_path / "compose.yaml")
    (triton,) = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"].values()
    assert triton["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    ]
    assert "'onnxruntime-gpu[cuda,cudnn]" in triton["command"][0] and " onnxruntime=" not in triton["command"][0]


def test_a_service_asks_for_no_gpu_of_models_that_it_does_not_serve(deployed, tmp_path, tokenizer_folder):
    """On a cluster without one its pod would wait for ever."""
    to, folder = "memory://texts-on-a-gpu/models", tmp_path / "texts"
    options = {"facts": replace(FACTS, precision="bf16"), "tokenizer_folder": tokenizer_folder, "interfaces": ("text",)}
    write_repository(folder, "topics", write_classifier(tmp_path / "topics.onnx"), **options)
    for version in folder.glob("*/1"):
        write_answers(version, [])
    run_deploy(folder, to)
    deployed(to, "--kserve", tmp_path / "service.yaml")
    model = yaml.safe_load((tmp_path / "service.yaml").read_text())["spec"]["predictor"]["model"]
    assert "--load-model=4-reviews" in model["args"] and not {"resources", "env"} & model.keys()


@pytest.fixture
def other(tmp_path, tokenizer_folder):
    """Writes a second run, whose models are called topics."""

    def write(**facts):
        options = {"tokenizer_folder": tokenizer_folder, "interfaces": ("tokens", "text")}
        model = write_classifier(tmp_path / "topics.onnx")
        write_repository(tmp_path / "other", "topics", model, facts=replace(FACTS, **facts), **options)
        for version in (tmp_path / "other").glob("*/1"):
            write_answers(version, [])
        return tmp_path / "other"

    return write


def arguments_of(path):
    """What the Triton of a compose file is started with, and whether with a GPU."""
    (triton,) = yaml.safe_load(path.read_text())["services"].values()
    return triton["command"][0].split("--strict-readiness=false ")[1].split(), "deploy" in triton


def test_a_compose_file_starts_all_models_of_the_repository(deployed, other, tmp_path):
    """Also those of other runs, whose clients would have nothing more. What killed deployments left may be gone tomorrow."""
    to, options = tmp_path / "served", ("--compose", tmp_path / "compose.yaml")
    deployed(to, *options)
    run_deploy(other(precision="bf16"), to, *options)
    every = [f"--load-model={name}" for name in ("4-reviews", "4-reviews-text", "topics", "topics-text")]
    assert arguments_of(tmp_path / "compose.yaml") == (every, True)
    for name, record in (("new", {"finished": False}), ("old-candidate", {"finished": False, "candidate": True})):
        shutil.copytree(to / "topics", to / name)
        (to / name / "1" / "published.json").write_text(json.dumps(record))
    (to / "empty").mkdir()
    deployed(to, *options)
    assert arguments_of(tmp_path / "compose.yaml") == (every, True)
    for name in ("topics", "topics-text"):
        (to / name / "1" / "published.json").write_text(json.dumps({"finished": False}))
    run_deploy(tmp_path / "other", to, "--rollback", *options)
    assert arguments_of(tmp_path / "compose.yaml") == (every[:2], False), "the killed deployment is taken back"


def test_no_file_is_written_for_a_repository_without_a_model(deployed, tmp_path, capfd):
    to = tmp_path / "served"
    deployed(to)
    for path in to.glob("*/1/published.json"):
        path.write_text(json.dumps({"finished": False}))
    deployed(to, "--rollback", "--compose", tmp_path / "compose.yaml")
    assert not (tmp_path / "compose.yaml").exists()
    assert f"not written: {tmp_path / 'compose.yaml'} (the repository holds no model any more)" in capfd.readouterr().err


def test_a_service_has_the_models_of_other_runs(deployed, other, tmp_path):
    to = "memory://two-runs/models"
    deployed(to)
    run_deploy(other(), to, "--kserve", tmp_path / "service.yaml")
    service = yaml.safe_load((tmp_path / "service.yaml").read_text())
    loaded = service["spec"]["predictor"]["model"]["args"][2:]
    assert loaded == ["--load-model=4-reviews", "--load-model=topics"]
    assert service["metadata"]["name"] == "model-4-reviews", "one service, whichever run is deployed last"


def test_a_service_of_what_another_run_has_in_half_precision_is_refused(deployed, other, tmp_path):
    to = "memory://half/models"
    run_deploy(other(precision="fp16"), to)
    with pytest.raises(UserError, match=r"E757 .*half/models/topics/1: .*cannot compute 'topics' in fp16"):
        deployed(to, "--kserve", tmp_path / "service.yaml")
    assert Target.at(to).models() == ["topics", "topics-text"], "before anything is deployed"


@pytest.mark.parametrize("kind", ["kserve", "compose"])
@pytest.mark.parametrize(
    ("place", "content", "told"),
    [
        ("config.pbtxt", "of_a_later_triton: 1", "E724 .*not a model config.* Correct it, or move that model out"),
        ("1/published.json", "{", "E757 .*the record of a version is damaged"),
    ],
)
def test_what_is_damaged_of_another_model_is_told_before_anything_is_deployed(deployed, tmp_path, kind, place, content, told):
    """The file starts that model, too."""
    url, folder = f"memory://damaged-{kind}-{place[0]}/models", tmp_path / "served"
    to = url if kind == "kserve" else folder
    files, root = (target := Target.at(str(to))).files, target.root
    files.makedirs(f"{root}/other/1")
    files.pipe({f"{root}/other/config.pbtxt": b"", f"{root}/other/{place}": content.encode()})
    for rollback in ([], ["--rollback"]):
        with pytest.raises(UserError, match=told):
            deployed(to, f"--{kind}", tmp_path / "file.yaml", *rollback)
    assert target.models() == ["other"] and not (tmp_path / "file.yaml").exists()


def test_what_kserves_own_runtime_cannot_compute_is_refused(tmp_path, tokenizer_folder):
    """It opens such a file and fails at every request; a container of compose installs a runtime that does not."""
    facts = replace(FACTS, precision="fp16", runtime="onnxruntime")
    model, folder = write_classifier(tmp_path / "m.onnx"), tmp_path / "run"
    write_repository(folder, "reviews", model, facts=facts, tokenizer_folder=tokenizer_folder)
    write_answers(folder / "reviews" / "1", [])
    with pytest.raises(UserError, match=r"E757 .*cannot compute 'reviews' in fp16"):
        run_deploy(folder, BUCKET, "--kserve", tmp_path / "service.yaml")
    assert not (tmp_path / "service.yaml").exists()
    run_deploy(folder, tmp_path / "served", "--compose", tmp_path / "compose.yaml")


def test_a_container_gets_the_versions_of_this_machine_and_a_folder_of_any_name(deployed, tmp_path):
    deployed(tmp_path / "a $HOME b", "--compose", tmp_path / "compose.yaml")
    (triton,) = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"].values()
    assert f"tokenizers=={metadata.version('tokenizers')} " in triton["command"][0]
    assert triton["volumes"][0]["source"] == str(tmp_path / "a $$HOME b")
    (triton,) = compose("/models", ["a $HOME; b"])["services"].values()
    assert triton["command"][0].endswith(" '--load-model=a $$HOME; b'"), "another program's model may have any name"
    assert triton["environment"] == {"PIP_BREAK_SYSTEM_PACKAGES": "1"}


def test_a_model_that_the_container_would_not_find_is_refused(deployed, tmp_path):
    """Its folder may be a link, but what is mounted is the repository alone."""
    to, elsewhere, options = tmp_path / "served", tmp_path / "elsewhere", ("--compose", tmp_path / "compose.yaml")
    for name in (to, elsewhere, to / ".within"):
        name.mkdir()
    model = to / "4-reviews"
    for target in (elsewhere, "../elsewhere", to / ".within"):
        model.symlink_to(target)
        with pytest.raises(UserError, match=r"E757 .*served/4-reviews: a link to .*, which a container"):
            deployed(to, *options)
        model.unlink()
    model.symlink_to(elsewhere)
    deployed(to)
    assert not (tmp_path / "compose.yaml").exists()
    with pytest.raises(UserError, match=r"E757 .*a link to"):
        write_compose(tmp_path / "compose.yaml", str(to), ["4-reviews"])


@pytest.mark.parametrize(
    ("place", "leads_to", "found"),
    [
        ("m", ".within", True),
        ("m", ".within/../.within", True),
        ("m/1", "../.within/1", True),
        ("m/1/model.onnx", "../../.within/1/model.onnx", True),
        ("m", "../served/.within", False),
        ("m", ".linked/1", False),
        ("m/1", "{elsewhere}", False),
        ("m/1", "../../served/.within/1", False),
        ("m/1", "../.linked", False),
        ("m/1", "1", False),
        ("m/1/model.onnx", "../../../elsewhere/model.onnx", False),
        ("m/labels.txt", "{elsewhere}/labels.txt", False),
        ("m/1/tokenizer/labels.txt", "../../../.within/1/labels.txt", True),
        ("m/1/tokenizer/labels.txt", "{elsewhere}/labels.txt", False),
        ("m/1/tokenizer/again", "../../../m", True),
    ],
)
def test_links_in_a_model_are_followed_in_the_repository_alone(tmp_path, place, leads_to, found):
    """It is mounted elsewhere: not where an absolute path says, nor below a folder of its own name."""
    to, elsewhere = tmp_path / "served", tmp_path / "elsewhere"
    for folder in (to / ".within" / "1", elsewhere):
        folder.mkdir(parents=True)
        for name in ("model.onnx", "labels.txt"):
            (folder / name).touch()
    (to / ".linked").symlink_to(elsewhere)
    (to / place).parent.mkdir(parents=True, exist_ok=True)
    (to / place).symlink_to(leads_to.format(elsewhere=elsewhere))
    refused = pytest.raises(UserError, match=rf"E757 .*/served/{place}: a link to .*, which a container")
    with contextlib.nullcontext() if found else refused:
        check_compose(tmp_path / "compose.yaml", str(to), ["m"])


@pytest.mark.parametrize(("kind", "of_url"), [("kserve", False), ("compose", True)])
def test_what_cannot_be_written_is_told_before_anything_is_deployed(deployed, tmp_path, kind, of_url):
    to = "memory://elsewhere/models" if of_url else str(tmp_path / "served")
    with pytest.raises(UserError, match="E757"):
        deployed(to, f"--{kind}", tmp_path / "file.yaml")
    assert not (tmp_path / "file.yaml").exists() and not list((tmp_path / "served").glob("*"))


def test_a_model_without_a_version_is_told_before_anything_is_deployed(deployed, tmp_path):
    (tmp_path / "run/4-reviews/1").rename(tmp_path / "run/4-reviews/01")
    with pytest.raises(UserError, match=r"E727 .*01"):
        deployed("memory://odd/models", "--kserve", tmp_path / "service.yaml")


def test_a_run_of_texts_alone_has_nothing_for_kserve(tmp_path, tokenizer_folder):
    model = write_classifier(tmp_path / "m.onnx")
    options = {"facts": FACTS, "tokenizer_folder": tokenizer_folder, "interfaces": ("text",)}
    write_repository(tmp_path / "run", "reviews", model, **options)
    with pytest.raises(UserError, match=r"E757 .*KServe's own Triton has no backend for reviews-text"):
        run_deploy(tmp_path / "run", BUCKET, "--kserve", tmp_path / "f")


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("folder", "folder: a folder, where a file is to be written"),
        ("file/compose.yaml", "file: a file, where a folder is needed"),
        ("taken/compose.yaml", "compress-backends: a file, where a folder is needed"),
        (f"{'long' * 99}/compose.yaml", "no file can be written here"),
    ],
)
def test_a_place_for_no_file_is_told_before_anything_is_deployed(deployed, tmp_path, path, told):
    (tmp_path / "folder").mkdir()
    (tmp_path / "taken").mkdir()
    for name in ("file", "taken/compress-backends"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=f"E801 .*{told}"):
        deployed(tmp_path / "served", "--compose", tmp_path / path)
    assert not (tmp_path / "served").exists()


def test_a_home_folder_is_one_place(deployed, tmp_path, monkeypatch):
    """--to=~/models, as a shell leaves it: what is mounted is what was written."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    deployed("~/models", "--compose", tmp_path / "compose.yaml")
    (triton,) = yaml.safe_load((tmp_path / "compose.yaml").read_text())["services"].values()
    assert triton["volumes"][0]["source"] == str(tmp_path / "home" / "models")
    assert (tmp_path / "home" / "models" / "4-reviews" / "config.pbtxt").is_file()


@pytest.mark.parametrize("option", ["--status", "--rollback"])
def test_a_repository_that_is_not_there_is_not_created(deployed, tmp_path, option):
    with pytest.raises(UserError, match=r"E757 .*typo: the repository cannot be opened .*there is no such folder"):
        deployed(tmp_path / "typo", option)
    assert not (tmp_path / "typo").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--max-ms", "9"], "--max-ms is not used without --url"),
        (["--token-file", "token"], "--token-file is not used without --url"),
        (["--ca", "ca.pem"], "--ca is not used without --url"),
        (["--status", "--kserve", "file"], "--kserve is not used with --status"),
        (["--status", "--keep", "3"], "--keep is not used with --status"),
        (["--rollback", "--keep", "3"], "--keep is not used with --rollback"),
        (["--rollback", "--url", "127.0.0.1:1", "--max-ms", "9"], "--max-ms is not used with --rollback"),
        (["--rollback", "--status"], "--rollback and --status exclude each other"),
        (["--kserve", "file", "--compose", "file"], "--kserve and --compose name the same file"),
    ],
)
def test_options_that_are_not_read_are_refused(deployed, tmp_path, options, told):
    with pytest.raises(UserError, match=f"E112 .*{told}"):
        deployed(tmp_path / "served", *options)


def test_certificates_for_a_connection_without_tls_are_refused(deployed, tmp_path):
    pem = certifi.where()
    with pytest.raises(UserError, match="E112 --ca is not used without https://"):
        deployed(tmp_path / "served", "--url", "127.0.0.1:1", "--ca", pem)
