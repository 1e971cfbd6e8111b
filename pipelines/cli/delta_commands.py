"""`compress delta`: show, merge, compare and convert delta files."""

from __future__ import annotations

from pathlib import Path

import click

from export.runtimes.runtime_registry import CPU_RUNTIMES
from pipelines.cli.kind_type import TaskKindName
from pipelines.cli.work.lazy_work import work

FILE = click.Path(path_type=Path)
LABELS_HELP = 'Names of the classes, for a peft adapter, which does not hold them; one with a comma in double quotes: "a, b",c.'
KIND_HELP = "The kind of task, for a peft adapter, which does not hold it.  [default: as the head tells]"
BASE_HELP = "The pretrained model: a hub id, a folder or package:NAME/PATH. By default the one that the source names."


@click.group(epilog="Example: compress delta info reviews.delta.safetensors")
def delta() -> None:
    """Work with delta files: a tuned task, without its base, in one small file (docs/deltas.md)."""


@delta.command(epilog="Example: compress delta info reviews.delta.safetensors --json")
@click.argument("file", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
@work("pipelines.cli.work.delta_work:info")
def info() -> None:
    """Show what FILE changes, on which base, and what each part costs on disk."""


@delta.command(epilog="Example: compress delta apply reviews.delta.safetensors --base ./minilm --out merged")
@click.argument("file", type=FILE)
@click.option("--base", metavar="REF", help=BASE_HELP)
@click.option("--out", type=FILE, required=True, metavar="FOLDER", help="A new folder for config, weights and tokenizer.")
@work("pipelines.cli.work.delta_work:apply")
def apply() -> None:
    """Merge FILE into its base and write the whole model, ready for `compressor.load` (or transformers, if not pruned).

    Adapters and prefixes cannot be merged: the folder contains them in addition to the weights.
    """


@delta.command(epilog="Example: compress delta diff seed0.delta.safetensors seed1.delta.safetensors")
@click.argument("a", type=FILE)
@click.argument("b", type=FILE)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
@work("pipelines.cli.work.delta_work:diff")
def diff() -> None:
    """Compare A and B matrix by matrix: norms of ΔW, their cosine, and the overlap of their supports (Jaccard).

    The overlap is of the supports, or of the masks over a shared prototype. No base is needed. A note below the table says why
    a matrix has no cosine.
    """


@delta.command(
    epilog="Example: compress delta convert runs/reviews reviews.delta.safetensors\n\n"
    "or: compress delta convert ./adapter reviews.delta.safetensors --base ./minilm --labels bad,good"
)
@click.argument("src", type=FILE)
@click.argument("dst", type=FILE)
@click.option("--base", metavar="REF", help=BASE_HELP)
@click.option("--to", "form", type=click.Choice(["delta", "peft"]), default="delta", show_default=True, help="Format of DST.")
@click.option("--labels", metavar="A,B,...", help=LABELS_HELP)
@click.option("--kind", type=TaskKindName(), help=KIND_HELP)
@click.option("--head/--no-head", default=True, show_default=True, help="Write the task head too.")
@work("pipelines.cli.work.delta_work:convert")
def convert() -> None:
    """Convert SRC (the folder of a run or of a state, a delta file or a peft folder) to the format of DST.

    A peft folder is LoRA if every change is low-rank, and Super-Tuning if some are sparse (DSEE, selective). It names its base
    by a hub id or a folder; it holds no labels and no kind of task.
    """


@delta.command(epilog="Example: compress delta stack reviews.safetensors questions.safetensors --out ./many")
@click.argument("files", type=FILE, nargs=-1, required=True)
@click.option("--base", metavar="REF", help=BASE_HELP)
@click.option("--out", type=FILE, required=True, metavar="FOLDER", help="A new folder for the model file and the tokenizer.")
@click.option(
    "--runtime", type=click.Choice(CPU_RUNTIMES), default=CPU_RUNTIMES[0], show_default=True, help="What runs the file."
)
@click.option(
    "--repository", type=FILE, metavar="DIR", help="Also add the model to this Triton repository, or a version to it."
)
@click.option("--name", default="tasks", show_default=True, help="The model's name in DIR.")
@click.option(
    "--max-length", type=click.IntRange(2), metavar="N", help="Tokens at which texts are cut.  [default: as before, or 512]"
)
@click.option("--force", is_flag=True, help="Replace an earlier export in FOLDER.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
@work("pipelines.cli.work.stack_work:stack")
def stack() -> None:
    """Write one model file that computes the tasks of all FILES on their base, and compare each with its own merged model.

    The file has an input `task`, the number of each row's task in the order of FILES, so that a batch may mix tasks. A task is
    named after its file. Low-rank, sparse and VeRA deltas, biases and adapters can be stacked. In a repository the model NAME
    takes tokens and `task`, NAME-text takes texts and the name of a task.
    """
