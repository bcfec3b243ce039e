"""Changes of the engine that have not been written to the tables yet."""

from collections.abc import Callable
from typing import Any

from djqueue.core.enginejob import EngineJob, ItemStream
from djqueue.core.job import WorkerInfo
from djqueue.storage.tables.rows import Row

from .retentionindex import RetentionEntry

Key = tuple[str, str]
JobRowKey = tuple[str, str, int]
BucketKey = tuple[str, str, int, int]
Done = Callable[[BaseException | None], None]


class Buffer:
    """Unwritten changes, with the latest values of each job."""

    def __init__(self) -> None:
        self.deletes: dict[JobRowKey, None] = {}
        self.inserts: dict[Key, Row] = {}
        self.updates: dict[Key, Row] = {}
        self.leases: dict[Key, Row] = {}
        """Ends of the renewed leases of active jobs."""
        self.contents: dict[Key, Row] = {}
        """Changed priorities, payloads and options of jobs."""
        self.results: dict[Key, Row] = {}
        self.letters: dict[Key, Row] = {}
        self.letters_gone: dict[Key, None] = {}
        self.attempts: dict[Key, list[Row]] = {}
        self.progress: dict[Key, Row] = {}
        self.logs: dict[Key, list[Row]] = {}
        self.items: dict[Key, list[Row]] = {}
        self.items_gone: dict[Key, None] = {}
        """Jobs that begin another run, so that the items of the last one are deleted."""
        self.items_sent: dict[Key, Row] = {}
        """Numbers of items, as `JOB_KEY` and the number."""
        self.items_size = 0
        """Bytes of items."""
        self.elsewhere: list[ItemStream] = []
        """Streams that the engine can drop after the flush."""
        self.long: dict[Key, None] = {}
        """Jobs with so many runs or log lines that the oldest are deleted."""
        self.put_off: dict[Key, bool] = {}
        """Ended jobs whose records are kept for their dependents (True), or no longer (False)."""
        self.kept: dict[Key, RetentionEntry | None] = {}
        """Entries of the retention index, for queues with bounds."""
        self.results_gone: dict[Key, int] = {}
        """End times of jobs whose results are deleted before their records."""
        self.queues: dict[str, Row | None] = {}
        self.groups: dict[Key, Row | None] = {}
        self.limiters: dict[str, Row | None] = {}
        self.workers: dict[str, WorkerInfo | None] = {}
        self.clock_offset: int | None = None
        """Offset of the wall clock that the jobs have followed; see `Journal.clock_set`."""
        self.retry_times: dict[Key, int] = {}
        """Times of automatic retries of dead letters that have followed the wall clock."""
        self.metrics: dict[BucketKey, Row] = {}
        self.metrics_gone: set[str] = set()
        """Queues whose metrics are deleted before new ones are written."""
        self.ended: list[EngineJob] = []
        """Jobs that the engine can drop after the flush."""
        self.waiting: list[Done] = []
        self.durable = False

    def __bool__(self) -> bool:
        return self.is_visible or bool(self.workers or self.waiting)

    @property
    def is_visible(self) -> bool:
        """Whether there are other changes than heartbeats of workers."""
        return bool(
            self.inserts
            or self.updates
            or self.leases
            or self.contents
            or self.deletes
            or self.progress
            or self.logs
            or self.put_off
            or self.items_sent
            or self.queues
            or self.groups
            or self.limiters
            or self.clock_offset is not None
            or self.retry_times
            or self.results_gone
            or self.metrics
            or self.metrics_gone
        )

    def __len__(self) -> int:
        return len(self.inserts) + len(self.updates) + len(self.contents) + len(self.deletes)

    def update(self, key: Key, row: Row) -> None:
        """Note a job's changed fields, which include an earlier renewal of its lease."""
        self.updates[key] = row
        if self.leases:
            self.leases.pop(key, None)

    def remove(self, row: JobRowKey) -> None:
        """Drop the noted changes of a job, and note that its rows are deleted."""
        key = row[:2]
        for changes in self._by_job():
            changes.pop(key, None)
        self.letters_gone.pop(key, None)
        self.items_gone.pop(key, None)
        self.deletes[row] = None

    def forget_metrics(self, queue: str) -> None:
        """Drop the metrics of a queue, and note that its rows are deleted."""
        self.metrics_gone.add(queue)
        self.metrics = {key: row for key, row in self.metrics.items() if key[0] != queue}

    def follow(self, later: "Buffer") -> None:
        """Merge the changes that were noted after these."""
        for row in later.deletes:
            self.remove(row)
        for key in later.items_gone:
            self.items.pop(key, None)
            self.items_gone[key] = None
        for key in self.leases.keys() & later.updates.keys():
            del self.leases[key]
        self.items_size += later.items_size
        self.elsewhere += later.elsewhere
        for mine, theirs in zip(self._by_job(), later._by_job(), strict=True):
            if mine is self.attempts or mine is self.logs or mine is self.items:
                for key, lines in theirs.items():
                    mine.setdefault(key, []).extend(lines)
            else:
                mine.update(theirs)
        for key in later.letters_gone:
            if key not in later.letters:
                self.letters.pop(key, None)
                self.letters_gone[key] = None
        self.queues.update(later.queues)
        self.groups.update(later.groups)
        self.limiters.update(later.limiters)
        self.workers.update(later.workers)
        if later.clock_offset is not None:
            self.clock_offset = later.clock_offset
        for queue in later.metrics_gone:
            self.forget_metrics(queue)
        self.metrics.update(later.metrics)
        self.ended += later.ended
        self.waiting += later.waiting
        self.durable = self.durable or later.durable

    def _by_job(self) -> tuple[dict[Key, Any], ...]:
        return (
            self.inserts,
            self.updates,
            self.leases,
            self.contents,
            self.results,
            self.letters,
            self.retry_times,
            self.attempts,
            self.progress,
            self.logs,
            self.items,
            self.items_sent,
            self.long,
            self.put_off,
            self.kept,
            self.results_gone,
        )
