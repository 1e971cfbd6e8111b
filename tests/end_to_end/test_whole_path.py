"""The whole product on a tiny model: every real stage, the command line, a live Triton server, the report, a second run."""

import json
import shutil
import signal
import subprocess
import sys
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest
import torch
from click.testing import CliRunner

from compressor import load
from compressor.deltas.links import chain, chains
from compressor.errors import CheckError
from compressor.tasks import TaskConfig
from compressor.tasks.features import pad
from export.runtimes.onnxruntime import open_session
from export.runtimes.sessions import run as run_onnx
from export.runtimes.sessions import session
from pipelines.cli.commands import main
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.reporting.growth_report import allocation_record
from pipelines.sweeps.trial_run import costs_of
from serving.predict import predict
from tests.end_to_end.conftest import ENVIRONMENT
from tests.tiny import STAGES, write_pipeline


def artifact(out, name: str, number: int = 1):
    """Folder and manifest of the `number`-th stage called `name`."""
    stages = json.loads((out / "tiny" / "run.json").read_text())["stages"]
    made = [stage["artifact"] for stage in stages if stage["stage"] == name][number - 1]
    folder = out / ".store" / made
    return folder, json.loads((folder / "artifact.json").read_text())


def test_every_stage_and_the_summary(finished):
    _, out, printed = finished
    assert [stage["stage"] for stage in json.loads((out / "tiny" / "run.json").read_text())["stages"]] == [
        next(iter(stage)) for stage in STAGES
    ]
    assert "p50 latency, batch 2" in printed and printed.rstrip().endswith("report.html")
    report = json.loads((out / "tiny" / "report.json").read_text())
    # int8 of a tiny dense model, which is not shipped, may be beyond its bound where weights have 7 bits
    assert all(hop["passed"] for hop in report["parity"] if hop["gated"]) and len(report["parity"]) == 9
    assert {hop["kind"] for hop in report["parity"]} == {"removed", "merged", "fp32", "int8", "served"}
    low, high = report["control"]["difference_interval"]
    assert report["control"]["stage"] == "recover" and low <= report["control"]["difference"] <= high
    assert "of the control" in report["headline"] and "control: " in printed
    profiled = [row["profile"]["kinds"][0]["kind"] for row in report["variants"] if row["runtime"] != "pytorch"]
    assert len(profiled) == 4 and "other" not in profiled


def test_the_checkpoint_is_smaller_and_equals_the_exported_graph(finished):
    """Of an unseen row the logits of both are equal; the server's file is the exported one of its precision, unchanged."""
    path, out, _ = finished
    merged, _ = artifact(out, "merge")
    model, weights = load(merged), "model.safetensors"
    assert (merged / weights).stat().st_size < (path.parent / "model" / weights).stat().st_size
    kept = json.loads((merged / "config.json").read_text())["per_layer_config"]
    assert kept == {str(layer): {"num_attention_heads": 3, "intermediate_size": 12} for layer in (0, 1)}
    onnx, manifest = artifact(out, "export")
    rows = [{"input_ids": [2, 4, 17, 3], "token_type_ids": [0] * 4, "attention_mask": [1] * 4}]
    batch = pad(rows, 0)
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(values) for name, values in batch.items()}).logits.numpy()
    files = manifest["metadata"]["files"]["compressed"]["onnxruntime"]
    assert abs(run_onnx(session(onnx / files["fp32"]["path"]), batch) - expected).max() < 1e-4
    deployed, manifest = artifact(out, "deploy")
    served = deployed / "repository" / "tiny" / "1" / "model.onnx"
    assert served.read_bytes() == (onnx / files[manifest["metadata"]["precision"]]["path"]).read_bytes()


def test_the_dry_run_foretold_it(finished):
    """Closed forms against what was trained and written; nothing is run."""
    path, out, _ = finished
    plan = run_pipeline(load_pipeline(path), out, dry_run=True).plan
    trained = {name: artifact(out, name)[1]["metadata"]["trainable"]["body"] for name in ("tune", "recover")}
    assert dict(plan.trainable) == trained
    merged = load(artifact(out, "merge")[0])
    assert plan.shape.parameters == sum(parameter.numel() for parameter in merged.parameters())
    measured = json.loads((artifact(out, "benchmark")[0] / "measurements.json").read_text())["candidates"]
    compressed = next(row for row in measured if row["model"] == "compressed")
    assert plan.shape.flops(16) == compressed["flops"]["16"]


