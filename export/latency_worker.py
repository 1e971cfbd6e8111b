"""The process behind one variant of a latency run: `python -m export.latency_worker`, JSON lines on stdin and stdout.

First line in: the variant. First line out: {"loaded": true}. Then {"batch", "length"} in, {"ms"} out, until stdin ends.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

Timer = Callable[[dict[str, np.ndarray]], float]


def session_timer(path: Path, device: str, threads: int | None) -> Timer:
    """Times one run in ONNX Runtime or OpenVINO, inputs handed over as numpy; on a GPU they are there already, as PyTorch's."""
    from export.sessions import Bound, run, session

    live = session(path, device=device, threads=threads)

    def timer(encoding: dict[str, np.ndarray]) -> float:
        once = functools.partial(run, live, encoding) if device == "cpu" else Bound(live, encoding, device)
        start = time.perf_counter()
        once()
        return (time.perf_counter() - start) * 1000

    return timer


def torch_timer(path: Path, device: str, threads: int | None, *, compiled: bool = False) -> Timer:
    """Times one forward pass, eager or through torch.compile, by CUDA events on a GPU (inputs already there)."""
    import torch

    from compressor import load

    if threads:
        torch.set_num_threads(threads)
    model = load(path).to(device)
    accepted = set(inspect.signature(model.forward).parameters)
    if compiled:
        # a graph of its own for every shape, which is the fastest that it can be
        torch._dynamo.config.recompile_limit = 64
        model.compile(dynamic=False)

    @torch.inference_mode()
    def timer(encoding: dict[str, np.ndarray]) -> float:
        tensors = {name: torch.from_numpy(values).to(device) for name, values in encoding.items() if name in accepted}
        if device == "cpu":
            start = time.perf_counter()
            model(**tensors)
            return (time.perf_counter() - start) * 1000
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        model(**tensors)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)

    return timer


def encoding(batch: int, length: int, vocabulary: int, end: int | None = None) -> dict[str, np.ndarray]:
    """Random rows of full length, ids below `vocabulary`; with `end`, that id is the last of each row and nowhere else."""
    ids = np.random.default_rng(0).integers(min(5, vocabulary - 1), vocabulary, size=(batch, length), dtype=np.int64)
    if end is not None:
        ids[ids == end] = end - 1 if end else end + 1
        ids[:, -1] = end
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def main() -> None:
    # libraries print to stdout; the protocol keeps the real one to itself
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    variant = json.loads(sys.stdin.readline())
    path = Path(variant["path"])
    compiled = functools.partial(torch_timer, compiled=True)
    sessions = dict.fromkeys(("onnxruntime", "openvino"), session_timer)
    timers = {"pytorch": torch_timer, "torch.compile": compiled, **sessions}
    timer = timers[variant["runtime"]](path, variant["device"], variant["threads"])
    replies.write(json.dumps({"loaded": True}) + "\n")
    for line in sys.stdin:
        shape = json.loads(line)
        inputs = encoding(shape["batch"], shape["length"], variant["vocabulary"], variant["end"])
        replies.write(json.dumps({"ms": timer(inputs)}) + "\n")


if __name__ == "__main__":
    main()
