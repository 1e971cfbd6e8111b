"""Fuzz: sound inputs with something wrong in them, given to the doors through which inputs come in.

A case is fine when the input is accepted, or refused with a code. `python -m tests.fuzz` runs all of it, or one case again.
"""
