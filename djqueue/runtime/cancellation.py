"""Requests to cancel running jobs, heard at once and not only with the next heartbeat.

Being told of a queue's events costs the storage something for every job, so only queues with a job
that has been running for a moment are listened to: short jobs are over before they could be cancelled.
"""

import asyncio
from collections.abc import Callable

from djqueue.core.job import Event
from djqueue.storage.base import Unsubscribe

from .heartbeat import Heartbeat
from .runs import Run
from .stopping import Stop
from .workercontext import WorkerContext

TICK = 0.05
"""Seconds between looks at what is running."""
IDLE_TICK = 1.0
"""The same while nothing is running."""
LONG = 50
"""Milliseconds after which a job's queue is listened to."""
IDLE = 60_000
"""Milliseconds after the last such job of a queue until it is no longer listened to."""
RETRY = 1_000
"""Milliseconds between tries when the storage is away."""


class CancelWatch:
    """Listens to the queues of long jobs."""

    def __init__(
        self, worker_context: WorkerContext, heartbeat: Heartbeat, stop_run: Callable[[Run, Stop], None]
    ) -> None:
        self._loop = worker_context.loop
        self._storage = worker_context.storage
        self._runs = worker_context.runs
        self._clock = worker_context.clock
        self._tell = worker_context.tell
        self._heartbeat = heartbeat
        self._stop_run = stop_run
        self._subscriptions: dict[str, Unsubscribe] = {}
        self._needed: dict[str, int] = {}
        """Monotonic milliseconds at which a queue last had a long job."""
        self._timer: asyncio.TimerHandle | None = None
        self._round: asyncio.Task[None] | None = None
        self._not_before = 0
        self._closed = False
        self._watching = False
        """Whether the next look is a short one."""

    def watch(self) -> None:
        """Jobs have started. Called on the loop."""
        if self._closed or self._watching:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._watching = True
        self._timer = self._loop.call_later(TICK, self._tick)

    async def close(self) -> None:
        """Listen no more."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._round is not None:
            self._round.cancel()
            await asyncio.gather(self._round, return_exceptions=True)
        for queue in list(self._subscriptions):
            await self._leave(queue)

    def _tick(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        for run in self._runs.executing.copy().values():
            if now - run.since >= LONG:
                self._needed[run.claimed.queue] = now
        if self._round is None and now >= self._not_before and self._is_out_of_date(now):
            self._round = self._loop.create_task(self._update(now))
        self._watching = bool(self._runs.executing)
        if self._watching:
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
                    await self._leave(queue)
                elif queue not in self._subscriptions:
                    await self._join(queue)
        except Exception as error:
            # The heartbeat still learns of requests, only later.
            self._not_before = self._clock.monotonic() + RETRY
            self._tell.away("subscribe", error)
        else:
            self._tell.back("subscribe")
        finally:
            self._round = None

    async def _join(self, queue: str) -> None:
        storage = self._storage
        self._subscriptions[queue] = await storage.acall(storage.events.subscribe, queue, self._on_event)
        # What was asked for before is seen in the answers to a renewal.
        runs = [run for run in self._runs.held() if run.claimed.queue == queue]
        await storage.acall(self._heartbeat.renew, runs)

    async def _leave(self, queue: str) -> None:
        unsubscribe = self._subscriptions.pop(queue, None)
        if unsubscribe is not None:
            await self._storage.acall(unsubscribe)

    def _on_event(self, event: Event) -> None:
        if event.event != "cancel_requested":
            return
        for run in self._runs.executing.copy().values():
            if run.claimed.id == event.id and run.claimed.queue == event.queue:
                self._stop_run(run, Stop.REQUESTED)
