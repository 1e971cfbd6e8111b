"""A main metric of generated texts: what is kept, recorded, scored, swept and reported by it, in its own direction."""

import json

import pytest
import yaml

from compressor.errors import UserErrors
from compressor.tasks import TaskConfig
from compressor.tasks.decoding.decode_config import DecodeConfig
from compressor.tasks.decoding.prompt_items import PromptItem
from compressor.tasks.decoding.text_quality import read_statistics, score_texts
from compressor.tasks.task_kind import kind_of
from compressor.training.keep_best import KeepBest
from pipelines.engine.runner import run_pipeline
from pipelines.engine.scorers import scored_by
from pipelines.engine.stage import TEXTS, Artifact
from pipelines.file.config import load_pipeline
from pipelines.reporting.generated import difference_in_words, scores_of
from pipelines.runs.verify import verify
from pipelines.stages.generated_texts import with_scores
from pipelines.sweeps.pareto import figures_of
from pipelines.sweeps.sweep_summary import Spread, SweepResult
from pipelines.sweeps.trial_run import END, SCORE, TrialJob, perform
from tests.tiny import write_pipeline

FAST = {"method": "lora", "rank": 4, "modules": "all", "learning_rate": 0.02, "batch_size": 8}
STAGES = [
    {"tune": {**FAST, "epochs": 4, "keep_best": True, "evaluate_every": 8}},
    {"prune": {"structure": "neurons", "criterion": "random", "remove": 0.5}},
    {"recover": {**FAST, "epochs": 1}},
    {"merge": None},
    {"report": None},
]
DECODE = {"max_new_tokens": 6, "metrics": ["bleu", "ter"], "rows": 9}


def pipeline_of(folder, *, kind="text2text", model_type="t5", stages=STAGES, rows=8, **task):
    """A project whose main metric is of texts, with a file that is only scored."""
    path = write_pipeline(folder, kind=kind, model_type=model_type, stages=stages, rows=rows)
    pipeline = yaml.safe_load(path.read_text())
    pipeline["task"] |= {"decode": DECODE, "test": pipeline["task"]["validation"], **task}
    path.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("project")
    return run_pipeline(load_pipeline(pipeline_of(folder, rows=64, metric="ter")), folder / "runs")


@pytest.mark.slow
def test_every_model_is_measured_by_it(run):
    for stage in ("tune", "prune", "recover", "merge"):
        made = run.artifacts[stage]
        quality, generated = made.metadata["quality"], made.metadata["generated"]
        assert quality["rows"] == 9 == generated["prompts"]
        assert quality["ter"] == generated["values"]["ter"] and quality["interval"] == generated["intervals"]["ter"]
        assert 0 < quality["likelihood"] < 1 and quality["bleu"] == generated["values"]["bleu"]
        assert len(read_statistics(made.folder / "generated.jsonl")["ter"]) == 9
        if stage != "prune":
            assert made.metadata["tests"]["test"] == quality, "the same rows"
    control = run.artifacts["recover"].metadata["control"]["quality"]
    low, high = control["interval"]
    assert low <= control["ter"] <= high and control["rows"] == 9


@pytest.mark.slow
def test_the_smallest_error_rate_is_kept(run):
    tune = run.artifacts["tune"].metadata
    values = [evaluation["value"] for evaluation in tune["evaluations"]]
    assert len(set(values)) > 1 and tune["quality"]["ter"] == min(values)
    assert tune["kept_step"] == tune["evaluations"][values.index(min(values))]["step"]


@pytest.mark.slow
def test_the_report_is_of_it(run):
    report = json.loads((run.folder / "report.json").read_text())
    ours, theirs = (100 * run.artifacts[name].metadata["quality"]["ter"] for name in ("merge", "tune"))
    assert f"TER {ours:.1f} against {theirs:.1f} dense, " in report["headline"]
    assert report["headline"].endswith(" on 9 prompts") and report["summary"][0]["metric"] == "TER (95 % interval)"
    (score,) = [row for row in report["generated"]["scores"] if (row["stage"], row["metric"]) == ("merge", "ter")]
    low, high = score["change_interval"]
    words = "worse than dense" if low > 0 else "better than dense" if high < 0 else "not distinguishable from dense"
    assert words in report["headline"] and report["summary"][0]["change"].endswith(words)
    assert report["metric"]["outputs"]["title"] == "likelihood of a token"
    page = (run.folder / "report.md").read_text()
    assert "| TER |" in page and "likelihood of a token" in page
    assert [check.fault for check in verify(run.folder, serve=False) if not check.passed] == []


