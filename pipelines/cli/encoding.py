"""Output on a terminal, or in a pipe, that is not UTF-8."""

from __future__ import annotations

import codecs
import json
import sys

ESCAPED = "compress.escaped"
"""Name of the error handler below."""


def escape_unencodable() -> None:
    """Let stdout print what its encoding lacks, such as Ω, as \\u03a9, which is right in JSON, too. stderr does so already."""
    codecs.register_error(ESCAPED, _escaped)
    if getattr(sys.stdout, "errors", None) == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors=ESCAPED)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end
