"""Removing heads and FFN neurons: scores.py says which matter least, surgery.py takes them out physically."""
