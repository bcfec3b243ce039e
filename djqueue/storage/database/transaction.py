"""Transactions: their statements, what follows their commits, and what those of one storage share."""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any, NamedTuple, Protocol, TypeVar

from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from djqueue.core.clock import Clock
from djqueue.core.enginejob import EngineJob, incident_of
from djqueue.core.ids import IdSource
from djqueue.core.job import EnqueueResult, Event, Incident
from djqueue.core.metrics import Tiers
from djqueue.core.options import JobKey
from djqueue.core.policies import DEFAULT_POLICY, LimiterPolicy, QueuePolicy
from djqueue.core.procfs import boot_of
from djqueue.core.states import State
from djqueue.storage import commits
from djqueue.storage.tables.clock import DatabaseClock, set_right
from djqueue.storage.tables.dberrors import named

from .connections import OwnConnections, is_in_transaction
from .dialects import (
    PLAIN_WRITE,
    Constants,
    Insertion,
    NewRows,
    Row,
    WriteMode,
    dialect_for,
    in_one,
    roll_back,
)

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
ON_LOOP = WriteMode(waits=False)
"""For the thread of an event loop."""
TAKEN = "23505"
"""SQLSTATE of a key that another transaction has inserted."""
REPEATS = 10
"""Maximum number of times that a transaction is repeated after conflicts with others."""
SEARCH_EVERY = 100
"""Milliseconds after which a claim searches all queues again, even if those it knows have ready jobs."""


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


class ReadyQueues:
    """The queues in which the last search found ready jobs, so that most claims need not search.

    A process forgets them after a short time, and when it learns of a job in another queue.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...] | None, tuple[int, list[str]]] = {}

    def forget(self, woken: Iterable[str]) -> None:
        """Search again if one of these queues, in which jobs may have become ready, is not known."""
        woken = frozenset(woken)
        known = self._known
        if any(not woken.issubset(names) for _, names in known.values()):
            self._known = {}

    def get(self, queues: tuple[str, ...] | None, tick: int) -> list[str]:
        """Return the queues with ready jobs among these (None: all), as far as they are known."""
        until, names = self._known.get(queues, (0, []))
        return names if until - SEARCH_EVERY <= tick < until else []

    def set(self, queues: tuple[str, ...] | None, tick: int, names: list[str]) -> None:
        """Record what a search has found."""
        self._known = {queues: (tick + SEARCH_EVERY, names)}


class Unpublished:
    """Events of a transaction of this process, until they are delivered here."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events


class EventSink(Protocol):
    """Takes the events of transactions; `SqlEvents`."""

    def has_subscribers(self, queue: str) -> bool:
        """Return whether this process has subscribers to a queue."""

    def store(self, tx: "Tx", events: Sequence[Event]) -> None:
        """Write events for other processes, as part of the transaction."""

    def begin(self, events: Sequence[Event]) -> Unpublished | None:
        """Record that events are about to be committed."""

    def forget(self, unpublished: Unpublished | None) -> None:
        """Record that events were rolled back."""

    def publish(self, unpublished: Unpublished) -> None:
        """Deliver committed events to the subscribers of this process."""


class WakeSink(Protocol):
    """Wakes those who wait for jobs; `Wake`."""

    def notice(self, tx: "Tx") -> tuple[str, Sequence[Any]]:
        """Return the end of a statement with one column of texts that notifies other processes of jobs that
        may be claimable, and its parameters; its rows are NULL.
        """

    def send(self, tx: "Tx", observed: Collection[str]) -> None:
        """Notify other processes, as part of the transaction."""

    def local(self, woken: set[str]) -> None:
        """Wake the listeners of this process, after the commit."""


class Hooks(NamedTuple):
    """The parts of the storage to which transactions pass something on."""

    events: EventSink
    wake: WakeSink
    settle: Callable[["Tx"], None]
    """Applies the ends of jobs to those that wait for them."""
    notify_incidents: Callable[[Sequence[Incident]], None]
    flush_buffer: Callable[[], None]
    """Lets a call see the jobs that this process has enqueued before."""


