"""What `write_repository` puts on disk, and what it refuses."""

from dataclasses import replace

import onnx
import pytest
from triton_parts import FACTS, KNOBS, LABELS
from tritonclient.grpc.model_config_pb2 import ModelInstanceGroup

from compressor.errors import UserError
from export.runtimes.runtime_registry import RUNTIMES
from serving.layout.knobs import TOKENS_ON_A_GPU, Knobs
from serving.layout.model_config import text_config
from serving.layout.version_file import read_version
from serving.repository import model_names, models_of, read_config, tokenizer_sha256, version_folders, write_repository

BOTH = ("tokens", "text")


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_repository_is_deterministic_and_knows_no_machine(tmp_path, classifier, tokenizer_folder):
    for name in ("first", "second"):
        write_repository(
            tmp_path / name, "m", classifier, facts=FACTS, tokenizer_folder=tokenizer_folder, interfaces=BOTH, knobs=KNOBS
        )
    first = contents(tmp_path / "first")
    assert first == contents(tmp_path / "second")
    version = ["model.onnx", "serving.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
    tokens = [f"{size}_{name}" for size in ("short", "long") for name in ("input_ids", "attention_mask")]
    for model, samples in (("m", tokens), ("m-text", ["short_TEXT", "long_TEXT"])):
        expected = [*(f"1/{file}" for file in version), "config.pbtxt", "labels.txt", *(f"warmup/{file}" for file in samples)]
        assert {path for path in first if path.startswith(f"{model}/")} == {f"{model}/{path}" for path in expected}
        assert first[f"{model}/1/model.onnx"] == classifier.read_bytes()
        assert b"/" not in first[f"{model}/config.pbtxt"] + first[f"{model}/1/serving.json"]


def test_labels_limits_and_tokenizer_belong_to_the_version(repository, tokenizer_folder):
    for model in ("reviews", "reviews-text"):
        facts = read_version(repository / model / "1")
        assert facts == replace(FACTS, runtime="onnxruntime", tokenizer_sha256=tokenizer_sha256(tokenizer_folder))
        assert "labels" not in read_config(repository / model).parameters
    assert facts.labels == LABELS


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "FileNotFoundError"),
        ("{", "JSONDecodeError"),
        ("[]", "KeyError"),
        ('{"labels": ["a"]}', "KeyError: 'max_length'"),
        ('{"labels": "ab"}', "labels is not a list of texts"),
    ],
)
def test_damaged_facts_of_a_version_are_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "serving.json").write_text(content)
    with pytest.raises(UserError, match=f"E728 .*serving.json: not the facts of a version .*{words}"):
        read_version(tmp_path)


@pytest.mark.parametrize("name", ["01", "0", "v2", "latest"])
def test_a_folder_that_triton_would_leave_out_is_refused(tmp_path, name):
    (tmp_path / "m" / "2").mkdir(parents=True)
    (tmp_path / "m" / "10").mkdir()
    (tmp_path / "m" / "warmup").mkdir()
    (tmp_path / "m" / "initial_state").mkdir()
    (tmp_path / "m" / ".unfinished").mkdir()
    assert [folder.name for folder in version_folders(tmp_path / "m")] == ["2", "10"]
    (tmp_path / "m" / name).mkdir()
    with pytest.raises(UserError, match=f"E727 .*'{name}' is not the name of a version: Triton would leave it out"):
        version_folders(tmp_path / "m")


def test_a_model_without_a_version_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"E727 .*the model has no version folder"):
        version_folders(tmp_path)


