"""Finished runs: opening, verifying, serving them, and sweeps over many."""
