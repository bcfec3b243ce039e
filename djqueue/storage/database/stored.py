"""Jobs as rows, and where pending ones wait: ready to be claimed, delayed, or held back by their group."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from djqueue.codecs import decode
from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.job import AttemptRecord, JobFailure
from djqueue.core.options import MSGPACK, JobKey, JobOptions
from djqueue.core.policies import GLOBAL, NO_LIMIT, KeyLimit, Rate
from djqueue.core.states import State
from djqueue.storage.tables import rows
from djqueue.storage.tables.rows import TEXT_LIMIT, clean, group_limit_of

from . import limiters
from .dialects import Constants, Row
from .transaction import Tx, group_lock, use_lock

COLUMNS = ", ".join(
    f'j."{name}"' for name in ("id", *("queue", "job_id", "name", "state", "payload", "options"))
) + (
    ", j.created_at, j.run_at, j.started_at, j.finished_at, j.attempts, j.failures, j.stalls, "
    "j.worker, j.reason"
    ", j.error_type, j.error_message, j.traceback, j.progress, j.items, j.token, j.expires_at"
)
NEW_JOB = (
    *("id", "queue", "job_id", "name", "state", "priority", "payload", "content_type", "options"),
    *("unique_key", "concurrency_key", "subject", "created_at", "run_at", "expires_at"),
)
"""Columns of a new job."""
UNTOUCHED: Constants = (
    *((name, "0") for name in ("attempts", "failures", "stalls", "items", "token")),
    *((name, "''") for name in ("worker", "reason", "error_type", "error_message", "traceback", "process")),
)
"""Columns that are the same in all new jobs. As parameters, they would be too many: psycopg parses statements
with more than 50 each time.
"""
NO_OPTIONS = JobOptions()
TOKENS = 20
"""Bits of a token for the number of the job's claim; the others are its primary key."""
HOT = ("djqueue_delayed", "djqueue_held", "djqueue_ready", "djqueue_claim")
"""Tables of the states of jobs, in the order in which a job comes to them."""
MEASURED = {
    "djqueue_job_result": ("kept_size", "result_bytes"),
    "djqueue_dead_letter": ("size", "letter_bytes"),
}
"""Tables of what belongs to a job and may be counted: the column of its size, and the sum of these."""
OWNED = ("djqueue_job_attempt", "djqueue_job_log", "djqueue_job_item")
"""Other tables of what belongs to a job, by its queue and id."""


