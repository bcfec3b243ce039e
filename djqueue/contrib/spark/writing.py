"""Write rows as jobs, on the driver and in tasks, without depending on Spark.

Tasks stage chunks, and the driver publishes them; see `djqueue.storage.staging`. In direct mode, tasks
enqueue the jobs, and the driver only counts them.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import lru_cache
from hashlib import blake2b
from secrets import token_hex
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.core.policies import KEYED, QueuePolicy
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import BulkWriteReport, QueueShare, run_of, tag_of
from djqueue.storage.staging import CHUNK, Counts, Plan, Staging, share_of

from .changing import ChangeColumns, JobChanger
from .columns import JobColumns
from .jobnames import warn_of_unknown_job
from .locations import staging_of, storage_at
from .options import DIRECT, ENQUEUE, STAGED, WriteOptions
from .publishing import Checksum, DriverPublisher, frame_of
from .reporting import TaskReport, WriteReport, WriteReporter, aborted, new_report, refuse_used_name
from .rows import CHUNK_BYTES, Chunk, KeyedQueues, job_reader
from .throttling import StorageRetry, WriteThrottle

DIRECT_JOBS = 100
"""Jobs of one batch in direct mode. Redis takes about 5 ms for them: their ids may exist, unlike new ones."""
CHUNKS_TOGETHER = 100
"""Maximum number of chunks that a task stages in one call."""
LONGEST_RUN = 500
"""Maximum length of `TaskReport.run`; a project may choose the name of its job group."""
ANONYMOUS_TTL = 7 * 86_400_000
"""Milliseconds to remember that a write without `txnAppId` was published."""


class Write:
    """One write, created and checked on the driver and copied to tasks.

    Raises:
        OptionError: An option or a column is invalid.
        StorageUnavailableError: The server does not respond.
    """

    def __init__(self, options: WriteOptions, columns: Sequence[str], app: str | None = None) -> None:
        self.options = options
        is_change = options.operation != ENQUEUE
        self.plan = ChangeColumns(options, columns) if is_change else JobColumns(options, columns)
        self.id = self.report = token_hex(8)
        """The id of this run of the write. `report` is its report's id, which all writes of a streaming query
        share, as do all runs with one `writeId`."""
        if options.write is not None:
            self.report, self.id = options.write, run_of(options.write, self.id)
        self.app = app or options.app or self.id
        self._frame = frame_of(options, columns)
        self._modes: dict[str, str] = {}
        if options.queue is not None and options.key_mode is not None:
            self._modes[options.queue] = options.key_mode
        with closing(self.storage()) as storage:
            if options.delivery == STAGED and not is_change:
                staging_of(storage)
            storage.connect()
            if options.write is not None and not options.dry_run:
                refuse_used_name(storage, options.write, options.app, options.version or 0)
            warn_of_unknown_job(storage, options)
            if options.queue is not None and isinstance(self.plan, JobColumns):
                self._check(storage, self.plan, options.queue)

    def storage(self) -> Storage:
        """Return a new storage, which the caller must close."""
        policies = {queue: QueuePolicy(key_mode=mode) for queue, mode in self._modes.items()}
        return storage_at(self.options.url, self.options.prefix, policies)

    def _check(self, storage: Storage, plan: JobColumns, queue: str) -> None:
        # Use the mode recorded with the queue, since executors have no settings.
        self._modes.update(storage.reads.key_modes([queue]))
        if self._modes[queue] == KEYED and plan.needs_key():
            raise OptionError(
                f"concurrencyKey: required for jobs of queue {queue!r}, because its KEY_MODE is 'keyed': set "
                "concurrencyKeyColumn"
            )
        for key in plan.base.job.depends_on:
            if storage.reads.states(key[0], [key[1]]) == [None]:
                raise OptionError(f"dependsOn: queue {key[0]!r} has no job {key[1]!r}")

    def run_task(self, part: str, batches: Iterable[Any], spark: str = "", group: str = "") -> TaskReport:
        """Write the rows of one task. Each attempt of a task needs a `part` of its own.

        Args:
            part: The part.
            batches: The rows.
            spark: The id of the Spark application.
            group: The run of the streaming query in whose `foreachBatch` the write is.
        """
        report = self._run_task(part, batches)
        run = f"{spark} {group}"[:LONGEST_RUN] if group else ""
        return replace(report, spark=spark, run=run)

    def _run_task(self, part: str, batches: Iterable[Any]) -> TaskReport:
        with closing(self.storage()) as storage:
            if isinstance(self.plan, ChangeColumns):
                return self._change(self.plan, storage, part, batches)
            reader = job_reader(
                self.plan,
                self.options.batch_size,
                keyed=KeyedQueues(lambda queues: self._retrying()(storage.reads.key_modes, queues)),
                states=lambda queue, ids: self._retrying()(storage.reads.states, queue, ids),
                partition=_partition(part),
            )
            chunks, names = reader.chunks(batches), dict[str, None]()
            staged, enqueued, content = dict[str, str](), dict[str, Counts](), 0
            if self.options.dry_run:
                for _ in chunks:
                    pass
            elif self.options.delivery == DIRECT:
                enqueued = self._enqueue(storage, chunks, names)
            else:
                summed = Checksum(chunks)
                staged = self._stage(staging_of(storage), part, summed, names)
                content = summed.value
        return TaskReport(
            part=part,
            chunks=staged,
            rows=reader.read,
            enqueued=enqueued,
            rejected=dict(reader.rejected),
            names=tuple(names),
            content=content,
        )

    def _change(self, plan: ChangeColumns, storage: Storage, part: str, batches: Iterable[Any]) -> TaskReport:
        wait = WriteThrottle(self.options, storage).wait
        changing = JobChanger(plan, storage, self._retrying(), wait, _partition(part))
        changing.run(batches)
        changed = {queue: dict(answers) for queue, answers in changing.answers.items()}
        return TaskReport(part=part, rows=changing.read, rejected=dict(changing.rejected), changed=changed)

    def _retrying(self) -> StorageRetry:
        return StorageRetry(self.options.max_retries)

    def _stage(
        self, staging: Staging, part: str, chunks: Iterable[Chunk], names: dict[str, None]
    ) -> dict[str, str]:
        send, lifetime = self._retrying(), int(self.options.stage_ttl * 1_000)
        kinds: dict[str, str] = {}
        for group in _together(chunks):
            names.update((chunk.name, None) for chunk in group)
            tagged = [self._tagged(chunk.batches) for chunk in group]
            staged = {chunk.queue: len(kinds.get(chunk.queue, "")) for chunk in group}
            for queue, added in send(staging.stage_all, self.id, part, tagged, staged, lifetime).items():
                kinds[queue] = kinds.get(queue, "") + added
        return kinds

    def _enqueue(
        self, storage: Storage, chunks: Iterable[Chunk], names: dict[str, None]
    ) -> dict[str, Counts]:
        throttle, send = WriteThrottle(self.options, storage), self._retrying()
        counts, seen = dict[str, Counts](), Counter[bytes]()
        for chunk in chunks:
            names[chunk.name] = None
            throttle.wait(chunk.queue, chunk.size)
            batches = [
                self._named(part, seen) if part.fresh else part
                for batch in chunk.batches
                for part in _split(batch, DIRECT_JOBS)
            ]
            added = Counts.of(answer.status for answer in send(storage.enqueue, self._tagged(batches)))
            counts[chunk.queue] = counts.get(chunk.queue, Counts()) + added
        return counts

    def _tagged(self, batches: Sequence[Batch]) -> list[Batch]:
        """Add the tag that identifies the write's jobs. Ids do not depend on it."""
        tag = tag_of(self.report)
        return [batch._replace(options=_with_tag(batch.options, tag)) for batch in batches]

    def _named(self, batch: Batch, seen: Counter[bytes]) -> Batch:
        """Derive ids from the jobs' contents, so that each attempt generates the same ids.

        Equal rows get different ids."""
        identity = repr((self.app, self.options.version, batch.queue, batch.name, batch.options.as_dict()))
        when = repr((batch.delay, batch.run_at))
        key = blake2b((identity + when).encode(), digest_size=32).digest()
        ids: list[str] = []
        for payload in batch.payloads:
            digest = blake2b(payload, digest_size=16, key=key).digest()
            seen[digest] += 1
            ids.append(f"{digest.hex()}-{seen[digest]}")
        return batch._replace(ids=ids, fresh=False)

    def commit(self, tasks: Sequence[TaskReport], version: int | None = None) -> WriteReport:
        """Publish the staged rows, each queue as a whole, and return the report."""
        rows, rejected = sum(task.rows for task in tasks), Counter[str]()
        counts, answers = Counts(), Counter[str]()
        queues = {queue for task in tasks for queue in (*task.chunks, *task.enqueued, *task.changed)}
        for task in tasks:
            rejected.update(task.rejected)
            counts += task.counts
            for results in task.changed.values():
                answers.update(results)
        number = version if version is not None else self.options.version or 0
        skipped = False
        with closing(self.storage()) as storage:
            report = self._initial_report(tasks, number)._replace(
                rows=rows,
                rejected=dict(rejected),
                answers=dict(answers),
            )
            reporter = WriteReporter(storage, self.id, report, is_batch=version is not None)
            with reporter.recording() if not self.options.dry_run else nullcontext():
                if any(task.chunks for task in tasks):
                    plan = self._plan(tasks, number, is_batch=version is not None)
                    publisher = DriverPublisher(storage, self.options, reporter)
                    published, skipped = publisher.publish(plan)
                    counts += published
                elif not self.options.dry_run:
                    reporter.done(skipped=False)
        return WriteReport(
            write=self.report,
            app=self._reported_app,
            version=number,
            queues=tuple(sorted(queues)),
            rows=rows,
            counts=counts,
            rejected=dict(rejected),
            skipped=skipped,
            operation=self.options.operation,
            answers=dict(answers),
        )

    @property
    def _reported_app(self) -> str:
        """The application; for a write without `txnAppId` its name, which is that of its report."""
        return self.report if self.app == self.id else self.app

    def _initial_report(self, tasks: Sequence[TaskReport], version: int) -> BulkWriteReport:
        shares = dict[str, QueueShare]()
        for task in tasks:
            for queue, kinds in task.chunks.items():
                shares[queue] = shares.get(queue, QueueShare()) + QueueShare(len(kinds))
            for queue, counts in task.enqueued.items():
                shares[queue] = shares.get(queue, QueueShare()) + share_of(counts, ended=True)
            for queue in task.changed:
                shares[queue] = QueueShare(ended=True)
        names = tuple(dict.fromkeys(name for task in tasks for name in task.names))
        spark = next((task.spark for task in tasks if task.spark), "")
        report = new_report(self.report, self._reported_app, version, shares)
        return report._replace(names=names, parts=len(tasks), spark=spark, operation=self.options.operation)

    def _plan(self, tasks: Sequence[TaskReport], version: int, *, is_batch: bool) -> Plan:
        parts: dict[str, dict[str, str]] = {}
        for task in sorted(tasks, key=_partition_order):
            for queue, kinds in task.chunks.items():
                parts.setdefault(queue, {})[task.part] = kinds
        return Plan(
            app=self.app,
            target=self.options.queue or "",
            version=version,
            write=self.id,
            queues=parts,
            lifetime=ANONYMOUS_TTL if self.app == self.id else None,
            limit=self.options.max_queue_depth,
            # Spark itself names the batches of a stream.
            frame="" if is_batch else self._frame,
            run="" if is_batch else next((task.run for task in tasks if task.run), ""),
            content=sum(task.content for task in tasks) % 2**63,
        )

    def abort(self, tasks: Iterable[TaskReport]) -> None:
        """Discard the staged rows, unless the write is committed: then a sweep publishes the rest.

        A committed write without `txnAppId` is discarded, too, if no job was published yet and no sweep has
        adopted it.
        """
        if self.options.dry_run:
            return
        tasks = list(tasks)
        queues = {queue for task in tasks for queue in (*task.chunks, *task.enqueued)}
        if self.options.queue is not None:
            queues.add(self.options.queue)
        with closing(self.storage()) as storage:
            if self.options.delivery == STAGED and self.options.operation == ENQUEUE:
                plan = self._plan(tasks, self.options.version or 0, is_batch=False)
                staging = staging_of(storage)
                state = staging.state_of(plan)
                if state != "open":
                    staging.forget_all(sorted(queues), plan.owner, self.id)
                    if state == "done":
                        return
                elif plan.lifetime is None or not staging.withdraw(plan):
                    return
            report = self._initial_report(tasks, self.options.version or 0)
            shares = {queue: report.shares.get(queue, QueueShare()) for queue in queues}
            # An earlier run of a named write may still be published, perhaps with the same report.
            aborted(storage, report._replace(shares=shares), is_over=self.app == self.id)


def _together(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Group chunks to stage in one call: many small ones, or a large one."""
    group: list[Chunk] = []
    jobs = size = 0
    for chunk in chunks:
        group.append(chunk)
        size += chunk.encoded
        jobs += chunk.size
        if len(group) >= CHUNKS_TOGETHER or jobs >= CHUNK or size >= CHUNK_BYTES:
            yield group
            group, jobs, size = [], 0, 0
    if group:
        yield group


def _split(batch: Batch, size: int) -> Iterator[Batch]:
    """Split a batch into batches of at most `size` jobs."""
    ids = batch.ids
    for first in range(0, len(batch.payloads), size):
        part = slice(first, first + size)
        yield batch._replace(payloads=batch.payloads[part], ids=None if ids is None else ids[part])


@lru_cache(maxsize=1024)
def _with_tag(options: JobOptions, tag: str) -> JobOptions:
    return replace(options, tags=(*options.tags, tag))


def _partition_order(report: TaskReport) -> tuple[int, str]:
    """Return a sort key that orders reports by partition."""
    return _partition(report.part), report.part


def _partition(part: str) -> int:
    """Return the number of the partition of a part."""
    return int(part.partition(".")[0])
