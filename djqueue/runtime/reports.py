"""Progress and log lines of running jobs, on their way to the storage in groups."""

import asyncio
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from djqueue.codecs import MSGPACK, decode, get_encoder
from djqueue.core.job import Report

if TYPE_CHECKING:
    from .runs import Run
    from .station import Station

INTERVAL = 0.1
"""Seconds between two groups, at least."""
RETRY = 1.0
"""Seconds until a group is tried again when the storage is away."""
MAX_LINES = 1_000
"""Lines of one job that wait here; of more the oldest go, as they would in the storage."""
MAX_LINE = 10_000
"""Characters of a line."""


class Reports:
    """What handlers have said of their jobs and the storage does not know yet."""

    def __init__(self, station: "Station", limit: int, on_refused: Callable[["Run"], None]) -> None:
        self.storage = station.storage
        self._loop = station.loop
        self._clock = station.clock
        self._tell = station.tell
        self._encode = get_encoder(MSGPACK, limit, "progress")
        self._on_refused = on_refused
        self._pending: dict[Run, _Pending] = {}
        self._lock = Lock()
        self._sending = asyncio.Lock()
        self._scheduled = False
        self._not_before = 0.0
        self._flush: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> bool:
        """Whether something has been said that the storage may not know."""
        return bool(self._pending) or self._sending.locked()

    def progress(self, run: "Run", value: Any) -> None:
        """See `JobContext.progress`; from any thread."""
        # In bytes it is a snapshot: what the handler changes later is not sent by chance.
        data = self._encode(value)
        with self._lock:
            self._of(run).progress = data
        self._schedule()

    def log(self, run: "Run", line: object) -> None:
        """See `JobContext.log`; from any thread."""
        entry = (self._clock.now(), str(line)[:MAX_LINE])
        with self._lock:
            self._of(run).lines.append(entry)
        self._schedule()

    async def flush(self) -> None:
        """Send all that waits. Raises what the storage raises, and keeps what it did not take."""
        # One at a time: the words about a job must not overtake each other.
        async with self._sending:
            with self._lock:
                pending, self._pending = self._pending, {}
            if not pending:
                return
            reports = [entry.report(run) for run, entry in pending.items()]
            try:
                accepted = await self.storage.acall(self.storage.report, reports)
            except BaseException:
                self._put_back(pending)
                raise
            for run, taken in zip(pending, accepted, strict=True):
                if not taken:
                    self._on_refused(run)

    async def close(self) -> None:
        """End the timer's flush, if one is under way."""
        self._scheduled = True
        if self._flush is not None:
            self._flush.cancel()
            await asyncio.gather(self._flush, return_exceptions=True)

    def _of(self, run: "Run") -> "_Pending":
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

    def _schedule(self) -> None:
        if self._scheduled:
            return
        self._scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._arm)
        except RuntimeError:
            # A handler that was given up goes on after its worker's end: nobody listens to it.
            self._tell.too_late("a report")

    def _arm(self) -> None:
        delay = max(0.0, self._not_before - self._loop.time())
        self._loop.call_later(delay, self._begin)

    def _begin(self) -> None:
        self._scheduled = False
        self._not_before = self._loop.time() + INTERVAL
        self._flush = self._loop.create_task(self._flush_by_itself())

    async def _flush_by_itself(self) -> None:
        try:
            await self.flush()
        except Exception as error:
            self._tell.away("report", error)
            self._not_before = self._loop.time() + RETRY
            self._schedule()
        else:
            self._tell.back("report")


class _Pending:
    __slots__ = ("lines", "progress")

    def __init__(self) -> None:
        self.progress: bytes | None = None
        self.lines: deque[tuple[int, str]] = deque(maxlen=MAX_LINES)

    def add(self, later: "_Pending") -> None:
        self.lines.extend(later.lines)
        if later.progress is not None:
            self.progress = later.progress

    def report(self, run: "Run") -> Report:
        claimed = run.claimed
        progress = None if self.progress is None else decode(self.progress, MSGPACK, accept=(MSGPACK,))
        return Report(claimed.queue, claimed.id, claimed.token, progress, tuple(self.lines))
