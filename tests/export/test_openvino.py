"""OpenVINO's fp32 against PyTorch over many shapes and architectures, and its static int8, calibrated on padded rows."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from compressor.errors import UserError
from compressor.models.anatomy import layers_of
from compressor.processor import processor, weight_bits
from compressor.pruning.surgery import Removal, remove
from compressor.tasks.features import torch_forward
from export.graph.files import save
from export.graph.trace import trace
from export.latency.measure import LatencyVariant, measure
from export.parity.compare import compare
from export.runtimes.openvino import activation_products, export_openvino
from export.runtimes.openvino_attention import join_attention, keep_axes, postpone_guards
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import run, session
from serving.layout.model_config import token_config
from tests.compressor.conftest import TRIED, tiny
from tests.compressor.conftest import encoding as rows_with_ends
from tests.export.conftest import MODELS, encoding

openvino = pytest.importorskip("openvino", reason="the extra openvino is not installed")

ROOT = Path(__file__).parents[2]
SHAPES = [(1, 1), (1, 7), (3, 33), (8, 60), (2, 2)]
ROWS = [encoding(4, length) for length in (5, 9, 17, 40)]


@pytest.fixture(scope="module")
def made(exported, tmp_path_factory):
    """(name, precisions) -> path by precision, made on first use."""
    found = {}

    def make(name, *precisions):
        key = (name, precisions)
        if key not in found:
            folder = tmp_path_factory.mktemp(name)
            asked = precisions or ("fp32", "int8")
            found[key] = RUNTIMES["openvino"].write(exported(name).graph, folder, precisions=asked, rows=ROWS)
        return found[key]

    return make


def assert_equal(model, live):
    forward = torch_forward(model)
    for shape in SHAPES:
        batch = encoding(*shape)
        reference = forward(batch)
        result = compare("export", "fp32", reference, run(live, batch), reference.argmax(axis=1))
        assert result.passed, (shape, result)


@pytest.mark.parametrize(
    "name", ["bert-unequal", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mpnet-dense", "mpnet-unequal"))]
)
def test_fp32_equals_pytorch(name, exported, made):
    live = session(made(name, "fp32")["fp32"])
    assert [(value.name, value.shape) for value in live.get_inputs()] == [
        ("input_ids", [None, None]),
        ("attention_mask", [None, None]),
    ]
    assert [(value.name, value.shape) for value in live.get_outputs()] == [("logits", [None, 3])]
    assert_equal(exported(name).model, live)


def files_in(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name != "bert-unequal"]


@pytest.mark.parametrize("name", ["bert-unequal", *OTHERS])
def test_static_int8_is_close_and_small(name, exported, made):
    batch, paths = encoding(8, 20), made(name)
    reference = torch_forward(exported(name).model)(batch)
    answer = run(session(paths["int8"]), batch)
    # calibrated activations are coarser than those that dynamic int8 scales anew for each batch, and 32 units average little
    difference, scale = np.abs(answer - reference), np.abs(reference).max()
    assert difference.max() < 0.25 * scale and difference.mean() < 0.1 * scale
    assert paths["int8"].with_suffix(".bin").stat().st_size < 0.5 * paths["fp32"].with_suffix(".bin").stat().st_size


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (7, 64)])
def test_without_vnni_weights_of_products_take_half_of_the_range(tmp_path, exported, made, monkeypatch, bits, largest):
    """Else pairs of products overflow 16 bits there: a tiny model's outputs moved 7.8 times as far as by rounding, and were
    refused."""
    if bits == weight_bits():  # as any file of this machine
        paths = made("bert-unequal")
    else:
        monkeypatch.setattr("export.runtimes.openvino.weight_bits", lambda: bits)
        paths = RUNTIMES["openvino"].write(exported("bert-unequal").graph, tmp_path, precisions=["int8"], rows=ROWS)
    model = openvino.Core().read_model(paths["int8"])
    products = [node for node in model.get_ops() if node.get_type_name() == "MatMul"]
    weights = [values for node in products for values in int8_constants_before(node)]
    assert len(weights) > 6 and max(np.abs(values.astype(int)).max() for values in weights) == largest


def int8_constants_before(node):
    """The int8 weights of a product, behind the multiplications and conversions that scale them."""
    found, left = [], [value.get_node() for value in node.input_values()]
    while left:
        one = left.pop()
        if one.get_type_name() == "Constant" and one.get_element_type() == openvino.Type.i8:
            found.append(one.get_data())
        elif one.get_type_name() in ("Convert", "Multiply", "Reshape"):
            left += [value.get_node() for value in one.input_values()]
    return found


def test_without_vnni_products_of_two_activations_stay_fp32(tmp_path, monkeypatch):
    """NNCF halves the range of weights alone; DeBERTa's attention, which is not one operator, is quantized with 8 bits."""
    monkeypatch.setattr("export.runtimes.openvino.weight_bits", lambda: 7)
    path = RUNTIMES["openvino"].write(
        trace(tiny("deberta-v2", torch.float32), encoding(2, 9)), tmp_path, precisions=["int8"], rows=ROWS
    )
    model = openvino.Core().read_model(path["int8"])
    quantized = [
        node.get_friendly_name()
        for node in model.get_ops()
        if node.get_type_name() == "MatMul" and any(is_rounded(value) for value in node.input_values())
    ]
    products = activation_products(model)
    # scores of tokens and of both kinds of distances, and the weighted values
    assert quantized and len(products) == 4 * 3 and not set(quantized) & set(products)


