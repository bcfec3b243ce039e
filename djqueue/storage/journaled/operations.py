"""The operations of the contract, in one table: who answers each of them, and how long that may take.

The scheduler's socket serves them under the same names. Besides these, it serves pings, wake-ups of the
inbox, and subscriptions.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

from djqueue.core.job import Batch

from ..base import Storage
from ..facets import Jobs, Limiters, Queues, Workers
from ..reads import Reads
from ..tables.dialects import Dialect

DEADLINE = 30.0
"""Seconds that a request may take while the scheduler answers pings; a scheduler that does not is left
earlier.
"""
LONG_DEADLINE = 600.0
"""Seconds for operations on any number of jobs."""


class AnsweredBy(Enum):
    """The part that answers an operation in a process that is not the scheduler."""

    SCHEDULER = "the scheduler; raises an error if none is running"
    LEASE_HOLDER = "the scheduler; if none is running, this process, which takes the lease for the operation"
    SCHEDULER_OR_TABLES = "the scheduler; if none answers, the tables"
    CONNECTED_OR_TABLES = "the scheduler if this process is connected to it; otherwise the tables"
    TABLES = "the tables"


class Concern(NamedTuple):
    """The jobs to load before a change is made without a scheduler."""

    ids: Sequence[str] | None
    """Jobs of the queue; None: all of them."""
    into: str | None = None
    """Another queue, to which they move."""


def _these(ids: Sequence[str], *_: Any, **__: Any) -> Concern:
    return Concern(ids)


def _this(id: str, *_: Any, **__: Any) -> Concern:
    return Concern([id])


def _moved(ids: Sequence[str], to: str) -> Concern:
    return Concern(ids, to)


def _none(*_: Any, **__: Any) -> Concern:
    return Concern(())


def _all(*_: Any, **__: Any) -> Concern:
    return Concern(None)


class Operation(NamedTuple):
    """One operation of the contract, or of the scheduler alone."""

    name: str
    """On the wire: `facet.method`, or `method` for the hot path."""
    answered_by: AnsweredBy
    deadline: float = DEADLINE
    """Seconds within which the scheduler answers."""
    concern: Callable[..., Concern] = _none
    """The jobs that the arguments after the queue identify; for LEASE_HOLDER."""
    served_by: str = ""
    """The scheduler's method for other processes, where it is another one: its answer is given once the
    change is committed.
    """
    is_instant: bool = False
    """It waits for nothing: the server answers on its event loop."""
    sees_transaction: bool = False
    """In a caller's transaction the tables answer: the caller's own jobs are only there, and the scheduler
    may be waiting for the caller's locks.
    """
    claims: bool = False
    """If the answer comes too late, the connection is closed: then the scheduler takes its claims back."""

    def of(self, storage: Any) -> Callable[..., Any]:
        """Return the method of a storage, or of one of its facets."""
        found: Callable[..., Any] = _getter(self.name)(storage)
        return found

    def served_from(self, scheduler: Any) -> Callable[..., Any]:
        """Return the scheduler's method that answers other processes."""
        found: Callable[..., Any] = (
            getattr(scheduler, self.served_by) if self.served_by else self.of(scheduler)
        )
        return found


@cache
def _getter(name: str) -> Callable[[Any], Any]:
    return attrgetter(name)


def operation_of(method: Callable[..., Any]) -> Operation:
    """Return the operation of a method of the contract, such as `Jobs.cancel`."""
    return _BY_METHOD[method]


def _name(method: Callable[..., Any]) -> str:
    owner, _, name = method.__qualname__.rpartition(".")
    return name if owner == Storage.__name__ else f"{owner.lower()}.{name}"


SCHEDULER, LEASE_HOLDER, SCHEDULER_OR_TABLES, CONNECTED_OR_TABLES, TABLES = AnsweredBy

