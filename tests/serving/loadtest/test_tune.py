"""The search for serving settings, on a server that is simulated; and once, slowly, on a real one."""

import itertools
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from google.protobuf import text_format
from triton_parts import FACTS, KNOBS, QuickServer
from tritonclient.grpc.model_config_pb2 import ModelConfig

from compressor.errors import CheckError, UserError
from export.runtimes.runtime_registry import CPU_RUNTIMES, RUNTIMES
from pipelines.cli.commands import main
from pipelines.cli.work.tune_work import tune_model, write
from pipelines.loadtest.tune_report import conclusions, setting_rows, to_markdown
from serving import shared_memory
from serving.layout.knobs import Knobs
from serving.layout.model_config import text_config
from serving.loadtest.fleet import Fleet
from serving.loadtest.traffic import Traffic, token_rows
from serving.loadtest.tune import bench, coarse_to_fine, setting_grid, trials, tuned
from serving.loadtest.tune.bench import grouped
from serving.loadtest.tune.coarse_to_fine import Search
from serving.loadtest.tune.setting_grid import Grid, Setting, configured, grid_of, layouts, runtime_of_model, setting_of
from serving.loadtest.tune.trials import Probe, Trial
from serving.loadtest.tune.tuned import tune, within_limit
from serving.repository import write_repository

GRID = Grid(layouts(4), (None, 0, 500, 2000), (512, 1024, 2048, 4096))


def capacity(setting):
    """Answers a second of a server whose best setting lies in a corner of the grid."""
    layout = {(1, 4): 0.7, (2, 2): 1.0, (4, 1): 0.9}.get((setting.instances, setting.threads), 0.5)
    delay = {None: 0.6, 0: 0.8, 500: 0.9, 2000: 1.0}[setting.delay_us]
    return 300 * layout * delay * {512: 0.85, 1024: 1.0, 2048: 0.95, 4096: 0.9}[setting.batch_tokens]


def two_peaks(setting):
    """As measured on two cores: one instance is best without a delay or with the longest, two instances without."""
    delays = {0: 0.87, 250: 0.9, 500: 0.88, 2000: 0.85, 5000: 1.0} if setting.threads == 2 else {0: 0.9, 250: 0.91, 500: 0.88}
    return 300 * delays.get(setting.delay_us, 0.4) * {64: 0.98, 128: 0.99, 256: 1.0, 512: 0.98, 1024: 0.9}[setting.batch_tokens]


def simulated(seed=0, noise=0.02, capacity=capacity):
    """A closed loop on a server that is full from 4 clients on: by Little's law latency is clients / throughput."""
    generator = np.random.default_rng(seed)

    def measure(setting, clients):
        throughput = capacity(setting) * min(clients / 4, 1) * (1 + noise * generator.standard_normal())
        return Probe(throughput, clients / throughput * generator.uniform(0.7, 1.15, 400))

    def evaluate(trials, rounds):
        for _ in range(rounds):
            for trial in trials:
                trial.repeat(measure)

    return evaluate


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_within_5_percent_of_the_grids_best_and_costs_less(seed):
    search = Search(GRID, 0.050, simulated(seed))
    chosen = search.run()
    assert capacity(chosen.setting) >= 0.95 * max(map(capacity, GRID.settings()))
    assert len(search.trials) < 0.7 * len(GRID.settings())
    assert max(len(probes) for probes in chosen.probes.values()) >= 5


@pytest.mark.parametrize("seed", range(5))
def test_a_second_peak_at_the_longest_delay_is_found(seed):
    grid = Grid(layouts(2), (0, 250, 500, 2000, 5000), (64, 128, 256, 512, 1024))
    search = Search(grid, 0.050, simulated(seed, capacity=two_peaks), present=Setting(2, 1, 250, 128))
    assert two_peaks(search.run().setting) >= 0.95 * max(map(two_peaks, grid.settings()))
    assert len(search.trials) < 0.5 * len(grid.settings())


