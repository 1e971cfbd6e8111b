"""Finished runs: opening, verifying and serving them, and sweeps over many."""
