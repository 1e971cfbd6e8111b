"""Recovery on texts without labels and from another teacher, in whole pipelines on tiny models."""

import hashlib
import json
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import save
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from compressor.errors import UserError
from compressor.tasks import TaskConfig
from compressor.tasks.data import TokenRows
from compressor.tasks.texts import read_texts
from pipelines.check.checkup import account_of, lines_of
from pipelines.check.estimate import files_of
from pipelines.engine.preflight import check_inputs, check_tokens, make_plan
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import Inputs
from pipelines.file.config import load_pipeline
from pipelines.reporting.words import teacher_note
from pipelines.stages.recover import control, lessons
from tests.pipelines.toys import tree
from tests.tiny import FILLER, GOOD, sentence, write_model, write_pipeline

FAST = {"learning_rate": 0.02, "batch_size": 8}
TUNE = {"tune": {"method": "lora", "rank": 2, "epochs": 1, **FAST}}
PRUNE = {"prune": [{"structure": name, "criterion": "random", "remove": 1} for name in ("heads", "layers")]}
TEXTS = {"recover": {"method": "full", "texts": "texts.txt", **FAST}}


def write_texts(path: Path, rows: int = 40) -> Path:
    """New sentences, each twice, and one of the training file's."""
    draw = random.Random(1)
    train = (path.parent / "train.tsv").read_text().splitlines()[1].split("\t")[0]
    new = [f"{sentence(row % 2, draw)} {' '.join(draw.choices(FILLER, k=6))}" for row in range(rows)]
    path.write_text("\n".join([train, "", *new, *new]) + "\n")
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """One folder of runs: every project below has the same model and data, so its tune and its prune are made once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def project(tmp_path):
    path = write_pipeline(tmp_path, stages=[TUNE, PRUNE, TEXTS], rows=40)
    write_texts(tmp_path / "texts.txt")
    return path


@pytest.fixture
def go(store):
    """Run a pipeline file with overrides; returns the artifact of its recover."""
    return lambda path, *overrides: run_pipeline(load_pipeline(path, overrides), store).artifacts["recover"]


def test_it_learns_from_the_texts(go, project, store):
    """The new ones and the training rows, each once; the control learns the labels of the training rows, twice."""
    made, plan = go(project), run_pipeline(load_pipeline(project), store, dry_run=True).plan
    assert made.metadata["texts"] == {"file": "texts.txt", "rows": 40, "labelled": 40}
    assert "teacher" not in made.metadata and made.metadata["control"]["learned"] == "labels"
    assert teacher_note("recover", made.metadata) == (
        "recover learned the outputs of the dense model on 40 texts without labels (texts.txt) and on the 40 training rows, "
        "and no labels. Its control, to which its own outputs teach nothing, learned the labels of the training rows instead, "
        "in at most 3 passes."
    )
    assert made.metadata["losses"][-1]["step"] == made.metadata["control"]["losses"][-1]["step"] == 80 / 8
    # the token embeddings are not trained, as `--dry-run` says; those of the control are
    assert plan.trainable[-1] == ("recover", made.metadata["trainable"]["body"])
    # a distance from the teacher, without a cross-entropy of labels
    assert made.metadata["losses"][0]["loss"] < 0.3 < made.metadata["control"]["losses"][0]["loss"]


@pytest.mark.parametrize("between", [[], [{"recover": {"id": "first", "method": "lora", "rank": 2}}]])
def test_same_is_counted_as_what_it_continues(project, between):
    """After full tuning every weight but the token embeddings, if texts are learned; after a LoRA on that its factors alone."""
    stages = [{"tune": {"method": "full"}}, PRUNE, *between, {"recover": {"texts": "texts.txt"}}]
    path = write_pipeline(project.parent, stages=stages, rows=40)
    named = ["recover.method=lora", "recover.rank=2"] if between else ["recover.method=full"]
    same, other = (make_plan(check_inputs(load_pipeline(path, options))).trainable[-1] for options in ([], named))
    assert same == other


@pytest.mark.parametrize("first", ["labels", pytest.param("texts", marks=pytest.mark.slow)])
def test_a_control_that_two_recoveries_share_is_told_by_what_each_learns(project, tmp_path, monkeypatch, first):
    """On labels it is trained as the recovered model, beside texts it is not: whichever ran first in the store."""
    counted, train = [], control._train
    monkeypatch.setattr(control, "_train", lambda *given: counted.append(1) or train(*given))
    of_labels = ["recover.texts=null", "recover.distill=false", "recover.epochs=2"]
    overrides = {"labels": of_labels, "texts": []}
    made = {
        name: run_pipeline(load_pipeline(project, ["recover.learning_rate=5e-5", *overrides[name]]), tmp_path / "out")
        for name in sorted(overrides, key=lambda name: name != first)
    }
    controls = {name: run.artifacts["recover"].metadata["control"] for name, run in made.items()}
    assert counted == [1] and controls["texts"] == {**controls["labels"], "learned": "labels"} != controls["labels"]


@pytest.mark.slow
def test_a_recovery_behind_one_on_texts_has_a_control_on_labels(project, tmp_path):
    """The control of the second learns what its recovery does, but goes on from one that learned labels further."""
    second = {"recover": {"id": "again", "method": "full", **FAST}}
    path = write_pipeline(project.parent, stages=[TUNE, PRUNE, TEXTS, second, {"report": None}], rows=40)
    run = run_pipeline(load_pipeline(path, ["recover.steps=3", "again.steps=3"]), tmp_path / "out")
    assert "learned" not in run.artifacts["again"].metadata["control"]
    report = json.loads((run.folder / "report.json").read_text())
    assert "of the control (dense, trained further on the labels) on " in report["headline"]
    assert not any("trained as long" in told for told in [report["headline"], *report["notes"]])


@pytest.mark.parametrize(
    ("distill", "learned"), [("logits", "outputs"), ("hidden", "hidden states"), ("both", "outputs and hidden states")]
)
def test_the_note_says_what_of_the_teacher_was_learned(distill, learned):
    recovery = {"distill": distill, "texts": {"rows": 0, "labelled": 40, "variants": 9}}
    assert teacher_note("recover", recovery).startswith(f"recover learned the {learned} of the dense model on the 40 training")


@pytest.mark.slow
def test_the_teacher_is_asked_once_for_all_runs_of_a_store(go, project, monkeypatch):
    write_texts(project.parent / "texts.txt", rows=30)
    asked, predict = [], lessons.predict
    monkeypatch.setattr(lessons, "predict", lambda *given, **options: asked.append(1) or predict(*given, **options))
    first, second = go(project), go(project, "recover.learning_rate=0.01", "recover.control=false")
    assert first.id != second.id and len(asked) == 1
    assert not go(project, "recover.texts=null", "recover.control=false").metadata.get("texts") and len(asked) == 2


def test_the_outputs_of_a_teacher_are_kept_by_all_that_decides_them(monkeypatch):
    """Where it predicts, not what the labels are there."""
    names, predicted, elsewhere = [], np.array([[1, -100]]), np.array([[-100, 1]])
    monkeypatch.setattr(lessons, "once", lambda name, *_, **__: names.append(name) or save({"logits": np.zeros(1)}))

    def ask(labels=predicted, teacher="a", pad_id=0, batch_size=8, threads=1):
        rows, inputs = TokenRows([[5, 6]], labels, None), Inputs(base=None, task=None, seed=0, threads=threads)
        lessons.stored_logits(None, teacher, rows, pad_id, batch_size, inputs, None)

    ask()
    for changed in ({"labels": elsewhere}, {"teacher": "b"}, {"pad_id": 1}, {"batch_size": 4}, {"threads": 2}):
        ask(**changed)
    for name in ("distribution", "accelerator"):
        with monkeypatch.context() as patch:
            patch.setattr(lessons, name, lambda *_: "another")
            ask()
    assert len({*names}) == 8
    ask(labels=2 * predicted)
    assert names[-1] == names[0]


@pytest.mark.parametrize("labels", [np.array([0, 1, 0]), np.array([[1, -100], [2, 0], [-100, 3]])])
def test_the_name_of_a_teachers_outputs_is_the_one_of_earlier_versions(monkeypatch, labels):
    """Rows are digested one after the other, as the text that all of them make."""
    facts, tokens = [], [{"input_ids": [5, 6], "attention_mask": [1, 1]} for _ in range(3)]
    monkeypatch.setattr(lessons, "fingerprint", lambda given: facts.append(given) or "a")
    monkeypatch.setattr(lessons, "once", lambda *_, **__: save({"logits": np.zeros(1)}))
    inputs = Inputs(base=None, task=None, seed=0, threads=1)
    lessons.stored_logits(None, "a", TokenRows(tokens, labels, None), 0, 8, inputs, None)
    text = json.dumps([tokens, [] if labels.ndim == 1 else [[0], [0, 1], [1]]])
    assert facts[0]["rows"] == hashlib.sha256(text.encode()).hexdigest()


def test_rows_are_digested_without_the_text_of_all():
    rows = [({"input_ids": [*range(1000, 1020)]}, "é"), [], {"a": [[1], []]}, [[0.5, None], (True,)]] * 2000
    value = [[(rows, [1, 0]), (rows[:1], [])], {"query": [3]}]
    text = json.dumps(value).encode()
    tracemalloc.start()
    made = lessons.json_sha256(value)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made == hashlib.sha256(text).hexdigest() and peak < len(text) / 10


def test_the_file_counts_by_its_content(go, project, monkeypatch):
    folder, first = project.parent, go(project, "recover.control=false")
    monkeypatch.chdir(folder)
    (folder / "texts.txt").rename(folder / "other.txt")
    # a path of the command line is relative to the current folder
    assert go(project, "recover.control=false", "recover.texts=other.txt").id == first.id
    write_texts(folder / "texts.txt", rows=41)
    assert go(project, "recover.control=false").id != first.id


def test_a_report_has_the_names_that_the_pipeline_has_now(project, store):
    """The recovery is kept, with the names in it that the file and the teacher had."""
    folder, content = project.parent, yaml.safe_load(project.read_text())
    content["stages"] += [{"report": None}]
    for name in ("texts.txt", "other.txt"):
        content["stages"][2]["recover"] = TEXTS["recover"] | {"texts": name, "control": False}
        project.write_text(yaml.safe_dump(content, sort_keys=False))
        if name == "other.txt":
            (folder / "texts.txt").rename(folder / name)
        made = run_pipeline(load_pipeline(project), store)
        notes = json.loads((made.folder / "report.json").read_text())["notes"]
        assert [note for note in notes if f"on 40 texts without labels ({name})" in note]
    assert "recover" in made.reused and made.artifacts["recover"].metadata["texts"]["file"] == "texts.txt"
    told = teacher_note("recover", {"teacher": {"reference": "./old"}}, teacher="./new")
    assert told == "recover was distilled from the model ./new, not from the dense one."


def test_a_file_that_changes_while_it_is_read(go, project, store, monkeypatch):
    """Nothing is kept of it, the teacher's outputs included."""
    write_texts(project.parent / "texts.txt", rows=20)
    drawn, before = lessons.drawn_texts, tree(store / ".store" / ".cache")

    def changed(*given):
        texts = drawn(*given)
        write_texts(project.parent / "texts.txt", rows=41)
        return texts

    monkeypatch.setattr(lessons, "drawn_texts", changed)
    with pytest.raises(UserError, match=r"E807 .*texts.txt: changed while"):
        go(project)
    assert tree(store / ".store" / ".cache") == before


