"""How long jobs waited and ran: counted where their ends are told, sent to the storage now and then."""

import asyncio
from typing import TYPE_CHECKING

from djqueue.core.metrics import PARTS, Histogram, RunStats, part_of

from .workercontext import WorkerContext

if TYPE_CHECKING:
    from .runs import Run

INTERVAL = 10.0
"""Seconds between two flushes."""
KINDS = {"complete": 0, "retry": 1, "fail": 2, "cancel": 3}
"""Places of the ends that are counted."""


class Meter:
    """Counts on the worker's loop alone."""

    def __init__(self, worker_context: WorkerContext) -> None:
        self._storage = worker_context.storage
        self._loop = worker_context.loop
        self._tell = worker_context.tell
        self._entries: dict[tuple[str, str], _MeterEntry] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._flush: asyncio.Task[None] | None = None

    def note(self, run: "Run", kind: str) -> None:
        """A run has ended, and the storage has accepted that."""
        claimed = run.claimed
        key = (claimed.queue, claimed.name)
        entry = self._entries.get(key)
        if entry is None:
            entry = self._begin(key)
        entry.run[part_of(run.ended - run.since)] += 1
        place = KINDS.get(kind)
        if place is not None:
            entry.ends[place] += 1
        if claimed.attempts == 1 and not claimed.options.depends_on:
            entry.wait[part_of(claimed.waited)] += 1

    async def close(self) -> None:
        """Send what is left."""
        if self._timer is not None:
            self._timer.cancel()
        if self._flush is not None:
            await asyncio.wait([self._flush])
        await self._send()

    def _begin(self, key: tuple[str, str]) -> "_MeterEntry":
        entry = self._entries[key] = _MeterEntry()
        if self._timer is None:
            self._timer = self._loop.call_later(INTERVAL, self._start)
        return entry

    def _start(self) -> None:
        self._timer = None
        self._flush = self._loop.create_task(self._send())

    async def _send(self) -> None:
        entries, self._entries = self._entries, {}
        if not entries:
            return
        stats = [entry.stats(*key) for key, entry in entries.items()]
        try:
            await self._storage.acall(self._storage.workers.record_runs, stats)
        except Exception as error:
            self._tell.away("record runs", error)
            for key, entry in entries.items():
                (self._entries.get(key) or self._begin(key)).add(entry)
        else:
            self._tell.back("record runs")


class _MeterEntry:
    __slots__ = ("ends", "run", "wait")

    def __init__(self) -> None:
        self.ends = [0] * len(KINDS)
        self.wait = [0] * PARTS
        self.run = [0] * PARTS

    def add(self, other: "_MeterEntry") -> None:
        for mine, theirs in ((self.ends, other.ends), (self.wait, other.wait), (self.run, other.run)):
            for place, number in enumerate(theirs):
                mine[place] += number

    def stats(self, queue: str, name: str) -> RunStats:
        times = Histogram(tuple(self.wait)), Histogram(tuple(self.run))
        return RunStats._make((queue, name, *self.ends, *times))
