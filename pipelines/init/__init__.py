"""`compress init`: from a user's data to a pipeline file that runs without changes."""
