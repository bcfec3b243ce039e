"""Which of several jobs with one unique key wins: one decision for every storage that makes it in Python."""

from dataclasses import dataclass
from typing import Generic, TypeVar

J = TypeVar("J")

REPLACED = "replaced"
"""Reason of a cancelled job that a newer one with its unique key replaced."""


@dataclass(frozen=True, slots=True)
class Succession(Generic[J]):
    """The way in which a new job comes to its unique key."""

    replaced: J | None = None
    """The pending job that it cancels."""
    behind: J | None = None
    """The active job whose end it waits for."""
    keeps_time: bool = False
    """True if it runs no later than the job that it replaces; otherwise, a job that is replaced again and
    again would never start.
    """


def succession(on_duplicate: str, active: J | None, pending: J | None) -> Succession[J] | None:
    """Return how a new job comes to its unique key; None if it is a duplicate, and changes nothing.

    Args:
        on_duplicate: the new job's option.
        active: the active job that has the key.
        pending: the job with the key that has not started: its owner, or the one that waits for the active
            job to end.
    """
    if active is None and pending is None:
        return Succession()
    if on_duplicate == "keep" or (active is not None and on_duplicate != "keep_last_if_active"):
        return None
    return Succession(pending, active, keeps_time=on_duplicate != "debounce")
