"""What a version must answer to the requests recorded when it was deployed, alone and while others share its batches."""

import json
import shutil
from dataclasses import replace

import numpy as np
import onnxruntime
import pytest
from triton_parts import FACTS, KNOBS, NAME, WORDS, Traffic, write_classifier

from compressor.errors import UserError
from serving.answer_bounds import IN_BATCHES, IN_HALF, TOLERANCE, least_concordance, tolerance_alone, tolerance_in_batches
from serving.backends.door import VERSION_FILE
from serving.deployment import publish
from serving.deployment.answers import Answer, differences, tensor, write_answers
from serving.deployment.publish import Options, deploy, roll_back, status
from serving.deployment.target import Target
from serving.repository import write_repository


def test_answers_that_are_missing_or_damaged(make_run, target):
    run = make_run(0)
    for content in (None, "", "{}", "[1]", json.dumps({"answers": [{"inputs": []}]})):
        path = run / NAME / "1" / "answers.json"
        path.unlink(missing_ok=True) if content is None else path.write_text(content)
        with pytest.raises(UserError, match=r"E754 .*deploy stage again; what another command wrote, such as delta stack"):
            deploy(run, target, None, Options("run"))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([tensor("logits", np.array([[1.0, 2.0005]]), "FP32")], ""),
        ([tensor("logits", np.array([[1.0, 2.1]]), "FP32")], "logits differs by"),
        ([tensor("logits", np.array([[1.0, np.nan]]), "FP32")], "logits differs by nan"),
        ([tensor("logits", np.array([1.0, 2.0]), "FP32")], "logits is FP32 [2], recorded FP32 [1, 2]"),
        ([tensor("logits", np.array([[1.0, 2.0]]), "FP16")], "logits is FP16 [1, 2], recorded FP32 [1, 2]"),
        ([tensor("other", np.array([[1.0, 2.0]]), "FP32")], "no output logits"),
    ],
)
def test_differences_from_the_record(given, told):
    answer = Answer([], [tensor("logits", np.array([[1.0, 2.0]]), "FP32")])
    found = differences([answer], lambda inputs: given)
    assert bool(found) == bool(told) and told in "".join(found)


def test_a_small_number_beside_a_large_one_has_its_own_tolerance():
    answer = Answer([], [tensor("logits", np.array([100.0, 1.0]), "FP32")])
    near, far = ([tensor("logits", np.array(given), "FP32")] for given in ([100.05, 1.0], [100.0, 1.05]))
    assert not differences([answer], lambda inputs: near) and differences([answer], lambda inputs: far)


def test_texts_must_be_equal():
    answer = Answer([], [tensor("LABEL", np.array([["good"]], dtype=object), "BYTES")])
    assert differences([answer], lambda inputs: [tensor("LABEL", np.array([["bad"]], dtype=object), "BYTES")])


@pytest.mark.parametrize(("times", "told"), [(1, "request 1: logits differs by 4"), (3, "")])
def test_a_request_is_asked_again_where_others_may_share_its_batch(times, told):
    given = iter([5.0, 1.3, 9.0])
    answer = Answer([], [tensor("logits", np.array([1.0]), "FP32")])
    found = differences([answer], lambda inputs: [tensor("logits", np.array([next(given)]), "FP32")], IN_BATCHES, times)
    assert "".join(found).startswith(told) and bool(found) == bool(told)


@pytest.mark.parametrize(
    ("least", "given", "told"),
    [
        (0.0, lambda number: 0.15, ""),  # classes are logits, and an equal one for all is no fault
        (0.99, lambda number: 0.15, "the numbers of all requests have a concordance of 0 "),
        (0.99, lambda number: number + 0.002, ""),
        (0.99, lambda number: 0.15 + (number - 0.15) * 0.5, "the numbers of all requests have a concordance of 0.8 "),
    ],
)
def test_numbers_are_told_from_their_mean(least, given, told):
    """The mean in place of each of these numbers is within the bound of bf16."""
    recorded = [float(number) for number in np.linspace(0, 0.3, 16)]
    answers = [Answer([number], [tensor("VALUE", np.array([[number]]), "FP32")]) for number in recorded]
    found = differences(
        answers,
        lambda answer: [tensor("VALUE", np.array([[given(answer.inputs[0])]]), "FP32")],
        IN_HALF["bf16"],
        least_concordance=least,
    )
    assert len(found) == (len(answers) if told else 0) and all(line.startswith(told) for line in found)


