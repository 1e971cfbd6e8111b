"""Stage `select`."""
