"""Searches: which values are tried, what is recorded and resumed, what comes out, and every mistake before anything runs."""

import itertools
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from compressor.errors import UserError, UserErrors
from pipelines.file.config import load_pipeline
from pipelines.sweeps.proposals import RANDOM, Tried, propose
from pipelines.sweeps.search_ranges import Range, read_range
from pipelines.sweeps.search_summary import SearchScore, SearchSummary, search_figure, summarize_search
from pipelines.sweeps.search_trials import RECORD, SearchTrials, score_of
from pipelines.sweeps.sweep import _checked, sweep
from pipelines.sweeps.sweep_files import FILES
from pipelines.sweeps.sweep_trials import Search, SweepPlan, axes_of
from pipelines.sweeps.table_file import Grid
from pipelines.sweeps.trial_events import in_turn
from pipelines.sweeps.trial_run import TrialJob, TrialOutcome
from tests.pipelines import toys
from tests.pipelines.test_sweep_ray import needs_ray
from tests.tiny import write_pipeline

BEST = 23
OVER = ["tune.files=1..40", "prune.text=x,y"]
"""The toy's quality is best at so many files and the text y."""
TASK = {"train": "train.tsv", "validation": "dev.tsv", "text": "sentence"}


def toy(config, inputs, workspace):
    """A toy whose quality depends on what is searched."""
    metadata = toys.run(config, inputs, workspace)
    earlier = [one.metadata["files"] for one in inputs.artifacts if "files" in one.metadata]
    files = earlier[0] if earlier else config.files
    value = accuracy(files, config.text, inputs.seed)
    return {**metadata, "files": files, "quality": {"accuracy": value, "matthews": -value, "interval": [0.0, 1.0], "rows": 2}}


def accuracy(files, text, seed):
    return 0.9 - abs(files - BEST) / 100 + (text == "y") / 10 + seed / 1000


@pytest.fixture
def project(project, monkeypatch):
    for name in ("tune", "prune"):
        toys.replace(monkeypatch, name, run=toy)
    return project


def quick(job, console):
    """The same quality without a run; below 5 files a training fails while there is a file `fragile`."""
    if job.fault:
        return TrialOutcome(error=job.fault)
    configs = {entry.name: entry.config for entry in job.pipeline.stages}
    if configs["tune"].files < 5 and (job.out / "fragile").exists():
        return TrialOutcome(error=UserError("E501", "too much is removed", "Remove less", f"trial {job.name}"))
    value = accuracy(configs["tune"].files, configs["prune"].text, job.pipeline.seed)
    return TrialOutcome({"tune": {"accuracy": 0.5}, "prune": {"accuracy": value}}, main="accuracy")


def quickly(jobs, perform):
    """The engine of trials that are not run."""
    return in_turn(jobs, quick)


def go(project, out, trials=12, over=OVER, seeds=None, **options):
    plan = SweepPlan(axes_of(over, None), seeds=seeds, search=Search(trials))
    return sweep(project, plan, out, **{"say": lambda text: None, "engine": quickly, **options})


def made(out, stage):
    return len(list((out / ".store").glob(f"{stage}-*")))


def written(folder):
    return {name: (folder / name).read_bytes() for name in (*FILES, RECORD)}


@pytest.mark.parametrize(
    ("key", "text", "found"),
    [
        ("tune.rank", "4..64", Range(4, 64)),
        ("tune.rank", " 4 .. 64 : log ", Range(4, 64, True)),
        ("tune.learning_rate", "1e-4..1e-2", Range(1e-4, 1e-2, True)),
        ("tune.learning_rate", "1e-4..1e-2:linear", Range(1e-4, 1e-2)),
        ("prune.remove", "0.1...5", Range(0.1, 0.5)),
        ("tune.x", "-2..1.5", Range(-2, 1.5)),
        ("task.train", "../train.tsv", None),
        ("task.train", "a/../b.tsv,c/../d.tsv", None),
        ("tune.rank", "4,8", None),
    ],
)
def test_texts_that_are_ranges(key, text, found):
    assert read_range(key, text, "--over") == found
    assert found is None or found.whole == (key == "tune.rank")
    assert found is None or read_range(key.removesuffix("learning_rate"), str(found), "") == found, "as it is recorded"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("8..4", "E123 --over: the end of the range, 4, is not greater than its start, 8"),
        ("4..4", "E123 --over: the end of the range, 4, is not greater"),
        ("lora..dsee", "E123 --over: 'lora' is not a number. Write KEY=LOW..HIGH"),
        ("1..true", "E123 --over: 'true' is not a number"),
        ("1...inf", "E123 --over: '.inf' is not a number"),
        (f"1..{'9' * 400}", "E123 --over: '9999"),
        ("0..0.1:log", "E123 --over: a logarithmic range cannot start at 0. Start above 0, or write 0..0.1:linear"),
        ("-1..8:log", "E123 --over: a logarithmic range cannot start at -1"),
        ("1..8:lag", "E123 --over: a range cannot be ':lag'"),
        ("1e-300..1e300:log", "E123 --over: the range is wider than floating point numbers are"),
        ("-1e308..1e308", "E123 --over: the range is wider"),
        ("1.0..1.0000000001", "E123 --over: the ends of the range are almost equal"),
    ],
)
def test_ranges_without_values(text, says):
    with pytest.raises(UserError) as error:
        read_range("tune.rank", text, "--over")
    assert str(error.value).startswith(says)


