"""Limiters that queues share."""

from djqueue.core.limiter import UNSET, SetConcurrency, SetRate
from djqueue.core.sharing import LimiterState
from djqueue.storage.facets import Limiters

from .keyspace import Keyspace
from .limits import SharedLimits


class RedisLimiters(Limiters):
    """Changes and state of shared limiters."""

    def __init__(self, keyspace: Keyspace, limits: SharedLimits) -> None:
        self._keyspace = keyspace
        self._limits = limits

    def set(self, name: str, rate: SetRate = UNSET, concurrency: SetConcurrency = UNSET) -> None:
        self._keyspace.run_in_time(self._limits.change(name, rate, concurrency))

    def state(self, name: str) -> LimiterState:
        return self._keyspace.run(self._limits.state(name))
