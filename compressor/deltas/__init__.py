"""Trainable changes of frozen weights: what they are, where their tensors come from, how they train and merge."""
