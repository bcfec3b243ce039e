"""The workers that are alive, with what each is to be told and what it was asked to tell."""

from collections.abc import Callable
from threading import Lock

from .clock import Clock
from .job import WorkerDump, WorkerInfo
from .workercontrol import ASKED, DUMP, DUMP_TTL, MAX_DUMP, NOT_FOUND, STOP, STOPPING, with_command

Wake = Callable[[], None]


class _WorkerEntry:
    __slots__ = ("dump", "info", "seen", "waiting")

    def __init__(self, info: WorkerInfo, seen: int) -> None:
        self.info = info
        self.seen = seen
        """Monotonic milliseconds."""
        self.waiting: tuple[str, ...] = ()
        self.dump: WorkerDump | None = None


class Workers:
    """A registry in this process. All methods may be called from any thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = Lock()
        self._entries: dict[str, _WorkerEntry] = {}
        self._followers: dict[str, list[Wake]] = {}

    def register(self, info: WorkerInfo) -> tuple[str, ...]:
        """Note a worker, or that it is alive; what it is to be told, which is forgotten here."""
        seen, tick = info._replace(seen_at=self._clock.now()), self._clock.monotonic()
        with self._lock:
            entry = self._entries.get(info.id)
            if entry is None or entry.info.started_at != info.started_at:
                # What was meant for another worker of that name is not for this one.
                self._entries[info.id] = _WorkerEntry(seen, tick)
                return ()
            entry.info, entry.seen = seen, tick
            told, entry.waiting = entry.waiting, ()
        return told

    def unregister(self, worker_id: str) -> None:
        """Forget a worker with all that is its."""
        with self._lock:
            self._entries.pop(worker_id, None)

    def all(self) -> list[WorkerInfo]:
        """Those that are known."""
        with self._lock:
            return [entry.info for entry in self._entries.values()]

    def forget(self, older_than: int) -> list[WorkerInfo]:
        """Forget those not heard of for so many milliseconds; returns them."""
        tick = self._clock.monotonic()
        with self._lock:
            gone = [entry.info for entry in self._entries.values() if tick - entry.seen > older_than]
            for info in gone:
                del self._entries[info.id]
        return gone

    def steer(self, worker_id: str, command: str) -> str:
        """Have a worker hear a command once; what becomes of it: see `Storage.control_worker`."""
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

    def follow(self, worker_id: str, wake: Wake) -> Callable[[], None]:
        """Call `wake` when a worker is to be told something; returns what ends that."""
        with self._lock:
            self._followers[worker_id] = [*self._followers.get(worker_id, ()), wake]
        return lambda: self._unfollow(worker_id, wake)

    def _unfollow(self, worker_id: str, wake: Wake) -> None:
        with self._lock:
            left = list(self._followers.get(worker_id, ()))
            if wake in left:
                left.remove(wake)
            if left:
                self._followers[worker_id] = left
            else:
                self._followers.pop(worker_id, None)

    def save_dump(self, worker_id: str, text: str) -> bool:
        """Keep what a worker was asked to tell; False if the worker is not known."""
        with self._lock:
            entry = self._entries.get(worker_id)
            if entry is not None:
                entry.dump = WorkerDump(self._clock.now(), text[:MAX_DUMP])
        return entry is not None

    def dump(self, worker_id: str) -> WorkerDump | None:
        """What a worker told last, if that is not over."""
        oldest = self._clock.now() - DUMP_TTL
        with self._lock:
            entry = self._entries.get(worker_id)
            if entry is not None and entry.dump is not None and entry.dump.at <= oldest:
                entry.dump = None
            return None if entry is None else entry.dump
