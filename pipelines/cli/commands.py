"""The command line, `compress`. What a command needs is imported inside it: `compress --help` answers at once."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from compressor.errors import CheckError, CompressError, UserError
from pipelines.cli.completion import complete_pipelines
from pipelines.cli.delta_commands import delta
from pipelines.cli.doctor import doctor
from pipelines.cli.list_commands import list_
from pipelines.init.init_command import init
from pipelines.terminal.capture import captured
from pipelines.terminal.console_table import table as _table
from pipelines.terminal.last_resort import coded

if TYPE_CHECKING:
    from pipelines.engine.attempt import Attempt
    from pipelines.engine.runner import RunResult
    from pipelines.file.config import Pipeline

SET_HELP = "Override a key: STAGE.KEY=VALUE or KEY=VALUE, e.g. tune.rank=8. Paths in it are relative to the current folder."


class Commands(click.Group):
    """A group that ends in the exit codes of this house: whatever goes wrong is one line on stderr, never a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        with _interruptible() as interrupts:
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.Abort, click.exceptions.Exit):
                raise
            except KeyboardInterrupt as stop:
                self._stopped(ctx, stop)
            except BrokenPipeError:  # click ends quietly where nobody reads any more
                raise
            except BaseException as error:  # a panic of Rust, such as tokenizers', is no Exception
                if isinstance(error, SystemExit | GeneratorExit):
                    raise
                if interrupts and not isinstance(error, CompressError):  # an import that is cut off may raise anything
                    self._stopped(ctx, KeyboardInterrupt())
                fault = coded(error, f"compress {ctx.invoked_subcommand or ''}".rstrip())
                click.echo(str(fault), err=True)
                ctx.exit(fault.exit_code)

    def _stopped(self, ctx: click.Context, stop: KeyboardInterrupt) -> NoReturn:
        if not getattr(stop, "told", False):
            click.echo("Stopped.", err=True)
        ctx.exit(getattr(stop, "exit_code", 128 + signal.SIGINT))


@contextlib.contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Raise KeyboardInterrupt for SIGINT as usual, and keep in the list that it came. Where it is ignored, it stays so."""
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


class Folder(click.Path):
    """A folder that a command writes into: '' is no name for the current one."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "" or "\0" in str(value):
            raise UserError("E801", "--out: the name of a folder is empty", "Give a folder, or . for this one")
        return super().convert(value, param, ctx)


def _version(ctx: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if asked:
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
@click.argument("file")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=SET_HELP)
@click.option("--from", "from_", metavar="STAGE", help="Run this stage and all later ones again.")
@click.option("--until", metavar="STAGE", help="Stop after this stage.")
@click.option("--force", multiple=True, metavar="STAGE", help="Run this stage again although its result is in the store.")
@click.option("--out", type=Folder(), default=Path("runs"), show_default=True, help="Folder of runs and store.")
@click.option("--dry-run", is_flag=True, help="Show what would run, and what the model will cost, without training.")
def run(file: str, overrides: Sequence[str], dry_run: bool, **options: Any) -> None:
    """Run a pipeline FILE, or a bundled recipe by its name (quickstart, twice_as_fast, paper, paper_unstructured, dsee_repo).

    Finished stages are reused: after an interruption the same command goes on where it was. The exit code is 3 where a check
    failed, also where the run went on and made its report.
    """
    from pipelines.engine.attempt import checks_failed
    from pipelines.engine.runner import run_pipeline

    pipeline = _load(file, overrides)
    result = run_pipeline(pipeline, dry_run=dry_run, **options)
    if dry_run:
        _show_plan(pipeline, result, options["until"])
        return
    _show_summary(result)
    if result.failures:
        raise checks_failed(result.failures)


