"""The features that only some storages have. A storage declares them in one frozen `Capabilities`; nothing
is detected.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from djqueue.core.clock import Clock
from djqueue.core.job import Batch, EnqueueResult
from djqueue.core.options import JobKey
from djqueue.core.states import State
from djqueue.storage.export import Feed

from .bulkwrites import BulkWriteReports
from .export import Export
from .staging import Staging


class TransactionalEnqueue(Protocol):
    """Jobs that join the caller's open database transaction."""

    can_leave: bool = True
    """Whether jobs with `durable=False` are enqueued while that transaction is open."""

    def alias_for(self, batch: Batch) -> str | None:
        """Return the alias of the database whose open transaction these jobs would join, if any."""

    async def aalias_for(self, batch: Batch) -> str | None:
        """Async version of `alias_for`."""

    def uncommitted_in(self, queue: str, id: str) -> str | None:
        """Return the alias of the database in whose open transaction the caller enqueued the job, if any."""

    async def auncommitted_in(self, queue: str, id: str) -> str | None:
        """Async version of `uncommitted_in`."""


class NoTransactions(TransactionalEnqueue):
    """Jobs never join a transaction of the caller."""

    def alias_for(self, batch: Batch) -> str | None:
        return None

    async def aalias_for(self, batch: Batch) -> str | None:
        return None

    def uncommitted_in(self, queue: str, id: str) -> str | None:
        return None

    async def auncommitted_in(self, queue: str, id: str) -> str | None:
        return None


class SchedulerRole(Protocol):
    """The scheduler of a storage that needs one: one process at a time."""

    starts_here: bool
    """Whether `Storage.connect` makes this process the scheduler; if not, it uses that of another."""
    on_lost: Callable[[], None] | None
    """Called when another process has become the scheduler: this one can write nothing more."""

    @property
    def is_here(self) -> bool:
        """Whether this process is the scheduler."""

    @property
    def clock(self) -> Clock:
        """The clock by which jobs are due."""

    def refused(self, ids: Iterable[str]) -> list[JobKey]:
        """Return the jobs with one of these ids, in any queue, that only the memory of the scheduler in this
        process has, because the database refuses their rows.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The optional features of a storage; None stands for a missing one."""

    in_process: bool = False
    """Only this process sees the jobs, and runs them."""
    max_in_flight: int = 1
    """Maximum number of concurrent `afinish` calls of a worker. More than one helps if the
    storage is another process, which works while this one does."""
    database: str | None = None
    """The alias of the database that holds the jobs."""
    mirrored_states: frozenset[State] = frozenset()
    """States whose jobs have rows in the tables."""
    transactions: TransactionalEnqueue = NoTransactions()
    """Whether jobs join the caller's open transaction."""
    scheduler: SchedulerRole | None = None
    """The scheduler that the storage needs."""
    enqueue_directly: Callable[[Sequence[Batch]], list[EnqueueResult]] | None = None
    """Enqueues at once, without an outbox and without limits on the size of queues."""
    has_outbox: bool = False
    """Some queues keep jobs in an outbox table until they reach the server."""
    on_outbox: Callable[[Callable[[], None]], None] | None = None
    """Calls a function whenever jobs may have been written to the outbox; None: the relay has to look."""
    relayed: bool = False
    """Another process enqueues the jobs, and sends `job_enqueued`."""
    changes: Any = None
    """The stream of changes, for the mirror in the tables: `djqueue.storage.redis.changes.ChangeStream`."""
    staging: Staging | None = None
    """Jobs that are written first and published all together."""
    bulk_writes: BulkWriteReports | None = None
    """The reports of bulk writes."""
    export: Export | None = None
    """Reads of the whole storage, in parts and pages of columns."""
    feed: Feed | None = None
    """The history of events, to be followed from a position."""
