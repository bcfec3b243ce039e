"""What all parts of one running worker share."""

import asyncio
from dataclasses import dataclass
from random import Random

from djqueue.core.clock import Clock
from djqueue.storage.base import Storage

from .events import RunEvents
from .leasetable import LeaseTable
from .runs import Runs
from .wakeevent import WakeEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """Made on the loop that the worker runs on."""

    storage: Storage
    loop: asyncio.AbstractEventLoop
    clock: Clock
    random: Random
    runs: Runs
    wake_event: WakeEvent
    tell: RunEvents
    leases: LeaseTable | None = None
    """What a lease keeper reads, where there is one."""
