"""Many delta files on one base as one model file, whose rows each have a task."""
