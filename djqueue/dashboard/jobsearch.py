"""Searches jobs in the rows that a storage keeps in tables, through their indexes.

Rows are neither counted nor skipped. A filter without an index is applied to the newest rows only, and the
result says so.

A filter of arguments, such as `order_id:7`, `kwargs.order.id:7` or `args.0:7`, compares only the visible part
of a payload, so hidden values can't be found. Every candidate payload is decoded, whatever its bytes are, so
that neither the results nor the duration of a search reveal a hidden value. Such searches are slow: they have
a budget, and each user has one at a time.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from hashlib import blake2b
from operator import or_
from typing import Any, NamedTuple

import msgpack
from django.db import Error, connections, transaction
from django.db.models import BinaryField, Count, F, Func, IntegerField, Min, Q, QuerySet, Value
from django.db.models.functions import Left, Length, Substr
from django.db.models.lookups import GreaterThan
from django.http import HttpRequest

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.errors import OptionError, SerializationError
from djqueue.core.job import JobFailure, JobRecord, is_call
from djqueue.core.logs import Log
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.states import State
from djqueue.core.units import to_datetime, to_milliseconds
from djqueue.dashboard import redaction, tables
from djqueue.dashboard.jsontext import ARGUMENTS
from djqueue.dashboard.tables import alias_of, rows_of
from djqueue.models import Job, LeaderLeaseRow
from djqueue.storage.base import Storage
from djqueue.storage.tables.leaderlease import TTL, LeaderLease
from djqueue.storage.tables.rows import unpack_options

logger = Log("djqueue.dashboard")
SCAN_BYTES = 32 * 1024 * 1024
"""Maximum bytes of payloads that a scan reads. At least one payload is read, whatever its size."""
SCAN_MILLISECONDS = 1_000
"""Milliseconds after which a scan ends, checked between parts."""
PART_ROWS = 100
"""Maximum rows of a part, which one query reads."""
PART_BYTES = 1024 * 1024
"""Bytes of payloads after which a part ends."""
MAX_SEARCHED = 100_000
"""Newest rows searched with a filter that has no index."""
QUEUES = 50
"""Maximum queues listed together: those with most jobs."""
MAX_DECODED = 10_000
"""Newest rows searched if payloads must be decoded."""
MAX_MESSAGE = 300
"""Maximum characters of an error read for a list."""
LARGE = ("payload", "progress", "error_message", "traceback")
ROWS_AT = """\
SELECT * FROM (SELECT {columns} FROM djqueue_job WHERE queue = %s AND state = %s{bound} \
ORDER BY id {order} LIMIT %s) AS part"""
"""Selects rows of one queue and state: the newest, or those next to a row."""
ORDER_MARGIN = 60_000
"""Milliseconds by which rows may be out of order."""
POSITION_ROWS = 20
"""Rows examined to find the time of a position, because a row may belong to a job that was enqueued again."""


class ArgumentFilter(NamedTuple):
    """A path into the arguments, and the values that match: a text may also mean a number."""

    path: tuple[str, ...]
    values: tuple[Any, ...]

    def is_in(self, record: JobRecord) -> bool:
        """Return whether the visible payload of a job has a matching value."""
        try:
            part = redaction.payload(record, revealed=False)
        except SerializationError:
            return False
        path = self.path
        if path[0] == "kwargs" and len(path) > 1 and is_call(part) and path[1] not in part["kwargs"]:
            names = redaction.parameter_names(record.name)
            if path[1] in names:
                path = ("args", str(names.index(path[1])), *path[2:])
        for step in path:
            if isinstance(part, dict):
                part = part.get(step)
            elif isinstance(part, (list, tuple)) and step.isdecimal() and int(step) < len(part):
                part = part[int(step)]
            else:
                return False
        return any(type(part) is type(value) and part == value for value in self.values)


class Scanned(NamedTuple):
    """The result of a scan."""

    rows: list[Any]
    """Matching rows, newest first."""
    older: str
    """Position of the next page; empty if there are no older matches."""
    is_cut: bool
    """Whether the budget ran out before all rows were searched."""


class UserScans:
    """Limits each user to one scan at a time, in all processes that share the tables.

    A scan holds a lease under the user's name, which expires if its process dies. If the lease can't be
    written, or would block SQLite's other writers for a whole request, the limit applies to this process
    only.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[Any] = set()

    @contextmanager
    def take(self, request: HttpRequest) -> Iterator[bool]:
        """Yield whether the user has no other scan running."""
        user: Any = request.user
        with self._lock:
            is_free = user.pk not in self._users
            self._users.add(user.pk)
        if not is_free:
            yield False
            return
        try:
            with _leased(user.pk) as is_free:
                yield is_free
        finally:
            with self._lock:
                self._users.discard(user.pk)


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
    argument: ArgumentFilter | None = None

    @property
    def needs_rows(self) -> bool:
        """Whether the filter can be applied only to rows in tables."""
        return self != JobFilter(queue=self.queue, state=self.state) or self.state is None