@main.command(epilog="Example: compress check pipeline.yaml")
@click.argument("file")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=SET_HELP)
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def check(file: str, overrides: Sequence[str], as_json: bool) -> None:
    """Check a pipeline FILE, its model and its data without running anything.

    Tells what the rows are like, what of them looks wrong, and about how much time, memory and disk a run takes here. Warnings
    leave the exit code 0.
    """
    from pipelines.engine.preflight import check_inputs, check_packages, make_plans

    pipeline = _load(file, overrides)
    check_packages(pipeline.stages)
    ready = check_inputs(pipeline)
    if plans := make_plans(ready):
        from compressor.processor import default_threads
        from pipelines.check.checkup import account_of, lines_of
        from pipelines.check.estimate import needs_of

        account = account_of(ready)
        account["needs"] = needs_of(pipeline, plans, account, pipeline.threads or default_threads(), Path("runs"))
        for line in [json.dumps(account, indent=1, ensure_ascii=False)] if as_json else lines_of(account):
            click.echo(line)
    if not as_json:
        click.echo(f"{file}: no faults in {len(pipeline.stages)} stages, the model and the data")


SWEEP_EXAMPLES = """\b
Example: compress sweep pipeline.yaml --stability seeds --runs 10
         compress sweep pipeline.yaml --stability subsets --runs 10 --share 0.9 --stage tune
         compress sweep pipeline.yaml --over prune.target.speedup=1.25,1.5,2,3"""


@main.command(epilog=SWEEP_EXAMPLES)
@click.argument("file")
@click.option(
    "--stability",
    "kind",
    type=click.Choice(["seeds", "subsets"]),
    help="What differs between the runs: the seed, or the random part of the training rows.",
)
@click.option("--over", metavar="KEY=V,V,..", help="One run for each value of a key instead, side by side.")
@click.option("--runs", type=int, help="How many runs, 2 or more.")
@click.option("--share", type=float, help="Share of the training rows in each subset.  [default: 0.9]")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=SET_HELP)
@click.option("--until", metavar="STAGE", help="Stop each run after this stage.  [default: the last that changes the model]")
@click.option("--stage", metavar="STAGE", help="Summarize this stage's quality only.  [default: every stage that has one]")
@click.option("--out", type=Folder(), default=Path("runs"), show_default=True, help="Folder of runs and store.")
def sweep(file: str, kind: str | None, runs: int | None, **options: Any) -> None:
    """Run FILE several times and show the mean and the standard deviation of its quality, or what several values of a key do.

    With seeds, run i has the pipeline's seed + i. With subsets the seed stays, and run i trains on a random part of the
    rows. Finished stages are reused: after an interruption the same command goes on where it was. The values lie in
    OUT/NAME-sweep-seeds/sweep.json and sweep.md, beside a run folder for each run. With --over, each run has another value of
    one key (OUT/NAME-sweep-values); what they share is made once. A target out of reach is told, and the others run.
    """
    from pipelines.engine.attempt import checks_failed
    from pipelines.file.config import find_pipeline
    from pipelines.runs.sweep import sweep as run_all

    spread = (kind, runs, options["share"])
    if any(one is not None for one in spread) if options["over"] else None in spread[:2]:
        raise UserError("E115", "a sweep is either --stability with --runs, or --over", "Give one of the two")
    result = run_all(find_pipeline(file), kind or "values", runs, **options, say=click.echo)
    _table(result.columns, result.rows)
    click.echo(f"sweep: {_near(result.folder / 'sweep.md')}")
    if result.failures:
        raise checks_failed(result.failures)


@main.command(epilog="Example: compress report runs/quickstart --plan")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--plan", is_flag=True, help="Show what is left of each layer instead.")
def report(run: Path, plan: bool) -> None:
    """Show what RUN (a folder such as runs/quickstart) came to, from what it left on disk.

    Of a run that failed: the error, the stages that are finished, what is proven so far and what to do. The exit code is 0
    then, too, for it was shown; `compress verify` gives 3.

    With --plan: a row a layer; a character is a unit that is kept, or a bin of neighbours, filled as far as they are.
    """
    from pipelines.reporting.kept import plan_table
    from pipelines.runs.finished import open_run, plan_of

    if not plan:
        _show_report(run)
        return
    _note(open_run(run).outdated)
    if layers := plan_of(run):
        _table(*plan_table(layers))
    else:
        click.echo("no heads, neurons or layers were removed")


