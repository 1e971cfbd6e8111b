"""Tables of papers: rows and columns that set several keys, scales, and every bundled one."""

import json
import types

import pytest
import yaml

from compressor.errors import UserError, UserErrors
from compressor.methods import method
from compressor.tasks.sources.glue import TASKS
from compressor.tasks.task_kind import kind_for
from pipelines.file.config import load_pipeline, recipe_files
from pipelines.sweeps.pareto import figures_of
from pipelines.sweeps.significance import paired_difference
from pipelines.sweeps.sweep import preview_sweep
from pipelines.sweeps.sweep_files import _code, write_files
from pipelines.sweeps.sweep_summary import Spread, summarize
from pipelines.sweeps.sweep_trials import SweepPlan, axes_of, part_of
from pipelines.sweeps.table_file import Grid, read_table
from pipelines.sweeps.trial_run import TrialOutcome
from tests.compressor.papers_bits import adapters, masked_adapters, shared_adapter
from tests.pipelines.sweep_parts import measure_quality
from tests.pipelines.test_sweep import ROWS
from tests.tiny import write_data, write_model

TABLES = [path for path in recipe_files() if path.parts[-3] == "papers"]
TABLE = """\
name: table
model: ./model
threads: 1
grid:
  method:
    plain: {stages: [{tune: {files: 2}}]}
    selected: {stages: [{select: {text: places}}, {tune: {files: 1}}, {prune: {}}], tune.files: 3}
scales:
  small:
    seeds: 2
    grid:
      task:
        one: {task: {train: train.tsv, validation: dev.tsv, text: sentence}}
        two: {task: {train: dev.tsv, validation: dev.tsv, text: sentence, metric: matthews}}
  paper:
    grid: {task: {one: {task: {train: train.tsv, validation: dev.tsv, text: sentence}}}}
"""


@pytest.fixture(scope="module")
def download(tmp_path_factory):
    """A folder that is laid out as GLUE's download, with files that are not read."""
    folder = tmp_path_factory.mktemp("GLUE")
    for task in TASKS.values():
        (folder / task.folder).mkdir()
        for name in ("train", task.validation, *(file for _, file, _ in task.tests)):
            (folder / task.folder / f"{name}.tsv").write_text("")
    return folder


@pytest.mark.parametrize("scale", ["small", "paper"])
@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_every_row_and_column_of_a_table_is_a_valid_pipeline(path, scale, download):
    grid = read_table(path, scale)
    first = {axis: values[0] for axis, values in grid.axes.items()}
    for axis, values in grid.axes.items():
        for value in values:
            assert load_pipeline(path, [], grid.presets({**first, axis: value}), download).name == path.stem
    assert not {name for name in ("/work", "/home", "/tmp") if name in path.read_text()}


def test_all_tables_are_there():
    assert len(TABLES) == 35 and all(path.stem.startswith(f"{path.parent.name}_") for path in TABLES)


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        *[("dsee_table2", "bleu"), ("dsee_table4", "bleu"), ("id3_table5", "exact_match")],
        *[("propetl_table13", "bleu"), ("propetl_table14", "rouge_2"), ("propetl_table15", "bleu")],
    ],
)
def test_a_table_of_texts_is_scored_by_the_papers_metric(name, metric):
    (path,) = [path for path in TABLES if path.stem == name]
    for scale in ("small", "paper"):
        grid = read_table(path, scale)
        first = grid.presets({axis: values[0] for axis, values in grid.axes.items()})
        assert kind_for(load_pipeline(path, [], first, path.parent).task).metric.key == metric


def tuned(name: str, scale: str = "paper") -> dict[str, dict]:
    """The tune of every row of a table."""
    (path,) = [path for path in TABLES if path.stem == name]
    rows = next(iter(read_table(path, scale).named.values()))
    return {row: next(stage["tune"] for stage in keys["stages"] if "tune" in stage) for row, keys in rows.items()}


def test_widths_that_the_text_has_lost_follow_from_equal_storage():
    """ProPETL equations 14 and 15 for T5-base: 768 wide, 24 blocks, 222.9 million parameters."""
    rows = {name: tune for name, tune in tuned("propetl_table14").items() if name != "full"}
    assert rows.keys() == tuned("propetl_table15").keys() - {"full"}
    of = {"adapter": (adapters, 24), "propetl": (shared_adapter, 24)}
    bits = [
        measure(768, tune["bottleneck"], n).share(222_900_000) for tune in rows.values() for measure, n in [of[tune["method"]]]
    ]
    shares = [0.0023, 0.0047, 0.0093, 0.0163]
    assert bits == pytest.approx([*shares, *shares], rel=0.05)


