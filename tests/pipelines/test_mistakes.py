"""Mistakes of a user: each gives one clear line and exit code 2, no traceback, and nothing is written. A mistake is a row."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from compressor.printable import OBEYED
from tests.pipelines.toys import tree
from tests.tiny import write_data, write_model

PIPELINE = """\
name: tiny
model: ./model
task: {train: train.tsv, validation: dev.tsv, text: sentence, label: label, max_length: 32}
stages:
  - select: {count: 4}
  - tune: {rank: 4, learning_rate: 5e-4}
  - prune: {structure: heads, criterion: delta, remove: 1}
  - recover: {method: same}
  - merge:
  - export:
  - benchmark: {length: [16, 64]}
"""
WITHOUT_SELECT = PIPELINE.replace("  - select: {count: 4}\n", "")
LAST_BLOCKS = WITHOUT_SELECT.replace("rank: 4", "method: full, top: 1")
GROWS = "method: selective, strategy: increment, budget: 9"


@dataclass(frozen=True)
class Mistake:
    """What is done to a sound project, and what the one line starts with (behind the code) and holds.

    `change` is (old, new) in the file, or a function of its path.
    """

    name: str
    change: tuple[str, str] | Callable[[Path], object]
    says: str
    fix: str = ""
    file: str = "pipeline.yaml"
    options: tuple[str, ...] = ()


def rewrite(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


def drop_lines(path: Path) -> None:
    """Keep the header and the rows of the first class."""
    path.write_text("".join(line for line in path.read_text().splitlines(keepends=True) if "class1" not in line))


def to_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def nothing(_: Path) -> None:
    pass


def configured(**keys: object) -> Callable[[Path], object]:
    """A config.json with other keys."""
    return lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def within(select: str, tune: str, then: str = "") -> Callable[[Path], object]:
    """A select with these keys, a tune of the positions that it chose, and what comes after."""
    stages = f"  - select: {{{select}}}\n  - tune: {{{', '.join(filter(None, ('method: selective', tune)))}}}\n"
    return rewrite(PIPELINE.split("  - select")[0] + stages + then)


def of_rows(kind: str, row: object, split: str = "train", **keys: object) -> Callable[[Path], object]:
    """A task of another kind: two sound rows in each file, and this one behind those of a split."""
    sound = [{"sentence": "a b", "label": 0.5 if kind == "regression" else "c 1"}] * 2
    task = {"kind": kind, "train": "train.jsonl", "validation": "dev.jsonl", "text": "sentence", "label": "label", **keys}
    stages = [{"tune": {"method": "lora"}}, {"merge": None}]

    def change(path: Path) -> None:
        for name in ("train", "dev"):
            rows = [*sound, row] if name == split else sound
            path.with_name(f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        path.write_text(json.dumps({"name": "tiny", "model": "./model", "task": {**task, "max_length": 32}, "stages": stages}))

    return change


def weights(keys: str) -> tuple[str, str]:
    """An item of single weights with these keys instead of the heads."""
    return "{structure: heads, criterion: delta, remove: 1}", f"{{structure: weights, {keys}}}"


def pruning(keys: str) -> tuple[str, str]:
    """Other keys of the prune."""
    return "structure: heads, criterion: delta, remove: 1", keys


STAGES_LINE = "  - tune: {rank: 4, learning_rate: 5e-4}\n"

MISTAKES = [
    Mistake("misspelt key", ("rank: 4", "rnk: 4"), "E102 {file}:6: stages[1].tune.rnk: unknown key", "Did you mean 'rank'?"),
    Mistake("misspelt key of the task", ("label: label", "lable: label"), "E102 {file}:3: task.lable: unknown key", "'label'?"),
    Mistake("misspelt top-level key", ("model:", "modle:"), "E102 {file}:2: modle: unknown key", "Did you mean 'model'?"),
    Mistake("missing key", ("model: ./model\n", ""), "E105 {file}:1: key 'model' is missing"),
    Mistake("wrong type", ("rank: 4", "rank: four"), "E104 {file}:6: stages[1].tune.rank: must be an integer, not 'four'"),
    Mistake("number in quotes", ("rank: 4", 'rank: "4"'), "E104 {file}:6: stages[1].tune.rank: must be an integer, not '4'"),
    Mistake("rank 0", ("rank: 4", "rank: 0"), "E104 {file}:6: stages[1].tune.rank: must be at least 1, not 0"),
    Mistake(
        "a name of models of texts",
        ("  - export:\n", "  - export:\n  - deploy: {name: x-text}\n"),
        "E104 {file}:11: stages[6].deploy.name: may not end with -text",
    ),
    Mistake(
        "a module in two lists",
        ("rank: 4", "modules: [[query]]"),
        "E104 {file}:6: stages[1].tune.modules: unknown module '['query']'",
    ),
    Mistake(
        "a rank beyond any model",
        ("rank: 4", "rank: 1000000000"),
        "E104 {file}:6: stages[1].tune.rank: must be at most 8,192, not 1000000000. ",
    ),
    Mistake("a rank beyond an int64", ("rank: 4", f"rank: 1{'0' * 19}"), "E104 {file}:6: stages[1].tune.rank: must be at most"),
    Mistake(
        "a rank beyond this model's",
        ("rank: 4", "rank: 64"),
        "E104 {file}:6: stages[1].tune: rank 64, where the matrices have at most 32 rows and columns",
    ),
    Mistake(
        "epochs without end",
        ("rank: 4", "epochs: 1e9"),
        "E104 {file}:6: stages[1].tune.epochs: must be at most 1,000, not 1000",
    ),
    Mistake(
        "a count of 4,000 digits",
        ("remove: 1", f"remove: {'1' * 4000}"),
        f"E104 {{file}}:7: stages[2].prune.remove: must be at most 2,147,483,647, not {'1' * 57}...",
    ),
    Mistake(
        "a name of 300 letters",
        ("name: tiny", f"name: {'a' * 300}"),
        "E104 {file}:1: name: has 300 characters, where at most 64 are allowed",
    ),
    Mistake("negative rate", ("5e-4", "-5e-4"), "E104 {file}:6: stages[1].tune.learning_rate: must be greater than 0"),
    Mistake("infinite rate", ("5e-4", ".inf"), "E104 {file}:6: stages[1].tune.learning_rate: .inf is no finite number"),
    Mistake("unknown choice", ("delta", "dleta"), "E104 {file}:7: stages[2].prune.criterion: must be", "Did you mean 'delta'?"),
    Mistake("unknown stage", ("- merge", "- marge"), "E103 {file}:9: stages[4].marge: unknown stage", "Did you mean 'merge'?"),
    Mistake("key given twice", ("rank: 4", "rank: 4, rank: 8"), "E106 {file}:6: stages[1].tune.rank: key given twice"),
    Mistake("not YAML", ("count: 4}", "count: 4"), "E101 {file}:6: not YAML"),
    Mistake("a tag", ("name: tiny", "name: !!python/name:os.system x"), "E101 {file}:1: tag"),
    Mistake("empty pipeline file", rewrite(""), "E101 {file}:1: not a mapping"),
    Mistake("pipeline file is no text", lambda path: path.write_bytes(b"name: caf\xe9\n"), "E101 {file}:1: not UTF-8"),
    Mistake("pipeline file is a folder", to_folder, "E101 {file}: a folder, not a pipeline file"),
    Mistake("no pipeline file", Path.unlink, "E110 no pipeline file '{file}'"),
    Mistake("a name that is no folder name", ("tiny", "../tiny"), "E104 {file}:1: name: '../tiny' is not allowed here"),
    Mistake(
        "two stages with one id",
        lambda path: path.write_text(PIPELINE.replace("rank: 4", "id: x, rank: 4").replace("method: same", "id: x")),
        "E108 {file}:8: stages[3].recover.id: id 'x' is taken by stages[1].tune",
    ),
    Mistake(
        "two tunes",
        ("  - merge:", "  - tune:\n  - merge:"),
        "E405 {file}:9: stages[4].tune: ",
        "Use recover to keep training",
    ),
    Mistake("pruning before any tune", (STAGES_LINE, ""), "E503 {file}:6: stages[1].prune: nothing is tuned yet"),
    Mistake(
        "export without a merge",
        ("  - merge:\n", ""),
        "E504 {file}:9: stages[4].export: 'recover' leaves deltas",
        "Put a merge",
    ),
    Mistake(
        "export of nothing", rewrite(PIPELINE.split("  - select")[0] + "  - export:\n"), "E107 {file}:5: stages[0].export: "
    ),
    Mistake("as many heads as there are", ("remove: 1", "remove: 4"), "E501 {file}:7: stages[2].prune: remove: 4 leaves none"),
    Mistake(
        "a pattern that the widths do not hold",
        weights("pattern: 1:5"),
        "E505 {file}:7: stages[2].prune: query has 32 inputs, no multiple of 5",
        "Leave out this module",
    ),
    Mistake(
        "a pattern behind neurons that went one by one",
        (
            "{structure: heads, criterion: delta, remove: 1}",
            "[{structure: neurons, criterion: weight, remove: 1}, {structure: weights, pattern: 2:4, modules: ffn_out}]",
        ),
        "E505 {file}:7: stages[2].prune: ffn_out has 23 inputs, no multiple of 4",
    ),
    Mistake(
        "a pattern behind neurons that the whole model lost",
        (
            "{structure: heads, criterion: delta, remove: 1}",
            "[{structure: neurons, criterion: weight, scope: global, remove: 0.5}, {structure: weights, pattern: 2:4}]",
        ),
        "E505 {file}:7: stages[2].prune: only the run decides how many neurons each layer keeps: the pattern 2:4 may not fit",
        "the inputs of ffn_out. Leave out this module, or remove them with scope: layer",
    ),
    Mistake("no pattern", weights("pattern: 4:2"), "E104 {file}:7: stages[2].prune.pattern: a pattern is unstructured, or n:m"),
    Mistake(
        "a pattern and a share", weights("pattern: 2:4, remove: 0.5"), "E104 {file}:7: stages[2].prune: pattern 2:4 fixes what"
    ),
    Mistake("weights without a share", weights("criterion: weight"), "E104 {file}:7: stages[2].prune: an unstructured item"),
    Mistake("all weights", weights("remove: 1"), "E104 {file}:7: stages[2].prune.remove: must be less than 1, not 1"),
    Mistake(
        "two shares of one pool",
        weights("criterion: weight, remove: {adapted: 0.5, others: 0.5}"),
        "E104 {file}:7: stages[2].prune: criterion weight has one pool",
    ),
    Mistake(
        "one share of two",
        weights("remove: {adapted: 0.5}"),
        "E105 {file}:7: stages[2].prune.remove: key 'others' is missing",
    ),
    Mistake(
        "a merge that fills what is hidden in W alone",
        weights("remove: 0.5, hides: weight"),
        "E412 {file}:9: stages[4].merge: merging would fill the zeros of 'prune', which hides W alone",
    ),
    Mistake(
        "training all of what is hidden in W alone",
        rewrite(
            PIPELINE.replace(*weights("remove: 0.5, hides: weight"))
            .replace("method: same", "method: full")
            .split("  - merge")[0]
        ),
        "E412 {file}:8: stages[3].recover: training every weight would fill the zeros of 'prune'",
    ),
    Mistake(
        "W alone where nothing is apart from it",
        rewrite(
            PIPELINE.replace(*weights("remove: 0.5, hides: weight"))
            .replace("  - select: {count: 4}\n", "")
            .replace("rank: 4", "method: full")
            .replace("  - merge:\n  - export:\n  - benchmark: {length: [16, 64]}\n", "")
        ),
        "E412 {file}:6: stages[1].prune.hides: hides: weight keeps ΔW apart",
    ),
    Mistake(
        "modules that a structure is not scored by",
        pruning("structure: heads, criterion: delta, remove: 1, modules: [query, ffn_in]"),
        "E104 {file}:7: stages[2].prune: ffn_in is not scored for heads",
    ),
    Mistake(
        "modules of a criterion of the loss",
        pruning("structure: heads, criterion: taylor, remove: 1, modules: query"),
        "E104 {file}:7: stages[2].prune: modules is not used by criterion taylor",
    ),
    Mistake(
        "rows of a criterion that reads none",
        pruning("structure: heads, criterion: delta, remove: 1, rows: 64"),
        "E104 {file}:7: stages[2].prune: rows is not used by criterion delta: it goes with taylor, fisher, reconstruction",
    ),
    Mistake(
        "rows of weights by their size",
        weights("remove: 0.5, rows: 64"),
        "E104 {file}:7: stages[2].prune: rows is not used by criterion delta_or_weight: it goes with taylor, fisher. ",
    ),
    Mistake(
        "rows of a search that reads none",
        pruning("target: {flops: 0.9, length: 16}, criterion: {heads: delta, neurons: weight}, rows: 64"),
        "E104 {file}:7: stages[2].prune: rows is not used by criterion delta and weight: it goes with taylor",
    ),
    Mistake("a unit's key", weights("remove: 0.5, normalise: true"), "E102 {file}:7: stages[2].prune.normalise: unknown key"),
    Mistake(
        "less than one weight", weights("remove: 1e-5"), "E501 {file}:7: stages[2].prune: remove: 1e-05 is less than one of"
    ),
    Mistake(
        "weights without a delta",
        weights("remove: 0.5, criterion: delta"),
        "E502 {file}:7: stages[2].prune.criterion: weights by criterion delta, but no stage tunes key, output, ffn_in, ffn_out",
        "delta_or_weight",
    ),
    Mistake(
        "fewer than are gone already",
        (
            "{structure: heads, criterion: delta, remove: 1}",
            "[{structure: weights, remove: 0.5}, {structure: weights, remove: 0.3}]",
        ),
        "E501 {file}:7: stages[2].prune: 2,048 weights of the adapted matrices are zero already",
    ),
    Mistake(
        "a target that cannot be met",
        pruning("target: {flops: 0.1, length: 64}, keep: {heads: 2}"),
        "E520 {file}:7: stages[2].prune: 0.100 of the FLOPs is out of reach: removing everything allowed gives 0.",
        "allow layers to be removed",
    ),
    Mistake("a target that is none", pruning("target: {}"), "E104 {file}:7: stages[2].prune.target: a target is exactly one"),
    Mistake(
        "two targets", pruning("target: {flops: 0.5, speedup: 2}"), "E104 {file}:7: stages[2].prune.target: a target is exactly"
    ),
    Mistake(
        "a length beside the rows' own",
        pruning("target: {speedup: 2, length: 64, lengths: data}"),
        "E104 {file}:7: stages[2].prune.target: length is not used with lengths: data",
    ),
    Mistake(
        "lengths of what is not measured",
        pruning("target: {flops: 0.5, lengths: data}"),
        "E104 {file}:7: stages[2].prune.target: lengths is not used by a target of flops",
    ),
    Mistake(
        "several values of a target",
        pruning("target: {speedup: [1.5, 2]}"),
        "E104 {file}:7: stages[2].prune.target.speedup: one run has one target; for several: compress sweep FILE --over",
    ),
    Mistake(
        "a target slower than dense", pruning("target: {speedup: 1}"), "E104 {file}:7: stages[2].prune.target.speedup: must"
    ),
    Mistake(
        "an unknown runtime",
        pruning("target: {speedup: 2, length: 64, runtime: onnx}"),
        "E104 {file}:7: stages[2].prune.target.runtime: must be 'onnxruntime' or 'openvino', not 'onnx'",
        "Use: onnxruntime, openvino",
    ),
    Mistake(
        "a misspelt target", pruning("target: {speedupp: 2}"), "E102 {file}:7: stages[2].prune.target.speedupp", "'speedup'?"
    ),
    Mistake(
        "a batch of a count of FLOPs",
        pruning("target: {flops: 0.5, batch: 8}"),
        "E104 {file}:7: stages[2].prune.target: batch is not used by a target of flops",
    ),
    Mistake(
        "a target and a count",
        pruning("target: {speedup: 2}, remove: 3"),
        "E104 {file}:7: stages[2].prune: remove beside target: the target decides how much",
    ),
    Mistake(
        "a target for weights",
        pruning("target: {speedup: 2}, structures: [weights]"),
        "E104 {file}:7: stages[2].prune.structures[0]: must be 'heads'",
    ),
    Mistake(
        "a criterion for whole layers",
        pruning("target: {flops: 0.5}, structures: [layers], criterion: taylor"),
        "E104 {file}:7: stages[2].prune: criterion orders the units of a sublayer",
    ),
    Mistake(
        "a criterion for a structure that stays",
        pruning("target: {flops: 0.5}, structures: [heads], criterion: {heads: taylor, neurons: taylor}"),
        "E104 {file}:7: stages[2].prune: criterion names heads, neurons; of the structures, heads have one",
    ),
    Mistake(
        "a target by what nobody tuned",
        pruning("target: {speedup: 2, length: 64}, criterion: delta"),
        "E502 {file}:7: stages[2].prune.criterion: neurons by criterion delta, but no stage tunes ffn_in",
    ),
    Mistake(
        "a target at more tokens than there are positions",
        pruning("target: {speedup: 2, length: 65}"),
        "E113 {file}:7: stages[2].prune.target.length: 65 tokens",
        "Use at most 64",
    ),
    Mistake("more heads than there are", ("remove: 1", "remove: 9"), "E501 {file}:7: stages[2].prune: remove: 9 leaves none"),
    Mistake(
        "a head more than all layers have",
        ("remove: 1", "scope: global, remove: 9"),
        "E501 {file}:7: stages[2].prune: remove: 9 leaves none of the 8 heads",
        "Use at most 7",
    ),
    Mistake(
        "a delta where nothing was tuned",
        ("structure: heads", "structure: neurons"),
        "E502 {file}:7: stages[2].prune.criterion: neurons by criterion delta, but no stage tunes ffn_in",
        "taylor or weight",
    ),
    Mistake(
        "a delta where biases alone were tuned",
        rewrite(PIPELINE.replace("  - select: {count: 4}\n", "").replace("rank: 4", "method: bitfit")),
        "E502 {file}:6: stages[1].prune.criterion: heads by criterion delta, but no stage tunes query",
    ),
    Mistake(
        "a delta that some blocks lack",
        rewrite(LAST_BLOCKS.replace("method: same", "method: lora")),
        "E502 {file}:6: stages[1].prune.criterion: heads by criterion delta, but 'tune' trains the last 1 blocks alone",
        "Leave out top there, or use taylor or weight",
    ),
    Mistake(
        "weights by a delta that some blocks lack",
        rewrite(LAST_BLOCKS.replace("method: same", "method: lora").replace(*weights("criterion: delta, remove: 0.5"))),
        "E502 {file}:6: stages[1].prune.criterion: weights by criterion delta, but 'tune' trains the last 1 blocks alone",
        "Leave out top there, or use delta_or_weight",
    ),
    Mistake(
        "a share of no place",
        ("count: 4", "ratio: 1.0e-4"),
        "E401 {file}:5: stages[0].select: ratio 0.0001 is less than one of the 1,024 positions of a matrix",
        "larger select.ratio",
    ),
    Mistake(
        "a base that is pruned already",
        configured(model_type="compressed-bert", per_layer_config={"0": {"num_attention_heads": 3}}),
        "E304 {pipeline}:2: model: model './model' is pruned already",
        "Start from the dense model",
        file="model/config.json",
    ),
    Mistake(
        "an architecture that nobody described",
        configured(model_type="xlnet"),
        "E301 {pipeline}:2: model: architecture 'xlnet' is not supported",
        "for another, compress list architectures --discover MODEL proposes a row",
        file="model/config.json",
    ),
    Mistake(
        "a weight of hidden states that nobody learns",
        ("method: same", "distill: true, hidden_weight: 2.0"),
        "E403 {file}:8: stages[3].recover.hidden_weight: hidden_weight is not used",
        "distill: hidden",
    ),
    Mistake(
        "texts that teach nothing",
        ("method: same", "distill: false, texts: dev.tsv"),
        "E403 {file}:8: stages[3].recover.texts: texts without labels teach nothing where nothing is distilled",
    ),
    Mistake(
        "variants of texts that teach nothing",
        ("method: same", "distill: false, augment: 2"),
        "E403 {file}:8: stages[3].recover.augment: variants of texts teach nothing where nothing is distilled",
    ),
    Mistake(
        "tagged words that would be replaced",
        lambda path: path.write_text(
            path.read_text().replace("{train", "{kind: tokens, train").replace("method: same", "augment: 2")
        ),
        "E403 {file}:8: stages[3].recover.augment: augment is not used by a task of kind tokens",
    ),
    Mistake(
        "marked texts that would be changed",
        lambda path: path.write_text(
            path.read_text()
            .replace("{train", "{kind: marked, train")
            .replace("text: sentence", "text: [sentence, span]")
            .replace("method: same", "augment: 2")
        ),
        "E403 {file}:8: stages[3].recover.augment: augment is not used by a task of kind marked",
    ),
    Mistake(
        "hidden states of another model",
        ("method: same", "distill: both, teacher: ./model"),
        "E403 {file}:8: stages[3].recover.teacher: distill: both compares hidden states",
        "teacher: dense",
    ),
    Mistake(
        "embeddings of a method that trains none",
        ("method: same", "method: lora, embeddings: false"),
        "E403 {file}:8: stages[3].recover.embeddings: embeddings is not used by method lora",
    ),
    Mistake(
        "embeddings of what continues with a method that trains none",
        ("method: same", "embeddings: true"),
        "E403 {file}:8: stages[3].recover.embeddings: embeddings is not used by method same",
    ),
    Mistake(
        "embeddings of the last blocks",
        ("method: same", "method: full, top: 1, embeddings: true"),
        "E403 {file}:8: stages[3].recover.embeddings: embeddings is not used by top: 1",
    ),
    Mistake(
        "checkpoints behind full tuning",
        rewrite(WITHOUT_SELECT.replace("rank: 4", "method: full").replace("method: same", f"{GROWS}, checkpoints: [8]")),
        "E312 {file}:7: stages[2].recover.checkpoints: a checkpoint is kept as a change of the base",
    ),
    Mistake(
        "steps and epochs", ("rank: 4", "steps: 4, epochs: 2"), "E403 {file}:6: stages[1].tune.steps: steps and epochs exclude"
    ),
    Mistake(
        "smoothed labels that are numbers",
        lambda path: path.write_text(
            path.read_text().replace("{train", "{kind: regression, train").replace("rank: 4", "rank: 4, label_smoothing: 0.1")
        ),
        "E403 {file}:6: stages[1].tune.label_smoothing: label_smoothing is not used by a task of kind regression",
    ),
    Mistake(
        "smoothed tags in a recover",
        lambda path: path.write_text(
            path.read_text().replace("{train", "{kind: tokens, train").replace("method: same", "label_smoothing: 0.1")
        ),
        "E403 {file}:8: stages[3].recover.label_smoothing: label_smoothing is not used by a task of kind tokens",
    ),
    Mistake(
        "smoothed labels that nobody learns",
        ("method: same", "texts: train.tsv, label_smoothing: 0.1"),
        "E403 {file}:8: stages[3].recover.label_smoothing: label_smoothing is not used with texts or augment",
    ),
    Mistake(
        "patience with nothing", ("rank: 4", "patience: 2"), "E403 {file}:6: stages[1].tune.patience: patience is not used"
    ),
    Mistake(
        "the best of other positions",
        ("  - select: {count: 4}\n  - tune: {rank: 4", "  - tune: {method: diff_pruning, budget: 9, keep_best: true"),
        "E403 {file}:5: stages[0].tune.keep_best: diff_pruning has its positions only at the end of the training",
    ),
    Mistake(
        "the best of a growing Ω",
        (
            "  - select: {count: 4}\n  - tune: {rank: 4",
            "  - tune: {method: selective, strategy: increment, budget: 9, keep_best: true",
        ),
        "E403 {file}:5: stages[0].tune.keep_best: selective with strategy increment has its positions only at the end",
    ),
    Mistake("a warm-up of all steps", ("rank: 4", "warmup: 1"), "E104 {file}:6: stages[1].tune.warmup: must be less than 1"),
    Mistake("no batch", ("rank: 4", "accumulate: 0"), "E104 {file}:6: stages[1].tune.accumulate: must be"),
    Mistake(
        "no file of texts",
        ("method: same", "texts: txets.txt"),
        "E201 {folder}/txets.txt: no such file ({file}:8: stages[3].recover.texts)",
    ),
    Mistake(
        "texts that are known already",
        ("method: same", "texts: train.tsv"),
        "E204 {folder}/train.tsv: every text is in a file of the task ({file}:8: ",
        "Give other texts",
    ),
    Mistake(
        "no such teacher",
        ("method: same", "teacher: ./large"),
        "E303 {file}:8: stages[3].recover.teacher: model './large': no such folder",
    ),
    Mistake(
        "a teacher without a task head",
        ("method: same", "teacher: ./model"),
        "E410 {file}:8: stages[3].recover: the teacher './model' has no trained task head for the labels class0, class1",
    ),
    Mistake(
        "a teacher's part that there is not",
        ("method: same", "distill: states"),
        "E104 {file}:8: stages[3].recover.distill: ",
    ),
    Mistake("a fraction above one", ("remove: 1", "remove: 1.5"), "E104 {file}:7: stages[2].prune.remove: a share lies in"),
    Mistake(
        "a module of another architecture",
        ("count: 4}", "count: 4, modules: [query, ffn_gate]}"),
        "E302 {file}:5: stages[0].select: architecture 'bert' has no ffn_gate",
    ),
    Mistake(
        "everything by rpca",
        ("count: 4}", "scope: global, count: 4, modules: everything}"),
        "E411 {file}:5: stages[0].select.modules: modules: everything is not possible with score rpca",
    ),
    Mistake(
        "everything of a lora",
        within("score: random, scope: global, count: 4, on: lora, modules: everything", ""),
        "E411 {file}:5: stages[0].select.modules: modules: everything is not possible with a select on lora",
    ),
    Mistake(
        "everything of each matrix",
        ("count: 4}", "score: random, count: 4, modules: everything}"),
        "E403 {file}:5: stages[0].select: modules: everything with scope matrix",
    ),
    Mistake(
        "everything with dsee",
        ("count: 4}", "score: random, scope: global, count: 4, modules: everything}"),
        "E411 {file}:6: stages[1].tune: modules: everything is not possible with method dsee",
    ),
    Mistake(
        "everything with child pruning",
        rewrite(WITHOUT_SELECT.replace("rank: 4", "method: child_tuning, child: pruning, budget: 9, modules: everything")),
        "E411 {file}:5: stages[0].tune: modules: everything is not possible with method child_tuning",
    ),
    Mistake(
        "everything trained, less chosen",
        within("score: random, scope: global, count: 4, modules: everything", "modules: all"),
        "E404 {file}:6: stages[1].tune.modules: select chose positions in everything, which is not tuned",
    ),
    Mistake(
        "another method's key", ("rank: 4", "bottleneck: 4"), "E403 {file}:6: stages[1].tune.bottleneck: bottleneck is not used"
    ),
    Mistake(
        "count and ratio", ("count: 4}", "count: 4, ratio: 0.1}"), "E403 {file}:5: stages[0].select.ratio: count and ratio"
    ),
    Mistake(
        "a global scope of nothing", ("count: 4}", "scope: global}"), "E403 {file}:5: stages[0].select.scope: scope global"
    ),
    Mistake(
        "a score's key of another", ("count: 4}", "samples: 4}"), "E403 {file}:5: stages[0].select.samples: samples is not used"
    ),
    Mistake(
        "growing beside a select",
        ("rank: 4", "method: selective, strategy: increment, budget: 9"),
        "E404 {file}:6: stages[1].tune: selective with strategy increment does not use the positions that 'select' chooses",
    ),
    Mistake(
        "growing without a budget",
        ("  - select: {count: 4}\n  - tune: {rank: 4", "  - tune: {method: selective, strategy: increment"),
        "E404 {file}:5: stages[0].tune.strategy: selective with strategy increment needs a budget",
    ),
    Mistake(
        "a checkpoint beyond the budget",
        (
            "  - select: {count: 4}\n  - tune: {rank: 4",
            "  - tune: {method: selective, strategy: increment, budget: 9, checkpoints: [9]",
        ),
        "E403 {file}:5: stages[0].tune.checkpoints: checkpoints lie below the budget 9",
    ),
    Mistake(
        "a rank of weights",
        ("count: 4}", "count: 4, score: pafi, rank: 8}"),
        "E403 {file}:5: stages[0].select.rank: rank is not used by",
    ),
    Mistake(
        "dsee on a lora",
        ("count: 4}", "count: 4, on: lora, score: pafi}"),
        "E404 {file}:6: stages[1].tune: dsee takes positions in the weights, 'select' chooses them on lora",
    ),
    Mistake(
        "robust PCA of a lora",
        within("on: lora", ""),
        "E403 {file}:5: stages[0].select: score rpca cannot be used on lora",
    ),
    Mistake(
        "gradients where there are none",
        within("on: lora, score: fish, scope: matrix", ""),
        "E403 {file}:5: stages[0].select.scope: B starts at 0, so score fish is 0 throughout A: ",
        "scope: layer or global",
    ),
    Mistake(
        "another rank than the select's",
        within("on: lora, score: pafi, rank: 4", "rank: 8"),
        "E404 {file}:6: stages[1].tune.rank: rank is 8 here and 4 in 'select'",
        "Set it in the select only",
    ),
    Mistake(
        "other modules than the select's",
        within("on: lora, score: pafi", "modules: [query]"),
        "E404 {file}:6: stages[1].tune.modules: modules is query here and query, value in 'select'",
    ),
    Mistake(
        "another ground than the select's",
        within("score: pafi", "on: lora"),
        "E404 {file}:6: stages[1].tune.on: on is lora here and weights in 'select'",
    ),
    Mistake(
        "modules of adapters",
        within("on: adapter, score: pafi, modules: [query]", ""),
        "E403 {file}:5: stages[0].select.modules: modules is not used by a select on adapter",
    ),
    Mistake(
        "a lora's key on adapters",
        within("on: adapter, score: pafi", "rank: 4"),
        "E403 {file}:6: stages[1].tune.rank: rank is not used by method selective on adapter",
    ),
    Mistake(
        "more positions than a bias has",
        within("on: adapter, score: random, bottleneck: 4, count: 5", ""),
        "E401 {file}:5: stages[0].select: a matrix has 4 positions only, 5 were requested",
    ),
    Mistake(
        "more positions than a lora has",
        rewrite(
            PIPELINE.split("  - select")[0] + "  - tune: {method: selective, strategy: increment, on: lora, budget: 99999}\n"
        ),
        "E401 {file}:5: stages[0].tune: budget 99999 is 99,999 of 4,096 positions",
    ),
    Mistake(
        "continuing positions that no longer exist",
        within("on: lora, score: pafi", "", "  - prune: {structure: heads, criterion: delta, remove: 1}\n  - recover:\n"),
        "E404 {file}:8: stages[3].recover: same would train the whole lora in which 'tune' trained chosen positions",
    ),
    Mistake(
        "nothing but pretrained weights",
        ("rank: 4", "method: mixout, mixout: 1.0"),
        "E104 {file}:6: stages[1].tune.mixout: must be less than 1",
    ),
    Mistake(
        "a child drawn anew beside a select",
        ("rank: 4", "method: child_tuning"),
        "E404 {file}:6: stages[1].tune: child_tuning with child f does not use the positions that 'select' chooses",
        "Use child: d",
    ),
    Mistake(
        "a child without its positions",
        ("  - select: {count: 4}\n  - tune: {rank: 4", "  - tune: {method: child_tuning, child: d"),
        "E404 {file}:5: stages[0].tune: child_tuning with child d needs positions",
    ),
    Mistake(
        "a draw for a child that is chosen",
        ("rank: 4", "method: child_tuning, child: d, reserve: 0.5"),
        "E403 {file}:6: stages[1].tune.reserve: reserve is not used by method child_tuning with child: d",
    ),
    Mistake(
        "a rate of masks that nothing learns",
        (
            "  - select: {count: 4}\n  - tune: {rank: 4",
            "  - tune: {method: propetl, shared: lora, masks: random, mask_learning_rate: 0.1",
        ),
        "E403 {file}:5: stages[0].tune.mask_learning_rate: mask_learning_rate is not used by method propetl with masks: random",
    ),
    Mistake(
        "a rate of masks that hide nothing",
        (
            "  - select: {count: 4}\n  - tune: {rank: 4",
            "  - tune: {method: propetl, shared: lora, keep: 1, mask_learning_rate: 0.1",
        ),
        "E403 {file}:5: stages[0].tune.mask_learning_rate: mask_learning_rate is not used by method propetl with keep: 1",
    ),
    Mistake(
        "an eps of the plain gradient",
        ("  - select: {count: 4}\n  - tune: {rank: 4", f"  - tune: {{{GROWS}, exp: 0, eps: 0.01"),
        "E403 {file}:5: stages[0].tune.eps: eps is not used by method selective with exp: 0",
    ),
    Mistake(
        "an eps of a score's plain gradient",
        ("count: 4}", "count: 4, score: d3, eps: 0.3}"),
        "E403 {file}:5: stages[0].select.eps: eps is not used by score d3 with exp: 0",
    ),
    Mistake(
        "normalized scores of whole layers",
        pruning("structure: layers, scope: global, normalize: true, remove: 1"),
        "E104 {file}:7: stages[2].prune: normalize divides a layer's scores by their norm, and a whole layer has one score",
    ),
    Mistake(
        "a burn-in as long as the training",
        (
            "  - select: {count: 4}\n  - tune: {rank: 4",
            "  - tune: {method: child_tuning, child: pruning, budget: 9, steps: 4, burn_in: 4",
        ),
        "E413 {file}:5: stages[0].tune.burn_in: burn_in is 4 steps, the training has 4",
    ),
    Mistake(
        "a renewal after the positions are fixed",
        ("  - select: {count: 4}\n  - tune: {rank: 4", "  - tune: {method: diff_pruning, budget: 9, steps: 9, renew: 4"),
        "E413 {file}:5: stages[0].tune.renew: renew is 4 steps, the positions are fixed after 4: nothing is ever renewed.",
        "raise burn_in",
    ),
    Mistake(
        "a renewal after the burn-in",
        (
            "  - select: {count: 4}\n  - tune: {rank: 4",
            "  - tune: {method: child_tuning, child: pruning, budget: 9, burn_in: 2, renew: 3",
        ),
        "E413 {file}:5: stages[0].tune.renew: renew is 3 steps, the positions are fixed after 2: nothing is ever renewed.",
    ),
    Mistake(
        "a burn-in as long as the passes over the rows",
        ("method: same", "method: diff_pruning, budget: 9, burn_in: 10, epochs: 2"),
        "E413 {file}:8: stages[3].recover: burn_in is 10 steps, the training has 10",
    ),
    Mistake(
        "more checkpoints than steps in which the positions grow",
        ("  - select: {count: 4}\n  - tune: {rank: 4", f"  - tune: {{{GROWS}, epochs: 1, checkpoints: [2, 3, 4, 5, 6]"),
        "E408 {file}:5: stages[0].tune: checkpoints and budget are 6 sizes of Ω, which grows in 5 of 5 steps.",
        "train longer",
    ),
    Mistake(
        "more last blocks than blocks",
        ("method: same", "method: full, top: 9"),
        "E414 {file}:8: stages[3].recover: top is 9, the model has 2 blocks",
    ),
    Mistake(
        "all of a model of which the last blocks were trained",
        rewrite(LAST_BLOCKS.replace("criterion: delta", "criterion: weight")),
        "E404 {file}:7: stages[2].recover.method: same would train the whole model, 'tune' trained its last 1 blocks",
    ),
    Mistake(
        "a checkpoint of no position",
        ("  - select: {count: 4}\n  - tune: {rank: 4", f"  - tune: {{{GROWS.replace('9', '0.01')}, checkpoints: [0.0001]"),
        "E408 {file}:5: stages[0].tune: checkpoint 0.0001 is 0 of 4,096 positions, budget 0.01 is 40",
    ),
    Mistake(
        "a checkpoint of all positions",
        ("  - select: {count: 4}\n  - tune: {rank: 4", f"  - tune: {{{GROWS.replace('9', '0.01')}, checkpoints: [0.00995]"),
        "E408 {file}:5: stages[0].tune: checkpoint 0.00995 is 40 of 4,096 positions, budget 0.01 is 40",
    ),
    Mistake(
        "diff pruning without a budget",
        ("  - select: {count: 4}\n  - tune: {rank: 4", "  - tune: {method: diff_pruning"),
        "E404 {file}:5: stages[0].tune.method: diff_pruning needs a budget",
    ),
    Mistake(
        "a budget of more than there is",
        ("  - select: {count: 4}\n  - tune: {rank: 4", "  - tune: {method: diff_pruning, budget: 9999"),
        "E401 {file}:5: stages[0].tune: budget 9999 is 9,999 of 4,096 positions",
    ),
    Mistake("no such model", ("./model", "./modell"), "E303 {file}:2: model: model './modell': no such folder"),
    Mistake("a model without weights", Path.unlink, "E304 {pipeline}:2: model: ", file="model/model.safetensors"),
    Mistake("more tokens than positions", ("max_length: 32", "max_length: 65"), "E113 {file}:3: task.max_length: 65 tokens, "),
    Mistake("a default beyond the positions", (", max_length: 32", ""), "E113 {file}:3: task.max_length: 128 tokens, "),
    Mistake(
        "a benchmark beyond the positions",
        ("16, 64", "16, 65"),
        "E113 {file}:11: stages[6].benchmark.length[1]: 65 tokens, where the model has positions for 64",
        "Use at most 64",
    ),
    Mistake(
        "a kind that the model has no head for, and rows too long for it",
        ("label: label", "label: label, kind: generation"),
        "E309 {folder}/model: a 'bert' is not trained to generate here",
    ),
    Mistake(
        "int8 on a graphics card",
        ("length: [16, 64]", "device: cuda"),
        "E604 {file}:11: stages[6].benchmark.device: dynamic int8 would run partly on the CPU",
        "precision: [fp32] in 'export'",
    ),
    Mistake(
        "text and label in one column",
        ("label: label", "label: sentence"),
        "E104 {file}:3: task.label: label and text must be different",
    ),
    Mistake(
        "a text that is named as the label's default", ("text: sentence, label: label", "text: label"), "E104 {file}:3: task"
    ),
    Mistake(
        "the same text twice",
        ("text: sentence", "text: [sentence, sentence]"),
        "E104 {file}:3: task.text: a pair needs two different columns",
    ),
    Mistake(
        "no header in files that have none",
        ("train: train.tsv, validation: dev.tsv", "header: false, train: train.jsonl, validation: dev.parquet"),
        "E104 {file}:3: task.header: header is used by .tsv and .csv files, and the task names none",
    ),
    Mistake(
        "missing data file", Path.unlink, "E201 {file}: no such file ({pipeline}:3: task.validation). Paths are", file="dev.tsv"
    ),
    Mistake("a pipe for a data file", to_pipe, "E201 {file}: not a regular file (a pipe, a socket or a dev", file="train.tsv"),
    Mistake(
        "a device for a data file",
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        "E201 {file}: not a regular file",
        file="train.tsv",
    ),
    Mistake(
        "data in UTF-16",
        lambda path: path.write_bytes(path.read_text().encode("utf-16")),
        "E203 {file}:1: UTF-16, not UTF-8 ({pipeline}:3: task.train). Convert it: iconv -f utf-16 -t utf-8",
        file="train.tsv",
    ),
    Mistake("a NUL byte", ("\tclass1", "\0\tclass1"), "E203 {file}:3: a NUL byte", file="train.tsv"),
    Mistake(
        "a column that stands twice",
        lambda path: path.write_text("".join(f"{line}\t{line[-5:]}\n" for line in path.read_text().splitlines())),
        "E216 {file}:1: column 'label' appears twice in the header ({pipeline}:3: task.train)",
        file="train.tsv",
    ),
    Mistake("folder for a data file", to_folder, "E202 {file}: a folder, not a data file", file="train.tsv"),
    Mistake(
        "missing column", ("sentence\t", "sentense\t"), "E205 {file}:1: no column 'sentence'", "'sentense'?", file="dev.tsv"
    ),
    Mistake(
        "misspelt kind of task",
        ("{train", "{kind: regresion, train"),
        "E104 {file}:3: task.kind: must be 'classification' or 'regression'",
        "Did you mean 'regression'?",
    ),
    Mistake(
        "unknown validation label",
        ("class1\n", "class7\n"),
        "E209 {file}:3: label 'class7' never occurs in training ({pipeline}:3: task.validation)",
        file="dev.tsv",
    ),
    Mistake(
        "a label that a terminal obeys",
        ("class1\n", "\x1b[2J\u202e\x9b7\n"),
        "E209 {file}:3: label '\\x1b[2J\\u202e\\x9b7' never occurs in training",
        file="dev.tsv",
    ),
    Mistake(
        "unknown label in a file that is only scored",
        lambda path: (
            path.write_text(PIPELINE.replace("dev.tsv,", "dev.tsv, test: {mm: test.tsv},")),
            (path.parent / "test.tsv").write_text("sentence\tlabel\ngood\tclass7\n"),
        ),
        "E209 ",
        "test.tsv:2: label 'class7' never occurs in training ({pipeline}:3: task.test.mm)",
    ),
    Mistake("a test file without rows", ("dev.tsv,", "dev.tsv, test: model,"), "E202 ", "{pipeline}:3: task.test)"),
    Mistake(
        "a metric of another kind",
        ("dev.tsv,", "dev.tsv, metric: pearson,"),
        "E119 {pipeline}:3: task.metric: 'pearson' is not a metric of a classification",
        "Metrics: accuracy, matthews",
    ),
    Mistake(
        "a positive class of a metric of all classes",
        ("dev.tsv,", "dev.tsv, positive: class1,"),
        "E119 {pipeline}:3: task.positive: positive is not used by the metric accuracy",
        "Remove positive, or choose metric f1",
    ),
    Mistake(
        "a positive class that training lacks",
        ("dev.tsv,", "dev.tsv, metric: f1, positive: 1,"),
        "E218 {pipeline}:3: task: no class is called '1', as positive says",
        "Classes: class0, class1",
    ),
    Mistake("empty data file", rewrite("sentence\tlabel\n"), "E204 {file}: the file has no rows", file="train.tsv"),
    Mistake("one class only", drop_lines, "E208 {file}: every row has the label 'class0'", file="train.tsv"),
    Mistake(
        "bad encoding", lambda path: path.write_bytes(b"sentence\tlabel\ncaf\xe9\tclass0\n"), "E203 {file}:2:", file="dev.tsv"
    ),
    Mistake("numbers for text", rewrite("sentence\tlabel\n1\tclass0\n2\tclass1\n"), "E206 {file}:1: ", file="train.tsv"),
    Mistake(
        "lines that end in CR",
        lambda path: path.write_bytes(path.read_bytes().replace(b"\n", b"\r")),
        "E236 {file}:1: the lines end in CR alone, as on old Macs: all is one line ({pipeline}:3: task.train)",
        file="train.tsv",
    ),
    Mistake(
        "a class in two spellings",
        lambda path: path.write_text("sentence\tlabel\na film\t0\na plot\t1\na scene\t1.0\n"),
        "E235 {file}:4: label '1.0' is the same number as '1' in an earlier row",
        file="train.tsv",
    ),
    Mistake(
        "a line without end",
        lambda path: path.write_bytes(b"sentence\tlabel\n" + b"x" * (16 * 2**20 + 1)),
        "E234 {file}:2: a row of 16 MiB or more, where one has at most 16 MiB ({pipeline}:3: task.train)",
        file="train.tsv",
    ),
    Mistake(
        "a task that GLUE lacks",
        ("{train: train.tsv, validation: dev.tsv, text: sentence, label: label, max_length: 32}", "glue/sst-2"),
        "E233 {file}:3: task: GLUE has no task 'sst-2'. Did you mean 'glue/sst2'?",
    ),
    Mistake(
        "a GLUE folder without the task",
        ("{train: train.tsv, validation: dev.tsv, text: sentence, label: label,", "{glue: rte, folder: model,"),
        "E233 {file}:3: task: {folder}/model: neither RTE/train.tsv nor train.tsv",
    ),
    Mistake(
        "a data set without its split",
        ("train: train.tsv", "train: hub:imdb"),
        "E230 {file}:3: task.train: 'hub:imdb' is not a split of a data set",
        "e.g. hub:nyu-mll/glue:sst2/train:10000",
    ),
    Mistake(
        "a folder of a data set that is not there",
        ("train: train.tsv", "train: hub:./sets/train"),
        "E231 {file}:3: task.train: hub:./sets/train: no folder {folder}/sets. Paths are relative to the pipeline file",
    ),
    Mistake(
        "a score that is no number",
        of_rows("regression", {"sentence": "a b", "label": float("nan")}),
        "E207 {folder}/train.jsonl:3: column 'label' holds nan",
    ),
    Mistake(
        "no target",
        of_rows("generation", {"sentence": "a b", "label": []}),
        "E207 {folder}/train.jsonl:3: column 'label' holds []",
    ),
    Mistake(
        "an answer that cannot be read",
        of_rows(
            "generation", {"sentence": "a b", "label": "none"}, "dev", decode={"answer": "number", "metrics": ["exact_match"]}
        ),
        "E240 {folder}/dev.jsonl:3: ",
    ),
    Mistake("a broken row", ("\tclass1\n", "class1\n"), "E210 {file}:3: 1 fields where the header has 2", file="train.tsv"),
    Mistake(
        "a file where runs should go", nothing, "E801 {file}: a file, where a folder is needed", options=("--out", "{file}")
    ),
    Mistake("a folder that cannot be written", nothing, "E801 /proc", options=("--out", "/proc/runs")),
    Mistake(
        "unknown stage in --from", nothing, "E111 --from: no stage 'tun'", "Did you mean 'tune'?", options=("--from", "tun")
    ),
    Mistake("unknown key in --set", nothing, "E109 --set sed=1: ", "Did you mean 'seed'?", options=("--set", "sed=1")),
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A project without a mistake: a real tiny model, real data, real stages."""
    folder = tmp_path_factory.mktemp("sound")
    write_model(folder / "model")
    write_data(folder)
    (folder / "pipeline.yaml").write_text(PIPELINE)
    return folder