@main.command(epilog="Example: compress serve runs/quickstart")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--http-port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes any free port.")
@click.option("--grpc-port", default=8001, show_default=True, type=click.IntRange(0, 65535))
@click.option("--metrics-port", default=8002, show_default=True, type=click.IntRange(0, 65535))
def serve(run: Path, **ports: int) -> None:
    """Serve the models that RUN (a folder such as runs/quickstart) deployed, with Triton on 127.0.0.1.

    Ctrl-C or SIGTERM ends the server; the exit code is then 0.
    """
    from pipelines.runs.served import find_repository
    from serving.repository import model_names
    from serving.server import EmbeddedServer

    found = find_repository(run)
    _note(found.outdated)
    with (
        contextlib.suppress(KeyboardInterrupt),
        _terminable(),
        EmbeddedServer(found.repository, log_path=run / "logs" / "serve.log", **ports) as server,
    ):
        for service, port in server.ports.items():
            click.echo(f"{service:<8} {server.url.partition(':')[0]}:{port}")
        for name in model_names(found.repository):
            pair = ' --pair "a second text"' if found.pairs else ""
            click.echo(f'try      compress predict {server.url} {name} "a text"{pair}')
        click.echo("Ctrl-C stops the server")
        server.wait()
    click.echo("stopped")


