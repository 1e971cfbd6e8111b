"""Running a pipeline: checks before the start, the artifact store, the runner."""