def test_numbers_that_only_round_need_no_concordance():
    """A model that learnt nothing predicts almost the same number for every row; and one request has no spread."""
    answers = [Answer([], [tensor("VALUE", np.array([[0.15 + 1e-4 * row]]), "FP32")]) for row in range(8)]
    given = iter([0.151] * 8 + [0.2])
    for asked in (answers, answers[:1]):
        found = differences(
            asked, lambda _: [tensor("VALUE", np.array([[next(given)]]), "FP32")], IN_HALF["bf16"], least_concordance=0.99
        )
        assert not found


def test_only_scales_that_depend_on_the_batch_widen_the_bound(tmp_path, classifier):
    def bound(**facts):
        folder = tmp_path / "-".join(facts)
        return tolerance_in_batches(write_repository(folder, NAME, classifier, **facts) / "1")

    assert bound(facts=replace(FACTS, precision="int8")) == IN_BATCHES
    assert bound(facts=FACTS, knobs=KNOBS) == bound() == TOLERANCE


@pytest.mark.parametrize(
    ("facts", "bound"),
    [
        ({"precision": "fp16", "runtime": "onnxruntime"}, IN_HALF["fp16"]),
        ({"precision": "bf16", "runtime": "onnxruntime"}, IN_HALF["bf16"]),
        ({"precision": "bf16", "runtime": "openvino"}, IN_HALF["bf16"]),
        ({"precision": "int8", "runtime": "onnxruntime"}, TOLERANCE),
        ({"precision": "fp32", "runtime": "a later one"}, TOLERANCE),
    ],
)
def test_a_file_of_half_precision_may_round_as_that_does(facts, bound, tmp_path, classifier):
    version = write_repository(tmp_path, NAME, classifier, facts=FACTS, knobs=KNOBS) / "1"
    assert tolerance_alone(version) == TOLERANCE
    stored = json.loads((version / VERSION_FILE).read_text())
    (version / VERSION_FILE).write_text(json.dumps(stored | facts))
    assert tolerance_alone(version) == bound <= tolerance_in_batches(version)
    assert least_concordance(version) == 0.0
    (version / VERSION_FILE).write_text(json.dumps(stored | facts | {"task": "regression"}))
    assert least_concordance(version) == (0.99 if facts["precision"] in IN_HALF else 0.0)


@pytest.mark.parametrize("name", ["models [old] *", "models::new"])
def test_a_repository_may_have_any_name(make_run, tmp_path, name):
    """Whatever fsspec makes of it in a URL; also where it is deployed from."""
    made = make_run(0).parent
    before, run = {path.name for path in tmp_path.iterdir()}, made.rename(made.with_name(f"run of {name}")) / "repository"
    target = Target.at(str(tmp_path / name))
    deploy(run, target, None, Options("first"))
    assert [(state.model, state.version) for state in status(target, None)] == [(NAME, 1)]
    assert {path.name for path in tmp_path.iterdir()} == before - {made.name} | {run.parent.name, name}
    target.mark(NAME, 1, finished=False)
    with pytest.raises(UserError, match="E756"):
        deploy(tmp_path / name, Target.at(str(tmp_path / "another")), None, Options("second"))


def test_a_version_of_another_program_comes_back_with_its_own_config(make_run, tmp_path):
    """What stood beside it was replaced for good: by cp, or by compress delta stack, nothing of it is kept elsewhere."""
    first, second = make_run(0), make_run(1, labels=("one", "two", "three"), knobs=replace(KNOBS, max_batch_size=8))
    shutil.copytree(first, tmp_path / "target")
    target, places = Target.at(str(tmp_path / "target")), ("config.pbtxt", "labels.txt", "warmup/short_input_ids")
    before = [target.files.cat_file(target.path(NAME, place)) for place in places]
    deploy(second, target, None, Options("second"))
    assert [target.files.cat_file(target.path(NAME, place)) for place in places[:2]] != before[:2]
    roll_back([NAME], target, None, Options(""))
    assert target.versions(NAME) == [1]
    assert [target.files.cat_file(target.path(NAME, place)) for place in places] == before


UNREADABLE = [b'name: "reviews"\nof_a_later_triton { count: 1 }\n', b'# caf\xe9\nname: "reviews"\n', b""]
"""Configs that Triton may read, and this program does not, whole; or that say nothing."""


