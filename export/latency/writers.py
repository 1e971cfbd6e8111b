"""What a further token takes in a model that generates: one at a time, on the cache of a prompt, in a latency worker.

The prompt is computed once and not timed. The same token is fed again and again: which one it is does not change the time, and
choosing the next one is no part of a model. torch is imported for PyTorch's variants only.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from export.generation.greedy import Decoder

if TYPE_CHECKING:
    from torch import nn

    from export.runtimes.runtime import Session

Encoding = dict[str, np.ndarray]
Writer = Callable[[Encoding, int], float]
"""Prompts (batch, length) without padding, number of tokens -> milliseconds of one of the tokens behind them, their mean."""

State = TypeVar("State")


class Starts:
    """What a model has made of the prompts of the shape that was asked for last; of another shape it is made anew."""

    def __init__(self, read: Callable[[Encoding], State]):
        self.read, self.shape, self.state = read, None, None

    def __call__(self, prompts: Encoding) -> State:
        shape = prompts["input_ids"].shape
        if shape != self.shape:
            self.state = None  # before the next takes memory
            self.shape, self.state = shape, self.read(prompts)
        return self.state


def milliseconds_each(write: Callable[[], object], tokens: int) -> float:
    """The mean of so many calls."""
    start = time.perf_counter()
    for _ in range(tokens):
        write()
    return (time.perf_counter() - start) * 1000 / tokens


def session_writer(live: Session) -> Writer:
    """Of the session of a decoder, on the CPU."""

    def read(prompts: Encoding) -> Decoder:
        decoder = Decoder(live, len(prompts["input_ids"]))
        decoder(prompts["input_ids"], prompts["attention_mask"])
        return decoder

    starts = Starts(read)

    def writer(prompts: Encoding, tokens: int) -> float:
        decoder = copy.copy(starts(prompts))  # a token replaces the cache, it changes none
        token = prompts["input_ids"][:, -1:]
        return milliseconds_each(lambda: decoder(token, np.ones_like(token)), tokens)

    return writer


def torch_writer(model: nn.Module) -> Writer:
    """Of a model in PyTorch, eager, on the CPU."""
    import torch

    def ids_of(prompts: Encoding) -> torch.Tensor:
        return torch.from_numpy(prompts["input_ids"])

    starts = Starts(lambda prompts: model(input_ids=ids_of(prompts), use_cache=True).past_key_values)

    @torch.inference_mode()
    def writer(prompts: Encoding, tokens: int) -> float:
        cache, token = copy.deepcopy(starts(prompts)), ids_of(prompts)[:, -1:]
        return milliseconds_each(lambda: model(input_ids=token, past_key_values=cache, use_cache=True), tokens)

    return writer
