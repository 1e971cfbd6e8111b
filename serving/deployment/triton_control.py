"""A running Triton server as a deployment sees it, over HTTP: load and unload models, ask whether a version is ready, infer."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from compressor.errors import UserError
from serving.client import START, check_certificates, tls_error
from serving.clients.address import parse_url
from serving.deployment.answers import Answer, Tensors

CONNECT_SECONDS = 10.0
LONG_SECONDS = 600.0
"""A load returns when the model is ready: an engine may take minutes. So may many long rows on a slow processor."""


class Refused(Exception):
    """The server's reason for refusing a request."""

    def __init__(self, status: int, reason: str):
        self.status, self.reason = status, reason
        super().__init__(reason)


@dataclass(frozen=True)
class Control:
    """The HTTP endpoint of a server whose repository API is open to us: https with `ca` (a PEM file; default: the system's),
    and `header` (name, value) with every request where it asks for one."""

    host: str
    port: int
    tls: bool = False
    ca: Path | None = None
    header: tuple[str, str] | None = None

    @classmethod
    def at(cls, url: str, **options: Any) -> Control:
        """From host:port, http:// or https://. Raises UserError E711, E729 (file of certificates)."""
        address = parse_url(url)
        if address.protocol != "http":
            raise UserError(
                "E711", f"'{url}' is not an address of HTTP", "Give host:port, http://host:port or https://host:port"
            )
        if (ca := options.get("ca")) is not None:
            check_certificates(ca)
        return cls(address.host, address.port, address.tls, **options)

    def load(self, model: str) -> None:
        """Load a model, or its new versions, from the server's repository; returns when they are ready.

        A version that is served goes on until then. Raises Refused, UserError E712, E755.
        """
        self._control(model, "load")

    def unload(self, model: str) -> None:
        """Raises Refused, UserError E712, E755."""
        self._control(model, "unload")

    def _control(self, model: str, action: str) -> None:
        try:
            self._post(f"/v2/repository/models/{quote(model)}/{action}", {})
        except Refused as refusal:
            if refusal.status in (401, 403) or "explicit" in refusal.reason or "restricted" in refusal.reason:
                raise self._closed(refusal.reason) from refusal
            raise

    def _closed(self, reason: str) -> UserError:
        what = f"the server does not let models be loaded ({reason})"
        fix = "Start it with --model-control-mode=explicit, and give its token with --token-file"
        return UserError("E755", what, fix, self.where)

    def ready(self, model: str, version: int | None = None) -> bool:
        """Whether a version, or any, is ready. Raises UserError E712, E755."""
        return self._is_well(f"{_path(model, version)}/ready")

    def _is_well(self, path: str) -> bool:
        """Whether a path is answered with 200. Raises UserError E712, E755."""
        status, _ = self._request("GET", path)
        if status in (401, 403):
            raise self._closed(f"status {status}")
        return status == 200

    def infer(self, model: str, inputs: Tensors, version: int | None = None) -> Tensors:
        """The outputs of one request, both as the Open Inference Protocol has them in JSON: name, shape, datatype, data.

        Raises Refused, UserError E712."""
        response = self._post(f"{_path(model, version)}/infer", {"inputs": inputs})
        try:
            return [{key: output[key] for key in ("name", "shape", "datatype", "data")} for output in response["outputs"]]
        except (KeyError, TypeError) as error:
            what = f"this is not a Triton server: the response of '{model}' has no outputs"
            raise UserError("E712", what, START, self.where) from error

    def generate(self, model: str, body: dict[str, Any], version: int | None = None) -> dict[str, Any]:
        """The one response of a model that generates, inputs and outputs by name (Triton's generate extension).

        Raises Refused, UserError E712."""
        return self._post(f"{_path(model, version)}/generate", body)

    def ask(self, model: str, answer: Answer, version: int | None = None) -> Tensors:
        """The outputs of a recorded request now. Raises Refused, UserError E712."""
        if not answer.generated:
            return self.infer(model, answer.inputs, version)
        # each input of such a model is one value, or a list of texts
        body = {one["name"]: one["data"] if len(one["data"]) > 1 else one["data"][0] for one in answer.inputs}
        given = self.generate(model, body, version)
        return [{**output, "data": [given[output["name"]]]} for output in answer.outputs if output["name"] in given]

    def seconds(self, model: str, answer: Answer) -> float:
        """How long a recorded request takes."""
        start = time.perf_counter()
        self.ask(model, answer)
        return time.perf_counter() - start

    def require_live(self) -> None:
        """Raises UserError E712 where no Triton server responds, E755 where one, or a proxy before it, lets nobody in."""
        if not self._is_well("/v2/health/live"):
            raise UserError("E712", "this is not a Triton server", START, self.where)

    @property
    def where(self) -> str:
        return f"{self.host}:{self.port}"

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        status, text = self._request("POST", path, json.dumps(body), LONG_SECONDS)
        try:
            parsed = json.loads(text) if text else {}
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict):  # a proxy's page
            parsed = {"error": text[:200]}
        if status != 200:
            raise Refused(status, str(parsed.get("error", f"status {status}")).strip())
        return parsed

    def _request(self, verb: str, path: str, body: str | None = None, seconds: float = CONNECT_SECONDS) -> tuple[int, str]:
        headers = {"Content-Type": "application/json"} | (dict([self.header]) if self.header else {})
        try:
            connection = self._connection(seconds)
            try:
                connection.request(verb, path, body, headers)
                response = connection.getresponse()
                return response.status, response.read().decode("utf-8", errors="replace")
            finally:
                connection.close()
        except ssl.SSLError as error:
            raise tls_error(str(error), self.where) from error
        except TimeoutError as error:
            if error.errno is not None:  # of the network, long before that: the host does not answer
                raise self._no_server(error) from error
            what = f"the Triton server does not answer within {seconds:g} s"
            raise UserError("E712", what, "See the server's log, or start one: compress serve RUN", self.where) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._no_server(error) from error

    def _no_server(self, error: Exception) -> UserError:
        return UserError("E712", f"no Triton server responds ({error})", START, self.where)

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        if not self.tls:
            return http.client.HTTPConnection(self.host, self.port, timeout=seconds)
        context = ssl.create_default_context(cafile=self.ca)
        return http.client.HTTPSConnection(self.host, self.port, timeout=seconds, context=context)


def _path(model: str, version: int | None) -> str:
    return f"/v2/models/{quote(model)}" + (f"/versions/{version}" if version is not None else "")