@pytest.mark.slow
def test_a_sweep_takes_it_as_its_score(run, tmp_path):
    pipeline, expected = load_pipeline(run.folder.parents[1] / "pipeline.yaml"), run.artifacts["merge"].metadata["quality"]
    for stages, first in (((END,), SCORE), (("tune", "merge"), "ter")):
        outcome = perform(TrialJob("one", pipeline, run.folder.parent, "merge", stages), None)
        assert outcome.error is None and outcome.falls and all(reused for _, _, reused in outcome.stages)
        quality = outcome.quality[stages[-1]]
        assert next(iter(quality)) == first and quality[first] == expected["ter"]


def test_another_version_of_what_scores_texts_is_another_score(monkeypatch):
    task = {"train": "t.jsonl", "validation": "v.jsonl", "kind": "generation"}
    decode = {"metrics": ["exact_match", "rouge_l", "bleu"], "answer": "number"}
    found = scored_by([TaskConfig(**task, decode=decode), TaskConfig(**task, decode={"metrics": ["bleu"]})])
    assert set(found) == {"sacrebleu", "rouge_score", "number", "rouge_tokens"}
    assert found["rouge_score"].startswith("rouge_score ")
    assert scored_by([TaskConfig(**task)]) == {}
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    assert scored_by([TaskConfig(**task, decode=decode)]) != found


def test_it_has_the_interval_and_the_number_of_prompts():
    quality = {"likelihood": 0.2, "interval": [0.1, 0.3], "accuracy": 0.5, "rows": 40}
    record = {"values": {"bleu": 0.7, "ter": 0.4}, "intervals": {"bleu": [0.6, 0.8], "ter": [0.3, 0.5]}, "prompts": 9}
    chosen = kind_of("generation").with_metric("ter")
    assert (chosen.metric.falls, chosen.output_metric.key, chosen.gate.key) == (True, "likelihood", "log_likelihood")
    assert with_scores(quality, record, chosen.metric) == {
        **{"ter": 0.4, "interval": [0.3, 0.5], "rows": 9},
        **{"bleu": 0.7, "likelihood": 0.2, "accuracy": 0.5},
    }
    beside = with_scores(quality, record, kind_of("text2text").metric)
    assert beside == {**quality, "bleu": 0.7, "ter": 0.4}, "as before there was a choice"


def test_a_change_is_that_from_dense_and_judged_in_the_metrics_own_direction(tmp_path):
    """Texts that are all wrong: more edits, fewer n-grams."""
    decode, stages = DecodeConfig(metrics=["bleu", "ter"]), []
    items = [PromptItem(f"p{row}", ("the dog bit the man",), row) for row in range(8)]
    for name, said in (("tune", "the dog bit the man"), ("merge", "one bit of the plot")):
        scored, folder = score_texts(items, [said] * len(items), decode), tmp_path / name
        folder.mkdir()
        scored.write(folder / TEXTS)
        stages.append(Artifact(folder, name, "model", name, name, {}, {"generated": scored.record}))
    dense, merged = stages
    rows = {row["metric"]: row for row in scores_of(merged, dense, decode.metrics)}
    for metric, values in merged.metadata["generated"]["values"].items():
        assert rows[metric]["change"] == pytest.approx(values - dense.metadata["generated"]["values"][metric])
    assert rows["ter"]["change"] > 0 > rows["bleu"]["change"]
    assert {difference_in_words(row) for row in rows.values()} == {"worse than dense"}


@pytest.mark.parametrize(("falls", "best"), [(True, 2), (False, 1)])
def test_what_is_best_depends_on_the_direction(falls, best):
    keeper = KeepBest(float, 1, falls=falls)
    keeper.evaluations = [{"step": step, "value": value} for step, value in enumerate((float("nan"), 0.9, 0.3, 0.3))]
    assert keeper.best == best