class Database:
    """A database of the project as one storage uses it: its transactions, and what they share.

    Args:
        alias: Alias in `DATABASES`.
        policies: The policies of single queues.
        limiters: The policies of limiters.
        clock: The source of time; by default that of the database server, or of this machine for SQLite.
        metrics: How long metrics are kept.
        notify: PostgreSQL notifies workers and subscribers of what has happened elsewhere.
        timeout: Seconds for which a call waits for locks; by default as the database's settings say.
        has_settings: Whether the policies are those of the project; otherwise the key modes of queues are
            looked up.
    """

    hooks: Hooks

    def __init__(
        self,
        alias: str,
        *,
        policies: Mapping[str, QueuePolicy],
        limiters: Mapping[str, LimiterPolicy],
        clock: Clock | None,
        metrics: Tiers,
        notify: bool,
        timeout: float | None,
        has_settings: bool,
        random: Random,
    ) -> None:
        self.alias = alias
        self.notify = notify
        self.has_settings = has_settings
        self.dialect = dialect_for(alias, has_sessions=notify, timeout=timeout)
        self.clock: Clock = clock or DatabaseClock(alias)
        # A server has a clock for all; without the ID of the machine's boot, its own clock must do.
        self.follows_restarts = not self.dialect.has_clock and boot_of() != ""
        self.ids = IdSource()
        self.random = random
        self.metrics = metrics
        self.limiter_policies = dict(limiters)
        self._policies = dict(policies)
        self._rotation = itertools.count()
        self.ready_queues = ReadyQueues()
        self.used_until: dict[str, int] = {}
        """When this process records again that a queue is used, in UTC milliseconds."""
        self.letter_room: dict[str, int] = {}
        """Dead letters that this process may add to a queue before it counts them again."""
        self.connections = OwnConnections(alias, self.dialect)
        self.transactions = Transactions(self)

    def policy(self, queue: str) -> QueuePolicy:
        """Return the configuration of a queue."""
        return self._policies.get(queue, DEFAULT_POLICY)

    def follow_mode(self, queue: str, mode: str) -> None:
        """Use a queue in this key mode from now on."""
        self._policies[queue] = replace(self.policy(queue), key_mode=mode)

    def policies(self) -> Mapping[str, QueuePolicy]:
        """Return the configuration of the queues that have one."""
        return self._policies

    def tick(self) -> int:
        """Return milliseconds by the clock of leases and rates."""
        return self.clock.elapsed() if self.follows_restarts else self.clock.now()

    def rotation(self) -> int:
        """Return the next number, so that each claim starts with another queue."""
        return next(self._rotation)

    def is_in_transaction(self) -> bool:
        """Return whether the thread's connection has a transaction of the caller."""
        return is_in_transaction(connections[self.alias])

    def write(self, work: "Callable[[Tx], T]", *, durable: bool = False, numbers: int = 0) -> T:
        """Run a function in a transaction that writes; errors name the database and what to do.

        Args:
            work: The function, which may be called again after a conflict with another transaction.
            durable: Whether the commit must be on disk, regardless of the connection's settings.
            numbers: How many of `Tx.numbers` it needs, if that is known.
        """
        self.hooks.flush_buffer()
        with named(self.alias):
            return self.transactions.write(work, durable=durable, numbers=numbers)

    def read(self, work: "Callable[[Tx], T]", *, is_single: bool = False) -> T:
        """Run a function in a transaction that reads; errors name the database and what to do.

        Args:
            work: The function.
            is_single: It runs one statement, which needs no transaction.
        """
        self.hooks.flush_buffer()
        with named(self.alias):
            return self.transactions.read(work, is_single=is_single)


