"""What a program gives to the library by mistake is refused before anything is changed, and never answered with nonsense."""

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

import compressor
from compressor.checkpoint import INSERTS_FILE, WITH_INSERTS, save_checkpoint, save_state
from compressor.compression import compression_of
from compressor.errors import UserError
from compressor.methods import Options, apply, trainable_counts
from compressor.models.anatomy import matrices_of
from compressor.models.build import build
from compressor.models.files.model_folder import GENERATION
from compressor.models.reference import resolve
from compressor.pruning.scores import loss_scores, weight_scores
from compressor.pruning.surgery import Removal, kept_of, remove
from compressor.pruning.weights import hide_lowest, importance, loss_importance
from compressor.storage import delta_file
from compressor.tasks.features import predict, torch_forward
from compressor.training.schedule import Schedule
from compressor.training.trainer import train
from compressor.training.training_rows import TrainingRows
from tests.compressor.conftest import encoding, logits, tiny, tuned
from tests.compressor.training_parts import rows_of
from tests.tiny import write_model, write_tokenizer

LABELS = ["a", "b", "c"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", 0),
        ("rank", "x"),
        ("rank", 1.5),
        ("rank", True),
        ("bottleneck", 0),
        ("length", 0),
        ("alpha", float("nan")),
        ("keep", 2),
        ("keep", 0.0),
        ("mixout", -0.1),
        ("mixout", 1.0),
        ("reserve", 0.0),
        ("budget", 0),
        ("budget", -0.5),
        ("top", -1),
        ("burn_in", 0),
        ("placement", "foo"),
        ("shared", "foo"),
        ("strategy", "foo"),
        ("child", "foo"),
        ("masks", None),
    ],
)
def test_options_of_a_method_are_checked(name, value):
    with pytest.raises(ValueError, match=f"^{name} is "):
        Options(**{name: value})


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("selective", {}, "omega is None"),
        ("dsee", {}, "omega is None"),
        ("child_tuning", {"child": "d"}, "omega is None"),
        ("child_tuning", {"child": "pruning"}, "budget is None"),
        ("diff_pruning", {}, "budget is None"),
        ("selective", {"strategy": "increment"}, "budget is None"),
        ("lora", {"modules": ()}, "names none"),
    ],
)
def test_what_a_method_needs_is_given(method, options, words):
    model = tiny("bert")
    with pytest.raises(ValueError, match=words):
        apply(model, method, Options(**options))
    assert all(parameter.requires_grad for parameter in model.parameters())  # as it was


def test_a_model_of_transformers_takes_a_method():
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 20, "vocab_size": 99}
    model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("bert", **sizes, num_labels=3))
    apply(model, "lora", Options(rank=2))
    assert trainable_counts(model) == {"head": 3 * 32 + 3, "body": 2 * 2 * 2 * (32 + 32)}
    assert {name for name, one in model.named_parameters() if one.requires_grad and "classifier" in name}


@pytest.mark.parametrize("number", [-1, 3, "0", 0.5])
def test_a_block_that_does_not_exist_is_not_cut(number):
    model = tiny("bert")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match="E501 there is no block"):
        remove(model, {number: Removal(heads=[0])})
    assert not kept_of(model) and all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_units_are_whole_numbers_however_they_are_given():
    for heads in (torch.tensor([2, 0]), np.array([2, 0]), (2, 0)):
        model = tiny("bert")
        remove(model, {0: Removal(heads=heads)})
        assert kept_of(model)["0"]["heads"] == [1, 3]
    for odd in ([0.5], "01", [None]):
        with pytest.raises(ValueError, match="a list of whole numbers"):
            Removal(neurons=odd)


def test_unknown_criteria_and_no_rows_give_no_scores():
    model = tuned(tiny("bert"), "lora")
    matrices, batch = matrices_of(model, ("query",)), (encoding(), torch.tensor([0, 2, 1]))
    scores = {matrix.path: torch.rand(32, 32) for matrix in matrices}
    for call in (
        lambda: weight_scores(model, "heads", "foo", {}),
        lambda: loss_scores(model, "heads", "foo", [batch]),
        lambda: importance(matrices, "foo", {}, 0),
        lambda: loss_importance(model, matrices, "foo", [batch]),
        lambda: hide_lowest(matrices, scores, 5, hides="foo"),
    ):
        with pytest.raises(ValueError, match="'foo'"):
            call()
    with pytest.raises(ValueError, match="encodings is empty"):
        loss_scores(model, "heads", "taylor", [])
    assert all(matrix.mask is None for matrix in matrices)