def test_serve_and_predict(finished, tmp_path):
    """`compress serve RUN` answers `compress predict`, and SIGTERM stops it cleanly."""
    _, out, _ = finished
    command = [sys.executable, "-m", "pipelines.cli", "serve", str(out / "tiny")]
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    environment = {**ENVIRONMENT, "XDG_CACHE_HOME": str(tmp_path)}
    server = subprocess.Popen([*command, *ports], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        notes = tmp_path / "compress" / "servers"
        url = next(line for line in server.stdout if line.startswith("http")).split()[1]
        assert len(list(notes.glob("*.json"))) == 2, "it is known by its ports of HTTP and gRPC"
        told = CliRunner().invoke(main, ["predict", url, "tiny", "the film was great", "a dull plot", "--json"])
        first, second = map(json.loads, told.stdout.splitlines())
        assert {"class0", "class1"} == set(first["scores"]) and sum(first["scores"].values()) == pytest.approx(1.0)
        assert (first["label"], second["label"]) == ("class1", "class0")
    finally:
        server.send_signal(signal.SIGTERM)
        printed, _ = server.communicate(timeout=30)
    assert server.returncode == 0 and printed.rstrip().endswith("stopped"), printed
    assert not list(notes.glob("*.json"))


def test_a_second_run_reuses_everything(finished, tmp_path, capfd):
    path, out = finished.path, tmp_path / "runs"
    shutil.copytree(finished.out, out)  # while it runs, its folder says so
    before = {file: file.stat().st_mtime_ns for file in (out / ".store").rglob("*")}
    assert not main(["run", str(path), "--out", str(out)], standalone_mode=False)
    assert capfd.readouterr().out.count("reused") == len(STAGES)
    assert {file: file.stat().st_mtime_ns for file in (out / ".store").rglob("*")} == before


def test_the_report_loads_nothing_from_outside(finished):
    _, out, _ = finished
    parser, links = HTMLParser(), []
    parser.handle_starttag = lambda tag, attributes: links.extend(
        value for name, value in attributes if name in ("src", "href") and value
    )
    parser.feed((out / "tiny" / "report.html").read_text())
    assert not [link for link in links if not link.startswith("#")]


@pytest.mark.slow
def test_pairs_three_classes_mpnet(tmp_path, monkeypatch):
    """Sentence pairs, three classes, the other architecture, full tuning, lora recovery, fp32 only: through the server.

    The pipeline's threads are those of every session on the way.
    """
    threads = []

    def watched(*arguments, **options):
        live = open_session(*arguments, **options)
        threads.append(live.get_session_options().intra_op_num_threads)
        return live

    monkeypatch.setattr("export.runtimes.onnxruntime.open_session", watched)
    stages = [
        {"tune": {"method": "full", "epochs": 1, "learning_rate": 0.002, "batch_size": 16}},
        {"prune": {"structure": "heads", "criterion": "delta", "remove": 0.5}},
        {"recover": {"method": "lora", "rank": 2, "epochs": 1}},
        "merge",
        {"export": {"precision": ["fp32"]}},
        {"deploy": {"name": "pairs"}},
    ]
    path = write_pipeline(tmp_path, stages=stages, model_type="mpnet", pairs=True, classes=3, rows=60)
    result = run_pipeline(load_pipeline(path, ["threads=1"]), tmp_path / "runs")
    assert threads == [1, 1, 1]  # dense and compressed, exported; compressed, deployed
    metadata = {name: made.metadata for name, made in result.artifacts.items()}
    assert metadata["tune"]["labels"] == ["class0", "class1", "class2"]
    assert [len(row["heads"]) for row in metadata["prune"]["kept"].values()] == [2, 2]
    assert metadata["deploy"]["parity"][0]["passed"] and metadata["merge"]["parity"][0]["max_difference"] == 0.0
    from serving.server import EmbeddedServer

    repository = result.artifacts["deploy"].folder / "repository"
    with EmbeddedServer(repository, log_path=tmp_path / "triton.log") as server:
        folder = repository / "pairs" / "1"
        (answer,) = predict(server.url, "pairs", [("a good film", "the plot")], version_folder=folder)
        (by_text,) = predict(server.url, "pairs", [("a good film", "the plot")])
    assert by_text.scores == pytest.approx(answer.scores, abs=1e-5)
    assert set(answer.scores) == {"class0", "class1", "class2"}


def test_a_failed_check_stops_the_run_and_publishes_nothing(tmp_path, monkeypatch):
    """A fault in the surgery: the masked reference is not masked. Exit code 3, the hop and the row are named."""
    path = write_pipeline(tmp_path, stages=STAGES[:3], rows=40)
    monkeypatch.setattr("pipelines.stages.prune.remove_units.silence", lambda model, removals: None)
    with pytest.raises(CheckError, match=r"E610 .*heads masked -> removed.*worst row \d+ of 80") as caught:
        run_pipeline(load_pipeline(path), tmp_path / "runs")
    assert caught.value.exit_code == 3
    assert sorted(made.name.split("-")[0] for made in (tmp_path / "runs" / ".store").iterdir()) == ["select", "tune"]


def test_recipes_are_sound():
    """Every bundled recipe passes the checks that need no model; the code's setting differs from the paper's where told."""
    from pipelines.file.config import RECIPES, find_pipeline

    configs = {}
    for path in RECIPES.glob("*.yaml"):
        pipeline = load_pipeline(find_pipeline(path.stem))
        assert pipeline.name == path.stem and isinstance(pipeline.task, TaskConfig) and pipeline.task.train.is_file()
        configs[path.stem] = {entry.id: entry.config for entry in pipeline.stages}
    paper, repository = configs["paper"], configs["dsee_repo"]
    for prune in (paper["prune"].items[0], repository["prune"].items[0]):
        assert (prune.structure, prune.criterion, prune.remove) == ("heads", "delta", 3)
    assert (paper["select"].setting, repository["select"].setting) == (None, "released_rank1")
    assert repository["select"].places == paper["select"].places
    assert (repository["tune"].rank, repository["tune"].alpha, repository["recover"].method) == (16, 32, "same")
    assert all((repository[stage].warmup, repository[stage].keep_best) == (0, True) for stage in ("tune", "recover"))


INSERTED = {
    "adapter": {"method": "adapter", "bottleneck": 4},
    "prefix": {"method": "prefix", "length": 3},
    "propetl-prefix": {"method": "propetl", "shared": "prefix", "length": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", INSERTED)
def test_what_cannot_be_merged_is_pruned_around_and_exported(name, tmp_path):
    """Adapters and prefixes are code: they travel through prune, recover, merge and the exporter, with parity at each hop."""
    fast = {"epochs": 1, "learning_rate": 0.01, "batch_size": 8}
    prune = [{"structure": "heads", "criterion": "taylor", "remove": 1}]
    stages = [{"tune": {**INSERTED[name], **fast}}, {"prune": prune}, {"recover": fast}, {"merge": None}, {"export": {}}]
    result = run_pipeline(load_pipeline(write_pipeline(tmp_path, stages=stages, rows=80)), tmp_path / "out")
    assert result.artifacts["export"].metadata["parity"]
    assert (result.artifacts["merge"].folder / "model_with_inserts.safetensors").is_file()


def test_a_block_goes_and_all_blocks_compete(tmp_path):
    """Whole blocks and one ranking over the model, by the loss; the plan's parameters are the merged model's."""
    items = [
        {"structure": "layers", "criterion": "taylor", "remove": 1},
        {"structure": "heads", "criterion": "fisher", "scope": "global", "normalize": True, "remove": 2},
        {"structure": "neurons", "criterion": "delta", "scope": "global", "remove": 0.25},
    ]
    fast = {"epochs": 1, "learning_rate": 0.01, "batch_size": 8}
    stages = [{"tune": {"method": "lora", "modules": "all", **fast}}, {"prune": items}, {"recover": fast}, {"merge": None}]
    path = write_pipeline(tmp_path, stages=stages, rows=60)
    result = run_pipeline(load_pipeline(path), tmp_path / "out")
    kept = result.artifacts["merge"].metadata["kept"]
    assert [(len(row["heads"]), len(row["neurons"])) for row in kept.values()] == [(2, 18)]
    merged = load(result.artifacts["merge"].folder)
    planned = run_pipeline(load_pipeline(path), tmp_path / "out", dry_run=True).plan.shape
    assert planned.parameters == sum(parameter.numel() for parameter in merged.parameters())


PRUNE = {"prune": [{"structure": "heads", "criterion": "delta", "remove": 1}]}
DIFF = {"method": "diff_pruning", "modules": "all", "budget": 0.02}
STORED_AS = {
    "vera": ([{"tune": {"method": "vera", "modules": "all"}}, PRUNE, {"recover": {}}], "vera"),
    "mixout": ([{"tune": {"method": "mixout"}}, PRUNE, {"recover": {}}], "offset"),
    "child f": ([{"tune": {"method": "child_tuning"}}, PRUNE, {"recover": {"method": "child_tuning"}}], "offset"),
    "child d": ([{"select": {"score": "fish", "ratio": 0.3}}, {"tune": {"method": "child_tuning", "child": "d"}}], "sparse"),
    "diff pruning": ([{"tune": DIFF}, PRUNE, {"recover": DIFF}], "sparse"),
}


@pytest.mark.parametrize("name", STORED_AS)
def test_a_method_is_stored_as_its_link(name, tmp_path):
    """Trained, stored, cut, recovered and merged; the plan says what is trained and what is left of it."""
    stages, kind = STORED_AS[name]
    fast = {"epochs": 1, "learning_rate": 0.01, "batch_size": 8}
    stages = [{key: {**it, **fast} if key in ("tune", "recover") else it for key, it in one.items()} for one in stages]
    pipeline = load_pipeline(write_pipeline(tmp_path, stages=[*stages, {"merge": None}], rows=80))
    result = run_pipeline(pipeline, tmp_path / "out")
    tune, plan = result.artifacts["tune"], run_pipeline(pipeline, tmp_path / "out", dry_run=True).plan
    links = [link for _, owner, key in chains(load(tune.folder, base=tmp_path / "model")) for link in chain(owner, key)]
    assert links and {link.kind for link in links} == {kind}
    assert tune.metadata["trainable"]["body"] == tune.metadata["closed_form"] == plan.trainable[0][1]
    if "recover" in result.artifacts:
        assert result.artifacts["recover"].metadata["trainable"]["body"] == plan.trainable[1][1]
    if kind == "sparse":
        assert sum(len(link.values) for link in links) == tune.metadata["places"]
    if name == "diff pruning":
        left = tune.metadata["places"]
        assert tune.metadata["formula"].endswith(f"|Ω| = {left}") and plan.trainable[0][0] == f"tune, {left} kept"
    assert load(result.artifacts["merge"].folder)


def test_one_run_of_id3_gives_a_series_of_budgets(tmp_path):
    """Each delta's places are among the next one's, and each file loads as a whole model; where Ω grew is recorded."""
    tune = {"method": "selective", "strategy": "increment", "modules": "all", "budget": 0.02, "checkpoints": [0.004, 0.01]}
    path = write_pipeline(tmp_path, stages=[{"tune": {**tune, "learning_rate": 0.02, "batch_size": 8}}], rows=80)
    artifact = run_pipeline(load_pipeline(path), tmp_path / "out").artifacts["tune"]
    files = [artifact.folder / row["file"] for row in artifact.metadata["budgets"]]
    models = [load(base=tmp_path / "model", delta=file) for file in files] + [load(artifact.folder, base=tmp_path / "model")]
    series = [{(key, place) for key, owner, _ in chains(model) for place in chain(owner)[0].omega.tolist()} for model in models]
    expected = [*(row["places"] for row in artifact.metadata["budgets"]), artifact.metadata["closed_form"]]
    assert [len(places) for places in series] == expected
    assert series[0] < series[1] < series[2]
    own = sum(path.stat().st_size for path in artifact.folder.glob("*.safetensors"))
    assert costs_of({"tune": artifact})["bytes of the stored model"] == own, "smaller budgets are other results"
    steps = json.loads((artifact.folder / "allocation.json").read_text())["steps"]
    owned = [len(chain(owner)[0].omega) for _, owner, _ in chains(models[-1])]
    assert sorted(filter(None, steps[-1]["entries"])) == sorted(filter(None, owned)) and steps[-1]["chosen"] == expected[-1]
    (record,) = allocation_record(SimpleNamespace(artifacts=[artifact]))["allocation"]
    assert record["steps"][-1]["chosen"] == expected[-1] and sum(map(sum, record["last"])) == pytest.approx(1)
