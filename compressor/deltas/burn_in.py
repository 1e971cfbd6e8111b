"""Faults of the steps before positions are fixed to the largest changes (diff pruning, child pruning). Torch-free."""

from __future__ import annotations

Fault = tuple[str, str]
"""What is wrong, and what to do about it: the parts of an E413."""


def burn_in_fault(burn_in: int | None, steps: int) -> Fault | None:
    """The fault of a burn-in that is not shorter than a training of so many steps; None without one."""
    if burn_in is None or burn_in < steps:
        return None
    what = f"burn_in is {burn_in:,} steps, the training has {steps:,}"
    return what, "Lower it, or train longer: the positions are trained further after it"


def renewal_fault(renew: int | None, first: int) -> Fault | None:
    """The fault of a `renew` that never comes before positions are fixed after `first` steps; None without one.

    `renew: 1` has none: what it would return after a first step is returned as well when positions are fixed there.
    """
    if renew is None or renew == 1 or renew < first:
        return None
    what = f"renew is {renew:,} steps, the positions are fixed after {first:,}: nothing is ever renewed"
    return what, "Lower or remove it, or raise burn_in (by default half of the training)"
