"""Pretrained models: from a reference to a live model, and where each architecture keeps the layers that are changed."""
