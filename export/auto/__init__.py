"""Choosing the precision of an exported model: the fastest within an accuracy budget."""
