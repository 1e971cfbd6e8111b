"""The worker process of one variant in a latency run: `python -m export.latency.worker`, JSON lines on stdin and stdout.

torch is imported only for PyTorch's variants: its thread pool would disturb other runtimes.

First line in: the variant. First line out: {"loaded": true}. Then, until stdin ends, {"batch", "length"} in, {"ms"} out; or
{"batches"} in, the inputs of each as lists, and {"ms"} out, a list; or, to a model that generates, {"batch", "length",
"tokens"} in and {"ms"} out, of one of so many tokens behind prompts, or an encoder's texts, of that shape.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from compressor.tasks.features import DECODER_IDS
from export.latency.programs import private_stdout
from export.runtimes.decoders import Decoder, begun
from export.runtimes.feeds import feeds_of, run
from export.runtimes.runtime_registry import RUNTIMES
from export.runtimes.sessions import session

if TYPE_CHECKING:
    from torch import nn

    from export.runtimes.runtime import Session

Encoding = dict[str, np.ndarray]
Timer = Callable[[Encoding], float]
"""Padded int64 inputs (batch, length) -> milliseconds of one forward pass."""
Writer = Callable[[Encoding, int], float]
"""Prompts, or texts of an encoder, (batch, length) without padding, number of tokens -> milliseconds of one of the tokens
behind them, their mean.

The prompts are computed once and not timed. The same token is fed again and again: which one it is does not change the time,
and choosing the next one is no part of a model."""


def milliseconds(once: Callable[[], object], settled: Callable[[], object] = lambda: None) -> float:
    """Milliseconds of one call, until the device is `settled` (idle); work begun before the call does not count."""
    settled()
    start = time.perf_counter()
    once()
    settled()
    return (time.perf_counter() - start) * 1000


def opened(variant: dict[str, Any]) -> Session:
    """The session of a file."""
    runtime = RUNTIMES[variant["runtime"]]
    return session(Path(variant["path"]), runtime=runtime, device=variant["device"], threads=variant["threads"])


def session_timer(live: Session, variant: dict[str, Any]) -> Timer:
    """Times one run in a runtime, inputs handed over as numpy; on a GPU they are there already, as PyTorch's."""
    runtime, device = RUNTIMES[variant["runtime"]], variant["device"]

    def timer(inputs: Encoding) -> float:
        if device == "cpu":
            return milliseconds(functools.partial(run, live, inputs))
        # inference with bound inputs waits for the GPU itself
        return milliseconds(runtime.bound(live, feeds_of(live, inputs), device))

    return timer


def torch_timer(model: nn.Module, variant: dict[str, Any]) -> Timer:
    """Timer of one forward pass of a checkpoint: eager, through torch.compile, or replayed as a CUDA graph."""
    import torch

    device, cuda = variant["device"], variant["device"] == "cuda"
    accepted = set(inspect.signature(model.forward).parameters)
    settled = torch.cuda.synchronize if cuda else lambda: None

    def forward(inputs: Encoding) -> Callable[[], Any]:
        names = accepted & set(inputs)
        if cuda and inputs["attention_mask"].all():
            # without a mask attention uses its fastest kernels, and no kernel reads the mask back from the GPU
            names.discard("attention_mask")
        return functools.partial(model, **{name: torch.from_numpy(inputs[name]).to(device) for name in names})

    prepare = Latest(lambda inputs: Replay(forward(inputs))) if variant["runtime"] == "cuda graphs" else forward

    @torch.inference_mode()
    def timer(inputs: Encoding) -> float:
        return milliseconds(prepare(inputs), settled)

    return timer


def torch_model(variant: dict[str, Any]) -> nn.Module:
    """The model of a checkpoint on its device, compiled if the runtime is torch.compile."""
    import torch

    from compressor import load

    if variant["threads"]:
        torch.set_num_threads(variant["threads"])
    model = load(Path(variant["path"])).to(variant["device"], torch.float16 if variant["half"] else torch.float32)
    if variant["runtime"] == "torch.compile":
        # a separate graph for every shape, the fastest option
        torch._dynamo.config.recompile_limit = 64
        model.compile(dynamic=False)
    return model


class Replay:
    """A forward pass as a CUDA graph, captured after the warm-up on a separate stream, as capturing requires.

    The graph reads the memory of `forward`'s inputs, so this keeps references to them.
    """

    def __init__(self, forward: Callable[[], Any]):
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                forward()
        torch.cuda.current_stream().wait_stream(stream)
        self.forward, self.graph = forward, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            forward()

    def __call__(self) -> None:
        self.graph.replay()


