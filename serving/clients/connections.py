"""Connections to a Triton server over HTTP and gRPC, with the same methods; errors are tritonclient's and the network's own."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from serving.clients.address import Address
from serving.clients.channel import channel_options

CONNECT_SECONDS = 10.0
INFER_SECONDS = 60.0
"""How long the response to a request may take, unless a client is given another time."""


class Connection(Protocol):
    """One server. `failures` are the exceptions, beside InferenceServerException, of a server that does not respond."""

    failures: tuple[type[Exception], ...]

    def infer(self, model: str, arrays: Mapping[str, np.ndarray], version: str) -> dict[str, np.ndarray]: ...

    def config(self, model: str) -> dict[str, Any]: ...

    def versions(self, model: str) -> list[str]: ...

    def ready(self, model: str) -> bool: ...

    def live(self) -> bool: ...

    def models(self) -> list[str]: ...

    def statistics(self, model: str) -> list[dict[str, Any]]: ...

    def close(self) -> None: ...


class HttpConnection:
    """A connection over HTTP, for the thread that created it."""

    def __init__(self, address: Address, ca: Path | None, headers: Mapping[str, str], seconds: float):
        # imported here: it loads gevent, which only clients need
        from geventhttpclient.response import HTTPParseError
        from tritonclient.http import InferenceServerClient

        tls = {"ssl": True, "ssl_context_factory": lambda: ssl.create_default_context(cafile=ca)} if address.tls else {}
        self._open = partial(InferenceServerClient, str(address), connection_timeout=CONNECT_SECONDS, **tls)
        self._client = self._open(network_timeout=seconds)
        self._look_seconds = min(seconds, CONNECT_SECONDS)
        self._headers = dict(headers)
        # a response that is no JSON, or of another form, is not Triton's
        self.failures = (OSError, HTTPParseError, ValueError, KeyError, TypeError)

    def infer(self, model: str, arrays: Mapping[str, np.ndarray], version: str) -> dict[str, np.ndarray]:
        from tritonclient.http import InferInput

        inputs = _filled(InferInput, arrays)
        result = self._client.infer(model, inputs, model_version=version, headers=self._headers)
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}

    def config(self, model: str) -> dict[str, Any]:
        return self._client.get_model_config(model, headers=self._headers)

    def versions(self, model: str) -> list[str]:
        return self._client.get_model_metadata(model, headers=self._headers)["versions"]

    def ready(self, model: str) -> bool:
        return self._client.is_model_ready(model, headers=self._headers)

    def live(self) -> bool:
        with self._open(network_timeout=self._look_seconds) as client:  # a server that hangs is not waited for as a model is
            return client.is_server_live(headers=self._headers)

    def models(self) -> list[str]:
        loaded = self._client.get_inference_statistics(headers=self._headers)
        return [entry["name"] for entry in loaded["model_stats"]]

    def statistics(self, model: str) -> list[dict[str, Any]]:
        return self._client.get_inference_statistics(model, headers=self._headers)["model_stats"]

    def close(self) -> None:
        self._client.close()


class GrpcConnection:
    """A connection over gRPC."""

    failures = (OSError,)

    def __init__(self, address: Address, ca: Path | None, headers: Mapping[str, str], seconds: float):
        # imported here: only clients of this protocol need them
        from grpc import ssl_channel_credentials
        from tritonclient.grpc import InferenceServerClient

        trusted = (system_certificates() if ca is None else ca.read_bytes()) if address.tls else None
        creds = ssl_channel_credentials(trusted) if address.tls else None
        self._client = InferenceServerClient(str(address), channel_args=channel_options(address.host), creds=creds)
        self._headers = {key.lower(): value for key, value in headers.items()}  # gRPC refuses capitals
        self._options = {"headers": self._headers, "client_timeout": min(seconds, CONNECT_SECONDS)}
        self._infer_options = {"headers": self._headers, "client_timeout": seconds}

    def infer(self, model: str, arrays: Mapping[str, np.ndarray], version: str) -> dict[str, np.ndarray]:
        from tritonclient.grpc import InferInput

        result = self._client.infer(model, _filled(InferInput, arrays), model_version=version, **self._infer_options)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}

    def config(self, model: str) -> dict[str, Any]:
        config = self._client.get_model_config(model, as_json=True, **self._options)["config"]
        return {"max_batch_size": 0, "parameters": {}, **config}  # what has its default is left out of the JSON

    def versions(self, model: str) -> list[str]:
        return list(self._client.get_model_metadata(model, **self._options).versions)

    def ready(self, model: str) -> bool:
        return self._client.is_model_ready(model, **self._options)

    def live(self) -> bool:
        try:
            return self._client.is_server_live(**self._options)
        except InferenceServerException:
            return False

    def models(self) -> list[str]:
        return [entry.name for entry in self._client.get_inference_statistics(**self._options).model_stats]

    def statistics(self, model: str) -> list[dict[str, Any]]:
        return self._client.get_inference_statistics(model, as_json=True, **self._options)["model_stats"]

    def close(self) -> None:
        self._client.close()


CONNECTIONS: dict[str, type[Connection]] = {"http": HttpConnection, "grpc": GrpcConnection}
"""Protocol -> its connection."""


GRPC_ROOTS = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"
"""Environment variable that names the certificates which gRPC trusts."""


def system_certificates() -> bytes | None:
    """What Python's ssl, thus https:// here, trusts, as PEM; None if there is nothing, or if gRPC's own variable names others:
    gRPC then reads those, or trusts a list of its own."""
    if os.environ.get(GRPC_ROOTS):
        return None
    known = ssl.get_default_verify_paths()
    file = Path(os.environ.get(known.openssl_cafile_env, known.openssl_cafile))
    folders = os.environ.get(known.openssl_capath_env, known.openssl_capath).split(os.pathsep)
    # of a folder OpenSSL reads those that are named by their hash
    hashed = [path for folder in folders if folder for path in sorted(Path(folder).glob("*.[0-9]"))]
    return b"\n".join(path.read_bytes() for path in (file, *hashed) if path.is_file() and os.access(path, os.R_OK)) or None


def _filled(input_type: type, arrays: Mapping[str, np.ndarray]) -> list[Any]:
    """tritonclient's inputs, of the class of a protocol, with these arrays."""
    inputs = [input_type(name, array.shape, np_to_triton_dtype(array.dtype)) for name, array in arrays.items()]
    for tensor, array in zip(inputs, arrays.values(), strict=True):
        tensor.set_data_from_numpy(array)
    return inputs