class JobSearchPage(NamedTuple):
    """A page of jobs, newest first; see `redaction.LARGEST_LISTED` for their payloads."""

    jobs: list[JobRecord]
    page: tables.KeysetPage
    window: str
    """Which rows were searched: `all` | `queue`: the newest of the queue and state | `newest` of all |
    `opened`: the newest of either whose payloads could be decoded | `cut`: fewer, because the search used
    up its budget."""


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


def parse_argument(text: str) -> ArgumentFilter | None:
    """Parse a filter; None if the text is empty.

    Raises:
        OptionError: The text is not valid.
    """
    if not text:
        return None
    name, colon, value = text.partition(":")
    path = tuple(name.strip().split("."))
    if not colon or not all(path):
        raise OptionError("argument: use the form name:value, kwargs.order.id:7 or args.0:7")
    if path[0] not in ARGUMENTS:
        path = ("kwargs", *path)
    value = value.strip()
    return ArgumentFilter(path, tuple(_meant(value)))


def scan(rows: "QuerySet[Any]", at: str, matches: Callable[[Any], bool], length: int) -> Scanned:
    """Return a page of matching rows.

    Where a scan stops depends only on the rows and on how long reading them takes, not on what they hide: a
    page starts after the last row shown, or after the last row read.

    Args:
        rows: Rows that the user can see, in any order.
        at: `<pk` for the rows before a row; anything else for the newest rows.
        matches: Whether a row, with its payload, matches.
        length: Rows per page.
    """
    deadline, left = SYSTEM_CLOCK.monotonic() + SCAN_MILLISECONDS, SCAN_BYTES
    matching: list[Any] = []
    sign, key = tables.position(at)
    last = key if sign == "<" else None
    while True:
        part = _next_part(rows if last is None else rows.filter(pk__lt=last), left)
        if not part:
            return Scanned(matching, "", is_cut=False)
        for row in sorted(rows.filter(pk__in=part), key=lambda row: -row.pk):
            if not matches(row):
                continue
            if len(matching) == length:
                return Scanned(matching, f"<{matching[-1].pk}", is_cut=False)
            matching.append(row)
        last = min(part)
        left -= sum(part.values())
        if left <= 0 or SYSTEM_CLOCK.monotonic() >= deadline:
            more = rows.filter(pk__lt=last).exists()
            return Scanned(matching, f"<{last}" if more else "", is_cut=more)


user_scans = UserScans()


def states_with_rows(storage: Storage) -> frozenset[State]:
    """Return the states whose jobs have rows in tables: none in memory, nor in Redis without a mirror."""
    return storage.capabilities.mirrored_states


def newest(queues: Sequence[str], state: State, at: str) -> JobSearchPage:
    """Return a page of the newest jobs of a state in these queues, found through an index."""
    places = [(name, state) for name in queues[:QUEUES]]
    count = tables.PAGE_LENGTH + 1
    sign, key = tables.position(at)
    bound = (sign, key) if sign in ("<", ">") and key is not None else None
    keys = sorted(pk for (pk,) in _rows_at(places, "id", count, bound))
    near = keys[:count] if bound and sign == ">" else keys[-count:]
    page = tables.page(_listed(rows_of(Job).filter(pk__in=near)), at)
    return JobSearchPage([_record(row) for row in page.rows], page, "all")


def tagged(tag: str, places: Sequence[tuple[str, State]], limit: int) -> Counter[State]:
    """Return the number of jobs with a tag by state, among the newest of each queue and state."""
    rows = _rows_at(places, "state, options", limit)
    return Counter(State(word) for word, options in rows if tag in unpack_options(bytes(options)).tags)


class ConnectedJob(NamedTuple):
    """A job that has dependencies or dependents."""

    key: JobKey
    options: JobOptions
    pk: int = 0
    """Key of its row; 0 if it has none."""