Made = TypeVar("Made")


class Latest(Generic[Made]):
    """What was made of the inputs that were used last: its memory is freed before something is made of others."""

    def __init__(self, make: Callable[[Encoding], Made]):
        self.make, self.inputs, self.made = make, None, None

    def __call__(self, inputs: Encoding) -> Made:
        if self.inputs is None or any(not np.array_equal(self.inputs[name], values) for name, values in inputs.items()):
            self.made = None
            self.inputs, self.made = inputs, self.make(inputs)
        return self.made


def session_writer(live: Session) -> Writer:
    """Of the session of a model that generates, on the CPU."""

    def read(prompts: Encoding) -> Decoder:
        texts, mask = prompts["input_ids"], prompts["attention_mask"]
        decoder, first, mask = begun(live, texts, mask, prompts.get(DECODER_IDS, texts))
        decoder(first, mask)
        return decoder

    starts = Latest(read)

    def writer(prompts: Encoding, tokens: int) -> float:
        decoder = copy.copy(starts(prompts))  # a token replaces the cache, it changes none
        token = prompts["input_ids"][:, -1:]

        def write() -> None:
            for _ in range(tokens):
                decoder(token, np.ones_like(token))

        return milliseconds(write) / tokens

    return writer


def torch_writer(model: nn.Module) -> Writer:
    """Of a model in PyTorch, eager, on the CPU."""
    import torch

    def read(prompts: Encoding) -> dict[str, Any]:
        ids = {name: torch.from_numpy(prompts[name]) for name in ("input_ids", DECODER_IDS) if name in prompts}
        outputs = model(**ids, use_cache=True)
        states = {"past_key_values": outputs.past_key_values}
        return states | ({"encoder_outputs": (outputs.encoder_last_hidden_state,)} if DECODER_IDS in ids else {})

    starts = Latest(read)

    @torch.inference_mode()
    def writer(prompts: Encoding, tokens: int) -> float:
        fed = DECODER_IDS if DECODER_IDS in prompts else "input_ids"
        token = torch.from_numpy(prompts["input_ids"][:, -1:])
        given = {fed: token, **copy.deepcopy(starts(prompts)), "use_cache": True}

        def write() -> None:
            for _ in range(tokens):
                model(**given)

        return milliseconds(write) / tokens

    return writer


def encoding_of(variant: dict[str, Any], batch: int, length: int) -> Encoding:
    """The sample inputs on which a variant is timed."""
    return encoding(batch, length, variant["vocabulary"], variant["end"], variant["start"])


def encoding(batch: int, length: int, vocabulary: int, end: int | None = None, start: int | None = None) -> Encoding:
    """Random rows of full length, ids below `vocabulary`; with `end`, that id is the last of each row and nowhere else; with
    `start`, that id is what a decoder behind an encoder begins with."""
    ids = np.random.default_rng(0).integers(min(5, vocabulary - 1), vocabulary, size=(batch, length), dtype=np.int64)
    if end is not None:
        ids[ids == end] = end - 1 if end else end + 1
        ids[:, -1] = end
    rows = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    return rows | ({} if start is None else {DECODER_IDS: np.full((batch, 1), start, np.int64)})


def timed(timer: Timer, writer: Writer, variant: dict[str, Any], message: dict[str, Any]) -> float | list[float]:
    """Milliseconds of one random batch of a shape, of each of the batches that a message holds, or of a further token."""
    if "tokens" in message:
        return writer(encoding_of(variant, message["batch"], message["length"]), message["tokens"])
    if "batches" not in message:
        return timer(encoding_of(variant, **message))
    batches = [{name: np.array(rows, np.int64) for name, rows in batch.items()} for batch in message["batches"]]
    return [timer(batch) for batch in batches]


def main() -> None:
    replies = private_stdout()
    variant = json.loads(sys.stdin.readline())
    of_file = variant["runtime"] in RUNTIMES
    model = opened(variant) if of_file else torch_model(variant)
    timer = (session_timer if of_file else torch_timer)(model, variant)
    writer = (session_writer if of_file else torch_writer)(model)
    replies.write(json.dumps({"loaded": True}) + "\n")
    for line in sys.stdin:
        replies.write(json.dumps({"ms": timed(timer, writer, variant, json.loads(line))}) + "\n")


if __name__ == "__main__":
    main()
