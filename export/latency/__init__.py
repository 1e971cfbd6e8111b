"""Latency, measured interleaved in separate processes, and tables that predict it for pruned models."""