@pytest.mark.parametrize(
    ("name", "scale", "hidden", "blocks", "times"),
    [
        *[("propetl_table4", "paper", 768, 12, 4.41), ("propetl_table4", "small", 384, 6, 2.55)],
        *[("propetl_table13", "paper", 768, 24, 6.9), ("propetl_table13", "small", 512, 12, 4.37)],
    ],
    ids=["RoBERTa-base", "MiniLM", "T5-base", "T5-small"],
)
def test_settings_of_the_prototype_have_equal_bits_at_both_scales(name, scale, hidden, blocks, times):
    """ProPETL equations 14 and 15: no other width is nearer to ProPETL's bits. Masks alone of its width: `times` of them."""
    rows = tuned(name, scale)
    width = {row: tune["bottleneck"] for row, tune in rows.items()}
    whole = shared_adapter(hidden, width["propetl"], blocks).bits
    narrower = rows["only-mask-narrower"]["keep"]
    counts = {
        "only-share": lambda b: adapters(hidden, b, 1).bits,
        "only-mask-narrower": lambda b: masked_adapters(hidden, b, blocks, narrower).bits,
    }
    for row, bits in counts.items():
        off = {b: abs(bits(b) - whole) for b in range(width[row] - 1, width[row] + 2)}
        assert off[width[row]] == min(off.values()), row
    assert width["random-mask"] == width["only-mask-less-kept"] == width["only-mask-same"] == width["propetl"]
    less = masked_adapters(hidden, width["propetl"], blocks, rows["only-mask-less-kept"]["keep"])
    assert less.bits == pytest.approx(whole, rel=2e-3)
    same = masked_adapters(hidden, width["propetl"], blocks, rows["only-mask-same"]["keep"])
    assert same.bits / whole == pytest.approx(times, abs=0.05)


def test_widths_of_quoted_rows_follow_from_the_printed_parameters():
    """DSEE tables 3, 4 and 5: P-Tuning v2 of 0.3M, adapters of 11.48M, and those of 0.8M, which are Houlsby's."""
    length = tuned("dsee_table3")["prefix-16"]["length"]
    assert round(2 * length * 768 * 12 / 1e6, 1) == 0.3
    rows = [(tuned(name)["adapter"], printed) for name, printed in (("dsee_table4", 11.48), ("dsee_table5", 0.8))]
    for tune, printed in rows:
        assert tune["placement"] == "houlsby"
        assert adapters(1024, tune["bottleneck"], 2 * 24).scalars / 1e6 == pytest.approx(printed, abs=0.05)


@pytest.mark.parametrize("name", ["propetl_table1", "propetl_table4", "propetl_table5", "propetl_figure4"])
def test_masks_learn_faster_than_the_module_at_both_scales(name):
    """Rates of ProPETL's scripts as multiples of the module's; at small scale at most 3e-2."""
    times = {"adapter": 30, "lora": 300, "prefix": 1}
    for scale, rate in (("paper", 1e-4), ("small", 1e-3)):
        learned = [tune for tune in tuned(name, scale).values() if "mask_learning_rate" in tune]
        assert learned
        for tune in learned:
            assert tune["mask_learning_rate"] == pytest.approx(min(times[tune["shared"]] * rate, 3e-2))


@pytest.mark.parametrize("name", ["sam_table1", "sam_table2"])
def test_small_models_learn_whole_matrices_at_the_rates_of_their_methods(name):
    """The 2e-5 of the paper's scale is too low for so few steps; LoRA is unstable at the 3e-3 of the other rows."""
    small = tuned(name, "small")
    assert small.keys() == tuned(name).keys()
    own = {row: tune for row, tune in small.items() if "learning_rate" in tune}
    assert own.keys() == {"full", "mixout", "diff-pruning", "child-pruning", "lora"}
    for row, tune in own.items():
        assert tune["learning_rate"] == method(tune["method"]).learning_rate, row


def test_full_tuning_learns_at_small_scale():
    """At 3e-5 it is two points below 1e-4 after so few steps, which makes every other row look better."""
    rates = {}
    for path in TABLES:
        table = read_table(path, "small")
        common = dict(table.common[0][1]).get("trainings.learning_rate")
        rows = {row: keys.get("stages", []) for axis in table.named.values() for row, keys in axis.items()}
        tunes = {row: stage["tune"] for row, stages in rows.items() for stage in stages if stage.get("tune")}
        full = {row: tune for row, tune in tunes.items() if tune.get("method") == "full"}
        rates |= {f"{path.stem} {row}": tune.get("learning_rate", common) for row, tune in full.items()}
    assert len(rates) == 13 and min(rates.values()) >= method("full").learning_rate, rates


@pytest.mark.parametrize(("name", "row"), [("dsee_table5", "adapter"), ("dsee_table13", "mam")])
def test_modules_learn_at_the_rate_of_the_other_rows_at_small_scale(name, row):
    """Of the paper's scale they have the rates of another model's many epochs."""
    assert tuned(name)[row]["learning_rate"] < 1e-3 and "learning_rate" not in tuned(name, "small")[row]