@pytest.mark.parametrize("seed", range(3))
def test_the_present_setting_stays_unless_another_is_better(seed):
    best = max(GRID.settings(), key=capacity)
    assert Search(GRID, 0.050, simulated(seed), present=best).run().setting == best
    worst = min(GRID.settings(), key=capacity)
    assert Search(GRID, 0.050, simulated(seed), present=worst).run().setting != worst
    assert Search(GRID, 0.050, simulated(seed), present=Setting(3, 1, 0, 512)).run().setting in GRID.settings()


def test_the_score_is_the_most_answers_whose_p99_keeps_the_limit():
    trial = Trial(Setting(2, 2, 2000, 1024), 0.050, start=4)
    simulated(noise=0)([trial], 2)
    assert trial.score == pytest.approx(300) and trial.kept(trial.clients) and 12 not in trial.probes
    low = Trial(Setting(2, 2, 2000, 1024), 0.008, start=16)
    simulated(noise=0)([low], 1)
    assert low.score == 0 and low.clients is None and low.figures()["answers_a_second"] == 0


def test_one_pause_of_the_machine_does_not_decide():
    calm, paused = (Probe(100, np.full(200, seconds)) for seconds in (0.01, 0.5))
    assert Trial(Setting(1, 1, None), 0.05, probes={4: [calm, paused, calm], 6: [paused, paused, calm]}).clients == 4
    assert Trial(Setting(1, 1, None), 0.05, probes={4: [Probe(0, np.empty(0))]}).score == 0


def test_a_setting_with_a_wrong_answer_is_never_chosen():
    trial = Trial(Setting(1, 1, None), 1.0, probes={4: [Probe(100, np.full(200, 0.01), right=False)]})
    assert trial.score == 0


def test_layouts_use_the_cores():
    assert layouts(1) == ((1, 1),) and layouts(2) == ((1, 2), (2, 1))
    assert layouts(4) == ((1, 4), (2, 2), (4, 1))
    assert {(2, 3), (3, 2), (6, 1), (1, 4)} <= set(layouts(6)) and len(layouts(64)) < 20


def test_neighbours_differ_by_one_step_of_one_knob():
    near = GRID.neighbours(Setting(2, 2, 0, 512))
    assert Setting(2, 2, None, 512) in near and Setting(4, 1, 0, 512) in near and Setting(2, 2, 0, 1024) in near
    assert len(near) == 5 and set(near) < set(GRID.settings())


def test_a_setting_becomes_fields_of_the_config(tmp_path):
    config = ModelConfig(name="m", backend="openvino", max_batch_size=8)
    config.parameters["task"].string_value = "classification"
    changed = configured(config, Setting(2, 3, 500), RUNTIMES["openvino"], "m-1")
    assert changed.name == "m-1" and changed.instance_group[0].count == 2 and config.name == "m"
    assert changed.parameters["INFERENCE_NUM_THREADS"].string_value == "3" and "task" in changed.parameters
    assert changed.dynamic_batching.max_queue_delay_microseconds == 500
    assert not configured(changed, Setting(1, 1, None), RUNTIMES["openvino"]).HasField("dynamic_batching")
    for setting in (Setting(2, 3, 500, 256), Setting(1, 1, None)):
        assert setting_of(configured(config, setting, RUNTIMES["openvino"]), RUNTIMES["openvino"], 8) == setting
    text = ModelConfig(name="t", backend="compress_text", max_batch_size=8)
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "serving.json").write_text(replace(FACTS, runtime="onnxruntime").to_json())
    runtime = runtime_of_model(tmp_path, text)
    assert configured(text, Setting(1, 1, 0, 512), runtime).parameters["max_batch_tokens"].string_value == "512"
    assert grid_of(text, Setting(2, 1, 0, 64), 2, 10).delays == (0, 250, 500, 2000)
    assert grid_of(config, Setting(2, 1, None), 2, 10).budgets == (None,)
    with pytest.raises(UserError, match="E752 m: nothing is known of the settings of the backend 'tensorrt_plan'"):
        runtime_of_model(tmp_path, ModelConfig(name="m", backend="tensorrt_plan"))


