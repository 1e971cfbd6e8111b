"""What must never pass: a finished run with one fault in it, and the gate that has to see it, at the right hop.

Every fault is tried twice. *Dropped in*: the file is changed behind the manifest's back, and its sha256 tells. *Sealed*:
manifests and lock are made to fit, as if the stage itself had written a wrong file; only a comparison of content can tell.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
import yaml
from click.testing import CliRunner
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper
from safetensors.numpy import load_file, save_file

from compressor.digests import sha256_of
from compressor.errors import UserError
from compressor.run_store import LOCK_FILE, MANIFEST
from pipelines.cli.commands import main
from pipelines.engine.store import SEAL, fingerprint, sealed
from pipelines.runs.finished import open_run
from pipelines.runs.verify import Check, verify
from serving.repository import read_config, write_config


class Run:
    """A copy of the finished run, with a hand on its artifacts; `graph` is the exported file that a fault is put into."""

    def __init__(self, out: Path, graph: str = "model.onnx"):
        self.out, self.folder, self.graph = out, out / "tiny", graph

    def artifact(self, stage: str) -> Path:
        """Folder of the (last) artifact of a stage."""
        return next(iter(sorted((self.out / ".store").glob(f"{stage}-*"), reverse=True)))

    @property
    def checkpoint(self) -> Path:
        return self.artifact("merge") / "model.safetensors"

    @property
    def config(self) -> Path:
        return self.artifact("merge") / "config.json"

    @property
    def onnx(self) -> Path:
        return self.artifact("export") / "compressed" / self.graph

    @property
    def served(self) -> Path:
        return self.artifact("deploy") / "repository" / "tiny"

    def seal(self) -> None:
        """Make manifests and lock fit the files, as if the stages had written them so."""
        lock = yaml.safe_load((self.folder / LOCK_FILE).read_text())
        for stage in lock["stages"]:
            folder = self.out / ".store" / stage["artifact"]
            path = folder / MANIFEST
            manifest = json.loads(path.read_text())
            files = sorted(file for file in folder.rglob("*") if file.is_file() and file not in (path, folder / SEAL))
            manifest["files"] = {
                str(file.relative_to(folder)): {"sha256": sha256_of(file), "size": file.stat().st_size} for file in files
            }
            write_sealed(path, manifest)
            stage["files"] = {name: file["sha256"] for name, file in manifest["files"].items()}
            seen = {"kind": manifest["kind"], "files": stage["files"], "metadata": manifest["metadata"]}
            stage["sha256"] = fingerprint(seen)
        (self.folder / LOCK_FILE).write_text(yaml.safe_dump(lock))


def write_sealed(path: Path, manifest: dict) -> None:
    """A manifest with a seal that fits."""
    path.write_text(json.dumps(manifest))
    path.with_name(SEAL).write_bytes(sealed(path.read_bytes()))


@pytest.fixture
def run(finished, tmp_path) -> Run:
    shutil.copytree(finished.out, tmp_path / "runs")
    return Run(tmp_path / "runs")


def tensors(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Rewrite a safetensors file; the mapping of the old one must be gone before."""
    content = {name: tensor.copy() for name, tensor in load_file(path).items()}
    change(content)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in content.items()}, path, metadata={"format": "pt"})


def graph(path: Path, change: Callable[[onnx.GraphProto], None]) -> None:
    proto = onnx.load(path)
    change(proto.graph)
    onnx.save(proto, path)


def set_weight(of: onnx.GraphProto, name: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    (tensor,) = [one for one in of.initializer if one.name == name]
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(change(numpy_helper.to_array(tensor))), name))


