"""What the doctor finds: one line each, and the facts that an import in a process of its own gives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

OK, WARNING, FAULT = "ok", "warning", "fault"


ROOT = Path(__file__).resolve().parents[2]

GIGABYTE = 10**9


@dataclass(frozen=True)
class Finding:
    """One line of the report: what was examined, `ok`, `warning` or `fault`, the result, and how to fix it."""

    name: str
    status: str
    what: str
    fix: str = ""


@dataclass(frozen=True)
class Probe:
    """Result of an import in a separate process: its facts, or why it failed."""

    facts: dict[str, Any]
    error: str = ""
