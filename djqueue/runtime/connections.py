"""Django's database connections around jobs: none is left broken, too old, or open for nobody."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import connections

IDLE = 60.0
"""Seconds after which a thread that async jobs used for the database is let go."""
RECENT = 1.0
"""Seconds for which connections that were looked at are not looked at again."""


def clean_connections() -> None:
    """What Django does around a request, before and after a job, on the thread that runs it.

    `reset_queries` and `close_old_connections` in one pass: each looks every connection up anew, which
    takes longer than a short job does.
    """
    for connection in connections.all(initialized_only=True):
        connection.queries_log.clear()
        connection.close_if_unusable_or_obsolete()


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
        self._free: list[ThreadBinding] = []
        self._used: set[ThreadBinding] = set()
        """Those with a thread."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> "ThreadBinding":
        """A place for the job of the current task, whose context it marks."""
        # The one left last: jobs that need no thread go on without the others' threads.
        place = self._free.pop() if self._free else ThreadBinding(self._loop, self._used)
        SENSITIVE.set(place.context)
        return place

    def put_back(self, place: "ThreadBinding") -> None:
        """Take back the place of a job that did not use its thread."""
        self._free.append(place)

    async def clean(self, place: "ThreadBinding", *, interrupted: bool) -> None:
        """Take back the place of a job that used its thread, once its connections are cleaned.

        interrupted: whether the job was cut off: its thread may still be at work, with connections in
            an unknown state.
        """
        if interrupted:
            place.retire()
            return
        try:
            await self._loop.run_in_executor(place.executor, clean_connections)
        except BaseException:
            place.retire()
            raise
        place.executor.used = False
        place.idle_since = self._loop.time()
        self._free.append(place)
        if self._timer is None:
            self._timer = self._loop.call_later(IDLE, self._expire)

    def close(self) -> None:
        """Let all threads go, with their connections; those still at work when they are done."""
        if self._timer is not None:
            self._timer.cancel()
        self._free.clear()
        for place in list(self._used):
            place.retire()

    def _expire(self) -> None:
        now = self._loop.time()
        for place in self._used.intersection(self._free):
            if now - place.idle_since >= IDLE:
                self._free.remove(place)
                place.retire()
        self._timer = self._loop.call_later(IDLE, self._expire) if self._used else None


class ThreadBinding:
    """What marks the context of one job at a time, and the thread that this context's calls run on."""

    __slots__ = ("_loop", "_used", "context", "executor", "idle_since")

    def __init__(self, loop: asyncio.AbstractEventLoop, used: set["ThreadBinding"]) -> None:
        self.context = ThreadSensitiveContext()
        self.executor = _Executor(self._begin)
        self.idle_since = 0.0
        self._loop = loop
        self._used = used
        # asgiref's own table, from which it would take an executor that it had made itself.
        SyncToAsync.context_to_thread_executor[self.context] = self.executor

    def _begin(self) -> None:
        """The present job uses the thread for the first time."""
        if self in self._used and self._loop.time() - self.idle_since > RECENT:
            # What was fine after the job before may have grown too old since. Should this fail, the
            # job's own query does too, and says why.
            self.executor.submit(clean_connections)
        self._used.add(self)

    def retire(self) -> None:
        """Have the thread close its connections and end, once it is done with what it does."""
        self.executor.submit(close_connections)
        self.executor.shutdown(wait=False)
        self._used.discard(self)


class _Executor(ThreadPoolExecutor):
    """One thread, started by its first use."""

    def __init__(self, on_use: Callable[[], None]) -> None:
        super().__init__(max_workers=1, thread_name_prefix="djqueue-database")
        self.used = False
        """Whether the present job has used it."""
        self._on_use = on_use

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not self.used:
            self.used = True
            self._on_use()
        return super().submit(fn, *args, **kwargs)


SENSITIVE = SyncToAsync.thread_sensitive_context
