"""What else is done where a storage's upkeep is, for layers above this one."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import Storage

MakeChore = Callable[["Storage"], Callable[[], object]]

makers: dict[str, MakeChore] = {}
"""By name, what makes a chore for a storage. It is called about once a second, from one thread."""


def chores_of(storage: "Storage") -> dict[str, Callable[[], object]]:
    """The chores of a worker, by name."""
    return {name: make(storage) for name, make in makers.items()}
