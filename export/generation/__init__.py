"""Exported models that generate: their files, and greedy decoding over them."""
