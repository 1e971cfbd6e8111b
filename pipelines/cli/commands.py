"""The command line, `compress`: what each command takes. Its work is imported when it runs, so that any --help is instant."""

from __future__ import annotations

import contextlib
import importlib.metadata
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from compressor.errors import CompressError
from pipelines.cli.completion import PipelineName
from pipelines.cli.delta_commands import delta
from pipelines.cli.encoding import escape_unencodable
from pipelines.cli.folder_type import Folder
from pipelines.cli.kind_type import TaskKindName
from pipelines.cli.launch import led
from pipelines.cli.list_commands import list_
from pipelines.cli.loadtest_command import loadtest
from pipelines.cli.work.lazy_work import work
from pipelines.engine.disk import RUNS
from pipelines.init.defaults import MANY, ROWS
from pipelines.terminal.last_resort import coded

SET_HELP = (
    "Override a key: STAGE.KEY=VALUE or KEY=VALUE, e.g. tune.rank=8; a name with a dot in double quotes: "
    "'tasks.\"a.b\".label=x'; KEY=null takes a key of the file away. Paths in it are relative to the current folder."
)


class Commands(click.Group):
    """A group that ends in the documented exit codes: whatever goes wrong is one line on stderr, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        escape_unencodable()
        with _interruptible() as interrupts, led():
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.Abort, click.exceptions.Exit):
                raise
            except KeyboardInterrupt as stop:
                self._stopped(ctx, stop)
            except BrokenPipeError:  # click exits quietly if the reader of a pipe is gone
                raise
            except BaseException as error:  # a Rust panic, such as tokenizers', is not an Exception
                if isinstance(error, SystemExit | GeneratorExit):
                    raise
                if interrupts and not isinstance(error, CompressError):  # an interrupted import may raise anything
                    self._stopped(ctx, KeyboardInterrupt())
                fault = coded(error, f"compress {ctx.invoked_subcommand or ''}".rstrip())
                click.echo(str(fault), err=True)
                ctx.exit(fault.exit_code)

    def _stopped(self, ctx: click.Context, stop: KeyboardInterrupt) -> NoReturn:
        if not getattr(stop, "reported", False):
            click.echo("Stopped.", err=True)
        ctx.exit(getattr(stop, "exit_code", 128 + signal.SIGINT))


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt for SIGINT as usual, and record it in the list. An ignored SIGINT stays ignored."""
    came: list[int] = []
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        yield came
        return

    def stop(number: int, _frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield came
    finally:
        signal.signal(signal.SIGINT, before)


def _version(ctx: click.Context, _parameter: click.Parameter, requested: bool) -> None:
    if requested:
        try:
            version = importlib.metadata.version("compress-pipeline")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed: run from its source)"
        click.echo(f"compress {version}")
        ctx.exit()


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: compress run quickstart",
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def main() -> None:
    """Make a pretrained transformer cheaper to tune, smaller and faster to serve, and prove it by measurement."""


@main.command(epilog="Example: compress run pipeline.yaml --set tune.rank=8 --from tune")
@click.argument("file", type=PipelineName())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=SET_HELP)
@click.option("--from", "from_", metavar="STAGE", help="Run this stage and all later ones again.")
@click.option("--until", metavar="STAGE", help="Stop after this stage.")
@click.option("--force", multiple=True, metavar="STAGE", help="Run this stage again although its result is in the store.")
@click.option("--out", type=Folder(), default=RUNS, show_default=True, help="Folder of runs and store.")
@click.option("--dry-run", is_flag=True, help="Show what would run, and what the model will cost, without training.")
@work("pipelines.cli.work.run_work:run", distributed=True)
def run() -> None:
    """Run a pipeline FILE, or a bundled recipe by its name, such as quickstart: `compress list recipes` shows them all.

    Finished stages are reused: after an interruption the same command resumes. The exit code is 3 if a check failed, even if
    the run continued to its report.
    """


@main.command(epilog="Example: compress check pipeline.yaml")
@click.argument("file", type=PipelineName())
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=SET_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
@work("pipelines.cli.work.check_work:check")
def check() -> None:
    """Check a pipeline FILE, its model and its data without running anything.

    Shows statistics of the rows, suspicious ones, and estimates of time, memory and disk on this machine. With warnings only,
    the exit code is 0.
    """


SWEEP_EXAMPLES = """\b
Example: compress sweep pipeline.yaml --seeds 10
         compress sweep pipeline.yaml --over tune.rank=4,8 --over tune.epochs=1,3 --seeds 5 --workers 2 --threads 2
         compress sweep pipeline.yaml --subsets 10 --share 0.9 --stage tune
         compress sweep pipeline.yaml --over tune.learning_rate=1e-4..1e-2 --over tune.rank=4..64:log --search 30
         compress sweep pipeline.yaml --grid grid.yaml --seeds 3 --engine ray --address auto --threads 4
         compress sweep dsee_table1 --scale small --folder GLUE
         compress sweep sam_table1 --scale small --folder GLUE --only task=sst2 --only method=lora,sam"""


