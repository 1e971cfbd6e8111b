"""Sweeps: many runs of one pipeline that differ in a few keys, side by side in one table."""
