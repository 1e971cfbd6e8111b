"""Rewrites of a traced graph that make ONNX Runtime's CPU faster: each a function from graph to graph with equal outputs."""
