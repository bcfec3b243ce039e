"""The command `manage.py runworkers`."""

import logging
import os
import signal
from argparse import ArgumentParser, BooleanOptionalAction, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, DjangoHelpFormatter
from django.utils import autoreload

from djqueue.backup.schedule import backing_up
from djqueue.client import get_storage, registry
from djqueue.client.envelope import queue_of
from djqueue.conf import get_settings
from djqueue.core.errors import ConfigurationError, DjqueueError, OptionError, UnknownQueueError
from djqueue.management.flags import (
    check_combination,
    count,
    flag_hint,
    memory,
    processes,
    queue_names,
    seconds,
    supervisor_flags,
)
from djqueue.management.processes import roles
from djqueue.operations.annotations import annotate_version
from djqueue.operations.mirroring import mirroring
from djqueue.operations.relay import relaying
from djqueue.operations.scheduling import declare_now
from djqueue.runtime import Worker
from djqueue.runtime.console import NO_HANDLERS, banner, findings, summary, visible_logs
from djqueue.runtime.executors.sandbox import SandboxUnavailableError
from djqueue.runtime.exits import CONFIG, FINISHED, MISUSED, RECYCLED, leave, let_forks_end
from djqueue.runtime.leases import LeaseKeeper, can_keep
from djqueue.runtime.runs import AttemptCount
from djqueue.runtime.serving import CHILD_SIGNALS, interruptible, serve
from djqueue.runtime.supervisor import ProcessLimits, Supervisor
from djqueue.runtime.supervisor.reloading import ReloadingParent, child_command
from djqueue.runtime.watching import RENEWALS_PER_LEASE
from djqueue.storage.base import Storage

if TYPE_CHECKING:
    from djqueue.contrib.celery.native import CeleryTasks

HELP = """Run the jobs of all @job functions in the jobs.py modules of the installed apps.

This process becomes a supervisor. It starts one worker process, or --processes of them, and restarts those
that crash. Each worker process runs up to --concurrency jobs at once: async functions on its event loop,
others on threads. Further processes run no jobs: one is the mirror of Redis, and one takes backups. Any
number of runworkers share a database or a Redis. --single-process does everything in this process, as do
storages of one process, and --reload.

Jobs with executor="isolated" or "subprocess" (on @job, their queue or in DJQUEUE) run in more processes,
which the worker processes start as needed, one for each such job that runs.

Press Ctrl-C or send SIGTERM to stop: the worker starts no more jobs, and running jobs have
--shutdown-timeout to finish. Jobs that are still running then are asked to stop, and return to their
queue without using up an attempt. A second Ctrl-C or SIGTERM stops without waiting, a third one kills
all processes.

--verbosity 0 shows errors only, 1 also failures and occasional summaries, 2 also the start and end of
every job.

Exit codes: 0 success, 1 a process could not start or continue, 2 invalid usage, 78 the system lacks what
the settings require. Failed jobs do not change the exit code: they are in the dead letters.
"""


STOPPED_EARLY = "Stopped before the worker started."


class RunworkersHelpFormatter(RawDescriptionHelpFormatter, DjangoHelpFormatter):
    """Django's help formatter, but with the paragraphs of the description."""