def test_of_more_texts_than_steps_take_a_sample_is_used(go, project):
    made = go(project, "recover.steps=2", "recover.accumulate=2", "recover.control=false")
    assert made.metadata["texts"]["rows"] == 32 and made.metadata["losses"][-1]["step"] == 2


@pytest.mark.slow
def test_the_control_learns_labels_at_no_higher_rate_than_is_usual(go, project):
    """A rate that suits an imitation would spoil the tuned model, and every pruned one would look good beside it."""
    rates = {"high": 0.02, "usual": 1e-4, "low": 1e-5}
    losses = {
        name: go(project, f"recover.learning_rate={rate}", "recover.steps=3").metadata["control"]["losses"]
        for name, rate in rates.items()
    }
    assert losses["high"] == losses["usual"] != losses["low"]


def test_variants_are_learned_beside_texts_and_training_rows(go, project):
    made = go(project, "recover.augment=2", "recover.control=false")
    texts = made.metadata["texts"]
    assert (texts["rows"], texts["labelled"]) == (40, 40) and 150 < texts["variants"] <= 160
    assert teacher_note("recover", made.metadata) == (
        "recover learned the outputs of the dense model on 40 texts without labels (texts.txt) and on the 40 training rows and "
        f"on {texts['variants']} random variants of these texts, and no labels."
    )
    assert made.metadata["losses"][-1]["step"] == -(-(80 + texts["variants"]) // 8)


def test_without_a_file_variants_of_the_training_rows_are_the_texts(go, project):
    """The control learns labels, as with a file: of its own outputs it could learn nothing."""
    made = go(project, "recover.texts=null", "recover.augment=3", "recover.steps=10")
    texts = made.metadata["texts"]
    assert texts == {"rows": 0, "labelled": 40, "variants": 80}, "as many as ten steps of 8 take"
    assert made.metadata["control"]["learned"] == "labels"
    assert "model on the 40 training rows and on 80 random variants" in teacher_note("recover", made.metadata)


def test_without_any_new_variant_labels_are_not_learned_instead(go, project, monkeypatch):
    monkeypatch.setattr(lessons, "variants", lambda *_: iter(()))
    with pytest.raises(UserError, match=r"E204 .*train.tsv: no random variant of a training row is a new text"):
        go(project, "recover.texts=null", "recover.augment=1", "recover.steps=9")


def test_check_counts_them(project):
    ready = check_inputs(load_pipeline(project))
    account = account_of(ready)
    facts = account["files"]["recover.texts"]
    assert (facts["rows"], facts["left_out"]) == (40, 41)
    assert "recover.texts    40 texts without labels; 41 more are in the task's files or repeated" in [
        *lines_of({**account, "needs": {"told": {}}})
    ]


@pytest.mark.parametrize(
    ("overrides", "told"), [([], "240 random variants of the training rows and texts"), (["recover.texts=null"], "120 random")]
)
def test_check_tells_the_variants(project, overrides, told):
    ready = check_inputs(load_pipeline(project, ["recover.augment=3", *overrides]))
    account = account_of(ready)
    assert files_of(ready.pipeline.stages[-1], account)["augment"]["rows"] == int(told.split()[0]), "its estimate counts them"
    lines = [*lines_of({**account, "needs": {"told": {}}})]
    assert any(line.startswith(f"recover.augment  up to {told}") for line in lines), lines


def test_a_text_that_is_scored_is_not_learnt(project):
    scored = (project.parent / "texts.txt").read_text().splitlines()[2]
    (project.parent / "scored.tsv").write_text(f"sentence\tlabel\n {scored.replace(' ', '  ')} \tclass0\n")
    account = account_of(check_inputs(load_pipeline(project, [f"task.test={project.parent / 'scored.tsv'}"])))
    assert (account["files"]["recover.texts"]["rows"], account["files"]["recover.texts"]["left_out"]) == (39, 42)


def read_as(normalizer, project: Path) -> None:
    """Have the base's tokenizer normalize texts by this."""
    file = project.parent / "model" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.normalizer = normalizer
    tokenizer.save(str(file))


def drawn(project: Path, *overrides: str) -> list[str]:
    """The texts of its recovery."""
    ready = check_inputs(load_pipeline(project, overrides))
    texts, _ = lessons.drawn_texts(ready.pipeline.stages[-1].config, Inputs(ready.base, ready.pipeline.task, seed=0))
    return [text for (text,) in texts.texts]


@pytest.mark.parametrize(
    ("normalizer", "rows"), [(normalizers.NFC(), 40), (normalizers.Lowercase(), 39), (normalizers.BertNormalizer(), 39)]
)
def test_a_text_that_an_uncased_model_reads_as_a_scored_one_is_not_learnt(project, normalizer, rows):
    """A cased one reads another text."""
    scored, file = (project.parent / "texts.txt").read_text().splitlines()[2], project.parent / "scored.tsv"
    file.write_text(f"sentence\tlabel\n {scored.upper()} \tclass0\n")
    read_as(normalizer, project)
    facts = account_of(check_inputs(load_pipeline(project, [f"task.test={file}"])))["files"]["recover.texts"]
    assert (facts["rows"], facts["left_out"]) == (rows, 81 - rows)
    assert len(drawn(project, f"task.test={file}")) == rows


def test_a_variant_that_an_uncased_model_reads_as_a_scored_text_is_not_learnt(project):
    keys, file = ["recover.texts=null", "recover.augment=1"], project.parent / "scored.tsv"
    made = drawn(project, *keys)
    file.write_text("sentence\tlabel\n" + "".join(f"{text.upper()}\tclass0\n" for text in made))
    assert drawn(project, f"task.test={file}", *keys) == made
    read_as(normalizers.Lowercase(), project)
    assert not {*drawn(project, f"task.test={file}", "recover.texts=null", "recover.augment=2")} & {*made}


def test_texts_that_an_uncased_model_reads_as_the_tasks_are_refused_before_a_run(project):
    rows = (project.parent / "train.tsv").read_text().splitlines()[1:]
    (project.parent / "texts.txt").write_text("".join(f"{row.split(chr(9))[0].upper()}\n" for row in rows))
    check_tokens(check_inputs(load_pipeline(project)))
    read_as(normalizers.Lowercase(), project)
    with pytest.raises(UserError, match=r"E204 .*texts.txt: every text is in a file of the task.*recover.texts"):
        check_tokens(check_inputs(load_pipeline(project)))


def of_tags(folder: Path) -> str:
    (folder / "texts.txt").write_text("the film was good fine\nthe plot was bad\n")
    return "texts.txt"


def of_pairs(folder: Path) -> str:
    rows = [{"first": f"the {word} film", "second": "a story"} for word in GOOD]
    (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return "texts.jsonl"


@pytest.mark.parametrize(
    ("kind", "write", "rows", "distill"), [("tokens", of_tags, 2, "logits"), ("regression", of_pairs, 4, "both")]
)
def test_other_kinds_of_tasks(go, tmp_path, kind, write, rows, distill):
    file = write(tmp_path)
    recover = {"recover": {"texts": file, "distill": distill, "control": False, "steps": 4, **FAST}}
    made = go(write_pipeline(tmp_path, stages=[TUNE, PRUNE, recover], kind=kind, rows=24))
    assert made.metadata["texts"] == {"file": file, "rows": rows, "labelled": 24}


@pytest.mark.parametrize(("kind", "distill"), [("regression", "both"), ("multilabel", "logits"), ("classification", "hidden")])
def test_variants_for_other_kinds_of_tasks(go, tmp_path, kind, distill):
    recover = {"recover": {"augment": 1, "distill": distill, "control": False, "steps": 4, **FAST}}
    made = go(write_pipeline(tmp_path, stages=[TUNE, PRUNE, recover], kind=kind, rows=24))
    assert 16 < made.metadata["texts"]["variants"] <= 24


LABELS = {"id2label": {0: "class0", 1: "class1"}, "label2id": {"class0": 0, "class1": 1}}


def write_teacher(folder: Path, **keys) -> Path:
    """A larger model of another architecture, whose tokenizer has no token types."""
    return write_model(folder, "distilbert", auto="AutoModelForSequenceClassification", hidden_size=64, **(LABELS | keys))


@pytest.mark.slow
def test_another_model_teaches_with_its_own_tokenizer(go, project):
    """The control has that teacher, too, on all rows."""
    write_teacher(project.parent / "teacher", max_position_embeddings=10)
    made = go(project, f"recover.teacher={project.parent / 'teacher'}", "recover.steps=10")
    assert made.metadata["teacher"]["reference"] == str(project.parent / "teacher")
    assert "learned" not in made.metadata["control"]
    varied = go(project, f"recover.teacher={project.parent / 'teacher'}", "recover.steps=10", "recover.augment=1")
    assert varied.metadata["texts"]["variants"] == 40 and "learned" not in varied.metadata["control"]
    again = go(project, f"recover.teacher={project.parent / 'teacher'}", "recover.steps=10", "recover.texts=null")
    assert teacher_note("recover", again.metadata).endswith("/teacher, not from the dense one.")
    assert "texts" not in again.metadata and again.metadata["losses"] != made.metadata["losses"]
    assert made.metadata["control"]["losses"][0]["loss"] < again.metadata["control"]["losses"][0]["loss"]


@pytest.mark.slow
def test_the_merged_model_of_a_run_teaches(go, project, store):
    """Named by the folder of its run, wherever its artifact lies."""
    path = write_pipeline(project.parent / "larger", stages=[TUNE, {"merge": None}], rows=40)
    merged = run_pipeline(load_pipeline(path, ["name=larger"]), store).artifacts["merge"]
    by_run = go(project, f"recover.teacher={store / 'larger'}", "recover.steps=10")
    assert by_run.metadata["teacher"]["reference"] == str(store / "larger")
    assert go(project, f"recover.teacher={merged.folder}", "recover.steps=10").folder == by_run.folder


def test_a_teacher_of_other_labels_is_refused(project):
    write_teacher(project.parent / "teacher", id2label={0: "class1", 1: "class0"}, label2id={"class1": 0, "class0": 1})
    pipeline = load_pipeline(project, [f"recover.teacher={project.parent / 'teacher'}"])
    with pytest.raises(UserError, match=r"E410 .*stages\[2\].recover.*no trained task head for the labels class0, class1"):
        run_pipeline(pipeline, project.parent / "out")
    assert not (project.parent / "out").exists()


def test_a_teacher_of_answers_must_have_the_models_tokens(tmp_path):
    """Its outputs are one for each token of a context: cut otherwise they would be taken for those of other tokens."""
    labels = {"id2label": {0: "start", 1: "end"}, "label2id": {"start": 0, "end": 1}}
    teacher = write_model(tmp_path / "teacher", "distilbert", auto="AutoModelForTokenClassification", **labels)
    stages = [TUNE, PRUNE, {"recover": {"teacher": "./teacher", **FAST}}]
    pipeline = load_pipeline(write_pipeline(tmp_path, stages=stages, kind="spans", rows=24))
    check_tokens(check_inputs(pipeline))
    tokenizer = Tokenizer.from_file(str(teacher / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Split("o", "isolated")])
    tokenizer.save(str(teacher / "tokenizer.json"))
    with pytest.raises(UserError, match=r"E410 .*the teacher '\./teacher' has other tokens than the model"):
        check_tokens(check_inputs(pipeline))


def test_a_word_too_many_for_a_tagger_is_found_before_a_run(tmp_path):
    (tmp_path / "texts.txt").write_text("the film was good\n" + "very " * 70 + "good\n")
    stages = [TUNE, PRUNE, {"recover": {"texts": "texts.txt", **FAST}}]
    pipeline = load_pipeline(write_pipeline(tmp_path, stages=stages, kind="tokens", rows=24))
    with pytest.raises(UserError, match=r"E213 .*texts.txt:2: 1 of 2 sentences .*\(.*recover.texts\)"):
        run_pipeline(pipeline, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_whose_mark_would_be_cut_is_found_before_a_run(tmp_path):
    row = {"text": "good " + "the film " * 20 + "story", "span1": "good", "span2": "story"}
    (tmp_path / "texts.jsonl").write_text(json.dumps(row) + "\n")
    stages = [TUNE, PRUNE, {"recover": {"texts": "texts.jsonl", **FAST}}]
    pipeline = load_pipeline(write_pipeline(tmp_path, stages=stages, kind="marked", rows=24))
    with pytest.raises(UserError, match=r"E213 .*texts.jsonl:1: max_length 32 cuts off a marked span.*recover.texts"):
        run_pipeline(pipeline, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_lines_of_text_are_no_pairs(tmp_path):
    (tmp_path / "texts.txt").write_text("the film\n")
    task = TaskConfig(train="t.tsv", validation="d.tsv", text=["first", "second"])
    with pytest.raises(UserError, match=r"E202 .*texts.txt: a .txt file has one text per line, a row of this task has 2"):
        read_texts(tmp_path / "texts.txt", task)