def test_glue_tables_of_dsee_keep_the_best_epoch():
    tables = [path for path in TABLES if path.parent.name == "dsee" and "glue" in path.read_text()]
    kept = {path.stem: dict(read_table(path, "paper").common[0][1]).get("trainings.keep_best") for path in tables}
    assert len(kept) == 10 and set(kept.values()) == {True}, kept


@pytest.fixture
def table(project, monkeypatch):
    measure_quality(monkeypatch)
    (project.parent / "train.tsv").write_text(ROWS)
    path = project.with_name("table.yaml")
    path.write_text(TABLE)
    return path


def test_a_table_is_one_command_whatever_the_stages_of_its_rows(table, out, compress):
    code, _, error = compress("sweep", table, "--scale", "small", "--out", out)
    assert (code, error) == (0, "")
    page = (out / "table-sweep" / "sweep.md").read_text()
    assert "| method | one | two |" in page
    assert "| plain | 0.1500 ± 0.0707 (2) | -0.1500 ± 0.0707 (2) |" in page, "each column by its task's metric"
    record = json.loads((out / "table-sweep" / "sweep.json").read_bytes())
    assert {row["stage"] for row in record["summary"]} == {"end"} and record["seeds"] == 2
    compared = {(*row["first"], *row["second"]) for row in record["comparisons"]}
    assert compared == {("plain", task, "selected", task) for task in ("one", "two")}, "rows, never columns"
    assert record["artifacts"]["tune"] == 8 and record["artifacts"]["prune"] == 4
    assert record["trials_of_stages"] == {"select": 4, "tune": 8, "prune": 4}
    assert "| stage | trials | results |" in page and "| select | 4 | 4 |" in page, "the others have no select"


def test_a_part_of_a_table_is_kept_when_the_rest_is_run(table, out, compress):
    part = ("sweep", table, "--scale", "small", "--out", out, "--only", "task=two")
    assert compress(*part)[0] == 0
    page = (out / "table-sweep" / "sweep.md").read_text()
    assert page.startswith("# table: 4 trials, 2 values of method × task two × 2 seeds")
    assert "| method | two |" in page and "| plain | -0.1500 ± 0.0707 (2) |" in page and "task: one" not in page
    shown = compress(*part, "--only", "method=selected", "--dry-run")[1]
    assert "2 trials: 2 finished, 0 to run" in shown
    assert "8 trials: 4 finished, 4 to run" in compress(*part[:-2], "--dry-run")[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "task=to"], "E115 --only task=to: task has no 'to'. Name some of one, two"),
        (["--only", "tsk=one"], "E115 --only tsk=one: 'tsk' has no list of values here. Did you mean 'task'?"),
        (["--only", "task"], "E115 --only task: no value is given. Name some of one, two"),
        (["--only", "task=one,one"], "E115 --only task=one,one: a value appears twice"),
        (["run", "FILE"], "E122 FILE:1: a table of many runs. Run it as one: compress sweep table"),
        (["sweep", "FILE"], "E115 FILE:8: scales: the table can be run at several scales"),
        (["sweep", "FILE", "--scale", "smal"], "E115 FILE:8: scales: no scale 'smal'. Did you mean 'small'"),
        (["sweep", "FILE", "--scale", "small", "--folder", "nowhere"], "E115 --folder nowhere: not a folder"),
        (["sweep", "FILE", "--scale", "small", "--until", "report"], "E111 "),
        (["sweep", "PLAIN", "--scale", "small"], "E115 PLAIN:1: --scale small: the file has no scales"),
    ],
)
def test_mistakes_with_tables(table, project, out, compress, arguments, says):
    names = {"FILE": str(table), "PLAIN": str(project)}
    if arguments[0] == "--only":
        arguments = ["sweep", "FILE", "--scale", "small", *arguments]
    code, _, error = compress(*(names.get(one, one) for one in arguments), "--out", out)
    assert code == 2 and error.startswith(says.replace("FILE", str(table)).replace("PLAIN", str(project))) and not out.exists()


def test_a_bundled_table_asks_for_its_data_by_folder(table, out, compress, monkeypatch):
    """Its paths lie in the installed package, which has none of the papers' data."""
    monkeypatch.setattr("pipelines.sweeps.trial_jobs.RECIPES", table.parent)
    (table.parent / "train.tsv").unlink()
    code, _, error = compress("sweep", table, "--scale", "small", "--out", out)
    assert code == 2 and "E201 " in error
    assert "Give --folder DATA, the folder that the comment at the top of the recipe describes" in error


