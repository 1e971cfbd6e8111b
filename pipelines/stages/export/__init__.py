"""Stage `export`."""
