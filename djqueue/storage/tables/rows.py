"""Convert between the engine's records and rows of the tables: jobs, groups, workers and metrics."""

import json
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgpack
from django.db.models import Model, QuerySet

from djqueue import models
from djqueue.codecs import decode
from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.job import AttemptRecord, DeadLetterRecord, JobFailure, JobRecord
from djqueue.core.metrics import COUNTS, PARTS, Values
from djqueue.core.options import MSGPACK, JobKey, JobOptions
from djqueue.core.overview import Totals
from djqueue.core.pages import JobSummary
from djqueue.core.policies import NO_LIMIT, Hold, Keep, KeepResults, KeyLimit, Rate
from djqueue.core.states import State
from djqueue.core.workers import WorkerInfo

Row = tuple[Any, ...]

KEY = ("queue", "job_id")
OWNED = (models.JobResult, models.DeadLetter, models.JobAttempt, models.JobLog, models.JobItem)
"""Models whose rows belong to a job."""
NEW_JOB = (
    *KEY,
    "name",
    "state",
    "priority",
    "payload",
    "content_type",
    "options",
    "unique_key",
    "concurrency_key",
    "subject",
    "created_at",
    "run_at",
)
"""Fields of a new job; the others have their defaults."""
UNTOUCHED = {
    "started_at": None,
    "finished_at": None,
    "expires_at": None,
    "attempts": 0,
    "failures": 0,
    "stalls": 0,
    "worker": "",
    "reason": "",
    "error_type": "",
    "error_message": "",
    "traceback": "",
    "progress": None,
    "items": 0,
    "token": 0,
    "process": "",
}
"""Fields with their defaults in a new job."""
RESULT = (*KEY, "content_type", "result", "completed_at", "expires_at")
ATTEMPT = (
    *KEY,
    "attempt",
    "worker",
    "started_at",
    "finished_at",
    "outcome",
    "error_type",
    "error_message",
    "traceback",
)
LOG = (*KEY, "at", "line")
LETTER = (
    *KEY,
    "name",
    "reason",
    "error_type",
    "error_message",
    "entered_at",
    "expires_at",
    "retries",
    "next_retry_at",
    "unmet",
)
ITEM = (*KEY, "number", "run", "item")
ITEM_KEY = (*KEY, "number")
MENTION = (*KEY, "name", "state", "created_at", "run_at", "started_at", "finished_at", "reason")
"""Fields of `JobSummary`."""
NO_ERROR = JobFailure("", "", "")
KEEP, KEEP_RESULTS = Keep(), KeepResults()
TEXT_LIMIT = 255
"""Maximum length of columns with a name, in characters."""
CANCEL_REQUESTED = "cancel_requested"
"""Reason of an active job whose cancellation was requested."""


@lru_cache(maxsize=256)
def limits(row: models.QueueState | models.LimiterState) -> tuple[Rate | None, int | None]:
    """Return rate and concurrency of a row."""
    return pair_of_limits(row.rate_capacity, row.rate_per, row.concurrency)


def pair_of_limits(
    capacity: int | None, per: int | None, concurrency: int | None
) -> tuple[Rate | None, int | None]:
    """Return rate and concurrency of the values of these columns."""
    return (Rate(capacity, per or 1_000) if capacity else None), concurrency


def pack_holds(holds: Iterable[Hold]) -> str:
    """Return the column with the holds of a queue."""
    packed = [list(hold) for hold in sorted(holds)]
    return json.dumps(packed) if packed else ""


def unpack_holds(column: str | None) -> tuple[Hold, ...]:
    """Return the holds of a column, by name, among them some that have ended."""
    return tuple(Hold(*hold) for hold in json.loads(column)) if column else ()


def pack_options(options: JobOptions) -> bytes:
    """Pack the options that differ from their defaults."""
    packed: bytes = msgpack.packb(options.as_dict())
    return packed


@lru_cache(maxsize=4096)
def unpack_options(data: bytes) -> JobOptions:
    """Unpack a job's options. Equal options share one object."""
    return JobOptions.from_dict(msgpack.unpackb(data))


