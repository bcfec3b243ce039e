"""The objects that the parts of a worker share: storage, options, runs, events, clock and event loop."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Protocol

from djqueue.conf import Settings
from djqueue.core.clock import Clock
from djqueue.storage.base import Storage

from .configuration import WorkerOptions
from .events import RunEvents
from .handlers import Handler
from .leases import LeaseTable
from .runs import Run, Runs
from .wakeevent import WakeEvent


class WorkerControl(Protocol):
    """The state of the worker as a whole, and the ways in which a part can change it. From any thread."""

    stopping: bool
    """Whether the worker claims no more jobs, because it is about to end."""
    paused: bool
    """Whether it claims no jobs until `resume`."""
    is_replaceable: bool
    """Whether a supervisor starts another process when this one ends."""

    def stop(self, *, hurry: bool = False) -> None:
        """Stop claiming, and end when the running jobs have finished."""

    def quiet(self) -> None:
        """Stop claiming until `resume`."""

    def resume(self) -> None:
        """Claim again after `quiet`."""

    def lose(self, run: Run) -> None:
        """Stop a run whose lease the storage no longer accepts."""

    def recycle(self) -> None:
        """Finish the jobs that can finish, and end. Called on the loop, because a handler is stuck."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """The objects that several parts of one worker use. It is created on the worker's loop."""

    storage: Storage
    settings: Settings
    options: WorkerOptions
    handlers: Mapping[str, Handler]
    """The handlers by job name."""
    runs: Runs
    events: RunEvents
    clock: Clock
    random: Random
    loop: asyncio.AbstractEventLoop
    wake_event: WakeEvent
    """Wakes the claim loop."""
    control: WorkerControl
    """The worker itself."""
    lease_table: LeaseTable | None
    """Leases in memory shared with the lease keeper, if there is one."""
    kind: str
    """Purpose of the worker's process, as in `WorkerInfo.kind`."""
    started_at: int
    """UTC milliseconds at which the worker was created."""
