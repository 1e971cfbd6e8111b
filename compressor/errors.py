"""Errors shown to users: one line with what is wrong, where, and how to fix it, and a code.

Codes: E1xx config, E2xx data, E3xx model and anatomy, E4xx tuning, E5xx pruning, E6xx export and parity, E7xx serving,
E8xx store and runs, E9xx environment. docs/errors.md lists every one of them; a test compares that page with the source.
"""

from __future__ import annotations

from collections.abc import Iterator

from compressor.printable import printable


class CompressError(Exception):
    """An expected failure. Shown as one line, never as a traceback.

    `code` is the code in docs/errors.md, `what` describes the fault, `fix` what to do about it, and `where` the location, such
    as `pipeline.yaml:7: stages[1].tune.rank`. `key` is the key of a config that is at fault, for whoever knows its file. In the
    line that is shown, control characters are escapes: it may hold a cell of untrusted data.
    """

    exit_code = 1

    def __init__(self, code: str, what: str, fix: str, where: str = "", key: str = ""):
        self.code, self.what, self.fix, self.where, self.key = code, what, fix, where, key
        place = f"{where}: " if where else ""
        super().__init__(printable(f"{code} {place}{what}. {fix}".replace("\n", " ")))

    def __reduce__(self) -> tuple:
        """Pickling support: errors are passed between processes."""
        return type(self), (self.code, self.what, self.fix, self.where, self.key)


class UserError(CompressError):
    """A mistake in the user's input: exit code 2."""

    exit_code = 2


class UserErrors(UserError):
    """Several mistakes found in one pass, shown one per line."""

    def __init__(self, errors: list[UserError]):
        self.errors = errors
        super().__init__(errors[0].code, errors[0].what, errors[0].fix, errors[0].where)

    def __reduce__(self) -> tuple:
        return type(self), (self.errors,)

    def __str__(self) -> str:
        return "\n".join(str(error) for error in self.errors)


class CheckError(CompressError):
    """A check of the result failed (parity, budget): exit code 3."""

    exit_code = 3


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """The error and all its causes and contexts, each once."""
    waiting, seen = [error], set()
    while waiting:
        current = waiting.pop()
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            yield current
            waiting += [current.__cause__, current.__context__, *getattr(current, "exceptions", ())]
