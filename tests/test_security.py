"""SECURITY.md: every test it names exists, and what it guarantees for the whole project rather than for one part."""

import ast
import json
import pickle
import re
import socket
from fnmatch import fnmatch
from pathlib import Path

import pytest
from click.testing import CliRunner

from compressor.models.reference import find_folder
from pipelines.cli.commands import main
from tests.bait import Bait
from tests.conftest import REACHED
from tests.tiny import write_pipeline

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [path for floor in ("compressor", "export", "serving", "pipelines") for path in sorted((ROOT / floor).rglob("*.py"))]


# --- the document ---


def promises() -> list[str]:
    """The rows of the tables of guarantees."""
    text = re.sub(r"<!--.*?-->", "", (ROOT / "SECURITY.md").read_text(encoding="utf-8"), flags=re.S)
    return [line for line in text.splitlines() if line.startswith("|") and not re.match(r"\| guarantee|\|---", line)]


def test_every_promise_names_tests_that_exist():
    assert len(promises()) > 10
    for row in promises():
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row)
        assert named, f"no test: {row}"
        for path, name in named:
            assert (ROOT / path).is_file(), f"{path} is gone: {row}"
            nodes = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
            functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
            assert name in functions and name.startswith("test_"), f"{path} has no {name}: {row}"


# --- no code of a stranger ---

MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
CALLS = {"eval", "exec", "compile", "__import__", "torch.load", "pickle.loads", "os.system", "os.popen", "runpy.run_path"}
LAST = {name.rpartition(".")[2] for name in CALLS}
LOADERS = {
    f"yaml.{name}" for name in ("unsafe_load", "full_load", "Loader", "UnsafeLoader", "FullLoader", "CLoader", "CFullLoader")
}
KEYWORDS = {"shell": False, "trust_remote_code": False, "allow_pickle": False, "weights_only": True}
"""What these arguments must be wherever they are given."""


def doors(source: str) -> list[str]:
    """What of a module's source can run code that lies in a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.Attribute):
            found += [ast.unparse(node)] if f"yaml.{node.attr}" in LOADERS and ast.unparse(node) in LOADERS else []
        elif isinstance(node, ast.Call):
            last = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            found += [ast.unparse(node.func)] if last in LAST and ast.unparse(node.func) in CALLS else []
            given = {word.arg: word.value for word in node.keywords if word.arg in KEYWORDS}
            found += [
                f"{name}={ast.unparse(value)}"
                for name, value in given.items()
                if not (isinstance(value, ast.Constant) and value.value is KEYWORDS[name])
            ]
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import pickle", ["pickle"]),
        ("from joblib import load", ["joblib"]),
        ("model = torch.load(path)", ["torch.load"]),
        ("AutoConfig.from_pretrained(x, trust_remote_code=ask)", ["trust_remote_code=ask"]),
        ("subprocess.run(line, shell=True)", ["shell=True"]),
        ("yaml.load(text, Loader=yaml.UnsafeLoader)", ["yaml.UnsafeLoader"]),
        ("yaml.load(text, Loader=yaml.CSafeLoader)", []),
        ("AutoConfig.from_pretrained(x, trust_remote_code=False)\nmodel.eval()\nre.compile('x')", []),
    ],
)
def test_what_counts_as_a_door(source, found):
    assert doors(source) == found


def test_no_source_opens_a_door():
    found = {str(path.relative_to(ROOT)): doors(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {path: what for path, what in found.items() if what} == {}


def test_the_bait_works(tmp_path):
    pickle.loads(pickle.dumps(Bait(tmp_path / "ran"))).close()
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("command", ["check", "run", "export"])
def test_pickled_weights_are_never_opened(tmp_path, command, name):
    """Where they are, and under the name of a safetensors file."""
    pipeline = write_pipeline(tmp_path / "project", rows=8)
    model = tmp_path / "project" / "model"
    (model / "model.safetensors").unlink()
    (model / name).write_bytes(pickle.dumps({"bert.pooler.dense.bias": Bait(tmp_path / "ran")}))
    what = [str(model)] if command == "export" else [str(pipeline)]
    out = [] if command == "check" else ["--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, [command, *what, *out], input="y\n" * 9)
    assert not (tmp_path / "ran").exists()
    assert done.exit_code == 2 or name == "model.safetensors", done.output


def test_the_hub_gives_no_code(tmp_path, monkeypatch):
    """What is asked of the hub's client, which is not spoken to here."""
    asked = {}
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **options: asked.update(options) or str(tmp_path))
    find_folder("someone/something")

    def fetched(name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in asked["allow_patterns"])

    assert fetched("config.json") and fetched("model-00001-of-00002.safetensors") and fetched("tokenizer.json")
    refused = ("modeling_evil.py", "pytorch_model.bin", "model.pt", "optimizer.pkl", "evil.so", "run.sh")
    assert not [name for name in refused if fetched(name)]