class StoredJob(EngineJob):
    """A job with the primary key of its row."""

    __slots__ = ("cancel", "expires_at", "kept", "pk")

    pk: int
    expires_at: int | None
    """When its ttl expires, or its record."""
    cancel: bool
    """Whether the cancellation of its attempt was requested."""
    kept: tuple[int, ...]
    """Order and size of the record of a job that ends now; empty if its queue does not count it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = ()


def job_of(row: Row) -> StoredJob:
    """Convert a row of `COLUMNS`."""
    options = rows.unpack_options(bytes(row[6]))
    job = StoredJob(row[2], row[1], row[3], bytes(row[5]), options, State(row[4]), row[7], row[8])
    job.pk = row[0]
    job.started_at, job.finished_at = row[9] or 0, row[10] or 0
    job.attempts, job.failures, job.stalls, job.worker, job.reason = row[11:16]
    if row[16]:
        job.error = JobFailure(row[16], row[17], row[18])
    if row[19] is not None:
        job.progress = decode(bytes(row[19]), MSGPACK)
    if row[20]:
        job.stream = ItemStream(0, None, row[20])
    job.token = row[21]
    job.expires_at = row[22]
    job.cancel = False
    return job


USE_EVERY = 60_000
"""Milliseconds after which a process records again that a queue is used, as another may obliterate it."""
NEXT_DUE = "SELECT run_at FROM djqueue_delayed WHERE queue = {} ORDER BY run_at LIMIT 1"
"""When the next delayed job of a queue is due. PostgreSQL may read all of them for MIN."""


def queues_in(table: str) -> str:
    """Return a SELECT of the queues (`name`) in a table, which a further condition may follow.

    Each queue is one probe of an index, however many rows the table has.
    """
    return (
        f"WITH RECURSIVE found(name) AS (SELECT (SELECT queue FROM {table} ORDER BY queue LIMIT 1) UNION ALL "
        f"SELECT (SELECT queue FROM {table} WHERE queue > found.name ORDER BY queue LIMIT 1) FROM found "
        "WHERE found.name IS NOT NULL) SELECT name FROM found WHERE name IS NOT NULL"
    )


def used_queues(tx: Tx, table: str = "") -> list[str]:
    """Return the queues in a table, or those with ready, delayed or held jobs, in order."""
    tables = [table] if table else ["djqueue_ready", "djqueue_delayed", "djqueue_held"]
    names: set[str] = set()
    for one in tables:
        names.update(name for (name,) in tx.rows(queues_in(one)))
    return sorted(names)


def use(tx: Tx, queue: str) -> None:
    """Record that a queue is used, unless this process has done so lately."""
    used_until = tx.database.used_until
    if queue in tx.used or used_until.get(queue, 0) > tx.now - USE_EVERY:
        return
    if not record_use(tx, queue, waits=False):
        return
    tx.used.add(queue)
    tx.then(lambda: used_until.__setitem__(queue, tx.now))


def record_use(tx: Tx, queue: str, *, waits: bool = True) -> bool:
    """Record that a queue is used, and its key mode; return whether it is recorded. A storage without
    settings follows the recorded mode.

    Raises ConfigurationError if it is used in another key mode.

    Args:
        tx: The transaction.
        queue: The queue.
        waits: Wait for another transaction that records the first use of the queue. Otherwise, the record
            is left to that one.
    """
    policy = tx.database.policy(queue)
    recorded = tx.value(
        "SELECT mode FROM djqueue_queue_state s JOIN djqueue_group_state g ON g.queue = s.name "
        "AND g.concurrency_key = '' AND mode <> '' WHERE s.name = ?",
        queue,
    )
    if recorded is None:
        if waits:
            tx.lock(use_lock(queue))
        elif tx.try_lock([use_lock(queue)]):
            return False
        tx.run(
            "INSERT INTO djqueue_queue_state (name, paused, limits_set) VALUES (?, FALSE, FALSE) "
            "ON CONFLICT (name) DO NOTHING",
            queue,
        )
        recorded = tx.value(
            "INSERT INTO djqueue_group_state (queue, concurrency_key, mode, paused) VALUES (?, '', ?, FALSE) "
            "ON CONFLICT (queue, concurrency_key) DO UPDATE SET mode = "
            "CASE WHEN djqueue_group_state.mode = '' THEN excluded.mode ELSE djqueue_group_state.mode END "
            "RETURNING mode",
            *(queue, policy.key_mode),
        )
    if tx.database.has_settings:
        policy.check_mode(queue, recorded)
    else:
        tx.database.follow_mode(queue, recorded)
    return True


def select(tx: Tx, condition: str, *parameters: Any) -> list[StoredJob]:
    """Return the jobs (`j`) of a condition and what may follow it, without locks."""
    return [
        job_of(row) for row in tx.rows(f"SELECT {COLUMNS} FROM djqueue_job j WHERE {condition}", *parameters)
    ]


def by_keys(tx: Tx, pks: Sequence[int], *, lock: bool = True) -> list[StoredJob]:
    """Return jobs by primary key, in the order of their keys; those that are gone are left out.

    Args:
        lock: Keep other transactions from changing them.
    """
    if not pks:
        return []
    if lock:
        lock_jobs(tx, pks)
    condition, values = tx.among("j.id", pks)
    return select(tx, f"{condition} ORDER BY j.id", values)


def lock_jobs(tx: Tx, pks: Sequence[int], *, share: bool = False) -> None:
    """Wait for other transactions that change these jobs, and keep more from doing so.

    Args:
        tx: The transaction.
        pks: Their primary keys.
        share: Others may lock them in this way, too.
    """
    if tx.dialect.for_update and pks:
        # The row of its state first, which a claim or an end takes, or skips, before anything else. These are
        # statements of their own, each of which sees what the one before has waited for.
        which = f"WHERE id = ANY('{{{', '.join(map(str, pks))}}}') ORDER BY id"
        hot, cold = tx.dialect.for_update, tx.dialect.for_update
        if share:
            # Leases go on.
            hot, cold = tx.dialect.keep, tx.dialect.for_share
        locks = [f"SELECT id FROM {table} {which}{hot}" for table in HOT]
        tx.script("; ".join([*locks, f"SELECT id FROM djqueue_job {which}{cold}"]))


def by_ids(tx: Tx, queue: str, ids: Iterable[str], *, lock: bool = True) -> dict[str, StoredJob]:
    """Return jobs of a queue by id."""
    if not lock or not tx.dialect.for_update:
        condition, values = tx.among("j.job_id", list(dict.fromkeys(ids)))
        jobs = select(tx, f"j.queue = ? AND {condition} ORDER BY j.id", queue, values)
        return {job.id: job for job in jobs}
    condition, values = tx.among("job_id", list(dict.fromkeys(ids)))
    pks = [
        pk for (pk,) in tx.rows(f"SELECT id FROM djqueue_job WHERE queue = ? AND {condition}", queue, values)
    ]
    return {job.id: job for job in by_keys(tx, pks, lock=lock)}


def by_id(tx: Tx, queue: str, id: str, *, lock: bool = True) -> StoredJob | None:
    """Return a job of a queue."""
    return by_ids(tx, queue, [id], lock=lock).get(id)


def ids_by_queue(keys: Iterable[JobKey]) -> dict[str, list[str]]:
    """Return the ids of jobs by queue."""
    grouped: dict[str, list[str]] = {}
    for queue, id in keys:
        grouped.setdefault(queue, []).append(id)
    return grouped


def ended(tx: Tx, pks: Sequence[int]) -> list[StoredJob]:
    """Lock ended jobs; return those that are left, without what their removal does not need."""
    condition, values = tx.among("id", pks)
    rows = tx.rows(
        f"SELECT id, queue, job_id, name, state FROM djqueue_job WHERE {condition} "
        f"AND state IN ('completed', 'failed', 'cancelled') ORDER BY id{tx.dialect.for_update}",
        values,
    )
    jobs = []
    for pk, queue, id, name, state in rows:
        job = StoredJob(id, queue, name, b"", NO_OPTIONS, State(state), 0, 0)
        job.pk = pk
        jobs.append(job)
    return jobs


def new_row(job: StoredJob, packed: bytes) -> Row:
    """Return a new job as `NEW_JOB`."""
    options = job.options
    return (
        *(job.pk, job.queue, job.id, job.name, job.state.value, options.priority, job.payload),
        *(options.content_type, packed, options.unique_key, options.concurrency_key, options.subject),
        *(job.created_at, job.run_at, job.expires_at),
    )


def save(tx: Tx, job: StoredJob) -> None:
    """Write a job's state, counters and times, and how its record counts if it does."""
    error = job.error or rows.NO_ERROR
    tx.run(
        "UPDATE djqueue_job SET state = ?, run_at = ?, started_at = ?, finished_at = ?, expires_at = ?, "
        "attempts = ?, failures = ?, stalls = ?, worker = ?, reason = ?, error_type = ?, error_message = ?, "
        f"traceback = ?, token = ?{', kept_order = ?, kept_size = ?' if job.kept else ''} WHERE id = ?",
        *(job.state.value, job.run_at, job.started_at or None, job.finished_at or None, job.expires_at),
        *(job.attempts, job.failures, job.stalls, clean(job.worker, TEXT_LIMIT)),
        *(clean(job.reason, TEXT_LIMIT), clean(error.type, TEXT_LIMIT), clean(error.message)),
        *(clean(error.traceback), job.token, *job.kept, job.pk),
    )


