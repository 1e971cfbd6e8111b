"""Exported generative models: their files, and greedy decoding over them."""
