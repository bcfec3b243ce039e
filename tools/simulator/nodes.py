"""The simulated processes that run jobs: each has the real storage and the real worker."""

import asyncio
import logging
from typing import Any

from djqueue.core.errors import SchedulerRunningError, StorageUnavailableError
from djqueue.core.queue import QueuePolicy
from djqueue.core.sharing import LimiterPolicy
from djqueue.runtime.context import CURRENT
from djqueue.runtime.worker import Worker
from djqueue.storage.journaled.storage import STANDBY_POLL, JournaledStorage

from .loop import Process
from .world import World

logger = logging.getLogger("djqueue.simulator")

POLICIES = {
    "plain": QueuePolicy(lease=6_000),
    "limited": QueuePolicy(concurrency=2, lease=9_000),
    "shared_a": QueuePolicy(limiter="license"),
    "shared_b": QueuePolicy(limiter="license", lease=6_000),
    "grouped": QueuePolicy(),
}
LIMITERS = {"license": LimiterPolicy(concurrency=3)}
CONCURRENCY = 3


def new_storage(process: Process) -> JournaledStorage:
    """A process's storage."""
    return JournaledStorage(
        address=f"unix:///simulated/{process.name}.sock",
        policies=POLICIES,
        limiters=LIMITERS,
        clock=World.current().clock,
        cores=4,
    )


class Node:
    """A service that is started again whenever its process has ended.

    standby: `wait`: it becomes the scheduler when it can; `work`: it works for another one.
    """

    def __init__(self, name: str, standby: str) -> None:
        self.name = name
        self.standby = standby
        self.process: Process | None = None
        self._starts = 0
        self._worker: Worker | None = None
        self._storage: JournaledStorage | None = None
        self._stopping = False

    def start(self) -> None:
        """Start the process, and again whenever it has ended."""
        world = World.current()
        if self.process is None or not self.process.alive:
            self._starts += 1
            self._worker = self._storage = None
            self._stopping = False
            self.process = world.new_process(f"{self.name}.{self._starts}")
            world.note("started", self.process)
            world.loop.spawn(self.process, self._main(self.process))
        world.later(world.random.choice((0.5, 2.0, 8.0)), self.start)

    def stop(self) -> None:
        """Have the process end as after SIGTERM."""
        World.current().note("stopping")
        self._stopping = True
        if self._worker is not None:
            self._worker.stop()

    async def _main(self, process: Process) -> None:
        world = World.current()
        storage = self._storage = new_storage(process)
        if self.standby == "wait" and not await self._connect(storage):
            world.kill(process)
            return
        worker = self._worker = Worker(
            storage,
            handlers={"work": work},
            concurrency=CONCURRENCY,
            worker_id=process.name,
            shutdown_timeout=3.0,
            connect=False,
            clock=world.clock,
            random=world.random,
        )
        storage.role.on_lost = lambda: self._replaced(worker)
        if self._stopping:
            worker.stop()
        try:
            await worker.run()
        except StorageUnavailableError as error:
            # A worker that cannot register raises, and its process ends; the service manager starts it again.
            world.note("not started", type(error).__name__)
            world.kill(process)
            return
        try:
            await asyncio.to_thread(storage.close)
        except StorageUnavailableError as error:
            world.note("not closed", type(error).__name__)
        world.note("ended")
        world.kill(process)

    async def _connect(self, storage: JournaledStorage) -> bool:
        world = World.current()
        storage.role.standby = "never"
        while not self._stopping:
            try:
                storage.connect()
            except SchedulerRunningError:
                pass
            except StorageUnavailableError as error:
                world.note("not connected", type(error).__name__)
            else:
                return True
            await asyncio.sleep(STANDBY_POLL)
        return False

    def _replaced(self, worker: Worker) -> None:
        World.current().note("replaced")
        self._stopping = True
        worker.stop(hurry=True)


async def work(job: Any) -> int:
    """The handler of every simulated job."""
    world = World.current()
    run = CURRENT.get()
    claimed = run.claimed  # type: ignore[union-attr]
    world.monitor.began(claimed)
    try:
        seconds, fails = job.payload
        await asyncio.sleep(seconds)
        if fails > job.failures:
            raise ValueError("it was to fail")
        return 1
    finally:
        world.monitor.ended(claimed)
