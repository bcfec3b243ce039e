"""Write rows as jobs, on the driver and in tasks, without depending on Spark.

Tasks stage chunks, and the driver publishes them; see `djqueue.storage.staging`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import lru_cache
from secrets import token_hex
from typing import Any

from djqueue.core.errors import OptionError
from djqueue.core.job import Batch
from djqueue.core.options import JobOptions
from djqueue.core.policies import KEYED, QueuePolicy
from djqueue.storage.base import Storage
from djqueue.storage.bulkwrites import BulkWriteReport, QueueShare, run_of, tag_of
from djqueue.storage.staging import CHUNK, Counts, Plan, Staging

from .changing import ChangeColumns, JobChanger
from .columns import JobColumns
from .jobnames import warn_of_unknown_job
from .locations import staging_of, storage_at
from .options import ENQUEUE, WriteOptions
from .publishing import DriverPublisher
from .reporting import TaskReport, WriteReport, WriteReporter, aborted, new_report, refuse_used_name
from .rows import CHUNK_BYTES, Chunk, KeyedQueues, job_reader
from .throttling import StorageRetry, WriteThrottle

CHUNKS_TOGETHER = 100
"""Maximum number of chunks that a task stages in one call."""
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
        self._modes: dict[str, str] = {}
        if options.queue is not None and options.key_mode is not None:
            self._modes[options.queue] = options.key_mode
        with closing(self.storage()) as storage:
            if not is_change:
                staging_of(storage)
            storage.connect()
            if options.write is not None and not options.dry_run:
                refuse_used_name(storage, options.write, options.app, options.version or 0)
            if options.queue is not None and isinstance(self.plan, JobColumns):
                self._check(storage, self.plan, options.queue)
            warn_of_unknown_job(storage, options)

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

    def run_task(self, part: str, batches: Iterable[Any], spark: str = "") -> TaskReport:
        """Write the rows of one task. Each attempt of a task needs a `part` of its own.

        Args:
            part: The part.
            batches: The rows.
            spark: The id of the Spark application.
        """
        with closing(self.storage()) as storage:
            if isinstance(self.plan, ChangeColumns):
                report = self._change(self.plan, storage, part, batches)
            else:
                report = self._enqueue(self.plan, storage, part, batches)
        return replace(report, spark=spark)

    def _enqueue(self, plan: JobColumns, storage: Storage, part: str, batches: Iterable[Any]) -> TaskReport:
        send = StorageRetry(self.options.max_retries)
        reader = job_reader(
            plan,
            self.options.batch_size,
            keyed=KeyedQueues(lambda queues: send(storage.reads.key_modes, queues)),
            states=lambda queue, ids: send(storage.reads.states, queue, ids),
            partition=_partition(part),
        )
        chunks, staged, names = reader.chunks(batches), dict[str, str](), dict[str, None]()
        if self.options.dry_run:
            for _ in chunks:
                pass
        else:
            staged = self._stage(staging_of(storage), part, chunks, names)
        return TaskReport(
            part=part, chunks=staged, rows=reader.read, rejected=dict(reader.rejected), names=tuple(names)
        )

    def _change(self, plan: ChangeColumns, storage: Storage, part: str, batches: Iterable[Any]) -> TaskReport:
        wait = WriteThrottle(self.options, storage).wait
        changing = JobChanger(plan, storage, StorageRetry(self.options.max_retries), wait, _partition(part))
        changing.run(batches)
        changed = {queue: dict(answers) for queue, answers in changing.answers.items()}
        return TaskReport(part=part, rows=changing.read, rejected=dict(changing.rejected), changed=changed)

    def _stage(
        self, staging: Staging, part: str, chunks: Iterable[Chunk], names: dict[str, None]
    ) -> dict[str, str]:
        send, lifetime = StorageRetry(self.options.max_retries), int(self.options.stage_ttl * 1_000)
        kinds: dict[str, str] = {}
        for group in _together(chunks):
            names.update((chunk.name, None) for chunk in group)
            tagged = [self._tagged(chunk.batches) for chunk in group]
            staged = {chunk.queue: len(kinds.get(chunk.queue, "")) for chunk in group}
            for queue, added in send(staging.stage_all, self.id, part, tagged, staged, lifetime).items():
                kinds[queue] = kinds.get(queue, "") + added
        return kinds

    def _tagged(self, batches: Sequence[Batch]) -> list[Batch]:
        """Add the tag that identifies the write's jobs. Ids do not depend on it."""
        tag = tag_of(self.report)
        return [batch._replace(options=_with_tag(batch.options, tag)) for batch in batches]

    def commit(self, tasks: Sequence[TaskReport], version: int | None = None) -> WriteReport:
        """Publish the staged rows, and return the report. A batch of a stream has a version of its own."""
        is_batch = version is not None
        number = self.options.version or 0 if version is None else version
        report, counts, skipped = self._new_report(tasks, number), Counts(), False
        with closing(self.storage()) as storage:
            reporter = WriteReporter(storage, self.id, report, is_batch=is_batch)
            with nullcontext() if self.options.dry_run else reporter.recording():
                if report.total.chunks:
                    publisher = DriverPublisher(storage, self.options, reporter)
                    counts, skipped = publisher.publish(self._plan(tasks, number, is_batch=is_batch))
                elif not self.options.dry_run:
                    reporter.done(skipped=False)
        return replace(WriteReport.of(report), counts=counts, skipped=skipped)

    def _new_report(self, tasks: Sequence[TaskReport], version: int) -> BulkWriteReport:
        """Return the report of a write before any of it is published."""
        shares, rejected, answers = dict[str, QueueShare](), Counter[str](), Counter[str]()
        for task in tasks:
            for queue, kinds in task.chunks.items():
                shares[queue] = shares.get(queue, QueueShare()) + QueueShare(len(kinds))
            for queue, counts in task.changed.items():
                shares[queue] = QueueShare(ended=True)
                answers.update(counts)
            rejected.update(task.rejected)
        # A write without `txnAppId` is reported under its name.
        app = self.report if self.app == self.id else self.app
        return new_report(self.report, app, version, shares)._replace(
            names=tuple(dict.fromkeys(name for task in tasks for name in task.names)),
            rows=sum(task.rows for task in tasks),
            rejected=dict(rejected),
            answers=dict(answers),
            parts=len(tasks),
            spark=next((task.spark for task in tasks if task.spark), ""),
            operation=self.options.operation,
        )

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
            is_batch=is_batch,
        )

    def abort(self, tasks: Iterable[TaskReport]) -> None:
        """Discard the staged rows, unless the write is committed: then a sweep publishes the rest.

        A committed write without `txnAppId` is discarded, too, if no job was published yet and no sweep has
        adopted it.
        """
        if self.options.dry_run:
            return
        tasks = list(tasks)
        queues = {queue for task in tasks for queue in task.chunks}
        if self.options.queue is not None:
            queues.add(self.options.queue)
        with closing(self.storage()) as storage:
            if self.options.operation == ENQUEUE:
                plan = self._plan(tasks, self.options.version or 0, is_batch=False)
                staging = staging_of(storage)
                state = staging.state_of(plan)
                if state != "open":
                    staging.forget_all(sorted(queues), plan.owner, self.id)
                    if state == "done":
                        return
                elif plan.lifetime is None or not staging.withdraw(plan):
                    return
            report = self._new_report(tasks, self.options.version or 0)
            shares = {queue: report.shares.get(queue, QueueShare()) for queue in queues}
            report = report._replace(shares=shares, rows=0, rejected={}, answers={})
            # An earlier run of a named write may still be published, perhaps with the same report.
            aborted(storage, report, is_over=self.app == self.id)


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


@lru_cache(maxsize=1024)
def _with_tag(options: JobOptions, tag: str) -> JobOptions:
    return replace(options, tags=(*options.tags, tag))


def _partition_order(report: TaskReport) -> tuple[int, str]:
    """Return a sort key that orders reports by partition."""
    return _partition(report.part), report.part


def _partition(part: str) -> int:
    """Return the number of the partition of a part."""
    return int(part.partition(".")[0])