def save_options(tx: Tx, job: StoredJob) -> None:
    """Write a job's options."""
    tx.run(
        "UPDATE djqueue_job SET options = ?, priority = ? WHERE id = ?",
        *(rows.pack_options(job.options), job.options.priority, job.pk),
    )


def note_attempt(tx: Tx, job: StoredJob, outcome: str, error: JobFailure | None) -> None:
    """Add the attempt that has just ended to the job's history, as long as the queue says."""
    attempt = AttemptRecord(job.attempts, job.worker, job.started_at, tx.now, outcome, error)
    tx.insert("djqueue_job_attempt", rows.ATTEMPT, [rows.attempt_row(job, attempt)])
    keep_newest(tx, "djqueue_job_attempt", job, tx.database.policy(job.queue).retention.attempts.count)


def history(tx: Tx, job: StoredJob) -> list[AttemptRecord]:
    """Return the ended attempts of a job that did not complete it, without their errors."""
    attempts = tx.rows(
        "SELECT attempt, worker, started_at, finished_at, outcome FROM djqueue_job_attempt "
        "WHERE queue = ? AND job_id = ? ORDER BY id",
        *(job.queue, job.id),
    )
    return [AttemptRecord(*row) for row in attempts]


def keep_newest(tx: Tx, table: str, job: StoredJob, count: int) -> None:
    """Delete all but the newest rows of a job in a table of attempts or log lines."""
    key = "queue = ? AND job_id = ?"
    # Most jobs have few: so a read, not a delete, each time.
    last = tx.value(
        f"SELECT id FROM {table} WHERE {key} ORDER BY id DESC LIMIT 1 OFFSET ?", job.queue, job.id, count
    )
    if last is not None:
        tx.run(f"DELETE FROM {table} WHERE {key} AND id <= ?", job.queue, job.id, last)


