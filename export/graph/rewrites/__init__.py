"""Rewrites of a traced graph that make files faster, most of them on ONNX Runtime's CPU, `read_tokens` in every runtime: each a
function from graph to graph with equal outputs."""