def connected(
    queues: Sequence[str], states: Sequence[State], limit: int, at: str = "", *, with_roots: bool = True
) -> tuple[list[ConnectedJob], str]:
    """Return the newest jobs of these states that have dependencies or dependents, newest first, and the
    position of older ones; empty if all were searched.

    Args:
        at: Position, as in `tables.page`.
        with_roots: Whether jobs are included that have dependents only.
    """
    rows = rows_of(Job).filter(queue__in=list(queues), state__in=[state.value for state in states])
    sign, key = tables.position(at)
    if sign == "<" and key is not None:
        rows = rows.filter(pk__lt=key)
    searched = rows.order_by("-pk")[:MAX_SEARCHED].aggregate(floor=Min("pk"), rows=Count("pk"))
    condition = _holding("options", b"depends_on")
    if with_roots:
        condition |= _holding("options", b"dependents")
    found = (
        rows.filter(condition, pk__gte=searched["floor"] or 0)
        .order_by("-pk")
        .values_list("queue", "job_id", "options", "pk")
    )
    jobs = [
        ConnectedJob((queue, job_id), unpack_options(bytes(packed)), pk)
        for queue, job_id, packed, pk in found[:limit]
    ]
    if len(jobs) == limit:
        return jobs, f"<{jobs[-1].pk}"
    return jobs, f"<{searched['floor']}" if searched["rows"] == MAX_SEARCHED else ""


def newer(keys: Iterable[JobKey], states: Sequence[State], at: str) -> set[JobKey]:
    """Return the jobs among these that are in one of the states and newer than a position of `connected`."""
    sign, key = tables.position(at)
    by_queue: dict[str, list[str]] = {}
    for queue, job_id in keys:
        by_queue.setdefault(queue, []).append(job_id)
    if sign != "<" or key is None or not by_queue:
        return set()
    named = reduce(or_, (Q(queue=queue, job_id__in=ids) for queue, ids in by_queue.items()))
    rows = rows_of(Job).filter(named, pk__gte=key, state__in=[state.value for state in states])
    return set(rows.values_list("queue", "job_id"))


def search(job_filter: JobFilter, queues: Sequence[str] | None, at: str) -> JobSearchPage:
    """Return a page of matching jobs.

    Args:
        queues: Queues that the user can see; None for all.
    """
    rows, window = rows_of(Job), "newest"
    if job_filter.queue and job_filter.state is not None:
        rows, window = rows.filter(queue=job_filter.queue, state=job_filter.state.value), "queue"
    elif job_filter == JobFilter() and queues is None:
        window = "all"  # all jobs, newest first
    limit = MAX_SEARCHED
    if job_filter.argument is not None:
        window, limit = "opened", MAX_DECODED
    if job_filter.until is not None:
        rows = rows.filter(pk__lte=_last_before(job_filter.until + ORDER_MARGIN))
    if window != "all":
        floor = rows.order_by("-pk")[:limit].aggregate(floor=Min("pk"))["floor"]
        rows = rows.filter(pk__gte=floor or 0)
    if queues is not None:
        rows = rows.filter(queue__in=list(queues))
    if job_filter.argument is not None:
        return _by_argument(_matching(rows, job_filter), job_filter, job_filter.argument, at)
    page = tables.page(_listed(_matching(rows, job_filter)), at)
    jobs = [_record(row) for row in page.rows]
    return JobSearchPage([job for job in jobs if job_filter.tag in ("", *job.options.tags)], page, window)


