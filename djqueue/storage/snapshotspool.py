"""A temporary file with the records of a snapshot, checked and sorted before they are written to a storage.

Nothing in the storage has changed while the records arrive, so a snapshot that is damaged or ends early has
no effect. Memory use does not depend on the number of records: SQLite sorts them on the disk.
"""

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from random import Random
from typing import Any, NamedTuple

import msgpack

from djqueue.codecs import MSGPACK, decode, encode
from djqueue.core.enginejob import EngineJob
from djqueue.core.job import DeadLetterRecord
from djqueue.core.options import JobKey
from djqueue.core.policies import QueuePolicy
from djqueue.core.states import PENDING, State

from . import snapshots
from .snapshotchecks import check_part
from .snapshots import (
    LimiterSettings,
    Part,
    Position,
    QueueSettings,
    Record,
    SnapshotCounts,
    dead_letter,
    end_attempt,
    engine_job,
    job_record,
    letter_record,
    lost_letter,
    resolve_rivals,
    turn,
)

SCHEMA = """
PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; PRAGMA cache_size=-16000;
CREATE TABLE job(
    queue TEXT, id TEXT, state TEXT, unique_key TEXT, lifo INT, major INT, minor INT, needs INT, data BLOB,
    PRIMARY KEY(queue, id));
CREATE TABLE letter(queue TEXT, id TEXT, position INT, data BLOB, PRIMARY KEY(queue, id));
"""
INSERT = "INSERT OR IGNORE INTO job VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


class SpooledJob(NamedTuple):
    """A job to write, as it is after the restore."""

    job: EngineJob
    retries: int
    """Number of automatic retries."""