def test_a_training_of_nothing_is_refused(tmp_path):
    rows = rows_of(4)
    for wrong, words in (
        (lambda: TrainingRows([], []), "rows is empty"),
        (lambda: TrainingRows(rows.rows, rows.labels[:2]), "4 rows and 2 labels"),
        (lambda: TrainingRows(rows.rows, rows.labels, []), "4 rows and 0 outputs of a teacher"),
        (lambda: Schedule(epochs=1, learning_rate=1e-3, max_steps=0), "max_steps is 0"),
        (lambda: Schedule(epochs=0, learning_rate=1e-3), "epochs is 0"),
        (lambda: Schedule(epochs=1, learning_rate=1e-3, batch_size=0), "batch_size is 0"),
        (lambda: Schedule(epochs=1, learning_rate=float("nan")), "learning_rate is nan"),
        (lambda: Schedule(epochs=1, learning_rate=0.0), "learning_rate is 0"),
    ):
        with pytest.raises(ValueError, match=words):
            wrong()
    model = tiny("bert").requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter has requires_grad"):
        train(model, rows, 1, Schedule(epochs=1, learning_rate=1e-3), tmp_path)
    with pytest.raises(ValueError, match="rows is empty"):
        predict(torch_forward(model), [], 1)


@pytest.mark.parametrize("labels", [["a", "b"], "abc", [], ["a", "a", "b"], [0, 1, 2]])
def test_labels_are_those_of_the_head(tmp_path, labels):
    model, facts = tuned(tiny("bert", torch.float32), "lora"), {"base": "here", "base_sha256": "0", "label_names": labels}
    for write in (delta_file.write, save_state):
        with pytest.raises(ValueError, match="the model has 3 outputs"):
            write(model, tmp_path / "written", **facts)
    assert not (tmp_path / "written").exists()


def test_a_checkpoint_without_its_tokenizer_is_not_written(tmp_path):
    with pytest.raises(UserError, match=r"E303 .*no such folder"):
        save_checkpoint(tiny("bert", torch.float32), tmp_path / "out", tmp_path / "words")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_copies_no_file_from_outside_the_folder_of_its_tokenizer(tmp_path):
    """A link within that folder, and to the folder, is as any other file."""
    write_tokenizer(tmp_path / "words", "bert")
    (tmp_path / "words" / "vocab.txt").symlink_to("tokenizer.json")
    (tmp_path / "link").symlink_to("words")
    save_checkpoint(tiny("bert", torch.float32), tmp_path / "out", tmp_path / "link")
    assert not (tmp_path / "out" / "vocab.txt").is_symlink() and (tmp_path / "out" / "vocab.txt").is_file()
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "words" / "chat_template.jinja").symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match=r"E304 .*has a chat_template.jinja that is a link out of it"):
        save_checkpoint(tiny("bert", torch.float32), tmp_path / "other", tmp_path / "link")
    assert not (tmp_path / "other").exists()


def test_a_checkpoint_replaces_the_one_in_its_folder(tmp_path):
    """Also one of another kind, and beside the tokenizer; not the state of a training."""
    plain, inserted, out = tiny("bert", torch.float32), tuned(tiny("bert", torch.float32), "adapter"), tmp_path / "out"
    for name in ("words", "generating"):
        write_tokenizer(tmp_path / name, "bert")
    (tmp_path / "generating" / GENERATION).write_text("{}")
    for model, words in ((inserted, "generating"), (plain, "words"), (inserted, "words")):
        save_checkpoint(model, out, tmp_path / words)
        assert torch.equal(logits(compressor.load(out)), logits(model))
        assert (out / GENERATION).exists() == (words == "generating")
    for model, expected in ((compressor.load(out), inserted), (plain, plain)):
        save_checkpoint(model, out, out)
        assert torch.equal(logits(compressor.load(out)), logits(expected))
        assert (out / "tokenizer.json").read_bytes() == (tmp_path / "words" / "tokenizer.json").read_bytes()
    assert {path.name for path in out.iterdir()}.isdisjoint({WITH_INSERTS, INSERTS_FILE})
    facts = {"base": "here", "base_sha256": "0", "label_names": LABELS}
    save_state(tuned(tiny("bert", torch.float32), "lora"), tmp_path / "state", **facts)
    with pytest.raises(ValueError, match="another folder"):
        save_checkpoint(plain, tmp_path / "state", tmp_path / "words")


def test_a_delta_without_a_head_does_not_answer_by_a_random_one(tmp_path):
    base = write_model(tmp_path / "base")
    model = build(base, LABELS)
    apply(model, "lora", Options(rank=2))
    facts = {"base": str(base), "base_sha256": resolve(str(base)).sha256, "label_names": LABELS}
    delta_file.write(model, tmp_path / "delta", **facts, head=False)
    assert compression_of(model).head_origin == "fresh"
    with pytest.raises(UserError, match=r"E311 .*no task head.*random"):
        compressor.load(base, delta=tmp_path / "delta")


def test_load_says_what_it_takes(tmp_path):
    for odd in (None, tiny("bert"), b"runs"):
        with pytest.raises(TypeError, match="takes the path of a folder"):
            compressor.load(odd)
    with pytest.raises(UserError, match=r"E305 .*no such folder.*compressor\.models\.build\.build"):
        compressor.load("organization/model")
