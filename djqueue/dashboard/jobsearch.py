"""Searches jobs in the rows that a storage keeps in tables, through their indexes.

Rows are neither counted nor skipped. A filter without an index is applied to the newest rows only, and the
result says so.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
from django.db import connections
from django.db.models import BinaryField, F, Func, IntegerField, Min, Q, QuerySet, Value
from django.db.models.functions import Left, Substr
from django.db.models.lookups import GreaterThan

from djqueue.core.job import JobFailure, JobRecord
from djqueue.core.states import State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.models import Job
from djqueue.storage.base import Storage
from djqueue.storage.tables.rows import unpack_options

from . import arguments, keyset, payloadscan
from .argumentfilter import Argument
from .tables import rows_of

WINDOW = 100_000
"""Newest rows searched with a filter that has no index."""
QUEUES = 50
"""Maximum queues listed together: those with most jobs."""
OPENED = 10_000
"""Newest rows searched if payloads must be decoded."""
MESSAGE = 300
"""Maximum characters of an error read for a list."""
LARGE = ("payload", "progress", "error_message", "traceback")
SLACK = 60_000
"""Milliseconds by which rows may be out of order."""
NEAR = 20
"""Rows examined to find the time of a position, because a row may belong to a job that was enqueued again."""


class JobFilter(NamedTuple):
    """A filter of jobs. Empty fields, and None, match any job."""

    queue: str = ""
    state: State | None = None
    name: str = ""
    tag: str = ""
    priority: int | None = None
    worker: str = ""
    since: int | None = None
    """Earliest time of enqueueing, in UTC milliseconds; `until` is the end, exclusive."""
    until: int | None = None
    id: str = ""
    """Prefix of the ID."""
    argument: Argument | None = None

    @property
    def needs_rows(self) -> bool:
        """Whether the filter can be applied only to rows in tables."""
        return self != JobFilter(queue=self.queue, state=self.state) or self.state is None


class JobSearchPage(NamedTuple):
    """A page of jobs, newest first; see `arguments.LARGEST` for their payloads."""

    jobs: list[JobRecord]
    page: keyset.KeysetPage
    window: str
    """Which rows were searched: `all` | `queue`: the newest of the queue and state | `newest` of all |
    `opened`: the newest of either whose payloads could be decoded | `cut`: fewer, because the search used
    up its budget."""


def states_with_rows(storage: Storage) -> frozenset[State]:
    """Return the states whose jobs have rows in tables: none in memory, nor in Redis without a mirror."""
    return storage.capabilities.mirrored_states


def newest(queues: Sequence[str], state: State, at: str) -> JobSearchPage:
    """Return a page of the newest jobs of a state in these queues, found through an index."""
    parts = [_place(rows_of(Job).filter(queue=name, state=state.value), at) for name in queues[:QUEUES]]
    keys = [pk for (pk,) in _together(parts)] if parts else []
    page = keyset.page(_listed(rows_of(Job).filter(pk__in=keys)), at)
    return JobSearchPage([_record(row) for row in page.rows], page, "all")


def tagged(tag: str, places: Sequence[tuple[str, State]], limit: int) -> Counter[State]:
    """Return the number of jobs with a tag by state, among the newest of each queue and state."""
    rows = rows_of(Job)
    parts = [rows.filter(queue=name, state=state.value).order_by("-pk")[:limit] for name, state in places]
    found = _together(parts, "state", "options") if parts else ()
    return Counter(State(word) for word, options in found if tag in unpack_options(bytes(options)).tags)


def search(wanted: JobFilter, queues: Sequence[str] | None, at: str) -> JobSearchPage:
    """Return a page of matching jobs.

    Args:
        queues: Queues that the user can see; None for all.
    """
    rows, window = rows_of(Job), "newest"
    if wanted.queue and wanted.state is not None:
        rows, window = rows.filter(queue=wanted.queue, state=wanted.state.value), "queue"
    elif wanted == JobFilter() and queues is None:
        window = "all"  # all jobs, newest first
    many = WINDOW
    if wanted.argument is not None:
        window, many = "opened", OPENED
    if wanted.until is not None:
        rows = rows.filter(pk__lte=_last_before(wanted.until + SLACK))
    if window != "all":
        floor = rows.order_by("-pk")[:many].aggregate(floor=Min("pk"))["floor"]
        rows = rows.filter(pk__gte=floor or 0)
    if queues is not None:
        rows = rows.filter(queue__in=list(queues))
    if wanted.argument is not None:
        return _by_argument(_matching(rows, wanted), wanted, wanted.argument, at)
    page = keyset.page(_listed(_matching(rows, wanted)), at)
    jobs = [_record(row) for row in page.rows]
    return JobSearchPage([job for job in jobs if wanted.tag in ("", *job.options.tags)], page, window)


def _by_argument(rows: "QuerySet[Job]", wanted: JobFilter, argument: Argument, at: str) -> JobSearchPage:
    def matches(row: Any) -> bool:
        record = _opened(row)
        return argument.is_in(record) and wanted.tag in ("", *record.options.tags)

    found = payloadscan.scan(_listed(rows, with_payloads=True), at, matches, keyset.LENGTH)
    page = keyset.KeysetPage(found.rows, found.older, "", is_first=not at)
    return JobSearchPage([_record(row) for row in found.rows], page, "cut" if found.is_cut else "opened")


def _matching(rows: "QuerySet[Job]", wanted: JobFilter) -> "QuerySet[Job]":
    given: dict[str, Any] = {
        "queue": wanted.queue,
        "state": wanted.state and wanted.state.value,
        "name": wanted.name,
        "worker": wanted.worker,
        "job_id__startswith": wanted.id,
    }
    given = {field: value for field, value in given.items() if value}
    if wanted.priority is not None:
        given["priority"] = wanted.priority
    if wanted.since is not None:
        given["created_at__gte"] = to_datetime(wanted.since)
    if wanted.until is not None:
        given["created_at__lt"] = to_datetime(wanted.until)
    if wanted.tag:
        rows = rows.filter(_holding("options", msgpack.packb(wanted.tag)))
    return rows.filter(**given)


def _holding(column: str, needle: bytes) -> Q:
    return Q(GreaterThan(Holds(F(column), Value(needle, output_field=BinaryField())), 0))


class Holds(Func):
    """The position of bytes in a binary column, starting at 1; 0 if they don't occur."""

    function = "INSTR"
    output_field = IntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Return POSITION (needle IN column)."""
        column, needle = self.get_source_expressions()
        turned = self.copy()
        turned.set_source_expressions([needle, column])
        return turned.as_sql(compiler, connection, function="POSITION", arg_joiner=" IN ", **context)


def _last_before(time: int) -> int:
    """Return the key of the last row enqueued before a time, by binary search."""
    rows = rows_of(Job)
    ends = [rows.order_by(order).values_list("pk", flat=True).first() for order in ("pk", "-pk")]
    low, high = (ends[0] or 1) - 1, ends[1] or 0
    while low < high:
        middle = (low + high + 1) // 2
        near = rows.filter(pk__lte=middle).order_by("-pk").values_list("created_at", flat=True)[:NEAR]
        if min(map(to_milliseconds, near)) < time:
            low = middle
        else:
            high = middle - 1
    return low


def _place(rows: "QuerySet[Job]", at: str) -> "QuerySet[Job]":
    """Return the rows of one queue that a page may need, and one more."""
    sign, key = keyset.position(at)
    if sign == ">" and key is not None:
        rows = rows.filter(pk__gt=key).order_by("pk")
    elif sign == "<" and key is not None:
        rows = rows.filter(pk__lt=key).order_by("-pk")
    else:
        rows = rows.order_by("-pk")
    return rows[: keyset.LENGTH + 1]


def _together(parts: "Sequence[QuerySet[Job]]", *columns: str) -> "QuerySet[Job, Any]":
    """Return columns of the rows of several queries, using one statement."""
    if not connections[parts[0].db].features.supports_slicing_ordering_in_compound:
        parts = [rows_of(Job).filter(pk__in=part.values("pk")) for part in parts]
    first, *others = [part.values_list(*columns or ("pk",)) for part in parts]
    return first.union(*others, all=True) if others else first


def _listed(rows: "QuerySet[Job]", with_payloads: bool = False) -> "QuerySet[Job]":
    large = [column for column in LARGE if not with_payloads or column != "payload"]
    start = Substr("payload", 1, arguments.LARGEST + 1)
    return rows.defer(*large).annotate(message=Left("error_message", MESSAGE), payload_start=start)


def _record(row: Any) -> JobRecord:
    """Return a row as a job record with what a list shows; of a large payload only the start."""
    error = JobFailure(row.error_type, row.message) if row.error_type else None
    started, finished = (0 if at is None else to_milliseconds(at) for at in (row.started_at, row.finished_at))
    return JobRecord(
        id=row.job_id,
        queue=row.queue,
        name=row.name,
        payload=bytes(row.payload_start),
        options=unpack_options(bytes(row.options)),
        state=State(row.state),
        created_at=to_milliseconds(row.created_at),
        run_at=to_milliseconds(row.run_at),
        attempts=row.attempts,
        failures=row.failures,
        stalls=row.stalls,
        worker=row.worker,
        started_at=started,
        finished_at=finished,
        result=None,
        error=error,
        reason=row.reason,
        progress=None,
        history=(),
        logs=(),
    )


def _opened(row: Any) -> JobRecord:
    return _record(row)._replace(payload=bytes(row.payload))
