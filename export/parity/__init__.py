"""Is an exported model still the same function? Comparison of logits, bounds, and the first layer that differs."""
