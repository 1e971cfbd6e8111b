"""One file for each kind of change: its arithmetic, and all that training, storage and export need to know of it."""
