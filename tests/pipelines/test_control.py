"""The control of a recovery: the dense model trained as long as the pruned one, in whole pipelines."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from compressor.account import Plan, Trained
from compressor.checkpoint import STATE_FILE
from compressor.cost import LayerShape, ModelShape
from compressor.errors import UserError
from compressor.methods import Options
from compressor.models.reference import Reference
from compressor.tasks import TaskConfig
from compressor.tasks.data import read_data
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import Artifact, Inputs
from pipelines.file.config import load_pipeline
from pipelines.reporting.gather import kept_notes
from pipelines.reporting.words import kept_note
from pipelines.stages.recover import control, run
from pipelines.stages.recover.config import CONTROL, RecoverConfig
from pipelines.stages.recover.control import ControlTraining, lessons_of_control
from pipelines.stages.recover.lessons import Lessons
from pipelines.stages.training_config import BUDGETS
from pipelines.stages.training_plan import estimate
from pipelines.sweeps.trial_run import costs_of
from tests.compressor.conftest import tiny
from tests.tiny import write_pipeline

FAST = {"epochs": 1, "learning_rate": 0.02, "batch_size": 8}
KEYS = {"accumulate": 2, "warmup": 0.3, "weight_decay": 0.2, "label_smoothing": 0.1}
TUNE = {"tune": {"method": "lora", "rank": 2, **FAST}}
PRUNE = {"prune": [{"structure": name, "criterion": "random", "remove": 1} for name in ("heads", "layers")]}
RECOVERIES = {
    "same, hidden states": [{"recover": {"distill": "hidden", "keep_best": True, "evaluate_every": 2, **FAST}}],
    "full, logits": [{"recover": {"method": "full", **KEYS, **FAST}}],
    "twice": [{"recover": FAST}, {"recover": {"method": "lora", "rank": 3, "modules": "all", "distill": False, **FAST}}],
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Runs stages on one project and one store; returns the artifacts by id."""
    folder = tmp_path_factory.mktemp("project")

    def make(*stages, force=()):
        path = write_pipeline(folder, stages=[*stages], rows=40)
        return run_pipeline(load_pipeline(path), folder / "out", force=force).artifacts

    return make


TRAINED = ("quality", "losses", "evaluations", "kept_step")
"""Metadata of every training; the last two with keep_best alone."""


def trained(artifact, folder=""):
    """sha256 of everything that training changes in the state in a folder of an artifact."""
    return [artifact.files.get(f"{folder}{name}.safetensors") for name in ("head", "changes", "weights")]


@pytest.mark.parametrize("name", RECOVERIES)
def test_it_is_the_dense_model_with_the_same_trainings(made, name):
    """Bit for bit what the same recoveries make of the unpruned model; a prune between them changes nothing."""
    first, *later = RECOVERIES[name]
    again = {"prune": {"structure": "neurons", "criterion": "random", "remove": 3}}
    dense = made(TUNE, first, *later)
    pruned = made(TUNE, PRUNE, first, *(stage for one in later for stage in (again, one)))
    for number, entry in enumerate(("recover", "recover-2")[: len(RECOVERIES[name])]):
        assert "control" not in dense[entry].metadata, "nothing was removed: the recovery is its own control"
        assert trained(pruned[entry], "control/") == trained(dense[entry])
        stored = sum(path.stat().st_size for path in pruned[entry].folder.glob("*.safetensors"))
        assert costs_of({entry: pruned[entry]})["bytes of the stored model"] == stored, "of what is shipped, not of its control"
        same = {key: dense[entry].metadata[key] for key in TRAINED if key in dense[entry].metadata}
        assert pruned[entry].metadata["control"] == {**same, "recoveries": number + 1}


def test_its_state_names_the_kind_of_its_task(tmp_path):
    """As the recovered model's does, where the head does not tell it."""
    path = write_pipeline(tmp_path, kind="multilabel", stages=[TUNE, PRUNE, {"recover": FAST}], rows=24)
    folder = run_pipeline(load_pipeline(path), tmp_path / "out").artifacts["recover"].folder
    kinds = [json.loads((one / STATE_FILE).read_text())["kind"] for one in (folder, folder / CONTROL)]
    assert kinds == ["multilabel", "multilabel"]


