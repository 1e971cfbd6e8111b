"""Stage `tune`."""