def is_rounded(value):
    """Whether a product's input is a quantized activation, behind what moves its axes."""
    node = value.get_node()
    moved = node.get_type_name() in ("Reshape", "Transpose", "Unsqueeze")
    return node.get_type_name() == "FakeQuantize" or (moved and is_rounded(node.input_value(0)))


def test_a_second_export_is_equal_byte_for_byte_holds_no_paths_and_prints_nothing(tmp_path, exported, made, capfd):
    RUNTIMES["openvino"].write(exported("bert-unequal").graph, tmp_path, precisions=("fp32", "int8"), rows=ROWS)
    assert capfd.readouterr().out == ""
    first, second = files_in(made("bert-unequal")["fp32"].parent), files_in(tmp_path)
    assert first == second
    assert sorted(second) == ["model.bin", "model.xml", "model_int8.bin", "model_int8.xml"]
    assert not any(b"/tmp" in content or b"site-packages" in content for content in second.values())


@pytest.mark.slow
def test_nobody_is_told():
    """Neither by OpenVINO nor by NNCF, whoever imports them first: transformers' exporters do."""
    script = "import sys, export.graph.trace, transformers.exporters.quantizers.quantizer_nncf as q; "
    script += "print(q.nncf.telemetry.telemetry, "
    script += "sys.modules['openvino'] and sys.modules['openvino_telemetry'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "MagicMock" in done.stdout and done.stdout.split()[-1] == "None"


def test_nor_beside_a_plain_folder_called_export(tmp_path, monkeypatch):
    """`python -c` imports it instead of the package, whose `__init__.py` does not run."""
    monkeypatch.delenv("PYTHONPATH", raising=False)  # a source tree that it names is found as ever
    (tmp_path / "export").mkdir()
    script = "import sys, export.runtimes.sessions; print(export.__file__, sys.modules['openvino_telemetry'])"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["None", "None"]


def attentions(path) -> int:
    """Number of attention operators in a file."""
    return sum(node.get_type_name() == "ScaledDotProductAttention" for node in openvino.Core().read_model(path).get_ops())