def test_the_best_is_published(made):
    """Of the recovered model and of its control: its quality is that of the best evaluation."""
    artifacts = made(TUNE, PRUNE, *RECOVERIES["same, hidden states"])
    recovered = artifacts["recover"].metadata
    (note,) = kept_notes(Inputs(base=None, task=None, seed=0, artifacts=tuple(artifacts.values())))
    assert note.startswith(
        f"recover gives the parameters of step {recovered['kept_step']} of 5 (its control likewise): the best"
    )
    once = kept_note("recover", recovered | {"evaluations": recovered["evaluations"][-1:]})
    assert once.endswith("its last step (its control likewise): only these were evaluated, so `keep_best` chose nothing.")
    for facts in (recovered, recovered["control"]):
        values = {evaluation["step"]: evaluation["value"] for evaluation in facts["evaluations"]}
        assert [*values] == [2, 4, 5] and values[facts["kept_step"]] == max(values.values()) == facts["quality"]["accuracy"]


def test_without_it_the_recovered_model_is_the_same(made):
    beside = made(TUNE, PRUNE, {"recover": FAST})["recover"]
    alone = made(TUNE, PRUNE, {"recover": {"control": False, **FAST}})["recover"]
    assert trained(beside) == trained(alone)
    assert "control" not in alone.metadata and not any(name.startswith("control/") for name in alone.files)


def test_a_later_recovery_has_none_where_the_first_left_it_out(made, capfd):
    last = made(TUNE, PRUNE, {"recover": {"control": False, **FAST}}, {"recover": FAST})["recover-2"]
    assert "control" not in last.metadata
    assert "no control: recover, from which it would go on, has none" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("earlier", "learned", "told"),
    [
        ([], {}, "the same training"),
        ([], {"learned": "labels"}, "further training on the labels"),
        ([{"learned": "labels"}, {}], {}, "further training on the labels"),
        ([{}], {}, "the same training"),
    ],
)
def test_a_control_that_goes_on_from_one_of_labels_is_told_as_that(earlier, learned, told):
    """As in the report: an earlier recovery learned of the dense model, its control the labels."""
    artifacts = [SimpleNamespace(metadata={CONTROL: facts}) for facts in earlier]
    training = ControlTraining(RecoverConfig(**FAST), Lessons(None), None, "lora", None, artifacts, learned)
    assert training.told == told


def test_a_finished_control_is_not_trained_again(made, monkeypatch):
    """The attempt that failed after it leaves it to the next one, without the checkpoints that nothing reads any more."""
    monkeypatch.setattr("compressor.training.callbacks.SAVE_EVERY", 0.0)
    stages, save = (TUNE, PRUNE, {"recover": {**FAST, "learning_rate": 0.01}}), run.train_and_save

    def stop(*_, **__):
        raise UserError("E406", "stopped", "go on")

    monkeypatch.setattr(run, "train_and_save", stop)
    with pytest.raises(UserError, match="stopped"):
        made(*stages)
    (finished,) = made(TUNE)["tune"].folder.parent.glob(f".unfinished-recover-*/{CONTROL}/{control.FINISHED}")
    assert [*finished.parent.iterdir()] == [finished]
    monkeypatch.setattr(run, "train_and_save", save)
    monkeypatch.setattr(control, "_train", stop)
    assert made(*stages)["recover"].metadata["control"]["recoveries"] == 1


def test_one_that_was_scored_on_a_changed_file_is_not_kept(tmp_path, monkeypatch):
    """The files that are only scored are read behind the training: neither for the next attempt nor for other cuts."""
    path = write_pipeline(tmp_path, stages=[TUNE, PRUNE, {"recover": FAST}], rows=24)
    scored, score = tmp_path / "scored.tsv", control.score_tests
    scored.write_bytes((tmp_path / "dev.tsv").read_bytes())

    def changed(*given):
        scored.write_text("\n".join(scored.read_text().splitlines()[:-1]) + "\n")
        return score(*given)

    monkeypatch.setattr(control, "score_tests", changed)
    with pytest.raises(UserError, match=r"E807 .*scored.tsv: changed while"):
        run_pipeline(load_pipeline(path, [f"task.test={scored}"]), tmp_path / "out")
    store = tmp_path / "out" / ".store"
    assert not [*store.glob(".cache/control-*")] and not [*store.rglob(control.FINISHED)]
    assert [*store.glob(f".unfinished-recover-*/{CONTROL}")], "its training goes on from its checkpoints"


@pytest.mark.parametrize("code", ["E406", "E413"])
def test_one_that_fails_is_named(made, monkeypatch, code):
    def fail(*_, **__):
        raise UserError(code, "training diverged at learning_rate 0.03", "Lower it")

    monkeypatch.setattr(control, "train_model", fail)
    with pytest.raises(UserError, match=rf"{code} .*: the control .* diverged at learning_rate 0.03") as error:
        made(TUNE, PRUNE, {"recover": {**FAST, "learning_rate": 0.03}})
    assert "control: false" in error.value.fix