class Tx:
    """A transaction, and what follows after its commit.

    Attributes:
        database: The database, and what its transactions share.
        now: UTC milliseconds at its start.
        tick: Milliseconds at its start by the clock of leases and rates.
    """

    def __init__(self, database: Database, cursor: Any, numbers: Sequence[int] = ()) -> None:
        self.database = database
        self.dialect = database.dialect
        self.now = database.clock.now()
        self.tick = database.tick()
        self.woken: set[str] = set()
        """Queues in which jobs may have become claimable."""
        self.noticed: frozenset[str] = frozenset()
        """Queues of `woken` of which other processes have been notified."""
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
        self.expires = True
        """Whether a claim may fail jobs whose ttl has ended."""
        self.observed: set[str] | None = None
        """Queues whose events other processes may have subscribed to; None until they are read."""
        self._held: set[str] = set()
        """Names that it has locked."""
        self._tallies: dict[str, list[int]] = {}
        self._is_touched = False
        self._afterwards: list[Callable[[], object]] = []
        self._kept: dict[str, dict[str, int]] = {}
        self._cursor = cursor
        self._numbers = numbers
        """Numbers that came with the beginning."""
        self._unnoted: list[tuple[EngineJob, Sequence[str]]] = []
        """New jobs of which no event is noted yet: the options that several have in common, and their ids."""
        self._inserts: list[Insertion] = []
        """Inserts that are sent with the next statement, or just before it."""

    # Statements.

    def rows(self, statement: str, *parameters: Any) -> list[Row]:
        """Return the rows of a statement."""
        rows: list[Row] = self._ready_cursor().execute(self.dialect.text(statement), parameters).fetchall()
        return rows

    def row(self, statement: str, *parameters: Any) -> Row | None:
        """Return the first row of a statement."""
        row: Row | None = self._ready_cursor().execute(self.dialect.text(statement), parameters).fetchone()
        return row

    def value(self, statement: str, *parameters: Any) -> Any:
        """Return the first value of the first row of a statement; None without rows."""
        row = self.row(statement, *parameters)
        return None if row is None else row[0]

    def script(self, statements: str) -> None:
        """Run several statements without parameters in one exchange with the server."""
        self._ready_cursor().execute(statements)

    def run(self, statement: str, *parameters: Any) -> int:
        """Run a statement; return the number of its rows."""
        count: int = self._ready_cursor().execute(self.dialect.text(statement), parameters).rowcount
        return count

    def many(self, statement: str, rows: Iterable[Row]) -> None:
        """Run a statement once for each row of parameters."""
        self._ready_cursor().executemany(self.dialect.text(statement), rows)

    def among(self, column: str, values: Sequence[Any]) -> tuple[str, Any]:
        """Return a condition that a column has one of these values, and its one parameter."""
        return self.dialect.among(column, values)

    def insert(
        self, table: str, columns: Sequence[str], rows: Sequence[Row], constants: Constants = ()
    ) -> None:
        """Insert rows, at the latest before the next statement: several inserts may be sent as one."""
        if not rows:
            return
        new = NewRows(table, tuple(columns), rows, constants)
        if insertion := self.dialect.insertion(new):
            self._inserts.append(insertion)
        else:
            self.dialect.insert(self._ready_cursor(), new)

    def rows_with_inserts(self, statement: str, *parameters: Any) -> list[Row]:
        """Return the rows of a statement that does not need to see the rows inserted just before: PostgreSQL
        takes all of them in one exchange.
        """
        inserts, self._inserts = self._inserts, []
        given = self.dialect.text(statement), parameters
        rows: list[Row] = self._cursor.execute(*in_one([*inserts, given])).fetchall()
        return rows

    def _ready_cursor(self) -> Any:
        """Return the cursor, after the inserts that have not been sent."""
        if self._inserts:
            inserts, self._inserts = self._inserts, []
            self._cursor.execute(*in_one(inserts))
        return self._cursor

    def numbers(self, count: int) -> Sequence[int]:
        """Return ascending numbers that nothing else has."""
        if count <= len(self._numbers):
            numbers, self._numbers = self._numbers[:count], self._numbers[count:]
            return numbers
        return self.dialect.numbers(self._ready_cursor(), count)

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
            self.dialect.lock(self._ready_cursor(), missing)

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
            self._held |= self.dialect.try_lock(self._ready_cursor(), list(missing))
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
        changes = self._tallies.get(queue, [0] * WIDTH)
        return {
            state: int(number) + changes[_STATE[state]] for state, number in zip(STATES, row, strict=True)
        }

    def forget(self, queue: str) -> dict[State, int]:
        """Drop what was counted of a queue; return by how much its numbers of jobs by state have changed."""
        self._kept.pop(queue, None)
        changes = self._tallies.pop(queue, [0] * WIDTH)
        return {state: changes[at] for state, at in _STATE.items()}

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
        changes = self._kept.get(queue, {})
        return {what: int(number) + changes.get(what, 0) for what, number in zip(KEPT, row, strict=True)}

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
            # PostgreSQL locks the tables of the inserts before it reads: a subscriber that looks for open
            # transactions that write after it has subscribed finds this one, or this one finds it.
            read = "SELECT name FROM djqueue_observed WHERE until > ?"
            notice, values = self.database.hooks.wake.notice(self)
            rows = self.rows_with_inserts(read + notice, self.now, *values)
            self.observed = {name for (name,) in rows if name is not None}
        return queue in self.observed or self.database.hooks.events.has_subscribers(queue)

    def note(self, job: EngineJob, event: str, items: int = 0, *, queue: str | None = None) -> None:
        """Add an event for the subscribers of a queue, if it has any."""
        self.touch()
        queue = job.queue if queue is None else queue
        if self.is_observed(queue):
            self.events.append(Event(queue, job.id, job.name, event, job.state, self.now, items))

    def note_new(self, model: EngineJob, ids: Sequence[str]) -> None:
        """Add an event for each of some new jobs at the end: on PostgreSQL, all of the transaction is then
        sent at once.
        """
        self._unnoted.append((model, ids))

    def note_incident(self, job: EngineJob, event: str) -> None:
        """Add what happened to a job beyond what its worker reported."""
        self.incidents.append(incident_of(job, event))

    def settle(self) -> None:
        """Apply the ends of jobs to those that wait for them."""
        if self.ended:
            self.database.hooks.settle(self)

    def flush(self) -> None:
        """Apply the ends of jobs, and write what was counted and noted; the last step before the commit."""
        self.settle()
        self._is_touched = self._is_touched or bool(self._unnoted)
        rows = [(queue, self.now, *tally) for queue, tally in self._tallies.items() if any(tally)]
        if self._is_touched and not rows:
            rows = [("", self.now, *[0] * WIDTH)]
        self.insert("djqueue_tally", TALLY_COLUMNS, rows)
        if self._kept:
            kept = [
                (queue, *changes.values()) for queue, changes in self._kept.items() if any(changes.values())
            ]
            self.insert("djqueue_retention_tally", ("queue", *KEPT), kept)
        for model, ids in self._unnoted:
            if self.is_observed(model.queue):
                for model.id in ids:
                    self.note(model, "enqueued")
        observed = [event for event in self.events if event.queue in (self.observed or ())]
        if observed:
            self.database.hooks.events.store(self, observed)
        self.database.hooks.wake.send(self, {event.queue for event in observed})
        self._ready_cursor()

    def done(self, unpublished: Unpublished | None) -> None:
        """Wake, publish and announce; the first step after the commit.

        Args:
            unpublished: The events, as `SqlEvents.begin` has returned them before the commit.
        """
        for call in self._afterwards:
            call()
        self.database.hooks.wake.local(self.woken)
        if unpublished is not None:
            self.database.hooks.events.publish(unpublished)
        if self.incidents:
            self.database.hooks.notify_incidents(self.incidents)


