"""`compress init`: the text of a first pipeline file, every key of it explained."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from compressor.models.build import SEQUENCES, TEXT2TEXT
from compressor.tasks import GENERATED, KINDS, Subset
from compressor.tasks.task_kind import kind_of
from export.runtimes.runtime_registry import DEFAULT, RUNTIMES
from pipelines.file.yaml_source import scalar
from pipelines.init.copied_files import copies_line
from serving.layout.text_outputs import TEXT_SUFFIX

PLAIN = re.compile(r"[A-Za-z0-9_./~][A-Za-z0-9_./:+~-]*")
"""Text that YAML reads as a plain string."""


@dataclass(frozen=True)
class Facts:
    """Content of the pipeline file, with reasons. `kept` are the rows to train on (None for all), `sparse` whether
    robust PCA finds entries in so wide a model, `no_server` why no Triton can start here for the checks of `deploy` (empty
    where one can), `copies` are the names of the data files that `init` wrote."""

    name: str
    data: str
    model: str
    kind: str
    train: str
    validation: str
    text: Sequence[str]
    label: str
    max_length: int
    timed_length: int
    sparse: bool
    epochs: int
    rows: int
    kept: Subset | None
    no_server: str
    why: dict[str, str]
    schema: str | None = None
    test: str | None = None
    copies: Sequence[str] = ()

    @property
    def classifies(self) -> bool:
        """Whether the model gets a task head: all kinds but those that write texts."""
        return self.kind not in GENERATED


def quoted(value: str) -> str:
    """A text as YAML, with quotes where it would otherwise be parsed as something else."""
    try:
        plain = PLAIN.fullmatch(value) and not value.endswith(":") and ": " not in value and scalar(value) == value
    except ValueError:
        plain = False
    if plain:
        return value
    # a control character is refused in YAML, and some others end a line
    letters = json.dumps(value, ensure_ascii=False)
    return "".join(letter if letter.isprintable() else f"\\U{ord(letter):08x}" for letter in letters)


def pipeline_text(facts: Facts) -> str:
    """The text of the whole pipeline file."""
    parts = [_head(facts) + _task(facts), _training(facts), _pruning(facts), _recovery(facts), _export(facts)]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _comment(text: str) -> str:
    """A reason as a one-line comment, without unprintable characters."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())


def _head(facts: Facts) -> str:
    schema = f"# yaml-language-server: $schema={facts.schema}\n" if facts.schema else ""
    copies = f"\n{copies_line(facts.copies)}" if facts.copies else ""
    return f"""
{schema}# Made by `compress init` from {_comment(facts.data)}. Every value may be changed; what was guessed says why.{copies}
#
#   compress check FILE              reads the model and the data, trains nothing
#   compress run FILE                runs the stages; a second run reuses what is done
#   compress list stages tune        every key of a stage, with its default
name: {quoted(facts.name)}
# A Hugging Face id, a folder, or package:NAME/PATH inside an installed package
model: {quoted(facts.model)}
"""


def _task(facts: Facts) -> str:
    columns = quoted(facts.text[0]) if len(facts.text) == 1 else f"[{', '.join(map(quoted, facts.text))}]"
    pair = "; two make a pair: [first, second]" if (KINDS[facts.kind].least, KINDS[facts.kind].most) == (1, 2) else ""
    subset = (
        f"""
  # A first run in minutes: a random part of the {facts.rows:,} training rows. Remove the next line to train on all of them
  subset: {{share: {Decimal(str(facts.kept.share)):f}, seed: {facts.kept.seed}}}"""
        if facts.kept
        else """
  # A random part of the training rows only:
  # subset: {share: 0.5, seed: 0}"""
    )
    return f"""task:
  # {", ".join(KINDS)}; guessed: {_comment(facts.why["kind"])}
  kind: {facts.kind}
  # Files: .tsv, .csv, .jsonl, .parquet, .conll, .txt, optionally compressed (.gz); relative to this file
  train: {quoted(facts.train)}
  validation: {quoted(facts.validation)}{_test(facts)}
  # Columns{pair}; guessed: {_comment(facts.why["text"])}
  text: {columns}
  # guessed: {_comment(facts.why["label"])}
  label: {quoted(facts.label)}
  # What models are compared, chosen and refused by; `compress list metrics` tells what there is
  # metric: {kind_of(facts.kind).choices[-1].key}
  # Tokens of a row; {_comment(facts.why["max_length"])}
  max_length: {facts.max_length}{_prefix(facts)}{subset}
# Another seed draws other random numbers; the same one gives the same result
seed: 0
# Threads of every computation; by default the physical cores
# threads: 2
"""


def _prefix(facts: Facts) -> str:
    """The key of a text before each source, as an example."""
    if kind_of(facts.kind).auto_class != TEXT2TEXT:
        return ""
    return """
  # Before each source, as the model was pretrained
  # prefix: "summarize: "
  # Maximum tokens of a target
  # target_length: 128"""


def _test(facts: Facts) -> str:
    """The key of a file that is only scored, as an example where there is none."""
    return f"""
  # Only scored: nothing is chosen by these rows
  {f"test: {quoted(facts.test)}" if facts.test else "# test: FILE"}"""


def _training(facts: Facts) -> str:
    places = _places(facts) if facts.sparse else ""
    return f"""
# The stages run from top to bottom; each may appear again further down
stages:
{places}  # Train a small change of the frozen model. `compress list methods` tells what there is
  - tune:
{_method(facts)}
      modules: {_modules(facts)}
      # passes over the training rows
      epochs: {facts.epochs}
      # diverges (E406)? Divide by 3
      learning_rate: 1.0e-3
      # rows of a step; fewer take less memory
      batch_size: {_batch(facts)}
      # less time, in recover too, on a GPU or a CPU that multiplies in it (`compress doctor` tells):
      # precision: bf16
"""


