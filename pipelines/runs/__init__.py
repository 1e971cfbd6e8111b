"""Finished runs: opening, verifying and serving them."""
