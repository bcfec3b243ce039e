"""The threads of the real code, as tasks of the simulated loop.

Whoever would wait for a thread has it do its work at once, as if it had been scheduled just then.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine
from typing import Any

from djqueue.storage.journaled.buffer import Buffer, Done
from djqueue.storage.journaled.inbox import POLL
from djqueue.storage.journaled.journal import RENEW_EVERY, WINDOW, DatabaseJournal
from djqueue.storage.journaled.lease import BEAT, PAUSE, PauseWatch
from djqueue.storage.journaled.scheduler import SchedulerStorage

from .loop import PROCESS
from .world import World


def spawn(coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task of the present process."""
    world, process = World.current(), PROCESS.get()
    assert process is not None
    return world.loop.spawn(process, coroutine)


class SimulatedJournal(DatabaseJournal):
    """The journal, whose thread is a task: taking a buffer and writing it are two steps."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._wanted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._unwritten: Buffer | None = None
        """What was taken and is not being written yet."""
        self.facts: list[Callable[[], None]] = []
        """Told once what was noted so far is committed."""
        self._flying_facts: list[Callable[[], None]] = []
        self.version = 0
        """Rises with each change that is noted."""

    @property
    def is_idle(self) -> bool:
        """Whether all that was noted is committed."""
        return not self._buffer and self._unwritten is None and self._failure is None

    def start(self) -> None:
        """See `DatabaseJournal.start`."""
        self._task = spawn(self._work())

    def close(self) -> None:
        """See `DatabaseJournal.close`."""
        if self._task is None:
            super().close()
            return
        self._closing = True
        while not self._ended and (self._unwritten is not None or self._buffer):
            if self._work_once() is None:
                break
        self._end()
        self._wanted.set()
        if self._buffer and self._failure is not None:
            raise self._failure

    def sync(self, *, durable: bool = False, timeout: float | None = None) -> None:
        """See `DatabaseJournal.sync`."""
        if self._task is None:
            super().sync(durable=durable, timeout=timeout)
            return
        outcome: list[BaseException | None] = []
        self.when_written(outcome.append, durable=durable)
        while not outcome:
            self._work_once()
        if outcome[0] is not None:
            raise outcome[0]

    def when_written(self, done: Done, *, durable: bool = False) -> None:
        """See `DatabaseJournal.when_written`."""
        super().when_written(done, durable=durable)
        self._wanted.set()

    def wait_for_room(self, timeout: float = math.inf) -> None:
        """See `DatabaseJournal.wait_for_room`."""
        while self.is_full() and self._failure is None:
            self._work_once()
        self.check()

    def _noted(self) -> None:
        super()._noted()
        self.version += 1
        self._wanted.set()

    async def _work(self) -> None:
        random = World.current().random
        while not self._ended:
            try:
                async with asyncio.timeout(RENEW_EVERY):
                    await self._wanted.wait()
            except TimeoutError:
                pass  # The lease is to be renewed.
            self._wanted.clear()
            if not self._urgent:
                await asyncio.sleep(WINDOW)
            if self._ended:
                return
            if self._unwritten is None:
                self._begin()
                await asyncio.sleep(random.choice((0, 0, 0.002, 0.05)))
            if self._unwritten is None:
                continue  # Somebody who waited had it written.
            delay = self._work_once()
            if delay:
                await asyncio.sleep(delay)
                self._wanted.set()

    def _begin(self) -> None:
        with self._changed:
            self._unwritten = self._take()
        self._flying_facts, self.facts = self.facts, []

    def _work_once(self) -> float | None:
        """Write what was taken, or else what is there."""
        if self._unwritten is None:
            self._begin()
        buffer, self._unwritten = self._unwritten, None
        assert buffer is not None
        delay = self._flush(buffer)
        if self._failure is not None:
            self.facts[:0], self._flying_facts = self._flying_facts, []
        if delay is None:
            self._end()
        return delay

    def _write(self, buffer: Buffer) -> None:
        World.current().database.committed = self._committed
        try:
            super()._write(buffer)
        finally:
            World.current().database.committed = _nothing

    def _committed(self) -> None:
        facts, self._flying_facts = self._flying_facts, []
        for fact in facts:
            fact()


class InboxThread:
    """Stands for the thread that looks into the scheduler's inbox."""

    def __init__(self, storage: SchedulerStorage) -> None:
        self._storage = storage
        self.process = PROCESS.get()
        self._arrived = asyncio.Event()
        storage.inbox.arrived = self._arrived  # type: ignore[assignment]

    def start(self) -> None:
        """Begin to look."""
        spawn(self._work())

    def is_alive(self) -> bool:
        """Nobody needs to wait for its end."""
        return False

    async def _work(self) -> None:
        storage = self._storage
        while not storage.inbox.closing.is_set():
            try:
                async with asyncio.timeout(POLL):
                    await self._arrived.wait()
            except TimeoutError:
                pass  # A wake-up may have been lost.
            self._arrived.clear()
            if storage.inbox.closing.is_set():
                return
            try:
                storage.inbox.take_in_all()
            except Exception as error:
                World.current().note("inbox failed", type(error).__name__)
                await asyncio.sleep(POLL)
                self._arrived.set()


class SimulatedPauseWatch(PauseWatch):
    """The watch for pauses, whose thread is a task."""

    def __init__(self, paused: Callable[[int], None]) -> None:
        super().__init__(paused, World.current().clock)
        self._started = False

    def start(self) -> None:
        """See `PauseWatch.start`."""
        self._seen = self._clock.monotonic()
        self._started = True
        spawn(self._work())

    def check(self) -> None:
        """See `PauseWatch.check`."""
        if self._started:
            now = self._clock.monotonic()
            gap, self._seen = now - self._seen, now
            if gap >= PAUSE:
                self._paused(gap)

    async def _work(self) -> None:
        while not self._ended.is_set():
            await asyncio.sleep(BEAT)
            self.check()


class SimulatedPeriodic:
    """Stands for `djqueue.runtime.loops.Periodic`."""

    def __init__(
        self,
        name: str,
        interval: Callable[[], float],
        action: Callable[[], None],
        on_exit: Callable[[], None] | None = None,
    ) -> None:
        self._interval = interval
        self._action = action
        self._called = asyncio.Event()
        self._stopped = False

    def start(self) -> None:
        """See `Periodic.start`."""
        spawn(self._work())

    def hasten(self) -> None:
        """See `Periodic.hasten`."""
        self._called.set()

    def stop(self) -> None:
        """See `Periodic.stop`."""
        self._stopped = True
        self._called.set()

    def join(self, timeout: float) -> None:
        """See `Periodic.join`: an action is one step, so none is under way."""

    async def _work(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval()):
                    await self._called.wait()
            except TimeoutError:
                pass
            self._called.clear()
            if self._stopped:
                return
            self._action()


def _nothing() -> None:
    pass
