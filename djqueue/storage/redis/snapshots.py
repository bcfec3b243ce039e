"""Snapshots: reads of all jobs of a storage that is in use. `restore` writes them.

The jobs of each queue are scanned, and each job is read at one moment, with all that belongs to it. A scan
returns each job that is there from its beginning to its end, perhaps twice. A job that is moved to a queue
that was scanned already would be missed. Therefore the queues record which jobs arrive meanwhile, and these
are read at the end, wherever they are by then. Jobs that are between two queues arrive first.
"""

import sqlite3
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple

from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.errors import RestoreInProgressError
from djqueue.core.job import DeadLetterRecord, JobRecord
from djqueue.core.logs import Log
from djqueue.core.states import State
from djqueue.storage import snapshots
from djqueue.storage.export import PAGE_BYTES
from djqueue.storage.snapshots import (
    LimiterSettings,
    Part,
    QueueSettings,
    ScheduleRows,
    SnapshotCounts,
    Snapshots,
    check_schedules,
    check_target,
    job_record,
    letter_record,
)
from djqueue.storage.snapshotspool import SnapshotSpool

from . import records
from .keys import MOVING_KEYS, QueueKeys
from .keyspace import Keyspace, scan_part
from .limits import SharedLimits
from .metrics import Metrics
from .records import ENDED, NUMBER, pack_text, text, unpack
from .restore import STAGING, Restore
from .roundtrips import RedisCommand, ScriptCall, Steps
from .scripts import script
from .sweeping import Removing
from .workers import RedisWorkers

ARRIVALS_TTL = 600_000
"""Milliseconds for which a queue records arriving jobs after the last page of a read."""
HELD_BACK = b"g"
"""State code of a waiting job that its group holds back."""
BEHIND_READY = 1 << 61
"""Added to the places of such jobs, which come after those that are ready."""
CANCEL, RETRIES = 10, 11
"""Indices in the body of a state entry."""
META = (b"paused", b"mode", b"limited", b"capacity", b"per", b"concurrency", b"holds")
logger = Log("djqueue.redis")


class SeenJobs:
    """The jobs that were read, in a temporary file: their number does not matter."""

    def __init__(self) -> None:
        # An empty name is a file that SQLite creates when it is needed, and deletes.
        self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._file.executescript(
            "PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-16000;"
            "CREATE TABLE seen(id TEXT, at INT, queue TEXT, PRIMARY KEY(id, at, queue)) WITHOUT ROWID; BEGIN"
        )

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def add(self, job: EngineJob) -> bool:
        """Add a job; return whether it is new in its queue."""
        values = (job.id, job.created_at, job.queue)
        return self._file.execute("INSERT OR IGNORE INTO seen VALUES (?, ?, ?)", values).rowcount > 0

    def is_elsewhere(self, job: EngineJob) -> bool:
        """Return whether a job with this id and time was seen in another queue."""
        values = (job.id, job.created_at, job.queue)
        found = self._file.execute("SELECT 1 FROM seen WHERE id = ? AND at = ? AND queue != ?", values)
        return found.fetchone() is not None


class FoundJob(NamedTuple):
    """A job that was read."""

    job: EngineJob
    number: int
    """Its place among the jobs of its queue."""
    incarnation: int
    """Its number, which is higher than those of the jobs that came to the queue before."""
    retries: int
    letter: DeadLetterRecord | None
    letter_number: int


