"""`python -m pipelines.cli`: the command line for when `compress` is not on the path."""

from pipelines.cli.commands import main

main(prog_name="compress")
