"""Choosing the support Ω: choice.py scores weights and takes the best entries, gradients.py scores by the task's gradients,
rpca.py is DSEE's robust PCA, finite.py rejects values that cannot be ranked.

score_names.py and settings.py hold what a pipeline file may name; they and this file do not load torch.
"""
