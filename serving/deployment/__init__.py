"""Versions of a served model: published beside the running one, proven, and taken back if they fail."""
