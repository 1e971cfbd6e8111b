"""Stage `benchmark`."""