@pytest.mark.parametrize("name", ["bert-unequal", "mpnet-dense"])
def test_attention_is_one_operator_per_block(name, exported, made):
    """In both precisions: int8 that quantizes the products inside apart takes twice as long."""
    blocks = len(layers_of(exported(name).model))
    assert [attentions(made(name)[precision]) for precision in ("fp32", "int8")] == [blocks, blocks]


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "deberta-v2" else pytest.mark.slow) for name in TRIED])
def test_attention_is_joined_where_an_architecture_has_it_in_this_form(name, tmp_path):
    """In all but DeBERTa, which replaces masked scores instead of adding to them. Rows that are masked wholly, too: the guard
    against them is behind the projection, except in GPT-2, whose products have two axes, and where a bias makes it needless."""
    model = tiny(name, torch.float32)
    batch = {key: values.numpy() for key, values in rows_with_ends(3, 9).items()}
    if not name.startswith("t5"):  # it reads the end of a row
        batch["attention_mask"][1, 4:] = batch["attention_mask"][2] = 0
    save(trace(model, batch), tmp_path / "model.onnx")
    graph = openvino.Core().read_model(tmp_path / "model.onnx")
    assert keep_axes(graph) >= 0
    heads = sum(structure in ("heads", "cross_heads") for layer in layers_of(model) for structure in layer.structures)
    assert join_attention(graph) == (0 if name == "deberta-v2" else heads)
    assert postpone_guards(graph) == (0 if name in ("deberta-v2", "gpt2", "mpnet", "t5", "t5-gated") else heads)
    openvino.save_model(graph, tmp_path / "model.xml", compress_to_fp16=False)
    assert RUNTIMES["openvino"].attentions_apart(tmp_path / "model.xml") == (heads if name == "deberta-v2" else 0)
    compiled = openvino.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert np.abs(compiled(batch)["logits"] - torch_forward(model)(batch)).max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TRIED if not name.startswith("t5")])
def test_every_architecture_dense_and_pruned(name, tmp_path):
    """T5 is missing where the ONNX route is: its classifier has no graph with one pair of inputs."""
    for number, removals in enumerate(({}, {0: Removal([0], [0, 5, 7])})):
        model = tiny(name, torch.float32)
        if removals:
            remove(model, removals)
        graph = trace(model, encoding(2, 9))
        paths = export_openvino(graph, tmp_path / str(number), precisions=("fp32", "int8"), rows=ROWS)
        assert_equal(model, session(paths["fp32"]))
        assert np.isfinite(run(session(paths["int8"]), encoding(3, 12))).all()


HAS_BF16 = RUNTIMES["openvino"].computes("bf16")


@pytest.mark.skipif(not HAS_BF16, reason="this CPU has no bf16")
def test_bf16_is_close_half_as_large_and_says_what_it_is(exported, made):
    """Computed in bf16 wherever the file is opened, whatever it is called: on Triton, too."""
    batch, paths = encoding(8, 20), made("bert-unequal", "fp32", "bf16")
    reference = torch_forward(exported("bert-unequal").model)(batch)
    live = session(paths["bf16"])
    assert live.compiled.get_property("INFERENCE_PRECISION_HINT") == openvino.Type.bf16
    result = compare("export", "bf16", reference, run(live, batch), reference.argmax(axis=1))
    assert result.passed and result.max_difference > 1e-4, "it is really computed in bf16"
    sizes = {precision: path.with_suffix(".bin").stat().st_size for precision, path in paths.items()}
    assert sizes["bf16"] < 0.6 * sizes["fp32"]
    moved = paths["bf16"].with_name("renamed.xml")
    for suffix in (".xml", ".bin"):
        moved.with_suffix(suffix).write_bytes(paths["bf16"].with_suffix(suffix).read_bytes())
    assert np.array_equal(run(session(moved), batch), run(live, batch))
    configs = [token_config("tiny", path, RUNTIMES["openvino"]) for path in (paths["fp32"], moved)]
    hints = [config.parameters["HINT_BF16"].string_value for config in configs]
    assert hints == ["", "YES"]


