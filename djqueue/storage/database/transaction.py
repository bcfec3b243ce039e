"""Transactions: their statements, what follows their commits, and the connections on which they run."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from asgiref.sync import sync_to_async
from django.db import NotSupportedError, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.deadlines import remaining
from djqueue.core.enginejob import EngineJob, incident_of
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.job import EnqueueResult, Event, Incident
from djqueue.core.options import JobKey
from djqueue.core.states import State
from djqueue.core.threads import after_fork
from djqueue.storage import commits
from djqueue.storage.base import P
from djqueue.storage.commits import is_called_by_sync_code
from djqueue.storage.tables.clock import set_right

from .dialects import Row, SqlDialect, roll_back

if TYPE_CHECKING:
    from .events import Unpublished
    from .storage import DatabaseStorage

T = TypeVar("T")
U = TypeVar("U")

TALLY = ("enqueued", "started", "completed", "retried", "failed", "cancelled", "stalled")
STATES = tuple(State)
TALLY_COLUMNS = ("queue", "at", *TALLY, *(f"in_{state.value}" for state in STATES))
KEPT = ("completed", "completed_bytes", "cancelled", "cancelled_bytes", "result_bytes", "letter_bytes")
"""Columns of the sums that queues with bounds keep."""
_TOTAL = {name: at for at, name in enumerate(TALLY)}
_STATE = {state: at for at, state in enumerate(STATES, len(TALLY))}
WIDTH = len(TALLY) + len(STATES)
TAKEN = "23505"
"""SQLSTATE of a key that another transaction has inserted."""
REPEATS = 10
"""Maximum number of times that a transaction is repeated after conflicts with others."""


def limiter_lock(name: str) -> str:
    """Return the name that a limiter is locked by."""
    return f"limiter:{name}"


def use_lock(queue: str) -> str:
    """Return the name that the first use of a queue is locked by."""
    return f"use:{queue}"


def limits_lock(queue: str) -> str:
    """Return the name that the limits of a queue are locked by."""
    return f"limits:{queue}"


def group_lock(queue: str, group: str) -> str:
    """Return the name that a group is locked by, which `free_group` of PostgreSQL makes, too."""
    return f"group:{queue}:{group}"


def key_lock(queue: str, key: str) -> str:
    """Return the name that a unique key is locked by."""
    return f"key:{queue}:{key}"


class Tx:
    """A transaction, and what follows after its commit.

    Attributes:
        now: UTC milliseconds at its start.
        tick: Milliseconds at its start by the clock of leases and rates.
    """

    def __init__(self, storage: "DatabaseStorage", dialect: SqlDialect, cursor: Any) -> None:
        self.storage = storage
        self.dialect = dialect
        self.now = storage.clock.now()
        self.tick = storage.tick()
        self.woken: set[str] = set()
        """Queues in which jobs may have become claimable."""
        self.incidents: list[Incident] = []
        self.events: list[Event] = []
        self.used: set[str] = set()
        """Queues of which the transaction has recorded that they are used."""
        self.ended: list[tuple[JobKey, State, list[int]]] = []
        """Jobs that have ended, with their last states and the keys of the jobs that wait for them."""
        self.results: list[EnqueueResult] = []
        """Jobs that the transaction enqueues."""
        self.waits = True
        """Whether `lock_in_turn` may wait."""
        self.observed: set[str] | None = None
        """Queues whose events other processes may have subscribed to; None until they are read."""
        self._held: set[str] = set()
        """Names that it has locked."""
        self._tallies: dict[str, list[int]] = {}
        self._is_touched = False
        self._afterwards: list[Callable[[], object]] = []
        self._kept: dict[str, dict[str, int]] = {}
        self._cursor = cursor

    # Statements.

    def rows(self, statement: str, *parameters: Any) -> list[Row]:
        """Return the rows of a statement."""
        found: list[Row] = self._cursor.execute(self.dialect.text(statement), parameters).fetchall()
        return found

    def row(self, statement: str, *parameters: Any) -> Row | None:
        """Return the first row of a statement."""
        found: Row | None = self._cursor.execute(self.dialect.text(statement), parameters).fetchone()
        return found

    def value(self, statement: str, *parameters: Any) -> Any:
        """Return the first value of the first row of a statement; None without rows."""
        found = self.row(statement, *parameters)
        return None if found is None else found[0]

    def script(self, statements: str) -> None:
        """Run several statements without parameters in one exchange with the server."""
        self._cursor.execute(statements)

    def run(self, statement: str, *parameters: Any) -> int:
        """Run a statement; return the number of its rows."""
        count: int = self._cursor.execute(self.dialect.text(statement), parameters).rowcount
        return count

    def many(self, statement: str, rows: Iterable[Row]) -> None:
        """Run a statement once for each row of parameters."""
        self._cursor.executemany(self.dialect.text(statement), rows)

    def among(self, column: str, values: Sequence[Any]) -> tuple[str, Any]:
        """Return a condition that a column has one of these values, and its one parameter."""
        return self.dialect.among(column, values)

    def insert(self, table: str, columns: Sequence[str], rows: Sequence[Row]) -> None:
        """Insert rows."""
        if rows:
            self.dialect.insert(self._cursor, table, columns, rows)

    def numbers(self, count: int) -> Sequence[int]:
        """Return ascending numbers that nothing else has."""
        return self.dialect.numbers(self._cursor, count)

    def listed(self, values: Sequence[str]) -> tuple[str, Any]:
        """Return a subquery of texts, whose column is `name`, and its one parameter."""
        return self.dialect.listed(values)

    def lock(self, *keys: str) -> None:
        """Wait until no other transaction holds one of these names, and hold them until the end.

        So that no two transactions wait for each other: limiters first, then the limits of a queue, groups,
        and unique keys; several of one kind in one call. Where that is not possible, `lock_in_turn`.
        """
        missing = [key for key in keys if key not in self._held]
        if missing:
            self._held.update(missing)
            self.dialect.lock(self._cursor, missing)

    def lock_in_turn(self, *keys: str) -> bool:
        """Hold these names until the end; False if that could make two transactions wait for each other.

        A transaction that holds other names does not wait.
        """
        if not self._held and self.waits:
            self.lock(*keys)
        return not self.try_lock(keys)

    def try_lock(self, keys: Iterable[str]) -> set[str]:
        """Hold these names until the end; return those that another transaction holds."""
        missing = set(keys) - self._held
        if missing:
            self._held |= self.dialect.try_lock(self._cursor, list(missing))
        return missing - self._held

    # What follows.

    def count(self, queue: str, total: str, number: int = 1) -> None:
        """Add to a total of a queue, one of `TALLY`."""
        self._tally(queue)[_TOTAL[total]] += number

    def _tally(self, queue: str) -> list[int]:
        tally = self._tallies.get(queue)
        if tally is None:
            tally = self._tallies[queue] = [0] * WIDTH
        return tally

    def counts(self, queue: str) -> dict[State, int]:
        """Return the number of jobs of a queue by state, with those that this transaction has changed."""
        sums = ", ".join(f"COALESCE(SUM(in_{state.value}), 0)" for state in STATES)
        row = self.row(f"SELECT {sums} FROM djqueue_tally WHERE queue = ?", queue) or ()
        mine = self._tallies.get(queue, [0] * WIDTH)
        return {state: int(number) + mine[_STATE[state]] for state, number in zip(STATES, row, strict=True)}

    def forget(self, queue: str) -> dict[State, int]:
        """Drop what was counted of a queue; return by how much its numbers of jobs by state have changed."""
        self._kept.pop(queue, None)
        mine = self._tallies.pop(queue, [0] * WIDTH)
        return {state: mine[at] for state, at in _STATE.items()}

    def touch(self) -> None:
        """Change the version of all queues, for a change that no total or count shows."""
        self._is_touched = True

    def then(self, call: Callable[[], object]) -> None:
        """Call a function after the commit."""
        self._afterwards.append(call)

    def keep(self, queue: str, what: str, number: int) -> None:
        """Add to what a queue with bounds keeps, one of `KEPT`."""
        if number:
            kept = self._kept.get(queue)
            if kept is None:
                kept = self._kept[queue] = dict.fromkeys(KEPT, 0)
            kept[what] += number

    def kept(self, queue: str) -> dict[str, int]:
        """Return what a queue keeps, with what this transaction has changed."""
        sums = ", ".join(f"COALESCE(SUM({what}), 0)" for what in KEPT)
        row = self.row(f"SELECT {sums} FROM djqueue_retention_tally WHERE queue = ?", queue) or ()
        mine = self._kept.get(queue, {})
        return {what: int(number) + mine.get(what, 0) for what, number in zip(KEPT, row, strict=True)}

    def shift(self, queue: str, source: State | None, target: State | None, number: int = 1) -> None:
        """Count jobs that went from one state to another."""
        if source is not target:
            tally = self._tally(queue)
            if source is not None:
                tally[_STATE[source]] -= number
            if target is not None:
                tally[_STATE[target]] += number

    def is_observed(self, queue: str) -> bool:
        """Return whether the events of a queue have subscribers, here or in another process."""
        if self.observed is None:
            found = self.rows("SELECT name FROM djqueue_observed WHERE until > ?", self.now)
            self.observed = {name for (name,) in found}
        return queue in self.observed or self.storage.events.has_subscribers(queue)

    def note(self, job: EngineJob, event: str, items: int = 0, *, queue: str | None = None) -> None:
        """Add an event for the subscribers of a queue, if it has any."""
        self.touch()
        queue = job.queue if queue is None else queue
        if self.is_observed(queue):
            self.events.append(Event(queue, job.id, job.name, event, job.state, self.now, items))

    def note_incident(self, job: EngineJob, event: str) -> None:
        """Add what happened to a job beyond what its worker reported."""
        self.incidents.append(incident_of(job, event))

    def settle(self) -> None:
        """Apply the ends of jobs to those that wait for them."""
        if self.ended:
            from . import dependencies

            dependencies.settle(self)

    def flush(self) -> None:
        """Apply the ends of jobs, and write what was counted and noted; the last step before the commit."""
        self.settle()
        rows = [(queue, self.now, *tally) for queue, tally in self._tallies.items() if any(tally)]
        if self._is_touched and not rows:
            rows = [("", self.now, *[0] * WIDTH)]
        self.insert("djqueue_tally", TALLY_COLUMNS, rows)
        if self._kept:
            kept = [
                (queue, *changes.values()) for queue, changes in self._kept.items() if any(changes.values())
            ]
            self.insert("djqueue_retention_tally", ("queue", *KEPT), kept)
        observed = [event for event in self.events if event.queue in (self.observed or ())]
        if observed:
            self.storage.events.store(self, observed)
        self.storage.wake.send(self, {event.queue for event in observed})

    def done(self, unpublished: "Unpublished | None") -> None:
        """Wake, publish and announce; the first step after the commit.

        Args:
            unpublished: The events, as `SqlEvents.begin` has returned them before the commit.
        """
        for call in self._afterwards:
            call()
        self.storage.wake.local(self.woken)
        if unpublished is not None:
            self.storage.events.publish(unpublished)
        if self.incidents:
            self.storage.notify_incidents(self.incidents)


class Transactions:
    """Runs functions in transactions: in the caller's own if it has one, otherwise each in one of its own.

    A storage that was connected uses connections of its own; otherwise the calling thread's.
    """

    def __init__(self, storage: "DatabaseStorage", alias: str, dialect: SqlDialect) -> None:
        self._storage = storage
        self._alias = alias
        self._dialect = dialect
        self.connections = OwnConnections(alias, dialect)

    def write(self, work: Callable[[Tx], T], *, durable: bool = False) -> T:
        """Run a function in a transaction that writes. It may be repeated after a conflict with another one.

        Args:
            work: The function.
            durable: Whether the commit must be on disk, regardless of the connection's settings.
        """
        wrapper = connections[self._alias]
        if is_in_transaction(wrapper):
            # After any other conflict the caller's transaction is lost.
            return self._repeated(lambda: self._join(wrapper, work, durable), lambda cause: cause == TAKEN)

        def run() -> tuple[T, Callable[[], None]]:
            with self.connection() as own:
                return self._run(own, work, durable=durable)

        found, done = self._repeated(run)
        done()
        return found

    def write_apart(self, work: Callable[[Tx], T], on: BaseDatabaseWrapper | None = None) -> T:
        """Like `write`, but never in the caller's transaction.

        Args:
            work: The function.
            on: The connection; by default one of the storage.
        """

        def run() -> tuple[T, Callable[[], None]]:
            with self.connections.borrow() if on is None else nullcontext(on) as own:
                return self._run(own, work)

        found, done = self._repeated(run)
        done()
        return found

    def write_unless_locked(self, work: Callable[[Tx], T]) -> tuple[T] | None:
        """Like `write`; None, and nothing done, if it would have to wait for a transaction that stays open.

        In the caller's transaction, it waits.
        """
        if is_in_transaction(connections[self._alias]):
            return (self.write(work),)

        def run() -> tuple[T, Callable[[], None]]:
            with self.connection() as own:
                return self._run(own, work, waits=not self._dialect.has_clock)

        try:
            found, done = self._repeated(run)
        except Exception as error:
            if not self._dialect.is_locked(error.__cause__ or error):
                raise
            return None
        done()
        return (found,)

    def write_at_once(self, work: Callable[[Tx], T]) -> tuple[T] | None:
        """Like `write_apart`, on the thread of an event loop; None, and nothing done, if it would wait."""
        with self.connections.borrow_for_loop() as wrapper:
            outcome = None if wrapper is None else self._commit(wrapper, work, waits=False)
        if outcome is None:
            return None
        found, done = outcome
        done()
        return (found,)

    def _repeated(self, run: Callable[[], U], matters: Callable[[str], bool] = lambda _: True) -> U:
        """Call a function again after conflicts with other transactions, of these kinds (SQLSTATE)."""
        for _ in range(REPEATS):
            try:
                return run()
            except Exception as error:
                cause = error.__cause__ or error
                if not self._dialect.may_repeat(cause) or not matters(getattr(cause, "sqlstate", "")):
                    raise
        return run()

    def read(self, work: Callable[[Tx], T], *, is_single: bool = False) -> T:
        """Run a function that only reads, all of it at one moment.

        Args:
            work: The function.
            is_single: It runs one statement, which needs no transaction.
        """
        wrapper = connections[self._alias]
        if is_in_transaction(wrapper):
            with wrapper.wrap_database_errors:
                return work(Tx(self._storage, self._dialect, self._dialect.cursor(wrapper)))
        with self.connection() as own:
            own.ensure_connection()
            set_right(self._storage.clock)
            with own.wrap_database_errors:
                cursor = self._dialect.cursor(own)
                tx = Tx(self._storage, self._dialect, cursor)
                if is_single:
                    return work(tx)
                cursor.execute(self._dialect.snapshot)
                try:
                    return work(tx)
                finally:
                    roll_back(cursor)

    def connection(self) -> AbstractContextManager[BaseDatabaseWrapper]:
        """Return the thread's connection meanwhile: one of the storage, if it was connected."""
        return (
            self.connections.borrow() if self.connections.is_open else nullcontext(connections[self._alias])
        )

    def _run(
        self,
        wrapper: BaseDatabaseWrapper,
        work: Callable[[Tx], T],
        *,
        durable: bool = False,
        waits: bool = True,
    ) -> tuple[T, Callable[[], None]]:
        wrapper.ensure_connection()
        set_right(self._storage.clock)
        outcome = self._commit(wrapper, work, durable=durable, waits=waits)
        assert outcome is not None
        return outcome

    def _commit(
        self,
        wrapper: BaseDatabaseWrapper,
        work: Callable[[Tx], T],
        *,
        durable: bool = False,
        waits: bool = True,
    ) -> tuple[T, Callable[[], None]] | None:
        """Run a function in a transaction of a connection; return its answer, and what follows. None if that
        would wait and must not.
        """
        unpublished = None
        try:
            with wrapper.wrap_database_errors:
                cursor = self._dialect.cursor(wrapper)
                opened = self._dialect.writing(wrapper, cursor, durable=durable, waits=waits)
                with opened as is_open:
                    if not is_open:
                        return None
                    tx = Tx(self._storage, self._dialect, cursor)
                    found = work(tx)
                    tx.flush()
                    unpublished = self._storage.events.begin(tx.events)
        except BaseException:
            self._storage.events.forget(unpublished)
            raise
        return found, partial(tx.done, unpublished)

    def _join(self, wrapper: BaseDatabaseWrapper, work: Callable[[Tx], T], durable: bool) -> T:
        wrapper.validate_no_broken_transaction()
        set_right(self._storage.clock)
        with transaction.atomic(using=self._alias), wrapper.wrap_database_errors:
            cursor = self._dialect.cursor(wrapper)
            if durable:
                self._dialect.make_durable(cursor)
            tx = Tx(self._storage, self._dialect, cursor)
            found = work(tx)
            tx.flush()
            # Nothing but the callback refers to the events: Django drops it when they are rolled back.
            done = partial(tx.done, self._storage.events.begin(tx.events))
            commits.note(self._alias, tx.results, done)
        return found


def is_in_transaction(wrapper: BaseDatabaseWrapper) -> bool:
    """Return whether a thread's connection has a transaction of the caller."""
    return wrapper.in_atomic_block or (wrapper.connection is not None and not wrapper.get_autocommit())


# Connections and the thread of a connected storage, which belong to it and not to the process's threads.


MAX_CONNECTIONS = 8
"""Connections of one storage that are in use at a time."""
CONNECTION_WAIT = 30.0
"""Seconds to wait for one of them, unless the call's deadline is earlier."""
UNTESTED = 1.0
"""Seconds after which an idle connection is tested before it is used."""


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
            if not self._dialect.has_clock or time.monotonic() - found.since < UNTESTED:
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
                self._idle.append(Idle(wrapper, time.monotonic()))
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
        if executor is not None:
            executor.submit(lambda: connections[self._alias].close())
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