def new_rows(jobs: Iterable[EngineJob]) -> dict[tuple[str, str], Row]:
    """Return new jobs as `NEW_JOB`, by key."""
    found = {}
    options, packed = None, b""
    for job in jobs:
        if job.options is not options:
            options = job.options
            packed = pack_options(options)
        found[job.queue, job.id] = (
            job.queue,
            job.id,
            job.name,
            job.state.value,
            options.priority,
            job.payload,
            options.content_type,
            packed,
            options.unique_key,
            options.concurrency_key,
            options.subject,
            job.created_at,
            job.run_at,
        )
    return found


def expiry(job: EngineJob, keep: Keep) -> int | None:
    """Return when the record of a completed or cancelled job expires; None for never or for other states."""
    if job.state is not State.COMPLETED and job.state is not State.CANCELLED:
        return None
    kept = keep.shorten(job.options.kept)
    return None if kept is None else job.finished_at + kept


def result_row(job: EngineJob, keep: KeepResults = KEEP_RESULTS) -> Row:
    """Return the result of a completed job as `RESULT`, with its queue's retention `keep`."""
    expires_at = result_expiry(job, keep)
    return (job.queue, job.id, job.options.content_type, job.result, job.finished_at, expires_at)


def result_expiry(job: EngineJob, keep: KeepResults) -> int | None:
    """Return when the result of a completed job expires; None for never."""
    readable = keep.shorten(job.options.result_ttl)
    return None if readable is None else job.finished_at + readable


def attempt_row(job: EngineJob, attempt: AttemptRecord) -> Row:
    """Return an attempt that did not complete its job as `ATTEMPT`."""
    error = attempt.error or NO_ERROR
    return (
        job.queue,
        job.id,
        attempt.attempt,
        clean(attempt.worker, TEXT_LIMIT),
        attempt.started_at,
        attempt.finished_at,
        attempt.outcome,
        clean(error.type, TEXT_LIMIT),
        clean(error.message),
        clean(error.traceback),
    )


def letter_row(job: EngineJob, letter: DeadLetterRecord) -> Row:
    """Return a dead letter as `LETTER`."""
    error = job.error or NO_ERROR
    return (
        job.queue,
        job.id,
        job.name,
        letter.reason,
        clean(error.type, TEXT_LIMIT),
        clean(error.message),
        letter.entered_at,
        letter.expires_at,
        letter.retries,
        letter.next_retry_at or None,
        pack_keys(letter.unmet),
    )


def item_rows(job: EngineJob, items: Sequence[bytes]) -> list[Row]:
    """Return the last items of the attempt as `ITEM`."""
    assert job.stream is not None
    run, first = job.stream.run, job.stream.count - len(items)
    return [(job.queue, job.id, number, run, item) for number, item in enumerate(items, first)]


def log_rows(job: EngineJob, lines: Iterable[tuple[int, str]]) -> list[Row]:
    """Return log lines as `LOG`."""
    return [(job.queue, job.id, at, clean(line)) for at, line in lines]


def clean(text: str, limit: int | None = None) -> str:
    """Make a text storable in any database: replace NULs and lone surrogates, and truncate it."""
    if not text:
        return text
    if limit is not None and len(text) > limit:
        text = text[:limit]
    if not text.isascii():
        text = text.encode(errors="backslashreplace").decode()[:limit]
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in text else text


JOB_FIELDS = (*NEW_JOB, *UNTOUCHED)
"""All fields of a job's row except its primary key."""


def job_rows(rows: QuerySet[Any]) -> Iterable[Row]:
    """Return rows as `JOB_FIELDS`, with raw integers and bytes."""
    return raw_values(rows, JOB_FIELDS)


def raw_values(rows: QuerySet[Any], names: Sequence[str]) -> Iterable[Row]:
    """Return field values as stored: times remain integer milliseconds."""
    compiler = rows.values_list(*names).query.get_compiler(rows.db)
    for chunk in compiler.execute_sql(result_type="multi") or ():
        for row in chunk:
            yield tuple(row)


