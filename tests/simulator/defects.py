"""Fixes that a simulation can be run without, to show that it finds the defects that they are for."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_fix(name: str) -> Iterator[None]:
    """Take a fix away while this lasts. Raises KeyError for a name that is not known."""
    FIXES[name]
    yield


FIXES: dict[str, object] = {}
