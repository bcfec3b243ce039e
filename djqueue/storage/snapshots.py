"""Snapshots: everything that a storage holds, read and written as plain records.

A snapshot is a sequence of parts in any order. Each part has records of one kind and, except for limiters and
schedules, of one queue. A record is a mapping of strings to None, booleans, integers, floats, strings, bytes,
and lists and mappings of these; only `progress` may be any value that the MessagePack codec encodes. Strings
may contain lone surrogates. Times are UTC milliseconds, and 0 or None stands for none.

Format 1 has these kinds, with these keys:

    queue       paused, key_mode, limits, key_limits, holds
                limits: {rate: [capacity, per] or None, concurrency}, or None if neither was set.
                key_limits: by concurrency key, "" for the default: {concurrency, paused, rate, weight}.
                holds: [name, since, until or None, reason] of each.
                Every queue that has been used has one record.
    limiter     name, rate, concurrency: as set at run time
    job         id, name, state, position, payload, options, created_at, run_at, started_at, finished_at,
                attempts, failures, stalls, worker, reason, error, result, progress, history, logs, stream,
                cancel_requested, retries
                position: two integers that order the waiting jobs of a queue; lower runs first in a priority.
                options: `JobOptions.as_dict`.            error: [type, message, traceback] or None.
                history: the ended attempts, as lists in the order of `AttemptRecord`; error as above.
                logs: [time, line].                       stream: None, or {run, count, items}.
                retries: automatic retries of a live job so far.
    dead        id, position, reason, entered_at, expires_at, retries, next_retry_at, name, error_type,
                error_message, unmet ([queue, id] of each dependency)
                position: an integer that orders the dead letters of a queue, oldest first.
    schedule    the columns of `CronJob`, without its primary key

A failed job has its dead letter in a part of its own. A dead letter without a failed job is ignored, and so
is the second of two records of one job. Expiry is not stored: it follows from `finished_at`, the job's
options and the bounds of the queue that it is written to. A job or a result is kept for the rest of its time.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from random import Random
from typing import Any, NamedTuple, Protocol

from djqueue.core.enginejob import EngineJob, ItemStream, interrupt, letter_of, supersede, superseded
from djqueue.core.errors import OptionError, SnapshotTargetError
from djqueue.core.job import AttemptRecord, DeadLetterRecord, JobFailure
from djqueue.core.messages import numbered
from djqueue.core.options import JobKey, JobOptions
from djqueue.core.policies import NO_LIMIT, Hold, KeyLimit, QueuePolicy, Rate
from djqueue.core.states import PENDING, State
from djqueue.core.workers import WorkerInfo

FORMAT = 1
"""Version of the records that this version of djqueue reads and writes."""
QUEUE, LIMITER, JOB, DEAD, SCHEDULE = KINDS = ("queue", "limiter", "job", "dead", "schedule")
PAGE = 500
"""Default maximum number of records in a part."""

FIRST = -(1 << 62)
"""A position before all others."""
LAST = 1 << 61
"""A position of dead letters behind all others."""

Position = tuple[int, int]
Record = Mapping[str, Any]
"""One record: see the module."""


class Part(NamedTuple):
    """Some records of one kind."""

    kind: str
    """One of `KINDS`."""
    queue: str
    """The queue of the records; empty for limiters and schedules."""
    records: Sequence[Record]


class SnapshotCounts(NamedTuple):
    """Numbers of written records."""

    queues: int = 0
    limiters: int = 0
    jobs: int = 0
    dead: int = 0
    schedules: int = 0


class ScheduleRows(Protocol):
    """The schedules of a storage that does not hold them itself: rows of a database of the project."""

    def pages(self, size: int) -> Iterator[list[Record]]:
        """Return all schedules in pages; none if the table does not exist."""

    def is_empty(self) -> bool:
        """Return whether there is no schedule."""

    def check(self, records: Sequence[Record]) -> None:
        """Check that the table can hold these records.

        Raises:
            SnapshotTargetError: There are records, but the table does not exist.
            OptionError: A record is invalid.
        """

    def replacing(self, records: Sequence[Record]) -> AbstractContextManager[None]:
        """Return a context manager that replaces all schedules, and commits at the end of the block.

        If the block raises an exception, nothing is replaced. Raises the error of `check`.
        """


class Snapshots(Protocol):
    """Reads and writes of everything that a storage holds, to move it to another time or storage."""

    schedules: ScheduleRows | None = None
    """Where the schedules are, for a storage that does not hold them itself; None: nowhere."""

    def read(self, page: int = PAGE) -> AbstractContextManager[Iterator[Part]]:
        """Return a context manager over all parts, read as they are consumed, in constant memory.

        Each job that exists from the beginning to the end of the read is in it exactly once, in one of the
        states that it had meanwhile, also if it is moved to another queue. A job that is enqueued or removed
        meanwhile is in it at most once. The database storage reads a single moment.

        Args:
            page: Maximum number of records in a part.
        """

    def is_empty(self) -> bool:
        """Return whether the storage holds no job, no dead letter, no schedule and no setting."""

    def was_interrupted(self) -> bool:
        """Return whether the process of a write died and left the storage closed until the next write."""
        return False

    def write(self, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        """Write a snapshot of any storage: all of it, or nothing.

        Jobs come back as saved, with their results, dead letters, attempts and keys. A job that was active
        has no worker any more: it is treated like one whose worker was lost, so its stall is counted and it
        waits again before the others, or becomes a dead letter if it has stalled too often.

        If the iterable raises an exception, nothing is written.

        Args:
            parts: The parts, in any order.
            replace: Delete everything that the storage holds first.

        Raises:
            SnapshotTargetError: The storage is not empty and `replace` is False, or it has live workers or a
                running scheduler.
            OptionError: A record is invalid.
        """


def check_target(snapshots: Snapshots, workers: Sequence[WorkerInfo], *, replace: bool) -> None:
    """Raise SnapshotTargetError unless a snapshot may be written."""
    if workers:
        raise SnapshotTargetError(
            f"{numbered(len(workers), 'worker')} {'is' if len(workers) == 1 else 'are'} running ("
            f"{', '.join(sorted(worker.id for worker in workers)[:3])}"
            f"{', …' if len(workers) > 3 else ''}): stop all workers first"
        )
    if not replace and not snapshots.is_empty():
        raise SnapshotTargetError(
            "the storage is not empty: restore to an empty one, or replace everything that it holds "
            "(replace=True)"
        )


# Conversions.


def job_record(job: EngineJob, position: Position, retries: int = 0) -> dict[str, Any]:
    """Return the record of a job."""
    stream = job.stream
    return {
        "id": job.id,
        "name": job.name,
        "state": job.state.value,
        "position": list(position),
        "payload": job.payload,
        "options": job.options.as_dict(),
        "created_at": job.created_at,
        "run_at": job.run_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "attempts": job.attempts,
        "failures": job.failures,
        "stalls": job.stalls,
        "worker": job.worker,
        "reason": job.reason,
        "error": None if job.error is None else list(job.error),
        "result": job.result,
        "progress": job.progress,
        "history": [_attempt(attempt) for attempt in job.history or ()],
        "logs": [list(line) for line in job.logs or ()],
        "stream": None
        if stream is None
        else {"run": stream.run, "count": stream.count, "items": list(stream.items or ())},
        "cancel_requested": job.cancel_requested,
        "retries": retries,
    }


def _attempt(attempt: AttemptRecord) -> list[Any]:
    return [*attempt[:5], None if attempt.error is None else list(attempt.error)]


def engine_job(queue: str, record: Record) -> EngineJob:
    """Return the job of a record. Raises OptionError if the record is invalid."""
    try:
        return _engine_job(queue, record)
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(JOB, queue, record, error) from error


def _engine_job(queue: str, record: Record) -> EngineJob:
    job = EngineJob(
        record["id"],
        queue,
        record["name"],
        bytes(record["payload"]),
        JobOptions.from_dict(record["options"]),
        State(record["state"]),
        record["created_at"],
        record["run_at"],
    )
    job.started_at = record["started_at"]
    job.finished_at = record["finished_at"]
    job.attempts = record["attempts"]
    job.failures = record["failures"]
    job.stalls = record["stalls"]
    job.worker = record["worker"]
    job.reason = record["reason"]
    job.cancel_requested = record["cancel_requested"]
    job.result = record["result"]
    job.progress = record["progress"]
    if (error := record["error"]) is not None:
        job.error = JobFailure(*error)
    if history := record["history"]:
        job.history = [
            AttemptRecord(
                attempt, worker, started_at, finished_at, outcome, JobFailure(*failure) if failure else None
            )
            for attempt, worker, started_at, finished_at, outcome, failure in history
        ]
    if logs := record["logs"]:
        job.logs = [(at, line) for at, line in logs]
    if (stream := record["stream"]) is not None:
        job.stream = ItemStream(stream["run"], list(stream["items"]), stream["count"])
    return job


def turn(job: EngineJob, position: Position) -> tuple[bool, int, int]:
    """Return a key by which jobs are sorted to be put into their queue one after the other."""
    major, minor = position
    # A job with `lifo` is put before those that are there.
    return (True, -major, -minor) if job.options.lifo else (False, major, minor)


def end_attempt(
    job: EngineJob, policy: QueuePolicy, now: int, random: Random
) -> tuple[Position, DeadLetterRecord | None]:
    """Treat an active job like one whose worker was lost; return its position, and its dead letter if any."""
    letter = interrupt(job, policy, now, random)
    if job.state is State.WAITING:
        job.stream = None
    return (FIRST - job.started_at, 0), letter


def lost_letter(job: EngineJob, policy: QueuePolicy, random: Random) -> DeadLetterRecord:
    """Return a dead letter for a failed job whose own is missing."""
    return letter_of(job, job.finished_at, 0, policy.dead_letters, random)


def resolve_rivals(jobs: Sequence[EngineJob], now: int) -> list[EngineJob]:
    """Cancel pending jobs until each unique key has one; return the cancelled jobs.

    The newer of a job and its successor is kept, otherwise the older job.
    """
    cancelled = []
    for job in superseded(jobs, now):
        supersede(job, now)
        cancelled.append(job)
    owners: dict[JobKey, EngineJob] = {}
    for job in sorted(jobs, key=lambda job: job.created_at):
        key, ttl = job.options.unique_key, job.options.unique_ttl
        if key is None or job.state not in PENDING:
            continue
        if ttl is not None and job.created_at + ttl <= now:
            continue
        if owners.setdefault((job.queue, key), job) is not job:
            job.state, job.reason, job.finished_at = State.CANCELLED, "duplicate", now
            cancelled.append(job)
    return cancelled


def letter_record(letter: DeadLetterRecord, position: int) -> dict[str, Any]:
    """Return the record of a dead letter."""
    record = letter._asdict()
    del record["queue"]
    return {**record, "unmet": [list(key) for key in letter.unmet], "position": position}


def dead_letter(queue: str, record: Record) -> DeadLetterRecord:
    """Return the dead letter of a record. Raises OptionError if the record is invalid."""
    values = {name: value for name, value in record.items() if name != "position"}
    try:
        unmet = tuple((other, job_id) for other, job_id in values.pop("unmet"))
        return DeadLetterRecord(queue=queue, unmet=unmet, **values)
    except (KeyError, TypeError, ValueError) as error:
        raise _invalid(DEAD, queue, record, error) from error


class QueueSettings(NamedTuple):
    """Settings of a queue that were made at run time."""

    paused: bool = False
    key_mode: str = ""
    """The mode in which the queue's concurrency keys are used; empty if it is not recorded."""
    limits: tuple[Rate | None, int | None] | None = None
    """Rate and concurrency; None if neither was set."""
    key_limits: Mapping[str, KeyLimit] = {}
    """Overrides by concurrency key; those of "" are the default of all."""
    holds: tuple[Hold, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was set."""
        return not self.paused and self.limits is None and not self.key_limits and not self.holds

    def record(self) -> dict[str, Any]:
        """Return the record of these settings."""
        limits = None
        if self.limits is not None:
            limits = {"rate": _pair(self.limits[0]), "concurrency": self.limits[1]}
        key_limits = {
            name: {**limit._asdict(), "rate": _pair(limit.rate)}
            for name, limit in self.key_limits.items()
            if limit != NO_LIMIT
        }
        return {
            "paused": self.paused,
            "key_mode": self.key_mode,
            "limits": limits,
            "key_limits": key_limits,
            "holds": [list(hold) for hold in sorted(self.holds)],
        }

    @classmethod
    def of(cls, queue: str, record: Record) -> "QueueSettings":
        """Return the settings of a record. Raises OptionError if the record is invalid."""
        try:
            limits = record["limits"]
            key_limits = {
                name: KeyLimit(**{**limit, "rate": _rate(limit["rate"])})
                for name, limit in record["key_limits"].items()
            }
            return cls(
                record["paused"],
                record["key_mode"],
                None if limits is None else (_rate(limits["rate"]), limits["concurrency"]),
                key_limits,
                tuple(Hold(*hold) for hold in record["holds"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise _invalid(QUEUE, queue, record, error) from error


class LimiterSettings(NamedTuple):
    """Settings of a limiter that were made at run time."""

    name: str
    rate: Rate | None
    concurrency: int | None

    def record(self) -> dict[str, Any]:
        """Return the record of these settings."""
        return {"name": self.name, "rate": _pair(self.rate), "concurrency": self.concurrency}

    @classmethod
    def of(cls, record: Record) -> "LimiterSettings":
        """Return the settings of a record. Raises OptionError if the record is invalid."""
        try:
            return cls(record["name"], _rate(record["rate"]), record["concurrency"])
        except (KeyError, TypeError, ValueError) as error:
            raise _invalid(LIMITER, "", record, error) from error


def _pair(rate: Rate | None) -> list[int] | None:
    return None if rate is None else [rate.capacity, rate.per]


def _rate(pair: Sequence[int] | None) -> Rate | None:
    return None if pair is None else Rate(*pair)


def _invalid(kind: str, queue: str, record: Record, error: Exception) -> OptionError:
    name = record.get("id") or record.get("name") or queue
    return OptionError(
        f"snapshot: the {kind} record {name!r} of queue {queue!r} is invalid: expected a record of format "
        f"{FORMAT} ({type(error).__name__}: {error})"
    )


def check_schedules(rows: ScheduleRows | None, records: Sequence[Record]) -> None:
    """Raise SnapshotTargetError if there are schedules, but no place for them."""
    if rows is not None:
        rows.check(records)
    elif records:
        raise SnapshotTargetError(
            f"the snapshot has {len(records)} schedules, but this storage has no table for them"
        )


@contextmanager
def schedules_replaced(rows: ScheduleRows | None, records: Sequence[Record]) -> Iterator[None]:
    """Replace the schedules if the block succeeds.

    Raises SnapshotTargetError if there are records, but no place for them.
    """
    check_schedules(rows, records)
    if rows is None:
        yield
    else:
        with rows.replacing(records):
            yield


def chunks(records: Iterable[Record], size: int) -> Iterator[list[Record]]:
    """Yield records in lists of at most `size`."""
    page: list[Record] = []
    for record in records:
        page.append(record)
        if len(page) == size:
            yield page
            page = []
    if page:
        yield page
