"""Connections of a storage to its database, and the thread that runs the calls of coroutines."""

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import NamedTuple, TypeVar

from asgiref.sync import sync_to_async
from django.db import NotSupportedError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.deadlines import remaining
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.threads import after_fork
from djqueue.storage.base import P
from djqueue.storage.commits import is_called_by_sync_code

from .dialects import SqlDialect

T = TypeVar("T")
MAX_CONNECTIONS = 8
"""Connections of one storage that are in use at a time."""
CONNECTION_WAIT = 30.0
"""Seconds to wait for one of them, unless the call's deadline is earlier."""
TEST_AFTER_IDLE = 1.0
"""Seconds after which an idle connection is tested before it is used."""


def is_in_transaction(wrapper: BaseDatabaseWrapper) -> bool:
    """Return whether a thread's connection has a transaction of the caller."""
    return wrapper.in_atomic_block or (wrapper.connection is not None and not wrapper.get_autocommit())


class Idle(NamedTuple):
    """A connection that waits for its next use."""

    wrapper: BaseDatabaseWrapper
    since: float
    """Monotonic seconds."""


class OwnConnections:
    """A pool of connections to the database of a storage. Threads may use it at the same time.

    Until it is opened, and after it is closed, a connection lasts for one use.
    """

    def __init__(self, alias: str, dialect: SqlDialect) -> None:
        self._alias = alias
        self._dialect = dialect
        self.is_open = False
        self._inherited: list[BaseDatabaseWrapper] = []
        self._of_loop: BaseDatabaseWrapper | None = None
        self._reset()
        after_fork(self._forget)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._loop_lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_CONNECTIONS)
        self._idle: list[Idle] = []

    @property
    def serve_loop(self) -> bool:
        """Whether one of them is for the thread of an event loop."""
        return self._of_loop is not None

    def open(self) -> None:
        """Keep connections from now on. Raises what a connection raises."""
        self.is_open = True
        with self.borrow() as wrapper, wrapper.wrap_database_errors:
            self._dialect.prepare(wrapper)
        wrapper = create_connection(self._alias, self._dialect)
        with wrapper.wrap_database_errors:
            if self._dialect.tune_for_loop(wrapper):
                self._of_loop = wrapper
                return
        wrapper.close()

    def close(self) -> None:
        """Close all connections; one that is in use is closed afterwards."""
        with self._lock:
            self.is_open = False
            idle, self._idle = self._idle, []
        with self._loop_lock:
            of_loop, self._of_loop = self._of_loop, None
        for wrapper in (*(found.wrapper for found in idle), of_loop):
            if wrapper is not None:
                wrapper.close()

    @contextmanager
    def borrow_for_loop(self) -> Iterator[BaseDatabaseWrapper | None]:
        """Yield the connection for the thread of an event loop; None if there is none, or it is in use."""
        if not self._loop_lock.acquire(blocking=False):
            yield None
            return
        try:
            yield self._of_loop
        finally:
            self._loop_lock.release()

    @contextmanager
    def borrow(self) -> Iterator[BaseDatabaseWrapper]:
        """Yield a connection, which is the thread's connection of this alias meanwhile.

        Raises StorageUnavailableError if all are in use for too long.
        """
        if not self._slots.acquire(timeout=remaining(CONNECTION_WAIT)):
            raise StorageUnavailableError(
                f"the database {self._alias!r} cannot be used: all {MAX_CONNECTIONS} connections of this "
                "storage are in use. Use fewer threads, or find the slow statement."
            )
        try:
            wrapper = self._take()
            try:
                with as_current(self._alias, wrapper):
                    yield wrapper
            except NotSupportedError:
                # A plan that was kept does not fit a column that a migration has changed.
                self._drop(wrapper)
                raise
            finally:
                self._put_back(wrapper)
        finally:
            self._slots.release()

    def _take(self) -> BaseDatabaseWrapper:
        while True:
            with self._lock:
                if not self._idle:
                    break
                found = self._idle.pop()
            if not self._dialect.has_clock or monotonic() - found.since < TEST_AFTER_IDLE:
                return found.wrapper
            if found.wrapper.is_usable():
                return found.wrapper
            self._drop(found.wrapper)
        return create_connection(self._alias, self._dialect)

    def _put_back(self, wrapper: BaseDatabaseWrapper) -> None:
        if wrapper.connection is None:
            return
        if wrapper.errors_occurred:
            if not wrapper.is_usable():
                self._drop(wrapper)
                return
            wrapper.errors_occurred = False
        with self._lock:
            if self.is_open:
                self._idle.append(Idle(wrapper, monotonic()))
                return
        wrapper.close()

    def _drop(self, wrapper: BaseDatabaseWrapper) -> None:
        """Close a broken connection, and those that were idle: the server has probably closed them all."""
        with self._lock:
            idle, self._idle = self._idle, []
        for one in (wrapper, *(found.wrapper for found in idle)):
            one.close()

    def _forget(self) -> None:
        """Leave the parent's connections alone in a forked child: closing them would end its sessions."""
        self._inherited += [found.wrapper for found in self._idle]
        if self._of_loop is not None:
            self._inherited.append(self._of_loop)
            self._of_loop = None
        self.is_open = False
        self._reset()


def create_connection(alias: str, dialect: SqlDialect) -> BaseDatabaseWrapper:
    """Open a connection that any thread may use, one at a time."""
    wrapper = connections.create_connection(alias)
    options = {**dialect.connection_options, **wrapper.settings_dict["OPTIONS"]}
    # Settings of a session would stay with a connection of Django's pool.
    options.pop("pool", None)
    wrapper.settings_dict = {**wrapper.settings_dict, "OPTIONS": options}
    wrapper.inc_thread_sharing()
    try:
        wrapper.ensure_connection()
        with wrapper.wrap_database_errors:
            dialect.tune(wrapper)
    except BaseException:
        wrapper.close()
        raise
    return wrapper


@contextmanager
def as_current(alias: str, wrapper: BaseDatabaseWrapper) -> Iterator[None]:
    """Make a connection the thread's connection of its alias, which the ORM uses."""
    usual = connections[alias]
    connections[alias] = wrapper
    try:
        yield
    finally:
        connections[alias] = usual


class CallThread:
    """The one thread in which a connected storage runs the calls of coroutines."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._executor: ThreadPoolExecutor | None = None
        self._ident: int | None = None
        after_fork(self._forget)

    def open(self) -> None:
        """Run calls in the thread from now on."""
        if self._executor is None:
            self._executor = ThreadPoolExecutor(
                1, thread_name_prefix="djqueue-storage", initializer=self._note_thread
            )

    def close(self) -> None:
        """End the thread after the calls that it has."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        try:
            executor.submit(lambda: connections[self._alias].close())
        except RuntimeError:
            return  # At exit, Python ends the threads of executors before it calls the functions of `atexit`.
        executor.shutdown(wait=threading.get_ident() != self._ident)

    def is_used(self) -> bool:
        """Return whether a call of this coroutine would run in the thread."""
        return self._executor is not None and not is_called_by_sync_code()

    async def call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function in the thread; in the caller's own one if it may have a transaction there."""
        executor = self._executor
        if executor is None or not self.is_used():
            return await sync_to_async(method, thread_sensitive=True)(*args, **kwargs)
        run = contextvars.copy_context().run
        call = partial(run, partial(method, *args, **kwargs))
        return await asyncio.get_running_loop().run_in_executor(executor, call)

    def _note_thread(self) -> None:
        self._ident = threading.get_ident()

    def _forget(self) -> None:
        self._executor = None