class Command(BaseCommand):
    """Runs workers, and what else the storage needs, under a supervisor or in this process."""

    help = HELP

    own_process = False
    """Whether the process only runs this command."""
    celery: "CeleryTasks | None" = None
    """Handler of the messages of `--celery`."""
    was_replaced = False
    """Whether another process has become the scheduler."""
    attempt_count: AttemptCount | None = None
    """Attempts of all processes of the worker, with `--max-jobs`."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        """Create a parser that keeps paragraphs and suggests flags."""
        kwargs.setdefault("formatter_class", RunworkersHelpFormatter)
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        error = parser.error
        parser.error = lambda message: error(message + flag_hint(message))  # type: ignore[method-assign]
        return parser

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the flags."""
        parser.add_argument(
            "--queues",
            type=queue_names,
            metavar="NAME,NAME",
            help="Queues to serve (default: all).",
        )
        parser.add_argument(
            "--concurrency",
            type=count,
            metavar="N",
            help="Number of jobs that run at once in each worker process (default: DJQUEUE['CONCURRENCY'], "
            "10).",
        )
        parser.add_argument(
            "--until-empty",
            action="store_true",
            help="Exit when no job that this worker could run is waiting or due within a minute, no job is "
            "active anywhere, and no job that failed here is due for a retry. Paused queues and blocked "
            "jobs are ignored.",
        )
        parser.add_argument(
            "--max-jobs",
            type=count,
            metavar="N",
            help="Exit after N attempts, successful or not, including those of processes that crashed. Not "
            "available with several processes.",
        )
        parser.add_argument(
            "--processes",
            type=processes,
            metavar="N",
            help="Number of worker processes (default: 1; auto: one per core). Each uses about one core for "
            "Python code: increase it for jobs that compute, and --concurrency for jobs that wait.",
        )
        parser.add_argument(
            "--single-process",
            action="store_true",
            help="Run worker and mirror in this process, without a supervisor: for debuggers, and to save "
            "memory. Nothing is restarted after a crash, and a handler that holds the GIL delays the mirror. "
            "Isolated and subprocess jobs still have processes of their own.",
        )
        parser.add_argument(
            "--max-jobs-per-process",
            type=count,
            metavar="N",
            help="Replace a worker process after N attempts.",
        )
        parser.add_argument(
            "--max-memory-per-process",
            type=memory,
            metavar="SIZE",
            help="Replace a worker process that uses more memory, such as 512MB, after its running jobs have "
            "finished.",
        )
        parser.add_argument(
            "--health-file",
            type=Path,
            metavar="PATH",
            help="Write the state of all processes to this file every 5 seconds, for health probes.",
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=seconds,
            metavar="SECONDS",
            help="Time for running jobs to finish (default: DJQUEUE['SHUTDOWN_TIMEOUT'], 25).",
        )
        parser.add_argument(
            "--worker-id",
            metavar="ID",
            help="Name of this worker (default: host, process ID and a random part).",
        )
        parser.add_argument(
            "--join",
            action="store_true",
            help="Start workers for the scheduler that another runworkers of this machine runs. No effect "
            "with storages without a scheduler process.",
        )
        parser.add_argument(
            "--celery",
            metavar="APP",
            help="Also run the tasks of this Celery app, such as proj.celery:app, whose broker is "
            "djqueue://. Without --queues, the worker then serves the queues of the app and of the @job "
            "functions only.",
        )
        parser.add_argument(
            "--reload",
            action=BooleanOptionalAction,
            default=False,
            help="Restart when code changes, after running jobs have finished. For development.",
        )

    def run_from_argv(self, argv: list[str]) -> None:
        """Run the command as its process's only purpose."""
        self.own_process = True
        super().run_from_argv(argv)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the supervisor, or the worker in this process, or the process that reloads either."""
        check_combination(options)
        if options["reload"]:
            self._reload(options)
        elif self._is_single(options):
            worker = self._run(options)
            if worker.abandoned and self.own_process:
                leave(0)
        else:
            self._supervise(options)

    def _is_single(self, options: dict[str, Any]) -> bool:
        """Return whether to run without a supervisor.

        Raises CommandError if an option requires a supervisor that cannot run here.
        """
        if options["single_process"]:
            return True
        if not self.own_process:
            reason = "a process of its own: start manage.py runworkers instead of calling the command"
        elif os.name != "posix":
            reason = "a POSIX system"
        elif (storage := self._storage()).capabilities.in_process:
            reason = f"a storage that processes can share; this one is {storage.describe()}"
        else:
            return False
        for flag in supervisor_flags(options):
            raise CommandError(f"{flag} requires {reason}", returncode=MISUSED)
        return True

    def _run(
        self, options: dict[str, Any], on_started: Callable[[], None] | None = None, *, reports: bool = True
    ) -> Worker:
        """Run a worker in this process.

        Args:
            options: Options of the command.
            on_started: Called when the worker claims jobs. If given, this is a child of the supervisor,
                whose other children do the rest of the work.
            reports: Whether to write the problems found.
        """
        verbosity, is_child = options["verbosity"], on_started is not None
        with visible_logs(verbosity), interruptible(CHILD_SIGNALS if is_child else (signal.SIGTERM,)):
            worker = self._worker(options)
            worker.on_started = on_started
            worker.is_replaceable = is_child
            worker.attempt_count = self.attempt_count
            keeper = self._keeper(worker)
            try:
                self._connect(worker, starts_scheduler=not is_child and not options["join"])
                declare_now(worker.storage)
                annotate_version(worker.storage)
                if is_child:
                    if verbosity and reports:
                        self._report(worker)
                    # The lease keeper, which ignores the signals instead, has already been forked.
                    let_forks_end()
                    with self._running_celery():
                        serve(worker, CHILD_SIGNALS)
                else:
                    storage = worker.storage
                    with mirroring(storage), relaying(storage), backing_up(storage), self._running_celery():
                        self._serve(worker, verbosity)
            except DjqueueError as error:
                raise CommandError(str(error)) from error
            except KeyboardInterrupt:
                self.stdout.write(STOPPED_EARLY)
            finally:
                if keeper is not None:
                    keeper.close()
                self._close(worker.storage)
        if verbosity:
            self.stdout.write(f"Worker {worker.id}: {summary(worker)}" if is_child else summary(worker))
        if self.was_replaced:
            raise CommandError("another process has taken over as the scheduler, so this one stopped")
        return worker

    def _supervise(self, options: dict[str, Any]) -> None:
        """Run the supervisor and its children; start again after SIGHUP."""
        number = options["processes"] or 1
        if options["max_jobs"] is not None:
            self.attempt_count = AttemptCount()
        with visible_logs(options["verbosity"]), interruptible():
            try:
                # Checks the options, and imports all handlers, which the children then share.
                worker = self._worker(options)
                if options["verbosity"]:
                    self.stdout.write(banner(worker, number))
                    self.stdout.flush()
                if not worker.handlers:
                    self.stderr.write(self.style.WARNING(NO_HANDLERS))
                run_child = partial(self._run_child, options)
                joins = options["join"]
                children = roles(worker.storage, number, options["worker_id"], run_child, joins=joins)
                self._close(worker.storage)
            except KeyboardInterrupt:
                self.stdout.write(STOPPED_EARLY)
                return
            limits = ProcessLimits(worker.options.shutdown_timeout / 1_000, options["max_memory_per_process"])
            code = Supervisor(children, limits, options["health_file"]).run()
        if code is None:
            command = autoreload.get_child_arguments()
            os.execv(command[0], command)  # noqa: S606 - the same command again
        if code:
            raise CommandError("a process could not run, so the supervisor stopped", returncode=code)

    def _run_child(
        self, options: dict[str, Any], number: int, worker_id: str | None, ready: Callable[[], None]
    ) -> int:
        limit = options["max_jobs_per_process"]
        given = {**options, "worker_id": worker_id, "max_jobs": limit or options["max_jobs"]}
        worker = self._run(given, ready, reports=number == 1)
        counters = worker.counters
        is_used_up = limit is not None and counters.claimed - counters.released >= limit
        return RECYCLED if is_used_up or worker.was_recycled else FINISHED

    def _storage(self) -> Storage:
        try:
            return get_storage()
        except (ConfigurationError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error

    def _worker(self, options: dict[str, Any]) -> Worker:
        try:
            storage, queues = get_storage(), options["queues"]
            handlers: dict[str, Any] | None = None
            if options["celery"] is not None:
                self.celery = celery_tasks(options["celery"], storage)
                handlers = {**registry.all(), self.celery.name: self.celery}
                registry.served.update(registry.names())
                queues = queues or [*self.celery.queues(), *job_queues()]
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
    def _running_celery(self) -> Iterator[None]:
        """Prepare the Celery app in this process, if one was given."""
        if self.celery is None:
            yield
            return
        self.celery.start()
        try:
            yield
        finally:
            self.celery.stop()

    def _keeper(self, worker: Worker) -> LeaseKeeper | None:
        """Fork the process that renews the worker's leases while a handler blocks this one."""
        patience = get_settings().stuck_timeout
        if not (patience and self.own_process and not worker.storage.capabilities.in_process and can_keep()):
            return None
        try:
            keeper = LeaseKeeper(worker.storage, worker.options.heartbeat * RENEWALS_PER_LEASE, patience)
        except OSError as error:
            logging.getLogger("djqueue.worker").warning(
                "No lease keeper could be started (%s). Only this process renews its leases: the job of a "
                "handler that holds the GIL for longer than a lease will run again.",
                error,
            )
            return None
        worker.lease_table = keeper.table
        return keeper

    def _connect(self, worker: Worker, *, starts_scheduler: bool) -> None:
        def on_lost() -> None:
            self.was_replaced = True
            worker.stop()

        storage = worker.storage
        scheduler = storage.capabilities.scheduler
        if scheduler is not None:
            scheduler.starts_here = starts_scheduler
            scheduler.on_lost = on_lost
        storage.connect()

    def _serve(self, worker: Worker, verbosity: int) -> None:
        if verbosity:
            self.stdout.write(banner(worker))
            self.stdout.flush()
            self._report(worker)
        if not worker.handlers:
            self.stderr.write(self.style.WARNING(NO_HANDLERS))
        serve(worker)

    def _report(self, worker: Worker) -> None:
        for finding in findings(worker):
            self.stderr.write(self.style.WARNING(finding))

    def _close(self, storage: Storage) -> None:
        try:
            storage.close()
        except DjqueueError as error:
            raise CommandError(str(error)) from error

    def _reload(self, options: dict[str, Any]) -> None:
        if os.name != "posix":
            raise CommandError("--reload requires a POSIX system")
        given = options["shutdown_timeout"]
        patience = DEFAULT_PATIENCE if given is None else given + GRACE
        command = child_command()
        if not any(supervisor_flags(options)):
            command.append("--single-process")
        code = ReloadingParent(command, patience, self.stdout.write).run()
        if code:
            raise CommandError(f"the worker exited with code {code}", returncode=max(code, 1))


def celery_tasks(path: str, storage: Storage) -> "CeleryTasks":
    """Return the handler of a Celery app's messages. Raises CommandError."""
    try:
        from djqueue.contrib.celery import native
    except ImportError as error:
        raise CommandError(
            f'--celery requires Celery ({error}): pip install "djqueue[celery]"', returncode=MISUSED
        ) from error
    try:
        return native.load(path, storage)
    except ConfigurationError as error:
        raise CommandError(str(error), returncode=MISUSED) from error


def job_queues() -> list[str]:
    """Return the queues of all @job functions."""
    settings = get_settings()
    return sorted({queue_of(found.declared_queue, settings) for found in registry.all().values()})


DEFAULT_PATIENCE = 60.0
"""Seconds that a child has to finish its jobs if its own settings define the shutdown timeout."""
GRACE = 10.0
"""Seconds that a child has in addition to its shutdown timeout."""
