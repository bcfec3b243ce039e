"""The processes of `runworkers`: the supervisor and its children, or one worker that does everything.

The children are workers, the scheduler, the mirror with the relay, and backups.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from random import Random
from signal import Signals
from threading import Event
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, OutputWrapper
from django.utils import autoreload

from djqueue.backup.schedule import backing_up, is_scheduled, run_schedule, schedule_of
from djqueue.client import get_storage, registry
from djqueue.client.envelope import queue_of
from djqueue.conf import get_settings
from djqueue.core.errors import (
    ConfigurationError,
    DjqueueError,
    OptionError,
    SchedulerRunningError,
    UnknownQueueError,
)
from djqueue.core.logs import Log
from djqueue.operations.annotations import annotate_version
from djqueue.operations.healthchecks import watching_health
from djqueue.operations.mirror import is_mirrored, mirroring
from djqueue.operations.relay import relaying
from djqueue.operations.sweeps import declare_now
from djqueue.runtime import Worker
from djqueue.runtime.console import NO_HANDLERS, banner, findings, summary, visible_logs
from djqueue.runtime.context import new_worker_id
from djqueue.runtime.events import RunEvents
from djqueue.runtime.executors.connections import release_pooled
from djqueue.runtime.executors.sandbox import SandboxUnavailableError
from djqueue.runtime.exits import CONFIG, FAILED, FINISHED, MISUSED, RECYCLED, REFUSED, let_forks_end
from djqueue.runtime.leases import LeaseKeeper, can_keep
from djqueue.runtime.maintenance import Maintenance
from djqueue.runtime.runs import AttemptCount
from djqueue.runtime.serving import (
    CHILD_SIGNALS,
    SIGNALS,
    handling,
    interruptible,
    let_interrupts_come,
    serve,
)
from djqueue.runtime.supervisor import ProcessLimits, ProcessRole, Supervisor
from djqueue.runtime.watching import RENEWALS_PER_LEASE
from djqueue.storage.base import Storage

if TYPE_CHECKING:
    from djqueue.contrib.celery.worker import CeleryTasks

logger = Log("djqueue.worker")

Ready = Callable[[], None]
RunWorker = Callable[[int, str | None, Ready], int]
"""Runs the worker with a number and an id in this process; returns the exit code of the child."""

STOPPED_EARLY = "Stopped before the worker started."
MIRROR_NICENESS = 5
"""Added to the niceness of the mirror's process: it gets a third of the processor time of a worker."""


