"""Pretrained models: loading them from a reference, and where each architecture keeps the layers that are changed."""
