"""Calls of a storage that is away for a while, made again.

A storage tries for its own timeout already, some seconds; this is for what takes longer: a failover, a
restart that loads its data, a network that is being mended. All ids are made before the first try, so that
what has come does not come twice.
"""

import random
import time
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from djqueue.core.errors import StorageUnavailableError

P = ParamSpec("P")
T = TypeVar("T")

FIRST_WAIT, LAST_WAIT = 0.5, 15.0
"""Seconds between tries, doubling; up to as much again is added, so that tasks do not come back together."""


class Sending:
    """Calls, each tried again up to so many times."""

    def __init__(self, retries: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self._retries = retries
        self._sleep = sleep

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What the call answers. Raises StorageUnavailableError if it fails in every try."""
        wait = FIRST_WAIT
        for _ in range(self._retries):
            try:
                return call(*args, **kwargs)
            except StorageUnavailableError:
                self._sleep(wait * (1 + random.random()))
                wait = min(2 * wait, LAST_WAIT)
        return call(*args, **kwargs)