def test_values_are_rounded_and_stay_inside():
    for found in (Range(1e-4, 1e-2, True), Range(1.0, 1.001, True), Range(0.0, 0.1), Range(1000.0, 1000.5), Range(0, 1e5)):
        shares = [step / 5000 for step in range(5001)]
        values = {found.rounded(found.low + share * (found.high - found.low)) for share in shares}
        assert len(values) > 500 and all(map(found.holds, values)), found
    assert Range(1e-4, 1e-2, True).rounded(0.00037849201) == 0.0003785
    assert [Range(1, 9).rounded(value) for value in (1, 9)] == [1, 9] and Range(1, 9).count == 9


def quality(values):
    return -abs(values["rank"] - 12) / 16 - abs(values["rate"] - 0.003) * 50 + (values["modules"] == ["query"]) / 4


SPACE = {"rank": Range(1, 16), "rate": Range(1e-4, 1e-2, True), "modules": [["query"], ["query", "value"], "all"]}


def searched(trials, seed, score=quality):
    history = []
    for _ in range(trials):
        values = propose(SPACE, seed, history)
        history.append(Tried(values, score(values)))
    return history


def test_proposals_are_learnt_from_results_and_repeatable():
    found = searched(30, 0)
    assert [tried.values for tried in searched(12, 0)] == [tried.values for tried in found[:12]]
    assert searched(2, 1)[0].values != found[0].values
    assert all(SPACE["rank"].holds(one.values["rank"]) and SPACE["rate"].holds(one.values["rate"]) for one in found)
    late = [one.score for one in found[RANDOM:]]
    assert sum(late) / len(late) > 0.2 + sum(one.score for one in found[:RANDOM]) / RANDOM
    failed = searched(RANDOM + 3, 0, lambda values: None)
    assert [one.values for one in failed[:RANDOM]] == [one.values for one in found[:RANDOM]], "failed ones are not learned from"


def test_of_a_metric_that_falls_the_least_is_sought_and_the_best():
    found = searched(14, 0)
    losses = [Tried(tried.values, -tried.score) for tried in found]
    assert propose(SPACE, 0, losses, falls=True) == propose(SPACE, 0, found) != propose(SPACE, 0, losses)
    scores = tuple(SearchScore(number, {}, (score,), score) for number, score in enumerate((0.4, 0.2, None, 0.3), start=1))
    assert [trial.number for trial in SearchSummary(scores, "ter", falls=True).ranked] == [2, 4, 1, 3]
    assert search_figure(SearchSummary(scores, "ter", falls=True)).data[1]["y"] == [0.4, 0.2, 0.2]


def test_running_trials_are_taken_into_account_without_a_result():
    history = searched(15, 0)
    running = [*history[:-1], Tried(history[-1].values, history[-1].score, pending=True)]
    unknown = [*history[:-1], Tried(history[-1].values, None, pending=True)]
    assert propose(SPACE, 0, running) == propose(SPACE, 0, unknown), "its result may be there, and must not count"


def test_every_setting_is_tried_once_if_there_are_no_more():
    axes, history = {"tune.rank": Range(1, 4), "tune.method": ["lora", "dsee"]}, []
    for _ in range(8):
        history.append(Tried(propose(axes, 0, history), 0.5))
    assert len({tuple(one.values.items()) for one in history}) == 8


