"""The child processes of `runworkers`: workers, the scheduler, the mirror, the relay, and backups."""

import os
import sys
from collections.abc import Callable
from functools import partial
from random import Random
from threading import Event

from django.core.management.base import CommandError

from djqueue.backup.schedule import is_scheduled, run_schedule, schedule_of
from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.errors import ConfigurationError, DjqueueError, SchedulerRunningError
from djqueue.operations.annotations import annotate_version
from djqueue.operations.mirror import is_mirrored, mirroring
from djqueue.operations.relay import relaying
from djqueue.operations.sweeps import declare_now
from djqueue.runtime.configuration import new_worker_id
from djqueue.runtime.events import RunEvents
from djqueue.runtime.exits import CONFIG, FAILED, FINISHED, MISUSED, RECYCLED, REFUSED
from djqueue.runtime.maintenance import Maintenance
from djqueue.runtime.serving import CHILD_SIGNALS, handling
from djqueue.runtime.supervisor import ProcessRole
from djqueue.storage.base import Storage

Ready = Callable[[], None]
RunWorker = Callable[[int, str | None, Ready], int]
"""Runs the worker with a number and an id in this process; returns the exit code of the child."""

MIRROR_NICENESS = 5
"""Added to the niceness of the mirror's process: it gets a third of the processor time of a worker."""


def roles(
    storage: Storage, processes: int, worker_id: str | None, run_worker: RunWorker, *, joins: bool = False
) -> list[ProcessRole]:
    """Return the children for a storage, which must not be connected.

    Args:
        storage: The configured storage.
        processes: Number of workers.
        worker_id: Prefix of the workers' ids; None generates them.
        run_worker: Runs a worker.
        joins: Whether the scheduler, if the storage needs one, runs elsewhere.
    """
    found = []
    has_scheduler = storage.capabilities.scheduler is not None
    if has_scheduler and not joins:
        found.append(ProcessRole("scheduler", partial(_reported, run_scheduler), 0))
    if is_mirrored(storage) or (storage.capabilities.has_outbox and not has_scheduler):
        found.append(ProcessRole("mirror", partial(_reported, run_mirror), 0))
    if is_scheduled(storage, get_settings().backup):
        # It stops with the workers, not after them: a backup can be taken later.
        found.append(ProcessRole("backup", partial(_reported, run_backups), 1))
    for number in range(1, processes + 1):
        name = f"worker {number}"
        one = worker_id if worker_id is None or processes == 1 else f"{worker_id}-{number}"
        found.append(
            ProcessRole(name, partial(_reported, partial(run_worker, number, one)), 1, is_worker=True)
        )
    return found


def run_scheduler(ready: Ready) -> int:
    """Be the scheduler, which runs no jobs, until a signal arrives or another process takes its place."""
    storage, stop, was_replaced = get_storage(), Event(), False

    def on_lost() -> None:
        nonlocal was_replaced
        was_replaced = True
        stop.set()

    role = storage.capabilities.scheduler
    assert role is not None
    role.starts_here = True
    role.on_lost = on_lost
    try:
        storage.connect()
        declare_now(storage)
        annotate_version(storage)
        maintenance = Maintenance(storage, RunEvents(new_worker_id(), role.clock), Random())
        with handling(CHILD_SIGNALS, lambda *_: stop.set()), relaying(storage):
            maintenance.start()
            ready()
            stop.wait()
            maintenance.stop()
    finally:
        # A signal to hurry must not keep the last changes from being written.
        with handling(CHILD_SIGNALS, lambda *_: stop.set()):
            storage.close()
    return RECYCLED if was_replaced else FINISHED


def run_mirror(ready: Ready) -> int:
    """Copy the jobs of Redis to the tables, and the outbox to Redis, until a signal arrives."""
    storage, stop = get_storage(), Event()
    if not storage.capabilities.has_outbox:
        # Where processors are short, jobs come first: copies may be late, deliveries from the outbox not.
        os.nice(MIRROR_NICENESS)
    try:
        with handling(CHILD_SIGNALS, lambda *_: stop.set()), mirroring(storage), relaying(storage):
            ready()
            stop.wait()
    finally:
        storage.close()
    return FINISHED


def run_backups(ready: Ready) -> int:
    """Take backups until a signal arrives."""
    storage, stop = get_storage(), Event()
    schedule = schedule_of(storage)
    assert schedule is not None
    with handling(CHILD_SIGNALS, lambda *_: stop.set()):
        # The storage is not closed: a backup that does not end in time still uses it.
        return FINISHED if run_schedule(schedule, stop, ready) else RECYCLED


def _reported(run: Callable[[Ready], int], ready: Ready) -> int:
    """Run a role; write its errors as the command does, and return the exit code."""
    try:
        return run(ready)
    except (CommandError, DjqueueError) as error:
        sys.stderr.write(f"CommandError: {error}\n")
        return _exit_code(error)


def _exit_code(error: Exception) -> int:
    if isinstance(error, CommandError) and error.returncode in (MISUSED, CONFIG):
        return int(error.returncode)
    cause = error.__cause__ if isinstance(error, CommandError) else error
    return REFUSED if isinstance(cause, (ConfigurationError, SchedulerRunningError)) else FAILED
