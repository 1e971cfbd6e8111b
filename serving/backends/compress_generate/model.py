"""Texts continued or answered, as a stream: a python-based Triton backend for decoders with a key and value cache (decoupled),
alone or behind an encoder.

A request has one text and sends back pieces of what follows it, the last with FINISH. One thread computes all requests of an
instance together, token by token; a new one joins at the next token. Triton runs this file in its Python stub; it needs numpy,
tokenizers, onnxruntime and the files beside it.
"""

import queue
import threading
from contextlib import suppress

import numpy as np
import triton_python_backend_utils as pb_utils
from decoding import Batch, Settings, Text, prompt_ids, without_panic
from door import Refused
from onnxruntime_engine import Engine
from text_rows import GENERATED, open_tokenizer, text_of
from triton_requests import error_response, open_engine, read_config, response_of

ENCODER = "encoder.onnx"
"""The file of the encoder that a decoder's model.onnx is behind."""
MOST_STREAMS, MOST_WAITING = 8, 256
"""Requests that are computed together, and that wait, where the config has no `max_streams` and `max_waiting`."""


class Stream:
    """One request: its text so far, and where its pieces go."""

    def __init__(self, sender, ids, text, settings, streamed):
        self.sender, self.ids, self.text, self.settings = sender, ids, text, settings
        self.streamed, self.pieces = streamed, []

    def add(self, token):
        """Send what is certain after a token; True where it was the last."""
        piece = self.text.add(token)
        if not self.streamed:
            self.pieces.append(piece)
            piece = "".join(self.pieces) if self.text.finish else ""
        if piece or self.text.finish:
            self.send(piece)
        return bool(self.text.finish)

    def send(self, piece):
        arrays = {
            "TEXT": np.array([piece.encode()], dtype=object),
            "TOKENS": np.array([self.text.tokens], dtype=np.int32),
            "FINISH": np.array([self.text.finish.encode()], dtype=object),
        }
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if self.text.finish else 0
        self.sender.send(response_of(arrays), flags=final)

    def is_gone(self):
        """Whether its caller has cancelled it; it then has its last response, which Triton expects of every request."""
        if gone := self.sender.is_cancelled():
            self.sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        return gone

    def fail(self, error):
        """Answer with an error, unless the request has had its last answer: Triton closes its sender with that."""
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        with suppress(pb_utils.TritonModelException):
            self.sender.send(error_response(error, "generation"), flags=final)