def test_a_search_from_the_command_line(project, out, compress):
    options = [word for over in OVER for word in ("--over", over)]
    code, shown, error = compress("sweep", project, *options, "--search", 3, "--out", out)
    assert (code, error) == (0, "")
    folder, lines = out / "toy-sweep", shown.splitlines()
    content = json.loads((folder / "sweep.json").read_text())
    best = content["search"]["trials"][content["search"]["best"] - 1]
    assert best["score"] == max(trial["score"] for trial in content["search"]["trials"])
    settings = f"--set tune.files={best['values']['tune.files']} --set 'prune.text=\"{best['values']['prune.text']}\"'"
    assert lines[-2] == f"Run it alone: compress run {project} {settings} --out {out}" and len(content["trials"]) == 3
    assert f"Best of 3 trials: number {best['number']}, accuracy after prune {best['score']:.4f}." == lines[-3]
    assert content["over"] == {"tune.files": "1..40", "prune.text": ["x", "y"]} and content["comparisons"] == []
    assert next(line for line in lines if line.startswith("trial")).startswith("trial 1 of 3: 001_files-")
    text = (folder / "sweep.md").read_text()
    assert text.startswith("# toy: search of 3 trials, tune.files 1..40 × 2 values of prune.text\n\nBest of 3 trials")
    assert f"`compress run pipeline.yaml {settings}`" in text and "| trial | files | text | accuracy after prune |" in text
    assert '"search-plot"' in (folder / "sweep.html").read_text() and made(out, "select") == 1
    before, count = written(folder), made(out, "prune")
    assert compress("sweep", project, *options, "--search", 3, "--out", out)[0] == 0
    assert (written(folder), made(out, "prune")) == (before, count), "the same command makes nothing, and says the same"


class Cut(Exception):
    """The end of a process."""


def cut_after(trials):
    """An engine that ends after so many trials."""

    def engine(jobs, perform):
        events = quickly(jobs, perform)
        ended = itertools.count(1)
        for event in events:
            yield event
            if event.kind == "ended" and next(ended) == trials:
                raise Cut

    return engine


def test_a_search_that_was_cut_has_the_trials_of_an_undisturbed_one(project, out, tmp_path):
    whole = go(project, tmp_path / "whole", seeds=2)
    for runs in (5, 21):
        with pytest.raises(Cut):
            go(project, out, seeds=2, engine=cut_after(runs))
        assert not (out / "toy-sweep" / "sweep.json").exists()
    go(project, out, seeds=2)
    assert written(out / "toy-sweep") == written(whole.folder)
    best = whole.search.best
    assert best.score == sum(best.runs) / 2 and best.runs[1] - best.runs[0] == pytest.approx(0.001)
    more = go(project, out, trials=13, seeds=2)
    assert more.search.trials[:12] == whole.search.trials and len(more.search.trials) == 13


def test_several_runs_of_a_trial_are_called_runs(project, out):
    """Beside `Best of 2 trials`."""

    def disturbed(job, console):
        return replace(quick(job, console), unlearnt=("",), waited=0.9)

    said = []
    plan = SweepPlan(axes_of(OVER, None), seeds=2, search=Search(2))
    result = sweep(project, plan, out, say=said.append, engine=lambda jobs, perform: in_turn(jobs, disturbed))
    assert [note.partition(" (")[0] for note in result.notes] == [
        "4 of 4 runs are no better than a constant prediction",
        "4 of 4 runs were timed beside other work",
    ]
    assert [line.partition(":")[0] for line in said] == [f"run {number} of 4" for number in range(1, 5)]
    text = (result.folder / "sweep.md").read_text()
    assert "Best of 2 trials" in text and "What each run sets." in text and "| run | sets |" in text
    assert result.unit == "run" and go(project, out).unit == "trial" == SweepPlan(seeds=2).unit


def test_a_trial_without_a_finite_score_has_none():
    """It would be the best of all, or make every mean one."""
    runs = [TrialOutcome({"end": {"score": value}}, main="score") for value in (0.25, 0.75, float("inf"), float("nan"))]
    assert [score_of(runs[:2]), score_of(runs[1:3]), score_of(runs[3:]), score_of([*runs[:2], TrialOutcome()])] == [
        *[0.5, None, None, None]
    ]


