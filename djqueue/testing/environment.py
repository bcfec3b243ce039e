"""The storage and the clock of one test, for the fixtures and the mixin."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from django.conf import settings
from django.test import override_settings

from djqueue.client import get_storage
from djqueue.core.units import to_milliseconds
from djqueue.models import CronJob
from djqueue.operations.firing import Firing
from djqueue.operations.sweeps import alias_of
from djqueue.runtime.immediate import ImmediateStorage
from djqueue.storage.base import Storage

from .clock import JobClock

MEMORY = "djqueue.storage.memory.MemoryStorage"
IMMEDIATE = "djqueue.runtime.immediate.ImmediateStorage"


class JobEnvironment:
    """An empty storage in memory, in place of that of the settings, and the clock that it follows."""

    def __init__(self, storage: Storage, clock: JobClock | None) -> None:
        self.storage = storage
        self._clock = clock

    @property
    def immediate(self) -> ImmediateStorage:
        """The storage, which runs jobs when they are enqueued."""
        if not isinstance(self.storage, ImmediateStorage):
            raise RuntimeError(f"djqueue_immediate {LATE}")
        return self.storage

    @property
    def clock(self) -> JobClock:
        """The clock of the storage."""
        if self._clock is None:
            raise RuntimeError(f"djqueue_clock {LATE}")
        return self._clock


LATE = "must be a parameter of the test or of a fixture; it cannot be requested while the test runs"


@contextmanager
def job_environment(
    *,
    immediate: bool = False,
    clock: bool = False,
    raise_failures: bool = True,
    changed: Callable[..., AbstractContextManager[object]] = override_settings,
) -> Iterator[JobEnvironment]:
    """Replace the storage of the settings by an empty one in memory; the other settings stay.

    Args:
        immediate: Run jobs when they are enqueued.
        clock: Let the storage follow a clock that advances only when the test moves it.
        raise_failures: As in `ImmediateStorage`.
        changed: Returns a context manager in which settings have the given values.
    """
    options: dict[str, object] = {}
    moved = None
    if clock:
        moves = _Moves()
        moved = options["CLOCK"] = moves.clock
        if immediate:
            options["KEEP_TIME"] = True
    given = {"BACKEND": IMMEDIATE if immediate else MEMORY, "OPTIONS": options}
    current = getattr(settings, "DJQUEUE", {})
    with changed(DJQUEUE={**current, "STORAGE": given, "IMMEDIATE": False}):
        storage = get_storage()
        if isinstance(storage, ImmediateStorage):
            storage.raise_failures = raise_failures
        yield JobEnvironment(storage, moved)


class _Moves:
    """Does what is due after each step of a clock."""

    def __init__(self) -> None:
        self.clock = JobClock(self._on_move)
        self._firing: Firing | None = None

    def _on_move(self, schedules: bool) -> int | None:
        storage = get_storage()
        waits = []
        hold = storage.hold() if isinstance(storage, ImmediateStorage) else nullcontext()
        with hold:
            if schedules:
                waits.append(self._fire(storage))
            storage.sweep()
        if isinstance(storage, ImmediateStorage):
            waits.append(storage.run_waiting())
        return min((wait for wait in waits if wait is not None), default=None)

    def _fire(self, storage: Storage) -> int | None:
        """Fire the due schedules; return the milliseconds until the next one is due."""
        alias = alias_of(storage)
        if self._firing is None:
            self._firing = Firing(storage, alias, clock=self.clock, ids_known_for=0)
        self._firing.fire()
        rows = CronJob.objects.using(alias).filter(enabled=True, next_run_at__isnull=False)
        times = [row.timing().fires_at(to_milliseconds(row.next_run_at), row.name) for row in rows]
        return min(times) - self.clock.now() if times else None
