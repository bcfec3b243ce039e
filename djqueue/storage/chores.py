"""Register periodic work for upper layers, which runs along with a storage's sweeps."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Storage

MakeChore = Callable[["Storage"], Callable[[], object]]

makers: dict[str, MakeChore] = {}
"""Factories by name. Each returns a function for a storage, which one thread calls about once a second."""


def chores_of(storage: "Storage") -> dict[str, Callable[[], object]]:
    """Return a storage's chores, by name."""
    return {name: make(storage) for name, make in makers.items()}