class SnapshotSpool:
    """The records of a snapshot. Close it to delete the file.

    Active jobs are stored as the jobs that they become: see `Snapshots.write`.

    Args:
        policy: The policies of the queues that are written to.
        now: The time of the restore.
    """

    def __init__(self, policy: Callable[[str], QueuePolicy], now: int, random: Random | None = None) -> None:
        self._policy = policy
        self._now = now
        self._random = random or Random()
        # An empty name is a file that SQLite creates when it is needed, and deletes.
        self._file = sqlite3.connect("", isolation_level=None, check_same_thread=False)
        self._file.executescript(SCHEMA)
        self.queues: dict[str, QueueSettings] = {}
        self.limiters: list[LimiterSettings] = []
        self.schedules: list[Record] = []

    def close(self) -> None:
        """Delete the file."""
        self._file.close()

    def fill(self, parts: Iterable[Part]) -> None:
        """Add all parts of a snapshot. Raises OptionError for an invalid record."""
        self._file.execute("BEGIN")
        for part in parts:
            self._add(part)
        self._file.execute("CREATE INDEX turns ON job(queue, lifo, major, minor)")
        self._file.execute("CREATE INDEX rivals ON job(queue, unique_key) WHERE unique_key IS NOT NULL")
        self._resolve_rivals()
        self._add_lost_letters()
        self._file.execute("CREATE INDEX deaths ON letter(queue, position)")
        self._file.execute("COMMIT")

    def _add(self, part: Part) -> None:
        check_part(part)
        for record in part.records:
            if part.kind == snapshots.JOB:
                self._add_job(part.queue, record)
            elif part.kind == snapshots.DEAD:
                self._add_letter(dead_letter(part.queue, record), record["position"])
            elif part.kind == snapshots.QUEUE:
                settings = QueueSettings.of(part.queue, record)
                policy = self._policy(part.queue)
                policy.check_mode(part.queue, settings.key_mode or policy.key_mode)
                self.queues[part.queue] = settings
            elif part.kind == snapshots.LIMITER:
                self.limiters.append(LimiterSettings.of(record))
            else:
                self.schedules.append(record)

    def _add_job(self, queue: str, record: Record) -> None:
        job = engine_job(queue, record)
        major, minor = record["position"]
        position: Position = major, minor
        if job.state is State.ACTIVE:
            position, letter = end_attempt(job, self._policy(queue), self._now, self._random)
            if letter is not None:
                self._add_letter(letter, snapshots.LAST + self._now)
        self._insert(job, position, record["retries"], INSERT)

    def _insert(self, job: EngineJob, position: Position, retries: int, statement: str) -> None:
        record = job_record(job, position, retries)
        if job.progress is not None:
            record["progress"] = encode(job.progress, MSGPACK)
        key = job.options.unique_key if job.state in PENDING else None
        values = job.queue, job.id, job.state.value, key, *turn(job, position), bool(job.options.depends_on)
        self._file.execute(statement, (*values, _pack(record)))

    def _add_letter(self, letter: DeadLetterRecord, position: int) -> None:
        data = _pack(letter_record(letter, position))
        values = letter.queue, letter.id, position, data
        self._file.execute("INSERT OR IGNORE INTO letter VALUES (?, ?, ?, ?)", values)

    def _resolve_rivals(self) -> None:
        """Keep one live job of each unique key."""
        shared = self._file.execute(
            "SELECT queue, unique_key FROM job WHERE unique_key IS NOT NULL GROUP BY 1, 2 HAVING COUNT(*) > 1"
        ).fetchall()
        for found in shared:
            rows = self._file.execute(
                "SELECT queue, data FROM job WHERE queue = ? AND unique_key = ? ORDER BY lifo, major, minor",
                found,
            )
            entries = {job.id: (job, record) for job, record in map(_read, rows.fetchall())}
            for job in resolve_rivals([job for job, _ in entries.values()], self._now):
                record = entries[job.id][1]
                major, minor = record["position"]
                self._insert(job, (major, minor), record["retries"], INSERT.replace("IGNORE", "REPLACE"))

    def _add_lost_letters(self) -> None:
        failed = self._file.execute(
            "SELECT queue, data FROM job WHERE state = 'failed' AND NOT EXISTS "
            "(SELECT 1 FROM letter WHERE letter.queue = job.queue AND letter.id = job.id)"
        )
        for row in failed.fetchall():
            job, _ = _read(row)
            letter = lost_letter(job, self._policy(job.queue), self._random)
            self._add_letter(letter, snapshots.LAST + job.finished_at)

    # Read.

    def names(self) -> list[str]:
        """Return the names of all queues, sorted."""
        found = self._file.execute("SELECT DISTINCT queue FROM job")
        return sorted({*self.queues, *(name for (name,) in found)})

    def jobs(self, size: int, queue: str | None = None) -> Iterator[list[SpooledJob]]:
        """Yield all jobs, or those of a queue, in the order in which they are put into their queues."""
        with closing(self._file.cursor()) as cursor:
            if queue is None:
                cursor.execute("SELECT queue, data FROM job ORDER BY queue, lifo, major, minor")
            else:
                cursor.execute(
                    "SELECT queue, data FROM job WHERE queue = ? ORDER BY lifo, major, minor", (queue,)
                )
            while rows := cursor.fetchmany(size):
                yield [SpooledJob(job, record["retries"]) for job, record in map(_read, rows)]

    def by_position(self, size: int) -> Iterator[list[SpooledJob]]:
        """Yield all jobs, those of each queue by their positions."""
        with closing(self._file.cursor()) as cursor:
            cursor.execute(
                "SELECT queue, data FROM job ORDER BY queue, CASE WHEN lifo THEN -major ELSE major END, "
                "CASE WHEN lifo THEN -minor ELSE minor END, rowid"
            )
            while rows := cursor.fetchmany(size):
                yield [SpooledJob(job, record["retries"]) for job, record in map(_read, rows)]

    def letters(self, size: int, queue: str | None = None) -> Iterator[list[DeadLetterRecord]]:
        """Yield the dead letters of failed jobs, oldest first in each queue."""
        with closing(self._file.cursor()) as cursor:
            cursor.execute(
                "SELECT letter.queue, letter.data FROM letter JOIN job USING (queue, id) "
                "WHERE job.state = 'failed' AND letter.queue = coalesce(?, letter.queue) "
                "ORDER BY letter.queue, position",
                (queue,),
            )
            while rows := cursor.fetchmany(size):
                yield [dead_letter(name, _unpack(data)) for name, data in rows]

    def states(self, keys: Iterable[JobKey]) -> dict[JobKey, State]:
        """Return the states of those of these jobs that are in the snapshot."""
        found = {}
        for key in keys:
            row = self._file.execute("SELECT state FROM job WHERE queue = ? AND id = ?", key).fetchone()
            if row is not None:
                found[key] = State(row[0])
        return found

    def counts(self) -> SnapshotCounts:
        """Return the numbers of records to write."""
        (jobs,) = self._file.execute("SELECT COUNT(*) FROM job").fetchone()
        (dead,) = self._file.execute("SELECT COUNT(*) FROM job WHERE state = 'failed'").fetchone()
        return SnapshotCounts(len(self.queues), len(self.limiters), jobs, dead, len(self.schedules))


def _read(row: tuple[str, bytes]) -> tuple[EngineJob, dict[str, Any]]:
    queue, data = row
    record = _unpack(data)
    if record["progress"] is not None:
        record["progress"] = decode(record["progress"], MSGPACK)
    return engine_job(queue, record), record


def _pack(record: Record) -> bytes:
    packed: bytes = msgpack.packb(record, unicode_errors="surrogatepass")
    return packed


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, unicode_errors="surrogatepass", strict_map_key=False)
