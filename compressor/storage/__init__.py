"""What was added to a model, on disk: changes.py as JSON and tensors, delta_file.py as one small file, peft.py for peft.

bits.py counts it in the papers' units, compare.py sets two files side by side, live.py puts a file on a model that is loaded.
"""