def test_failed_trials_are_told_and_do_not_change_the_others(project, out):
    out.mkdir()
    (out / "fragile").touch()
    said = []
    before = go(project, out, 12, ["tune.files=1..12"], say=said.append)
    failed = [trial.number for trial in before.search.trials if trial.score is None]
    assert len(failed) == 4 == len(before.failed) and sum(line.startswith("FAILED E501 trial ") for line in said) == 4
    assert before.search.rows[-1][-2:] == ("", "failed") and before.search.best.values == {"tune.files": 12}
    assert "4 failed and are left out" in (before.folder / "sweep.html").read_text()
    (out / "fragile").unlink()
    after = go(project, out, 12, ["tune.files=1..12"])
    assert [one.values for one in after.search.trials] == [one.values for one in before.search.trials]
    assert not after.failed and None not in [trial.score for trial in after.search.trials]


def test_a_search_in_which_everything_fails(project, out):
    out.mkdir()
    (out / "fragile").touch()
    with pytest.raises(UserError, match="E501 trial 001_files-"):
        go(project, out, 3, ["tune.files=1..4"])


def test_trials_are_chosen_anew_when_results_or_ranges_change(project, out):
    said = []
    first = go(project, out, say=said.append)
    assert go(project, out, say=said.append).search == first.search
    assert not any("anew" in line for line in said)
    record = out / "toy-sweep" / RECORD
    content = json.loads(record.read_text())
    content["trials"][2]["score"] += 0.5
    content["trials"][7]["values"]["tune.files"] = 39
    record.write_text(json.dumps(content))
    assert go(project, out, say=said.append).search == first.search
    assert sum("trial 3 scores" in line and "later trials are chosen anew" in line for line in said) == 1
    record.write_text(json.dumps({**content, "trials": [{"values": {"tune.files": 99}, "score": 1}]}))
    assert go(project, out, say=said.append).search == first.search
    record.write_text("{")
    assert go(project, out, 2, say=said.append).search.trials == first.search.trials[:2]
    assert [line.rpartition(" is ")[2] for line in said if "all trials are chosen anew" in line] == [
        "of another search: all trials are chosen anew",
        "damaged: all trials are chosen anew",
    ]


def trials_of(project, folder, workers, seeds=None, fault=None):
    """A search whose jobs are not run."""
    folder.mkdir(exist_ok=True)

    def make(run):
        if fault and run.values["tune.files"] > fault:
            raise UserError("E104", "these values do not fit together", "Take others")
        return TrialJob(run.name, None, folder, "", ())

    plan = SweepPlan(axes_of(OVER, None), seeds=seeds, search=Search(14, workers))
    return SearchTrials(plan, load_pipeline(project), folder, make, print)


def played(search, workers, order):
    """Run the jobs of a search with so many workers, of which the one that `order` chooses ends next."""
    running, jobs, most = [], search.jobs(), 0
    while True:
        while len(running) < workers and (job := next(jobs, None)) is not None:
            running.append(job)
        most = max(most, len(running))
        if not running:
            return [run.values for run in search.trials], most
        run = running.pop(order.randrange(len(running)))
        values = next(one.values for one in search.trials if one.name == run.name)
        score = 0.5 - abs(values["tune.files"] - BEST) / 100
        search.hear(
            run.name, TrialOutcome({"tune": {"accuracy": score}}, error=run.fault, main="" if run.fault else "accuracy")
        )


@pytest.mark.parametrize(("workers", "seeds", "lag"), [(1, None, 1), (3, None, 3), (4, 2, 3), (2, 5, 2)])
def test_trials_do_not_depend_on_which_worker_is_faster(project, tmp_path, workers, seeds, lag):
    found = [
        played(search := trials_of(project, tmp_path / str(seed), workers, seeds), workers, random.Random(seed))
        for seed in range(2)
    ]
    assert search.lag == lag and [most for _, most in found] == [workers] * 2
    assert found[0] == found[1] and len(found[0][0]) == 14 * (seeds or 1)
    if workers > 1:
        assert played(trials_of(project, tmp_path / "one", 1, seeds), 1, random.Random(0))[0] != found[0][0]


