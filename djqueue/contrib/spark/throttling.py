"""Retry storage calls and slow down writes, so that a load survives an outage and does not flood a queue."""

import random
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from djqueue.core.deadlines import GrowingPause
from djqueue.core.errors import QueueFullError, StorageUnavailableError
from djqueue.core.states import PENDING
from djqueue.storage.base import Storage

from .options import WriteOptions

P = ParamSpec("P")
T = TypeVar("T")

FIRST_RETRY_WAIT, LAST_RETRY_WAIT = 0.5, 15.0
"""Seconds between retries of a call, doubling. Up to as much is added at random, to spread the tasks."""
FIRST_CHECK_WAIT, LAST_CHECK_WAIT = 0.05, 2.0
"""Seconds between checks of a full queue, doubling."""

LONGEST_WAIT = 5.0
"""Seconds after which a driver that waits shows that it is alive."""


class StorageRetry:
    """Repeat storage calls while the storage is unavailable.

    A storage itself retries for a few seconds. This covers longer outages: a failover, a restart that loads
    data, a network failure. Ids are generated before the first try, so no job is enqueued twice.
    """

    def __init__(self, retries: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self._retries = retries
        self._sleep = sleep

    def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return the result of the call. Raises StorageUnavailableError if every try fails."""
        pause = GrowingPause(FIRST_RETRY_WAIT, LAST_RETRY_WAIT)
        for _ in range(self._retries):
            try:
                return call(*args, **kwargs)
            except StorageUnavailableError:
                self._sleep(pause.failed() * (1 + random.random()))
        return call(*args, **kwargs)


class WriteThrottle:
    """Slow down a write according to `maxQueueDepth` and `rateLimit`.

    Args:
        options: The options of the write.
        storage: The storage.
        clock: Returns the time in seconds.
        sleep: Waits for seconds.
        on_wait: Called before each wait.
    """

    def __init__(
        self,
        options: WriteOptions,
        storage: Storage,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_wait = on_wait
        self._options = options
        self._storage = storage
        self._clock = clock
        self._sleep = sleep
        self._next = clock()

    def wait(self, queue: str, count: int) -> None:
        """Wait until `count` jobs may be enqueued; 0 if their number is not known yet, see `spend`.

        Raises:
            StorageUnavailableError: The queue was still full after `backpressureTimeout`.
        """
        rate = self._options.rate_limit
        if rate is not None:
            now = self._clock()
            left = self._next - now
            while left > 0:
                self._on_wait()
                self._sleep(min(left, LONGEST_WAIT))
                left -= LONGEST_WAIT
            self._next = max(now, self._next)
        self.spend(count)
        limit = self._options.max_queue_depth
        if limit is None:
            return
        for _ in self._checks(f"queue {queue!r} has more than maxQueueDepth={limit} jobs"):
            counts = self._storage.reads.counts(queue)
            if sum(counts[state] for state in PENDING) < limit:
                return

    def spend(self, count: int) -> None:
        """Count jobs whose number was not known before they were enqueued: the next ones wait for them."""
        if self._options.rate_limit is not None:
            self._next += count / self._options.rate_limit

    def publish_when_possible(self, publish: Callable[[], T]) -> T:
        """Call `publish` until the queue has room for it. Jobs already published are not added twice."""
        for _ in self._checks("the queue stayed full"):
            try:
                return publish()
            except QueueFullError:
                continue
        raise AssertionError("unreachable: _checks ends with an error")

    def _checks(self, problem: str) -> Iterator[None]:
        """Yield at once, and then after each of increasing waits."""
        until = self._clock() + self._options.backpressure_timeout
        pause = GrowingPause(FIRST_CHECK_WAIT, LAST_CHECK_WAIT)
        while True:
            yield
            if self._clock() >= until:
                raise StorageUnavailableError(
                    f"{problem}, for backpressureTimeout={self._options.backpressure_timeout:g} s"
                )
            self._on_wait()
            self._sleep(pause.failed())
