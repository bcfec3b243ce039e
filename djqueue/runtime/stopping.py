"""Stopping running jobs: the reasons, the event that handlers see, and the watch for cancel requests."""

import asyncio
from collections.abc import Awaitable
from enum import IntEnum
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from djqueue.core.job import Event as JobEvent
from djqueue.storage.base import Unsubscribe

if TYPE_CHECKING:
    from .worker import Worker

TICK = 0.05
"""Seconds between checks of the running jobs."""
IDLE_TICK = 1.0
"""Seconds between checks while nothing is running."""
LONG = 50
"""Milliseconds after which the worker subscribes to a job's queue."""
IDLE = 60_000
"""Milliseconds from the last such job of a queue until the subscription ends."""
RETRY = 1_000
"""Milliseconds between tries while the storage is unavailable."""


class Stop(IntEnum):
    """Why a handler is asked to stop. The highest of several reasons counts."""

    NO = 0
    SHUTDOWN = 1
    TIMEOUT = 2
    REQUESTED = 3
    """A user or another job cancelled the job."""
    LOST = 4
    """The lease is lost: the job may be running on another worker."""


class Cancelled:
    """An event that is set when a job should stop: cancelled, timed out, lease lost, or worker stopping."""

    __slots__ = ("_event", "_lock", "_sleepers")

    def __init__(self) -> None:
        self._event = Event()
        self._lock = Lock()
        self._sleepers: list[tuple[asyncio.AbstractEventLoop, asyncio.Future[bool]]] = []

    def __repr__(self) -> str:
        return f"<Cancelled: {self._event.is_set()}>"

    def is_set(self) -> bool:
        """Return whether the job should stop."""
        return self._event.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait at most `timeout` seconds until the job should stop, and return whether it should.

        In a thread, this blocks and returns the bool; on an event loop, it returns an awaitable of it.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._event.wait(timeout)
        return self._sleep(timeout)

    def set(self) -> None:
        """Ask the handler to stop. Called by the worker, from any thread."""
        with self._lock:
            self._event.set()
            sleepers, self._sleepers = self._sleepers, []
        for loop, future in sleepers:
            try:
                loop.call_soon_threadsafe(_resolve, future)
            except RuntimeError:
                # That loop is closed, and its waiters are gone with it.
                continue

    async def _sleep(self, timeout: float | None) -> bool:
        loop = asyncio.get_running_loop()
        with self._lock:
            if self._event.is_set():
                return True
            future: asyncio.Future[bool] = loop.create_future()
            entry = (loop, future)
            self._sleepers.append(entry)
        try:
            return await _within(future, timeout)
        finally:
            with self._lock:
                if entry in self._sleepers:
                    self._sleepers.remove(entry)


class CancelWatch:
    """Subscribes to the queues of long-running jobs, so that cancel requests arrive before a heartbeat.

    A subscription costs the storage something for every job of the queue, and short jobs end before a request
    could arrive. So the worker subscribes only to queues with a job that has been running for a moment.
    """

    def __init__(self, worker: "Worker") -> None:
        self._loop = worker.loop
        self._storage = worker.storage
        self._runs = worker.runs
        self._clock = worker.clock
        self._events = worker.events
        self._heartbeat = worker.heartbeat
        self._executor = worker.executor
        self._subscriptions: dict[str, Unsubscribe] = {}
        self._needed: dict[str, int] = {}
        """Monotonic milliseconds at which each queue last had a long-running job."""
        self._timer: asyncio.TimerHandle | None = None
        self._round: asyncio.Task[None] | None = None
        self._not_before = 0
        self._closed = False
        self._is_fast = False
        """Whether the next check comes after `TICK`, not `IDLE_TICK`."""

    def watch(self) -> None:
        """Check soon, because jobs have started. Called on the loop."""
        if self._closed or self._is_fast:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._is_fast = True
        self._timer = self._loop.call_later(TICK, self._tick)

    async def close(self) -> None:
        """End all subscriptions."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)
        for queue in list(self._subscriptions):
            await self._unsubscribe(queue)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        for run in self._runs.executing.copy().values():
            if now - run.since >= LONG:
                self._needed[run.claimed.queue] = now
        if self._round is None and now >= self._not_before and self._is_out_of_date(now):
            self._round = self._loop.create_task(self._update(now))
        self._is_fast = bool(self._runs.executing)
        if self._is_fast:
            self._timer = self._loop.call_later(TICK, self._tick)
        elif self._subscriptions:
            self._timer = self._loop.call_later(IDLE_TICK, self._tick)

    def _is_out_of_date(self, now: int) -> bool:
        return self._needed.keys() != self._subscriptions.keys() or any(
            now - at > IDLE for at in self._needed.values()
        )

    async def _update(self, now: int) -> None:
        try:
            for queue, at in list(self._needed.items()):
                if now - at > IDLE:
                    del self._needed[queue]
                    await self._unsubscribe(queue)
                elif queue not in self._subscriptions:
                    await self._subscribe(queue)
        except Exception as error:
            # The heartbeat still learns of cancel requests, only later.
            self._not_before = self._clock.monotonic() + RETRY
            self._events.storage_failed("subscribe", error)
        else:
            self._events.storage_worked("subscribe")
        finally:
            self._round = None

    async def _subscribe(self, queue: str) -> None:
        storage = self._storage
        self._subscriptions[queue] = await storage.acall(storage.events.subscribe, queue, self._on_event)
        # The answers to a renewal have the requests that were made before the subscription.
        runs = [run for run in self._runs.held() if run.claimed.queue == queue]
        await storage.acall(self._heartbeat.renew, runs)

    async def _unsubscribe(self, queue: str) -> None:
        unsubscribe = self._subscriptions.pop(queue, None)
        if unsubscribe is not None:
            await self._storage.acall(unsubscribe)

    def _on_event(self, event: JobEvent) -> None:
        if event.event != "cancel_requested":
            return
        for run in self._runs.executing.copy().values():
            if run.claimed.id == event.id and run.claimed.queue == event.queue:
                self._executor.stop(run, Stop.REQUESTED)


async def _within(future: Awaitable[bool], timeout: float | None) -> bool:
    try:
        return await asyncio.wait_for(future, timeout)
    except TimeoutError:
        return False


def _resolve(future: "asyncio.Future[bool]") -> None:
    if not future.done():
        future.set_result(True)
