"""Stage `prune`."""