def _meant(text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return [text]
    plain = value is None or isinstance(value, (str, int, float))
    return [value, text] if plain and value != text else [text]


def _next_part(rows: "QuerySet[Any]", left: int) -> dict[int, int]:
    """Return the keys of the next rows, newest first, with the sizes of their payloads."""
    sizes = rows.order_by("-pk").annotate(size=Length("payload")).values_list("pk", "size")[:PART_ROWS]
    part: dict[int, int] = {}
    total = 0
    for key, size in sizes:
        total += size or 0
        if part and total > min(left, PART_BYTES):
            break
        part[key] = size or 0
    return part


@contextmanager
def _leased(user: Any) -> Iterator[bool]:
    """Hold a user's lease; yield whether no other process holds it."""
    alias = alias_of(LeaderLeaseRow)
    connection = connections[alias]
    if connection.in_atomic_block and connection.vendor != "postgresql":
        # The row would block every other writer until the request's transaction ends.
        yield True
        return
    name = f"search:{blake2b(str(user).encode(), digest_size=8).hexdigest()}"
    lease = LeaderLease(alias, SYSTEM_CLOCK, name)
    try:
        is_free = _claim(lease, alias, name)
    except Error as error:
        logger.warning("Could not write the search lease; the limit applies to this process only: %s", error)
        yield True
        return
    try:
        yield is_free
    finally:
        try:
            lease.delete()
        except Error as error:
            logger.warning("Could not delete the search lease; it expires after %s ms: %s", TTL, error)


def _claim(lease: LeaderLease, alias: str, name: str) -> bool:
    """Return whether the lease was free.

    With `ATOMIC_REQUESTS`, a row is committed after the search, and writing the same row would wait until
    then. On PostgreSQL, an advisory lock that ends with the transaction detects this.
    """
    if connections[alias].vendor != "postgresql":
        return lease.acquire()
    key = int.from_bytes(blake2b(f"djqueue:{name}".encode(), digest_size=8).digest(), signed=True)
    with transaction.atomic(using=alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT pg_try_advisory_xact_lock(%s)", [key])
            is_free = bool(cursor.fetchone()[0])
        return is_free and lease.acquire()


def _by_argument(
    rows: "QuerySet[Job]", wanted: JobFilter, argument: ArgumentFilter, at: str
) -> JobSearchPage:
    def matches(row: Any) -> bool:
        record = _opened(row)
        return argument.is_in(record) and wanted.tag in ("", *record.options.tags)

    scanned = scan(_listed(rows, with_payloads=True), at, matches, tables.PAGE_LENGTH)
    page = tables.KeysetPage(scanned.rows, scanned.older, "", is_first=not at)
    return JobSearchPage([_record(row) for row in scanned.rows], page, "cut" if scanned.is_cut else "opened")


def _matching(rows: "QuerySet[Job]", wanted: JobFilter) -> "QuerySet[Job]":
    conditions: dict[str, Any] = {
        "queue": wanted.queue,
        "state": wanted.state and wanted.state.value,
        "name": wanted.name,
        "worker": wanted.worker,
        "job_id__startswith": wanted.id,
    }
    conditions = {field: value for field, value in conditions.items() if value}
    if wanted.priority is not None:
        conditions["priority"] = wanted.priority
    if wanted.since is not None:
        conditions["created_at__gte"] = to_datetime(wanted.since)
    if wanted.until is not None:
        conditions["created_at__lt"] = to_datetime(wanted.until)
    if wanted.tag:
        rows = rows.filter(_holding("options", msgpack.packb(wanted.tag)))
    return rows.filter(**conditions)


def _holding(column: str, needle: bytes) -> Q:
    return Q(GreaterThan(Holds(F(column), Value(needle, output_field=BinaryField())), 0))


def _last_before(time: int) -> int:
    """Return the key of the last row enqueued before a time, by binary search."""
    rows = rows_of(Job)
    ends = [rows.order_by(order).values_list("pk", flat=True).first() for order in ("pk", "-pk")]
    low, high = (ends[0] or 1) - 1, ends[1] or 0
    while low < high:
        middle = (low + high + 1) // 2
        near = (
            rows.filter(pk__lte=middle).order_by("-pk").values_list("created_at", flat=True)[:POSITION_ROWS]
        )
        if min(map(to_milliseconds, near)) < time:
            low = middle
        else:
            high = middle - 1
    return low


def _rows_at(
    places: Sequence[tuple[str, State]], columns: str, limit: int, bound: tuple[str, int] | None = None
) -> tuple[tuple[Any, ...], ...]:
    """Return columns of rows of each queue and state: the newest, or those next to a row.

    Args:
        bound: `<` or `>`, and the key of the row.
    """
    if not places:
        return ()
    sign, *key = bound or ("",)
    order = "ASC" if sign == ">" else "DESC"
    part = ROWS_AT.format(columns=columns, bound=f" AND id {sign} %s" if bound else "", order=order)
    values = [value for name, state in places for value in (name, state.value, *key, limit)]
    return tables.select(Job, " UNION ALL ".join([part] * len(places)), values)


def _listed(rows: "QuerySet[Job]", with_payloads: bool = False) -> "QuerySet[Job]":
    large = [column for column in LARGE if not with_payloads or column != "payload"]
    start = Substr("payload", 1, redaction.LARGEST_LISTED + 1)
    return rows.defer(*large).annotate(message=Left("error_message", MAX_MESSAGE), payload_start=start)


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
