"""Time to the first token of a served decoder, and of each further one: closed loops of clients that stream over gRPC.

    compress export MODEL --out ./onnx --precision fp32,int8
    python benchmarks/first_token.py ./onnx MODEL --texts prompts.txt --precision int8 --clients 1,4,8

MODEL is the folder with tokenizer and config. Each client sends the prompts of the file (one a line) in turn and waits for the
end of every answer. What is streamed is compared with what the bare loop generates from the same prompt: as many rows are
computed together as there are clients, so that in int8, whose scales depend on them, texts may part; how many do is printed.
Exit code 0, 2 for a folder that holds no generating export.
"""

from __future__ import annotations

import argparse
import os
import queue
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from compressor.errors import UserError
from compressor.processor import processor
from export.generation.greedy import facts_of, open_live
from pipelines.engine.environment import distribution
from pipelines.stages.deploy.generating import local_text, tokenizer_of_prompts
from serving.generator_repository import version_facts, write_generator
from serving.server import EmbeddedServer

NAME = "measured"


@dataclass(frozen=True)
class Stream:
    """An answer: its text, its number of tokens, and the times of its pieces since the request, in seconds."""

    text: str
    tokens: int
    times: tuple[float, ...]


def streamed(port: int, prompts: list[str], tokens: int) -> list[Stream]:
    """The answers to one client's prompts, one after the other."""
    from tritonclient.grpc import InferenceServerClient

    came: queue.Queue = queue.Queue()
    with InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: came.put((time.perf_counter(), result, error)))
        return [answer(client, came, prompt, tokens) for prompt in prompts]


def answer(client: Any, came: queue.Queue, prompt: str, tokens: int) -> Stream:
    from tritonclient.grpc import InferInput

    text, most = InferInput("TEXT", [1], "BYTES"), InferInput("MAX_TOKENS", [1], "INT32")
    text.set_data_from_numpy(np.array([prompt.encode()], dtype=object))
    most.set_data_from_numpy(np.array([tokens], dtype=np.int32))
    began, pieces, times = time.perf_counter(), [], []
    client.async_stream_infer(f"{NAME}-text", [text, most])
    while True:
        at, result, error = came.get(timeout=300)
        if error is not None:
            raise error
        times.append(at - began)
        pieces.append(result.as_numpy("TEXT")[0].decode())
        if result.as_numpy("FINISH")[0]:
            return Stream("".join(pieces), int(result.as_numpy("TOKENS")[0]), tuple(times))


def bare(options: argparse.Namespace, prompts: list[str]) -> list[str]:
    """The greedy continuations by the bare loop, one prompt at a time."""
    facts = vars(version_facts(facts_of(options.folder)["generation"], options.model, options.precision))
    tokenizer = tokenizer_of_prompts(options.model)
    live = open_live(options.folder, options.precision, threads=options.threads)
    return [local_text(live, tokenizer, prompt, facts, options.tokens) for prompt in prompts]


def rows(options: argparse.Namespace, port: int, prompts: list[str], expected: list[str]) -> Iterator[str]:
    """The table as Markdown."""
    yield "| clients | first token p50, ms | slowest, ms | further token p50, ms | tokens/s | texts as the bare loop's |"
    yield "|--:|--:|--:|--:|--:|--:|"
    streamed(port, prompts[:2], options.tokens)  # warms up
    for clients in options.clients:
        with ThreadPoolExecutor(clients) as pool:
            began = time.perf_counter()
            shares = pool.map(
                lambda number, count=clients: streamed(port, prompts[number::count], options.tokens), range(clients)
            )
            answers = {number + clients * place: one for number, share in enumerate(shares) for place, one in enumerate(share)}
            seconds = time.perf_counter() - began
        first = np.array([one.times[0] for one in answers.values()]) * 1000
        further = np.concatenate([np.diff(one.times) for one in answers.values()]) * 1000
        rate = sum(one.tokens for one in answers.values()) / seconds
        same = sum(answers[number].text == text for number, text in enumerate(expected))
        # so few prompts show no 99 % quantile
        p50, slowest, each = np.median(first), first.max(), np.median(further)
        yield f"| {clients} | {p50:.1f} | {slowest:.1f} | {each:.1f} | {rate:.1f} | {same} of {len(prompts)} |"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what compress export wrote")
    parser.add_argument("model", type=Path, help="folder with tokenizer and config")
    parser.add_argument("--texts", type=Path, required=True, help="prompts, one a line")
    parser.add_argument("--rows", type=int, default=32, help="prompts that are sent [%(default)s]")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer [%(default)s]")
    parser.add_argument("--clients", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args(arguments)
    prompts = options.texts.read_text(encoding="utf-8").splitlines()[: options.rows]
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch, "repository")
        try:
            write_generator(
                repository, NAME, options.folder, options.model, precision=options.precision, threads=options.threads
            )
            expected = bare(options, prompts)
        except UserError as error:
            parser.error(str(error))
        hardware = processor()
        print(f"{hardware['cpu']}, {options.threads} threads; {distribution('onnxruntime')}; {options.precision},")
        print(f"{len(prompts)} prompts, {options.tokens} tokens each at most.\n")
        with EmbeddedServer(repository, log_path=Path(scratch, "triton.log")) as server:
            for line in rows(options, server.ports["grpc"], prompts, expected):
                print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
