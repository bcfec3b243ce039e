"""What all parts of one running worker share."""

import asyncio
from dataclasses import dataclass
from random import Random

from djqueue.core.clock import Clock
from djqueue.storage.base import Storage

from .bell import Bell
from .leasetable import LeaseTable
from .runs import Runs
from .telling import Teller


@dataclass(frozen=True, slots=True, kw_only=True)
class Station:
    """Made on the loop that the worker runs on."""

    storage: Storage
    loop: asyncio.AbstractEventLoop
    clock: Clock
    random: Random
    runs: Runs
    bell: Bell
    tell: Teller
    leases: LeaseTable | None = None
    """What a lease keeper reads, where there is one."""