def test_a_subset_is_drawn_of_the_tasks_of_its_own_row(tmp_path, monkeypatch):
    """Rows may have other tasks than the first, and have an effect by that."""
    write_model(tmp_path / "model")
    own = write_data(tmp_path)
    path = tmp_path / "p.yaml"
    file = {"name": "p", "model": "./model", "tasks": {"a": own}, "stages": [{"tune": {"method": "full"}}]}
    path.write_text(yaml.safe_dump(file))
    monkeypatch.setattr("pipelines.sweeps.sweep.preview", lambda job: job.pipeline.all_tasks)
    rows = {name: {"tasks": dict.fromkeys(tasks, own)} for name, tasks in (("one", "ab"), ("two", "bcd"))}
    drawn = preview_sweep(path, SweepPlan(Grid({"group": list(rows)}, {"group": rows}), subsets=2), tmp_path / "out")
    assert [{name: task.subset.seed for (_, name), task in tasks.items()} for tasks in drawn] == [
        *[{"a": 0, "b": 0}, {"a": 1, "b": 1}],
        *[{"b": 0, "c": 0, "d": 0}, {"b": 1, "c": 1, "d": 1}],
    ]


def test_what_is_said_of_a_row_counts_more_than_of_its_scale(tmp_path):
    (tmp_path / "glue.yaml").write_text(yaml.safe_dump({"name": "a", "model": "./m", "grid": {}, "task": None, "stages": []}))
    small = ("small", {"model": "./small", "trainings.epochs": 1, "trainings.learning_rate": 0.1})
    row = ("row", {"stages": [{"tune": {"method": "lora", "epochs": 5}}, {"recover": None}]})
    column = ("column", {"task": {"train": "t", "validation": "v"}, "trainings.learning_rate": 0.2, "tune.rank": 3})
    loaded = load_pipeline(tmp_path / "glue.yaml", [], [small, row, column], tmp_path / "data")
    tune, recover = (entry.config for entry in loaded.stages)
    assert (loaded.model, tune.epochs, tune.rank, tune.learning_rate) == ("./small", 5, 3, 0.2)
    assert (recover.epochs, recover.learning_rate) == (1, 0.2), "a key of all trainings"
    assert loaded.command == "compress sweep glue.yaml", "for reports"
    assert loaded.task.train == tmp_path / "data" / "t"
    with pytest.raises(UserErrors, match=r"E102 column: stages.0..tune.rang: unknown key"):
        load_pipeline(tmp_path / "glue.yaml", [], [small, row, ("column", {**column[1], "tune.rang": 1})])


def test_named_rows_in_a_grid_file(project, out, compress, tmp_path, monkeypatch):
    measure_quality(monkeypatch)
    (tmp_path / "grid.yaml").write_text("size: {few: {tune.files: 1, select.text: a}, many: {tune.files: 9}}\n")
    code, _, _ = compress("sweep", project, "--grid", tmp_path / "grid.yaml", "--out", out)
    record = json.loads((out / "toy-sweep" / "sweep.json").read_bytes())
    assert code == 0 and record["over"] == {"size": ["few", "many"]} and record["artifacts"]["tune"] == 2
    (tmp_path / "grid.yaml").write_text("size: {few: 1}\n")
    assert compress("sweep", project, "--grid", tmp_path / "grid.yaml", "--out", out)[2].startswith("E120 ")


def test_null_of_a_named_row_is_the_default(project):
    """Also of what the file, or a row before, sets: a length may be given as epochs in one row, as steps in another."""
    for rows in ([{"tune.files": None}], [{"tune.files": 5}, {"tune.files": None}]):
        presets = [(f"row {number}", row) for number, row in enumerate(rows)]
        (files,) = [entry.config.files for entry in load_pipeline(project, [], presets).stages if entry.id == "tune"]
        assert files == 1


@pytest.mark.parametrize("tune", [None, {"rank": 4}, {"warmup": 0.1}])
def test_null_of_a_named_row_counts_more_than_a_key_of_all_trainings(tmp_path, tune):
    """Whether the file has the key, or any key of the stage, or not; a later row's own value counts more than null."""
    task = {"train": "t", "validation": "v"}
    stages = ["select", {"tune": tune}, {"recover": None}]
    (tmp_path / "p.yaml").write_text(yaml.safe_dump({"name": "a", "model": "./m", "task": task, "stages": stages}))
    scale, row = ("scale", {"trainings.warmup": 0.3}), ("row", {"tune.warmup": None})
    for later, warmup in ({}, None), ({"tune.warmup": 0.2}, 0.2), ({"stages.1.tune": {"rank": 3}}, 0.3):
        loaded = load_pipeline(tmp_path / "p.yaml", [], [scale, row, ("column", later)], tmp_path)
        assert [entry.config.warmup for entry in loaded.stages[1:]] == [warmup, 0.3]