class Transactions:
    """Runs functions in transactions: in the caller's own if it has one, otherwise each in one of its own.

    A storage that was connected uses connections of its own; otherwise the calling thread's.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._alias = database.alias
        self._dialect = database.dialect
        self._connections = database.connections

    def write(self, work: Callable[[Tx], T], *, durable: bool = False, numbers: int = 0) -> T:
        """Run a function in a transaction that writes. It may be repeated after a conflict with another one.

        Args:
            work: The function.
            durable: Whether the commit must be on disk, regardless of the connection's settings.
            numbers: How many of `Tx.numbers` it needs, if that is known.
        """
        wrapper = connections[self._alias]
        if is_in_transaction(wrapper):
            # After any other conflict the caller's transaction is lost.
            join = partial(self._join, wrapper, work, durable, numbers)
            return self._repeated(join, lambda cause: cause == TAKEN)
        mode = WriteMode(durable=durable, numbers=numbers)
        answer, done = self._committed(self.connection, work, mode)
        done()
        return answer

    def write_apart(self, work: Callable[[Tx], T], on: BaseDatabaseWrapper | None = None) -> T:
        """Like `write`, but never in the caller's transaction.

        Args:
            work: The function.
            on: The connection; by default one of the storage.
        """
        answer, done = self._committed(
            lambda: self._connections.borrow() if on is None else nullcontext(on), work
        )
        done()
        return answer

    def write_unless_locked(self, work: Callable[[Tx], T]) -> tuple[T] | None:
        """Like `write`; None, and nothing done, if it would have to wait for a transaction that stays open.

        In the caller's transaction, it waits.
        """
        if is_in_transaction(connections[self._alias]):
            return (self.write(work),)
        try:
            answer, done = self._committed(
                self.connection, work, WriteMode(waits=not self._dialect.has_clock)
            )
        except Exception as error:
            if not self._dialect.is_locked(error.__cause__ or error):
                raise
            return None
        done()
        return (answer,)

    def write_at_once(self, work: Callable[[Tx], T]) -> tuple[T] | None:
        """Like `write_apart`, on the thread of an event loop; None, and nothing done, if it would wait."""
        with self._connections.borrow_for_loop() as wrapper:
            outcome = None if wrapper is None else self._commit(wrapper, work, ON_LOOP)
        if outcome is None:
            return None
        answer, done = outcome
        done()
        return (answer,)

    def _committed(
        self,
        connection: Callable[[], AbstractContextManager[BaseDatabaseWrapper]],
        work: Callable[[Tx], T],
        mode: WriteMode = PLAIN_WRITE,
    ) -> tuple[T, Callable[[], None]]:
        """Run a function in a transaction of a connection, and again after conflicts.

        Returns:
            Its answer, and what is to be called after the commit.
        """

        def run() -> tuple[T, Callable[[], None]]:
            with connection() as own:
                own.ensure_connection()
                set_right(self._database.clock)
                outcome = self._commit(own, work, mode)
                assert outcome is not None
                return outcome

        return self._repeated(run)

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
                cursor = self._dialect.cursor(wrapper)
                with self._dialect.limited(wrapper, cursor):
                    return work(Tx(self._database, cursor))
        with self.connection() as own:
            own.ensure_connection()
            set_right(self._database.clock)
            is_limited = self._dialect.is_limited(own)
            with self._naming_holder(own), own.wrap_database_errors:
                cursor = self._dialect.cursor(own)
                tx = Tx(self._database, cursor)
                if is_single and is_limited:
                    return work(tx)
                cursor.execute(self._dialect.snapshot)
                try:
                    with nullcontext() if is_limited else self._dialect.limited(own, cursor):
                        return work(tx)
                finally:
                    roll_back(cursor)

    @contextmanager
    def _naming_holder(self, wrapper: BaseDatabaseWrapper) -> Iterator[None]:
        """Add to the error of a call that waited for a lock in vain whose lock it is."""
        try:
            yield
        except Error as error:
            if self._dialect.is_locked(error.__cause__ or error):
                error.add_note(self._dialect.holder(wrapper))
            raise

    def connection(self) -> AbstractContextManager[BaseDatabaseWrapper]:
        """Return the thread's connection meanwhile: one of the storage, if it was connected."""
        own = self._connections
        return own.borrow() if own.is_open else nullcontext(connections[self._alias])

    def _commit(
        self, wrapper: BaseDatabaseWrapper, work: Callable[[Tx], T], mode: WriteMode
    ) -> tuple[T, Callable[[], None]] | None:
        """Run a function in a transaction of a connection; return its answer, and what follows. None if that
        would wait and must not.
        """
        unpublished = None
        try:
            with self._naming_holder(wrapper) if mode.waits else nullcontext(), wrapper.wrap_database_errors:
                cursor = self._dialect.cursor(wrapper)
                with self._dialect.writing(wrapper, cursor, mode) as given:
                    if given is None:
                        return None
                    tx = Tx(self._database, cursor, given)
                    answer = work(tx)
                    tx.flush()
                    unpublished = self._database.hooks.events.begin(tx.events)
        except BaseException:
            self._database.hooks.events.forget(unpublished)
            raise
        return answer, partial(tx.done, unpublished)

    def _join(self, wrapper: BaseDatabaseWrapper, work: Callable[[Tx], T], durable: bool, numbers: int) -> T:
        wrapper.validate_no_broken_transaction()
        set_right(self._database.clock)
        # Within a block of the caller, the dialect may send a savepoint in fewer steps than Django does.
        block = nullcontext() if wrapper.in_atomic_block else transaction.atomic(using=self._alias)
        with self._naming_holder(wrapper), block, wrapper.wrap_database_errors:
            cursor = self._dialect.cursor(wrapper)
            if durable:
                self._dialect.make_durable(cursor)
            with self._dialect.nested(wrapper, cursor, numbers=numbers) as given:
                tx = Tx(self._database, cursor, given)
                answer = work(tx)
                tx.flush()
            # Nothing but the callback refers to the events: Django drops it when they are rolled back.
            done = partial(tx.done, self._database.hooks.events.begin(tx.events))
            commits.note(self._alias, tx.results, done)
        return answer
