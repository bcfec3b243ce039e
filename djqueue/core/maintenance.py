"""The result of a sweep."""

from typing import NamedTuple


class Swept(NamedTuple):
    """Numbers of jobs that a sweep changed."""

    promoted: int = 0
    stalled: int = 0
    expired: int = 0
    retried: int = 0
    removed: int = 0