@main.command(epilog=SWEEP_EXAMPLES)
@click.argument("file", type=PipelineName())
@click.option(
    "--over", multiple=True, metavar="KEY=V,V,..", help="Compare these values of a key; several keys: every combination."
)
@click.option(
    "--search",
    type=int,
    metavar="N",
    help="Run N trials in place of every combination, chosen by the results before; --over then takes KEY=LOW..HIGH, too.",
)
@click.option(
    "--grid", type=click.Path(path_type=Path), metavar="FILE", help="The same from a YAML file: KEY: [V, V] on each line."
)
@click.option("--only", multiple=True, metavar="KEY=V,V,..", help="Run these rows or columns of a table alone.")
@click.option("--scale", metavar="NAME", help="Of a table of a paper: small (minutes to hours) or paper (its own models).")
@click.option("--folder", type=click.Path(path_type=Path), help="Of a table of a paper: the folder of its data.")
@click.option("--seeds", type=int, metavar="N", help="Run each N times: with the pipeline's seed, seed + 1, ...")
@click.option("--subsets", type=int, metavar="N", help="Run each N times: on N random parts of the training rows.")
@click.option("--share", type=float, help="Share of the training rows in each subset.  [default: 0.9]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=SET_HELP)
@click.option("--until", metavar="STAGE", help="Stop each run after this stage.  [default: the last that changes the model]")
@click.option("--stage", metavar="STAGE", help="Summarize this stage's quality only.  [default: every stage that has one]")
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True, help="What runs the trials.")
@click.option("--address", metavar="HOST:PORT", help="A running cluster of Ray, or auto.  [default: this machine alone]")
@click.option("--workers", type=click.IntRange(1, 1024), metavar="N", help="Trials at a time.  [default: 1; ray: what fits]")
@click.option(
    "--threads", type=click.IntRange(1, 1024), metavar="N", help="Threads of each trial, whatever the number of workers."
)
@click.option("--name", metavar="NAME", help="Folder of the sweep in OUT.  [default: the pipeline's name and -sweep]")
@click.option("--out", type=Folder(), default=RUNS, show_default=True, help="Folder of runs and store.")
@click.option("--dry-run", is_flag=True, help="Show which trials and stages would run, and which are shared, without training.")
@work("pipelines.cli.work.sweep_work:sweep")
def sweep() -> None:
    """Run FILE several times, for every combination of values and every seed, and compare mean and spread of its quality.

    Stages that runs share run once; finished ones are reused: after an interruption the same command resumes. Failed runs are
    told and do not stop the others; the exit code is then 3. The result is in OUT/NAME-sweep: sweep.md, sweep.json and a page
    with plots, sweep.html, beside a run folder for each trial. A target out of reach is a result. See docs/sweeps.md.
    """


@main.command(epilog="Example: compress report runs/quickstart --plan")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--plan", is_flag=True, help="Show what is left of each layer instead.")
@work("pipelines.cli.work.report_work:report")
def report() -> None:
    """Show the result of RUN (a folder such as runs/quickstart), from its files on disk.

    For a failed run: the error, the finished stages, the comparisons so far and what to do. The exit code is 0 even then;
    `compress verify` gives 3. With --plan: one row per layer; each character is a kept unit, or a bin of neighbouring units,
    filled by the share kept.
    """


SERVE_EXAMPLES = """\b
Example: compress serve runs/quickstart
         compress serve ./repository --model-control --token-file ~/token"""


