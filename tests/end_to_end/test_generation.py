"""A text for each prompt, all the way: tuned, cut, recovered from a live teacher, exported with its cache, and it says it."""

import json
import shutil

import numpy as np
import onnx
import pytest
import torch
import yaml
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from compressor import load
from compressor.errors import CheckError, UserError
from compressor.models.build import GENERATES, auto_class_of
from compressor.models.special_tokens import tokenizer_of
from export.generation.greedy import open_generator
from export.latency.table import exported
from export.runtimes.sessions import run as run_session
from export.runtimes.sessions import session
from pipelines.cli.commands import main
from pipelines.engine.preflight import check_inputs
from pipelines.engine.runner import run_pipeline
from pipelines.file.config import load_pipeline
from pipelines.runs.served import find_repository
from pipelines.runs.verify import verify
from serving.deployment.answers import read_answers, write_answers
from serving.deployment.publish import Options, deploy
from serving.deployment.target import Target
from serving.deployment.triton_control import Control
from serving.server import EmbeddedServer
from tests.compressor.conftest import encoding, tiny
from tests.tiny import write_pipeline

FAST = {"learning_rate": 0.02, "batch_size": 8}
TUNE = {"tune": {"method": "dsee", "rank": 4, "modules": "all", "epochs": 8, **FAST}}
STAGES = [
    {"select": {"score": "fish", "count": 8, "samples": 32, "batch_size": 8, "modules": "all"}},
    TUNE,
    {"prune": [
        {"structure": "heads", "criterion": "taylor", "remove": 1},
        {"structure": "neurons", "criterion": "taylor", "remove": 0.25},
        {"structure": "weights", "criterion": "fisher", "remove": 0.1, "modules": ["query", "ffn_in"]},
    ]},
    {"recover": {"method": "lora", "rank": 4, "modules": "all", "epochs": 3, **FAST}},
    {"merge": None},
    {"export": None},
    {"deploy": {"name": "writer"}},
    {"benchmark": {"batch": [1], "length": [16], "rounds": 6, "machine_limits": False}},
    {"report": None},
]  # fmt: skip
LORA = {"tune": {"method": "lora", "rank": 2, "epochs": 1, **FAST}}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    path = write_pipeline(tmp_path_factory.mktemp("project"), kind="generation", model_type="gpt2", stages=STAGES)
    pipeline = yaml.safe_load(path.read_text())
    pipeline["task"]["decode"] = {"max_new_tokens": 8, "rows": 64, "metrics": ["bleu", "exact_match", "ter"]}
    path.write_text(yaml.safe_dump(pipeline, sort_keys=False))
    return path


@pytest.fixture(scope="module")
def run(project):
    """The result of the whole run."""
    return run_pipeline(load_pipeline(project), project.parent / "runs")


def test_it_learns_to_answer_and_keeps_it(project):
    pipeline = load_pipeline(project, ["recover.control=false"])
    artifacts = run_pipeline(pipeline, project.parent / "runs", until="merge").artifacts
    metadata = {name: made.metadata for name, made in artifacts.items()}
    assert all(hop["passed"] and hop["rows"] == 256 for name in ("prune", "merge") for hop in metadata[name]["parity"])
    assert [hop["kind"] for hop in metadata["prune"]["parity"]] == ["removed, generated"] * 2 + ["merged, generated"]
    for name in ("tune", "recover", "merge"):
        quality = metadata[name]["quality"]
        assert quality["likelihood"] > 0.3 and quality["accuracy"] > 0.7 and quality["rows"] == 320
        assert quality["likelihood"] == pytest.approx(1 / quality["perplexity"])
        texts = [json.loads(line) for line in (artifacts[name].folder / "generated.jsonl").read_text().splitlines()]
        assert len(texts) == 64 == metadata[name]["generated"]["prompts"] < metadata[name]["generated"]["references"]
        right = [row["text"] in row["references"] for row in texts]
        assert quality["exact_match"] == pytest.approx(sum(right) / 64) and quality["exact_match"] > 0.3 < quality["bleu"]
    assert "generated" not in metadata["prune"] and metadata["merge"]["generated"] == metadata["recover"]["generated"]
    assert metadata["tune"]["trainable"]["head"] == 0 and metadata["tune"]["head"] == "own"
    assert auto_class_of(load(artifacts["merge"].folder)) == GENERATES


def test_a_dry_run_knows_its_cost(project):
    told = dict(
        (what, after) for what, _, after in run_pipeline(load_pipeline(project), project.parent, dry_run=True).plan.rows()
    )
    assert any(what.startswith("trainable in tune (head 0 apart)") for what in told) and told["parameters"]