def test_the_config_says_what_the_model_is(tmp_path, classifier, tokenizer_folder):
    options = {"facts": replace(FACTS, precision="int8"), "tokenizer_folder": tokenizer_folder, "interfaces": BOTH}
    knobs = Knobs(
        instances=2, threads=3, streams=3, max_queue_delay_us=70, max_queue_size=9, timeout_ms=1.5, max_batch_tokens=600
    )
    config = read_config(write_repository(tmp_path, "m", classifier, knobs=knobs, **options))
    text = read_config(tmp_path / "m-text")
    assert (config.name, config.backend, config.max_batch_size) == ("m", "onnxruntime", 32)
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input] == [("input_ids", [-1]), ("attention_mask", [-1])]
    assert [(tensor.name, list(tensor.dims), tensor.label_filename) for tensor in config.output] == [
        ("logits", [3], "labels.txt")
    ]
    assert not config.HasField("dynamic_batching"), "rows of different lengths cannot share a batch"
    assert (text.name, text.backend, text.max_batch_size) == ("m-text", "compress_text", 32)
    outputs = [(tensor.name, list(tensor.dims)) for tensor in text.output]
    assert outputs == [("LABEL", [1]), ("SCORE", [1]), ("SCORES", [3]), ("LABELS", [3])]
    batching, policy = text.dynamic_batching, text.dynamic_batching.default_queue_policy
    assert (batching.max_queue_delay_microseconds, policy.max_queue_size, policy.default_timeout_microseconds) == (70, 9, 1500)
    assert text.parameters["max_batch_tokens"].string_value == "600"
    assert text.parameters["streams"].string_value == "3" and "streams" not in config.parameters
    for each in (config, text):
        # a server with a GPU must not place int8 there
        assert [(group.count, group.kind) for group in each.instance_group] == [(2, 2)]
        assert each.parameters["intra_op_thread_count"].string_value == "3"
        assert [sample.name for sample in each.model_warmup] == ["short", "long"]


@pytest.mark.parametrize(
    ("runtime", "precision", "kind"),
    [
        ("onnxruntime", "fp32", "AUTO"),
        ("onnxruntime", "int8", "CPU"),
        ("onnxruntime", "fp16", "GPU"),
        ("onnxruntime", "bf16", "GPU"),
        ("openvino", "bf16", "CPU"),
    ],
)
def test_a_file_for_one_device_is_placed_there(runtime, precision, kind):
    config = text_config("m-text", RUNTIMES[runtime], replace(FACTS, precision=precision), Knobs())
    assert ModelInstanceGroup.Kind.Name(config.instance_group[0].kind) == f"KIND_{kind}"


@pytest.mark.parametrize(("device", "kind", "tokens"), [("cpu", "CPU", "128"), ("cuda", "GPU", str(TOKENS_ON_A_GPU))])
def test_a_model_is_placed_where_it_was_proven(device, kind, tokens):
    config = text_config("m-text", RUNTIMES["onnxruntime"], FACTS, Knobs(device=device))
    assert ModelInstanceGroup.Kind.Name(config.instance_group[0].kind) == f"KIND_{kind}"
    assert config.parameters["max_batch_tokens"].string_value == tokens
    assert config.parameters["streams"].string_value == ("0" if device == "cpu" else "1")
    with pytest.raises(UserError, match="E744 streams is 2, and a GPU computes one sub-batch at a time"):
        text_config("m-text", RUNTIMES["onnxruntime"], FACTS, Knobs(device="cuda", streams=2))


@pytest.mark.parametrize(("runtime", "tokens", "streams"), [("onnxruntime", "128", "0"), ("openvino", "1024", "1")])
def test_the_runtime_says_how_texts_are_computed(runtime, tokens, streams):
    config = text_config("m-text", RUNTIMES[runtime], FACTS, Knobs())
    assert (config.parameters["max_batch_tokens"].string_value, config.parameters["streams"].string_value) == (tokens, streams)
    assert config.instance_group[0].count == (2 if runtime == "onnxruntime" else 1)


def test_more_sub_batches_at_a_time_than_the_runtime_computes_are_refused():
    with pytest.raises(UserError, match=r"E744 .*streams is 2, and OpenVINO computes one sub-batch at a time"):
        text_config("m-text", RUNTIMES["openvino"], FACTS, Knobs(streams=2))
    assert text_config("m-text", RUNTIMES["openvino"], FACTS, Knobs(streams=1)).parameters["streams"].string_value == "1"