@pytest.mark.parametrize("runtime", [name for name in CPU_RUNTIMES if RUNTIMES[name].text_tokens])
@pytest.mark.parametrize("cores", [1, 2, 3, 4, 6, 16])
def test_the_deployed_setting_is_one_of_the_grid(runtime, cores):
    for knobs in (Knobs(), Knobs(threads=3, instances=5), Knobs(max_queue_delay_us=20_000, max_batch_tokens=200)):
        config = text_config("t", RUNTIMES[runtime], FACTS, knobs)
        present = setting_of(config, RUNTIMES[runtime], cores)
        assert present in grid_of(config, present, cores, 50).settings()
    assert setting_of(text_config("t", RUNTIMES[runtime], FACTS, Knobs(instances=1)), RUNTIMES[runtime], cores).threads == cores


def test_settings_that_do_not_fit_in_memory_together_are_apart():
    several = [Trial(Setting(count, 1, None), 1.0) for count in (1, 2, 2, 4)]
    assert [len(group) for group in grouped(several, each=1.0, available=4.0)] == [2, 1, 1]
    assert [len(group) for group in grouped(several * 3, each=1.0, available=1e9)] == [6, 5, 1]
    with pytest.raises(UserError, match="E752 4 instances of the model need about"):
        grouped(several, each=1.0, available=3.0)


@pytest.mark.parametrize(
    ("shared", "groups"),
    [(64 << 20, [12, 4]), (40 << 20, [12, 4]), (28 << 20, [4, 4, 4, 4]), (19 << 20, [1, 1, 2, 4, 4, 4])],
)
def test_settings_that_do_not_fit_in_shared_memory_together_are_apart(tmp_path, classifier, monkeypatch, shared, groups):
    """`shared` is the free bytes of /dev/shm, `groups` the instances of each server."""
    served = []
    folder = write_repository(tmp_path / "models", "m", classifier, facts=FACTS, knobs=KNOBS)
    made = bench.Bench(folder, None, tmp_path, protocol="http", seconds=0.1, say=lambda line: None)
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda _: SimpleNamespace(f_bavail=shared, f_frsize=1))
    monkeypatch.setattr(bench, "free_memory", lambda: 1e15)
    monkeypatch.setattr(made, "serve", lambda settings: nullcontext(served.append(sum(one.instances for one in settings))))
    made.evaluate([Trial(Setting(count, 1, None), 1.0) for count in (1, 1, 2, 4, 4, 4)], 0)
    assert served == groups


def test_the_memory_for_settings_is_that_of_the_container(tmp_path, classifier, monkeypatch):
    """Its limit may be a small part of the host's memory."""
    folder = write_repository(tmp_path / "models", "m", classifier, facts=FACTS, knobs=KNOBS)
    made = bench.Bench(folder, None, tmp_path, protocol="http", seconds=0.1, say=print)
    monkeypatch.setattr(bench, "free_memory", lambda: 1e6)
    with pytest.raises(UserError, match=r"E752 1 instances of the model need about .* and 0\.0 GB are free for them"):
        made.evaluate([Trial(Setting(1, 1, None), 1.0)], 1)


@pytest.mark.parametrize(
    ("memory", "shared", "most", "measured"),
    [(3.5, 64 << 20, 3, 2), (100.0, 64 << 20, 24, 16), (0.5, 64 << 20, 0, 1), (100.0, 12 << 20, 0, 1)],
    ids=["memory", "what Docker mounts", "not even what the model has", "not even one request"],
)
def test_layouts_that_do_not_fit_are_left_out_before_anything_is_measured(
    tmp_path, classifier, monkeypatch, memory, shared, most, measured
):
    """`memory` is for so many instances, `shared` the free bytes of /dev/shm."""

    class Measured(Exception):
        pass

    def evaluate(self, trials, rounds):
        raise Measured(max(trial.setting.instances for trial in trials))

    folder, said = write_repository(tmp_path / "models", "m", classifier, facts=FACTS, knobs=Knobs(instances=1)), []
    each = bench.Bench(folder, None, tmp_path, protocol="http", seconds=0.1, say=print)._bytes(Setting(1, 1, None))
    monkeypatch.setattr(bench, "free_memory", lambda: memory * each / bench.MEMORY_SHARE)
    monkeypatch.setattr(shared_memory.os, "statvfs", lambda _: SimpleNamespace(f_bavail=shared, f_frsize=1))
    monkeypatch.setattr(bench.Bench, "evaluate", evaluate)
    with pytest.raises(Measured, match=f"^{measured}$"):
        tune(folder, None, tmp_path, 100.0, cores=32, say=said.append)
    assert f"without those of more than {most} instances: no memory, or no space in /dev/shm (Docker: --shm-size)" in said[0]