def test_the_checkpoints_of_a_recovery_on_texts_are_none_of_its_control(tmp_path):
    """Of nine steps on texts, in which Ω may have nine sizes; the control learns the labels in three."""
    grows = {"method": "selective", "strategy": "increment", "budget": 9, "checkpoints": [1, 2, 3, 4, 5]}
    recover = {"recover": {**grows, "texts": "texts.txt", "steps": 9, "batch_size": 8}}
    path = write_pipeline(tmp_path, stages=[TUNE, PRUNE, recover], rows=8)
    words = ("good", "bad", "film", "plot")
    (tmp_path / "texts.txt").write_text(
        "".join(f"{one} {other} {third}\n" for one in words for other in words for third in words)
    )
    made = run_pipeline(load_pipeline(path), tmp_path / "out").artifacts["recover"]
    kept = {name for name in made.files if name.startswith(f"{BUDGETS}/")}
    assert kept == {f"{BUDGETS}/{size}.safetensors" for size in range(1, 6)}
    assert made.metadata["control"]["losses"][-1]["step"] == 3


def more_answers(lines: str) -> str:
    """Rows of questions with a second true answer, the whole context, where there is one."""
    rows = [json.loads(line) for line in lines.splitlines()]
    for row in rows:
        row["answers"] += [{"text": row["context"], "answer_start": 0}] * bool(row["answers"])
    return "".join(f"{json.dumps(row)}\n" for row in rows)


@pytest.mark.parametrize(
    ("kind", "metric", "change", "is_another"),
    [
        ("spans", "f1", more_answers, True),
        ("text2text", "bleu", lambda text: text.replace("tale", "saga"), True),
        ("text2text", "log_likelihood", lambda text: text.replace("tale", "saga"), False),
        ("classification", "accuracy", lambda text: text.replace("tale", "saga"), False),
    ],
)
def test_it_is_another_where_texts_are_compared_with_others(tmp_path, kind, metric, change, is_another):
    """Of several true answers the first alone is a label, and words that the tokenizer does not know are one token."""
    stages, model_type = [TUNE, PRUNE, {"recover": FAST}], "t5" if kind == "text2text" else "bert"
    path = write_pipeline(tmp_path, kind=kind, model_type=model_type, stages=stages, rows=8)
    task = load_pipeline(path, [f"task.metric={metric}"]).task
    task.validation.write_text(task.validation.read_text().replace("film", "tale"))
    start = Artifact(tmp_path, "a", "model", "tune", "tune", {}, {})
    inputs = Inputs(Reference("model", tmp_path / "model", "a"), task, 0, dense=start, threads=1)
    rows, fingerprints = [], []
    for _ in range(2):
        data = read_data(tmp_path / "model", task)
        training = ControlTraining(RecoverConfig(**FAST), Lessons(data), data, "lora", None, [], {})
        rows.append((data.validation.tokens, data.validation.labels.tolist()))
        fingerprints.append(training.fingerprint(inputs))
        task.validation.write_text(change(task.validation.read_text()))
    assert rows[0] == rows[1] and (fingerprints[0] != fingerprints[1]) is is_another


def test_each_thing_that_decides_it_makes_it_another(tmp_path, monkeypatch):
    rows, others = (SimpleNamespace(tokens=[[5, 6]], labels=np.array([label])) for label in (1, 0))
    data = SimpleNamespace(train=rows, validation=rows)
    dense, later = (Artifact(tmp_path, name, "model", name, name, {}, {}) for name in ("tune", "recover"))
    task = TaskConfig(train="train.tsv", validation="dev.tsv")
    inputs = Inputs(Reference("model", tmp_path, "a"), task, 0, dense=dense, threads=1)
    first = ControlTraining(RecoverConfig(**FAST), Lessons(data), data, "lora", {"query": torch.tensor([1])}, [later], {})
    changed = [
        replace(first, config=RecoverConfig(**FAST, weight_decay=0.2)),
        replace(first, config=RecoverConfig(**FAST, distill="hidden")),
        replace(first, config=RecoverConfig(**FAST, distill=False)),
        replace(first, data=SimpleNamespace(train=rows, validation=others)),
        replace(first, lessons=Lessons(data, logits=np.zeros(1))),
        replace(first, lessons=Lessons(data, logits=np.ones(1))),
        replace(first, before="full"),
        replace(first, positions={"query": torch.tensor([2])}),
        replace(first, earlier=[replace(later, files={"control/changes.safetensors": "a"})]),
    ]
    others = [
        replace(inputs, seed=1),
        replace(inputs, threads=2),
        replace(inputs, base=replace(inputs.base, sha256="b")),
        replace(inputs, dense=replace(dense, files={"changes.safetensors": "a"})),
    ]
    names = [one.fingerprint(inputs) for one in (first, *changed)] + [first.fingerprint(other) for other in others]
    facts = {
        "STAGE": replace(control.STAGE, version=control.STAGE.version + 1),
        "accelerator": lambda: "another card",
        "distribution": lambda package: f"{package} 0",
    }
    for name, value in facts.items():
        with monkeypatch.context() as patch:
            patch.setattr(control, name, value)
            names.append(first.fingerprint(inputs))
    assert first.fingerprint(inputs) == names[0] and len({*names}) == len(names)


