"""Jobs by what is said of them: in the rows that a storage keeps in tables, through their indexes.

No row is counted, none is skipped to come to a page. What no index helps with is looked for among the newest
rows alone, and the answer says so.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack
from django.db import connections
from django.db.models import BinaryField, F, Func, IntegerField, Min, Q, QuerySet, Value
from django.db.models.functions import Left, Substr
from django.db.models.lookups import GreaterThan

from djqueue.core.durations import to_datetime, to_milliseconds
from djqueue.core.job import JobFailure, JobRecord
from djqueue.core.states import State
from djqueue.models import Job
from djqueue.storage.base import Storage
from djqueue.storage.database.rows import unpack_options

from . import keyset, listing, scanning
from .byargument import Argument
from .tables import rows_of

WINDOW = 100_000
"""Rows, the newest, among which is looked for what no index helps with."""
QUEUES = 50
"""Queues whose newest jobs are listed together: those with most of them."""
OPENED = 10_000
"""Rows, the newest, whose payloads are looked through."""
MESSAGE = 300
"""Characters of an error that a list reads."""
LARGE = ("payload", "progress", "error_message", "traceback")
SLACK = 60_000
"""Milliseconds by which rows may be out of the order of their times."""
NEAR = 20
"""Rows that are looked at to know the time of a place: one may be that of a job enqueued anew."""


class JobFilter(NamedTuple):
    """Which jobs are meant; what is empty, or None, is any."""

    queue: str = ""
    state: State | None = None
    name: str = ""
    tag: str = ""
    priority: int | None = None
    worker: str = ""
    since: int | None = None
    """Enqueued from then on, in UTC milliseconds; `until`: before then."""
    until: int | None = None
    id: str = ""
    """The beginning of it."""
    argument: Argument | None = None

    @property
    def needs_rows(self) -> bool:
        """Whether only tables can say."""
        return self != JobFilter(queue=self.queue, state=self.state) or self.state is None


class JobSearchPage(NamedTuple):
    """A page of jobs, newest first; see `listing.LARGEST` for their payloads."""

    jobs: list[JobRecord]
    page: keyset.KeysetPage
    window: str
    """Among which rows was looked: `all` | `queue`: the newest of the queue and state | `newest` of all |
    `opened`: the newest of either, as their payloads had to be looked through | `cut`: fewer than these, as
    the budget of a search ran out."""


def states_with_rows(storage: Storage) -> frozenset[State]:
    """States whose jobs have rows in tables; none in memory, and where Redis has no mirror."""
    return storage.capabilities.mirrored_states


def newest(queues: Sequence[str], state: State, at: str) -> JobSearchPage:
    """A page of the jobs of a state, of these queues together: the newest of each, from its index."""
    parts = [_place(_rows().filter(queue=name, state=state.value), at) for name in queues[:QUEUES]]
    keys = [pk for (pk,) in _together(parts)] if parts else []
    page = keyset.page(_listed(_rows().filter(pk__in=keys)), at)
    return JobSearchPage([_record(row) for row in page.rows], page, "all")


def tagged(tag: str, places: Sequence[tuple[str, State]], most: int) -> Counter[State]:
    """How many jobs have a tag, by state: among the newest so many of each queue and state of these."""
    rows = _rows()
    parts = [rows.filter(queue=name, state=state.value).order_by("-pk")[:most] for name, state in places]
    found = _together(parts, "state", "options") if parts else ()
    return Counter(State(word) for word, options in found if tag in unpack_options(bytes(options)).tags)


def search(wanted: JobFilter, queues: Sequence[str] | None, at: str) -> JobSearchPage:
    """A page of the jobs that match.

    queues: those that may be shown; None: all of them.
    """
    rows, window = _rows(), "newest"
    if wanted.queue and wanted.state is not None:
        rows, window = rows.filter(queue=wanted.queue, state=wanted.state.value), "queue"
    elif wanted == JobFilter() and queues is None:
        window = "all"  # the newest of everything
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

    found = scanning.scan(_listed(rows, with_payloads=True), at, matches, keyset.LENGTH)
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
    """Where bytes lie in a column of bytes: from 1 on; 0: nowhere."""

    function = "INSTR"
    output_field = IntegerField()

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """POSITION (needle IN column)."""
        column, needle = self.get_source_expressions()
        turned = self.copy()
        turned.set_source_expressions([needle, column])
        return turned.as_sql(compiler, connection, function="POSITION", arg_joiner=" IN ", **context)


def _last_before(time: int) -> int:
    """The last row that was enqueued before a time, found by halves: rows come about in that order."""
    rows = _rows()
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
    """Of a queue as many as a page may need, and one more."""
    sign, number = at[:1], at[1:]
    if sign in ("<", ">") and number.isdecimal() and len(number) < 19:
        after = sign == ">"
        rows = rows.filter(**{"pk__gt" if after else "pk__lt": int(number)}).order_by(
            "pk" if after else "-pk"
        )
    else:
        rows = rows.order_by("-pk")
    return rows[: keyset.LENGTH + 1]


def _together(parts: "Sequence[QuerySet[Job]]", *columns: str) -> "QuerySet[Job, Any]":
    """Keys, or other columns, of the rows of several queries, by one statement."""
    if not connections[parts[0].db].features.supports_slicing_ordering_in_compound:
        parts = [_rows().filter(pk__in=part.values("pk")) for part in parts]
    first, *others = [part.values_list(*columns or ("pk",)) for part in parts]
    return first.union(*others, all=True) if others else first


def _listed(rows: "QuerySet[Job]", with_payloads: bool = False) -> "QuerySet[Job]":
    large = [column for column in LARGE if not with_payloads or column != "payload"]
    start = Substr("payload", 1, listing.LARGEST + 1)
    return rows.defer(*large).annotate(message=Left("error_message", MESSAGE), payload_start=start)


def _record(row: Any) -> JobRecord:
    """A row as the storages give jobs, as far as a list shows it; of a large payload its beginning."""
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


def _rows() -> "QuerySet[Job]":
    return rows_of(Job)
