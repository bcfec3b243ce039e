"""A restore: the tables are emptied and filled with a snapshot, in the open transaction."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from djqueue.codecs import MSGPACK, encode
from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.groups import NO_LIMIT, GroupLimit
from djqueue.core.job import DeadLetterRecord, JobFailure
from djqueue.core.limiter import Rate
from djqueue.core.options import DEFAULT_OPTIONS, JobKey
from djqueue.core.queue import GLOBAL
from djqueue.core.states import LIVE, TERMINAL, State
from djqueue.storage.snapshots import QueueSettings
from djqueue.storage.snapshotspool import SnapshotSpool, SpooledJob
from djqueue.storage.tables import rows
from djqueue.storage.tables.rows import TEXT_LIMIT, clean

from . import dependencies, stored
from .dependencies import DEPENDENCY
from .dialects import Row
from .ready import DELAYED, HELD, READY
from .stored import HOT
from .transaction import STATES, Tx

JOBS = 1_000
"""Jobs that are written at a time."""
SETTINGS = ("djqueue_queue_state", "djqueue_group_state", "djqueue_limiter_state")
CLEARED = (
    *("djqueue_ready", "djqueue_delayed", "djqueue_held", "djqueue_claim"),
    *("djqueue_dependency", "djqueue_unique_key", "djqueue_rate_bucket"),
    *("djqueue_job", "djqueue_job_result", "djqueue_job_attempt", "djqueue_job_log", "djqueue_job_item"),
    *("djqueue_dead_letter", "djqueue_group_state", "djqueue_limiter_state"),
    *("djqueue_retained_job", "djqueue_retained_total"),
    *("djqueue_retention_tally", "djqueue_pinned", "djqueue_expiring"),
)
"""Tables that a restore empties, besides those of queues and schedules."""
JOB = (
    *("id", "queue", "job_id", "name", "state", "priority", "payload", "content_type", "options"),
    *("unique_key", '"group"', "subject", "created_at", "run_at", "started_at", "finished_at", "expires_at"),
    *("attempts", "failures", "stalls", "worker", "reason", "error_type", "error_message", "traceback"),
    *("progress", "items", "retries", "inbox"),
)
UNIQUE_KEY = ("queue", "key", "owner", "expires_at")
QUEUE = ("name", "paused", "limits_set", "rate_capacity", "rate_per", "concurrency")
LIMITER = ("name", "rate_capacity", "rate_per", "concurrency")
GROUP = ("queue", '"group"', "mode", "concurrency", "paused", "rate_capacity", "rate_per", "weight")
COLUMNS = {
    "djqueue_job": JOB,
    "djqueue_ready": READY,
    "djqueue_delayed": DELAYED,
    "djqueue_held": HELD,
    "djqueue_dependency": DEPENDENCY,
    "djqueue_unique_key": UNIQUE_KEY,
    "djqueue_job_result": rows.RESULT,
    "djqueue_job_attempt": rows.ATTEMPT,
    "djqueue_job_log": rows.LOG,
    "djqueue_job_item": rows.ITEM,
}
"""Columns of the rows of jobs, by table."""


class TableRestore:
    """Replaces everything that the tables hold, except schedules, by a snapshot.

    Args:
        tx: The transaction.
        spool: The snapshot.
        now: The time of the restore, in UTC milliseconds.
    """

    def __init__(self, tx: Tx, spool: SnapshotSpool, now: int) -> None:
        self._tx = tx
        self._spool = spool
        self._now = now
        self._rows: dict[str, list[Row]] = defaultdict(list)
        """Rows to insert, by table."""
        self._states: dict[JobKey, State] = {}
        """States of the dependencies of the current jobs."""
        self._queue = ""
        self._room: dict[str, int] = {}
        """Number of further jobs of each group of the current queue may be ready."""
        self._ended: list[tuple[int, JobKey, State]] = []
        """Jobs that wait for a dependency that has ended, so that they end with it."""

    def lock(self) -> None:
        """Keep other transactions from changing jobs and settings until this one ends."""
        if self._tx.dialect.for_update:  # SQLite has one writer.
            self._tx.run(f"LOCK TABLE {', '.join((*HOT, 'djqueue_job', *SETTINGS))} IN EXCLUSIVE MODE")

    def run(self) -> None:
        """Replace everything."""
        self._clear()
        self._write_settings()
        for page in self._spool.by_position(JOBS):
            self._write_jobs(page)
        for letters in self._spool.letters(JOBS):
            self._tx.insert("djqueue_dead_letter", rows.LETTER, [_letter_row(letter) for letter in letters])
        for pk, key, state in self._ended:
            for job in stored.by_keys(self._tx, [pk]):
                dependencies.resolve(self._tx, job, key, state)

    def _clear(self) -> None:
        tx = self._tx
        sums = ", ".join(f"SUM(in_{state.value})" for state in STATES)
        for queue, *numbers in tx.rows(f"SELECT queue, {sums} FROM djqueue_tally GROUP BY queue"):
            # The totals stay: they belong to the metrics, which a restore does not change.
            for state, number in zip(STATES, numbers, strict=True):
                tx.shift(queue, state, None, int(number))
        for table in CLEARED:
            tx.run(f"DELETE FROM {table}")

    def _write_settings(self) -> None:
        tx, spool = self._tx, self._spool
        tx.run("DELETE FROM djqueue_queue_state")
        queues, groups = [], []
        for name in spool.names():
            settings = spool.queues.get(name, QueueSettings())
            rate, concurrency = settings.limits or (None, None)
            are_set = settings.limits is not None
            queues.append((name, settings.paused, are_set, *_pair(rate), concurrency))
            for group, limit in {"": NO_LIMIT, **settings.groups}.items():
                mode = "" if group else settings.group_mode
                if limit != NO_LIMIT or mode:
                    limits = limit.concurrency, limit.paused, *_pair(limit.rate), limit.weight
                    groups.append((name, group, mode, *limits))
        tx.insert("djqueue_queue_state", QUEUE, queues)
        tx.insert("djqueue_group_state", GROUP, groups)
        # As for jobs, the first of two records of one limiter counts.
        limiters = {name: (name, *_pair(rate), limit) for name, rate, limit in reversed(spool.limiters)}
        tx.insert("djqueue_limiter_state", LIMITER, list(limiters.values()))

    def _write_jobs(self, page: Sequence[SpooledJob]) -> None:
        """Write jobs, which follow those that are already written."""
        tx = self._tx
        live = [job for job, _ in page if job.state in LIVE]
        self._states = self._spool.states({key for job in live for key in job.options.depends_on})
        for pk, (job, retries) in zip(tx.numbers(len(page)), page, strict=True):
            if job.state in LIVE:
                self._place(pk, job)
            tx.shift(job.queue, None, job.state)
            tx.woken.add(job.queue)
            self._rows["djqueue_job"].append(self._job_row(pk, job, retries))
            self._add_belongings(job)
        for table, columns in COLUMNS.items():
            tx.insert(table, columns, self._rows.pop(table, []))

    def _place(self, pk: int, job: EngineJob) -> None:
        """Add a job that has not ended to where it waits, with its unique key."""
        key, ttl = job.options.unique_key, job.options.unique_ttl
        free_at = None if ttl is None else job.created_at + job.stepped + ttl
        if key is not None and (free_at is None or free_at > self._now):
            self._rows["djqueue_unique_key"].append((job.queue, key, pk, free_at))
        if self._waits(pk, job):
            return
        if job.state is State.BLOCKED:
            job.state = State.DELAYED if job.run_at > self._now else State.WAITING
        if job.state is State.DELAYED:
            self._rows["djqueue_delayed"].append((pk, job.queue, job.run_at))
            return
        job.run_at = min(job.run_at, self._now)  # The other storage's clock may have been ahead.
        options = job.options
        if self._may_be_ready(job):
            expires_at = self._expiry(job)
            order = -options.priority, pk
            row = pk, job.queue, *order, job.name, options.group, options.weight, job.stalls, expires_at
            self._rows["djqueue_ready"].append(row)
        else:
            self._rows["djqueue_held"].append((pk, job.queue, options.group, pk, job.name))

    def _waits(self, pk: int, job: EngineJob) -> bool:
        """Add the dependencies of a job; return whether it waits for one of them.

        A dependency without a record has completed: its dependent would have ended with it otherwise.
        """
        policy = job.options.on_dependency_failure
        is_patient = policy == "wait" or job.error is not None
        waits = False
        for key in dict.fromkeys(job.options.depends_on):
            state = self._states.get(key)
            if state is None:
                continue
            is_over = state in TERMINAL and not (state is State.FAILED and is_patient)
            is_met = job.state is not State.BLOCKED or (
                is_over and (state is State.COMPLETED or policy == "ignore")
            )
            if not (is_met and state is State.FAILED):  # A failed job leaves no record to read.
                self._rows["djqueue_dependency"].append((pk, *key, is_met))
            if not is_met:
                waits = True
                if is_over:
                    self._ended.append((pk, key, state))
        return waits

    def _may_be_ready(self, job: EngineJob) -> bool:
        """Return whether a waiting job may be claimed by the rules of its group: see `LockedGroup`."""
        group, policy = job.options.group, self._tx.storage.policy(job.queue)
        if group is None or policy.group_mode == GLOBAL:
            return True
        if job.queue != self._queue:
            self._queue, self._room = job.queue, {}
        if group not in self._room:
            groups = self._spool.queues.get(job.queue, QueueSettings()).groups
            default, own = groups.get("", GroupLimit()), groups.get(group, GroupLimit())
            limit: int = own.concurrency or default.concurrency or policy.group_concurrency
            weight: int = own.weight or default.weight or policy.group_weights.get(group, 1)
            rate = own.rate or default.rate or policy.group_rate
            # No job is active, and the rate has all its tokens.
            room = min(limit, weight) if rate is None else min(limit, weight, rate.capacity)
            self._room[group] = 0 if own.paused else room
        self._room[group] -= 1
        return self._room[group] >= 0

    def _expiry(self, job: EngineJob) -> int | None:
        """Return when the ttl of a pending job expires; one that has started, or was retried, has none."""
        ttl = job.options.ttl
        if ttl is None or job.started_at or job.error is not None:
            return None
        return job.created_at + job.stepped + ttl

    def _job_row(self, pk: int, job: EngineJob, retries: int) -> Row:
        options, error = job.options, job.error or rows.NO_ERROR
        if job.state in LIVE:
            expires_at = self._expiry(job)
        else:
            expires_at = rows.expiry(job, self._tx.storage.policy(job.queue).retention.of(job.state))
        return (
            *(pk, job.queue, job.id, job.name, job.state.value, options.priority, job.payload),
            *(options.content_type, rows.pack_options(options), options.unique_key, options.group),
            *(options.subject, job.created_at, job.run_at, job.started_at or None, job.finished_at or None),
            *(expires_at, job.attempts, job.failures, job.stalls, clean(job.worker, TEXT_LIMIT)),
            *(clean(job.reason, TEXT_LIMIT), clean(error.type, TEXT_LIMIT), clean(error.message)),
            *(clean(error.traceback), None if job.progress is None else encode(job.progress, MSGPACK)),
            *(0 if job.stream is None else job.stream.count, retries, False),
        )

    def _add_belongings(self, job: EngineJob) -> None:
        if job.state is State.COMPLETED and job.result is not None:
            keep = self._tx.storage.policy(job.queue).retention.results
            self._rows["djqueue_job_result"].append(rows.result_row(job, keep))
        if job.history:
            self._rows["djqueue_job_attempt"] += [rows.attempt_row(job, attempt) for attempt in job.history]
        if job.logs:
            self._rows["djqueue_job_log"] += rows.log_rows(job, job.logs)
        if job.stream is not None:
            self._rows["djqueue_job_item"] += _item_rows(job, job.stream)


def _letter_row(letter: DeadLetterRecord) -> Row:
    job = EngineJob(letter.id, letter.queue, letter.name, b"", DEFAULT_OPTIONS, State.FAILED, 0, 0)
    job.error = JobFailure(letter.error_type, letter.error_message)
    return rows.letter_row(job, letter)


def _item_rows(job: EngineJob, stream: ItemStream) -> Iterator[Row]:
    # The items that are kept are the last of those that were sent.
    items = stream.items or []
    for number, item in enumerate(items, stream.count - len(items)):
        yield (job.queue, job.id, number, stream.run, item)


def _pair(rate: Rate | None) -> tuple[int | None, int | None]:
    return (None, None) if rate is None else (rate.capacity, rate.per)