def test_null_of_a_named_row_is_the_default_of_any_key(tmp_path):
    """Of a top-level key of the file, and of a key of all trainings, which is then the default of each."""
    stages, task = [{"tune": {"method": "lora"}}, {"recover": {"epochs": 7}}], {"train": "t", "validation": "v"}
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump({"name": "a", "model": "./m", "seed": 3, "task": task, "stages": stages}))
    scale, row = ("scale", {"trainings.epochs": 5}), ("row", {"seed": None, "threads": None, "trainings.epochs": None})
    tuned = [load_pipeline(path, [], presets, tmp_path) for presets in ([scale], [scale, row], [row], [row, scale])]
    assert [(one.seed, *(entry.config.epochs for entry in one.stages)) for one in tuned] == [
        *[(3, 5, 7), (0, 2, 7), (0, 2, 7)],
        (0, 5, 7),
    ]


SIZES = {"few": {"tune.files": 1}, "many": {"tune.files": 9}}
COLUMNS = {"one": {"task.metric": "accuracy"}, "two": {"task.metric": "matthews"}}
RUNS = {1: {"seed": 6, "trainings.learning_rate": 1e-4}, 2: {"seed": 7, "trainings.learning_rate": 3e-4}}


def plan_of(seeds=2, **axes):
    """A table of named rows, and of plain keys where an axis is a list."""
    named = {axis: rows for axis, rows in axes.items() if isinstance(rows, dict)}
    return SweepPlan(Grid({axis: list(rows) for axis, rows in axes.items()}, named), seeds=seeds)


def summary_of(plan, folder, score, falls=lambda values: False):
    """The result of trials that have such scores, and a cost of their size."""
    trials = plan.trials(types.SimpleNamespace(seed=0))
    outcomes = {
        trial.name: TrialOutcome(
            {"end": {"score": score(trial.values)}},
            {"bytes": 9.0 if trial.values.get("size") == "many" else 1.0},
            main="score",
            falls=falls(trial.values),
        )
        for trial in trials
    }
    return trials, summarize(folder, plan, trials, outcomes, ["end"])


@pytest.mark.parametrize(
    ("axes", "compared"),
    [
        ({"size": SIZES, "text": ["x", "y"]}, {"few x/few y", "many x/many y", "few x/many x", "few y/many y"}),
        (
            {"size": SIZES, "keep": {"a": {"tune.x": 1}, "b": {"tune.x": 2}}},
            {"few a/few b", "many a/many b", "few a/many a", "few b/many b"},
        ),
        ({"task": COLUMNS, "size": SIZES}, {"one few/one many", "two few/two many"}),
        (
            {"size": SIZES, "tasks": {"one": {"tasks.a": {}}, "two": {"tasks.a.validation": "v"}}},
            {"few one/many one", "few two/many two"},
        ),
        ({"file": {"a": {"task.train": "a.tsv"}, "b": {"task.train": "b.tsv"}}}, {"a/b"}),
        ({"size": ["few", "many"], "task.metric": ["f1", "ter"]}, {"few f1/many f1", "few ter/many ter"}),
        ({"size": ["few", "many"], "task.target_length": [16, 64]}, {"few 16/many 16", "few 64/many 64"}),
        ({"size": ["few", "many"], "tasks.a.decode.rows": [5, 9]}, {"few 5/many 5", "few 9/many 9"}),
        ({"size": ["few", "many"], "task.folder": ["a", "b"]}, {"few a/many a", "few b/many b"}),
        ({"task.decode.beams": [1, 4]}, {"1/4"}),
        ({"task.decode": [{"beams": 1}, {"beams": 4}]}, {'{"beams": 1}/{"beams": 4}'}),
        (
            {"task.decode": [{"beams": 1, "rows": 5}, {"beams": 4, "rows": 5}]},
            {'{"beams": 1, "rows": 5}/{"beams": 4, "rows": 5}'},
        ),
        ({"task.decode": [{"beams": 1, "rows": 5}, {"beams": 1, "rows": 9}]}, set()),
        ({"tasks.a.decode": [{"beams": 1}, {"beams": 4, "lowercase": True}]}, set()),
        ({"how": {"a": {"task.decode": {"beams": 4}}, "b": {"task.decode": None}}}, {"a/b"}),
        ({"how": {"a": {"task.decode": {"beams": 4}}, "b": {"task.decode": {"answer": "last"}}}}, set()),
        ({"how": {"a": {"task.decode": {"beams": 4}}, "b": {"tune.x": 1}}}, set()),
    ],
)
def test_everything_but_tasks_is_compared(tmp_path, axes, compared):
    """Whatever is named, and wherever it stands: training rows are no other task, validation rows are."""
    found = summary_of(plan_of(**axes), tmp_path, lambda values: 0.5)[1].comparisons
    assert {f"{' '.join(row.first)}/{' '.join(row.second)}" for row in found} == compared and len(found) == len(compared)