class TritonPythonModel:
    """One model instance: one session, of a decoder behind an encoder two, and the thread that generates."""

    def initialize(self, args):
        """Open the version's model and tokenizer. Raises TritonModelException, shown in Triton's log."""
        config, settings, version, self.facts = read_config(args)
        if self.facts.get("task") not in GENERATED:
            raise pb_utils.TritonModelException(f"serving.json of version {version.name} is missing or not of a generation")
        self.start = self.facts.get("start")
        parts = [None] if self.start is None else [None, ENCODER]
        opened = [open_engine(Engine, args, config, settings, version, self.facts, file).session for file in parts]
        self.batch = Batch(*opened, start=self.start)
        self.tokenizer = open_tokenizer(version / "tokenizer" / "tokenizer.json", self.facts)
        if self.start is None:  # a prompt is not cut, a source is
            self.tokenizer.no_truncation()
        self.ends = frozenset(self.facts.get("ends", ()))
        self.most = int(settings.get("max_streams", MOST_STREAMS))
        self.waiting = queue.Queue(int(settings.get("max_waiting", MOST_WAITING)))
        self.thread = threading.Thread(target=self.generate, daemon=True)
        self.thread.start()

    def execute(self, requests):
        """Queue the requests; their responses are sent later."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                self.waiting.put_nowait(self.read(request, sender))
            except queue.Full:
                full = pb_utils.TritonError("too many texts wait to be continued", pb_utils.TritonError.UNAVAILABLE)
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                sender.send(pb_utils.InferenceResponse(error=full), flags=final)
            except Exception as error:
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                sender.send(error_response(error, "generation"), flags=final)

    def read(self, request, sender):
        """A request's stream. Raises Refused."""
        values = {tensor.name(): tensor.as_numpy().reshape(-1) for tensor in request.inputs()}
        if len(values["TEXT"]) != 1:
            raise Refused("TEXT must be one text")
        settings = settings_of(values)
        ids = self.ids_of(text_of(values["TEXT"][0]), settings.max_tokens)
        streamed = bool(values["STREAM"][0]) if "STREAM" in values else True
        return Stream(sender, ids, Text(self.tokenizer, settings, self.ends), settings, streamed)

    def ids_of(self, text, new):
        """The tokens of a prompt, or of a source with the task's prefix, which `new` tokens may follow. Raises Refused."""
        most = self.facts["positions"]
        if self.start is None:
            ids = prompt_ids(self.tokenizer, text.strip() if self.facts.get("stripped") else text)
            if not ids or len(ids) + new > most:
                what = f"a text of {len(ids)} tokens and MAX_TOKENS {new}"
                raise Refused(f"{what}: together this model takes from 1 to {most} tokens, at least one in the text")
            return ids
        if not text.strip() or new > most:
            raise Refused(f"a text of {len(text.strip())} characters and MAX_TOKENS {new}: from 1, and at most {most}")
        return without_panic(self.tokenizer.encode, self.facts.get("prefix", "") + text.strip()).ids

    def generate(self):
        """Compute what waits until None comes."""
        while True:
            try:
                if not self.advance():
                    return
            except Exception as error:  # a runtime raises many types; the thread goes on, or no request is answered any more
                for stream in self.batch.rows:
                    stream.fail(error)
                self.batch.clear()

    def advance(self):
        """Take what waits, as far as there is room, and compute one token of every row; False after None."""
        room = self.most - len(self.batch.rows)  # counted before: requests that end with their first token fill no room
        while not self.batch.rows or (room > 0 and not self.waiting.empty()):
            room -= 1
            stream = self.waiting.get()
            if stream is None:
                return False
            self.join(stream)
        self.step()
        return True

    def join(self, stream):
        """Compute a request's first token, unless its caller has gone."""
        try:
            if stream.is_gone():
                return
            token = self.batch.join(stream, stream.ids)
        except Exception as error:  # it ends this request alone
            stream.fail(error)
            return
        if self.ended(stream, token):
            self.batch.leave({len(self.batch.rows) - 1})

    def ended(self, stream, token):
        """Whether a request ends with this token: with its last one, or because its text fails, which ends it alone."""
        try:
            return stream.add(token)
        except Exception as error:
            stream.fail(error)
            return True

    def step(self):
        """One token for every row; rows that end, or whose callers have gone, leave."""
        gone = set()
        for number, (stream, token) in enumerate(zip(self.batch.rows, self.batch.step(), strict=True)):
            if stream.is_gone():
                gone.add(number)
            elif isinstance(token, Exception):
                stream.fail(token)
                gone.add(number)
            elif self.ended(stream, token):
                gone.add(number)
        if gone:
            self.batch.leave(gone)

    def finalize(self):
        """End the thread and free the model."""
        self.waiting.put(None)
        self.thread.join()
        self.batch = None


def settings_of(values):
    """The Settings of a request's inputs. Raises Refused."""
    given = {
        name.lower(): kind(values[name][0])
        for name, kind in (("MAX_TOKENS", int), ("TEMPERATURE", float), ("TOP_K", int), ("TOP_P", float), ("SEED", int))
        if name in values
    }
    stop = tuple(text_of(cell) for cell in values.get("STOP", ()))
    limits = {"max_tokens": (1, 2**31), "temperature": (0, 100), "top_k": (0, 2**31), "top_p": (1e-6, 1), "seed": (0, 2**63)}
    for name, number in given.items():
        least, largest = limits[name]
        if not least <= number <= largest:
            raise Refused(f"{name.upper()} is {number}, not from {least} to {largest}")
    if len(stop) > 16 or not all(stop):
        raise Refused("STOP must hold at most 16 texts, none empty")
    return Settings(**given, stop=stop)