def restart(tx: Tx, job: StoredJob) -> None:
    """Drop the streamed items of an attempt: those of the next one start anew."""
    if job.stream is not None:
        job.stream = None
        tx.run("UPDATE djqueue_job SET items = 0 WHERE id = ?", job.pk)
        tx.run("DELETE FROM djqueue_job_item WHERE queue = ? AND job_id = ?", job.queue, job.id)


def delete(tx: Tx, jobs: Sequence[StoredJob]) -> None:
    """Delete the rows of jobs and of what belongs to them, and what is counted of them."""
    for queue, ids in ids_by_queue((job.queue, job.id) for job in jobs).items():
        condition, values = tx.among("job_id", ids)
        for table, (size, total) in MEASURED.items():
            deleted = tx.rows(
                f"DELETE FROM {table} WHERE queue = ? AND {condition} RETURNING {size}", queue, values
            )
            tx.keep(queue, total, -sum(size or 0 for (size,) in deleted))
        for table in OWNED:
            tx.run(f"DELETE FROM {table} WHERE queue = ? AND {condition}", queue, values)
    condition, values = tx.among("id", [job.pk for job in jobs])
    for queue, state, size in tx.rows(
        f"DELETE FROM djqueue_job WHERE {condition} RETURNING queue, state, kept_size", values
    ):
        if size is not None:
            tx.keep(queue, state, -1)
            tx.keep(queue, f"{state}_bytes", -size)


# Where pending jobs wait.


READY = ("id", "queue", "rank", "seq", "name", "concurrency_key", "weight", "stalls", "expires_at")
DELAYED = ("id", "queue", "run_at")
KEY_LIMIT = "queue, concurrency_key, concurrency, paused, rate_capacity, rate_per, weight"
"""Columns of the overrides of a group, for `group_limit_of`."""
HELD = ("id", "queue", "concurrency_key", "seq", "name", "weight")


