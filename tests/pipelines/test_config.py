"""A pipeline file in, a typed pipeline out: overrides, ids, defaults and paths. What is refused is in test_mistakes.py."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.errors import UserError, UserErrors
from pipelines.file.config import command_of, find_pipeline, load_pipeline, without_id

HEAD = """\
name: p
model: ./model
task: {train: train.tsv, validation: sub/dev.tsv, text: [a, b]}
stages:
"""
STAGES = """\
  - select: {count: 4}
  - tune:
  - prune:
      - {structure: heads, criterion: delta, remove: 1}
      - {structure: neurons, criterion: taylor, remove: 0.5}
  - select:
      id: again
  - recover: {method: dsee, id: fix}
  - merge
"""


@pytest.fixture
def write(tmp_path):
    """Write a pipeline of these stages; gives its path."""

    def write(stages=STAGES):
        path = tmp_path / "p.yaml"
        path.write_text(HEAD + stages)
        return path

    return write


def config(path, entry, *overrides):
    return next(one.config for one in load_pipeline(path, overrides).stages if one.id == entry)


def test_ids_defaults_and_paths(write, tmp_path):
    pipeline = load_pipeline(write())
    assert [entry.id for entry in pipeline.stages] == ["select", "tune", "prune", "again", "fix", "merge"]
    assert (pipeline.seed, pipeline.threads, pipeline.source_folder) == (0, None, tmp_path)
    assert (pipeline.task.train, pipeline.task.validation) == (tmp_path / "train.tsv", tmp_path / "sub/dev.tsv")
    again = "".join(f"  - recover: {key}\n" for key in ("", "{id: recover-2}", "", ""))
    repeated = load_pipeline(write(f"  - tune: {{method: full}}\n{again}"))
    assert [entry.id for entry in repeated.stages[1:]] == ["recover", "recover-2", "recover-3", "recover-4"]


@pytest.mark.parametrize(
    ("override", "entry", "key", "value"),
    [
        ("tune.rank=8", "tune", "rank", 8),  # the file gives this stage no keys at all
        ("tune.learning_rate=5e-4", "tune", "learning_rate", 5e-4),
        ("again.modules=[key, ffn_in]", "again", "modules", ("key", "ffn_in")),
        ("fix.distill=false", "fix", "distill", False),
        ("select.count=7", "select", "count", 7),
        ("merge.id=fold", "fold", "id", "fold"),
    ],
)
def test_overrides_reach_a_stages_keys(write, override, entry, key, value):
    assert getattr(config(write(), entry, override), key) == value


def test_overrides_reach_into_lists_and_single_items(write):
    assert [item.remove for item in config(write(), "prune", "prune.items.0.remove=3", "prune.1.remove=0.25").items] == [
        3,
        0.25,
    ]
    single = write("  - tune: {method: full}\n  - prune: {structure: heads, remove: 1}\n")
    assert [config(single, "prune", f"prune.{key}=2").items[0].remove for key in ("remove", "items.0.remove")] == [2, 2]


def test_keys_of_a_stage_are_set_beside_its_list_of_items(write):
    """Written as a list, the items stand in their place; under `items` they go by their places, too."""
    for key in ("refit", "items.0.remove", "0.remove"):
        prune = config(write(), "prune", "prune.1.remove=0.25", f"prune.{key}=2", "prune.refit=9")
        assert (prune.refit, [item.remove for item in prune.items]) == (9, [1 if key == "refit" else 2, 0.25])
    beside = write(STAGES.replace("prune:\n", "prune:\n      refit: 3\n      items:\n"))
    prune = config(beside, "cut", "prune.0.remove=3", "prune.1={structure: heads, remove: 2}", "prune.id=cut", "cut.refit=null")
    assert ([item.remove for item in prune.items], prune.refit) == ([3, 2], None)
    with pytest.raises(UserError, match=r"E104 .*p.yaml:8: stages\[2\].prune.items\[0\].criterion: must be"):
        load_pipeline(write(STAGES.replace("delta", "delt")), ["prune.refit=9"])
    items = [{"structure": "heads", "remove": 1}, {"structure": "neurons", "remove": 2}]
    row = ("row", {"stages": [{"tune": {"method": "lora"}}, {"prune": items}]})
    for overrides, presets in ((["prune.refit=64"], [row]), ([], [row, ("column", {"prune.refit": 64})])):
        prune = load_pipeline(write(), overrides, presets).stages[-1].config
        assert (prune.refit, [item.remove for item in prune.items]) == (64, [1, 2])
    with pytest.raises(UserError, match=r"E104 row: stages\[1\].prune.items\[0\].remove: must be"):
        load_pipeline(write(), ["prune.refit=64"], [row, ("row", {"prune.0.remove": "x"})])


def test_keys_of_a_block_that_the_file_lacks_make_it(write):
    task = load_pipeline(write(), ["task.subset.share=0.5", "task.kind=generation", "task.text=a", "task.decode.beams=3"]).task
    assert (task.subset.share, task.decode.beams) == (0.5, 3)
    task = load_pipeline(write(), ["task.test.held=held.tsv"]).task
    assert list(task.test) == ["held"]
    stages = "  - tune: {method: lora}\n  - prune:\n"
    keys = ("target.flops=0.5", "keep.neurons=4", "criterion.heads=weight", "criterion.neurons=fisher")
    search = config(write(stages), "prune", *(f"prune.{key}" for key in keys)).search
    assert (search.target.flops, search.keep.neurons, search.criteria) == (0.5, 4, {"heads": "weight", "neurons": "fisher"})
    several = write("  - tune: {method: propetl}\n")
    several.write_text(several.read_text().replace("task: {", "tasks: {one: {").replace("b]}", "b]}}"))
    assert load_pipeline(several, ["tasks.one.subset.share=0.5"]).tasks["one"].subset.share == 0.5
    for key, part, place in (
        ("task.subset", "subset", "task"),
        ("tasks.subset", "subset", "tasks"),
        ("tasks.two.x", "two", "tasks"),
    ):
        with pytest.raises(UserError, match=rf"^E109 --set {key}.share=0.5: no '{part}' in '{place}'"):
            load_pipeline(several, [f"{key}.share=0.5"])


def test_top_level_overrides_and_paths_from_here(write, tmp_path, monkeypatch):
    here = tmp_path / "here"
    (here / "other").mkdir(parents=True)
    monkeypatch.chdir(here)
    pipeline = load_pipeline(write(), ["seed=5", "threads=1", "name=q", "task.train=mine.tsv", "model=other"])
    assert (pipeline.seed, pipeline.threads, pipeline.name) == (5, 1, "q")
    assert (pipeline.task.train, pipeline.model) == (here / "mine.tsv", str(here / "other"))
    assert load_pipeline(write(), ["model=org/name"]).model == "org/name"


def test_paths_in_a_whole_task_and_of_a_row_are_from_here_too(write, tmp_path, monkeypatch):
    glue = tmp_path / "here" / "GLUE" / "SST-2"
    glue.mkdir(parents=True)
    for name in ("train.tsv", "dev.tsv"):
        (glue / name).touch()
    monkeypatch.chdir(tmp_path / "here")
    task = load_pipeline(write(), ["task={train: a.tsv, validation: sub/b.tsv, test: {old: c.tsv}, text: x}"]).task
    here = Path.cwd()
    assert (task.train, task.validation, task.test) == (here / "a.tsv", here / "sub/b.tsv", {"old": here / "c.tsv"})
    assert load_pipeline(write(), ["task={glue: sst2, folder: GLUE}"]).task.train == glue / "train.tsv"
    with pytest.raises(UserError, match=f"E320 {here}/row.json: no such file"):
        load_pipeline(write(), ["architecture=row.json"])


def test_a_name_of_digits_is_a_key_and_no_place(write, tmp_path):
    path = write()
    path.write_text(path.read_text().replace("text:", "test: {2019: old.tsv, 2020: b.tsv}, text:"))
    task = load_pipeline(path, [f"task.test.2019={tmp_path}/new.tsv", f"task.test.2021={tmp_path}/c.tsv"]).task
    assert {name: file.name for name, file in task.test.items()} == {"2019": "new.tsv", "2020": "b.tsv", "2021": "c.tsv"}


def test_a_name_with_a_dot_stands_in_quotes(write, tmp_path):
    path = write()
    path.write_text(path.read_text().replace("text:", "test: {a.b: old.tsv}, text:"))
    task = load_pipeline(path, [f'task.test."a.b"={tmp_path}/new.tsv', f'task.test."c.d"={tmp_path}/c.tsv']).task
    assert {name: file.name for name, file in task.test.items()} == {"a.b": "new.tsv", "c.d": "c.tsv"}
    for key in ("task.test.a.b", "task.test.a.b.x"):
        with pytest.raises(UserError, match=r"E109 .*no 'a' in 'task.test'. Write .* in double quotes: \"a.b\""):
            load_pipeline(path, [f"{key}=x.tsv"])
    stages = ["tune.id=tune.2", '"tune.2".rank=3', "trainings.epochs=4"]
    assert config(path, "tune.2", *stages).rank == 3 and config(path, "tune.2", *stages).epochs == 4
    with pytest.raises(UserError, match=r'E109 --set "a.b=1: not KEY=VALUE. .*double quotes: tasks."a.b".max_length=64'):
        load_pipeline(path, ['"a.b=1'])


def test_null_takes_a_key_of_the_file_away(write):
    assert config(write(), "tune", "tune.rank=8", "tune.rank=null").rank == config(write(), "tune", "tune.rank=null").rank
    assert config(write(), "tune", "tune.epochs=3", "tune.epochs=null", "tune.steps=5").steps == 5
    assert "epochs" not in config(write(), "tune", "tune.epochs=3", "trainings.epochs=null").model_fields_set
    assert config(write(), "tune", "tune.rank=3", "stages.1.tune=null").rank == config(write(), "tune", "tune.rank=null").rank
    assert config(write(), "tune", "tune.epochs=null", "tune.steps=500").steps == 500, "a key that the file does not have"
    assert config(write(), "fix", "trainings.epochs=null", "trainings.steps=5").steps == 5
    assert load_pipeline(write(), ["seed=null", "task.decode.rows=null", "task.max_length=null"]).task.decode is None
    with pytest.raises(UserError, match=r"E105 .*key 'train' is missing"):
        load_pipeline(write(), ["task.train=null"])
    with pytest.raises(UserError, match=r"E102 .*unknown key"):
        load_pipeline(write(), ["tune.rnk=null"])


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("tune.rnk=8", "E102 --set tune.rnk=8: unknown key. Did you mean 'rank'?"),
        ("tune.rank=x", "E104 --set tune.rank=x: must be an integer, not 'x'"),
        ("tunee.rank=8", "E109 --set tunee.rank=8: neither a stage nor a key is called 'tunee'. Did you mean 'tune'?"),
        ("sed=1", "E109 --set sed=1: neither a stage nor a key is called 'sed'. Did you mean 'seed'?"),
        ("tune.rank", "E109 --set tune.rank: not KEY=VALUE"),
        ("tune=8", "E109 --set tune=8: 'tune' is a whole stage"),
        ("stages=8", "E109 --set stages=8: the stages are not set as a whole. Set one key of a stage, as in select.KEY=VALUE"),
        (
            "prune.target.speedup=2",
            "E109 --set prune.target.speedup=2: no 'target' in 'stages[2].prune'. It is a list: name an entry by its place",
        ),
        ("prune.items.2.remove=1", "E109 --set prune.items.2.remove=1: no '2' in 'stages[2].prune'. There are: 0, 1"),
        ("seed.x=1", "E104 --set seed.x=1"),
        ("select.count.x=1", "E109 --set select.count.x=1: 'stages[0].select.count' holds a value, not keys"),
        ("seed=[1", "E101 --set seed=[1:1: not YAML"),
        ("task.subst.share=0.5", "E109 --set task.subst.share=0.5: no 'subst' in 'task'"),
        ("task.subset.shar=0.5", "E102 --set task.subset.shar=0.5: unknown key. Did you mean 'share'?"),
        ("tune.rnk=null", "E102 --set tune.rnk=null: unknown key. Did you mean 'rank'?"),
        ("prune.items.0.rws=null", "E102 --set prune.items.0.rws=null: unknown key. Did you mean 'rows'?"),
        ("stages.5=merge", "E104 --set stages.5=merge: not a stage"),
        ("tune.0=1", "E102 --set tune.0=1: unknown key"),
    ],
)
def test_wrong_overrides_are_named_as_they_were_typed(write, override, says):
    with pytest.raises(UserError) as error:
        load_pipeline(write(), [override])
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


LONG = "a" * 300
"""Longer than the name of a file may be."""


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["task=glue/sst2", "task={glue: sst2, folder: ~nobody.at.all}"], "E233 {mark}: "),
        (["task=glue/sst2", f"task={{glue: sst2, folder: {LONG}}}"], "E233 {mark}: "),
        (["task.train=hub:~nobody.at.all/x/train"], "E231 {mark}: "),
        (["architecture=~nobody.at.all/row.json"], "E320 {here}/~nobody.at.all/row.json: no such file"),
        ([f"architecture={LONG}"], f"E320 {{here}}/{LONG}: no such file"),
    ],
)
def test_paths_that_no_file_can_have_are_told(write, overrides, says):
    with pytest.raises(UserError) as error:
        load_pipeline(write(), overrides)
    assert str(error.value).startswith(says.format(mark=f"--set {overrides[-1]}", here=Path.cwd()))


def test_the_home_of_nobody_is_a_path_like_any_other(write, tmp_path):
    pipeline = load_pipeline(write(), ["task.train=~nobody.at.all/train.tsv", f"model={LONG}"])
    assert (pipeline.task.train, pipeline.model) == (Path.cwd() / "~nobody.at.all/train.tsv", LONG)
    path = write("  - tune: {method: lora}\n  - recover: {texts: ~nobody.at.all/texts.tsv}\n")
    path.write_text(path.read_text().replace("train: train.tsv", "train: ~nobody.at.all/train.tsv"))
    pipeline = load_pipeline(path)
    assert pipeline.task.train == tmp_path / "~nobody.at.all/train.tsv"
    assert pipeline.stages[1].config.texts == tmp_path / "~nobody.at.all/texts.tsv"


def test_every_fault_of_a_file_is_told_at_once(write):
    stages = """\
  - select: {count: 0, score: rcpa}
  - tune: {rnk: 8, epochs: two, rank: true}
  - prune:
      - {structur: heads, remove: 1}
      - {structure: neurons,
         remove: 1.5}
  - prune: {structure: heads, remove: 1, refit: 0}
  - prune:
      target: {flops: 0.5}
      refit: all
  - prun:
  - {merge: , report: }
