"""Pipeline files: YAML -> a checked, typed pipeline, or every fault in it."""
