"""Reports of a worker to the storage beside outcomes: progress and log lines of running jobs, and metrics."""

import asyncio
from collections import deque
from collections.abc import Collection
from threading import Lock
from typing import Any

from djqueue.codecs import MSGPACK, decode, get_encoder
from djqueue.core.job import ProgressReport
from djqueue.core.metrics import PARTS, Histogram, RunStats, part_of

from .context import WorkerContext
from .emitting import Emitter, Flushing, RunItems
from .owntasks import own_task
from .runs import Child, Run, aread, children, read

INTERVAL = 0.1
"""Minimum of seconds between two batches of progress and log lines."""
MAX_LINES = 1_000
"""Maximum of log lines of one job that wait here; the oldest are dropped, as the storage would do."""
MAX_LINE = 10_000
"""Maximum of characters of a log line."""
METRICS_INTERVAL = 10.0
"""Seconds between two batches of metrics."""
KINDS = {"complete": 0, "retry": 1, "fail": 2, "cancel": 3}
"""Positions of the outcomes that metrics count."""


class Reports(Flushing):
    """The progress and log lines that the storage does not have yet, and the emitter's items before them."""

    interval = INTERVAL
    operation = "report"

    def __init__(self, context: WorkerContext, emitter: Emitter) -> None:
        super().__init__(context)
        self.worker_id = context.options.worker_id
        self._emitter = emitter
        self._clock = context.clock
        self._encode = get_encoder(MSGPACK, context.settings.max_payload, "progress")
        self._pending: dict[Run, _Pending] = {}
        self._lock = Lock()

    @property
    def waiting(self) -> bool:
        """Whether progress, log lines or items may not have reached the storage yet."""
        return bool(self._pending) or self._sending.locked() or self._emitter.waiting

    def progress(self, run: Run, value: Any) -> None:
        """Report a job's progress, as `JobContext.progress` does. From any thread."""
        # Encoded at once: the handler may change the value later.
        data = self._encode(value)
        with self._lock:
            self._of(run).progress = data
        self._schedule()

    def log(self, run: Run, line: object) -> None:
        """Add a log line to a job, as `JobContext.log` does. From any thread."""
        entry = (self._clock.now(), str(line)[:MAX_LINE])
        with self._lock:
            self._of(run).lines.append(entry)
        self._schedule()

    def open(self, run: Run) -> RunItems:
        """Begin the stream of a run that yields items."""
        return self._emitter.open(run)

    def children(self, run: Run) -> list[Child]:
        """Read the jobs that a job depends on, as `JobContext.children` does."""
        keys = run.claimed.options.depends_on
        return children(keys, read(self._storage, keys))

    async def achildren(self, run: Run) -> list[Child]:
        """Async version of `children`."""
        keys = run.claimed.options.depends_on
        return children(keys, await aread(self._storage, keys))

    def unsent(self) -> set[Run]:
        """Return the runs with unsent reports: their outcomes must not be reported before."""
        with self._lock:
            return self._emitter.unsent().union(self._pending)

    async def flush(self) -> set[Run]:
        """Send all items, progress and log lines that wait; return the runs whose jobs are locked."""
        locked: set[Run] = set()
        try:
            if self._emitter.waiting:
                locked = await self._emitter.flush()
        finally:
            # A storage without memory may refuse only the items.
            locked = locked.union(await self._flush_reports())
        return locked

    async def _flush_reports(self) -> Collection[Run]:
        # One at a time: the reports of a job must arrive in order.
        async with self._sending:
            with self._lock:
                pending, self._pending = self._pending, {}
            if not pending:
                return ()
            reports = [entry.report(run) for run, entry in pending.items()]
            try:
                accepted = await self._storage.acall(self._storage.report, reports)
            except BaseException:
                self._put_back(pending)
                raise
            answers = dict(zip(pending, accepted, strict=True))
            locked = {run: pending[run] for run, taken in answers.items() if taken is None}
            self._put_back(locked)
            for run, taken in answers.items():
                if taken is False:
                    self._lose(run)
            return locked

    async def close(self) -> None:
        """Cancel the scheduled flushes of the emitter and of the reports."""
        await self._emitter.close()
        await super().close()

    def _of(self, run: Run) -> "_Pending":
        entry = self._pending.get(run)
        if entry is None:
            entry = self._pending[run] = _Pending()
        return entry

    def _put_back(self, earlier: "dict[Run, _Pending]") -> None:
        with self._lock:
            for run, entry in earlier.items():
                later = self._pending.get(run)
                if later is not None:
                    entry.add(later)
            self._pending = {**self._pending, **earlier}


