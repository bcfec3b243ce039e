"""Export the tables by ranges of primary keys; see `djqueue.storage.export`.

Each page is one statement with keyset pagination. With payloads or results, their lengths are read first, so
that a page has about `PAGE_BYTES`. No transaction is open between two pages, so sweeps can delete expired
rows meanwhile.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from django.db.models import Count, F, Max, Min, Model, QuerySet
from django.db.models.functions import Length

from djqueue import models
from djqueue.core.options import JobKey
from djqueue.core.states import TERMINAL, State
from djqueue.core.units import to_milliseconds
from djqueue.storage.export import (
    ATTEMPT_COLUMNS,
    DEAD_COLUMNS,
    JOB_COLUMNS,
    PAGE_BYTES,
    RESULT_COLUMNS,
    CallRetry,
    Export,
    ExportFilter,
    ExportPart,
    Page,
    once,
    page_of,
    seconds,
)
from djqueue.storage.tables import rows
from djqueue.storage.tables.dberrors import named

from .dialects import Row

MIN_ROWS = 5_000
"""Minimum rows in a part; smaller parts gain nothing."""
STRETCHES = 32
"""Key ranges per part: parts with many deleted rows get more of them, so that sizes are similar."""
COMPLETING = "completing"
"""Source of successful attempts, which have no rows of their own."""
FIELDS: Mapping[str, tuple[str, ...]] = {
    **{name: (name,) for name in (*JOB_COLUMNS, "payload")},
    "id": ("job_id",),
    "enqueued_at": ("created_at",),
    "tags": ("options",),
    "headers": ("options",),
    "error_message": ("error_message", "error_type"),
}
"""The fields of a job that a column of jobs and results is made from."""
CONVERTERS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(
        ("started_at", "finished_at", "worker", "reason", "error_type"), lambda value: value or None
    ),
    "tags": lambda options: rows.unpack_options(bytes(options)).tags,
    "headers": lambda options: rows.unpack_options(bytes(options)).headers.text or None,
    "error_message": lambda message, kind: message if kind else None,
    "payload": bytes,
}
"""Functions of these fields for columns that are not just a field."""
COMPLETED = (
    *("id", "queue", "job_id", "name", "attempts", "created_at", "run_at", "started_at", "finished_at"),
    "worker",
)
ATTEMPT = ("id", *rows.ATTEMPT[:-1])
OF_JOB = ("name", "state", "created_at", "run_at", "started_at")
"""Columns of the job that complete a row of its attempt."""
LETTER = ("id", *rows.LETTER[:-1])
CRON = (
    *("name", "queue", "job_name", "schedule", "every", "timezone", "enabled", "source"),
    *(
        "start_at",
        "end_at",
        "max_executions",
        "executions",
        "next_run_at",
        "last_run_at",
        "skipped_at",
        "skip_reason",
    ),
    *("overlap", "missed"),
)
BULK = (
    *("id", "kind", "state", "user", "created_at", "started_at", "finished_at", "expected", "looked_at"),
    *("done", "refused", "error", "filter"),
)
Pages = Generator[Page, None, int | None]
"""Pages; then the last primary key, or None if no rows follow."""
Reader = Callable[["PartRead", int], Pages]
"""Returns the pages after a primary key."""


class PartRead(NamedTuple):
    """A read of one part, one statement at a time."""

    wanted: ExportFilter
    chosen: QuerySet[Any]
    size: int
    """Maximum number of rows in a page."""
    retry: CallRetry

    def rows(self, fields: Sequence[Any], after: int, last: int | None = None) -> list[Row]:
        """Return a page of rows after a primary key, or all those up to another one."""
        following = self.chosen.filter(id__gt=after).order_by("id")
        limited = following[: self.size] if last is None else following.filter(id__lte=last)
        return self.retry(_rows, limited, fields)

    def last(self, found: Sequence[Row]) -> int | None:
        """Return the last primary key of a page, or None if no rows follow."""
        return int(found[-1][0]) if len(found) == self.size else None


class SqlExport(Export):
    """The export of the tables of one database."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._sources: Mapping[str, tuple[type[Model], str | None, Reader]] = {
            "jobs": (models.Job, "created_at", self._jobs),
            "results": (models.Job, "finished_at", self._results),
            "attempts": (models.JobAttempt, "finished_at", self._attempts),
            COMPLETING: (models.Job, "finished_at", self._completing),
            "dead": (models.DeadLetter, "entered_at", self._dead),
            "cron": (models.CronJob, None, self._cron),
            "bulk": (models.BulkOperation, None, self._bulk),
        }
        self.tables = frozenset(self._sources) - {COMPLETING}

    def parts(self, wanted: ExportFilter, many: int) -> list[ExportPart]:
        """Divide the rows into ranges of primary keys."""
        sources = ("attempts", COMPLETING) if wanted.table == "attempts" else (wanted.table,)
        with named(self._alias):
            return [part for source in sources for part in self._parts(wanted, source, many)]

    def _parts(self, wanted: ExportFilter, source: str, many: int) -> Iterator[ExportPart]:
        # Use the range of the whole table, which an index answers, regardless of the filter.
        ends = self._all(source).aggregate(first=Min("id"), last=Max("id"))
        if ends["first"] is None:
            return
        if wanted.ids is not None:
            yield ExportPart(source, ends["first"], ends["last"] + 1, len(wanted.ids))
            return
        first, width = ends["first"], -(-(ends["last"] - ends["first"] + 1) // (many * STRETCHES))
        numbered = self._all(source).order_by().annotate(stretch=(F("id") - first) / width)
        counts = numbered.values_list("stretch").annotate(count=Count("id")).order_by("stretch")
        gathered, start = 0, first
        enough = max(MIN_ROWS, sum(count for _, count in counts) // many)
        for stretch, count in counts:
            gathered += count
            if gathered >= enough:
                end = first + (stretch + 1) * width
                yield ExportPart(source, start, end, gathered)
                gathered, start = 0, end
        if gathered:
            yield ExportPart(source, start, ends["last"] + 1, gathered)

    def pages(
        self, wanted: ExportFilter, part: ExportPart, size: int, retry: CallRetry = once
    ) -> Iterator[Page]:
        """Return a part in pages, one statement for each."""
        read, after = self._sources[part.place][2], part.first - 1
        source = PartRead(wanted, self._chosen(wanted, part), size, retry)
        while (last := (yield from read(source, after))) is not None:
            after = last

    def _all(self, source: str) -> QuerySet[Any]:
        return self._sources[source][0]._default_manager.using(self._alias)

    def _chosen(self, wanted: ExportFilter, part: ExportPart) -> QuerySet[Any]:
        time = self._sources[part.place][1]
        chosen = self._all(part.place).filter(id__lt=part.last)
        if wanted.queues is not None:
            chosen = chosen.filter(queue__in=wanted.queues)
        if part.place in ("jobs", "results") and (states := _states(wanted)) is not None:
            chosen = chosen.filter(state__in=states)
        if part.place == COMPLETING:
            chosen = chosen.filter(state=State.COMPLETED.value)
        if wanted.ids is not None:
            chosen = chosen.filter(job_id__in=wanted.ids)
        if wanted.names is not None and part.place != "attempts":
            chosen = chosen.filter(name__in=wanted.names)
        if wanted.unique_keys is not None:
            chosen = chosen.filter(unique_key__in=wanted.unique_keys)
        if wanted.subjects is not None:
            chosen = chosen.filter(subject__in=wanted.subjects)
        if wanted.since is not None:
            chosen = chosen.filter(**{f"{time}__gte": wanted.since})
        if wanted.until is not None:
            chosen = chosen.filter(**{f"{time}__lt": wanted.until})
        return chosen

    def _jobs(self, part: PartRead, after: int) -> Pages:
        columns = [name for name in (*JOB_COLUMNS, "payload") if name in part.wanted.columns]
        fields = ("id", *_fields(part.wanted, columns))
        if "payload" not in columns:
            found = part.rows(fields, after)
            yield _page(columns, fields, _with_tags(part.wanted, fields, found))
            return part.last(found)
        lengths = part.rows(("id", Length("payload")), after)
        for group in _groups(lengths, (length for _, length in lengths)):
            last = group[-1][0]
            found = part.rows(fields, after, last)
            yield _page(columns, fields, _with_tags(part.wanted, fields, found))
            after = last
        return part.last(lengths)

    def _results(self, part: PartRead, after: int) -> Pages:
        columns = [name for name in RESULT_COLUMNS if name in part.wanted.columns and name != "result"]
        fields = ("id", "queue", "job_id", *_fields(part.wanted, columns))
        following = part.rows(fields, after)
        last = part.last(following)
        found = _with_tags(part.wanted, fields, following)
        if "result" not in part.wanted.columns:
            yield _page(columns, fields, found)
            return last
        lengths = self._of_jobs(part, models.JobResult, found, (Length("result"),))
        for group in _groups(found, (lengths.get((row[1], row[2]), (0,))[0] for row in found)):
            results = self._of_jobs(part, models.JobResult, group, ("result",))
            theirs = [results.get((row[1], row[2])) for row in group]
            values = [None if result is None else bytes(result[0]) for result in theirs]
            page = {**_page(columns, fields, group), "result": values}
            yield {name: page[name] for name in RESULT_COLUMNS if name in page}
        return last

    def _attempts(self, part: PartRead, after: int) -> Pages:
        found = part.rows(ATTEMPT, after)
        jobs: Mapping[JobKey, Row] = {}
        if part.wanted.columns & {"name", "wait_seconds"} or part.wanted.names is not None:
            jobs = self._of_jobs(part, models.Job, found, OF_JOB)
        attempts = (_attempt(row, jobs.get((row[1], row[2]))) for row in found)
        yield page_of(ATTEMPT_COLUMNS, (row for row in attempts if part.wanted.has_name(row[2])))
        return part.last(found)

    def _completing(self, part: PartRead, after: int) -> Pages:
        found = part.rows(COMPLETED, after)
        yield page_of(ATTEMPT_COLUMNS, map(_completed, found))
        return part.last(found)

    def _dead(self, part: PartRead, after: int) -> Pages:
        found = part.rows(LETTER, after)
        attempts: Mapping[JobKey, Row] = {}
        if "attempts" in part.wanted.columns:
            attempts = self._of_jobs(part, models.Job, found, ("attempts",))
        columns = (
            (
                *(queue, job_id, name, reason, entered, expires),
                *(
                    attempts.get((queue, job_id), (None,))[0],
                    retries,
                    next_retry,
                    kind or None,
                    message or None,
                ),
            )
            for _, queue, job_id, name, reason, kind, message, entered, expires, retries, next_retry in found
        )
        yield page_of(DEAD_COLUMNS, columns)
        return part.last(found)

    def _cron(self, part: PartRead, after: int) -> Pages:
        found = part.retry(
            _dicts, part.chosen.filter(id__gt=after).order_by("id")[: part.size], ("id", *CRON)
        )
        records = [
            {
                **{name: _plain(row[name]) for name in CRON if name not in ("job_name", "every")},
                "queue": row["queue"] or None,
                "job": row["job_name"],
                "schedule": row["schedule"] or None,
                "skip_reason": row["skip_reason"] or None,
                "every_seconds": None if row["every"] is None else row["every"].total_seconds(),
            }
            for row in found
        ]
        yield _page_of_records(records)
        return part.last([(row["id"],) for row in found])

    def _bulk(self, part: PartRead, after: int) -> Pages:
        found = part.retry(_dicts, part.chosen.filter(id__gt=after).order_by("id")[: part.size], BULK)
        records = [
            {
                **{name: _plain(row[name]) for name in BULK if name not in ("created_at", "refused")},
                "id": str(row["id"]),
                "queue": _only_queue(row["filter"]),
                "user": row["user"] or None,
                "begun_at": _plain(row["created_at"]),
                "refused": sum(row["refused"].values()),
                "error": row["error"] or None,
                "filter": json.dumps(row["filter"]),
            }
            for row in found
        ]
        yield _page_of_records(records)
        return part.last([(row["id"],) for row in found])

    def _of_jobs(
        self, part: PartRead, model: type[Model], found: Sequence[Row], columns: Sequence[Any]
    ) -> dict[JobKey, Row]:
        """Return the rows of a table that have the queues and job ids of these rows, by queue and job id."""
        ids: dict[str, dict[str, None]] = {}
        for _, queue, job_id, *_ in found:
            ids.setdefault(queue, {})[job_id] = None
        theirs: dict[JobKey, Row] = {}
        for queue, mine in ids.items():
            for some in rows.chunked(list(mine)):
                chosen = model._default_manager.using(self._alias).filter(queue=queue, job_id__in=some)
                for job_id, *values in part.retry(_rows, chosen, ("job_id", *columns)):
                    theirs[queue, job_id] = tuple(values)
        return theirs


def _rows(chosen: QuerySet[Any], fields: Sequence[Any]) -> list[Row]:
    with named(chosen.db):
        return list(rows.raw_values(chosen, fields))


def _dicts(chosen: QuerySet[Any], fields: Sequence[str]) -> list[dict[str, Any]]:
    with named(chosen.db):
        return list(chosen.values(*fields))


def _fields(wanted: ExportFilter, columns: Iterable[str]) -> list[str]:
    """Return the fields of a job that these columns of jobs and results, and the filter, are made from."""
    tags = () if wanted.tags is None else ("tags",)
    return list(dict.fromkeys(field for column in (*columns, *tags) for field in FIELDS[column]))


def _with_tags(wanted: ExportFilter, fields: Sequence[str], found: Sequence[Row]) -> Sequence[Row]:
    """Return the rows of jobs that have one of the wanted tags."""
    if wanted.tags is None:
        return found
    at = fields.index("options")
    return [row for row in found if wanted.has_tags(rows.unpack_options(bytes(row[at])).tags)]


def _page(columns: Sequence[str], fields: Sequence[str], found: Sequence[Row]) -> Page:
    """Convert rows of these fields to columns of jobs and results."""
    values = page_of(fields, found)
    return {
        name: list(map(CONVERTERS[name], *(values[field] for field in FIELDS[name])))
        if name in CONVERTERS
        else values[FIELDS[name][0]]
        for name in columns
    }


def _groups(found: Sequence[Row], lengths: Iterable[int]) -> Iterator[Sequence[Row]]:
    """Divide rows into groups of about `PAGE_BYTES`, each with at least one."""
    first = size = 0
    for index, length in enumerate(lengths):
        if index > first and size + length > PAGE_BYTES:
            yield found[first:index]
            first, size = index, 0
        size += length
    if found:
        yield found[first:]


def _states(wanted: ExportFilter) -> list[str] | None:
    states = wanted.states
    if wanted.table == "results":
        states = TERMINAL if states is None else states & TERMINAL
    return None if states is None else sorted(state.value for state in states)


def _attempt(row: Row, job: Row | None) -> Row:
    """Convert a row of `ATTEMPT`, with `OF_JOB` of its job if it exists, to `ATTEMPT_COLUMNS`."""
    _, queue, job_id, number, worker, started, finished, outcome, kind, message = row
    name = wait = None
    if job is not None:
        name, state, created_at, run_at, last_started = job
        if State(state) in TERMINAL and last_started == started:
            wait = seconds(max(created_at, run_at), started)
    return (
        *(queue, job_id, name, number, started, finished, wait, seconds(started, finished), outcome),
        *(kind or None, message if kind else None, worker),
    )


def _completed(row: Row) -> Row:
    """Convert a row of `COMPLETED` to `ATTEMPT_COLUMNS`."""
    _, queue, job_id, name, number, created_at, run_at, started, finished, worker = row
    wait, run = seconds(max(created_at, run_at), started), seconds(started, finished)
    return (*(queue, job_id, name, number, started, finished, wait, run, "completed"), None, None, worker)


def _plain(value: Any) -> Any:
    return to_milliseconds(value) if hasattr(value, "tzinfo") else value


def _only_queue(chosen: Any) -> str | None:
    queues: Sequence[str] = chosen.get("queues") or ()
    return queues[0] if len(queues) == 1 else None


def _page_of_records(records: Sequence[Mapping[str, Any]]) -> Page:
    return {name: [record[name] for record in records] for name in records[0]} if records else {}
