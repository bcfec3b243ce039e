"""Export the tables by ranges of primary keys; see `djqueue.storage.export`.

Each page is one statement with keyset pagination. No transaction is open between two pages, so sweeps can
delete expired rows meanwhile.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from django.db.models import Count, F, Max, Min, Model, QuerySet

from djqueue import models
from djqueue.core.options import JobKey
from djqueue.core.states import TERMINAL, State
from djqueue.core.units import to_milliseconds
from djqueue.storage.export import (
    ATTEMPT_COLUMNS,
    DEAD_COLUMNS,
    JOB_COLUMNS,
    RESULT_COLUMNS,
    Export,
    ExportFilter,
    ExportPart,
    Page,
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
JOB = (
    *("id", "queue", "job_id", "name", "state", "priority", "attempts", "failures", "stalls"),
    *(
        "created_at",
        "run_at",
        "started_at",
        "finished_at",
        "concurrency_key",
        "unique_key",
        "subject",
        "options",
    ),
    *("worker", "reason", "error_type", "error_message", "content_type"),
)
RESULT = (
    *("id", "queue", "job_id", "name", "state", "finished_at", "content_type", "reason"),
    *("error_type", "error_message", "unique_key", "subject", "options"),
)
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
Read = tuple[int | None, Page]
"""The last primary key, or None if no rows follow, and the page."""
Reader = Callable[[ExportFilter, Any, int], Read]


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
            return [part for source in sources for part in self._parts(source, many)]

    def _parts(self, source: str, many: int) -> Iterator[ExportPart]:
        # Use the range of the whole table, which an index answers, regardless of the filter.
        ends = self._all(source).aggregate(first=Min("id"), last=Max("id"))
        if ends["first"] is None:
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

    def pages(self, wanted: ExportFilter, part: ExportPart, size: int) -> Iterator[Page]:
        """Return a part in pages, one statement for each."""
        read, chosen = self._sources[part.place][2], self._chosen(wanted, part)
        after = part.first - 1
        while True:
            with named(self._alias):
                last, page = read(wanted, chosen.filter(id__gt=after).order_by("id")[:size], size)
            yield page
            if last is None:
                return
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
        if wanted.since is not None:
            chosen = chosen.filter(**{f"{time}__gte": wanted.since})
        if wanted.until is not None:
            chosen = chosen.filter(**{f"{time}__lt": wanted.until})
        return chosen

    def _jobs(self, wanted: ExportFilter, chosen: QuerySet[Any], size: int) -> Read:
        has_payload = "payload" in wanted.columns
        found = list(rows.raw_values(chosen, (*JOB, "payload") if has_payload else JOB))
        columns = (*JOB_COLUMNS, "payload") if has_payload else JOB_COLUMNS
        return _last(found, size), page_of(columns, map(_job, found))

    def _results(self, wanted: ExportFilter, chosen: QuerySet[Any], size: int) -> Read:
        found = list(rows.raw_values(chosen, RESULT))
        results: dict[JobKey, bytes] = {}
        if "result" in wanted.columns:
            for key, (result,) in self._of_jobs(models.JobResult, found, ("result",)):
                results[key] = bytes(result)
        columns = (
            (
                *(*row[1:6], results.get((row[1], row[2])), row[6]),
                *(*(value or None for value in row[7:12]), rows.unpack_options(bytes(row[12])).tags),
            )
            for row in found
        )
        return _last(found, size), page_of(RESULT_COLUMNS, columns)

    def _attempts(self, wanted: ExportFilter, chosen: QuerySet[Any], size: int) -> Read:
        found = list(rows.raw_values(chosen, ATTEMPT))
        jobs = dict(self._of_jobs(models.Job, found, OF_JOB))
        columns = (_attempt(row, jobs.get((row[1], row[2]))) for row in found)
        return _last(found, size), page_of(ATTEMPT_COLUMNS, columns)

    def _completing(self, wanted: ExportFilter, chosen: QuerySet[Any], size: int) -> Read:
        found = list(rows.raw_values(chosen, COMPLETED))
        return _last(found, size), page_of(ATTEMPT_COLUMNS, map(_completed, found))

    def _dead(self, wanted: ExportFilter, chosen: QuerySet[Any], size: int) -> Read:
        found = list(rows.raw_values(chosen, LETTER))
        attempts = {key: count for key, (count,) in self._of_jobs(models.Job, found, ("attempts",))}
        columns = (
            (
                *(queue, job_id, name, reason, entered, expires, attempts.get((queue, job_id)), retries),
                *(next_retry, kind or None, message or None),
            )
            for _, queue, job_id, name, reason, kind, message, entered, expires, retries, next_retry in found
        )
        return _last(found, size), page_of(DEAD_COLUMNS, columns)

    def _cron(self, wanted: ExportFilter, chosen: QuerySet[Any], size: int) -> Read:
        found = list(chosen.values("id", *CRON))
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
        return _last([(row["id"],) for row in found], size), _page_of_records(records)

    def _bulk(self, wanted: ExportFilter, chosen: QuerySet[Any], size: int) -> Read:
        found = list(chosen.values(*BULK))
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
        return _last([(row["id"],) for row in found], size), _page_of_records(records)

    def _of_jobs(
        self, model: type[Model], found: Sequence[Row], columns: Sequence[str]
    ) -> Iterator[tuple[JobKey, Row]]:
        """Yield the rows of a table that have the queues and job ids of these rows, by queue and job id."""
        ids: dict[str, dict[str, None]] = {}
        for _, queue, job_id, *_ in found:
            ids.setdefault(queue, {})[job_id] = None
        for queue, mine in ids.items():
            for some in rows.chunked(list(mine)):
                chosen = model._default_manager.using(self._alias).filter(queue=queue, job_id__in=some)
                for job_id, *values in rows.raw_values(chosen, ("job_id", *columns)):
                    yield (queue, job_id), tuple(values)


def _states(wanted: ExportFilter) -> list[str] | None:
    states = wanted.states
    if wanted.table == "results":
        states = TERMINAL if states is None else states & TERMINAL
    return None if states is None else sorted(state.value for state in states)


def _last(found: Sequence[Row], size: int) -> int | None:
    return int(found[-1][0]) if len(found) == size else None


def _job(row: Row) -> Row:
    """Convert a row of `JOB`, with an optional payload, to `JOB_COLUMNS`."""
    options = rows.unpack_options(bytes(row[16]))
    return (
        *row[1:11],
        *(row[11] or None, row[12] or None),
        *row[13:16],
        *(options.tags, options.headers.text or None),
        *(row[17] or None, row[18] or None, row[19] or None),
        *(row[20] if row[19] else None, row[21]),
        *map(bytes, row[22:]),
    )


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
