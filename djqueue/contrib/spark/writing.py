"""What a write does, on the driver and in its tasks: plain Python, without Spark.

Tasks stage chunks, the driver publishes them: see `djqueue.storage.staging`. In direct mode tasks enqueue,
and the driver only counts.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from hashlib import blake2b
from secrets import token_hex
from typing import Any, TypeVar

from djqueue.core.errors import OptionError, QueueFullError, StorageUnavailableError
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.core.queue import KEYED, QueuePolicy
from djqueue.core.states import PENDING
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import BulkWriteReport, QueueShare, tag_of
from djqueue.storage.staging import ChunkMissingError, Counts, Manifest, PublicationState, Staging, chunks_of

from .alike import reader
from .changing import ChangeColumns, Changing
from .locations import staging_of, storage_at
from .options import DIRECT, ENQUEUE, STAGED, WriteOptions
from .reporting import Reporting, aborted, begun, share
from .rows import Chunk, JobColumns
from .sending import Sending

T = TypeVar("T")

AT_ONCE = 64
"""Chunks that are published between two looks at the queue."""
NOBODYS = 7 * 86_400_000
"""Milliseconds for which it is known that a write was published that has no name of its own."""
FIRST_WAIT, LAST_WAIT = 0.05, 2.0
"""Seconds between looks at a queue that is too long, doubling."""


@dataclass(frozen=True, kw_only=True)
class TaskReport:
    """What one task says of its work."""

    part: str
    """The number of the partition, and, behind a full stop, what tells tries apart."""
    chunks: dict[str, str] = field(default_factory=dict)
    """By queue, a letter for each chunk that was put aside."""
    rows: int = 0
    enqueued: dict[str, Counts] = field(default_factory=dict)
    """By queue, of jobs that were enqueued directly."""
    rejected: dict[str, int] = field(default_factory=dict)
    """Rows that are no jobs, by reason."""
    changed: dict[str, dict[str, int]] = field(default_factory=dict)
    """By queue, what became of jobs that were there."""
    names: tuple[str, ...] = ()
    """Of the jobs."""
    spark: str = ""
    """The id of the Spark application."""

    @property
    def counts(self) -> Counts:
        """Of jobs that were enqueued directly, to all queues."""
        return sum(self.enqueued.values(), Counts())


@dataclass(frozen=True, kw_only=True)
class WriteReport:
    """What became of a write: `rows` is the sum of `inserted`, `duplicates` and `rejected`; where jobs that
    were there were changed, of `answers` and `rejected`.
    """

    write: str
    app: str
    version: int
    queues: tuple[str, ...]
    rows: int
    counts: Counts
    rejected: dict[str, int]
    skipped: bool = False
    """Whether this version had been published before, so that nothing was done."""
    operation: str = ENQUEUE
    answers: dict[str, int] = field(default_factory=dict)
    """What became of jobs that were there, in the words of the storage: retried, not_failed, cancelled …"""

    @classmethod
    def of(cls, found: BulkWriteReport) -> "WriteReport":
        """From the report that the storage keeps."""
        total = found.total
        return cls(
            write=found.write,
            app=found.app,
            version=found.version,
            queues=found.queues,
            rows=found.rows,
            counts=Counts(total.inserted, total.duplicates, rejected=total.letters),
            rejected=dict(found.rejected),
            skipped=found.skipped,
            operation=found.operation,
            answers=dict(found.answers),
        )

    @property
    def letters(self) -> int:
        """Rejected rows that are dead letters now."""
        return self.counts.rejected

    @property
    def inserted(self) -> int:
        """New jobs."""
        return self.counts.queued

    @property
    def duplicates(self) -> int:
        """Rows whose jobs were there, or had completed."""
        return self.counts.duplicates + self.counts.completed

    def __str__(self) -> str:
        """In a line or two, for people."""
        done = {"inserted": self.inserted, "duplicates": self.duplicates}
        if self.operation != ENQUEUE:
            done = dict(sorted(self.answers.items()))
        said = [f"{self.rows:,} rows", *(f"{number:,} {word}" for word, number in done.items() if number)]
        if self.rejected:
            reasons = ", ".join(f"{reason}: {number:,}" for reason, number in sorted(self.rejected.items()))
            said.append(f"{sum(self.rejected.values()):,} rejected ({reasons})")
        if self.letters:
            said.append(f"{self.letters:,} of these are dead letters")
        if self.skipped:
            said.append(f"version {self.version} of {self.app} was published before")
        where = f" in {', '.join(self.queues)}" if self.queues else ""
        return f"{self.operation}{where}: {'; '.join(said)} (write {self.write})"


class Write:
    """One write. Made, and checked, on the driver; its copies work in tasks.

    Raises OptionError for what cannot be, and StorageUnavailableError if nobody answers at the URL.
    """

    def __init__(self, options: WriteOptions, columns: Sequence[str], app: str | None = None) -> None:
        self.options = options
        is_change = options.operation != ENQUEUE
        self.plan = ChangeColumns(options, columns) if is_change else JobColumns(options, columns)
        self.id = self.report = options.write or token_hex(8)
        """`report`: under which name its report is kept; a streaming query has one for all of its writes."""
        self.app = app or options.app or self.id
        self._modes: dict[str, str] = {}
        if options.queue is not None and options.group_mode is not None:
            self._modes[options.queue] = options.group_mode
        with closing(self.storage()) as storage:
            if options.delivery == STAGED and not is_change:
                staging_of(storage)
            storage.connect()
            if options.queue is not None and isinstance(self.plan, JobColumns):
                self._check(storage, self.plan, options.queue)

    def storage(self) -> Storage:
        """For the caller, who closes it."""
        policies = {queue: QueuePolicy(group_mode=mode) for queue, mode in self._modes.items()}
        return storage_at(self.options.url, self.options.prefix, policies)

    def _check(self, storage: Storage, plan: JobColumns, queue: str) -> None:
        # What is recorded with the queue counts: there may be no settings here.
        self._modes[queue] = mode = storage.reads.groups(queue, 0, ()).mode
        if mode == KEYED and plan.needs_group():
            raise OptionError(
                f"group: jobs of queue {queue!r} require a group, because its GROUP_MODE is 'keyed': set "
                "groupColumn"
            )
        for key in plan.base.job.depends_on:
            if storage.reads.states(key[0], [key[1]]) == [None]:
                raise OptionError(f"dependsOn: queue {key[0]!r} has no job {key[1]!r}")

    def run_task(self, part: str, batches: Iterable[Any], spark: str = "") -> TaskReport:
        """What one task does with its record batches. Another run of the same task is another part."""
        with closing(self.storage()) as storage:
            if isinstance(self.plan, ChangeColumns):
                return replace(self._change(self.plan, storage, part, batches), spark=spark)
            rows = reader(
                self.plan,
                self.options.batch_size,
                is_keyed=_keyed(storage),
                states=lambda queue, ids: self._sending()(storage.reads.states, queue, ids),
            )
            names = dict[str, None]()
            if self.options.dry_run:
                for _ in rows.chunks(batches):
                    pass
                return TaskReport(part=part, rows=rows.read, rejected=dict(rows.rejected))
            if self.options.delivery == DIRECT:
                enqueued = self._enqueue(storage, rows.chunks(batches), names)
                told = TaskReport(part=part, rows=rows.read, enqueued=enqueued, rejected=dict(rows.rejected))
                return replace(told, names=tuple(names), spark=spark)
            chunks = self._stage(staging_of(storage), part, rows.chunks(batches), names)
        told = TaskReport(part=part, chunks=chunks, rows=rows.read, rejected=dict(rows.rejected))
        return replace(told, names=tuple(names), spark=spark)

    def _change(self, plan: ChangeColumns, storage: Storage, part: str, batches: Iterable[Any]) -> TaskReport:
        changing = Changing(plan, storage, self._sending(), WriteThrottle(self.options, storage).wait)
        changing.run(batches)
        changed = {queue: dict(answers) for queue, answers in changing.answers.items()}
        return TaskReport(part=part, rows=changing.read, rejected=dict(changing.rejected), changed=changed)

    def _sending(self) -> Sending:
        return Sending(self.options.max_retries)

    def _stage(
        self, staging: Staging, part: str, chunks: Iterable[Chunk], names: dict[str, None]
    ) -> dict[str, str]:
        send, lifetime = self._sending(), int(self.options.stage_ttl * 1_000)
        kinds: dict[str, str] = {}
        for chunk in chunks:
            names[chunk.name] = None
            done, tagged = kinds.get(chunk.queue, ""), self._tagged(chunk.batches)
            kinds[chunk.queue] = done + send(staging.stage, self.id, part, len(done), tagged, lifetime)
        return kinds

    def _enqueue(
        self, storage: Storage, chunks: Iterable[Chunk], names: dict[str, None]
    ) -> dict[str, Counts]:
        pace, send = WriteThrottle(self.options, storage), self._sending()
        counts, seen = dict[str, Counts](), Counter[bytes]()
        for chunk in chunks:
            names[chunk.name] = None
            pace.wait(chunk.queue, chunk.many)
            batches = [self._named(batch, seen) if batch.fresh else batch for batch in chunk.batches]
            came = Counts.of(answer.status for answer in send(storage.enqueue, self._tagged(batches)))
            counts[chunk.queue] = counts.get(chunk.queue, Counts()) + came
        return counts

    def _tagged(self, batches: Sequence[Batch]) -> list[Batch]:
        """With the tag by which a write's jobs are found; ids are made without it."""
        tag = tag_of(self.report)
        return [batch._replace(options=_with_tag(batch.options, tag)) for batch in batches]

    def _named(self, batch: Batch, seen: Counter[bytes]) -> Batch:
        """With ids made of what the jobs are, the same ones in every try; equal rows are told apart."""
        spoken = repr((self.app, self.options.version, batch.queue, batch.name, batch.options.as_dict()))
        when = repr((batch.delay, batch.run_at))
        key = blake2b((spoken + when).encode(), digest_size=32).digest()
        ids: list[str] = []
        for payload in batch.payloads:
            digest = blake2b(payload, digest_size=16, key=key).digest()
            seen[digest] += 1
            ids.append(f"{digest.hex()}-{seen[digest]}")
        return batch._replace(ids=ids, fresh=False)

    def commit(self, told: Sequence[TaskReport], version: int | None = None) -> WriteReport:
        """Publish what the tasks have put aside, each queue in one write; answers what became of it."""
        rows, rejected = sum(one.rows for one in told), Counter[str]()
        counts, answers = Counts(), Counter[str]()
        queues = {queue for one in told for queue in (*one.chunks, *one.enqueued, *one.changed)}
        parts: dict[str, dict[str, str]] = {}
        for one in sorted(told, key=_place):
            rejected.update(one.rejected)
            counts += one.counts
            for found in one.changed.values():
                answers.update(found)
            for queue, kinds in one.chunks.items():
                parts.setdefault(queue, {})[one.part] = kinds
        number = version if version is not None else self.options.version or 0
        skipped = False
        with closing(self.storage()) as storage:
            report = self._reported(told, number)._replace(
                rows=rows,
                rejected=dict(rejected),
                answers=dict(answers),
            )
            reporting = Reporting(storage, self.id, report, is_batch=version is not None)
            with reporting.of_write() if not self.options.dry_run else nullcontext():
                for queue, mine in sorted(parts.items()):
                    manifest = Manifest(queue, self.app, number, self.id, mine)
                    published, was_there = self._publish(storage, manifest, reporting)
                    counts += published
                    skipped = skipped or was_there
                if not self.options.dry_run:
                    reporting.done()
        return WriteReport(
            write=self.id,
            app=self.app,
            version=number,
            queues=tuple(sorted(queues)),
            rows=rows,
            counts=counts,
            rejected=dict(rejected),
            skipped=skipped,
            operation=self.options.operation,
            answers=dict(answers),
        )

    def _reported(self, told: Sequence[TaskReport], version: int) -> BulkWriteReport:
        shares = dict[str, QueueShare]()
        for one in told:
            for queue, kinds in one.chunks.items():
                shares[queue] = shares.get(queue, QueueShare()) + QueueShare(len(kinds))
            for queue, counts in one.enqueued.items():
                shares[queue] = shares.get(queue, QueueShare()) + share(counts, ended=True)
            for queue in one.changed:
                shares[queue] = QueueShare(ended=True)
        names = tuple(dict.fromkeys(name for one in told for name in one.names))
        spark = next((one.spark for one in told if one.spark), "")
        report = begun(self.report, self.app, version, shares)
        return report._replace(names=names, parts=len(told), spark=spark, operation=self.options.operation)

    def _publish(self, storage: Storage, manifest: Manifest, reporting: Reporting) -> tuple[Counts, bool]:
        staging, send = staging_of(storage), self._sending()
        lifetime = NOBODYS if manifest.app == self.id else None
        while True:
            found = send(staging.begin, manifest, lifetime)
            if found.status == "done":
                send(staging.forget, manifest.queue, self.app, self.id)
                was = found.counts if found.manifest.version == manifest.version else Counts()
                reporting.skipped(found.manifest, was)
                return was, True
            try:
                counts = self._finish(storage, found, reporting)
            except ChunkMissingError as error:
                if found.manifest.write == self.id:
                    raise
                raise ChunkMissingError(
                    f"{error}. The rest of that write is lost: write the missing rows again with a "
                    f"txnAppId other than {self.app!r}, or from another checkpoint"
                ) from None
            send(staging.forget, manifest.queue, self.app, found.manifest.write)
            if found.status != "unfinished":
                if found.manifest.write != self.id:
                    reporting.resumed(found.manifest, share(counts, ended=True))
                send(staging.forget, manifest.queue, self.app, self.id)
                return counts, False

    def _finish(self, storage: Storage, found: PublicationState, reporting: Reporting) -> Counts:
        staging, pace, send = staging_of(storage), WriteThrottle(self.options, storage), self._sending()
        chunks, counts = chunks_of(found.manifest), Counts()
        most = self.options.max_queue_depth
        at_once = AT_ONCE if most is None else max(1, min(AT_ONCE, most // self.options.batch_size))
        for first in range(0, len(chunks), at_once):
            some = chunks[first : first + at_once]
            pace.wait(found.manifest.queue, len(some) * self.options.batch_size)
            counts = sum(pace.until_room(partial(send, staging.publish, found.manifest, some)), counts)
            reporting.published(found.manifest, share(counts, len(chunks), first + len(some)))
        counts = send(staging.end, found.manifest)
        reporting.published(found.manifest, share(counts, len(chunks), len(chunks), ended=True))
        return counts

    def abort(self, told: Iterable[TaskReport]) -> None:
        """Let go of what the tasks have put aside, but for what is being published."""
        told = list(told)
        queues = {queue for one in told for queue in (*one.chunks, *one.enqueued)}
        if self.options.queue is not None:
            queues.add(self.options.queue)
        with closing(self.storage()) as storage:
            is_staged = self.options.delivery == STAGED and self.options.operation == ENQUEUE
            if is_staged and not self.options.dry_run:
                for queue in queues:
                    staging_of(storage).forget(queue, self.app, self.id)
            if not self.options.dry_run:
                report = self._reported(told, self.options.version or 0)
                shares = {queue: report.shares.get(queue, QueueShare()) for queue in queues}
                aborted(storage, report._replace(shares=shares))


@lru_cache(maxsize=1024)
def _with_tag(options: JobOptions, tag: str) -> JobOptions:
    return replace(options, tags=(*options.tags, tag))


def _keyed(storage: Storage) -> Callable[[str], bool]:
    """Whether each job of a queue needs a group, asked once of each queue."""
    return cache(lambda queue: storage.reads.groups(queue, 0, ()).mode == KEYED)


def _place(told: TaskReport) -> tuple[int, str]:
    """Where a part's jobs come: in the order of partitions."""
    partition, _, rest = told.part.partition(".")
    return int(partition), rest


class WriteThrottle:
    """Keeps a load from drowning the workers: `maxQueueDepth` and `rateLimit`."""

    def __init__(
        self,
        options: WriteOptions,
        storage: Storage,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._storage = storage
        self._clock = clock
        self._sleep = sleep
        self._next = clock()

    def wait(self, queue: str, count: int) -> None:
        """Wait until so many jobs may come. Raises StorageUnavailableError after `backpressureTimeout`."""
        rate = self._options.rate_limit
        if rate is not None:
            now = self._clock()
            if self._next > now:
                self._sleep(self._next - now)
            self._next = max(now, self._next) + count / rate
        most = self._options.max_queue_depth
        if most is None:
            return
        for _ in self._looks(f"queue {queue!r} has more than maxQueueDepth={most} jobs"):
            counts = self._storage.reads.counts(queue)
            if sum(counts[state] for state in PENDING) < most:
                return

    def until_room(self, publish: Callable[[], T]) -> T:
        """Publish, and again as long as the queue is full: what came already does not come twice."""
        for _ in self._looks("the queue stayed full"):
            try:
                return publish()
            except QueueFullError:
                continue
        raise AssertionError("the looks end with an error")

    def _looks(self, what: str) -> Iterator[None]:
        """Once, and then again after longer and longer waits."""
        until = self._clock() + self._options.backpressure_timeout
        wait = FIRST_WAIT
        while True:
            yield
            if self._clock() >= until:
                raise StorageUnavailableError(
                    f"{what}, for backpressureTimeout={self._options.backpressure_timeout:g} s"
                )
            self._sleep(wait)
            wait = min(2 * wait, LAST_WAIT)