def test_tokens_behind_a_prompt_need_room_too(project):
    """The model has positions for 64 tokens, and 16 are timed behind each prompt: told before anything is trained."""
    longer = "benchmark.length=[16, 56]"
    told = r"E113 .*benchmark.length.*: 56 tokens and 16 generated behind them, where the model has .* 64. Use at most 48"
    with pytest.raises(UserError, match=told):
        check_inputs(load_pipeline(project, [longer]))
    assert check_inputs(load_pipeline(project, [longer, "benchmark.further_tokens=false"]))


def test_stages_are_made_anew_where_other_tokens_end_a_text(project):
    """generation_config.json decides where the deployed model stops."""
    own = project.parent / "model/generation_config.json"
    before, end = own.read_bytes(), json.loads((project.parent / "model/config.json").read_text())["eos_token_id"]
    made = []
    for ends in (end, [end, 7], [7, end]):
        own.write_text(json.dumps({"eos_token_id": ends}))
        made.append(run_pipeline(load_pipeline(project), project.parent / "runs", until="select").artifacts["select"].id)
    own.write_bytes(before)
    assert made[0] != made[1] == made[2]


@pytest.mark.slow
def test_every_hop_is_proven_and_verified_again(run):
    exported, merged = run.artifacts["export"].metadata, run.artifacts["merge"].metadata["quality"]
    for file in exported["files"]["compressed"]["onnxruntime"].values():
        assert abs(file["quality"]["likelihood"] - merged["likelihood"]) <= 0.01
    assert len(exported["parity"]) == 4 and all(hop["passed"] for hop in exported["parity"])
    plain = [hop for hop in exported["parity"] if hop["kind"] == "fp32, generated"]
    assert len(plain) == 2 and all(hop["generated_agreement"] == 1.0 and hop["generated"] > 100 for hop in plain)
    assert {"batch 1", "generating, on a past", "generating, padded on the left"} <= plain[0]["batches"].keys()
    checks = verify(run.folder)
    assert [check.fault for check in checks if not check.passed] == []
    assert sum(check.hop.endswith(", generating") for check in checks) == 4 and checks[-1].hop == "served, generated texts"


@pytest.mark.slow
def test_it_is_published_on_a_live_server(run, tmp_path):
    """The second version says otherwise than it was recorded to: the first goes on."""
    repository = tmp_path / "run"
    shutil.copytree(find_repository(run.folder).repository, repository)
    published = tmp_path / "published"
    published.mkdir()
    token = "a-token-of-this-test-and-no-other"
    with EmbeddedServer(published, log_path=tmp_path / "log", token=token) as server:
        control = Control.at(server.url, header=("Authorization", f"Bearer {token}"))
        target = Target.at(str(published))
        (first,) = deploy(repository, target, control, Options(run="first"))
        assert (first.model, first.version) == ("writer-text", 1)
        answers = read_answers(repository / "writer-text" / "1")
        answers[0].outputs[0]["data"] = ["something else"]
        write_answers(repository / "writer-text" / "1", answers)
        with pytest.raises(CheckError, match=r"E758 .*1 of 8 recorded answers differ: request 1: TEXT is"):
            deploy(repository, target, control, Options(run="second"))
        assert target.versions("writer-text") == [1] and control.ready("writer-text", 1)


@pytest.mark.slow
def test_verify_generates_again(run):
    """Keys and values that come back swapped: right answers in one pass, wrong ones from the next token on."""
    path = run.artifacts["export"].folder / "compressed" / "model.onnx"
    whole = path.read_bytes()
    graph = onnx.load_from_string(whole)
    swapped = {"present.0.key": "present.0.value", "present.0.value": "present.0.key"}
    for node in graph.graph.node:
        for place, name in enumerate(node.output):
            node.output[place] = swapped.get(name, name)
        for place, name in enumerate(node.input):
            node.input[place] = swapped.get(name, name)
    try:
        path.write_bytes(graph.SerializeToString())
        failed = {check.hop: check.code for check in verify(run.folder, serve=False, stage="export") if not check.passed}
    finally:
        path.write_bytes(whole)
    assert failed == {"files and sha256": "E803", "compressed -> fp32, generating": "E610"}


@pytest.mark.slow
def test_the_exported_folder_generates_what_was_learnt(run, project):
    tokenizer = tokenizer_of(project.parent / "model")
    prompts = tokenizer(["the film lovely", "the film awful"], return_tensors="np")
    said = open_generator(run.artifacts["export"].folder / "compressed")(prompts["input_ids"], prompts["attention_mask"], 10)
    told = tokenizer.batch_decode(said, skip_special_tokens=True)
    assert told[0].startswith("the film was ") and told[1].endswith(" story")