def test_values_that_do_not_fit_together_are_a_failed_trial(project, tmp_path):
    search = trials_of(project, tmp_path / "runs", 1, fault=30)
    values, _ = played(search, 1, random.Random(0))
    job = search._job(next(run for run in search.trials if run.values["tune.files"] > 30))
    assert str(job.fault).startswith(f"E104 trial {job.name}: these values do not fit together")
    record = json.loads((tmp_path / "runs" / RECORD).read_text())["trials"]
    assert len(values) == 14 and [one["score"] is None for one in record] == [one["tune.files"] > 30 for one in values]
    assert 0 < sum(one["score"] is None for one in record) < 14


def test_named_rows_are_choices_and_the_best_is_told_by_its_run(project, out, tmp_path):
    grid = tmp_path / "grid.yaml"
    short = [{"tune": {"files": 20}}, {"prune": None}]
    grid.write_text(yaml.safe_dump({"size": {"a": {"tune.files": 9}, "b": {"stages": short}}, "prune.text": ["x", "y"]}))
    result = sweep(project, SweepPlan(axes_of([], grid), search=Search(3)), out, say=lambda text: None)
    assert "The main metric of every task" not in (result.folder / "sweep.md").read_text(), "most of its cells would be empty"
    best = result.search.best
    assert best.values["size"] == "b" and result.search.metric == "score after end"
    says = "No command runs it alone, because of the stages of its named row"
    assert result.search.told()[1] == f"{says}: its pipeline is in {result.search.run}/pipeline.lock.yaml."
    assert (result.folder / result.search.run / "pipeline.lock.yaml").is_file()
    grid.write_text(yaml.safe_dump({"size": {"a": {"tune.files": 9}, "b": {"tune.files": 22}}, "prune.text": ["x", "y"]}))
    told = sweep(project, SweepPlan(axes_of([], grid), search=Search(4)), out, say=lambda text: None).search.told()[1]
    assert told == "Run it alone: compress run pipeline.yaml --set tune.files=22 --set 'prune.text=\"y\"'"


def test_the_command_sets_what_the_best_trial_has(project, monkeypatch):
    """Of rows that set the same key the later one counts; a top-level key comes before single keys, --set after both. The paths
    of rows are those of the pipeline's folder, in the command for the current folder, too."""
    rows = {
        "one": {"a": {"tune.files": 5, "task.max_length": 64}, "b": {"tune.files": 6, "task.max_length": 64}},
        "two": {"c": {"tune.files": 20, "seed": 3, "model": "./model"}, "d": {"tune.files": 22, "seed": 4}},
        "three": {name: {"task": {**TASK, "metric": name}, "prune.text": "y"} for name in ("accuracy", "matthews")},
    }
    plan = SweepPlan(Grid({axis: list(names) for axis, names in rows.items()} | {"select.text": ["s", "t"]}, rows))
    values = {"one": "a", "two": "c", "three": "matthews", "select.text": "t"}
    pipeline = load_pipeline(project, presets=plan.first)
    (run,) = plan.tried(1, values, pipeline)
    outcomes = {run.name: TrialOutcome({"end": {"score": 0.5}}, main="score")}
    overrides = ["prune.text=z"]
    found = summarize_search(plan, [[run]], outcomes, "end", project, pipeline, overrides, Path("runs"))
    trial = load_pipeline(project, [*overrides, *run.settings], run.presets)
    for folder, command in ((Path.cwd(), found.here), (project.parent, found.command)):
        monkeypatch.chdir(folder)
        words = shlex.split(command)
        alone = load_pipeline(project, [words[place + 1] for place, word in enumerate(words) if word == "--set"])
        assert (alone.stages, alone.task, alone.seed) == (trial.stages, trial.task, trial.seed)
        assert alone.source_folder / alone.model == project.parent / "model"
        assert [entry.config.files for entry in alone.stages if entry.id == "tune"] == [20] and "--out" not in words
    assert str(project.parent) not in found.command
    elsewhere = summarize_search(plan, [[run]], outcomes, "end", project, pipeline, ["model=/disk/m"], Path("/disk/runs"))
    words = shlex.split(elsewhere.here)
    assert words[2] == str(project) and "model=/disk/m" in words and words[-2:] == ["--out", "/disk/runs"]
    assert "/disk" not in elsewhere.command and elsewhere.told(here=True)[1] == f"Run it alone: {elsewhere.here}"


