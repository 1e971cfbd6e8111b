"""Stage `recover`."""