@contextlib.contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does."""

    def stop(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@main.command(epilog="Example: compress verify runs/quickstart")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--no-serve", is_flag=True, help="Do not start Triton on what was deployed.")
@click.option("--stage", metavar="STAGE", help="Run the hops of this stage only; files are looked at all the same.")
@click.option("--model", metavar="FOLDER", help="Where the pretrained model is now, if it has moved.")
@click.option("--json", "as_json", is_flag=True, help="Print every check as JSON.")
def verify(run: Path, no_serve: bool, stage: str | None, model: str | None, as_json: bool) -> None:
    """Prove a finished RUN once more from its artifacts: files, every hop, the deployed model. Nothing is written.

    The exit code is 3 where a check failed, in the run itself too, or where the last attempt at the run did not finish.
    """
    from pipelines.runs.verify import to_json
    from pipelines.runs.verify import verify as run_all
    from pipelines.terminal.console_table import PARITY_COLUMNS

    checks = run_all(run, serve=not no_serve, model=model, stage=stage)
    if as_json:
        click.echo(json.dumps(to_json(run, checks), indent=1, ensure_ascii=False))
    else:
        _table(PARITY_COLUMNS, [check.cells() for check in checks])
        for check in checks:
            if not check.passed:
                click.echo(f"{check.stage}: {check.fault}", err=True)
    if not all(check.passed for check in checks):
        click.get_current_context().exit(CheckError.exit_code)


@main.command(epilog="Example: compress export ./classifier --out ./onnx --precision fp32,int8")
@click.argument("folder")
@click.option("--out", required=True, type=Folder(), help="Folder for what is written.")
@click.option("--precision", default="fp32,int8", show_default=True, help="What to write, with commas between.")
@click.option("--no-fuse", is_flag=True, help="Leave out ONNX Runtime's own operators: the graph then runs elsewhere, too.")
@click.option("--tensorrt", is_flag=True, help="Write fp16 for TensorRT, too: the engine, or the script that builds it.")
@click.option("--batch", default=[1, 8, 32], multiple=True, type=click.IntRange(1), help="Rows the engine is made for.")
@click.option("--length", default=[128], multiple=True, type=click.IntRange(1), help="Tokens the engine is made for.")
@click.option("--force", is_flag=True, help="Replace an earlier export in --out.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def export(
    folder: str,
    out: Path,
    precision: str,
    no_fuse: bool,
    tensorrt: bool,
    batch: Sequence[int],
    length: Sequence[int],
    force: bool,
    as_json: bool,
) -> None:
    """Export a classifier, or a model that generates, to ONNX without a pipeline, and prove it on random rows.

    int8 and int4 of a model that generates are those of its weights. FOLDER is a Hugging Face folder, a hub id,
    package:NAME/PATH, or a checkpoint that this project made.
    """
    from export.runtimes.tensorrt import RUNTIME, profile_of
    from export.standalone.folder import PRECISIONS, export_folder

    wanted = [word.strip() for word in precision.split(",")]
    if odd := [word for word in wanted if word not in PRECISIONS]:
        raise UserError("E109", f"--precision: unknown '{odd[0]}'", f"One or more of: {', '.join(PRECISIONS)}")
    with tempfile.TemporaryDirectory() as scratch, captured(Path(scratch, "export.log")):
        options = {"fuse": not no_fuse, "force": force, "engine": profile_of(batch, length) if tensorrt else None}
        summary = export_folder(folder, out, precisions=wanted, **options)
    if as_json:
        click.echo(json.dumps(summary, indent=1, ensure_ascii=False))
        return
    records = {row["precision"]: row for row in summary["parity"]}
    files = list(summary["files"].values())
    rows = [(one["path"], f"{one['bytes']:,}", *_parity_cells(records[one["precision"]])) for one in files]
    last = ("generated alike",) if summary["kind"] == "generation" else ()
    _table(("file", "bytes", "max |Δlogit|", "mean |Δlogit|", "agree", *last), rows)
    for one in files:
        if one["precision"] == files[0]["precision"]:
            click.echo(f"inputs of {one['path']}: {_shapes(one['inputs'])}")
    what = "rows" if summary["kind"] == "sequence classification" else "tokens"
    click.echo(f"opset {summary['opset']}; {summary['parity'][0]['rows']} random {what}")
    if engine := summary[RUNTIME.key]:
        made = "{engine}, by {library} {version}, compiled and not run: only {parity} was compared"
        built = made.format(**engine, parity=files[-1]["path"]) if engine["engine"] else "not installed here"
        click.echo(f"{RUNTIME.title}: {built}; {engine['script']} builds the engine in the target container")
    for note in summary["notes"]:
        click.echo(f"note: {note}")
    click.echo(f"export: {_near(out.absolute())}")


def _parity_cells(record: dict[str, Any]) -> tuple[str, ...]:
    generated = (f"{record['generated_agreement']:.1%}",) if "generated_agreement" in record else ()
    differences = (f"{record['max_difference']:.1e}", f"{record['mean_difference']:.1e}")
    return (*differences, f"{record['agreement']:.1%}", *generated)


def _shapes(inputs: dict[str, list]) -> str:
    """Inputs of a graph in words; the past of a decoder is counted only."""
    own = {name: dims for name, dims in inputs.items() if not name.startswith("past_key_values.")}
    past = f"; past_key_values of {len(inputs) - len(own)} tensors" if len(own) < len(inputs) else ""
    return ", ".join(f"{name} {' x '.join(map(str, dims))}" for name, dims in own.items()) + f" (int64){past}"


@main.command(epilog='Example: compress predict 127.0.0.1:8000 reviews "a fine film" "a dull one"')
@click.argument("url")
@click.argument("model")
@click.argument("texts", nargs=-1, required=True, metavar="TEXT...")
@click.option("--pair", "pairs", multiple=True, metavar="TEXT2", help="Second sentence; once for each TEXT.")
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="FOLDER", help="Tokenizer, when the server is elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list with every score, or tag.")
def predict(
    url: str, model: str, texts: tuple[str, ...], pairs: tuple[str, ...], tokenizer: Path | None, as_json: bool
) -> None:
    """Ask the MODEL that is served at URL (host:port) for the label, the number, or the tags of each TEXT."""
    from serving.client import predict as ask

    if pairs and len(pairs) != len(texts):
        raise UserError("E112", f"{len(pairs)} --pair for {len(texts)} texts", "Give --pair once for each text, in order")
    answers = ask(url, model, list(zip(texts, pairs, strict=True)) if pairs else list(texts), tokenizer_folder=tokenizer)
    if as_json:
        rows = [{"text": text, **asdict(one)} for text, one in zip(texts, answers, strict=True)]
        click.echo(json.dumps(rows, indent=1, ensure_ascii=False))
        return
    for text, one in zip(texts, answers, strict=True):
        click.echo(f"{one}  {text}")


def _load(file: str, overrides: Sequence[str]) -> Pipeline:
    from pipelines.file.config import find_pipeline, load_pipeline

    return load_pipeline(find_pipeline(file), overrides)


def _show_plan(pipeline: Pipeline, result: RunResult, until: str | None) -> None:
    """What a dry run found: reuse or run for every stage, then the account before and after."""
    count = len(pipeline.stages) if until is None else pipeline.number(until, "--until") + 1
    for number, entry in enumerate(pipeline.stages[:count], start=1):
        place = f"[{number:>{len(str(count))}}/{count}]"
        click.echo(f"{place} {entry.id:<12} {'reuse' if entry.id in result.reused else 'run'}")
    if result.plan is not None:
        _table(("", "before", "after"), result.plan.rows())


def _show_report(run: Path) -> None:
    """How the last attempt at a run went, the summary of its report and where that is. Raises UserError E805 where there is
    neither, E803 for damaged files."""
    from pipelines.engine.attempt import last_attempt

    attempt, page = last_attempt(run), run / "report.html"
    reported = (run / "report.json").is_file()
    if attempt is not None and not attempt.finished:
        _show_unfinished(attempt)
        if reported:
            click.echo("\nthe run before it, which finished:")
    elif not reported:
        raise UserError("E805", "this run has no report", "Give a run's folder, and run its report stage", str(run))
    for failure in attempt.failures if attempt else ():
        click.echo(f"FAILED {failure.stage}: {failure.line()}")
    if reported:
        _summary(run)
        click.echo(f"report: {_near((page if page.is_file() else run / 'report.json').absolute())}")


def _show_unfinished(attempt: Attempt) -> None:
    """What an attempt that did not finish came to: its error, its stages, what is proven so far, and what to do."""
    from pipelines.terminal.console_table import PARITY_COLUMNS, parity_cells

    click.echo(attempt.headline())
    if attempt.error:
        for line in attempt.error.shown():
            click.echo(line)
        if attempt.error.log:
            click.echo(f"log: {attempt.error.log}")
    click.echo(f"stages finished: {', '.join(one.id for one in attempt.stages) or 'none'}")
    if attempt.parity:
        click.echo("\nproven so far:")
        _table(PARITY_COLUMNS, [parity_cells(str(record.get("stage", "")), record) for record in attempt.parity])
    click.echo("The same command continues: what is finished is kept.")


def _note(text: str) -> None:
    if text:
        click.echo(text, err=True)


def _summary(run: Path) -> None:
    keys, path = ("metric", "dense", "compressed", "change"), run / "report.json"
    try:
        rows = [[str(row[key]) for key in keys] for row in json.loads(path.read_bytes())["summary"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        mend = "Run the pipeline again: what is finished is kept"
        raise UserError("E803", "unreadable or damaged", mend, str(path)) from None
    _table(keys, rows)


def _show_summary(result: RunResult) -> None:
    """The summary of the run's report and where it is, or the quality of every task that was trained with others."""
    if (result.folder / "report.json").is_file():
        _summary(result.folder)
    for artifact in result.artifacts.values():
        if tasks := artifact.metadata.get("tasks"):
            rows = [
                (one["task"], one["metric"], f"{one['quality'][one['metric']]:.4f}", f"{one['bytes']:,}", one["file"])
                for one in tasks
            ]
            _table(("task", "metric", "quality", "bytes", "file"), rows)
    what, place = ("report", result.report) if result.report else ("run", result.folder)
    click.echo(f"{what}: {_near(place)}")


def _near(place: Path) -> Path:
    """The path relative to the current folder where it lies below that."""
    return place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place


main.add_command(delta)
main.add_command(list_)
main.add_command(init)
main.add_command(doctor)
complete_pipelines(main)
