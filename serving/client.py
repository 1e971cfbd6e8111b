"""Triton client: tensors in and out, over HTTP or gRPC. serving/predict.py predicts texts with it."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.utils import InferenceServerException

from compressor.errors import UserError
from serving.clients.address import parse_url
from serving.clients.connections import CONNECTIONS, INFER_SECONDS

REFUSED = ("400", "StatusCode.INVALID_ARGUMENT")
"""Statuses of a request that the caller must correct."""
TOO_LATE = "StatusCode.DEADLINE_EXCEEDED"
UNAUTHORIZED = ("401", "403", "StatusCode.UNAUTHENTICATED", "StatusCode.PERMISSION_DENIED")
START = "Start one: compress serve RUN"
CONFIG_KEYS = {"name", "input", "output", "max_batch_size"}
"""What the config of every model has."""


class Client:
    """A client of a Triton server at `url`: host:port, http://, https://, grpc:// or grpcs://. Use it in the thread that
    created it.

    `ca` is a file with the certificates (PEM) that the server's is checked against, by default the system's. `token` is sent
    as `Authorization: Bearer TOKEN`. `seconds` is how long the response to a request may take. Every call raises UserError E712
    when no Triton server responds, or not in time, E729 when its certificate is not trusted, E730 when it wants a token, and
    E715 when it refuses the request.
    """

    def __init__(self, url: str, *, ca: Path | None = None, token: str | None = None, seconds: float = INFER_SECONDS):
        """Raises UserError E711 (URL), E729 (file of certificates), E730 (token). Connects with the first call."""
        self.address = parse_url(url)
        if ca is not None:
            check_certificates(ca)
        if token is not None and not (token.isascii() and token.isprintable()):
            raise UserError("E730", "the token holds characters that no header can hold", "Give it in printable ASCII")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connection = CONNECTIONS[self.address.protocol](self.address, ca, headers, seconds)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def infer(self, model: str, features: Mapping[str, np.ndarray], version: str = "") -> dict[str, np.ndarray]:
        """Every output of `model` for one batch, by default of its latest version. Shapes and types are as its config declares
        them; texts are arrays of bytes (of type object). Raises ValueError for what are no arrays."""
        if not features or not all(isinstance(values, np.ndarray) for values in features.values()):
            raise ValueError("features are {name of an input: array of numpy}, at least one")
        with self._errors(model):
            return self._connection.infer(model, features, version)

    def config(self, model: str) -> dict[str, Any]:
        """The config of a loaded model, as JSON. Raises UserError E713, naming the loaded models, when it is not loaded."""
        with self._errors(model):
            config = self._connection.config(model)
        if not (isinstance(config, dict) and config.keys() >= CONFIG_KEYS):
            raise UserError("E712", "this is not a Triton server: its config of a model is none", START, str(self.address))
        return config

    def versions(self, model: str) -> list[str]:
        """The served versions of a loaded model, oldest first. Raises UserError E713."""
        with self._errors(model):
            return sorted(self._connection.versions(model), key=int)

    def ready(self, model: str) -> bool:
        """Whether `model` is loaded and ready."""
        with self._errors(model):
            return self._connection.ready(model)

    def models(self) -> list[str]:
        """Names of the loaded models, sorted."""
        with self._errors():
            return sorted(set(self._connection.models()))  # from statistics: `compress serve` does not list the repository

    def statistics(self, model: str) -> list[dict[str, Any]]:
        """Triton's counters of each version of a loaded model, as JSON; over gRPC integers are text, and zeros left out.
        Raises UserError E713."""
        try:
            with self._errors(model):
                return self._connection.statistics(model)
        except Refusal:  # Triton says that the model is not ready, as of a request that is wrong
            if model in (loaded := self.models()):
                raise
            raise self._not_loaded(model, loaded) from None

    @contextlib.contextmanager
    def _errors(self, model: str | None = None) -> Iterator[None]:
        """Convert exceptions of tritonclient and of the network to coded errors."""
        where = str(self.address)
        try:
            yield
        except InferenceServerException as error:
            raise self._coded(error, model, where) from error
        except ssl.SSLError as error:
            raise tls_error(str(error), where) from error
        except OSError as error:
            if isinstance(error, TimeoutError) and self._is_live():  # over HTTP; over gRPC it is TOO_LATE
                raise _late(where) from error
            raise UserError("E712", f"no Triton server responds ({error or type(error).__name__})", START, where) from error
        except self._connection.failures as error:
            what = f"this is not the {self.address.protocol} port of a Triton server ({error or type(error).__name__})"
            raise UserError("E712", what, START, where) from error

    def _coded(self, error: InferenceServerException, model: str | None, where: str) -> UserError:
        reason = str(error.message()).strip()
        if error.status() in UNAUTHORIZED:
            return UserError("E730", f"the server wants a token, or another one ({reason})", "Give it with --token", where)
        if not self._is_live():
            if "certificate" in reason.lower() or "handshake" in reason.lower():
                return tls_error(reason, where)
            no_server = "StatusCode" in str(error.status())
            what = f"no Triton server responds ({reason:.200})" if no_server else "this is not a Triton server"
            return UserError("E712", what, START, where)
        if error.status() == TOO_LATE:
            return _late(where)
        if error.status() not in REFUSED and model is not None and model not in (loaded := self.models()):
            return self._not_loaded(model, loaded)
        return Refusal(reason, where, wrong=error.status() in REFUSED)

    def _not_loaded(self, model: str, loaded: Sequence[str]) -> UserError:
        fix = f"Loaded models: {', '.join(loaded) or 'none'}"
        return UserError("E713", f"no model '{model}' is loaded", fix, str(self.address))

    def _is_live(self) -> bool:
        with contextlib.suppress(InferenceServerException, *self._connection.failures):
            return self._connection.live()
        return False


class Refusal(UserError):
    """E715: the server refused a request; `wrong`: because the caller must correct it. `reason` is the server's."""

    def __init__(self, reason: str, where: str, *, wrong: bool):
        super().__init__("E715", f"Triton refused the request: {reason}", "See the server's log", where)
        self.reason, self.wrong = reason, wrong

    def __reduce__(self) -> tuple:
        return UserError, (self.code, self.what, self.fix, self.where, self.key)


def _late(where: str) -> UserError:
    """E712 for a server that lives, and whose model takes too long."""
    fix = "Send fewer rows at a time, or see the server's log"
    return UserError("E712", "the Triton server does not answer in time", fix, where)


def tls_error(reason: str, where: str) -> UserError:
    """E729 for a connection that cannot be encrypted."""
    fix = (
        "Give its authority's certificate with --ca, and the name that the certificate is for; without TLS, http:// or grpc://"
    )
    return UserError("E729", f"the TLS connection failed ({reason:.200})", fix, where)


def check_certificates(path: Path) -> None:
    """Raises UserError E729 for a file without certificates."""
    try:
        ssl.create_default_context(cafile=path)
    except (OSError, ValueError) as error:
        raise UserError("E729", f"no certificates in PEM format ({error})", "Give a .pem or .crt file", str(path)) from error