@main.command(epilog=SERVE_EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--http-port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes any free port.")
@click.option("--grpc-port", default=8001, show_default=True, type=click.IntRange(0, 65535))
@click.option("--metrics-port", default=8002, show_default=True, type=click.IntRange(0, 65535))
@click.option("--drain", default=30, show_default=True, type=click.FloatRange(0, 3600), help="Seconds for requests in flight.")
@click.option("--max-body", default=16, show_default=True, type=click.IntRange(1, 1024), help="MiB of an HTTP request.")
@click.option("--model-control", is_flag=True, help="Let HTTP requests with the token load and unload models.")
@click.option("--token-file", type=click.Path(path_type=Path), metavar="FILE", help="The token, readable by you alone.")
@click.option("--http-front", type=click.IntRange(1, 65535), metavar="PORT", help="Plain JSON, too: /predict, /rerank, /docs.")
@click.option("--keys", type=click.Path(path_type=Path), metavar="FILE", help="API keys of the front, one a line.")
@work("pipelines.cli.work.serve_work:serve")
def serve() -> None:
    """Serve the models deployed by RUN (a folder such as runs/quickstart, or a model repository), with Triton on 127.0.0.1.

    A process that ends is started again. Ctrl-C or SIGTERM answers the requests in flight, refuses new ones, and ends the
    server; the exit code is then 0. A second one stops at once.
    """


DEPLOY_EXAMPLES = """\b
Example: compress deploy runs/reviews --to /srv/models --url 127.0.0.1:8000 --token-file token
         compress deploy runs/reviews --to s3://bucket/models --url https://triton:8000 --ca ca.pem
         compress deploy runs/reviews --to /srv/models --url 127.0.0.1:8000 --rollback"""


@main.command(epilog=DEPLOY_EXAMPLES)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--to", required=True, metavar="DIR|URL", help="The repository that servers read: a folder, or s3://BUCKET/FOLDER."
)
@click.option("--url", metavar="HOST:PORT", help="A server on that repository, which loads the new versions (also https://).")
@click.option(
    "--token-file", type=click.Path(path_type=Path), metavar="FILE", help="A token, or one line NAME: VALUE, for the server."
)
@click.option(
    "--ca", type=click.Path(path_type=Path), metavar="PEM", help="Certificates to trust for https.  [default: the system's]"
)
@click.option(
    "--max-ms",
    type=click.FloatRange(0, min_open=True),
    help="Largest median latency of a request, in ms.  [default: lower quartile at most 2 x as before]",
)
@click.option("--keep", default=3, show_default=True, type=click.IntRange(2), help="Versions of a model to keep.")
@click.option("--rollback", is_flag=True, help="Remove the latest versions, and serve the ones before.")
@click.option("--status", "show", is_flag=True, help="Show the versions only.")
@click.option(
    "--kserve", type=click.Path(path_type=Path), metavar="FILE", help="Write an InferenceService on the repository, too."
)
@click.option(
    "--compose", type=click.Path(path_type=Path), metavar="FILE", help="Write a compose file of the official container, too."
)
@click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON.")
@work("pipelines.cli.work.deploy_work:run")
def deploy() -> None:
    """Publish the models of RUN as new versions beside those that are served, and take them back if they fail.

    Each first runs under a name of its own: its answers must be the recorded ones, and its latency within the limit. No version
    in use is unloaded before the next is ready. The exit code is 3 if a version failed; what was served before goes on.
    """


@main.command(epilog="Example: compress verify runs/quickstart")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--no-serve", is_flag=True, help="Do not start Triton on what was deployed.")
@click.option("--stage", metavar="STAGE", help="Run the comparisons of this stage only; files are checked all the same.")
@click.option("--model", metavar="FOLDER", help="Where the pretrained model is now, if it has moved.")
@click.option("--json", "as_json", is_flag=True, help="Print every check as JSON.")
@work("pipelines.cli.work.verify_work:verify")
def verify() -> None:
    """Verify a finished RUN again from its artifacts: files, every conversion, the deployed model. Nothing is written.

    The exit code is 3 if a check failed, now or in the run itself, or if the last attempt at the run did not finish.
    """


@main.command(epilog="Example: compress export ./classifier --out ./onnx --precision fp32,int8")
@click.argument("folder")
@click.option("--out", required=True, type=Folder(), help="Folder for what is written.")
@click.option("--precision", default="fp32,int8", show_default=True, help="Precisions to write, separated by commas.")
@click.option("--no-fuse", is_flag=True, help="Leave out ONNX Runtime's own operators: the graph then runs elsewhere, too.")
@click.option("--tensorrt", is_flag=True, help="Write fp16 for TensorRT, too: the engine, or the script that builds it.")
@click.option(
    "--batch", multiple=True, type=click.IntRange(1), help="Rows that TensorRT's engine is made for.  [default: 1, 8, 32]"
)
@click.option("--length", multiple=True, type=click.IntRange(1), help="Tokens that it is made for.  [default: 128]")
@click.option("--force", is_flag=True, help="Replace an earlier export in --out.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@work("pipelines.cli.work.export_work:export")
def export() -> None:
    """Export a classifier, or a generative model, to ONNX without a pipeline, and check it on random rows.

    For a generating model, int8 and int4 are weight-only. FOLDER is a Hugging Face folder, a hub id, package:NAME/PATH, or a
    checkpoint that this project made.
    """


PREDICT_EXAMPLES = """\b
Example: compress predict 127.0.0.1:8000 reviews "a fine film" "a dull one"
         compress predict grpcs://models.example.com:8001 reviews --ca ca.pem --file reviews.txt --json
         cut -f 1 dev.tsv | compress predict 127.0.0.1:8000 reviews"""


@main.command(epilog=PREDICT_EXAMPLES)
@click.argument("url")
@click.argument("model")
@click.argument("texts", nargs=-1, metavar="[TEXT]...")
@click.option("--pair", "pairs", multiple=True, metavar="TEXT2", help="Second sentence; once for each TEXT.")
@click.option(
    "--file", metavar="FILE", help="Read the texts from FILE, one a line (empty lines are left out), or from stdin (-)."
)
@click.option("--format", "format_", type=click.Choice(["text", "jsonl"]), help="Of FILE.  [default: jsonl for *.jsonl]")
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), metavar="FOLDER", help="Tokenize here, with NAME/1 of its repository."
)
@click.option(
    "--ca", type=click.Path(path_type=Path), metavar="FILE", help="Certificates (PEM) to trust instead of the system's."
)
@click.option("--token", envvar="COMPRESS_TOKEN", help="Sent as `Authorization: Bearer`.  [also: $COMPRESS_TOKEN]")
@click.option("--task", metavar="NAME", help="The task of the texts, for a model of many (compress delta stack).")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line, with every score or tag.")
@work("pipelines.cli.work.predict_work:predict")
def predict() -> None:
    """Predict the label, the number, or the tags of each TEXT with the MODEL that is served at URL.

    URL is host:port, or http://, https://, grpc:// or grpcs:// with it. Without TEXT, texts are read from stdin, one a line. In
    a .jsonl file a line is a string, or an object with "text" and, for pairs, "pair". The model NAME-text is used where it is
    served; otherwise the texts are tokenized here, which needs the files of the model's version.
    """