def job_from_row(row: Row) -> EngineJob:
    """Convert a row of `JOB_FIELDS` to an engine job."""
    (
        queue,
        job_id,
        name,
        state,
        _priority,
        payload,
        _content_type,
        options,
        _unique_key,
        _group,
        _subject,
        created_at,
        run_at,
        started_at,
        finished_at,
        _expires_at,
        attempts,
        failures,
        stalls,
        worker,
        reason,
        error_type,
        error_message,
        traceback,
        progress,
        items,
        token,
        process,
    ) = row
    unpacked = unpack_options(bytes(options))
    job = EngineJob(job_id, queue, name, bytes(payload), unpacked, State(state), created_at, run_at)
    job.started_at = started_at or 0
    job.finished_at = finished_at or 0
    job.attempts = attempts
    job.failures = failures
    job.stalls = stalls
    job.worker = worker
    job.cancel_requested = job.state is State.ACTIVE and reason == CANCEL_REQUESTED
    job.reason = "" if job.cancel_requested else reason
    if error_type:
        job.error = JobFailure(error_type, error_message, traceback)
    if progress is not None:
        job.progress = decode(bytes(progress), MSGPACK)
    if job.state is State.ACTIVE:
        job.token = token
    else:
        job.last_token = token
    job.process = process
    if items:
        job.stream = ItemStream(0, None, items)
    return job


def mention_of(row: Row) -> JobSummary:
    """Convert a row of `MENTION` to a job summary."""
    queue, job_id, name, state, created_at, run_at, started_at, finished_at, reason = row
    if state == State.ACTIVE.value and reason == CANCEL_REQUESTED:
        reason = ""
    return JobSummary(
        queue, job_id, name, State(state), created_at, run_at, started_at or 0, finished_at or 0, reason
    )


def records(alias: str, queue: str, ids: Sequence[str]) -> dict[str, JobRecord]:
    """Read jobs of a queue by id."""
    found: dict[str, EngineJob] = {}
    for chunk in chunked(ids):
        mine = {"queue": queue, "job_id__in": chunk}
        for row in job_rows(models.Job.objects.using(alias).filter(**mine)):
            job = job_from_row(row)
            found[job.id] = job
    read_belongings(alias, queue, found)
    return {job_id: job.record() for job_id, job in found.items()}


def read_belongings(alias: str, queue: str, jobs: dict[str, EngineJob]) -> None:
    """Load results, ended attempts and log lines of a queue's jobs."""
    for chunk in chunked(list(jobs)):
        mine = {"queue": queue, "job_id__in": chunk}
        for row in raw_values(_of(models.JobResult, alias).filter(**mine), RESULT):
            jobs[row[1]].result = bytes(row[3])
        for row in raw_values(_of(models.JobAttempt, alias).filter(**mine).order_by("id"), ATTEMPT):
            job = jobs[row[1]]
            job.history = [*(job.history or ()), attempt_from_row(row)]
        for row in raw_values(_of(models.JobLog, alias).filter(**mine).order_by("id"), LOG):
            job = jobs[row[1]]
            job.logs = [*(job.logs or ()), (row[2], row[3])]


def attempt_from_row(row: Row) -> AttemptRecord:
    """Convert a row of `ATTEMPT` to an ended attempt."""
    _, _, attempt, worker, started_at, finished_at, outcome, error_type, message, traceback = row
    error = JobFailure(error_type, message, traceback) if error_type else None
    return AttemptRecord(attempt, worker, started_at, finished_at, outcome, error)


def letter_from_row(row: Row) -> DeadLetterRecord:
    """Convert a row of `LETTER` to a dead letter."""
    queue, job_id, name, reason, error_type, message, entered_at, expires_at, retries, next_retry, unmet = row
    again = next_retry or 0
    keys = unpack_keys(unmet)
    return DeadLetterRecord(
        queue, job_id, reason, entered_at, expires_at, retries, again, name, error_type, message, keys
    )


def chunked(values: Sequence[Any], size: int = 500) -> Iterable[Sequence[Any]]:
    """Return slices small enough for a statement's parameters."""
    return (values[start : start + size] for start in range(0, len(values), size))


def _of(model: type[Model], alias: str) -> QuerySet[Any]:
    return model._default_manager.using(alias)


QUEUE_STATE = ("name", "paused", "rate_capacity", "rate_per", "concurrency", "holds")
GROUP_STATE = (
    "queue",
    "concurrency_key",
    "concurrency",
    "paused",
    "rate_capacity",
    "rate_per",
    "weight",
    "mode",
)
"""A row without a group's name applies to every group of the queue, and has the mode."""


