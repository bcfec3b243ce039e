"""Live workers, the commands that wait for them, and the dumps that they sent."""

from collections.abc import Callable, Sequence
from threading import Lock

from ..metrics import RunStats
from ..workers import (
    ASKED,
    DUMP,
    DUMP_TTL,
    MAX_DUMP,
    NOT_FOUND,
    STOP,
    STOPPING,
    WorkerDump,
    WorkerInfo,
    check_command,
    with_command,
)
from .context import EngineContext

Wake = Callable[[], None]


class _WorkerEntry:
    __slots__ = ("dump", "info", "seen", "waiting")

    def __init__(self, info: WorkerInfo, seen: int) -> None:
        self.info = info
        self.seen = seen
        """Monotonic milliseconds of the last heartbeat."""
        self.waiting: tuple[str, ...] = ()
        """Commands that the worker has not received yet."""
        self.dump: WorkerDump | None = None


class EngineWorkers:
    """Workers, known to the engine. All methods may be called from any thread."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self._lock = Lock()
        self._entries: dict[str, _WorkerEntry] = {}
        self._followers: dict[str, list[Wake]] = {}

    def register(self, info: WorkerInfo) -> tuple[str, ...]:
        """Add a worker, or record its heartbeat; return the commands that wait for it, once."""
        seen, tick = info._replace(seen_at=self._context.clock.now()), self._context.clock.monotonic()
        with self._lock:
            entry = self._entries.get(info.id)
            if entry is None or entry.info.started_at != info.started_at:
                # Commands for an earlier worker of this name are not for this one.
                entry = self._entries[info.id] = _WorkerEntry(seen, tick)
            entry.info, entry.seen = seen, tick
            commands, entry.waiting = entry.waiting, ()
        return commands

    def unregister(self, worker_id: str) -> None:
        """Remove a worker that has stopped."""
        with self._lock:
            self._entries.pop(worker_id, None)

    def all(self) -> list[WorkerInfo]:
        """Return the workers that sent a heartbeat lately."""
        with self._lock:
            return [entry.info for entry in self._entries.values()]

    def forget(self, older_than: int) -> list[WorkerInfo]:
        """Remove workers without a heartbeat for this many milliseconds; return them."""
        tick = self._context.clock.monotonic()
        with self._lock:
            gone = [entry.info for entry in self._entries.values() if tick - entry.seen > older_than]
            for info in gone:
                del self._entries[info.id]
        return gone

    def control(self, worker_id: str, command: str) -> str:
        """Send a worker a command; return asked, stopping or not_found.

        Raises OptionError for an unknown command.
        """
        check_command(command)
        with self._lock:
            entry = self._entries.get(worker_id)
            if entry is None:
                return NOT_FOUND
            if command != DUMP and (entry.info.state == STOPPING or STOP in entry.waiting):
                return STOPPING
            entry.waiting = with_command(entry.waiting, command)
            followers = self._followers.get(worker_id, [])
        for wake in followers:
            wake()
        return ASKED

    def on_command(self, worker_id: str, wake: Wake) -> Callable[[], None]:
        """Call `wake`, from any thread, when a command waits for a worker."""
        with self._lock:
            self._followers[worker_id] = [*self._followers.get(worker_id, ()), wake]
        return lambda: self._forget_wake(worker_id, wake)

    def _forget_wake(self, worker_id: str, wake: Wake) -> None:
        with self._lock:
            left = list(self._followers.get(worker_id, ()))
            if wake in left:
                left.remove(wake)
            if left:
                self._followers[worker_id] = left
            else:
                self._followers.pop(worker_id, None)

    def save_dump(self, worker_id: str, text: str) -> bool:
        """Keep a worker's dump, replacing an earlier one; False if the worker is unknown."""
        with self._lock:
            entry = self._entries.get(worker_id)
            if entry is not None:
                entry.dump = WorkerDump(self._context.clock.now(), text[:MAX_DUMP])
        return entry is not None

    def dump(self, worker_id: str) -> WorkerDump | None:
        """Return the last dump of a live worker; None if it has none, or the dump has expired."""
        oldest = self._context.clock.now() - DUMP_TTL
        with self._lock:
            entry = self._entries.get(worker_id)
            if entry is not None and entry.dump is not None and entry.dump.at <= oldest:
                entry.dump = None
            return None if entry is None else entry.dump

    def record_runs(self, stats: Sequence[RunStats]) -> None:
        """Add a worker's statistics of ended attempts to the metrics, except those of unknown queues."""
        context = self._context
        known = [run for run in stats if context.existing(run.queue) is not None]
        context.metrics.record(known, context.clock.now())
        context.changes.bump()
