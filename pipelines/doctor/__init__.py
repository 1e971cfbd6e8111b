"""`compress doctor`: what this machine and its packages can do, what is broken, and how to fix it."""