class RedisSnapshotReader:
    """One read of a snapshot.

    Args:
        keyspace: The queues.
        limiters: Names of the shared limiters.
        page: Maximum number of records in a part.
    """

    def __init__(self, keyspace: Keyspace, limiters: Iterable[str], page: int) -> None:
        self._keyspace = keyspace
        self._limiters = sorted(limiters)
        self._page = page
        self._known: dict[str, int] = {}
        """Queues, with the number of arrivals that were read."""
        self._marks: dict[str, int] = {}
        """The highest number of a job in each queue before the read."""

    def parts(self) -> Iterator[Part]:
        """Yield all parts except schedules."""
        with closing(SeenJobs()) as seen:
            # Jobs that a process was about to move when it was killed are in no queue: let them arrive first.
            while True:
                for queue in self._known:
                    self._run(self._keyspace.deliver(queue))
                new = [name for name in self._run(self._keyspace.names()) if name not in self._known]
                # All jobs of a queue that is listed later came to it during the read.
                is_first = not self._known
                # The first queues record arrivals before any of them is scanned.
                for name in new:
                    length, rear = self._run(self._record_arrivals(name))
                    self._known[name] = length
                    self._marks[name] = rear if is_first else 0
                for name in new:
                    yield from self._queue(name, seen)
                count = yield from self._arrived(seen)
                if not new and not count:
                    break
        for name in sorted(self._known):
            yield Part(snapshots.QUEUE, name, [self._run(settings(self._keyspace, name)).record()])
        for records_ in snapshots.chunks(self._limiter_records(), self._page):
            yield Part(snapshots.LIMITER, "", records_)

    def _run(self, steps: Steps[Any]) -> Any:
        return self._keyspace.run(steps)

    def _record_arrivals(self, queue: str) -> Steps[tuple[int, int]]:
        """Let a queue record which jobs arrive; return how many were recorded before, and the last number."""
        keys = self._keyspace.keys(queue)
        key = keys.key("arrivals")
        [length] = yield [RedisCommand((b"LLEN", key))]
        if not length:
            # A first entry, which is no id: an empty list would not exist.
            [length] = yield [RedisCommand((b"RPUSH", key, b""))]
        _, rear = yield [
            RedisCommand((b"PEXPIRE", key, ARRIVALS_TTL)),
            RedisCommand((b"HGET", keys.key("meta"), b"rear")),
        ]
        return int(length), int(rear or 0)

    def _queue(self, queue: str, seen: SeenJobs) -> Iterator[Part]:
        keys, cursor = self._keyspace.keys(queue), b"0"
        arrivals = keys.key("arrivals")
        while True:
            steps = scan_part(keys, frozenset(State), None, cursor, self._page)
            cursor, jobs = self._run(steps)
            ids = [job_id for _, job_id in jobs]
            for first in range(0, len(ids), self._page):
                yield from self._read(queue, ids[first : first + self._page], seen)
            for name in self._known if cursor == b"0" else (queue,):
                key = self._keyspace.keys(name).key("arrivals")
                self._keyspace.ask(RedisCommand((b"PEXPIRE", key, ARRIVALS_TTL)))
            if cursor == b"0":
                return
            self._keyspace.ask(RedisCommand((b"PEXPIRE", arrivals, ARRIVALS_TTL)))

    def _arrived(self, seen: SeenJobs) -> Generator[Part, None, int]:
        """Read the jobs that were moved to a queue after its scan had begun; return their number."""
        total = 0
        for queue in self._known:
            key = self._keyspace.keys(queue).key("arrivals")
            while True:
                first = self._known[queue]
                last = first + self._page - 1
                ids = self._keyspace.ask(RedisCommand((b"LRANGE", key, first, last)))
                if not ids:
                    break
                self._known[queue] += len(ids)
                total += len(ids)
                yield from self._read(queue, list(dict.fromkeys(map(text, ids))), seen)
        return total

    def _read(self, queue: str, ids: Sequence[str], seen: SeenJobs) -> Iterator[Part]:
        """Read jobs by id, and follow those that have been moved away."""
        wanted = {queue: list(ids)}
        while wanted:
            moved: dict[str, list[str]] = {}
            for name, left in wanted.items():
                limit = len(left)
                while left:
                    count, jobs, moves = self._run(self._look(name, left[:limit]))
                    left, limit = left[count:], 2 * count
                    for job_id, target in moves:
                        moved.setdefault(target, []).append(job_id)
                    new = [job for job in jobs if self._is_new(job, seen)]
                    yield from _parts(name, new)
            wanted = moved

    def _is_new(self, found: FoundJob, seen: SeenJobs) -> bool:
        """Return whether a job was not read before, in its queue or in another one that it has left."""
        # A job of another queue that has the same id is another job if it was here before the read.
        has_arrived = found.incarnation > self._marks.get(found.job.queue, 0)
        return seen.add(found.job) and not (has_arrived and seen.is_elsewhere(found.job))

    def _look(
        self, queue: str, ids: Sequence[str]
    ) -> Steps[tuple[int, list[FoundJob], list[tuple[str, str]]]]:
        """Read the first of these jobs, about `PAGE_BYTES`; return how many, and which were moved where."""
        keys = self._keyspace.keys(queue)
        theirs = keys.of_jobs(ids, MOVING_KEYS)
        arguments = [PAGE_BYTES, *map(pack_text, ids)]
        [[now, replies]] = yield [ScriptCall(script("snapshot"), keys, arguments, theirs, sequence=False)]
        jobs, moves = [], []
        for job_id, reply in zip(ids, replies, strict=False):
            if isinstance(reply, list):
                if (job := _found(queue, job_id, reply, int(now))) is not None:
                    jobs.append(job)
            elif reply is not None:
                moves.append((job_id, text(reply)))
        return len(replies), jobs, moves

    def _limiter_records(self) -> Iterator[dict[str, Any]]:
        for name in self._limiters:
            limiter = self._run(limiter_settings(self._keyspace, name))
            if limiter is not None:
                yield limiter.record()


