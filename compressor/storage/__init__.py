"""What was added to a model, on disk: changes.py as JSON and tensors, delta_file.py as one small file, peft/ for peft.

bits.py counts its size in the papers' units, delta_comparison.py compares two files, live.py attaches a file to a model.
"""
