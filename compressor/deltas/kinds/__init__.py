"""One file per kind of change: its arithmetic, and everything that training, storage and export need about it."""