class RedisSnapshots(Snapshots):
    """Snapshots of all queues, and of the limiters that the settings name."""

    def __init__(
        self,
        keyspace: Keyspace,
        limits: SharedLimits,
        removing: Removing,
        workers: RedisWorkers,
        metrics: Metrics,
        now: Callable[[], int],
    ) -> None:
        self.schedules: ScheduleRows | None = None
        self._keyspace = keyspace
        self._limits = limits
        self._removing = removing
        self._workers = workers
        self._metrics = metrics
        self._now = now

    def _limiters(self) -> set[str]:
        named = {policy.limiter for policy in self._keyspace.every_policy if policy.limiter is not None}
        return named | self._limits.names

    @contextmanager
    def read(self, page: int = snapshots.PAGE) -> Iterator[Iterator[Part]]:
        yield self._parts(page)

    def _parts(self, page: int) -> Iterator[Part]:
        last = self._last_replacement()
        yield from RedisSnapshotReader(self._keyspace, self._limiters(), page).parts()
        if self.schedules is not None:
            for rows in self.schedules.pages(page):
                yield Part(snapshots.SCHEDULE, "", rows)
        if self._last_replacement() != last:
            raise RestoreInProgressError(
                "a restore replaced everything while the storage was read: try again"
            )

    def _last_replacement(self) -> bytes | None:
        """Return a value that each restore changes before it replaces anything.

        Raises RestoreInProgressError while the storage holds some of the old and some of the new.
        """
        ask, common = self._keyspace.ask, self._keyspace.common
        last: bytes | None = ask(RedisCommand((b"GET", common.key("replaced"))))
        if ask(RedisCommand((b"HGET", common.key("restore"), b"phase"))) not in (None, STAGING):
            raise RestoreInProgressError(
                "a restore is replacing everything that the storage holds: wait until it ends. If it was "
                "killed, restore a backup again, which completes it"
            )
        return last

    def is_empty(self) -> bool:
        run = self._keyspace.run
        for queue in run(self._keyspace.names()):
            if self._keyspace.ask(RedisCommand((b"EXISTS", self._keyspace.keys(queue).key("jobs")))):
                return False
            if not run(settings(self._keyspace, queue)).is_empty:
                return False
        if any(run(limiter_settings(self._keyspace, name)) is not None for name in self._limiters()):
            return False
        return self.schedules is None or self.schedules.is_empty()

    def was_interrupted(self) -> bool:
        return self._restore().was_interrupted()

    def write(self, parts: Iterable[Part], *, replace: bool = False) -> SnapshotCounts:
        restore = self._restore()
        with closing(self._spool()) as spool:
            if not restore.is_open():
                check_target(self, self._workers.all(), replace=replace)
            # Before the restore begins: the records may arrive slowly.
            spool.fill(parts)
            check_schedules(self.schedules, spool.schedules)
            with restore:
                if restore.end_interrupted():
                    logger.warning("Completed a restore that was interrupted before.")
                check_target(self, self._workers.all(), replace=replace)
                self._write(restore, spool, replace=replace)
            return spool.counts()

    def _write(self, restore: Restore, spool: SnapshotSpool, *, replace: bool) -> None:
        try:
            queues = restore.stage(spool)
            # Again, because other processes may have written until the queues were closed.
            check_target(self, self._workers.all(), replace=replace)
            restore.decide()
        except (Exception, KeyboardInterrupt):
            restore.undo()
            raise
        restore.publish(queues)

    def _restore(self) -> Restore:
        keyspace, limiters = self._keyspace, self._limiters()
        return Restore(keyspace, self._limits, self._removing, self._metrics, limiters, self.schedules)

    def _spool(self) -> SnapshotSpool:
        return SnapshotSpool(self._keyspace.policy, self._now())