def test_a_plot_is_of_a_task_and_in_its_own_direction(tmp_path):
    """Many files are better in both columns: their score rises in one, and falls in the other."""
    score = {"few": {"one": 0.5, "two": 0.5}, "many": {"one": 0.9, "two": 0.3}}
    plan = plan_of(size=SIZES, task=COLUMNS)
    _, result = summary_of(plan, tmp_path, lambda at: score[at["size"]][at["task"]], lambda at: at["task"] == "two")
    assert [
        (figure.data[0]["text"], f"{way} is good" in figure.caption)
        for figure, way in zip(figures_of(result), ("high", "low"), strict=True)
    ] == [
        (["few, one", "many, one"], True),
        (["few, two", "many, two"], True),
    ]
    _, one = summary_of(plan_of(size=SIZES, text=["x", "y"]), tmp_path, lambda at: 0.5 + (at["size"] == "many"))
    (figure,) = figures_of(one)
    assert {text for trace in figure.data for text in trace["text"]} == {"few, x", "few, y", "many, x", "many, y"}


def test_named_runs_repeat_a_setting(tmp_path):
    """As in ID3's tables, where each of four runs has its seed and rate: mean, deviation and pairs are over them."""
    scores = {("few", 1): 0.5, ("few", 2): 0.7, ("many", 1): 0.6, ("many", 2): 0.9}
    plan = plan_of(seeds=None, size=SIZES, task=COLUMNS, run=RUNS)
    trials, result = summary_of(plan, tmp_path, lambda at: scores[at["size"], at["run"]])
    assert result.titles == ("size", "task") and result.repetitions == ("run",)
    assert [row.values for row in result.spreads] == [(0.5, 0.7)] * 2 + [(0.6, 0.9)] * 2
    assert [(row.first, row.second, row.difference.pairs) for row in result.comparisons] == [
        (("few", task), ("many", task), 2) for task in ("one", "two")
    ]
    write_files(result, {"pipeline": "table"}, plan, trials)
    text = (tmp_path / "sweep.md").read_text()
    assert "| size | one | two |" in text and "| few | 0.6000 ± 0.1414 (2) | 0.6000 ± 0.1414 (2) |" in text
    assert json.loads((tmp_path / "sweep.json").read_text())["repetitions"] == ["run"]


def test_differences_are_later_minus_earlier_after_the_last_stage_and_costs_are_means(tmp_path):
    plan = plan_of(size=SIZES)
    trials = plan.trials(types.SimpleNamespace(seed=0))
    score = {"few": 0.5, "many": 0.9}
    outcomes = {
        trial.name: TrialOutcome(
            {"tune": {"score": 0.1}, "end": {"score": score[trial.values["size"]]}},
            {"bytes": 1.0 + 2 * trial.repeat["seed"]},
            main="score",
        )
        for trial in trials
    }
    result = summarize(tmp_path, plan, trials, outcomes, ["tune", "end"])
    assert [(row.first, row.second, row.stage, row.difference.mean) for row in result.comparisons] == [
        (("few",), ("many",), "end", pytest.approx(0.4))
    ]
    assert result.costs == {"bytes": {("few",): 2.0, ("many",): 2.0}}


@pytest.mark.parametrize("broken", ["few one", "one"])
def test_cells_that_failed_keep_their_places_and_have_the_metrics_of_their_task(tmp_path, broken):
    """One cell, or a whole column, and the row between the others."""
    plan = plan_of(size={"few": {"tune.files": 1}, "mid": {"tune.files": 2}, "many": {"tune.files": 9}}, task=COLUMNS)
    trials = plan.trials(types.SimpleNamespace(seed=0))
    of_task = {"one": ["score", "accuracy"], "two": ["score", "matthews"]}
    outcomes = {}
    for trial in trials:
        size, task = trial.values["size"], trial.values["task"]
        failed = size == "mid" or broken in (task, f"{size} {task}")
        error = UserError("E501", "too much is removed", "Remove less", f"trial {trial.name}") if failed else None
        quality = {} if failed else {"end": dict.fromkeys(of_task[task], 0.5)}
        outcomes[trial.name] = TrialOutcome(quality, error=error, main="" if failed else "score")
    result = summarize(tmp_path, plan, trials, outcomes, ["end"])
    write_files(result, {"pipeline": "table"}, plan, trials)
    cell, many = "0.5000 ± 0.0000 (2)", "" if broken == "one" else "0.5000 ± 0.0000 (2)"
    assert (
        f"| size | one | two |\n| --- | ---: | ---: |\n| few |  | {cell} |\n| mid |  |  |\n| many | {many} | {cell} |"
        in (tmp_path / "sweep.md").read_text()
    )
    found = {}
    for row in result.spreads:
        found.setdefault(row.setting, []).append(row.metric)
    assert found == {
        (size, task): ["score"] if broken == "one" and task == "one" else of_task[task]
        for size in ("few", "mid", "many")
        for task in of_task
    }


