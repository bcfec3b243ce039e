"""The child processes of `runworkers --processes`: workers, the scheduler, the mirror and the relay."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from threading import Event
from types import FrameType

from django.core.management.base import CommandError

from djqueue.client import get_storage
from djqueue.core.errors import DjqueueError, SchedulerRunningError
from djqueue.operations.annotations import annotate_version
from djqueue.operations.mirroring import is_mirrored, mirroring
from djqueue.operations.relay import relaying
from djqueue.operations.scheduling import declare_now
from djqueue.runtime.configuration import new_worker_id
from djqueue.runtime.events import RunEvents
from djqueue.runtime.exits import FAILED, FINISHED, MISUSED, RECYCLED, REFUSED
from djqueue.runtime.maintenance import Maintenance
from djqueue.runtime.serving import interruptible
from djqueue.runtime.supervisor import ProcessRole
from djqueue.storage.base import Storage

Ready = Callable[[], None]
RunWorker = Callable[[str | None, Ready], int]
"""Runs a worker with an id in this process; returns the exit code of the child."""


def roles(
    storage: Storage, processes: int, standby: str, worker_id: str | None, run_worker: RunWorker
) -> list[ProcessRole]:
    """Return the children for a storage, which must not be connected.

    Args:
        storage: The configured storage.
        processes: Number of workers.
        standby: The option `--standby`: `work` starts no scheduler.
        worker_id: Prefix of the workers' ids; None generates them.
        run_worker: Runs a worker.
    """
    found = []
    if storage.capabilities.scheduler is not None and standby != "work":
        found.append(ProcessRole("scheduler", partial(_reported, partial(run_scheduler, standby)), 0))
    if is_mirrored(storage) or storage.capabilities.has_outbox:
        found.append(ProcessRole("mirror", partial(_reported, run_mirror), 0))
    for number in range(1, processes + 1):
        name = f"worker {number}"
        one = worker_id if worker_id is None or processes == 1 else f"{worker_id}-{number}"
        found.append(ProcessRole(name, partial(_reported, partial(run_worker, one)), 1, is_worker=True))
    return found


def run_scheduler(standby: str, ready: Ready) -> int:
    """Be the scheduler of the database, which runs no jobs, until a signal arrives or another takes over."""
    storage, stop, was_replaced = get_storage(), Event(), False

    def on_lost() -> None:
        nonlocal was_replaced
        was_replaced = True
        stop.set()

    role = storage.capabilities.scheduler
    assert role is not None
    role.standby = standby
    role.on_lost = on_lost
    with interruptible():
        try:
            storage.connect()
            declare_now(storage)
            annotate_version(storage)
            maintenance = Maintenance(storage, RunEvents(new_worker_id(), role.clock), Random())
            maintenance.start()
            ready()
            with _set_by_sigterm(stop):
                stop.wait()
            maintenance.stop()
        finally:
            storage.close()
    return RECYCLED if was_replaced else FINISHED


def run_mirror(ready: Ready) -> int:
    """Copy the jobs of Redis to the tables, and the outbox to Redis, until a signal arrives."""
    storage, stop = get_storage(), Event()
    try:
        with _set_by_sigterm(stop), mirroring(storage), relaying(storage):
            ready()
            stop.wait()
    finally:
        storage.close()
    return FINISHED


@contextmanager
def _set_by_sigterm(stop: Event) -> Iterator[None]:
    def on_signal(_: int, __: FrameType | None) -> None:
        stop.set()

    before = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _reported(run: Callable[[Ready], int], ready: Ready) -> int:
    """Run a role; write its errors as the command does, and return the exit code."""
    try:
        return run(ready)
    except SchedulerRunningError as error:
        sys.stderr.write(f"CommandError: {error}\n")
        return REFUSED
    except CommandError as error:
        sys.stderr.write(f"CommandError: {error}\n")
        return MISUSED if error.returncode == MISUSED else FAILED
    except DjqueueError as error:
        sys.stderr.write(f"CommandError: {error}\n")
        return FAILED


def process_count(text: str) -> int:
    """Return the number of processes for `--processes`: a number, or `auto` for the usable cores.

    Raises ValueError.
    """
    if text == "auto":
        if hasattr(os, "sched_getaffinity"):
            return len(os.sched_getaffinity(0))
        return os.cpu_count() or 1
    if not text.isdecimal() or int(text) < 1:
        raise ValueError
    return int(text)