def settings(keyspace: Keyspace, queue: str) -> Steps[QueueSettings]:
    """Return what was set on a queue and its groups."""
    keys: QueueKeys = keyspace.keys(queue)
    meta, groups = yield [
        RedisCommand((b"HMGET", keys.key("meta"), *META)),
        RedisCommand((b"HGETALL", keys.key("groups"))),
    ]
    paused, mode, limited, capacity, per, concurrency, holds = meta
    limits = None
    if limited:
        limits = records.unpack_limits(capacity, per, concurrency)
        policy = keyspace.policy(queue)
        limits = None if limits == (policy.rate, policy.concurrency) else limits
    overrides = {group or "": limit for group, limit in records.key_limits(groups).items()}
    return QueueSettings(bool(paused), text(mode or b""), limits, overrides, records.unpack_holds(holds))


def limiter_settings(keyspace: Keyspace, name: str) -> Steps[LimiterSettings | None]:
    """Return what was set on a limiter; None if nothing was."""
    [overrides] = yield [RedisCommand((b"HMGET", keyspace.limiter(name).key("overrides"), *META[2:6]))]
    limited, *limits = overrides
    return LimiterSettings(name, *records.unpack_limits(*limits)) if limited is not None else None


def _parts(queue: str, jobs: Sequence[FoundJob]) -> Iterator[Part]:
    if jobs:
        job_records = [job_record(found.job, (found.number, 0), found.retries) for found in jobs]
        yield Part(snapshots.JOB, queue, job_records)
    letter_records = [
        letter_record(found.letter, found.letter_number) for found in jobs if found.letter is not None
    ]
    if letter_records:
        yield Part(snapshots.DEAD, queue, letter_records)


def _found(queue: str, job_id: str, reply: Sequence[Any], now: int) -> FoundJob | None:
    *parts, items, letter, letter_number = reply
    record = records.record(queue, job_id, parts, now)
    if record is None:
        return None
    st = parts[1]
    job = _job(record)
    [incarnation] = NUMBER.unpack_from(parts[0])
    number, retries = incarnation, 0
    if st is not None:
        number = NUMBER.unpack_from(st, 1)[0]
        if st[:1] == HELD_BACK:
            number += BEHIND_READY
        body = unpack(st[25 if st[:1] in ENDED else 9 :])
        job.cancel_requested = bool(body[CANCEL]) and record.state is State.ACTIVE
        retries = body[RETRIES]
        if record.items:
            job.stream = ItemStream(number, list(items), record.items)
    dead = None if letter is None else records.dead_letter(queue, job_id, letter)
    return FoundJob(job, number, incarnation, retries, dead, int(letter_number or 0))


def _job(record: JobRecord) -> EngineJob:
    job = EngineJob(
        record.id,
        record.queue,
        record.name,
        record.payload,
        record.options,
        record.state,
        record.created_at,
        record.run_at,
    )
    job.attempts, job.failures, job.stalls = record.attempts, record.failures, record.stalls
    job.worker, job.reason, job.error = record.worker, record.reason, record.error
    job.started_at, job.finished_at = record.started_at, record.finished_at
    job.result, job.progress = record.result, record.progress
    job.history = list(record.history) or None
    job.logs = list(record.logs) or None
    return job