"""
    path = write(stages)
    path.write_text(path.read_text().replace("name: p", "nam: p") + "sed: 1\n")
    with pytest.raises(UserError) as error:
        load_pipeline(path)
    assert sorted(str(error.value).replace(f"{path}:", "").splitlines()) == [
        "E102 17: sed: unknown key. Did you mean 'seed'?",
        "E102 1: nam: unknown key. Did you mean 'name'?",
        "E102 6: stages[1].tune.rnk: unknown key. Did you mean 'rank'?",
        "E102 8: stages[2].prune[0].structur: unknown key. Did you mean 'structure'?",
        "E103 15: stages[5].prun: unknown stage 'prun'. Did you mean 'prune'?",
        "E104 10: stages[2].prune[1].remove: a share lies in (0, 1); a count is at least 1 and has no decimal point. It is 1.5",
        "E104 11: stages[3].prune.refit: must be at least 1, not 0. Change the value",
        "E104 14: stages[4].prune.refit: must be an integer, not 'all'. Change the value",
        "E104 16: stages[6]: 2 keys in one stage. Write each stage as '- NAME: {KEY: VALUE}'",
        "E104 5: stages[0].select.count: must be at least 1, not 0. Change the value",
        "E104 5: stages[0].select.score: must be 'rpca' or 'magnitude' or 'pafi' or 'random' or 'fish' or 'sam' or 'd3', "
        "not 'rcpa'. Did you mean 'rpca'?",
        "E104 6: stages[1].tune.epochs: must be a number, not 'two'. Change the value",
        "E104 6: stages[1].tune.rank: must be an integer, not true. Change the value",
    ]


@settings(deadline=None)  # the first example imports the stages
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "rank": st.integers(1, 512),
            "alpha": st.floats(1e-6, 1e6),
            "epochs": st.floats(0.1, 100) | st.integers(1, 100),
            "learning_rate": st.floats(1e-9, 1),
            "batch_size": st.integers(1, 4096),
            "accumulate": st.integers(1, 64),
            "warmup": st.floats(0, 0.9),
            "modules": st.lists(st.sampled_from(["query", "key", "value", "output", "ffn_in", "ffn_out"]), min_size=1),
            "method": st.just("lora"),
        },
    )
)
def test_a_resolved_config_reads_back_as_itself(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("round") / "p.yaml"

    def resolved(keys):
        path.write_text(f"{HEAD}  - tune: {json.dumps({'method': 'lora', **keys})}\n")
        return without_id(config(path, "tune"))

    first = resolved(values)
    assert {key: first[key] for key in values if key != "modules"} == {key: values[key] for key in values if key != "modules"}
    again = resolved({key: value for key, value in first.items() if value is not None})
    assert json.dumps(again) == json.dumps(first)
    # a key that is not given is not in the fingerprint, so that results made before there was such a key are still found
    assert first.keys() == values.keys() | {"method", "epochs", "batch_size"}


def test_fp32_may_be_measured_on_a_graphics_card(write):
    stages = f"{STAGES}\n  - export: {{precision: [fp32]}}\n  - benchmark: {{device: cuda}}\n"
    assert config(write(stages), "benchmark").device == "cuda"


PRUNE = "prune: {structure: heads, remove: 1}"


@pytest.mark.parametrize(
    ("stages", "place", "says"),
    [
        (["select"], 0, "'select' chooses. Put"),
        (["select", "select", "tune"], 0, "'select' chooses before the select after it. Put"),
        (["select", "tune", "select", "merge", "export"], 2, "'select-2' chooses. Put"),
        (["select", "tune", "select", PRUNE, "recover"], 2, "'select-2' chooses before the prune after it. Put"),
        (["select", "tune", PRUNE, "select", "merge"], 3, "'select-2' chooses. Put"),
    ],
)
def test_a_select_that_nobody_uses_is_refused_at_its_line(write, stages, place, says):
    path = write("".join(f"  - {stage}\n" for stage in stages))
    with pytest.raises(UserErrors) as caught:
        load_pipeline(path)
    start = f"E114 {path}:{place + 5}: stages[{place}].select: no stage uses the positions that "
    assert [str(error).startswith(start + says) for error in caught.value.errors] == [True]


@pytest.mark.parametrize(
    "taken", ["method: dsee", "method: dsee, texts: t.txt", "method: selective", "method: child_tuning, child: d"]
)
@pytest.mark.parametrize("last", ["", "distill: false", "method: full", "method: lora", "method: dsee"])
@pytest.mark.parametrize("pruned", [True, False])
def test_positions_that_a_recovery_took_stand_in_no_later_ones_way(write, taken, last, pruned):
    stages = ["tune: {method: lora}", *([PRUNE] if pruned else []), "select", f"recover: {{{taken}}}", f"recover: {{{last}}}"]
    pipeline = load_pipeline(write("".join(f"  - {stage}\n" for stage in stages)))
    assert pipeline.stages[-1].id == "recover-2"


@pytest.mark.parametrize("last", ["", "method: full", "method: lora"])
def test_positions_that_no_recovery_took_since_are_told(write, last):
    stages = ["tune: {method: lora}", PRUNE, "select", "recover: {method: dsee}", "select", f"recover: {{{last}}}"]
    with pytest.raises(UserError, match=r"E404 .*does not use the positions that 'select-2' chooses"):
        load_pipeline(write("".join(f"  - {stage}\n" for stage in stages)))


def test_recipes_are_found_by_name_and_are_right(tmp_path, monkeypatch):
    assert {entry.id for entry in load_pipeline(find_pipeline("quickstart")).stages} >= {"tune", "prune", "deploy", "report"}
    assert load_pipeline(find_pipeline("paper")).name == "paper"
    with pytest.raises(UserError, match=r"E110 no pipeline file .quikstart.\. Did you mean .quickstart."):
        find_pipeline("quikstart")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "paper").mkdir()
    assert load_pipeline(find_pipeline("paper")).name == "paper"
    (tmp_path / "paper" / "pipeline.yaml").touch()
    (tmp_path / "pipeline.yml").touch()
    for name, near in (("pipline.yml", "pipeline.yml"), ("paper/pipline.yaml", "paper/pipeline.yaml"), ("papr", "paper")):
        with pytest.raises(UserError, match=f"E110 no pipeline file '{name}'. Did you mean '{near}'"):
            find_pipeline(name)


@pytest.mark.parametrize(
    ("file", "overrides", "command"),
    [
        (find_pipeline("quickstart"), ["tune.rank=8"], "compress run quickstart --set tune.rank=8"),
        (Path("work", "reviews.yaml"), [], "compress run reviews.yaml"),
        (Path("p.yaml"), ["model=/home/me/minilm", "name=a b"], "compress run p.yaml --set model=minilm --set 'name=a b'"),
    ],
)
def test_a_report_names_its_command_without_the_folders_of_a_disk(file, overrides, command):
    assert command_of(file, overrides) == command
