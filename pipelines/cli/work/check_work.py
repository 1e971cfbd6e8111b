"""The work of `compress check`: the faults of a pipeline file, and what its rows and its stages need."""

from __future__ import annotations

import json
from collections.abc import Sequence

import click

from compressor.processor import default_threads
from pipelines.check.checkup import account_of, lines_of
from pipelines.check.estimate import needs_of
from pipelines.cli.shown import say
from pipelines.engine.disk import RUNS
from pipelines.engine.preflight import check_environment, check_inputs, make_plans, reading
from pipelines.file.config import find_pipeline, load_pipeline


def check(file: str, overrides: Sequence[str], as_json: bool) -> None:
    """Say of a pipeline file what its rows and its stages need; raise its faults."""
    pipeline = load_pipeline(find_pipeline(file), overrides)
    check_environment(pipeline.stages)
    ready = check_inputs(pipeline)
    if plans := make_plans(ready):
        with reading(ready):
            account = account_of(ready)
        account["needs"] = needs_of(pipeline, plans, account, pipeline.threads or default_threads(), RUNS)
        if as_json:
            click.echo(json.dumps(account, indent=1, ensure_ascii=False))
            return
        for line in lines_of(account):
            say(line)
    if not as_json:
        say(f"{file}: no faults in {len(pipeline.stages)} stages, the model and the data")
