"""Search for the serving settings of a model that answer most requests within a latency limit."""
