"""Django's database connections around jobs: broken, old and unused ones are closed."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import connections

IDLE = 60.0
"""Seconds after which an unused database thread of async jobs ends."""
RECHECK_AFTER = 1.0
"""Seconds after a check during which connections are not checked again."""


class OpenTransactionError(Exception):
    """A job has left a transaction open."""


def clean_connections() -> None:
    """Do for a job what Django does around a request, on the thread that runs the job.

    This is `reset_queries` and `close_old_connections` in one pass, because looking up every connection
    twice takes longer than a short job. Django would leave a connection with an open `atomic` block alone, so
    that the next job would write into a transaction that is never committed.

    Raises:
        OpenTransactionError: A transaction was open, and has been rolled back.
    """
    left = []
    for connection in connections.all(initialized_only=True):
        connection.queries_log.clear()
        if connection.in_atomic_block:
            left.append(connection.alias)
            connection.close()
            # It remembers the block, and would refuse to connect again.
            del connections[connection.alias]
        else:
            connection.close_if_unusable_or_obsolete()
    if left:
        raise OpenTransactionError(
            f"a transaction of {', '.join(map(repr, left))} was still open, and has been rolled back"
        )


def release_pooled() -> None:
    """Return this thread's connections to pools of Django, which may have fewer than there are threads."""
    for connection in connections.all(initialized_only=True):
        if connection.settings_dict["OPTIONS"].get("pool"):
            connection.close()


def close_connections() -> None:
    """Close all connections of this thread."""
    connections.close_all()


class DatabaseThreads:
    """Gives each async job that uses Django's database a thread, and so a connection, of its own.

    By default, `sync_to_async` runs the calls of all async jobs of a loop on one thread, one at a time; a new
    thread for each job would open new connections each time. So threads are reused, with their connections.
    A thread starts when a job first needs it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._free: list[ThreadBinding] = []
        self._used: set[ThreadBinding] = set()
        """Bindings with a running thread."""
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> "ThreadBinding":
        """Bind the context of the current task to a thread."""
        # The most recently used one, so that threads which few jobs need stay idle and end.
        binding = self._free.pop() if self._free else ThreadBinding(self._loop, self._used)
        THREAD_SENSITIVE.set(binding.context)
        return binding

    def put_back(self, binding: "ThreadBinding") -> None:
        """Take back the binding of a job that did not use its thread."""
        self._free.append(binding)

    async def clean(self, binding: "ThreadBinding", *, interrupted: bool) -> None:
        """Take back the binding of a job that used its thread, after cleaning its connections.

        interrupted: The job was interrupted: its thread may still be running, with connections in an
            unknown state.
        """
        if interrupted:
            binding.retire()
            return
        try:
            await self._loop.run_in_executor(binding.executor, clean_connections)
        except BaseException:
            binding.retire()
            raise
        binding.executor.used = False
        binding.idle_since = self._loop.time()
        self._free.append(binding)
        if self._timer is None:
            self._timer = self._loop.call_later(IDLE, self._expire)

    def close(self) -> None:
        """End all threads, with their connections, each after its current call."""
        if self._timer is not None:
            self._timer.cancel()
        self._free.clear()
        for binding in list(self._used):
            binding.retire()

    def _expire(self) -> None:
        now = self._loop.time()
        for binding in self._used.intersection(self._free):
            if now - binding.idle_since >= IDLE:
                self._free.remove(binding)
                binding.retire()
        self._timer = self._loop.call_later(IDLE, self._expire) if self._used else None


class ThreadBinding:
    """The context of one job at a time, and the thread that runs the database calls made in it."""

    __slots__ = ("_loop", "_used", "context", "executor", "idle_since")

    def __init__(self, loop: asyncio.AbstractEventLoop, used: set["ThreadBinding"]) -> None:
        self.context = ThreadSensitiveContext()
        self.executor = _Executor(self._begin)
        self.idle_since = 0.0
        self._loop = loop
        self._used = used
        # The table from which asgiref takes the executor of a context.
        SyncToAsync.context_to_thread_executor[self.context] = self.executor

    def _begin(self) -> None:
        """Check connections before the current job's first use of the thread."""
        if self in self._used and self._loop.time() - self.idle_since > RECHECK_AFTER:
            # Connections may have become too old since the last job. If this fails, the job's own query
            # fails too, and reports the reason.
            self.executor.submit(clean_connections)
        self._used.add(self)

    def retire(self) -> None:
        """Close the thread's connections and end it, after its current call."""
        self.executor.submit(close_connections)
        self.executor.shutdown(wait=False)
        self._used.discard(self)


class _Executor(ThreadPoolExecutor):
    """One thread, which its first use starts."""

    def __init__(self, on_use: Callable[[], None]) -> None:
        super().__init__(max_workers=1, thread_name_prefix="djqueue-database")
        self.used = False
        """Whether the current job has used the thread."""
        self._on_use = on_use

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        if not self.used:
            self.used = True
            self._on_use()
        return super().submit(fn, *args, **kwargs)


THREAD_SENSITIVE = SyncToAsync.thread_sensitive_context