def test_data_of_a_folder_are_given_by_no_command(project, out, tmp_path):
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_bytes((project.parent / name).read_bytes())
    plan = SweepPlan(axes_of(OVER, None), search=Search(2), data=tmp_path)
    search = sweep(project, plan, out, say=lambda text: None, engine=quickly).search
    lock = f"{search.run}/pipeline.lock.yaml"
    assert search.told()[1] == f"No command runs it alone, because of the data of --folder: its pipeline is in {lock}."


def test_what_is_maximized_is_the_tasks_metric(project, out):
    """The metrics of a stored result are sorted by name; accuracy is not the main one here."""
    project.write_text(project.read_text().replace("text: sentence}", "text: sentence, metric: matthews}"))
    result = go(project, out, trials=2, over=["tune.files=1..23"], engine=in_turn)
    assert result.search.metric == "matthews after prune" and set(result.mains.values()) == {"matthews"}
    assert result.search.best.values["tune.files"] == min(trial.values["tune.files"] for trial in result.search.trials)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--search", "9", "--dry-run"], "E115 --dry-run: the trials of a search are chosen by the results of those before"),
        (["--search", "9", "--over", "task.metric=f1,matthews"], "E115 --search: 'task.metric' decides what is measured"),
        (["--search", "9", "--over", "task.target_length=16..64"], "E115 --search: 'task.target_length' decides what is"),
        (["--search", "9", "--over", "task.decode={rows: 5},{rows: 9}"], "E115 --search: 'task.decode' decides what is"),
        (["--search", "0"], "E115 --search 0: a search has from 2 to 1,000 trials"),
        (["--search", "5000"], "E115 --search 5000: a search has from 2"),
        (["--search", "50", "--over", "tune.text=a,b"], "E115 --search 50: the keys have only 40 different settings"),
        (["--search", "9", "--seeds", "2000", "--over", "tune.x=1..2000"], "E115 18,000 runs are more than 10,000"),
        (["--search", "9", "--over", "tune.file=1..9"], "E102 the sweep's tune.file=1: unknown key"),
        (["--search", "9", "--over", "tune.text=1..2"], "E104 the sweep's tune.text=1"),
        (["--search", "9", "--over", "tune.x=9..2"], "E123 --over tune.x=9..2: the end of the range"),
        (["--search", "9", "--over", "tune.files=3..9"], "E115 --over tune.files=3..9: the key is given twice"),
        (["--search", "9", "--engine", "ray", "--threads", "1"], "E115 --search with --engine ray needs --workers"),
        (["--search", "9", "--workers", "2", "--set", "threads=null"], "E121 trials side by side need a fixed number"),
        ([], "E123 tune.files has a range, 1..20, and no values. Add --search N"),
    ],
)
def test_mistakes_come_before_anything_is_written(project, out, compress, options, says):
    over = "tune.files=1..20"
    code, shown, error = compress("sweep", project, "--over", over, *options, "--out", out)
    assert (code, shown) == (2, "") and error.startswith(says), error
    assert not out.exists()


def test_what_only_decides_how_texts_are_made_is_searched():
    """Also rows that are called as a key is."""
    rows = {"task": {"a": {"task.train": "a.tsv"}, "b": {"task.train": "b.tsv"}}}
    axes = {"task": ["a", "b"], "task.decode": [{"beams": 1}, {"beams": 4}]}
    assert SweepPlan(Grid(axes, rows), search=Search(3)).check() is None


def test_a_range_whose_end_the_pipeline_refuses(project, out):
    with pytest.raises(UserError, match=r"E104 the sweep's tune.files=0: must be"):
        go(project, out, over=["tune.files=0..90"])
    with pytest.raises(UserError, match=r"E115 --search: no key to choose values for"):
        go(project, out, over=[])
    assert not out.exists()


def test_an_end_that_fits_other_values_than_the_first_is_no_error(tmp_path):
    """A burn-in of 40 steps does not fit the first 20 steps, but 100."""
    child = {"method": "child_tuning", "child": "pruning", "budget": 0.1, "burn_in": 5, "steps": 20}
    path = write_pipeline(tmp_path, stages=[{"tune": child}], rows=16)

    def checked(*overs):
        plan = SweepPlan(axes_of(overs, None), search=Search(5))
        return _checked(path, plan, tmp_path / "out", None, (), None, None)[2]

    found = [trial.values for trial in checked("tune.burn_in=10..40", "tune.steps=20..100")]
    assert {"tune.burn_in": 40, "tune.steps": 100} in found and {"tune.burn_in": 40, "tune.steps": 20} not in found
    with pytest.raises(UserErrors, match="E4"):
        checked("tune.burn_in=10..400", "tune.steps=20..100")


