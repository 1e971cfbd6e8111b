"""Latency, measured interleaved in processes of their own, and tables that predict it for pruned models."""