@pytest.mark.parametrize(
    "rows",
    [
        {name: {**row, "seed": 6} for name, row in RUNS.items()},
        {name: {**row, "tune.files": 3} for name, row in RUNS.items()},
        {1: {"seed": 1}, 2: {"trainings.learning_rate": 0.1}},
    ],
)
def test_rows_that_set_more_than_a_seed_of_their_own_are_settings(tmp_path, rows):
    assert summary_of(plan_of(seeds=None, run=rows), tmp_path, lambda at: 0.5)[1].titles == ("run",)


@pytest.mark.parametrize("name", ["id3_table1", "id3_table4", "id3_figure5"])
def test_the_runs_of_id3_are_no_columns(name, tmp_path):
    (path,) = [path for path in TABLES if path.stem == name]
    result = summary_of(SweepPlan(read_table(path, "paper")), tmp_path, lambda at: 0.5)[1]
    assert "run" not in result.titles and {row.runs for row in result.spreads} == {4} and result.comparisons


def test_no_text_becomes_markup_outside_a_table_either(tmp_path):
    """The name of a key, and the text of an error with a label of the data."""
    plan = plan_of(**{'task.test."<x>"': ["*", "y"]})
    trials = plan.trials(types.SimpleNamespace(seed=0))
    outcomes = {trial.name: TrialOutcome({"end": {"score": 0.5}}, main="score") for trial in trials}
    outcomes[trials[0].name] = TrialOutcome(error=UserError("E211", "no '<img src=x>[y](z)'", "Fix it"))
    write_files(summarize(tmp_path, plan, trials, outcomes, ["end"]), {"pipeline": "table"}, plan, trials)
    text = (tmp_path / "sweep.md").read_text()
    assert "<" not in text and r": no '&lt;img src=x>\[y\](z)'." in text and 'task.test."&lt;x>"' in text


@pytest.mark.parametrize(("command", "code"), [("compress run a", "`compress run a`"), ("b '`c``'", "``` b '`c``' ```")])
def test_a_command_is_code_whatever_it_holds(command, code):
    assert _code(command) == code


def test_any_text_is_one_cell_of_a_table(tmp_path):
    plan = plan_of(text=["a\nb|c", "d\\"])
    trials, result = summary_of(plan, tmp_path, lambda at: 0.5)
    write_files(result, {"pipeline": "table"}, plan, trials)
    rows = [line for line in (tmp_path / "sweep.md").read_text().splitlines() if "| end | score |" in line]
    assert [row.partition(" | end")[0] for row in rows] == [r"| a<br>b\|c", "| d\\\\"]


def test_a_run_without_a_figure_has_its_place_among_the_others():
    assert Spread("end", "f1", ("a",), 2, 0.4, 0.2, 0.2, 0.6, (None, 0.2, 0.6)).cells()[-1] == "none 0.2000 0.6000"


def test_a_difference_of_one_row_in_every_pair_is_not_shown_by_its_rounding():
    before, after = ([(right + more) / 40430 for right in (30001, 31002, 32003)] for more in (0, 1))
    assert paired_difference(before, after).verdict == "the same difference in every pair"
    assert paired_difference((0.3, 0.6), (0.1 + 0.2, 0.6)).verdict == "equal in every pair"
    assert paired_difference((0.5, 0.5, 0.5), (0.5, 0.5 + 1e-9, 0.5)).verdict == "not shown"


@pytest.mark.parametrize(("stage", "mains"), [("end", ["score"] * 2), ("tune", ["accuracy", "matthews"])])
def test_rows_are_compared_by_each_columns_metric_at_a_named_stage_too(tmp_path, stage, mains):
    plan = plan_of(size=SIZES, task=COLUMNS)
    trials = plan.trials(types.SimpleNamespace(seed=0))
    outcomes = {
        trial.name: TrialOutcome({stage: {main: 0.5 + place / 10, "accuracy": 0.1}}, main=main)
        for place, trial in enumerate(trials)
        for main in [mains[trial.values["task"] == "two"]]
    }
    found = summarize(tmp_path, plan, trials, outcomes, [stage]).comparisons
    assert {(row.metric, *row.first, *row.second) for row in found} == {
        (main, "few", task, "many", task) for main, task in zip(mains, ("one", "two"), strict=True)
    }


