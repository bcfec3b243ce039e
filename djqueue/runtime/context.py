"""The options of a worker, and the objects that its parts share: storage, runs, events, clock and loop."""

import asyncio
import os
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from random import Random
from secrets import token_hex
from typing import Any, Protocol

from djqueue.client.envelope import check_queue
from djqueue.conf import Settings
from djqueue.core.clock import Clock
from djqueue.core.errors import ConfigurationError
from djqueue.core.options import MAX_NAME, check_text
from djqueue.core.units import milliseconds
from djqueue.storage.base import Storage

from .events import RunEvents
from .handlers import Handler
from .leases import LeaseTable
from .runs import Run, Runs
from .wakeevent import WakeEvent

Seconds = float | timedelta


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Options of a worker. Times are in milliseconds."""

    worker_id: str
    queues: tuple[str, ...] | None
    """Names of the queues to serve; None serves all queues."""
    concurrency: int
    shutdown_timeout: int
    heartbeat: int
    until_empty: bool
    max_jobs: int | None
    maintain: bool
    connect: bool


def read_options(
    settings: Settings,
    *,
    queues: Iterable[str] | str | None,
    concurrency: int | None,
    worker_id: str | None,
    shutdown_timeout: Seconds | None,
    heartbeat: Seconds | None,
    until_empty: bool,
    max_jobs: int | None,
    maintain: bool,
    connect: bool,
) -> WorkerOptions:
    """Return a worker's options. Raises ConfigurationError, OptionError or UnknownQueueError."""
    return WorkerOptions(
        worker_id=new_worker_id() if worker_id is None else check_text("worker_id", worker_id),
        queues=_queues(queues, settings),
        concurrency=_count("concurrency", concurrency, settings.concurrency),
        shutdown_timeout=_time("shutdown_timeout", shutdown_timeout, settings.shutdown_timeout),
        heartbeat=max(1, _time("heartbeat", heartbeat, settings.heartbeat)),
        until_empty=until_empty,
        max_jobs=None if max_jobs is None else _count("max_jobs", max_jobs, 0),
        maintain=maintain,
        connect=connect,
    )


def new_worker_id() -> str:
    """Return host, process ID and a random part, so that a restarted worker has a new ID."""
    ending = f":{os.getpid()}:{token_hex(3)}"
    return socket.gethostname()[: MAX_NAME - len(ending)] + ending


def _queues(value: Iterable[str] | str | None, settings: Settings) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(dict.fromkeys([value] if isinstance(value, str) else value))
    if not names:
        raise ConfigurationError("queues must name at least one queue, or be None for all queues")
    for name in names:
        check_queue(check_text("queue", name), settings)
    return names


def _count(name: str, value: Any, default: int) -> int:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name} must be a positive whole number; got {value!r}")
    return value


def _time(name: str, value: Seconds | None, default: int) -> int:
    return default if value is None else milliseconds(name, value)


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

    def fail(self, error: Exception) -> None:
        """End the worker with an error, after which it cannot go on."""

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
