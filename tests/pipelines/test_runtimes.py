"""What `runtime` may ask for, found before anything runs."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from compressor.errors import CheckError, UserError, UserErrors
from compressor.models.reference import Reference
from compressor.processor import processor, weight_bits
from compressor.tasks.task_kind import kind_of
from export.runtimes.runtime_registry import RUNTIMES
from pipelines.engine import environment
from pipelines.engine.preflight import check_environment
from pipelines.engine.runner import run_pipeline
from pipelines.engine.stage import Artifact, Entry, Inputs, all_stages
from pipelines.file.config import load_pipeline
from pipelines.stages.benchmark import config as benchmark
from pipelines.stages.benchmark.measured_files import candidates
from pipelines.stages.deploy import config as deploy
from pipelines.stages.deploy.run import deployed_as
from pipelines.stages.export import config as export
from pipelines.stages.merge import config as merge
from pipelines.stages.prune import config as prune
from pipelines.stages.prune.targets import Target
from pipelines.stages.prune.timed_file import warnings_of
from pipelines.stages.recover import config as recover
from pipelines.stages.report import config as report
from pipelines.stages.tune import config as tune
from tests.tiny import write_model, write_pipeline


def entry(module, **config):
    return Entry(module.STAGE.name, module.STAGE.name, module.STAGE.config(**config))


def problems(module, config, *earlier):
    return [(problem.code, problem.key) for problem in module.check(module.STAGE.config(**config), earlier)]


BOTH = entry(export, runtime=["onnxruntime", "openvino"])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"runtime": "openvino", "calibration_rows": 8}, []),
        ({"calibration_rows": 8}, [("E606", ("calibration_rows",))]),
        ({"runtime": "openvino", "precision": "fp32", "calibration_rows": 8}, [("E606", ("calibration_rows",))]),
    ],
)
def test_calibration_rows_need_something_to_calibrate(config, expected):
    assert problems(export, config) == expected


def test_deploy_takes_what_is_exported():
    assert problems(deploy, {"runtime": "openvino", "precision": "int8"}, BOTH) == []
    assert problems(deploy, {"runtime": "openvino"}, entry(export)) == [("E725", ("runtime",))]
    only = entry(export, runtime="openvino", precision="fp32")
    assert problems(deploy, {"precision": "int8"}, only) == [("E725", ("precision",))]
    both = entry(export, runtime=["onnxruntime", "openvino"], precision=["fp32", "fp16"])
    assert problems(deploy, {"runtime": "openvino", "precision": "fp16"}, both) == [("E725", ("precision",))]
    assert problems(deploy, {"runtime": "openvino", "precision": "fp32"}, both) == []
    assert problems(deploy, {}, only) == []


def test_keys_of_deploy_that_nothing_uses_are_refused():
    assert problems(deploy, {"interfaces": ["tokens"], "max_queue_size": 2}, BOTH) == [("E403", ("max_queue_size",))]
    assert problems(deploy, {"max_queue_size": 2}, BOTH) == []

    def of_generation(**config):
        found = deploy.with_tasks(deploy.DeployConfig(**config), False, ["generation"])
        return [(problem.code, problem.key) for problem in found]

    assert of_generation(name="writer", interfaces=["text"], threads=2) == []
    assert of_generation(interfaces=["tokens"], instances=4) == [("E403", ("interfaces",)), ("E403", ("instances",))]


def test_the_default_is_the_first_runtime_and_int8():
    chosen = deploy.DeployConfig().chosen
    both = {"fp32": {}, "int8": {}}
    assert chosen(["openvino", "onnxruntime"], {"onnxruntime": both, "openvino": both}) == ("openvino", "int8")
    assert chosen(["onnxruntime"], {"onnxruntime": {"fp32": {}}}) == ("onnxruntime", "fp32")


def test_what_was_left_out_is_not_deployed_and_nothing_else_in_its_place():
    """int8 of OpenVINO failed its comparison: the default takes what passed, who names it is told."""
    files, order = {"onnxruntime": {"fp32": {}, "int8": {}}, "openvino": {"fp32": {}}}, ["openvino", "onnxruntime"]
    assert deploy.DeployConfig().chosen(order, files) == ("openvino", "fp32")
    assert deploy.DeployConfig(precision="int8").chosen(order, files) == ("onnxruntime", "int8")
    with pytest.raises(CheckError, match="E616 nothing to deploy: openvino int8 did not pass"):
        deploy.DeployConfig(runtime="openvino", precision="int8").chosen(order, files)
    with pytest.raises(CheckError, match="E616"):
        deploy.DeployConfig(runtime="openvino").chosen(order, {"onnxruntime": {"int8": {}}})


def test_the_first_runtime_is_the_first_that_export_names(tmp_path):
    """The keys of stored metadata are sorted."""
    files = {"onnxruntime": {"fp32": {"path": "a.onnx"}}, "openvino": {"fp32": {"path": "a.xml"}, "int8": {"path": "b.xml"}}}
    metadata = {"files": {"compressed": files}, "runtimes": ["openvino", "onnxruntime"]}
    exported = Artifact(tmp_path, "export-0", "onnx", "export", "export", {}, metadata)
    task = SimpleNamespace(kind="classification", max_length=9, text_columns=("text",))
    inputs = Inputs(Reference("", write_model(tmp_path / "model"), ""), task, 0, (exported,))
    data = SimpleNamespace(label_names=["a", "b"], pad_id=0, kind=kind_of("classification"))
    first, _ = deployed_as(deploy.DeployConfig(), inputs, data, tmp_path)
    assert (first.runtime, first.precision, first.path) == (RUNTIMES["openvino"], "int8", tmp_path / "b.xml")
    only, _ = deployed_as(deploy.DeployConfig(runtime="onnxruntime"), inputs, data, tmp_path)
    assert (only.runtime, only.precision, only.path) == (RUNTIMES["onnxruntime"], "fp32", tmp_path / "a.onnx")
    sizes = {runtime: {name: {**file, "bytes": 1} for name, file in own.items()} for runtime, own in files.items()}
    exported = replace(exported, metadata={**metadata, "files": {"dense": sizes, "compressed": sizes}})
    timed = candidates(replace(inputs, artifacts=(exported,)), tmp_path)
    assert [one.runtime for one in timed] == ["pytorch", *["openvino", "openvino", "onnxruntime"] * 2]


def test_files_for_cuda_need_a_runtime_that_has_it():
    assert problems(export, {"precision": ["fp16", "bf16"]}) == []
    assert problems(export, {"precision": ["fp32", "fp16"], "runtime": ["onnxruntime", "openvino"]}) == []
    assert problems(export, {"precision": "fp16", "runtime": "openvino"}) == [("E642", ("runtime",))]
    both = export.ExportConfig(precision=["fp32", "fp16"], runtime=["openvino", "onnxruntime"])
    assert [both.precisions_of(name) for name in both.runtime] == [["fp32"], ["fp32", "fp16"]]


def test_a_target_is_timed_on_the_cpu_whatever_serves():
    later = [entry(export, precision=["fp32", "fp16"]), entry(deploy, device="cuda")]
    (told,) = warnings_of(Target(speedup=2.0), later)
    assert told == "the target is timed on the CPU, and 'deploy' serves on CUDA, which may gain less or more"
    assert not list(warnings_of(Target(flops=0.5), later))


def test_a_cpu_runs_no_file_for_cuda():
    only, beside = entry(export, precision=["fp16", "bf16"]), entry(export, precision=["fp32", "fp16"])
    assert problems(benchmark, {}, only) == [("E643", ("device",))]
    assert problems(benchmark, {"device": "cuda", "profile": True}, only) == [("E403", ("profile",))]
    assert problems(deploy, {}, only) == [("E643", ())]
    assert (
        problems(benchmark, {"device": "cuda"}, only) == problems(benchmark, {}, beside) == problems(deploy, {}, beside) == []
    )


def test_a_bf16_file_for_cuda_is_not_deployed_on_the_cpu():
    """ONNX Runtime's is for CUDA, OpenVINO's for the CPU."""
    chosen, precisions = deploy.DeployConfig().chosen, {"bf16": {}, "fp32": {}}
    assert chosen(["onnxruntime"], {"onnxruntime": precisions}) == ("onnxruntime", "fp32")
    order, files = ["onnxruntime", "openvino"], {"onnxruntime": precisions, "openvino": precisions}
    assert deploy.DeployConfig(precision="bf16").chosen(order, files) == ("openvino", "bf16")
    beside = entry(export, precision=["fp32", "bf16"])
    both = entry(export, precision=["fp32", "bf16"], runtime=order)
    assert problems(deploy, {}, beside) == problems(deploy, {"precision": "bf16"}, both) == []
    assert problems(deploy, {"precision": "bf16"}, beside) == [("E643", ())]
    assert problems(deploy, {"precision": "bf16", "runtime": "onnxruntime"}, both) == [("E643", ())]


def test_a_gpu_is_served_from_the_files_that_it_computes():
    chosen, files = deploy.DeployConfig(device="cuda").chosen, {"fp32": {}, "int8": {}, "fp16": {}}
    assert chosen(["onnxruntime"], {"onnxruntime": files}) == ("onnxruntime", "fp16")
    assert chosen(["openvino", "onnxruntime"], {"openvino": {"bf16": {}}, "onnxruntime": {"fp32": {}}}) == (
        "onnxruntime",
        "fp32",
    )
    with pytest.raises(CheckError, match="E616 nothing to deploy: fp16, bf16 or fp32 did not pass"):
        chosen(["onnxruntime"], {"onnxruntime": {"int8": {}}})
    half = entry(export, precision=["fp32", "int8", "fp16"], runtime=["onnxruntime", "openvino"])
    assert problems(deploy, {"device": "cuda"}, half) == problems(deploy, {"device": "cuda", "precision": "fp16"}, half) == []
    assert problems(deploy, {"device": "cuda", "precision": "int8"}, half) == [("E643", ())]
    assert problems(deploy, {"device": "cuda", "runtime": "openvino"}, half) == [("E643", ())]
    assert problems(deploy, {"precision": "fp16"}, half) == [("E643", ())]
    assert problems(deploy, {"device": "cuda", "streams": 2}, half) == [("E744", ("streams",))]
    other = entry(export, runtime=["openvino", "onnxruntime"])
    assert problems(deploy, {"streams": 2}, other) == [("E744", ("streams",))]
    assert problems(deploy, {"streams": 2, "runtime": "onnxruntime"}, other) == []
    chosen_by_precision = entry(export, precision=["fp32", "bf16"], runtime=["onnxruntime", "openvino"])
    assert problems(deploy, {"streams": 2, "precision": "bf16"}, chosen_by_precision) == [("E744", ("streams",))]
    assert problems(deploy, {"streams": 2}, entry(export, precision="auto", runtime=["openvino"])) == [("E744", ("streams",))]
    assert deploy.STAGE.device(deploy.DeployConfig(device="cuda")) == "cuda"


def test_what_is_proven_on_a_gpu_is_chosen_and_measured_for_it():
    """`precision: auto` compares files for the CPU by their times there."""
    auto, half = entry(export, precision="auto"), entry(export, precision=["fp32", "fp16"])
    assert problems(deploy, {"device": "cuda"}, auto) == [("E643", ("device",))]
    served = entry(deploy, device="cuda")
    assert problems(benchmark, {}, half, served) == [("E643", ("device",))]
    assert problems(benchmark, {"device": "cuda"}, half, served) == problems(benchmark, {}, half, entry(deploy)) == []
    on_cpu, on_gpu = entry(benchmark), entry(benchmark, device="cuda")
    assert problems(report, {}, half, on_cpu, served) == [("E643", ())]
    for stages in ((on_cpu, entry(deploy)), (on_gpu, served), (on_cpu, served, on_gpu)):
        assert problems(report, {}, half, *stages) == []
    assert deploy.STAGE.surroundings(deploy.DeployConfig(runtime="onnxruntime")) == {}
    assert deploy.STAGE.surroundings(deploy.DeployConfig(device="cuda")).keys() == {"accelerator", "runtimes"}


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (export, {"precision": ["fp32", "int8", "int8"]}),
        (export, {"runtime": ["openvino", "openvino"]}),
        (benchmark, {"batch": [8, 1, 8]}),
        (benchmark, {"length": [64, 64]}),
    ],
)
def test_what_is_named_twice_is_told(module, config):
    with pytest.raises(ValueError, match="names one twice"):
        entry(module, **config)


def test_deltas_are_merged_or_kept_apart_but_not_both():
    tuned, merged = Entry("tune", "tune", tune.TuneConfig(method="lora")), Entry("merge", "merge", merge.MergeConfig())
    assert problems(export, {}, tuned) == [("E504", ())]
    (told,) = export.check(export.ExportConfig(), (tuned,))
    assert told.fix == "Put a merge before export, or merge: false in it"
    for stages in ((entry(tune, method="full"),), (tuned, entry(recover, method="full"), entry(recover))):
        (told,) = export.check(export.ExportConfig(), stages)
        assert told.fix == "Put a merge before export", "every weight was trained, and there is no delta"
    assert problems(export, {"merge": False}, tuned) == problems(export, {}, tuned, merged) == []
    assert problems(export, {"merge": False}, tuned, merged) == [("E644", ("merge",))]


LORA = {"tune": {"method": "lora", "rank": 2}}
GROWN = {"method": "selective", "strategy": "increment", "budget": 0.3}
EVERYTHING = {"score": "sam", "modules": "everything", "scope": "global", "ratio": 0.1}


@pytest.mark.parametrize(
    ("stages", "fault"),
    [
        ([{"tune": {"method": "bitfit"}}], "kind 'offset'"),
        ([{"tune": {"method": "full"}}], "no delta"),
        ([{"tune": {**GROWN, "on": "adapter"}}], "no delta"),
        ([LORA, {"recover": {"method": "full"}}], "no delta"),
        ([LORA, {"select": EVERYTHING}, {"recover": {"method": "selective"}}], r"kind 'sparse' on .*embedding"),
        ([LORA, {"prune": [{"structure": "weights", "pattern": "2:4"}]}], "a mask"),
        ([LORA, {"prune": {"structure": "neurons", "criterion": "random", "remove": 1, "refit": 8}}], "kind 'refit'"),
    ],
)
def test_deltas_that_cannot_be_apart_are_told_before_anything_runs(tmp_path, stages, fault):
    pipeline = load_pipeline(write_pipeline(tmp_path, stages=[*stages, {"export": {"merge": False}}]))
    with pytest.raises(UserError, match=rf"E644 .*stages\[{len(stages)}\].export: .*{fault}"):
        run_pipeline(pipeline, tmp_path / "runs", dry_run=True)


@pytest.mark.parametrize(
    "stages",
    [
        [{"select": {"score": "sam", "count": 8}}, {"tune": {"method": "selective"}}],
        [{"select": {"score": "fish", "count": 8}}, {"tune": {"method": "child_tuning", "child": "d"}}],
        [{"tune": {**GROWN, "on": "lora", "rank": 2}}],
        [{"tune": {"method": "bitfit"}}, {"recover": {"method": "full"}}, {"recover": LORA["tune"]}],
    ],
)
def test_deltas_that_training_leaves_apart_are_accepted_before_it(tmp_path, stages):
    """Whatever the training itself uses, and what a full one has merged."""
    pipeline = load_pipeline(write_pipeline(tmp_path, stages=[*stages, {"export": {"merge": False}}]))
    run_pipeline(pipeline, tmp_path / "runs", dry_run=True)


def test_what_is_measured_is_what_was_exported_and_what_is_reported_was_measured():
    files, measured = entry(export), entry(benchmark)
    changed = entry(prune, structure="heads", remove=1)
    assert problems(benchmark, {}, changed, files) == problems(report, {}, files, changed) == []
    assert problems(benchmark, {}, files, changed) == [("E107", ())]
    assert problems(benchmark, {}, files, changed, entry(export, precision="fp32")) == []
    deployed = entry(deploy)
    assert problems(benchmark, {}, files, deployed) == []
    assert problems(benchmark, {}, files, deployed, entry(export, runtime="openvino")) == [("E107", ())]
    assert problems(benchmark, {}, files, deployed, files, entry(deploy, name="again")) == []
    assert problems(report, {}, files, measured) == []
    assert problems(report, {}, files, measured, changed) == [("E107", ())]
    assert problems(report, {}, files, measured, entry(export, precision="fp32")) == [("E107", ())]


def test_times_are_those_of_one_processor(monkeypatch):
    def found(**config):
        return benchmark.STAGE.surroundings(benchmark.BenchmarkConfig(**config))

    here = found()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert found() == {**here, "limits": {**here.get("limits", {}), "ATEN_CPU_CAPABILITY": "avx2"}} != here
    monkeypatch.setattr("compressor.processor.physical_cores", lambda: 1000)
    assert found()["cores"] == 1000 != here["cores"]
    assert benchmark.STAGE.device(benchmark.BenchmarkConfig(device="cuda")) == "cuda"


def test_an_export_is_of_the_processor_that_chose_or_rounded_it():
    """Times choose for `auto`; and int8 has 7 bits where products of 8 overflow."""
    found = [export.STAGE.surroundings(export.ExportConfig(precision=name)) for name in ("fp32", "int8", "auto")]
    bits = {"weight_bits": weight_bits()}
    assert found == [{}, bits, {**processor(), **bits}]


TORCH = ("torch", "transformers", "tokenizers")
TRAITS = {
    "select": ({}, {*TORCH}, ""),
    "tune": ({}, {*TORCH, "accelerate"}, "tests"),
    "prune": ({"structure": "heads", "remove": 1}, {*TORCH, "torch-pruning"}, "texts"),
    "recover": ({}, {*TORCH, "accelerate"}, "tests"),
    "merge": ({}, {*TORCH}, "tests"),
    "export": ({"runtime": "openvino"}, {*TORCH, "onnx", "onnx-ir", "onnxscript", "onnxruntime", "openvino", "nncf"}, ""),
    "deploy": (
        {"runtime": "openvino"},
        {"onnxruntime", "nvidia-pytriton", "tritonclient", "tokenizers", "openvino"},
        "",
    ),
    "benchmark": ({}, {"torch", "transformers", "onnxruntime"}, ""),
    "report": ({}, {"plotly", "jinja2"}, ""),
}
"""Stage -> (keys of its config, packages whose versions are in its fingerprint then, what it scores beside validation rows)."""


def test_all_that_computes_a_result_is_in_its_fingerprint():
    """Or an upgrade would leave results of the version before."""
    found = {
        stage.name: (
            keys := TRAITS[stage.name][0],
            {*stage.packages, *stage.extras(stage.config(**keys))},
            "tests" * stage.scores_tests + "texts" * stage.scores_texts,
        )
        for stage in all_stages()
    }
    assert found == TRAITS


def test_where_no_runtime_is_named_the_versions_of_all_are_in_the_fingerprint(monkeypatch):
    monkeypatch.setattr(deploy, "distribution", lambda name: f"{name} 0")
    assert deploy.STAGE.surroundings(deploy.DeployConfig()) == {"runtimes": ["onnxruntime 0", "openvino 0"]}


def test_openvino_is_not_measured_on_cuda():
    only = entry(export, runtime="openvino", precision="fp32")
    assert problems(benchmark, {"device": "cuda"}, only) == [("E604", ("device",))]


def test_a_missing_extra_is_named_where_the_config_needs_it(monkeypatch):
    found, missing = environment.distribution, {"nncf", "openvino", "tensorrt"}
    monkeypatch.setattr(environment, "distribution", lambda name: None if name in missing else found(name))
    check_environment([entry(export)])
    check_environment([entry(deploy)])
    with pytest.raises(UserError, match=r"E901 stage 'export' needs the package (nncf|openvino). Run: .*\[openvino\]'"):
        check_environment([BOTH])


INSTALL = "Run: pip install 'compress-pipeline"


@pytest.mark.parametrize(
    ("package", "entries", "stage", "fix"),
    [
        ("onnxruntime", [entry(export), entry(deploy), entry(benchmark)], "export", f"{INSTALL}[cpu]'"),
        ("onnxruntime", [entry(benchmark)], "benchmark", f"{INSTALL}[cpu]'"),
        ("onnxruntime", [entry(benchmark, device="cuda")], "benchmark", f"{INSTALL}[gpu]'"),
        ("onnxruntime", [entry(export), entry(benchmark, device="cuda")], "export", f"{INSTALL}[gpu]'"),
        ("nvidia-pytriton", [entry(deploy)], "deploy", f"{INSTALL}[triton]'"),
        ("nvidia-pytriton", [entry(deploy, device="cuda")], "deploy", f"{INSTALL}[triton]'"),
        ("plotly", [entry(report)], "report", "Install it: pip install plotly"),
    ],
)
def test_a_missing_package_is_told_once_with_what_installs_it(monkeypatch, package, entries, stage, fix):
    """By the first stage that needs it; the extras cpu and gpu exclude each other."""
    found = environment.distribution
    monkeypatch.setattr(environment, "distribution", lambda name: None if name == package else found(name))
    monkeypatch.setattr("pipelines.engine.preflight.accelerator", lambda: "a card")
    with pytest.raises(UserErrors) as raised:
        check_environment(entries)
    (fault,) = raised.value.errors
    assert str(fault) == f"E901 stage '{stage}' needs the package {package}. {fix}"
