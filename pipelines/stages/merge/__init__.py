"""Stage `merge`."""
