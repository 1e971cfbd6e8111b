"""Parity of an exported model with its source: comparison of logits, bounds, and the first layer that differs."""