_TABLE: tuple[tuple[Callable[..., Any], AnsweredBy, dict[str, Any]], ...] = (
    (Storage.finish, SCHEDULER, {"claims": True}),
    (Storage.renew, SCHEDULER, {"is_instant": True}),
    (Storage.report, SCHEDULER, {"is_instant": True}),
    (Storage.emit, SCHEDULER, {"served_by": "emit_written"}),
    (Storage.sweep, SCHEDULER, {}),
    (Jobs.cancel, LEASE_HOLDER, {"concern": _these}),
    (Jobs.promote, LEASE_HOLDER, {"concern": _these}),
    (Jobs.reschedule, LEASE_HOLDER, {"concern": _these}),
    (Jobs.update, LEASE_HOLDER, {"concern": _these}),
    (Jobs.replace_payload, LEASE_HOLDER, {"concern": _this}),
    (Jobs.move, LEASE_HOLDER, {"concern": _moved}),
    (Jobs.retry, LEASE_HOLDER, {"concern": _these}),
    (Jobs.remove, LEASE_HOLDER, {"concern": _these}),
    (Queues.names, TABLES, {}),
    (Queues.pause, LEASE_HOLDER, {}),
    (Queues.resume, LEASE_HOLDER, {}),
    (Queues.is_paused, TABLES, {}),
    (Queues.set_limits, LEASE_HOLDER, {}),
    (Queues.set_group_limit, LEASE_HOLDER, {}),
    (Queues.pause_group, LEASE_HOLDER, {}),
    (Queues.resume_group, LEASE_HOLDER, {}),
    (Queues.group_limits, TABLES, {}),
    (Queues.clean, LEASE_HOLDER, {"concern": _all, "deadline": LONG_DEADLINE}),
    (Queues.obliterate, LEASE_HOLDER, {"concern": _all, "deadline": LONG_DEADLINE}),
    (Limiters.set, LEASE_HOLDER, {}),
    (Limiters.state, SCHEDULER_OR_TABLES, {}),
    (Workers.register, SCHEDULER, {"is_instant": True}),
    (Workers.unregister, SCHEDULER, {"is_instant": True}),
    (Workers.all, TABLES, {}),
    (Workers.control, SCHEDULER, {"is_instant": True}),
    (Workers.save_dump, SCHEDULER, {"is_instant": True}),
    (Workers.dump, SCHEDULER_OR_TABLES, {"is_instant": True}),
    (Workers.record_runs, SCHEDULER, {}),
    (Reads.jobs, CONNECTED_OR_TABLES, {}),
    (Reads.items, CONNECTED_OR_TABLES, {}),
    (Reads.states, CONNECTED_OR_TABLES, {}),
    (Reads.counts, SCHEDULER_OR_TABLES, {"sees_transaction": True}),
    (Reads.waiting_names, SCHEDULER_OR_TABLES, {"sees_transaction": True}),
    (Reads.page, TABLES, {}),
    (Reads.cursor_page, TABLES, {}),
    (Reads.find, TABLES, {}),
    (Reads.jobs_about, TABLES, {}),
    (Reads.dead_letters, TABLES, {}),
    (Reads.dead_letter_page, TABLES, {}),
    (Reads.explain, SCHEDULER_OR_TABLES, {}),
    (Reads.flow, SCHEDULER_OR_TABLES, {}),
    (Reads.overview, SCHEDULER_OR_TABLES, {}),
    (Reads.change_version, SCHEDULER_OR_TABLES, {}),
    (Reads.groups, SCHEDULER_OR_TABLES, {}),
    (Reads.group_modes, SCHEDULER_OR_TABLES, {}),
    (Reads.series, TABLES, {}),
    (Reads.stale_leases, SCHEDULER_OR_TABLES, {}),
    (Reads.cumulative, TABLES, {}),
    (Reads.diagnostics, SCHEDULER_OR_TABLES, {}),
)
_BY_METHOD = {method: Operation(_name(method), who, **rest) for method, who, rest in _TABLE}

ENQUEUE_AT_ONCE = Operation("enqueue_at_once", SCHEDULER)
"""Enqueue without waiting for room; the jobs may be written a moment later."""
ENQUEUE_WRITTEN = Operation("enqueue_written", SCHEDULER)
"""The same, answered once the jobs are committed."""
SETTLED = Operation("settled", SCHEDULER)
"""States of jobs that the tables have, too, when the answer comes."""
FLUSH = Operation("gate.flush", SCHEDULER)
"""Write what is not in the tables yet."""

OPERATIONS = {
    operation.name: operation
    for operation in (*_BY_METHOD.values(), ENQUEUE_AT_ONCE, ENQUEUE_WRITTEN, SETTLED, FLUSH)
}
"""Every operation of the socket, by name."""


TIMEOUT = 2.0
"""Default of the option TIMEOUT, in seconds."""


def patience(timeout: float, batches: Sequence[Batch], dialect: Dialect) -> float:
    """Return the time limit in seconds for enqueueing these jobs."""
    return timeout + sum(len(batch.payloads) for batch in batches) / dialect.jobs_per_second