def test_a_grid_file_may_have_ranges(tmp_path):
    grid = tmp_path / "grid.yaml"
    grid.write_text("tune.rank: 4..64:log\ntune.learning_rate: 1.0e-4..1.0e-2\ntune.method: [lora, dsee]\n")
    expected = {"tune.rank": Range(4, 64, True), "tune.learning_rate": Range(1e-4, 1e-2, True), "tune.method": ["lora", "dsee"]}
    assert axes_of([], grid).axes == expected
    grid.write_text("tune.method: [lora, dsee]\ntune.rank: 64..4\n")
    with pytest.raises(UserError) as error:
        axes_of([], grid)
    assert str(error.value).startswith(f"E123 {grid}:2: tune.rank: the end of the range, 4, is not greater")


def test_a_table_is_no_search_and_without_optuna_there_is_none(monkeypatch, project, compress):
    with pytest.raises(UserError, match="E115 --search: a table is run in full"):
        SweepPlan(Grid({"method": ["a", "b"]}, common=(("table", {}),)), search=Search(2)).check()
    monkeypatch.setitem(sys.modules, "optuna", None)
    code, _, error = compress("sweep", project, "--over", "tune.files=1..9", "--search", 4)
    assert code == 2 and error.startswith("E901 --search needs the package optuna. Run: pip install 'compress-pipeline[sweep]'")


def test_a_key_of_all_trainings(project, out):
    """As --set, too: then a stage's own value gives way."""
    assert [entry.config.files for entry in load_pipeline(project, ["trainings.files=7"]).stages if entry.row.trains] == [7]
    result = go(project, out, trials=3, over=["trainings.files=20..30"])
    scores = [accuracy(trial.values["trainings.files"], "x", 0) for trial in result.search.trials]
    assert [trial.score for trial in result.search.trials] == scores
    assert f"--set trainings.files={result.search.best.values['trainings.files']}" in result.search.command
    project.write_text(project.read_text().replace("  - tune: {files: 2}\n", ""))
    with pytest.raises(UserError, match=r"E109 --set trainings.files=7: no stage of this pipeline trains"):
        load_pipeline(project, ["trainings.files=7"])


STAGES = [
    {"select": {"score": "rpca", "scope": "matrix", "count": 16, "modules": ["query", "value"]}},
    {"tune": {"method": "dsee", "rank": 2, "epochs": 6, "learning_rate": 1e-2}},
]
REAL = ("--over", "tune.rank=1..4", "--over", "tune.learning_rate=1e-3..1e-1", "--search", "14", "--threads", "1")
LOCAL, RAY = ("--workers", "2"), ("--workers", "2", "--engine", "ray")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_pipeline(tmp_path_factory.mktemp("project"), stages=STAGES, rows=60)


def start(path: Path, out: Path, *options: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "pipelines.cli", "sweep", path, *REAL, *options, "--out", out]
    out.mkdir(exist_ok=True)
    with (out / "said").open("w") as said:
        return subprocess.Popen([*map(str, command)], stdout=said, stderr=said)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [(), LOCAL, pytest.param(RAY, marks=needs_ray)], ids=["in turn", "local", "ray"])
def test_a_search_killed_twice_gives_the_same_bytes(tiny, tmp_path, engine):
    """14 real trainings, of which the last ones are chosen by results, and one select; Ray gives what local workers give."""
    undisturbed, out = tmp_path / "undisturbed", tmp_path / "runs"
    assert start(tiny, undisturbed, *engine[:2]).wait(900) == 0, (undisturbed / "said").read_text()
    for count in (3, 11):
        process = start(tiny, out, *engine)
        deadline = time.monotonic() + 600
        while made(out, "tune") < count:
            assert process.poll() is None and time.monotonic() < deadline, (out / "said").read_text()
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert not (out / "tiny-sweep" / "sweep.json").exists()
    assert start(tiny, out, *engine).wait(900) == 0, (out / "said").read_text()
    assert written(out / "tiny-sweep") == written(undisturbed / "tiny-sweep")
    assert made(out, "tune") == made(undisturbed, "tune") == 14 and made(out, "select") == 1
