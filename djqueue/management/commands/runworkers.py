"""`manage.py runworkers`."""

import logging
import math
import os
from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    BooleanOptionalAction,
    RawDescriptionHelpFormatter,
)
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError, DjangoHelpFormatter

from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.errors import ConfigurationError, DjqueueError, OptionError, UnknownQueueError
from djqueue.operations.marks import mark_version
from djqueue.operations.mirroring import mirroring
from djqueue.operations.relay import relaying
from djqueue.operations.scheduling import declare_now
from djqueue.runtime import Worker
from djqueue.runtime.banner import NO_HANDLERS, banner, farewell, findings
from djqueue.runtime.heartbeat import SHARE
from djqueue.runtime.leasekeeper import LeaseKeeper, can_keep
from djqueue.runtime.logs import visible_logs
from djqueue.runtime.reloading import ReloadingParent, child_command
from djqueue.runtime.serving import interruptible, leave, serve
from djqueue.storage.base import Storage

HELP = """Run jobs: those of every function under @job in the installed apps' jobs.py modules.

Ctrl-C or SIGTERM stops it: no further job is started, and running ones have --shutdown-timeout to
end. What has not ended by then is asked to stop and given back to its queue, without having used up
an attempt. A second Ctrl-C or SIGTERM does not wait, a third one kills.

--verbosity 0 shows errors only, 1 what fails and a line now and then on what is done, 2 the start
and the end of every job.

Exit codes: 0 it did what it was to do, 1 it could not start or not go on, 2 wrong usage. Failed jobs
do not change the exit code: they are in the dead letters.
"""


class RunworkersHelpFormatter(RawDescriptionHelpFormatter, DjangoHelpFormatter):
    """Django's, keeping the description's paragraphs."""


