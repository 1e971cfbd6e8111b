"""Adapter folders of the library peft, without the library: read.py and attach.py in, write.py out."""
