"""`compress check`: the data as the model will see it, and what a run will need."""