def ready_row(job: StoredJob, seq: int) -> Row:
    """Return a job as `READY`."""
    options = job.options
    expires_at = job.expires_at if not job.started_at else None
    return (
        *(job.pk, job.queue, -options.priority, seq, job.name, options.concurrency_key, options.weight),
        *(job.stalls, expires_at),
    )


def is_grouped(tx: Tx, job: StoredJob) -> bool:
    """Return whether a group may hold a job back."""
    return holding_group(tx, job.queue, job.options.concurrency_key) is not None


def holding_group(tx: Tx, queue: str, group: str | None) -> str | None:
    """Return a group of a queue that may hold jobs back; None if groups do not, or there is none."""
    return None if tx.database.policy(queue).key_mode == GLOBAL else group


def place(tx: Tx, job: StoredJob, *, front: bool = False, is_blocked: bool = False) -> None:
    """Put a pending job where it waits, and give it the state."""
    if is_blocked:
        job.state = State.BLOCKED
    elif job.run_at > tx.now:
        job.state = State.DELAYED
        tx.insert("djqueue_delayed", DELAYED, [(job.pk, job.queue, job.run_at)])
    else:
        job.state = State.WAITING
        front = front or job.options.lifo
        if not is_grouped(tx, job):
            push(tx, [job], front=front)
        else:
            group_of(tx, job).admit([job], front=front)


def push(tx: Tx, jobs: Sequence[StoredJob], *, front: bool = False) -> None:
    """Make jobs ready, behind or before those of their priority."""
    if not jobs:
        return
    numbers = tx.numbers(len(jobs))
    rows = [ready_row(job, -number if front else number) for job, number in zip(jobs, numbers, strict=True)]
    tx.insert("djqueue_ready", READY, rows)
    tx.woken.update(job.queue for job in jobs)


def displace(tx: Tx, job: StoredJob) -> None:
    """Take a pending job out of where it waits."""
    if job.state is State.BLOCKED:
        return
    if job.state is State.DELAYED:
        tx.run("DELETE FROM djqueue_delayed WHERE id = ?", job.pk)
        return
    if not is_grouped(tx, job):
        tx.run("DELETE FROM djqueue_ready WHERE id = ?", job.pk)
        return
    group = group_of(tx, job)
    for table in ("djqueue_ready", "djqueue_held"):
        tx.run(f"DELETE FROM {table} WHERE id = ?", job.pk)
    group.advance()


LOCKED_AGAIN = 100
"""Milliseconds after which a group tries again to let a job continue that another transaction has locked."""
NOTHING: Mapping[str, int] = {}
NO_RATE = Rate(1, 1)
"""Fills the columns of a group without a rate."""