def test_an_instance_holds_the_version_that_is_served(tmp_path, classifier):
    """A published repository keeps earlier ones, and what stood beside them."""
    folder = write_repository(tmp_path / "models", "m", classifier, facts=FACTS, knobs=KNOBS)
    made = bench.Bench(folder, None, tmp_path, protocol="http", seconds=0.1, say=print)
    alone = made._bytes(Setting(2, 1, None))
    for version in ("2", "10"):
        shutil.copytree(folder / "1", folder / version)
    (folder / "10" / "more").write_bytes(bytes(1000))
    assert made._bytes(Setting(2, 1, None)) == alone + 2 * 2 * 1000


def test_the_rate_of_random_arrivals_that_keeps_the_limit():
    rows = [{"rate": rate, "in_time": share} for rate, share in ((50, 1.0), (60, 0.995), (70, 0.98), (80, 0.991))]
    assert within_limit(rows) == 60 and within_limit(rows[2:]) is None


@pytest.mark.parametrize(
    ("rate", "requests", "in_time", "told"),
    [
        (90, 360, 1.0, "up to 90.0 a second, 99 % are answered within 500 ms"),
        (90, 360, 358 / 360, "up to 90.0 a second, 358 of 360 were answered within 500 ms"),
        (75, 300, 297 / 300, "up to 75.0 a second, 297 of 300 were answered within 500 ms"),
        (90, 360, 0.95, "over 500 ms for more than 1 % of them even at 90.0 a second"),
        (2, 120, 1.0, "up to 2.00 a second, all of 120 were answered within 500 ms"),
        (2, 120, 119 / 120, "up to 2.00 a second, 119 of 120 were answered within 500 ms"),
        (2, 120, 117 / 120, "over 500 ms for 3 of 120 even at 2.00 a second"),
    ],
)
def test_few_requests_do_not_show_that_99_percent_are_in_time(rate, requests, in_time, told):
    """All of 27 is what a share of 89 % gives in 5 % of cases."""
    figures = Trial(Setting(1, 2, 250, 64), 0.5, probes={1: [Probe(8, np.full(15, 0.1))]}).figures()
    evidence = {"p99_ms": 500, "rows": "3 rows", "grid": 40, "chosen": figures, "settings": [figures]}
    arrivals = [{"rate": rate, "requests": requests, "p99_ms": None, "in_time": in_time}]
    assert conclusions(evidence | {"arrivals": arrivals})[-1] == f"requests at random times: {told}"
    assert setting_rows(evidence)[0][4] == "-" and json.loads(json.dumps(figures))["spread"] is None, "a round has no spread"


@pytest.mark.parametrize(("score", "seconds"), [(1000, [4] * 5), (80, [345 / 40, 345 / 48]), (8, [60] * 3), (1, [60] * 5)])
def test_a_slow_model_is_sent_random_requests_for_longer(monkeypatch, score, seconds):
    loads, server = [], SimpleNamespace(serve=lambda settings: nullcontext({settings[0]: None}), fleet=None, expected=())

    def measured(fleet, target, load, *_):
        loads.append(load)
        return {"goodput": load.rate, "seconds": 10, "requests": 10 * load.rate, "latency_ms": {"p99": None}}

    monkeypatch.setattr(tuned, "measure", measured)
    chosen = Trial(Setting(1, 2, 250, 64), 0.5, probes={1: [Probe(score, np.full(15, 0.1))]})
    found = tuned.arrivals(server, chosen, 500, lambda line: None)
    assert [load.seconds for load in loads][: len(seconds)] == pytest.approx(seconds)
    assert found[0] == {"rate": score / 2, "requests": 5 * score, "p99_ms": None, "in_time": 1.0}


