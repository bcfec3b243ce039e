"""Puts the simulated parts in the places of the real ones, while a simulation lasts."""

from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from djqueue.core.ids import IdSource
from djqueue.storage.journaled.client import ClientStorage
from djqueue.storage.journaled.payloads import TablePayloads
from djqueue.storage.journaled.scheduler import SchedulerStorage
from djqueue.storage.tables.holders import LeaseHolder

from .loop import PROCESS, SimulatedClock
from .network import HOST, SimulatedRemote, SimulatedServer
from .threads import InboxThread, SimulatedJournal, SimulatedPauseWatch, SimulatedPeriodic
from .world import World

DATABASE = "djqueue.storage.journaled"


class SimulatedScheduler(SchedulerStorage):
    """The scheduler, watched by the monitor, whose inbox thread is a task."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        world = World.current()
        self.engine.context.random = Random(world.random.random())
        self.inbox.thread = InboxThread(self)  # type: ignore[assignment]
        world.monitor.watch(self)

    def open(self) -> dict[str, int]:
        """See `SchedulerStorage.open`."""
        world = World.current()
        world.monitor.takes_over(self)
        counts = super().open()
        world.note("scheduler", *counts.values())
        world.monitor.opened(self)
        return counts

    def open_for(self, *args: Any, **kwargs: Any) -> None:
        """See `SchedulerStorage.open_for`."""
        World.current().monitor.takes_over(self)
        super().open_for(*args, **kwargs)

    def close(self) -> None:
        """See `SchedulerStorage.close`."""
        super().close()
        World.current().monitor.closed(self)


class Inline:
    """Stands for an executor: it runs a function at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def submit(self, function: Any, *args: Any) -> "Future[Any]":
        """Return the function's answer."""
        answer: Future[Any] = Future()
        try:
            answer.set_result(function(*args))
        except Exception as error:
            answer.set_exception(error)
        return answer

    def shutdown(self) -> None:
        """Do nothing."""


class SimulatedPayloads(TablePayloads):
    """Reads payloads on the thread of the simulation, whose connection stays open."""

    def _close(self) -> None:
        pass


async def _finish(self: Any, outcomes: Any, then: Any = None) -> Any:
    return await self._remote.finish(outcomes, then)


def _died(holder: LeaseHolder) -> bool:
    return not _lives(holder)


def _lives(holder: LeaseHolder) -> bool:
    return any(one.pid == holder.pid and one.alive for one in World.current().processes.values())


class Observed(dict[str, Any]):
    """What each process has seen of the scheduler's lease: no process knows what another one saw."""

    def get(self, alias: str, default: Any = None) -> Any:
        """See `dict.get`."""
        return super().get(f"{_pid()} {alias}", default)

    def __setitem__(self, alias: str, seen: Any) -> None:
        super().__setitem__(f"{_pid()} {alias}", seen)

    def pop(self, alias: str, default: Any = None) -> Any:
        """See `dict.pop`."""
        return super().pop(f"{_pid()} {alias}", default)


def _pid() -> int:
    process = PROCESS.get()
    assert process is not None
    return process.pid


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """While this lasts, storages and workers that are made are simulated ones."""
    token_hex = SimpleNamespace(token_hex=lambda size: world.random.randbytes(size).hex())
    defaults = (world.random.randbytes,)
    with ExitStack() as stack:
        for name, value in {
            f"{DATABASE}.scheduler.DatabaseJournal": SimulatedJournal,
            f"{DATABASE}.storage.SchedulerStorage": SimulatedScheduler,
            f"{DATABASE}.client.SchedulerStorage": SimulatedScheduler,
            f"{DATABASE}.storage.SchedulerServer": SimulatedServer,
            f"{DATABASE}.client.Remote": SimulatedRemote,
            f"{DATABASE}.payloads.ThreadPoolExecutor": Inline,
            f"{DATABASE}.scheduler.TablePayloads": SimulatedPayloads,
            f"{DATABASE}.lease.died_here": _died,
            f"{DATABASE}.lease.lives_here": _lives,
            f"{DATABASE}.lease._observed": Observed(),
            f"{DATABASE}.lease._failed_at": Observed(),
            f"{DATABASE}.lease.host_name": lambda: HOST,
            "djqueue.storage.tables.holders.host_name": lambda: HOST,
            f"{DATABASE}.lease.start_mark": lambda pid: "",
            f"{DATABASE}.processes.start_mark": lambda pid: "",
            f"{DATABASE}.processes.died_here": _died,
            f"{DATABASE}.processes.host_name": lambda: HOST,
            f"{DATABASE}.processes.os": SimpleNamespace(getpid=_pid),
            f"{DATABASE}.scheduler.DatabaseClock": SimulatedClock,
            f"{DATABASE}.scheduler.PauseWatch": SimulatedPauseWatch,
            f"{DATABASE}.lease.secrets": token_hex,
            f"{DATABASE}.lease.os": SimpleNamespace(getpid=_pid),
            "djqueue.runtime.heartbeat.Periodic": SimulatedPeriodic,
            "djqueue.runtime.maintenance.Periodic": SimulatedPeriodic,
        }.items():
            stack.enter_context(patch(name, value))
        stack.enter_context(patch.object(ClientStorage, "afinish", _finish))
        stack.enter_context(patch.object(IdSource.__init__, "__defaults__", defaults))
        yield
