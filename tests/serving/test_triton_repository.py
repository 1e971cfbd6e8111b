"""What `write_repository` puts on disk, and what it refuses."""

import json

import onnx
import pytest
from triton_parts import LABELS, PARAMETERS

from compressor.errors import UserError
from serving.repository import model_names, read_config, write_repository


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_repository_is_deterministic_and_knows_no_machine(tmp_path, classifier, tokenizer_folder):
    for name, parameters in (("first", PARAMETERS), ("second", dict(reversed(PARAMETERS.items())))):
        write_repository(
            tmp_path / name, "m", classifier, labels=LABELS, tokenizer_folder=tokenizer_folder, parameters=parameters
        )
    first = contents(tmp_path / "first")
    assert first == contents(tmp_path / "second")
    tokenizer = ["m/tokenizer/tokenizer.json", "m/tokenizer/tokenizer_config.json"]
    assert sorted(first) == ["m/1/model.onnx", "m/config.pbtxt", "m/labels.txt", *tokenizer]
    assert first["m/1/model.onnx"] == classifier.read_bytes()
    assert b"/" not in first["m/config.pbtxt"]


def test_the_config_says_what_the_model_is(repository):
    config = read_config(repository / "reviews")
    assert (config.name, config.backend, config.max_batch_size) == ("reviews", "onnxruntime", 32)
    assert [(tensor.name, list(tensor.dims)) for tensor in config.input] == [("input_ids", [-1]), ("attention_mask", [-1])]
    assert [(tensor.name, list(tensor.dims), tensor.label_filename) for tensor in config.output] == [
        ("logits", [3], "labels.txt")
    ]
    assert config.dynamic_batching.max_queue_delay_microseconds == 5000
    assert [(group.count, group.kind) for group in config.instance_group] == [(1, 0)]
    assert json.loads(config.parameters["labels"].string_value) == list(LABELS)
    assert config.parameters["max_length"].string_value == "8"


def test_without_batching_the_batch_axis_stays(repository):
    config = read_config(repository / "bare")
    assert list(config.input[0].dims) == [-1, -1] and list(config.output[0].dims) == [-1, 3]
    assert not config.HasField("dynamic_batching")
    assert model_names(repository) == ["bare", "reviews"]


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
        ("E720", "already holds a model 'taken'", "taken", {}),
        ("E721", "not a readable ONNX file", "m", {"onnx": "junk.onnx"}),
        ("E721", "not a readable ONNX file", "m", {"onnx": "missing.onnx"}),
        ("E721", "'input_ids' has no batch axis", "m", {"onnx": "fixed.onnx"}),
        ("E722", "2 labels for a model of 3 classes", "m", {"labels": ("no", "yes")}),
        ("E722", r"'a\\nb' is not a label", "m", {"labels": ("a\nb", "c", "d")}),
        ("E722", "the labels repeat: a, b, a", "m", {"labels": ("a", "b", "a")}),
        ("E723", "no tokenizer.json", "m", {"tokenizer_folder": "."}),
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