def test_the_evidence_is_written_and_shown(tmp_path, capfd):
    trial = Trial(Setting(2, 1, 500, 1024), 0.05, probes={4: [Probe(100, np.full(200, 0.01))] * 2})
    chosen, arrivals = trial.figures(), [{"rate": 50.0, "requests": 300, "p99_ms": 20.0, "in_time": 1.0}]
    evidence = {"model": "m", "p99_ms": 50, "cores": 2, "rows": "3 rows", "grid": 40, "chosen": chosen, "settings": [chosen]}
    write(tmp_path / "tuned", "name: 'm'\n", evidence | {"arrivals": arrivals})
    page = (tmp_path / "tuned" / "tune.md").read_text()
    assert "| 2 x 1 (chosen) | 500 | 1024 | 100 | 0.0 % | 4 | 10.0 |" in page and "up to 50.0 a second" in page
    assert "deploy: {instances: 2, threads: 1, max_queue_delay_us: 500, max_batch_tokens: 1024}" in page
    assert json.loads((tmp_path / "tuned" / "tune.json").read_text())["chosen"] == chosen
    assert (tmp_path / "tuned" / "config.pbtxt").read_text() == "name: 'm'\n" and "config.pbtxt" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        (Setting(2, 1, None), "deploy: {instances: 2, threads: 1}, without dynamic batching"),
        (
            Setting(2, 1, 250),
            "deploy: {instances: 2, threads: 1}, and by this config.pbtxt alone dynamic batching with a delay",
        ),
    ],
)
def test_keys_that_deploy_does_not_give_a_model_of_tokens_are_not_named(setting, line):
    trial = Trial(setting, 0.05, probes={4: [Probe(100, np.full(200, 0.01))]})
    evidence = {"p99_ms": 50, "rows": "3 rows", "grid": 40, "chosen": trial.figures(), "settings": [trial.figures()]}
    told = conclusions(evidence | {"arrivals": [{"rate": 50.0, "requests": 300, "p99_ms": 20.0, "in_time": 1.0}]})
    assert told[1].startswith(line) and not any("max_queue_size" in line for line in told)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tune", "--rate", "5"], "--rate is not used with --tune"),
        (["--p99-ms", "3"], "--p99-ms is not used without --tune"),
        (["--tokenizer", "x"], "--tokenizer is not used without --texts"),
    ],
)
def test_an_option_that_is_not_read_is_refused(options, told, capfd):
    with pytest.raises(SystemExit) as end:
        main(["loadtest", "127.0.0.1:1", "reviews", *options], prog_name="compress")
    assert end.value.code == 2 and f"E112 {told}" in capfd.readouterr().err


def test_only_a_runs_folder_is_tuned(capfd):
    with pytest.raises(SystemExit) as end:
        main(["loadtest", "127.0.0.1:1", "reviews", "--tune"], prog_name="compress")
    assert end.value.code == 2 and "E752 127.0.0.1:1: a server is not tuned from outside" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("given", "threads"), [(None, 2), (1, 1)])
def test_the_present_setting_is_what_is_served(classifier, monkeypatch, given, threads):
    """On one core with two threads: the server gives a session both."""

    class Found(Exception):
        pass

    def search(grid, limit, evaluate, *, start, present):
        assert start == 2 and present in grid.settings()
        raise Found(present.threads)

    made = SimpleNamespace(
        config=ModelConfig(name="bare"), runtime=RUNTIMES["onnxruntime"], evaluate=None, most_instances=lambda: 9
    )
    monkeypatch.setattr(tuned, "Bench", lambda *_, **__: made)
    monkeypatch.setattr(tuned, "Search", search)
    monkeypatch.setattr(tuned, "physical_cores", lambda: 1)
    monkeypatch.setattr(tuned, "served_cores", lambda: 2)
    with pytest.raises(Found, match=f"^{threads}$"):
        tune(None, None, None, 100.0, cores=given)


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "tuned").touch()
    with pytest.raises(UserError, match=r"E801 .*tuned: a file, where a folder is needed"):
        tune_model(str(tmp_path), "reviews", out=tmp_path / "tuned")
    with pytest.raises(UserError, match="E805"):
        tune_model(str(tmp_path), "reviews", out=tmp_path / "other")
    assert not (tmp_path / "other").exists(), "nothing is left where there is nothing to tune"