@pytest.mark.parametrize(("burn_in", "kept"), [(14, 14), (15, None)])
def test_a_burn_in_that_its_fewer_steps_do_not_reach_is_the_default(burn_in, kept):
    """Of 100 steps on texts; it learns 40 labels in three passes of five."""
    keys = {"method": "diff_pruning", "budget": 9, "texts": "texts.txt", "steps": 100, "batch_size": 8}
    labels, texts = (SimpleNamespace(train=range(count)) for count in (40, 400))
    config, learned = lessons_of_control(RecoverConfig(**keys, burn_in=burn_in), labels, Lessons(texts, texts=360), "lora")
    assert (config.epochs, config.burn_in, learned.data) == (3, kept, labels)


@pytest.mark.parametrize(("renew", "kept"), [(6, 6), (7, None)])
def test_a_renewal_that_its_fewer_steps_do_not_reach_is_left_out(renew, kept):
    """Of 100 steps on texts; its 15 steps on labels fix the positions after 7."""
    keys = {"method": "diff_pruning", "budget": 9, "texts": "texts.txt", "steps": 100, "batch_size": 8}
    labels, texts = (SimpleNamespace(train=range(count)) for count in (40, 400))
    config, _ = lessons_of_control(RecoverConfig(**keys, renew=renew), labels, Lessons(texts, texts=360), "lora")
    assert config.renew == kept


@pytest.mark.parametrize(
    ("method", "key", "given", "rate"),
    [
        ("diff_pruning", "final_learning_rate", 0.05, 3e-3),
        ("diff_pruning", "final_learning_rate", 1e-3, 1e-3),
        ("diff_pruning", "mask_learning_rate", 1.0, 0.1),
        ("propetl", "mask_learning_rate", 0.05, 1e-2),
        ("propetl", "mask_learning_rate", 1e-3, 1e-3),
    ],
)
def test_no_rate_of_one_that_learns_labels_is_higher_than_is_usual(method, key, given, rate):
    """Neither that behind a projection nor that of masks: it would be a weaker baseline."""
    keys = {"method": method, **({"budget": 9} if method == "diff_pruning" else {}), "texts": "texts.txt", key: given}
    labels, texts = (SimpleNamespace(train=range(count)) for count in (40, 400))
    config, _ = lessons_of_control(RecoverConfig(**keys), labels, Lessons(texts, texts=360), "lora")
    assert getattr(config, key) == pytest.approx(rate)