class Command(BaseCommand):
    """Workers in this process; with the database storage it is the scheduler, too."""

    help = HELP

    own_process = False
    """Whether this command is what its process is for."""
    was_replaced = False
    """Whether another process has become the database's scheduler."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        """See `BaseCommand.create_parser`."""
        kwargs.setdefault("formatter_class", RunworkersHelpFormatter)
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        error = parser.error
        parser.error = lambda message: error(message + flag_hint(message))  # type: ignore[method-assign]
        return parser

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `BaseCommand.add_arguments`."""
        parser.add_argument(
            "--queues",
            type=queue_names,
            metavar="NAME,NAME",
            help="Queues to serve; all of them unless given.",
        )
        parser.add_argument(
            "--concurrency",
            type=count,
            metavar="N",
            help="Jobs that run at once; DJQUEUE['CONCURRENCY'] (10) unless given.",
        )
        parser.add_argument(
            "--until-empty",
            action="store_true",
            help="End when no job that could run here waits, none is running anywhere, none is due "
            "within a minute, and none that failed here is to come back. Paused queues and jobs that "
            "wait for others do not hold it up.",
        )
        parser.add_argument(
            "--max-jobs",
            type=count,
            metavar="N",
            help="End after N runs, successful or not.",
        )
        parser.add_argument(
            "--shutdown-timeout",
            type=seconds,
            metavar="SECONDS",
            help="Time for running jobs to end; DJQUEUE['SHUTDOWN_TIMEOUT'] (25) unless given.",
        )
        parser.add_argument(
            "--worker-id",
            metavar="ID",
            help="Name of this worker; host, process and a random part unless given.",
        )
        parser.add_argument(
            "--standby",
            choices=["wait", "never", "work"],
            default="wait",
            help="When another process is the scheduler of the database: wait for its end (default); "
            "never: exit with code 1; work: run jobs that it hands out, without ever taking its place. "
            "Other storages have no scheduler.",
        )
        parser.add_argument(
            "--reload",
            action=BooleanOptionalAction,
            default=False,
            help="Restart when code changes, for development. Running jobs may end first.",
        )

    def run_from_argv(self, argv: list[str]) -> None:
        """See `BaseCommand.run_from_argv`."""
        self.own_process = True
        super().run_from_argv(argv)

    def handle(self, *args: Any, **options: Any) -> None:
        """See `BaseCommand.handle`."""
        if options["reload"]:
            self._reload(options)
            return
        verbosity = options["verbosity"]
        with visible_logs(verbosity), interruptible():
            worker = self._worker(options)
            keeper = self._keeper(worker)
            try:
                self._connect(worker, options["standby"])
                scheduler = worker.storage.capabilities.scheduler
                if keeper is not None and scheduler is not None and (claim := scheduler.claim()) is not None:
                    keeper.table.set_scheduler_claim(*claim)
                declare_now(worker.storage)
                mark_version(worker.storage)
                with mirroring(worker.storage), relaying(worker.storage):
                    self._serve(worker, verbosity)
            except DjqueueError as error:
                raise CommandError(str(error)) from error
            except KeyboardInterrupt:
                self.stdout.write("Stopped before it had begun.")
            finally:
                if keeper is not None:
                    # Before the scheduler's lease is given back.
                    keeper.close()
                self._close(worker.storage)
        if verbosity:
            self.stdout.write(farewell(worker))
        if self.was_replaced:
            raise CommandError("another process has become the scheduler: this one has to end")
        if worker.abandoned and self.own_process:
            leave(0)

    def _worker(self, options: dict[str, Any]) -> Worker:
        try:
            return Worker(
                get_storage(),
                options["queues"],
                concurrency=options["concurrency"],
                worker_id=options["worker_id"],
                shutdown_timeout=options["shutdown_timeout"],
                until_empty=options["until_empty"],
                max_jobs=options["max_jobs"],
                connect=False,
            )
        except (OptionError, UnknownQueueError) as error:
            raise CommandError(str(error), returncode=2) from error
        except (ConfigurationError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error

    def _keeper(self, worker: Worker) -> LeaseKeeper | None:
        """A process that renews the worker's leases while a handler blocks this one; forked at once."""
        patience = get_settings().stuck_timeout
        if not (patience and self.own_process and not worker.storage.capabilities.in_process and can_keep()):
            return None
        try:
            keeper = LeaseKeeper(worker.storage, worker.options.heartbeat * SHARE, patience)
        except OSError as error:
            logging.getLogger("djqueue.worker").warning(
                "No lease keeper could be started (%s). This process alone renews its leases: a handler that "
                "keeps the interpreter to itself for longer than a lease has its job run again.",
                error,
            )
            return None
        worker.leases = keeper.table
        return keeper

    def _connect(self, worker: Worker, standby: str) -> None:
        def on_lost() -> None:
            self.was_replaced = True
            worker.stop()

        storage = worker.storage
        scheduler = storage.capabilities.scheduler
        if scheduler is not None:
            scheduler.standby = standby
            scheduler.on_lost = on_lost
        storage.connect()

    def _serve(self, worker: Worker, verbosity: int) -> None:
        if verbosity:
            self.stdout.write(banner(worker))
            self.stdout.flush()
            for finding in findings(worker):
                self.stderr.write(self.style.WARNING(finding))
        if not worker.handlers:
            self.stderr.write(self.style.WARNING(NO_HANDLERS))
        serve(worker)

    def _close(self, storage: Storage) -> None:
        try:
            storage.close()
        except DjqueueError as error:
            raise CommandError(str(error)) from error

    def _reload(self, options: dict[str, Any]) -> None:
        if os.name != "posix":
            raise CommandError("--reload needs a POSIX system")
        given = options["shutdown_timeout"]
        patience = DEFAULT_PATIENCE if given is None else given + GRACE
        code = ReloadingParent(child_command(), patience, self.stdout.write).run()
        if code:
            raise CommandError(f"the workers ended with exit code {code}", returncode=max(code, 1))


FLAGS = {
    "--autoreload": "Use --reload.",
    "--beat": "Every runworkers fires schedules.",
    "--burst": "Use --until-empty.",
    "--log-level": "Use --verbosity 2.",
    "--loglevel": "Use --verbosity 2.",
    "--name": "Use --worker-id.",
    "--once": "Use --until-empty, or --max-jobs 1.",
    "--pool": "Async functions run on the event loop, others on threads: use --concurrency.",
    "--processes": "Start each process by itself: runworkers --standby work.",
    "--threads": "Use --concurrency.",
    "--watch": "Use --reload.",
    "--workers": "Use --concurrency for jobs at once, or more processes with --standby work.",
    "-A": "The project is that of manage.py.",
    "-B": "Every runworkers fires schedules.",
    "-P": "Async functions run on the event loop, others on threads: use --concurrency.",
    "-Q": "Use --queues.",
    "-b": "Use --until-empty.",
    "-c": "Use --concurrency.",
    "-l": "Use --verbosity 2.",
    "-n": "Use --worker-id.",
    "-p": "Start each process by itself: runworkers --standby work.",
    "-q": "Use --queues.",
    "-t": "Use --concurrency.",
    "-w": "Use --concurrency for jobs at once, or more processes with --standby work.",
}
"""Flags of the workers of Celery, RQ, Huey, Dramatiq and Django Q, and what to give here."""
UNRECOGNIZED = "unrecognized arguments: "


def flag_hint(message: str) -> str:
    """What to add to an error of the parser about an unknown flag."""
    if not message.startswith(UNRECOGNIZED):
        return ""
    flag = message.removeprefix(UNRECOGNIZED).split()[0].partition("=")[0]
    if not flag.startswith("-"):
        return f". Use --queues {flag} if that is a queue."
    hint = FLAGS.get(flag)
    return f". {hint}" if hint else ""


DEFAULT_PATIENCE = 60.0
"""Seconds for a child to drain, when its own settings say how long it takes."""
GRACE = 10.0
"""Seconds that a child has beyond its shutdown timeout."""


def queue_names(text: str) -> list[str]:
    """`a,b` as a list."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ArgumentTypeError(f"{text!r} has an empty name; write a,b")
    return names


def count(text: str) -> int:
    """A whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def seconds(text: str) -> float:
    """A time from 0 on."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds from 0 on")
    return value