@pytest.mark.slow
def test_compress_export_takes_the_merged_folder(run, tmp_path):
    options = ["--precision", "int4", "--out", str(tmp_path / "onnx")]
    done = CliRunner().invoke(main, ["export", str(run.artifacts["merge"].folder), *options])
    assert done.exit_code == 0 and "generated alike" in done.output


@pytest.mark.slow
def test_the_report_speaks_of_likelihood_and_perplexity(run):
    report = json.loads((run.folder / "report.json").read_text())
    quality = report["variants"][0]["quality"]
    assert report["metric"]["key"] == "likelihood"
    assert report["summary"][0]["dense"].endswith(f", perplexity {quality['perplexity']:.2f}")
    assert "likelihood of a token" in report["headline"]
    assert any("tokens generated behind it, on a cache, are timed apart" in note for note in report["notes"])
    (further,) = [row for row in report["summary"] if row["metric"] == "p50 of a further token, batch 1 behind 16"]
    assert further.keys() >= {"dense", "runtime", "compressed", "change", "change_runtime"}
    assert (run.folder / "report.html").read_text().count("likelihood of a token") >= 4
    scores = {(row["stage"], row["metric"]): row for row in report["generated"]["scores"]}
    assert len(scores) == 9 and scores["tune", "bleu"].keys() == {"stage", "metric", "value", "interval"}
    low, high = scores["merge", "ter"]["change_interval"]
    assert low <= scores["merge", "ter"]["change"] <= high
    page = (run.folder / "report.md").read_text()
    assert "## Every variant: tokens one at a time" in page and page.count("| 1 | 16 |") >= 10
    assert "| merge | TER | " in page and "## Generated texts: examples" in page and "greedy search for 64 validation" in page


@pytest.mark.slow
def test_a_target_and_all_of_a_live_teacher(tmp_path):
    prune = {"prune": {"target": {"flops": 0.7, "length": 16}, "price_rows": 40}}
    stages = [LORA, prune, {"recover": {"distill": "both", **FAST}}, {"merge": None}]
    path = write_pipeline(tmp_path, kind="generation", model_type="llama", stages=stages, rows=40)
    artifacts = run_pipeline(load_pipeline(path), tmp_path / "runs").artifacts
    assert artifacts["prune"].metadata["target"]["predicted"] and artifacts["recover"].metadata["distill"] == "both"
    assert np.isfinite(artifacts["merge"].metadata["quality"]["log_likelihood"])


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_what_a_timed_target_measures_is_the_pass_over_a_prompt(architecture, tmp_path):
    model = tiny(architecture, torch.float32, auto=AutoModelForCausalLM)
    rows = {name: one.numpy() for name, one in encoding().items()}
    variant = exported("x", model, rows, tmp_path)
    with torch.no_grad():
        expected = model(**encoding()).logits.numpy()
    there = rows["attention_mask"] == 1
    assert np.abs(run_session(session(variant.path), rows) - expected)[there].max() < 1e-4 * np.abs(expected).max()


MERGED = [LORA, {"merge": None}]
EXPORTED = [*MERGED, {"export": {"precision": ["fp32"]}}]
TIMED = {"prune": {"target": {"speedup": 1.2, "length": 16, "precision": "int8"}}}


@pytest.mark.parametrize(
    ("model_type", "stages", "options", "code"),
    [
        ("bert", [LORA], [], "E309"),
        ("t5", [LORA], [], "E309"),
        ("gpt2", [LORA], ["task.max_length=4"], "E213"),
        ("gpt2", EXPORTED, ["export.precision=auto"], "E646"),
        ("gpt2", EXPORTED, ["export.precision=bf16"], "E646"),
        ("gpt2", EXPORTED, ["export.runtime=openvino"], "E646"),
        ("gpt2", [LORA, {"export": {"merge": False}}], [], "E646"),
        ("gpt2", [LORA, TIMED], [], "E646"),
    ],
)
def test_what_cannot_be_is_told(model_type, stages, options, code, tmp_path):
    path = write_pipeline(tmp_path, kind="generation", model_type=model_type, stages=stages, rows=8)
    with pytest.raises(Exception, match=rf"{code} ") as caught:
        run_pipeline(load_pipeline(path, options), tmp_path / "runs")
    assert caught.value.exit_code == 2