def group_row(queue: str, group: str | None, limit: KeyLimit, mode: str = "") -> Row | None:
    """Return a row of `GROUP_STATE`, or None if nothing has to be stored."""
    if limit == NO_LIMIT and not mode:
        return None
    capacity, per = (limit.rate.capacity, limit.rate.per) if limit.rate is not None else (None, None)
    return queue, group or "", limit.concurrency, limit.paused, capacity, per, limit.weight, mode


def key_limits(alias: str, **which: Any) -> dict[tuple[str, str | None], KeyLimit]:
    """Return the limits set on groups, by queue and group; None stands for every group."""
    limits: dict[tuple[str, str | None], KeyLimit] = {}
    rows = models.GroupState.objects.using(alias).filter(**which).values_list(*GROUP_STATE[:-1])
    for row in rows:
        limit = group_limit_of(row)
        if limit != NO_LIMIT:
            limits[row[0], row[1] or None] = limit
    return limits


def group_limit_of(row: Row) -> KeyLimit:
    """Return the limit of a row that begins with the columns of `GROUP_STATE`."""
    concurrency, paused, capacity, per, weight = row[2:7]
    rate = Rate(capacity, per) if capacity and per else None
    return KeyLimit(concurrency, bool(paused), rate, weight)


def recorded_modes(alias: str, queues: Collection[str] | None = None) -> dict[str, str]:
    """Return the recorded modes of queues, or of all, by queue."""
    rows = models.GroupState.objects.using(alias).filter(concurrency_key="").exclude(mode="")
    if queues is None:
        return dict(rows.values_list("queue", "mode"))
    found: dict[str, str] = {}
    for some in chunked(list(queues)):
        found.update(rows.filter(queue__in=some).values_list("queue", "mode"))
    return found


WORKER = WorkerInfo._fields[: WorkerInfo._fields.index("kind")]
"""Fields of a worker with columns of their own; one column has the others."""


def worker_row(info: WorkerInfo) -> tuple[str, dict[str, Any]]:
    """Return a worker's id, and the other fields of its row."""
    values = {name: getattr(info, name) for name in WORKER[1:]}
    values["host"] = clean(info.host, TEXT_LIMIT)
    values["queues"] = None if info.queues is None else list(info.queues)
    values["names"] = list(info.names)
    about: dict[str, Any] = {name: getattr(info, name) for name in WorkerInfo._fields[len(WORKER) :]}
    about["jobs"] = [list(job) for job in info.jobs]
    about["processes"] = [list(process) for process in info.processes]
    return clean(info.id, TEXT_LIMIT), {**values, "about": about}


BUCKET_KEY = ("queue", "name", "tier", "start")
BUCKET = (*BUCKET_KEY, *Totals._fields, "wait", "run")
"""Columns of a bucket of metrics: counts, then two histograms."""


def bucket_row(key: tuple[str, str, int, int], values: Values) -> tuple[Any, ...]:
    """Return the values of a bucket as `BUCKET`."""
    middle = COUNTS + PARTS
    *run, wait_sum, run_sum = values[middle:]
    return (
        *key,
        *values[:COUNTS],
        pack_histogram(wait_sum, values[COUNTS:middle]),
        pack_histogram(run_sum, run),
    )


def bucket_values(row: Sequence[Any]) -> Values:
    """Return the values of a row of `BUCKET`."""
    wait_sum, *wait = _unpack_histogram(row[-2])
    run_sum, *run = _unpack_histogram(row[-1])
    return [*row[len(BUCKET_KEY) : -2], *wait, *run, wait_sum, run_sum]


def pack_histogram(total: int, counts: Sequence[int]) -> bytes:
    """Encode a histogram: its sum, then its parts without the trailing empty ones."""
    many = max((part for part, count in enumerate(counts, 1) if count), default=0)
    packed: bytes = msgpack.packb([total, *counts[:many]])
    return packed


def _unpack_histogram(data: bytes) -> list[int]:
    """Return the sum of a histogram, then all its parts."""
    numbers: list[int] = msgpack.unpackb(bytes(data))
    return numbers + [0] * (1 + PARTS - len(numbers))


def pack_keys(keys: Iterable[JobKey]) -> str:
    """Return the dependencies of a dead letter as they are stored."""
    unmet = list(keys)
    return json.dumps(unmet) if unmet else ""


def unpack_keys(stored: str) -> tuple[JobKey, ...]:
    """Return the dependencies of a dead letter."""
    return tuple((queue, id) for queue, id in json.loads(stored)) if stored else ()