class WorkerRunner:
    """Runs workers as the options of `runworkers` say: under a supervisor, or one in this process.

    Args:
        options: Options of the command.
        stdout: Where the banner and the summary go.
        stderr: Where warnings go.
        warning: Returns the text of a warning with its style.
        own_process: Whether the process only runs the command.
    """

    def __init__(
        self,
        options: dict[str, Any],
        stdout: OutputWrapper,
        stderr: OutputWrapper,
        warning: Callable[[str], str],
        *,
        own_process: bool,
    ) -> None:
        self._options = options
        self._stdout = stdout
        self._stderr = stderr
        self._warning = warning
        self._own_process = own_process
        self._celery: CeleryTasks | None = None
        """Handler of the messages of `--celery`."""
        self._was_replaced = False
        """Whether another process has become the scheduler."""
        self._attempt_count: AttemptCount | None = None
        """Attempts of all processes of the worker, with `--max-jobs`."""

    def run_here(self) -> Worker:
        """Run a worker in this process, without a supervisor: it does everything."""
        with self._worker(self._options, SIGNALS) as worker:
            self._connect(worker, starts_scheduler=not self._options["join"])
            storage = worker.storage
            with mirroring(storage), relaying(storage), backing_up(storage), self._running_celery():
                self._serve(worker)
        self._summarize(worker)
        if self._was_replaced:
            raise CommandError("another process has taken over as the scheduler, so this one stopped")
        return worker

    def supervise(self) -> None:
        """Run the supervisor and its children; start again after SIGHUP."""
        options = self._options
        number = options["processes"] or 1
        if options["max_jobs"] is not None:
            self._attempt_count = AttemptCount()
        with visible_logs(options["verbosity"]), interruptible():
            try:
                let_interrupts_come()
                # Checks the options, and imports all handlers, which the children then share.
                worker = self._make_worker(options)
                if options["verbosity"]:
                    self._stdout.write(banner(worker, number))
                    self._stdout.flush()
                if not worker.handlers:
                    self._stderr.write(self._warning(NO_HANDLERS))
                joins = options["join"]
                _check_reachable(worker.storage)
                children = roles(worker.storage, number, options["worker_id"], self._run_child, joins=joins)
                self._close(worker.storage)
            except KeyboardInterrupt:
                self._stdout.write(STOPPED_EARLY)
                return
            patience = get_settings().stuck_timeout
            limits = ProcessLimits(
                worker.options.shutdown_timeout / 1_000,
                options["max_memory_per_process"],
                patience / 1_000 if patience else None,
            )
            code = Supervisor(children, limits, options["health_file"]).run()
        if code is None:
            command = autoreload.get_child_arguments()
            os.execv(command[0], command)  # noqa: S606 - the same command again
        if code:
            raise CommandError("a process could not run, so the supervisor stopped", returncode=code)

    def _run_child(self, number: int, worker_id: str | None, ready: Ready) -> int:
        """Run a worker as a child of the supervisor, whose other children do the rest of the work."""
        limit, is_first = self._options["max_jobs_per_process"], number == 1
        changed = {"worker_id": worker_id, "max_jobs": limit or self._options["max_jobs"]}
        with self._worker({**self._options, **changed}, CHILD_SIGNALS) as worker:
            worker.on_started = ready
            worker.is_replaceable = True
            worker.attempt_count = self._attempt_count
            self._connect(worker, starts_scheduler=False)
            if is_first and self._options["verbosity"]:
                self._write_findings(worker)
            # The lease keeper, which ignores the signals instead, has already been forked.
            let_forks_end()
            # One process of each supervisor looks at what all of them share.
            with watching_health() if is_first else nullcontext(), self._running_celery(warns=is_first):
                serve(worker, CHILD_SIGNALS)
        self._summarize(worker, f"Worker {worker.id}: ")
        counters = worker.counters
        is_used_up = limit is not None and counters.claimed - counters.released >= limit
        return RECYCLED if is_used_up or worker.was_recycled else FINISHED

    @contextmanager
    def _worker(self, options: dict[str, Any], signals: tuple[Signals, ...]) -> Iterator[Worker]:
        """Make a worker, whose leases are kept meanwhile; close its storage at the end.

        Args:
            options: Options of the command, or of a child of the supervisor.
            signals: Signals that end the block, before the worker handles them.
        """
        with visible_logs(options["verbosity"]), interruptible(signals):
            worker = self._make_worker(options)
            keeper = self._start_keeper(worker)
            try:
                yield worker
            except DjqueueError as error:
                raise CommandError(str(error)) from error
            except KeyboardInterrupt:
                self._stdout.write(STOPPED_EARLY)
            finally:
                if keeper is not None:
                    keeper.close()
                self._close(worker.storage)

    def _make_worker(self, options: dict[str, Any]) -> Worker:
        try:
            storage, queues = get_storage(), options["queues"]
            handlers: dict[str, Any] | None = None
            if options["celery"] is not None:
                self._celery = _celery_tasks(options["celery"], storage)
                handlers = {**registry.all(), self._celery.name: self._celery}
                registry.served.update(registry.names())
                queues = queues or [*self._celery.queues(), *_job_queues()]
            return Worker(
                storage,
                queues,
                handlers,
                concurrency=options["concurrency"],
                worker_id=options["worker_id"],
                shutdown_timeout=options["shutdown_timeout"],
                until_empty=options["until_empty"],
                max_jobs=options["max_jobs"],
                connect=False,
            )
        except (OptionError, UnknownQueueError) as error:
            raise CommandError(str(error), returncode=MISUSED) from error
        except SandboxUnavailableError as error:
            raise CommandError(str(error), returncode=CONFIG) from error
        except (ConfigurationError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error

    @contextmanager
    def _running_celery(self, *, warns: bool = True) -> Iterator[None]:
        """Prepare the Celery app in this process, if one was given."""
        if self._celery is None:
            yield
            return
        self._celery.start()
        if warns:
            self._celery.warn_of_rates()
        try:
            yield
        finally:
            self._celery.stop()

    def _start_keeper(self, worker: Worker) -> LeaseKeeper | None:
        """Fork the process that renews the worker's leases while a handler blocks this one."""
        patience = get_settings().stuck_timeout
        if not (patience and self._own_process and not worker.storage.capabilities.in_process and can_keep()):
            return None
        try:
            keeper = LeaseKeeper(worker.storage, worker.options.heartbeat * RENEWALS_PER_LEASE, patience)
        except OSError as error:
            logger.warning(
                "No lease keeper could be started (%s). Only this process renews its leases: the job of a "
                "handler that holds the GIL for longer than a lease will run again.",
                error,
            )
            return None
        worker.lease_table = keeper.table
        return keeper

    def _connect(self, worker: Worker, *, starts_scheduler: bool) -> None:
        def on_lost() -> None:
            self._was_replaced = True
            worker.stop()

        storage = worker.storage
        scheduler = storage.capabilities.scheduler
        if scheduler is not None:
            scheduler.starts_here = starts_scheduler
            scheduler.on_lost = on_lost
        storage.connect()
        declare_now(storage)
        annotate_version(storage)
        release_pooled()  # This thread only waits from now on.

    def _serve(self, worker: Worker) -> None:
        if self._options["verbosity"]:
            self._stdout.write(banner(worker))
            self._stdout.flush()
            self._write_findings(worker)
        if not worker.handlers:
            self._stderr.write(self._warning(NO_HANDLERS))
        serve(worker)

    def _summarize(self, worker: Worker, prefix: str = "") -> None:
        if self._options["verbosity"]:
            self._stdout.write(f"{prefix}{summary(worker)}")

    def _write_findings(self, worker: Worker) -> None:
        for finding in findings(worker, own_process=self._own_process):
            self._stderr.write(self._warning(finding))

    def _close(self, storage: Storage) -> None:
        try:
            storage.close()
        except DjqueueError as error:
            raise CommandError(str(error)) from error


def _check_reachable(storage: Storage) -> None:
    """Raise CommandError if the storage cannot be used: its server is away, or its tables are missing.

    Children would only find out one after the other, and again and again. A scheduler is one of them.
    """
    if storage.capabilities.scheduler is None:
        try:
            storage.queues.names()
        except DjqueueError as error:
            raise CommandError(str(error)) from error


def _celery_tasks(path: str, storage: Storage) -> "CeleryTasks":
    """Return the handler of a Celery app's messages. Raises CommandError."""
    try:
        from djqueue.contrib.celery import worker
    except ImportError as error:
        raise CommandError(
            f'--celery requires Celery ({error}): pip install "djqueue[celery]"', returncode=MISUSED
        ) from error
    try:
        return worker.load(path, storage)
    except ConfigurationError as error:
        raise CommandError(str(error), returncode=MISUSED) from error


def _job_queues() -> list[str]:
    """Return the queues of all @job functions."""
    settings = get_settings()
    return sorted({queue_of(job_type.declared_queue, settings) for job_type in registry.all().values()})


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
    children = []
    has_scheduler = storage.capabilities.scheduler is not None
    if has_scheduler and not joins:
        children.append(ProcessRole("scheduler", partial(_run_role, run_scheduler), 0))
    if is_mirrored(storage) or (storage.capabilities.has_outbox and not has_scheduler):
        children.append(ProcessRole("mirror", partial(_run_role, run_mirror), 0))
    if is_scheduled(storage, get_settings().backup):
        # It stops with the workers, not after them: a backup can be taken later.
        children.append(ProcessRole("backup", partial(_run_role, run_backups), 1))
    for number in range(1, processes + 1):
        name = f"worker {number}"
        one = worker_id if worker_id is None or processes == 1 else f"{worker_id}-{number}"
        children.append(
            ProcessRole(name, partial(_run_role, partial(run_worker, number, one)), 1, is_worker=True)
        )
    return children


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


def _run_role(run: Callable[[Ready], int], ready: Ready) -> int:
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
