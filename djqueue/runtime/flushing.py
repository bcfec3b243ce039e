"""What handlers say, on its way to the storage in groups."""

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .workercontext import WorkerContext

RETRY = 1.0
"""Seconds until a group is tried again when the storage is away."""


class Flushing(ABC):
    """Flushes when something has been said: at once, and then again after `interval` seconds at least."""

    interval: float
    verb: str
    """Of the storage, for messages."""

    def __init__(self, worker_context: "WorkerContext") -> None:
        self.storage = worker_context.storage
        self._loop = worker_context.loop
        self._tell = worker_context.tell
        self._sending = asyncio.Lock()
        self._scheduled = False
        self._not_before = 0.0
        self._flush: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def waiting(self) -> bool:
        """Whether something has been said that the storage may not know."""

    @abstractmethod
    async def flush(self) -> None:
        """Send all that waits. Raises what the storage raises, and keeps what it did not take."""

    async def close(self) -> None:
        """End the timer's flush, if one is under way."""
        self._scheduled = True
        if self._flush is not None:
            self._flush.cancel()
            await asyncio.gather(self._flush, return_exceptions=True)

    def _schedule(self) -> None:
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._arm)
        except RuntimeError:
            # A handler that was given up goes on after its worker's end: nobody listens to it.
            self._tell.too_late("a report")

    def _arm(self) -> None:
        delay = max(0.0, self._not_before - self._loop.time())
        self._loop.call_later(delay, self._begin)

    def _begin(self) -> None:
        self._scheduled = False
        self._not_before = self._loop.time() + self.interval
        self._flush = self._loop.create_task(self._flush_by_itself())

    async def _flush_by_itself(self) -> None:
        try:
            await self.flush()
        except Exception as error:
            self._tell.away(self.verb, error)
            self._not_before = self._loop.time() + RETRY
            self._schedule()
        else:
            self._tell.back(self.verb)
