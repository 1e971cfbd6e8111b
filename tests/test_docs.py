"""What the documents show can be typed: keys of pipelines, options of commands and scripts, names that are imported."""

import ast
import contextlib
import importlib
import re
import shlex
from pathlib import Path

import click
import pytest

from compressor.tasks import TaskConfig
from pipelines.cli.commands import main
from pipelines.engine.stage import STAGE_NAMES, load_stage
from pipelines.file.pipeline_file import PipelineFile
from pipelines.file.yaml_source import parse

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "results").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list:
    """The fenced blocks of a language, with the page and its order there."""
    found = [(page, number, *match) for page in PAGES for number, match in enumerate(FENCED.findall(page.read_text()))]
    return [pytest.param(body, id=f"{page.name}-{number}") for page, number, of, body in found if of == language]


@pytest.mark.parametrize("body", blocks("yaml"))
def test_keys_of_a_pipeline_exist(body):
    content = parse(body.replace(", ...}", "}"), "here").data
    if isinstance(content, dict) and not content.keys() & {*STAGE_NAMES, *PipelineFile.model_fields}:
        assert all("." in key or isinstance(value, dict) for key, value in content.items()), "a grid: keys of stages, or rows"
        return
    data = content if isinstance(content, dict) else {}
    assert data.keys() - {*STAGE_NAMES, "grid", "scales"} <= PipelineFile.model_fields.keys()
    listed = data.get("stages") or (content if isinstance(content, list) else [])
    listed += [{name: data[name]} for name in STAGE_NAMES if name in data]
    for name, settings in (stage for one in listed for stage in one.items()):
        load_stage(name).config.model_validate({} if settings is None else settings)
    for task in [*filter(None, [data.get("task")]), *data.get("tasks", {}).values()]:
        given = {key: value for key, value in task.items() if key not in ("glue", "folder")} if isinstance(task, dict) else {}
        TaskConfig.model_validate({"train": "train.jsonl", "validation": "dev.jsonl", **given})


def lines(start: str) -> list:
    """The commands that begin so, in blocks of no language and between backquotes, each once."""
    found = {}
    for page in PAGES:
        text = page.read_text()
        shown = [line for of, body in FENCED.findall(text) if not of for line in body.replace("\\\n", " ").splitlines()]
        shown += [" ".join(inline.split()) for inline in re.findall(rf"`({start} [^`]+)`", FENCED.sub("", text))]
        shown += [line.strip() for line in text.splitlines() if line.startswith(f"    {start} ")]
        found |= {line.strip(): page for line in shown if line.strip().startswith(f"{start} ")}
    return [pytest.param(line, id=f"{page.stem}-{number}") for number, (line, page) in enumerate(found.items())]


@pytest.mark.parametrize("line", lines("compress"))
def test_options_of_a_command_exist(line):
    command, words = main, shlex.split(line.replace("...", "X"), comments=True)[1:]
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        if (found := command.get_command(click.Context(command), words[0])) is None:
            break
        command, words = found, words[1:]
    known = not isinstance(command, click.Group) or not words or words[0].startswith("-") or words[0] == "X"
    assert known, f"no command {words[0]}"
    with contextlib.suppress(click.BadOptionUsage):  # a mention of an option without its value
        command.make_parser(click.Context(command)).parse_args(words)


@pytest.mark.parametrize("line", lines("python"))
def test_options_of_a_script_exist(line):
    _, script, *words = shlex.split(line, comments=True)
    if not script.startswith("benchmarks/"):
        return
    text = (ROOT / script).read_text()
    text += "".join(
        (ROOT / "benchmarks" / f"{name}.py").read_text() for name in re.findall(r"from benchmarks\.(\w+) import", text)
    )
    for option in (word.partition("=")[0] for word in words if word.startswith("--")):
        assert f'"{option}"' in text, f"{script} has no {option}"


@pytest.mark.parametrize("body", blocks("python"))
def test_imported_names_exist(body):
    for node in ast.walk(ast.parse(body)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names)


BY_DELTA = [page for page in PAGES if "- Removed: heads by delta" in page.read_text()]


@pytest.mark.parametrize("page", BY_DELTA, ids=lambda page: page.stem)
def test_a_result_of_heads_by_delta_is_marked_so(page):
    """What `compress init` writes and the quickstart remove heads by taylor today."""
    rows = [line.split(" | ") for line in (page.parent / "README.md").read_text().splitlines()]
    (row,) = [row for row in rows if f"`{page.name}`" in row[0]]
    assert "heads by delta" in row[-1]