class LockedGroup:
    """One group of a queue, locked for the rest of the transaction unless it is only read.

    As many jobs of a group as its weight are ready, if its limit and its rate allow; the others are held back
    in the order of arrival. When a ready one is claimed, or an active one ends, the next becomes ready. So a
    claim never meets a job that its group holds back, and groups take turns by their weights.
    """

    def __init__(
        self,
        tx: Tx,
        queue: str,
        name: str,
        *,
        lock: bool = True,
        limits: Mapping[str, KeyLimit] | None = None,
    ) -> None:
        self.tx = tx
        self.queue = queue
        self.name = name
        if lock:
            tx.lock(group_lock(queue, name))
        policy = tx.database.policy(queue)
        limits_by_name = overrides(tx, queue, [name]) if limits is None else limits
        default, own = limits_by_name.get("", NO_LIMIT), limits_by_name.get(name, NO_LIMIT)
        self.paused = own.paused
        self.limit: int = own.concurrency or default.concurrency or policy.key_concurrency
        self.rate: Rate | None = own.rate or default.rate or policy.key_rate
        self.weight: int = own.weight or default.weight or policy.key_weights.get(name, 1)

    def ready(self) -> int:
        """Return the number of its ready jobs."""
        return self._count("djqueue_ready")

    def active(self) -> int:
        """Return the number of its active jobs."""
        return self._count("djqueue_claim")

    def held(self) -> int:
        """Return the number of jobs that it holds back."""
        return self._count("djqueue_held")

    def admit(self, jobs: Sequence[StoredJob], *, front: bool = False) -> None:
        """Make jobs ready, one after the other, and hold back those for which it has no room."""
        free = 0 if self.has_held() else max(0, min(self.weight, self._room()) - self.ready())
        push(self.tx, jobs[:free], front=front)
        if held := jobs[free:]:
            self._hold(held, front=front)
            self.note_rest()

    def readmit(self, job: StoredJob) -> None:
        """Like `admit`, for a job that was active and comes back before all others of its group."""
        if self.ready() < self._room():
            push(self.tx, [job], front=True)
        else:
            self._hold([job], front=True)
        self.note_rest()

    def advance(self) -> int:
        """Make the next jobs ready that may be; return their number."""
        return advance(self.tx, self.queue, [self.name])

    def free(self, active: int, ready: int) -> int:
        """Return how many more of its jobs may be ready."""
        return min(self.weight, self._room(active)) - ready

    def note_rest(self) -> None:
        """Record when the group's rate lets its next job be ready, if the rate alone holds it back."""
        if self.rate is None:
            return
        ready = self.ready()
        room = min(self.limit - self.active(), self.weight, self.rate.capacity)
        rests = self.has_held() and not self.paused and ready < room
        at = self._tokens(self.rate).time_of(ready + 1) if rests else None
        limiters.set_rest(self.tx, self.queue, self.name, self.rate, at)

    def hold_back(self) -> None:
        """Hold back ready jobs that may not be ready any more, because a limit was lowered."""
        room = max(0, self._room())
        excess = self.tx.rows(
            "SELECT id FROM djqueue_ready WHERE queue = ? AND concurrency_key = ? ORDER BY rank, seq "
            "LIMIT 1000000 OFFSET ?",
            *(self.queue, self.name, room),
        )
        jobs = {job.pk: job for job in by_keys(self.tx, [pk for (pk,) in excess])}
        for (pk,) in reversed(excess):
            if self.tx.run("DELETE FROM djqueue_ready WHERE id = ?", pk):
                self._hold([jobs[pk]], front=True)

    def _hold(self, jobs: Sequence[StoredJob], *, front: bool) -> None:
        numbers = self.tx.numbers(len(jobs))
        rows = [
            (job.pk, self.queue, self.name, -number if front else number, job.name, job.options.weight)
            for job, number in zip(jobs, numbers, strict=True)
        ]
        self.tx.insert("djqueue_held", HELD, rows)

    def _room(self, active: int | None = None) -> int:
        """Return how many jobs may be ready if all of them may start."""
        if self.paused:
            return 0
        room = self.limit - (self.active() if active is None else active)
        if self.rate is None or room <= 0:
            return room
        return min(room, self._tokens(self.rate).available)

    def _tokens(self, rate: Rate) -> limiters.RateTokens:
        return limiters.rate_tokens(self.tx, self.queue, self.name, rate)

    def has_held(self) -> bool:
        """Return whether it holds jobs back."""
        held = "SELECT 1 FROM djqueue_held WHERE queue = ? AND concurrency_key = ? LIMIT 1"
        return self.tx.row(held, self.queue, self.name) is not None

    def _count(self, table: str) -> int:
        counted = f"SELECT COUNT(*) FROM {table} WHERE queue = ? AND concurrency_key = ?"
        number: int = self.tx.value(counted, self.queue, self.name)
        return number


def group_of(tx: Tx, job: StoredJob) -> LockedGroup:
    """Return the group of a job."""
    assert job.options.concurrency_key is not None
    return LockedGroup(tx, job.queue, job.options.concurrency_key)


def leave_group(tx: Tx, job: StoredJob) -> None:
    """Make the next jobs of a group ready after one of its active jobs has ended."""
    if is_grouped(tx, job):
        group_of(tx, job).advance()