@pytest.mark.slow
@pytest.mark.skipif("amx_bf16" not in processor()["instructions"], reason="this CPU has no AMX")
def test_bf16_around_int8_is_still_wrong(tmp_path):
    """When this fails, OpenVINO computes rows as long as a head is wide (32) rightly: offer int8 with bf16 around it."""
    model = tiny("bert", torch.float32, hidden_size=64, num_attention_heads=2, max_position_embeddings=64)
    path = export_openvino(trace(model, encoding(2, 9)), tmp_path, precisions=["int8"], rows=ROWS)["int8"]
    options = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "2"}
    plain, around = (
        openvino.Core().compile_model(path, "CPU", options | {"INFERENCE_PRECISION_HINT": hint}) for hint in ("f32", "bf16")
    )
    moved = {}
    for length in (24, 32, 40):
        batch = encoding(2, length)
        moved[length] = np.abs(around(batch)["logits"] - plain(batch)["logits"]).max()
    assert moved[32] > 5 * max(moved[24], moved[40]), moved


def test_bf16_is_refused_where_the_cpu_has_none(made, monkeypatch):
    """Before anything is trained, and where a file from another machine is opened."""
    without = {"cpu": "x", "instructions": ["avx2", "avx512_vnni"], "cores": 2}
    monkeypatch.setattr("export.runtimes.runtime.processor", lambda: without)
    with pytest.raises(UserError, match="E904 OpenVINO computes in bf16 by amx_bf16 or avx512_bf16, which this CPU lacks"):
        RUNTIMES["openvino"].require_instructions("bf16")
    RUNTIMES["openvino"].require_instructions("int8")


def test_the_fault_is_named(tmp_path, exported, made, monkeypatch):
    (tmp_path / "broken.xml").write_text("<net>")
    with pytest.raises(UserError, match=r"E602 .*broken.xml: not a readable OpenVINO model"):
        session(tmp_path / "broken.xml")
    with pytest.raises(UserError, match=r"E602 .*no such model file"):
        session(tmp_path / "missing.xml")
    with pytest.raises(UserError, match="E904 cuda was requested"):
        session(made("bert-unequal")["fp32"], device="cuda")
    with pytest.raises(UserError, match="E605"):
        export_openvino(exported("bert-unequal").graph, tmp_path, precisions=["int8"])
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(UserError, match=r"E901 .*the package nncf. Run: pip install 'compress-pipeline\[openvino\]'"):
        export_openvino(exported("bert-unequal").graph, tmp_path, precisions=["fp32"])


def test_it_computes_in_fp32_with_the_threads_it_is_given(made):
    """Where the CPU has bf16, OpenVINO's default would be that."""
    for threads in (1, 2):
        live = session(made("bert-unequal")["int8"], threads=threads)
        assert live.compiled.get_property("INFERENCE_PRECISION_HINT") == openvino.Type.f32
        assert live.compiled.get_property("INFERENCE_NUM_THREADS") == threads
        assert live.compiled.get_property("EXECUTION_DEVICES") == ["CPU"]


def test_answers_survive_the_next_run(made):
    live = session(made("bert-unequal")["fp32"])
    first = run(live, encoding(2, 9))
    kept = first.copy()
    run(live, encoding(2, 11))
    assert np.array_equal(first, kept)


def test_a_run_that_fails_does_not_spoil_the_next(made):
    """OpenVINO's own request would go on to fail."""
    live, batch = session(made("bert-unequal")["fp32"]), encoding(2, 9)
    answer = run(live, batch)
    with pytest.raises(RuntimeError):
        run(live, {**batch, "attention_mask": batch["attention_mask"][:, :4]})
    assert np.array_equal(run(live, batch), answer)


def test_a_worker_times_it(made):
    variants = [LatencyVariant("openvino", "openvino", made("bert-unequal")["int8"], vocabulary=99)]
    results = measure(variants, [(1, 8), (2, 12)], 3, threads=1)
    assert [(row.batch, row.length, len(row.samples_ms)) for row in results] == [(1, 8, 3), (2, 12, 3)]
