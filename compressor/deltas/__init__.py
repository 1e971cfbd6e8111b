"""Trainable changes of frozen weights: what they compute, where their tensors come from, how they train and merge."""