def test_the_front_of_a_metric_that_falls_is_below():
    spreads = [Spread(END, SCORE, (name,), 1, value, 0.0, value, value, (value,)) for name, value in (("a", 0.5), ("b", 0.4))]
    costs = {"bytes": {("a",): 1.0, ("b",): 2.0}}
    for falls, front in ((True, ["a", "b"]), (False, ["a"])):
        mains, falling = dict.fromkeys(costs["bytes"], SCORE), frozenset(costs["bytes"] if falls else [])
        (figure,) = figures_of(SweepResult(None, ("x",), spreads, [], costs, mains=mains, falling=falling))
        assert figure.data[0]["text"] == front and f"left and {'low' if falls else 'high'} is good" in figure.caption


def test_columns_of_a_table_have_a_front_each():
    """The quality of one task beats that of no other."""
    scores = {("lora", "sst2"): 0.80, ("lora", "stsb"): 0.85, ("vera", "sst2"): 0.79, ("vera", "stsb"): 0.70}
    spreads = [Spread(END, SCORE, setting, 1, value, 0.0, value, value, (value,)) for setting, value in scores.items()]
    costs = {"bytes": {setting: 100.0 if setting[0] == "lora" else 10.0 for setting in scores}}
    same = dict.fromkeys(scores, SCORE)
    one, other = figures_of(SweepResult(None, ("method", "task"), spreads, [], costs, mains=same, tasks=(1,)))
    assert one.data[0]["text"] == ["vera, sst2", "lora, sst2"] and one.title == "Quality against bytes: sst2"
    assert other.data[0]["text"] == ["vera, stsb", "lora, stsb"] and other.title.endswith("stsb")
    (together,) = figures_of(SweepResult(None, ("method", "task"), spreads, [], costs, mains=same))
    assert together.data[0]["text"] == ["vera, sst2", "lora, stsb"]


def test_columns_with_another_metric_have_a_front_too():
    """One that falls, and one that rises; before, only columns of the first trial's metric had a plot, all in its direction."""
    scores = {("lora", "sst2"): 0.80, ("lora", "e2e"): 0.5, ("vera", "sst2"): 0.79, ("vera", "e2e"): 0.4}
    metric = {"sst2": "accuracy", "e2e": "ter"}
    spreads = [Spread(END, metric[key[1]], key, 1, value, 0.0, value, value, (value,)) for key, value in scores.items()]
    costs = {"bytes": {setting: 100.0 if setting[0] == "lora" else 10.0 for setting in scores}}
    mains = {setting: metric[setting[1]] for setting in scores}
    falls = frozenset(setting for setting in mains if setting[1] == "e2e")
    result = SweepResult(None, ("method", "task"), spreads, [], costs, mains=mains, falling=falls, tasks=(1,))
    rising, falling = figures_of(result)
    assert rising.data[0]["text"] == ["vera, sst2", "lora, sst2"] and "left and high is good" in rising.caption
    assert falling.data[0]["text"] == ["vera, e2e"] and "left and low is good" in falling.caption
    assert rising.title.endswith("sst2") and falling.title.endswith("e2e")


@pytest.mark.parametrize(
    ("task", "stages", "says"),
    [
        (
            {"metric": "chrf"},
            STAGES,
            "E119 .*task.metric: the metric chrf is of generated texts, and decode does not",
        ),
        ({"metric": "bleu", "decode": None}, STAGES, r"E119 .*Add it to metrics of decode: \{metrics: \[bleu\]\}"),
        (
            {"metric": "bleu", "kind": "generation"},
            [STAGES[0], {"merge": None}, {"export": None}, {"benchmark": None}],
            r"E243 .*stages.3.*the main metric bleu is of generated texts",
        ),
    ],
)
def test_what_cannot_be_is_told_at_once(task, stages, says, tmp_path):
    keys = {"kind": "generation", "model_type": "gpt2"} if "kind" in task else {}
    path = pipeline_of(tmp_path, stages=stages, **{**task, **keys})
    with pytest.raises(UserErrors, match=says):
        load_pipeline(path)