class _Pending:
    """Progress and log lines of one run."""

    __slots__ = ("lines", "progress")

    def __init__(self) -> None:
        self.progress: bytes | None = None
        self.lines: deque[tuple[int, str]] = deque(maxlen=MAX_LINES)

    def add(self, later: "_Pending") -> None:
        self.lines.extend(later.lines)
        if later.progress is not None:
            self.progress = later.progress

    def report(self, run: Run) -> ProgressReport:
        claimed = run.claimed
        progress = None if self.progress is None else decode(self.progress, MSGPACK, accept=(MSGPACK,))
        return ProgressReport(claimed.queue, claimed.id, claimed.token, progress, tuple(self.lines))


class Meter:
    """Measures how long jobs waited and ran, and sends histograms to the storage. Runs on the loop."""

    def __init__(self, context: WorkerContext) -> None:
        self._storage = context.storage
        self._loop = context.loop
        self._events = context.events
        self._entries: dict[tuple[str, str], _MeterEntry] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._flush: asyncio.Task[None] | None = None

    def measure(self, run: Run, kind: str) -> None:
        """Count a run that has ended, once the storage has accepted its outcome."""
        claimed = run.claimed
        key = (claimed.queue, claimed.name)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._add(key)
        ran = max(0, run.ended - run.since)  # The wall clock may have been set back.
        entry.run[part_of(ran)] += 1
        entry.sums[1] += ran
        position = KINDS.get(kind)
        if position is not None:
            entry.ends[position] += 1
        if claimed.attempts == 1 and not claimed.options.depends_on:
            entry.wait[part_of(claimed.waited)] += 1
            entry.sums[0] += claimed.waited

    async def close(self) -> None:
        """Send the remaining metrics."""
        if self._timer is not None:
            self._timer.cancel()
        if self._flush is not None:
            await asyncio.wait([self._flush])
        await self._send()

    def _add(self, key: tuple[str, str]) -> "_MeterEntry":
        entry = self._entries[key] = _MeterEntry()
        if self._timer is None:
            self._timer = self._loop.call_later(METRICS_INTERVAL, self._start)
        return entry

    def _start(self) -> None:
        self._timer = None
        self._flush = own_task(self._loop, self._send())

    async def _send(self) -> None:
        entries, self._entries = self._entries, {}
        if not entries:
            return
        stats = [entry.stats(*key) for key, entry in entries.items()]
        try:
            await self._storage.acall(self._storage.workers.record_runs, stats)
        except Exception as error:
            self._events.storage_failed("record runs", error)
            for key, entry in entries.items():
                (self._entries.get(key) or self._add(key)).add(entry)
        else:
            self._events.storage_worked("record runs")


class _MeterEntry:
    """Counts of the runs of one job name in one queue."""

    __slots__ = ("ends", "run", "sums", "wait")

    def __init__(self) -> None:
        self.ends = [0] * len(KINDS)
        self.wait = [0] * PARTS
        self.run = [0] * PARTS
        self.sums = [0, 0]
        """Sums of the times: waiting, running."""

    def add(self, other: "_MeterEntry") -> None:
        for part in self.__slots__:
            counts = getattr(self, part)
            for index, number in enumerate(getattr(other, part)):
                counts[index] += number

    def stats(self, queue: str, name: str) -> RunStats:
        waited, ran = self.sums
        times = Histogram(tuple(self.wait), waited), Histogram(tuple(self.run), ran)
        return RunStats._make((queue, name, *self.ends, *times))