@pytest.mark.parametrize(
    ("changes", "inputs", "outputs"),
    [
        ({"task": "regression", "labels": ("stars",), "pair": True}, ["TEXT", "PAIR"], ["VALUE"]),
        ({"task": "tokens"}, ["TEXT"], ["ENTITIES"]),
    ],
)
def test_every_kind_of_task_has_its_own_outputs(classifier, tokenizer_folder, changes, inputs, outputs):
    facts = replace(FACTS, **changes)
    options = {"facts": facts, "tokenizer_folder": tokenizer_folder, "interfaces": ["text"]}
    ((name, model),) = models_of("m", classifier, runtime=RUNTIMES["onnxruntime"], **options).items()
    assert name == "m-text" and [tensor.name for tensor in model.config.input] == inputs
    assert [tensor.name for tensor in model.config.output] == outputs
    assert model.config.parameters["label"].string_value == ("stars" if facts.pair else "")


def test_without_batching_the_batch_axis_stays(repository):
    config = read_config(repository / "bare")
    assert list(config.input[0].dims) == [-1, -1] and list(config.output[0].dims) == [-1, 3]
    assert not config.HasField("dynamic_batching")
    assert model_names(repository) == ["bare", "reviews", "reviews-text"]


def fixed_batch(path, classifier):
    model = onnx.load(classifier)
    for tensor in (*model.graph.input, *model.graph.output):
        tensor.type.tensor_type.shape.dim[0].dim_value = 4
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("code", "words", "name", "options"),
    [
        ("E720", "'a/b' is not a model name", "a/b", {}),
        ("E720", "'modèle' is not a model name", "modèle", {}),
        ("E720", "'m-text' ends as the names of models that take texts do", "m-text", {}),
        ("E720", "already holds a model 'taken'", "taken", {}),
        ("E721", "not a readable ONNX file", "m", {"onnx": "junk.onnx"}),
        ("E721", "not a readable ONNX file", "m", {"onnx": "missing.onnx"}),
        ("E721", "'input_ids' has no batch axis", "m", {"onnx": "fixed.onnx"}),
        ("E722", "2 labels for a model of 3 classes", "m", {"facts": replace(FACTS, labels=("no", "yes"))}),
        ("E722", r"'a\\nb' is not a label", "m", {"facts": replace(FACTS, labels=("a\nb", "c", "d"))}),
        ("E722", "the labels repeat: a, b, a", "m", {"facts": replace(FACTS, labels=("a", "b", "a"))}),
        ("E723", "no tokenizer.json", "m", {"tokenizer_folder": "."}),
        ("E723", "takes texts needs a tokenizer", "m", {"facts": FACTS, "interfaces": ("tokens", "text")}),
    ],
)
def test_what_cannot_be_deployed_is_refused_and_leaves_nothing(tmp_path, classifier, code, words, name, options):
    (tmp_path / "junk.onnx").write_bytes(b"junk")
    fixed_batch(tmp_path / "fixed.onnx", classifier)
    (tmp_path / "repository" / "taken").mkdir(parents=True)
    if "tokenizer_folder" in options:
        options = {"tokenizer_folder": tmp_path}
    onnx_path = tmp_path / options["onnx"] if "onnx" in options else classifier
    options = {key: value for key, value in options.items() if key != "onnx"}
    with pytest.raises(UserError, match=words) as caught:
        write_repository(tmp_path / "repository", name, onnx_path, **options)
    assert caught.value.code == code
    assert contents(tmp_path / "repository") == {} and not (tmp_path / "repository" / "m").exists()


def test_a_misspelt_config_is_refused(tmp_path):
    (tmp_path / "config.pbtxt").write_text('name: "m"\nmax_batch_sise: 3\n')
    with pytest.raises(UserError, match=r"E724 .*max_batch_sise"):
        read_config(tmp_path)
