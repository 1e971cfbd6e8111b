"""What was added to a model, on disk: changes.py as JSON and tensors, delta_file.py as one small file, peft/ for peft.

bits.py counts it in the papers' units, delta_comparison.py sets two files side by side, live.py puts a file on a model.
"""
