"""Shell completion: click completes commands, options and folders; this adds pipeline files and bundled recipes."""

from __future__ import annotations

import glob
from pathlib import Path

import click
from click.shell_completion import CompletionItem

RECIPES = Path(__file__).parent.parent / "recipes"
"""As in `pipelines.file.config`, which is too slow to import while completing."""


class PipelineName(click.ParamType):
    """A pipeline file, or the name of a recipe."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Recipes and .yaml files with this prefix; without any, the shell completes paths."""
        recipes = sorted(path.stem for path in (*RECIPES.glob("*.yaml"), *RECIPES.glob("papers/*/*.yaml")))
        files = sorted(glob.glob(f"{glob.escape(incomplete)}*.yaml"))
        names = [name for name in (*recipes, *files) if name.startswith(incomplete)]
        return [CompletionItem(name) for name in names] or [CompletionItem(incomplete, type="file")]