def test_the_project_is_sound_before_the_mistakes(sound, compress):
    code, shown, error = compress("run", sound / "pipeline.yaml", "--out", sound / "runs", "--dry-run")
    assert (code, error) == (0, "") and "parameters" in shown


@pytest.mark.parametrize(("until", "smaller", "recovers"), [("tune", 0, 0), ("prune", 1, 0), ("recover", 1, 1)])
def test_a_dry_run_shows_the_figures_after_the_last_stage_that_would_run(sound, compress, until, smaller, recovers):
    _, shown, _ = compress("run", sound / "pipeline.yaml", "--out", sound / "runs", "--dry-run", "--until", until)
    ((before, after),) = (line.split()[1:] for line in shown.splitlines() if line.split()[:1] == ["parameters"])
    assert (before != after, "trainable in recover" in shown) == (smaller, recovers)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda one: one.name)
def test_a_mistake_is_one_line_and_writes_nothing(sound, tmp_path, compress, mistake):
    project = tmp_path / "project"
    shutil.copytree(sound, project)
    file, pipeline = project / mistake.file, project / "pipeline.yaml"
    if callable(mistake.change):
        mistake.change(file)
    else:
        old, new = mistake.change
        assert file.read_text().count(old), "the row no longer fits the project"
        file.write_text(file.read_text().replace(old, new, 1))
    options = [option.format(file=file) for option in mistake.options]
    before = tree(tmp_path)
    code, shown, error = compress("run", pipeline, "--out", tmp_path / "runs", *options)
    assert (code, shown) == (2, ""), error
    assert not OBEYED.search(error.removesuffix("\n")), error
    assert error.count("\n") == 1 and error.startswith(mistake.says.format(file=file, pipeline=pipeline, folder=project)), error
    assert mistake.fix.replace("{pipeline}", str(pipeline)) in error
    assert tree(tmp_path) == before and not (tmp_path / "runs").exists()