def _modules(facts: Facts) -> str:
    return "[query, value]" if kind_of(facts.kind).auto_class == SEQUENCES and not _is_hard(facts) else "all"


def _rank(facts: Facts) -> int:
    """Of all modules a small rank is as few parameters as a larger one of two."""
    return 4 if _is_hard(facts) else 16


def _is_hard(facts: Facts) -> bool:
    """Whether a sequence is to be understood against another one, or as a number: query and value alone learn that too slowly
    (STS-B in two epochs: Spearman 17, with all modules at rank 4 85)."""
    return kind_of(facts.kind).auto_class == SEQUENCES and (len(facts.text) > 1 or facts.kind == "regression")


def _batch(facts: Facts) -> int:
    """Batch size: small for generation, since each token has logits for a whole vocabulary."""
    return 32 if facts.classifies else 8


def _places(facts: Facts) -> str:
    return f"""  # Choose the positions in the weights that the sparse part of the tuning may change, by robust PCA
  - select:
      # or: magnitude, pafi, random; by the gradients of the task: fish, sam, d3
      score: rpca
      # positions in each matrix
      count: 16
      # or: all, or some of query, key, value, output, ffn_in, ffn_out
      modules: {_modules(facts)}

"""


def _method(facts: Facts) -> str:
    if facts.sparse:
        return f"""      # low-rank plus sparse; or, without the select above:
      # lora, or full (every weight; without rank, modules, learning_rate)
      method: dsee
      rank: {_rank(facts)}"""
    return f"""      # low-rank; or: dsee (low-rank plus sparse, a select before it),
      # full (every weight; without rank, modules, learning_rate)
      method: lora
      rank: {_rank(facts)}"""


def _pruning(facts: Facts) -> str:
    asked, goal = "a speed instead of the two items, measured on this machine", "speedup: 2.0, batch: 8"
    if kind_of(facts.kind).auto_class == TEXT2TEXT:  # two files, of which none alone can be timed
        asked, goal = "a share of the FLOPs instead of the two items", "flops: 0.5"
    return f"""
  # Remove for good what the loss says matters least (taylor). A count (6) is of each layer; a share lies between 0 and 1
  - prune:
      # or: delta, how little the tuning changed a head, as in the DSEE paper
      - {{structure: heads, criterion: taylor, remove: 0.5}}
      # neurons of the feed-forward layers
      - {{structure: neurons, criterion: taylor, remove: 0.5}}
  # Less quality lost? remove: 0.25 in both. Or ask for {asked}:
  # - prune: {{target: {{{goal}, length: {facts.max_length}}}}}
"""


def _recovery(facts: Facts) -> str:
    select = """
  # Choose positions again, in the shapes that are left, for the recovery
  - select: {score: rpca, count: 16, modules: all}
"""
    other = "lora" if facts.sparse else "dsee (a select before it)"
    return f"""{select if facts.sparse else ""}
  # Train what is left, with the tuned model before pruning as the teacher
  - recover:
      # or: same (go on with what tune trains), {other}, full
      method: {"dsee" if facts.sparse else "lora"}
      rank: 8
      modules: all
      epochs: {facts.epochs}
      learning_rate: 1.0e-3
      batch_size: {_batch(facts)}
      # or: false (labels alone), hidden, both
      distill: logits{_longer(facts)}
      # also train the unpruned model in the same way: the fair baseline of quality in the report, for about as long again
      control: true

  # Fold the changes into the weights: from here on it is an ordinary model
  - merge:
"""


def _longer(facts: Facts) -> str:
    """How more of the quality comes back in more time, where texts have variants."""
    if not kind_of(facts.kind).augments:
        return ""
    without = ", without the select above" if facts.sparse else ""
    return f"""
      # more quality for more time, most where much was removed: all weights, on random variants of the texts{without}:
      # method: full, augment: 15, steps: 1500, batch_size: 64, learning_rate: 4.0e-4 instead of rank, modules and epochs"""


def _export(facts: Facts) -> str:
    name = quoted(re.sub(f"({TEXT_SUFFIX})+$", "", facts.name))  # the models of texts alone end so
    served = f"""
  # A model repository for Triton Inference Server, proven on a live server
  - deploy: {{name: {name}}}
"""
    if facts.no_server:
        served = f"""
  # A model repository for Triton Inference Server; left out, because no server can start here:
  # {_comment(facts.no_server)}
  # - deploy: {{name: {name}}}
"""
    auto = " or: auto (the fastest that loses at most half a point)" if facts.classifies else ""
    faster = next(row for row in RUNTIMES.values() if row.calibrated)
    aside = f"\n      # or, faster on many processors: [{faster.key}], with the extra `{faster.extra}`"
    runtime = aside if facts.classifies else ""
    return f"""
  # Write the dense and the compressed model as files for a runtime, each compared with PyTorch
  - export:
      # fp32, int8;{auto}
      precision: [fp32, int8]{runtime}
      runtime: [{DEFAULT.key}]
{served}
  # Quality, bytes, FLOPs and latency of every file, for so many rows of so many tokens
  - benchmark: {{batch: [1, 8], length: [{facts.timed_length}], rounds: 20}}

  # runs/NAME/report.html, report.md and report.json
  - report:
"""