# --- names stay in their folder ---


@pytest.mark.parametrize("place", ["../secret", "{folder}/secret", "link"])
def test_an_onnx_file_reads_no_weights_outside_its_folder(tmp_path, place):
    """A path upwards, an absolute one, and a link, to weights that fit."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    from compressor.errors import UserError
    from export.runtimes.sessions import session

    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 32]) for name in ("x", "y")]
    weight = numpy_helper.from_array(np.ones((32, 32), np.float32), "w")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", values[:1], values[1:], [weight])
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    path = tmp_path / "model" / "model.onnx"
    path.parent.mkdir()
    onnx.save(proto, path, save_as_external_data=True, location="data")
    session(path)
    (path.parent / "data").rename(tmp_path / "secret")
    (path.parent / "link").symlink_to(tmp_path / "secret")
    proto = onnx.load(path, load_external_data=False)
    (location,) = [entry for entry in proto.graph.initializer[0].external_data if entry.key == "location"]
    location.value = place.format(folder=tmp_path)
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(UserError, match=r"E602 .*not a readable ONNX file"):
        session(path)


@pytest.mark.parametrize("name", ["../../../secret", "{folder}/secret"])
def test_a_manifest_names_no_file_outside_its_folder(tmp_path, monkeypatch, name):
    """A file of the right content at a place that is not the artifact's own."""
    from compressor.digests import sha256_of
    from compressor.errors import UserError
    from pipelines.engine.runner import run_pipeline
    from pipelines.file.config import load_pipeline
    from tests.pipelines import toys

    toys.install(monkeypatch)
    project, out = load_pipeline(toys.write_project(tmp_path / "project")), tmp_path / "runs"
    folder = run_pipeline(project, out).artifacts["tune"].folder
    manifest = json.loads((folder / "artifact.json").read_text())
    file = next(iter(manifest["files"]))
    (folder / file).rename(tmp_path / "secret")
    assert manifest["files"].pop(file)["sha256"] == sha256_of(tmp_path / "secret")
    place = name.format(folder=tmp_path)
    assert (folder / place).samefile(tmp_path / "secret")
    manifest["files"][place] = {"sha256": sha256_of(tmp_path / "secret"), "size": (tmp_path / "secret").stat().st_size}
    (folder / "artifact.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="E803"):
        run_pipeline(project, out)


# --- the network ---

SPEAKERS = {
    *("socket", "http", "urllib", "requests", "httpx", "aiohttp", "ftplib", "smtplib"),
    *("huggingface_hub", "datasets", "tritonclient"),
}


def speaks(source: str) -> bool:
    """Whether a module imports what talks to other machines."""
    tree = ast.parse(source)
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "needed"]
    names = [call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)]
    names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    # the words of Triton's model configs are a file format
    return any(name.partition(".")[0] in SPEAKERS for name in names if name != "tritonclient.grpc.model_config_pb2")


def test_the_hub_triton_and_ray_are_all_that_is_spoken_to():
    found = {str(path.relative_to(ROOT)) for path in SOURCES if speaks(path.read_text(encoding="utf-8"))}
    assert {name for name in found if not name.startswith("serving/")} == {
        "compressor/models/reference.py",
        "compressor/tasks/sources/hub_card.py",
        "compressor/tasks/sources/hub_rows.py",
        "compressor/tasks/sources/hub_set.py",
        "pipelines/sweeps/ray_engine.py",
    }


def test_a_test_that_reaches_another_machine_fails():
    """The guard that lies around every test: the address is one that is kept for documents."""
    for call in (lambda: socket.create_connection(("192.0.2.1", 80)), lambda: socket.socket().connect(("192.0.2.1", 80))):
        with pytest.raises(ConnectionRefusedError, match="no other machine"):
            call()
    assert REACHED == ["192.0.2.1"] * 2
    REACHED.clear()
