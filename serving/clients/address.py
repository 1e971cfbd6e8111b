"""Addresses of servers: host:port, http://, https://, grpc:// or grpcs://."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from compressor.errors import UserError

SCHEMES = {"http": ("http", False), "https": ("http", True), "grpc": ("grpc", False), "grpcs": ("grpc", True)}
"""Scheme of a URL -> protocol, and whether it is encrypted."""


@dataclass(frozen=True)
class Address:
    """Where a server listens, and by which protocol. `host` of IPv6 has no brackets."""

    protocol: str
    host: str
    port: int
    tls: bool

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_url(url: str) -> Address:
    """The address in a URL; without a scheme it is of HTTP. Raises UserError E711."""
    try:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    extra = parts.path.strip("/") or parts.query or parts.fragment or parts.username if host else ""
    if not host or not port or parts.scheme not in SCHEMES or extra:
        schemes = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        fix = f"Give host:port such as 127.0.0.1:8000, or {schemes} before it"
        raise UserError("E711", f"{url!r:.100} is not a server's URL", fix)
    protocol, tls = SCHEMES[parts.scheme]
    return Address(protocol, host, port, tls)