@pytest.fixture
def theirs(tmp_path):
    """A repository with version 1 of a model that another program published, of these files beside it."""

    def write(**beside):
        folder = tmp_path / "target" / NAME
        (folder / "1").mkdir(parents=True)
        (folder / "1" / "model.onnx").touch()
        for name, content in beside.items():
            (folder / name.replace("_", ".")).write_bytes(content)
        return Target.at(str(folder.parent)), folder

    return write


@pytest.mark.parametrize("config", UNREADABLE)
def test_a_config_of_another_program_comes_back_where_a_deployment_fails(make_run, theirs, monkeypatch, config):
    """Only the bytes count: nobody here needs to read them."""
    (target, folder), run, options = theirs(config_pbtxt=config), make_run(0), Options("run")

    def state():
        return target.versions(NAME), (folder / "config.pbtxt").read_bytes()

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="it fails"):
        patch.setattr(publish, "_told", fail)
        deploy(run, target, None, options)
    assert state() == ([1], config)
    deploy(run, target, None, options)
    assert state() == ([1, 2], (run / NAME / "config.pbtxt").read_bytes())
    roll_back([NAME], target, None, options)
    assert state() == ([1], config)


def fail(*_, **__):
    raise RuntimeError("it fails")


def test_a_version_that_could_not_come_back_is_told_before_it_is_replaced(make_run, theirs):
    """Triton completes the config of an ONNX file itself: one of this program would stay beside it."""
    target, folder = theirs()
    told = "E757 .*version 1 of 'reviews' could not come back if the new one failed: no config.pbtxt "
    with pytest.raises(UserError, match=told):
        deploy(make_run(0), target, None, Options("run"))
    assert [path.name for path in folder.rglob("*")] == ["1", "model.onnx"]


def test_of_two_versions_of_another_program_the_first_comes_back(make_run, tmp_path):
    """Nothing is kept of either, so what stands beside them stays."""
    shutil.copytree(make_run(0), tmp_path / "target")
    target = Target.at(str(tmp_path / "target"))
    shutil.copytree(target.path(NAME, 1), target.path(NAME, 2))
    roll_back([NAME], target, None, Options(""))
    assert target.versions(NAME) == [1]


@pytest.fixture
def make_int8(tmp_path, tokenizer_folder):
    """A run of one text model in dynamic int8, and its requests: one word is so large that its batch's scale suits no other."""
    from onnxruntime.quantization import quantize_dynamic

    def make(seed):
        model = write_classifier(tmp_path / f"{seed}.onnx", seed, large={"great": 50.0})
        quantize_dynamic(model, tmp_path / f"{seed}.int8.onnx")
        folder, knobs = tmp_path / f"run-{seed}", replace(KNOBS, max_queue_delay_us=20_000)
        options = {"facts": replace(FACTS, precision="int8"), "tokenizer_folder": tokenizer_folder, "knobs": knobs}
        written = write_repository(folder, NAME, tmp_path / f"{seed}.int8.onnx", interfaces=["text"], **options)
        session = onnxruntime.InferenceSession(str(tmp_path / f"{seed}.int8.onnx"))
        answers = [scores_of(session, words) for words in ("a film", "the plot", "a dull", "great great")]
        write_answers(written / "1", answers)
        return folder, answers

    return make


def scores_of(session, text):
    ids = np.array([[2, *(WORDS.index(word) for word in text.split()), 3]])
    logits = session.run(["logits"], {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0]
    scores = np.exp(logits) / np.exp(logits).sum()
    asked = tensor("TEXT", np.array([[text]], dtype=object), "BYTES")
    return Answer([asked], [tensor("SCORES", scores.astype(np.float32), "FP32")])


@pytest.mark.slow
def test_int8_scales_of_other_rows_take_no_version_back(make_int8, target, control):
    (first, answers), (second, _) = make_int8(0), make_int8(1)
    model = f"{NAME}-text"
    deploy(first, target, control, Options("first"))
    with Traffic(control, answers[-1], model) as traffic:
        shared = (differences(answers[:-1], lambda answer: control.ask(model, answer)) for _ in range(20))
        assert any(shared), "no batch was shared"
        (done,) = deploy(second, target, control, Options("second"))
    assert (done.version, target.versions(model)) == (2, [1, 2]) and not traffic.failures
