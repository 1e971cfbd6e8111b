"""Load tests of a run's model: its rows as requests, and what was measured as a table and a page."""