def edit_json(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


POOLER = "bert.pooler.dense.weight"
QUERY = "bert.encoder.layer.0.attention.self.query.weight"
WORDS = "bert.embeddings.word_embeddings.weight"


def transposed_weight(run):
    """The pooler's matrix is square: nothing but its values tells."""
    tensors(run.checkpoint, lambda content: content.update({POOLER: content[POOLER].T}))


def transposed_weight_in_the_graph(run):
    graph(run.onnx, lambda of: set_weight(of, POOLER, np.transpose))


def swapped_heads(run):
    """Query heads 0 and 1 of a block change places; their keys do not."""

    def swap(content):
        query = content[QUERY].copy()
        content[QUERY][:8], content[QUERY][8:16] = query[8:16], query[:8]

    tensors(run.checkpoint, swap)


def swapped_heads_in_the_prune(run):
    """The state says that other heads were kept than were."""
    path = run.artifact("prune") / "state.json"
    state = json.loads(path.read_text())
    heads = state["kept"]["0"]["heads"]
    state["kept"]["0"]["heads"] = sorted({*range(4)} - {heads[0]})
    if state["kept"]["0"]["heads"] == heads:
        state["kept"]["0"]["heads"] = [0, 1, 2]
    path.write_text(json.dumps(state))


def dropped_bias(run):
    graph(run.onnx, lambda of: set_weight(of, "classifier.bias", lambda bias: bias * 0))


def dropped_delta(run):
    """A tuned value is lost between recover and merge."""

    def drop(content):
        name = max((name for name in content if name.endswith("classifier.bias")), key=len)
        content[name][:] = 0

    tensors(run.artifact("recover") / "head.safetensors", drop)


def wrong_padding_side(run):
    """The mask is read from right to left: right only where there is no padding."""

    def flip(of):
        for node in of.node:
            node.input[:] = ["flipped_mask" if name == "attention_mask" else name for name in node.input]
        ends = {"start": -1, "end": np.iinfo(np.int64).min, "axis": 1, "step": -1}
        of.initializer.extend(numpy_helper.from_array(np.array([value]), f"flip_{key}") for key, value in ends.items())
        names = ["attention_mask", *(f"flip_{key}" for key in ends)]
        of.node.insert(0, helper.make_node("Slice", names, ["flipped_mask"]))

    graph(run.onnx, flip)


def wrong_epsilon(run):
    edit_json(run.config, layer_norm_eps=1e-2)


def wrong_epsilon_in_the_graph(run):
    def change(of):
        for node in of.node:
            for attribute in node.attribute:
                if attribute.name == "epsilon":
                    attribute.f = 1e-2

    graph(run.onnx, change)


def half_precision_overflow(run):
    """The input of a LayerNorm goes through fp16 at a size beyond 65504: infinite there, and NaN behind the norm."""

    def cast(of):
        norm = next(node for node in of.node if node.op_type == "LayerNormalization")
        of.initializer.append(numpy_helper.from_array(np.float32(1e6), "large"))
        place = list(of.node).index(norm)
        chain = [
            helper.make_node("Mul", [norm.input[0], "large"], ["enlarged"]),
            helper.make_node("Cast", ["enlarged"], ["half"], to=TensorProto.FLOAT16),
            helper.make_node("Cast", ["half"], ["single"], to=TensorProto.FLOAT),
        ]
        norm.input[0] = "single"
        for offset, node in enumerate(chain):
            of.node.insert(place + offset, node)

    graph(run.onnx, cast)


def stale_graph(run):
    """The compressed model's file is still the dense one's."""
    shutil.copyfile(run.artifact("export") / "dense" / "model.onnx", run.onnx)


def stale_checkpoint(run):
    """The merge of an earlier state: before the recover."""
    from compressor.checkpoint import load_state, save_checkpoint
    from compressor.deltas.links import merge_all

    base = run.artifact("deploy").parents[2] / "base"
    shutil.copytree(json.loads((run.folder / "run.json").read_text())["model_folder"], base)
    save_checkpoint(merge_all(load_state(run.artifact("prune"), base)), run.artifact("merge"), base)


def stale_deployment(run):
    shutil.copyfile(run.artifact("export") / "dense" / "model_int8.onnx", run.served / "1" / "model.onnx")


def wrong_tokenizer(run):
    """Two words have changed places in the vocabulary of the checkpoint."""
    _swap_words(run.artifact("merge") / "tokenizer.json")


def wrong_deployed_tokenizer(run):
    _swap_words(run.served / "1" / "tokenizer" / "tokenizer.json")


def _swap_words(path: Path) -> None:
    content = json.loads(path.read_text())
    words = content["model"]["vocab"]
    words["good"], words["bad"] = words["bad"], words["good"]
    path.write_text(json.dumps(content))


def shuffled_labels(run):
    edit_json(run.config, id2label={"0": "class1", "1": "class0"}, label2id={"class1": 0, "class0": 1})


def no_labels(run):
    """transformers then numbers them; what looks for the names finds nothing to read."""
    config = json.loads(run.config.read_text())
    del config["id2label"]
    run.config.write_text(json.dumps(config))


def shuffled_deployed_labels(run):
    (run.served / "labels.txt").write_text("class1\nclass0\n")


def shuffled_label_facts(run):
    """labels.txt is right, what the server names its answers by is not."""
    edit_json(run.served.with_name("tiny-text") / "1" / "serving.json", labels=["class1", "class0"])


def coarse_embedding(run):
    """An embedding quantized to its sign."""
    path = run.onnx.with_name("model_int8.onnx")
    graph(
        path, lambda of: set_weight(of, f"{WORDS}_quantized", lambda words: np.where(words > 128, 255, 0).astype(words.dtype))
    )


def truncated_external_data(run):
    proto = onnx.load(run.onnx)
    onnx.save(proto, run.onnx, save_as_external_data=True, location="model.onnx.data", size_threshold=0)
    data = run.onnx.with_name("model.onnx.data")
    data.write_bytes(data.read_bytes()[: data.stat().st_size // 2])


def truncated_graph(run):
    run.onnx.write_bytes(run.onnx.read_bytes()[: run.onnx.stat().st_size // 2])


def truncated_checkpoint(run):
    content = run.checkpoint.read_bytes()
    run.checkpoint.write_bytes(content[: len(content) // 2])


def another_config(run):
    """The config of the dense base."""
    shutil.copyfile(Path(json.loads((run.folder / "run.json").read_text())["model_folder"]) / "config.json", run.config)


def wrong_per_layer_config(run):
    edit_json(run.config, per_layer_config={number: {"num_attention_heads": 3, "intermediate_size": 13} for number in "01"})


def head_count_that_disagrees(run):
    """6 heads of half the size: every matrix fits, and another function comes out."""
    layers = {number: {"num_attention_heads": 6, "intermediate_size": 12} for number in "01"}
    edit_json(run.config, num_attention_heads=8, per_layer_config=layers)


def nan_in_a_weight(run):
    def spoil(content):
        content[QUERY][3, 5] = np.nan

    tensors(run.checkpoint, spoil)


def nan_in_the_graph(run):
    def spoil(words):
        spoiled = words.copy()
        spoiled[7, 3] = np.nan
        return spoiled

    graph(run.onnx, lambda of: set_weight(of, WORDS, spoil))


def nan_in_a_tuned_value(run):
    def spoil(content):
        next(iter(content.values())).flat[0] = np.nan

    tensors(run.artifact("tune") / "head.safetensors", spoil)


def other_units_told_of_the_recover(run):
    edit_kept(run.artifact("recover"))


def other_units_told_of_the_merge(run):
    edit_kept(run.artifact("merge"))


def edit_kept(folder: Path) -> None:
    """Say of an artifact that its first block has one unit less than it has."""
    manifest = json.loads((folder / MANIFEST).read_text())
    first = next(iter(manifest["metadata"]["kept"].values()))
    next(iter(first.values())).pop()
    (folder / MANIFEST).write_text(json.dumps(manifest))


def fixed_batch(run):
    """The batch of the sample is burnt in."""

    def fix(of):
        for value in of.input:
            value.type.tensor_type.shape.dim[0].dim_value = 2

    graph(run.onnx, fix)


def mixed_rows(run):
    """A row's logits depend on what shares its batch."""

    def mix(of):
        last = next(node for node in of.node if "logits" in node.output)
        last.output[0] = "own_logits"
        of.initializer.append(numpy_helper.from_array(np.array([0]), "rows"))
        of.node.append(helper.make_node("ReduceMean", ["own_logits", "rows"], ["mean_logits"], keepdims=1))
        of.node.append(helper.make_node("Add", ["own_logits", "mean_logits"], ["logits"]))

    graph(run.onnx, mix)


def swapped_inputs(run):
    """Types and dims of an input and the output have changed places in the server's config."""
    config = read_config(run.served)
    first, output = config.input[0], config.output[0]
    first.name, output.name = output.name, first.name
    write_config(config, run.served)


def missing_input(run):
    config = read_config(run.served)
    del config.input[1]
    (run.served / "config.pbtxt").write_text(text_format.MessageToString(config))


@dataclass(frozen=True)
class Fault:
    """`stage` holds the file; when sealed, `hop` of `at` is what sees it, with one of these codes."""

    make: Callable[[Run], None]
    stage: str
    hop: str
    codes: str
    at: str = ""
    suspect: str = ""
    slow: bool = False
    """Run by make test-full: a brother of a fault that always runs."""


MERGED, GRAPH = "deltas -> merged", "compressed -> onnx"
CONFIG, DEPLOYED = "config and tokenizer", "model, config, tokenizer"
FAULTS = [
    Fault(transposed_weight, "merge", MERGED, "E610", suspect="the pooler or the task head"),
    Fault(transposed_weight_in_the_graph, "export", GRAPH, "E610", suspect="the pooler or the task head", slow=True),
    Fault(swapped_heads, "merge", MERGED, "E610", suspect="block 0, from its query on"),
    Fault(swapped_heads_in_the_prune, "prune", "masked -> removed", "E610"),
    Fault(dropped_bias, "export", GRAPH, "E610", suspect="the pooler or the task head", slow=True),
    Fault(dropped_delta, "recover", MERGED, "E610", at="merge", suspect="the pooler or the task head"),
    Fault(wrong_padding_side, "export", GRAPH, "E610", suspect="block 0"),
    Fault(wrong_epsilon, "merge", MERGED, "E610", suspect="the embeddings"),
    Fault(wrong_epsilon_in_the_graph, "export", GRAPH, "E610", suspect="the embeddings", slow=True),
    Fault(half_precision_overflow, "export", GRAPH, "E610", suspect="the embeddings"),
    Fault(stale_graph, "export", GRAPH, "E610", slow=True),
    Fault(stale_checkpoint, "merge", MERGED, "E610", slow=True),
    Fault(stale_deployment, "deploy", DEPLOYED, "E612"),
    Fault(wrong_tokenizer, "merge", CONFIG, "E612"),
    Fault(wrong_deployed_tokenizer, "deploy", DEPLOYED, "E612"),
    Fault(shuffled_labels, "merge", CONFIG, "E612"),
    Fault(no_labels, "merge", CONFIG, "E614"),
    Fault(shuffled_deployed_labels, "deploy", DEPLOYED, "E612"),
    Fault(shuffled_label_facts, "deploy", DEPLOYED, "E612"),
    Fault(coarse_embedding, "export", "compressed -> int8", "E610"),
    Fault(truncated_external_data, "export", GRAPH, "E602"),
    Fault(truncated_graph, "export", GRAPH, "E602", slow=True),
    Fault(truncated_checkpoint, "merge", MERGED, "E305"),
    Fault(another_config, "merge", MERGED, "E308"),
    Fault(wrong_per_layer_config, "merge", MERGED, "E305"),
    Fault(head_count_that_disagrees, "merge", MERGED, "E610", suspect="block 0, from its output on"),
    Fault(nan_in_a_weight, "merge", MERGED, "E305"),
    Fault(nan_in_the_graph, "export", GRAPH, "E610", slow=True),
    Fault(nan_in_a_tuned_value, "tune", "quality as recorded", "E305"),
    Fault(other_units_told_of_the_recover, "recover", "units kept", "E612"),
    Fault(other_units_told_of_the_merge, "merge", CONFIG, "E612"),
    Fault(fixed_batch, "export", GRAPH, "E611"),
    Fault(mixed_rows, "export", GRAPH, "E610"),
    Fault(swapped_inputs, "deploy", DEPLOYED, "E612"),
    Fault(missing_input, "deploy", DEPLOYED, "E612"),
]
PARAMETERS = [pytest.param(fault, id=fault.make.__name__, marks=[pytest.mark.slow] if fault.slow else []) for fault in FAULTS]


@pytest.mark.slow
def test_the_run_without_a_fault_passes(run):
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.out.rglob("*") if file.is_file()}
    checks = verify(run.folder)
    assert not [check for check in checks if not check.passed]
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in run.out.rglob("*") if file.is_file()} == before
    hops = [check.hop for check in checks if check.parity]
    both = [f"{name} -> {kind}" for name in ("compressed", "dense") for kind in ("onnx", "fused", "int8")]
    assert hops == ["masked -> removed", "deltas -> merged", *both, "served", "served, texts"]


@pytest.mark.parametrize("fault", PARAMETERS)
def test_sealed(run, fault):
    """As if the stage itself had written it: only the content can tell, and it does, at the right hop."""
    fault.make(run)
    run.seal()
    first = first_failed(run, fault.at or fault.stage)
    assert (first.stage, first.hop, first.code) == (fault.at or fault.stage, fault.hop, fault.codes), first.fault
    assert f"suspected: {fault.suspect}" in first.fault or not fault.suspect, first.fault


def first_failed(run: Run, stage: str | None) -> Check:
    """The first check that a sealed run fails, of one stage or of all; its files are as its manifests have them."""
    failed = [check for check in verify(run.folder, serve=False, stage=stage) if not check.passed]
    assert failed, "passed"
    assert not [check for check in failed if check.hop == "files and sha256"]
    return failed[0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.make.__name__)
def test_sealed_and_the_whole_run_verified(run, fault):
    """Nothing fails before what the fault is in, for there a user begins to look: its hop, or, where only the next stage has
    one, the quality of the stage itself."""
    fault.make(run)
    run.seal()
    first, expected = first_failed(run, None), [(fault.at or fault.stage, fault.hop, fault.codes)]
    expected += [(fault.stage, "quality as recorded", "E613")] if fault.at else []
    assert (first.stage, first.hop, first.code) in expected, first.fault


@pytest.mark.parametrize("fault", PARAMETERS)
def test_dropped_in(run, fault):
    """A file that its stage did not write is told by its sha256, in `verify` and in the next run that wants to reuse it."""
    fault.make(run)
    opened = open_run(run.folder)
    (row,) = [stage for stage in opened.lock["stages"] if stage["id"] == fault.stage]
    with pytest.raises(UserError, match="E803"):
        opened.verify(row)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [swapped_inputs, stale_deployment])
def test_the_live_server_tells_too(run, fault):
    """Triton refuses a config that is not the graph's, and gives the answers of the graph it has."""
    fault(run)
    run.seal()
    served = next(check for check in verify(run.folder) if check.hop == "served")
    assert (served.passed, served.code) == (False, "E707" if fault is swapped_inputs else "E610")


def test_the_command_line(run):
    """A table, or JSON, and exit code 3 with the fault's own line."""
    dropped_bias(run)
    run.seal()
    arguments = ["verify", str(run.folder), "--no-serve", "--stage", "export"]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 3 and "FAILED E610" in done.stdout and "export: E610 compressed -> model.onnx" in done.stderr
    told = CliRunner().invoke(main, [*arguments, "--json"])
    answer = json.loads(told.stdout)
    checks = answer["checks"]
    assert told.exit_code == 3 and [check["hop"] for check in checks if not check["passed"]] == [GRAPH, "compressed -> fused"]
    assert answer["passed"] is False and any(check["passed"] for check in checks)
    assert "worst_row" in checks[-1]["parity"] and len(checks[-1]["parity"]["metric_interval"]) == 2
    for wrong, code in ((["--stage", "nothing"], "E111"), ([], "E805")):
        folder = run.folder if wrong else run.out
        refused = CliRunner().invoke(main, ["verify", str(folder), *wrong])
        assert refused.exit_code == 2 and code in refused.stderr


def test_an_older_artifact_in_its_place(run):
    """A whole folder of the same name with a manifest of its own, sound in itself: the lock does not know it."""
    path = run.artifact("merge") / MANIFEST
    manifest = json.loads(path.read_text())
    manifest["metadata"]["quality"]["accuracy"] = 1.0
    write_sealed(path, manifest)
    failed = [check for check in verify(run.folder, serve=False) if not check.passed]
    assert [(check.stage, check.code) for check in failed] == [("merge", "E803"), ("merge", "E613")]