def test_a_table_says_how_often_its_trials_run(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text("grid: {tune.rank: [1, 2]}\nsubsets: 3\n")
    assert (read_table(path, None).subsets, SweepPlan(Grid()).first) == (3, ())
    path.write_text("grid: {tune.rank: [1, 2]}\nseeds: many\n")
    with pytest.raises(UserError, match=r"E120 .*:2: seeds: seeds is no number"):
        read_table(path, None)
    path.write_text("grid: {tune.rank: [1, 2]}\nscales:\n  small:\n    seeds: 1\n")
    with pytest.raises(UserError, match=r"E120 .*:4: scales.small.seeds: seeds is no number"):
        read_table(path, "small")


def test_a_scale_of_a_table_without_scales_is_refused(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text("grid: {n: {few: {tune.rank: 1}, many: {tune.rank: 9}}}\n")
    with pytest.raises(UserError, match=r"E115 .*:1: --scale small: the file has no scales"):
        read_table(path, "small")


def test_a_scale_names_rows_that_the_table_has(tmp_path):
    path = tmp_path / "table.yaml"
    path.write_text("grid: {n: {few: {tune.rank: 1}, many: {tune.rank: 9}}}\nscales:\n  small:\n    grid: {n: [few, man]}\n")
    with pytest.raises(UserError, match=r"E120 .*:4: scales.small.grid.n: the table has no 'man' here. Did you mean 'many'"):
        read_table(path, "small")
    path.write_text(path.read_text().replace("man]", "'']"))
    with pytest.raises(UserError, match=r"E120 .*:4: scales.small.grid.n: the table has no '' here"):
        read_table(path, "small")
    path.write_text(path.read_text().replace("few:", "1e-3:").replace("[few, '']", "[1e-3, '1e-3']"))
    with pytest.raises(UserError, match=r"E115 .*:4: scales.small.grid.n: a value appears twice"):
        read_table(path, "small")


def test_a_grid_file_names_rows_that_the_table_has(tmp_path):
    path, grid = tmp_path / "table.yaml", tmp_path / "grid.yaml"
    path.write_text("grid: {n: {few: {tune.rank: 1}, many: {tune.rank: 9}}}\n")
    grid.write_text("n: [many, mane]\n")
    with pytest.raises(UserError, match=r"E120 .*grid.yaml:1: n: the table has no 'mane' here"):
        axes_of([], grid, read_table(path, None))
    grid.write_text("n: [many, few]\n")
    assert axes_of([], grid, read_table(path, None)).axes == {"n": ["many", "few"]}


@pytest.mark.parametrize(
    ("given", "names"),
    [("[8, 16]", ["8", "16"]), ("[16, 1e-3]", ["16", "1e-3"]), ("['8', 0.10]", ["8", "0.10"]), ("[0x8, true]", ["8", "true"])],
)
def test_names_that_look_like_numbers_are_written_as_they_are(tmp_path, given, names):
    """In the grid of a scale, in a grid file, and with --only, without quotes."""
    path, grid = tmp_path / "table.yaml", tmp_path / "grid.yaml"
    rows = ", ".join(f"{name}: {{tune.rank: {rank}}}" for rank, name in enumerate(["8", "16", "1e-3", "0.10", "true"], start=1))
    path.write_text(f"grid:\n  size: {{{rows}}}\nscales:\n  all: {{seeds: 2}}\n  small:\n    grid: {{size: {given}}}\n")
    grid.write_text(f"size: {given}\n")
    whole = read_table(path, "all")
    assert read_table(path, "small").axes == axes_of([], grid, whole).axes == {"size": names}
    assert set(part_of(whole, [f"size={given[1:-1]}"]).axes["size"]) == set(names)
    path.write_text(path.read_text().replace(given, "[16, 1]"))
    with pytest.raises(UserError, match=r"E120 .*:6: .*: the table has no '1' here"):
        read_table(path, "small")
    plain = Grid({"tune.learning_rate": [1e-3, 3e-3]})
    assert part_of(plain, ["tune.learning_rate=1e-3"]).axes == {"tune.learning_rate": [1e-3]}


def test_files_of_a_table_are_named_rows(tmp_path):
    """As values of a plain key they would be those of the current folder, whatever the table's folder and --folder are."""
    path = tmp_path / "table.yaml"
    listed = {
        "task.train": "[a.tsv, b.tsv]",
        "model": "[./a, ./b]",
        "more.texts": "[a.txt, b.txt]",
        "more.teacher": "[./a, ./b]",
    }
    for key, value in listed.items():
        path.write_text(f"name: table\ngrid:\n  {key}: {value}\nstages:\n  - recover: {{id: more}}\n")
        with pytest.raises(UserError, match=rf"E120 .*:2: grid: '{key}' names files.* Write named rows"):
            read_table(path, None)
    path.write_text("grid: {model: [package:a/b, c/d]}\n")
    assert read_table(path, None).axes == {"model": ["package:a/b", "c/d"]}


def test_a_column_with_a_subset_of_its_own_is_not_drawn_from_again(table, compress, out):
    own = TABLE.replace("metric: matthews", "subset: {share: 0.5}").replace("    seeds: 2\n", "")
    table.write_text(own)
    code, _, error = compress("sweep", table, "--scale", "small", "--subsets", 2, "--out", out)
    assert code == 2 and "E115" in error and "trains on a subset already" in error
