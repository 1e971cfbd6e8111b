"""Choosing Ω: choice.py scores weights and takes the best places, gradients.py asks the task, rpca.py is DSEE's robust PCA,
finite.py refuses what cannot be ranked.

names.py and settings.py hold the words that a pipeline file may use; they and this file load no torch.
"""
