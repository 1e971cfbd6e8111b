"""The command line, `compress`."""