def advance(tx: Tx, queue: str, names: Sequence[str], claimed: Mapping[str, int] = NOTHING) -> int:
    """Make the next jobs of groups ready that may be, one group after the other; return their number.

    Args:
        tx: The transaction.
        queue: The queue of the groups.
        names: Groups of which jobs have ended or started, each once.
        claimed: How many jobs of them have become active.
    """
    tx.lock(*{group_lock(queue, name) for name in names})
    limits = overrides(tx, queue, names)
    groups = [LockedGroup(tx, queue, name, lock=False, limits=limits) for name in names]
    # The others have as many active jobs as they may have.
    groups = [one for one in groups if one.rate is not None or one.limit > claimed.get(one.name, 0)]
    if not groups:
        return 0
    first = "SELECT id FROM djqueue_held WHERE queue = ? AND concurrency_key = "
    order = f"ORDER BY seq LIMIT ?{tx.dialect.skip_locked}"
    listed, values = tx.listed([group.name for group in groups])
    counted = tx.rows(
        "SELECT q.name, EXISTS (SELECT 1 FROM djqueue_held WHERE queue = ? AND concurrency_key = q.name), "
        "(SELECT COUNT(*) FROM djqueue_claim WHERE queue = ? AND concurrency_key = q.name), "
        "(SELECT COUNT(*) FROM djqueue_ready WHERE queue = ? AND concurrency_key = q.name), "
        f"({first}q.name {order}) FROM {listed} q",
        *(queue, queue, queue, queue, 1, values),
    )
    situations = {name: situation for name, *situation in counted}
    freed: list[int] = []
    locked: list[LockedGroup] = []
    for group in groups:
        has_held, active, ready, best = situations[group.name]
        if group.rate is not None and group.name in claimed:
            limiters.rate_tokens(tx, queue, group.name, group.rate).take(claimed[group.name])
        if not has_held or (free := group.free(active, ready)) <= 0:
            continue
        found = [] if best is None else [best]
        if free > 1:
            found = [pk for (pk,) in tx.rows(f"{first}? {order}", queue, group.name, free)]
        freed += found
        if len(found) < free and tx.dialect.skip_locked:
            locked.append(group)
    make_ready(tx, freed)
    for group in groups:
        group.note_rest()
    for group in locked:
        if group.has_held():
            # Another transaction, which may not move it, has locked the next job.
            limiters.set_rest(tx, queue, group.name, group.rate or NO_RATE, tx.tick + LOCKED_AGAIN)
    return len(freed)


def overrides(tx: Tx, queue: str, groups: Sequence[str]) -> dict[str, KeyLimit]:
    """Return the overrides for all groups of a queue, by an empty name, and those of some groups."""
    condition, values = tx.among("concurrency_key", ["", *groups])
    rows = tx.rows(
        f"SELECT {KEY_LIMIT} FROM djqueue_group_state WHERE queue = ? AND {condition}", queue, values
    )
    return {row[1]: group_limit_of(row) for row in rows}


def make_ready(tx: Tx, pks: Sequence[int]) -> None:
    """Make held jobs ready, behind the others of their priority, in this order."""
    if not pks:
        return
    condition, values = tx.among("held.id", pks)
    held_rows = tx.rows(
        "SELECT held.id, held.queue, -job.priority, held.name, held.concurrency_key, held.weight, "
        "job.stalls, CASE WHEN job.started_at IS NULL THEN job.expires_at END FROM djqueue_held AS held "
        f"JOIN djqueue_job AS job ON job.id = held.id WHERE {condition}",
        values,
    )
    held = {row[0]: row for row in held_rows}
    condition, values = tx.among("id", pks)
    tx.run(f"DELETE FROM djqueue_held WHERE {condition}", values)
    rows = [
        (*held[pk][:3], number, *held[pk][3:]) for pk, number in zip(pks, tx.numbers(len(pks)), strict=True)
    ]
    tx.insert("djqueue_ready", READY, rows)
    tx.woken.update(row[1] for row in rows)