def test_the_estimate_of_a_run_counts_it():
    """As much again as the training of the dense model, where something was pruned before."""
    dense = ModelShape(32, (LayerShape(4, 8, 24),) * 2, other=1000, head=66, head_macs=64)
    pruned, rows = dense.with_units("neurons", [12] * 2), {"train": 100, "validation": 50, "mean": 10, "longest": 20}
    by = {name: (Trained(name, Options()),) for name in ("lora", "full")}
    plan = Plan(dense, pruned, model=None, trainable=(("recover", 500),), trained=by["lora"], tuned=dense)
    with_it, without = (estimate(RecoverConfig(epochs=3, control=control), plan, plan, rows) for control in (True, False))
    assert with_it["flops"] - without["flops"] == (2 * 100 * 3 + 50) * dense.flops(10)
    assert with_it["memory"] > without["memory"] and with_it["disk"] == 3 * without["disk"], "its state is in the cache, too"
    # 12 bytes a parameter, of three checkpoints while one is written; the finished control lies beside those of the pruned
    trained = 500 + pruned.head
    assert [each["unfinished"] for each in (with_it, without)] == [36 * trained + without["disk"], 36 * trained]
    whole = estimate(RecoverConfig(epochs=3, control=False), replace(plan, trained=by["full"]), plan, rows)
    assert whole["flops"] - without["flops"] == 100 * 3 * pruned.flops(10), "same after full trains every weight"
    assert whole["disk"] == pruned.bytes != without["disk"] and whole["unfinished"] == 36 * trained
    beside = estimate(RecoverConfig(epochs=3), replace(plan, trained=by["full"]), plan, rows)
    assert beside["disk"] == pruned.bytes + 2 * dense.bytes
    assert beside["unfinished"] == 36 * (trained + dense.parameters - pruned.parameters), "more than beside the finished one"
    # texts are learned beside the training rows, and the teacher computes them once
    learned = rows | {"texts": {"rows": 300, "mean": 10}}
    of_texts = estimate(RecoverConfig(texts="texts.txt", steps=10, control=False), plan, plan, learned)
    assert of_texts["flops"] == (2 * 10 * 32 + 50) * pruned.flops(10) + 400 * dense.flops(10)
    kept = RecoverConfig(epochs=3, batch_size=10, keep_best=True, evaluate_every=4)
    best = estimate(kept, plan, plan, rows)
    assert best["flops"] - with_it["flops"] == 8 * 50 * (dense.flops(10) + pruned.flops(10))
    assert best["unfinished"] - with_it["unfinished"] == 12 * trained, "the best parameters, too"
    accumulated = estimate(RecoverConfig(texts="texts.txt", steps=5, accumulate=2, control=False), plan, plan, learned)
    assert accumulated == of_texts, "as many rows in each of the batches"
    taught = estimate(RecoverConfig(texts="texts.txt", steps=10), plan, plan, learned)
    assert taught["flops"] - of_texts["flops"] == (2 * 3 * 100 + 50) * dense.flops(10), "at most three passes over the labels"
    varied = estimate(
        RecoverConfig(texts="texts.txt", augment=2, epochs=1, control=False), plan, plan, learned | {"augment": {"rows": 800}}
    )
    assert varied["flops"] == (2 * 1200 + 50) * pruned.flops(10) + 1200 * dense.flops(10), "two of each row and text"
    few = estimate(RecoverConfig(augment=9, steps=5, control=False), plan, plan, rows | {"augment": {"rows": 900}})
    assert few["flops"] == (2 * 160 + 50) * pruned.flops(10) + 260 * dense.flops(10), "as many as the steps take"
    # hidden states are none that are stored: of every batch, in the control's training, too
    for distill, times in (("hidden", 2 * 3), ("both", 2 * 3), ("logits", 1), (False, 0)):
        of_teacher = estimate(RecoverConfig(epochs=3, distill=distill), plan, plan, rows)["flops"] - with_it["flops"]
        assert of_teacher == (times - 1) * 100 * dense.flops(10)
    with torch.device("meta"):
        writes = replace(plan, model=tiny("gpt2", auto=AutoModelForCausalLM))
    of_vocabulary = estimate(RecoverConfig(epochs=3), writes, writes, rows)["flops"] - with_it["flops"]
    assert of_vocabulary == (2 * 3 - 1) * 100 * dense.flops(10), "scores of a vocabulary are not stored either"
    hidden = RecoverConfig(texts="texts.txt", steps=10, distill="hidden")
    assert estimate(hidden, plan, plan, learned)["flops"] - taught["flops"] == (10 * 32 - 400) * dense.flops(10), "labels alone"
    unpruned = replace(plan, shape=dense, tuned=None)
    assert estimate(RecoverConfig(epochs=3), unpruned, unpruned, rows)["flops"] == (2 * 300 + 50 + 100) * dense.flops(10)


@pytest.mark.slow
def test_other_cuts_of_the_same_model_share_it(made, monkeypatch):
    """Trained once in a store; again where it learns otherwise, or is asked for by force."""
    counted, train = [], control._train
    monkeypatch.setattr(control, "_train", lambda *arguments: counted.append(1) or train(*arguments))
    fast = {**FAST, "learning_rate": 0.015}
    deeper = {"prune": {"structure": "neurons", "criterion": "random", "remove": 5}}
    first, second = (made(TUNE, cut, {"recover": fast})["recover"] for cut in (PRUNE, deeper))
    assert len(counted) == 1 and trained(first) != trained(second)
    assert first.metadata["control"] == second.metadata["control"]
    assert trained(first, "control/") == trained(second, "control/") != [None, None, None]
    made(TUNE, PRUNE, {"recover": {**fast, "epochs": 2}})
    assert len(counted) == 2
    made(TUNE, PRUNE, {"recover": fast}, force=["recover"])
    assert len(counted) == 3
