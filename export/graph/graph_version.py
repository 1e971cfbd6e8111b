"""Version of how graphs are traced and rewritten; apart from that, because fingerprints need it where nothing is exported."""

GRAPHS = 5
"""Raised when files of equal models take another time."""
