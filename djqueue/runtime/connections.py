"""Django's database connections around jobs: none is left broken, too old, or open for nobody."""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.conf import settings
from django.db import close_old_connections, connections, reset_queries

IDLE = 60.0
"""Seconds after which a thread that async jobs used for the database is let go."""


def has_django() -> bool:
    """Whether this process has Django's settings: without them there is nothing to clean."""
    return bool(settings.configured or "DJANGO_SETTINGS_MODULE" in os.environ)


def clean_connections() -> None:
    """What Django does around a request, before and after a job, on the thread that runs it."""
    reset_queries()
    close_old_connections()


def close_connections() -> None:
    """Close this thread's connections for good."""
    connections.close_all()


class DatabaseThreads:
    """A thread for each async job that uses Django's database, and so a connection of its own.

    Left alone, all async jobs of a loop would take turns on one thread (that is what `sync_to_async`
    does); with a new thread for each job, each would open new connections. So threads, with the
    connections that are in them, go from job to job. One is only started by a job that needs it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free: deque[_Place] = deque()
        self._taken: set[_Place] = set()
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> "_Place":
        """A place for the job of the current task, whose context it marks."""
        # The one left last: jobs that need no thread go on without the others' threads.
        place = self._free.pop() if self._free else _Place()
        self._taken.add(place)
        SyncToAsync.thread_sensitive_context.set(place.context)
        return place

    async def give_back(self, place: "_Place", *, interrupted: bool) -> None:
        """Clean a place after its job.

        interrupted: whether the job was cut off: its thread may still be at work, with connections in
            an unknown state.
        """
        self._taken.discard(place)
        if not place.executor.used:
            self._free.append(place)
            return
        if interrupted:
            place.retire()
            return
        place.executor.used = False
        try:
            await self._loop.run_in_executor(place.executor, clean_connections)
        except BaseException:
            place.retire()
            raise
        place.executor.used = False
        place.has_thread = True
        place.idle_since = self._loop.time()
        self._free.append(place)
        if self._timer is None:
            self._timer = self._loop.call_later(IDLE, self._expire)

    def close(self) -> None:
        """Let all threads go, with their connections; those still at work when they are done."""
        if self._timer is not None:
            self._timer.cancel()
        for place in (*self._free, *self._taken):
            if place.has_thread or place.executor.used:
                place.retire()
        self._free.clear()

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        for place in list(self._free):
            if place.has_thread and now - place.idle_since >= IDLE:
                self._free.remove(place)
                place.retire()
        if any(place.has_thread for place in self._free):
            self._timer = self._loop.call_later(IDLE, self._expire)


class _Place:
    __slots__ = ("context", "executor", "has_thread", "idle_since")

    def __init__(self) -> None:
        self.context = ThreadSensitiveContext()
        self.executor = _Executor()
        self.has_thread = False
        """Whether a thread may hold connections."""
        self.idle_since = 0.0
        # asgiref's own table, from which it would take an executor that it had made itself.
        SyncToAsync.context_to_thread_executor[self.context] = self.executor

    def retire(self) -> None:
        """Have the thread close its connections and end, once it is done with what it does."""
        self.executor.submit(close_connections)
        self.executor.shutdown(wait=False)


class _Executor(ThreadPoolExecutor):
    """One thread, started by its first use."""

    def __init__(self) -> None:
        super().__init__(max_workers=1, thread_name_prefix="djqueue-database")
        self.used = False
        """Whether the present job has used it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.used = True
        return super().submit(fn, *args, **kwargs)
