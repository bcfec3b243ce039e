"""Progress and log lines of running jobs, on their way to the storage in groups."""

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Any

from djqueue.codecs import MSGPACK, decode, get_encoder
from djqueue.conf import Settings
from djqueue.core.job import ProgressReport

from .emitting import Emitter
from .flushing import Flushing

if TYPE_CHECKING:
    from .runs import Run
    from .workercontext import WorkerContext

INTERVAL = 0.1
"""Seconds between two groups, at least."""
MAX_LINES = 1_000
"""Lines of one job that wait here; of more the oldest go, as they would in the storage."""
MAX_LINE = 10_000
"""Characters of a line."""


class Reports(Flushing):
    """What handlers have said of their jobs and the storage does not know yet.

    emitter: the same for what generators yield.
    """

    interval = INTERVAL
    verb = "report"

    def __init__(
        self, worker_context: "WorkerContext", settings: Settings, on_refused: Callable[["Run"], None]
    ) -> None:
        super().__init__(worker_context)
        self.emitter = Emitter(worker_context, settings, on_refused)
        self._clock = worker_context.clock
        self._encode = get_encoder(MSGPACK, settings.max_payload, "progress")
        self._on_refused = on_refused
        self._pending: dict[Run, _Pending] = {}
        self._lock = Lock()

    @property
    def waiting(self) -> bool:
        """See `Flushing`."""
        return bool(self._pending) or self._sending.locked() or self.emitter.waiting

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

    def unsent(self) -> "set[Run]":
        """Return the runs of which something waits: their ends must not be reported before."""
        with self._lock:
            return self.emitter.unsent().union(self._pending)

    async def flush(self) -> None:
        """See `Flushing`."""
        try:
            if self.emitter.waiting:
                await self.emitter.flush()
        finally:
            # A storage that is full may refuse items alone.
            await self._flush_reports()

    async def _flush_reports(self) -> None:
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
        """See `Flushing`."""
        await self.emitter.close()
        await super().close()

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


class _Pending:
    __slots__ = ("lines", "progress")

    def __init__(self) -> None:
        self.progress: bytes | None = None
        self.lines: deque[tuple[int, str]] = deque(maxlen=MAX_LINES)

    def add(self, later: "_Pending") -> None:
        self.lines.extend(later.lines)
        if later.progress is not None:
            self.progress = later.progress

    def report(self, run: "Run") -> ProgressReport:
        claimed = run.claimed
        progress = None if self.progress is None else decode(self.progress, MSGPACK, accept=(MSGPACK,))
        return ProgressReport(claimed.queue, claimed.id, claimed.token, progress, tuple(self.lines))
