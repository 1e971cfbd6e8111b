"""Stage `deploy`."""