def test_what_is_not_served_is_not_tuned(tmp_path, classifier):
    """A setting's model has copies of the files beside the versions: of what a link leads to, too."""
    folder = write_repository(tmp_path / "models", "m", classifier, facts=FACTS, knobs=KNOBS)
    bench.link_model(folder, tmp_path / "good")
    assert (tmp_path / "good" / "labels.txt").read_text() == (folder / "labels.txt").read_text()
    (folder / "labels.txt").rename(tmp_path / "secret.txt")
    (folder / "labels.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(UserError, match=r"E724 .*names 'labels\.txt', which leads out of the repository"):
        bench.link_model(folder, tmp_path / "evil")
    assert not (tmp_path / "evil").exists()


def test_a_limit_that_no_setting_keeps_is_told(monkeypatch):
    parts = {"runtime": RUNTIMES["onnxruntime"], "most_instances": lambda: 1}
    made = SimpleNamespace(config=ModelConfig(name="reviews"), evaluate=simulated(capacity=lambda setting: 300), **parts)
    monkeypatch.setattr(tuned, "Bench", lambda *_, **__: made)
    with pytest.raises(CheckError, match=r"E753 reviews: no setting keeps a p99 latency of 0.01 ms; the nearest is 1 x 1"):
        tune(None, None, None, 0.01, cores=1)


def test_names_of_models_and_files_become_no_markup():
    chosen = {"instances": 1, "threads": 1, "max_queue_delay_us": 100, "max_batch_tokens": 64}
    setting = {**chosen, "answers_a_second": 5.0, "spread": 0.1, "clients": 1, "p99_ms": 3.0}
    arrivals = [{"rate": 1.0, "requests": 60, "p99_ms": 1.0, "in_time": 1.0}]
    evidence = {"settings": [setting], "chosen": setting, "grid": 1, "arrivals": arrivals, "p99_ms": 10.0, "cores": 2}
    text = to_markdown({**evidence, "model": "<img src=x>", "rows": "3 texts of [a](b).txt"})
    assert text.startswith("# Settings of &lt;img src=x> for") and r"settings with 3 texts of \[a\](b).txt" in text
    assert "deploy: {instances: 1, threads: 1, max_queue_delay_us: 100, max_batch_tokens: 64}" in text, "keys to be copied"


def test_a_real_server_is_tuned(tmp_path, classifier, tokenizer_folder, triton, monkeypatch):
    monkeypatch.setattr(setting_grid, "DELAYS", (None, 0))
    monkeypatch.setattr(tuned, "ARRIVALS", (0.2,))
    monkeypatch.setattr(tuned, "ARRIVAL_SECONDS", 0.5)
    monkeypatch.setattr(bench, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(bench, "WARMUP_SECONDS", 0.05)
    monkeypatch.setattr(coarse_to_fine, "COARSE_ROUNDS", 1)
    monkeypatch.setattr(coarse_to_fine, "FINAL_ROUNDS", 1)
    monkeypatch.setattr(bench, "FEWEST", 1)
    monkeypatch.setattr(bench, "EmbeddedServer", QuickServer)
    monkeypatch.setattr(trials, "LADDER", (1, 2))
    options = {"facts": FACTS, "tokenizer_folder": tokenizer_folder, "knobs": KNOBS}
    folder = write_repository(tmp_path / "repository", "reviews", classifier, **options)
    tokens = [{"input_ids": [2, *range(4, 4 + count), 3], "attention_mask": [1] * (count + 2)} for count in (1, 3, 5)]
    names = {"input": [{"name": name, "data_type": "TYPE_INT64"} for name in tokens[0]]}
    with Fleet(Traffic(token_rows(names, tokens), "3 rows")) as fleet:
        text, evidence = tune(folder, fleet, tmp_path / "scratch", 10_000, seconds=0.2, cores=1)
    config = text_format.Parse(text, ModelConfig())
    assert config.name == "reviews" and config.parameters["intra_op_thread_count"].string_value == "1"
    assert evidence["chosen"] in evidence["settings"] and len(evidence["settings"]) == 2
    assert (
        "(chosen)" in "".join(itertools.chain(*setting_rows(evidence))) and "deploy: {instances: 1" in conclusions(evidence)[1]
    )
    assert json.loads(json.dumps(evidence)) and "| instances x threads |" in to_markdown(evidence)
