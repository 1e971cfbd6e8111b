"""The kinds of tasks, one file each: columns to features, loss, metrics, and what parity compares."""