INIT_EXAMPLES = """\b
Example: compress init data/
         compress init reviews.csv --split 0.1 --text review --label stars --kind regression
         compress init train.tsv --validation dev.tsv --model ./my-bert --out reviews.yaml"""


@main.command(epilog=INIT_EXAMPLES)
@click.argument("data", type=click.Path(path_type=Path))
@click.option("--model", metavar="REF", help="A Hugging Face id, a folder, or package:NAME/PATH.  [default: MiniLM's package]")
@click.option("--validation", type=click.Path(path_type=Path), metavar="FILE", help="The rows that quality is measured on.")
@click.option("--split", type=click.FloatRange(0, 0.5, min_open=True), help="No second file: set this share of the rows apart.")
@click.option("--text", metavar="COL[,COL]", help="The column of the text, or two of a pair.")
@click.option("--label", metavar="COL", help="The column of the labels.")
@click.option("--kind", type=TaskKindName(), help="The kind of task, as task.kind in a pipeline.")
@click.option(
    "--rows", type=click.IntRange(0), help=f"Train on about so many rows; 0 for all.  [default: {ROWS} of more than {MANY}]"
)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=Path("pipeline.yaml"), show_default=True, help="The file."
)
@click.option("--schema", is_flag=True, help="Write a JSON schema beside it, and name it for editors.")
@click.option("--force", is_flag=True, help="Replace files that are there.")
@work("pipelines.init.make:init")
def init() -> None:
    """Write a pipeline file for DATA, a file or a folder of files: it states what was guessed, and runs without changes.

    Files are found by their names: train, and dev, valid or test. Formats are .tsv, .csv, .jsonl, .parquet, and .conll or .txt
    for words with tags; each may be gzipped (.gz).
    """


@main.command(epilog="Example: compress doctor --json")
@click.option("--out", type=click.Path(path_type=Path), default=RUNS, show_default=True, help="Folder of runs and store.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@work("pipelines.doctor.examine:doctor")
def doctor() -> None:
    """Check packages, processor, memory, disk and Triton, and show what to fix.

    The exit code is 0 if `compress run quickstart` can run, even with warnings, and 3 if a fault would stop it.
    """


@main.command(epilog="Example: compress store --remove-unused --older-than 30")
@click.option("--out", type=Folder(), default=RUNS, show_default=True, help="Folder of runs and store.")
@click.option("--remove-unused", is_flag=True, help="Remove what no run in OUT uses.")
@click.option("--remove-caches", is_flag=True, help="Remove what stages keep for other runs, such as a teacher's outputs.")
@click.option("--older-than", type=click.FloatRange(0), metavar="DAYS", help="Remove only what is so old.  [default: 7]")
@click.option("--json", "as_json", is_flag=True, help="Print what is there, or what was removed, as JSON.")
@work("pipelines.cli.work.store_work:store")
def store() -> None:
    """Show the results in the store of OUT, their sizes and the runs that use them; or remove those that none uses.

    A run uses the results of its last attempt and of the last one that finished, and its base, where another run made it.
    Delete a run's folder to free what it alone uses. What a running process uses stays.
    """


main.add_command(delta)
main.add_command(list_)
main.add_command(loadtest)
