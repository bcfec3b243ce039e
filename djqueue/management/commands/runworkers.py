"""The command `manage.py runworkers`: its options, and hints for those of other job queues."""

import os
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Iterator
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from djqueue.client import get_storage
from djqueue.core.errors import ConfigurationError
from djqueue.management import unusable_database
from djqueue.management.arguments import (
    HelpFormatter,
    count,
    file_in_a_folder,
    memory,
    processes,
    queue_names,
    seconds,
)
from djqueue.management.processes import WorkerRunner
from djqueue.runtime.exits import MISUSED, leave
from djqueue.runtime.supervisor.reloading import ReloadingParent, child_command
from djqueue.storage.base import Storage

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


DEFAULT_RELOAD_TIMEOUT = 60.0
"""Seconds that a child has to finish its jobs if its own settings define the shutdown timeout."""
RELOAD_GRACE = 10.0
"""Seconds that a child has in addition to its shutdown timeout."""
NEED_SUPERVISOR = ("processes", "max_jobs_per_process", "max_memory_per_process", "health_file")
"""Options that only a supervisor can follow."""
FLAGS = {
    "--autoreload": "Use --reload.",
    "--autoscale": "Use --processes and --concurrency.",
    "--batch": "Use --until-empty.",
    "--beat": "Every runworkers process fires schedules.",
    "--burst": "Use --until-empty.",
    "--cluster-name": "Use --queues.",
    "--interval": "Workers are woken by new jobs.",
    "--log-level": "Use --verbosity 2.",
    "--loglevel": "Use --verbosity 2.",
    "--max-idle-time": "Use --until-empty.",
    "--max-memory-per-child": "Use --max-memory-per-process.",
    "--max-tasks": "Use --max-jobs.",
    "--max-tasks-per-child": "Use --max-jobs-per-process.",
    "--name": "Use --worker-id.",
    "--once": "Use --until-empty, or --max-jobs 1.",
    "--pool": "Async functions run on the event loop, others on threads. Use --concurrency.",
    "--prefetch-multiplier": "Workers claim only the jobs that they start.",
    "--queue-name": "Use --queues.",
    "--run-once": "Use --until-empty.",
    "--threads": "Use --concurrency.",
    "--watch": "Use --reload.",
    "--with-scheduler": "Every runworkers process fires schedules.",
    "--worker-type": "Async functions run on the event loop, others on threads. Use --concurrency.",
    "--workers": "Use --processes for processes, --concurrency for jobs at once in each.",
    "-A": "manage.py selects the project.",
    "-B": "Every runworkers process fires schedules.",
    "-P": "Async functions run on the event loop, others on threads. Use --concurrency.",
    "-Q": "Use --queues.",
    "-b": "Use --until-empty.",
    "-c": "Use --concurrency.",
    "-k": "Async functions run on the event loop, others on threads. Use --concurrency.",
    "-l": "Use --verbosity 2.",
    "-n": "Use --worker-id.",
    "-p": "Use --processes.",
    "-q": "Use --queues.",
    "-t": "Use --concurrency.",
    "-w": "Use --processes for processes, --concurrency for jobs at once in each.",
}
"""Flags of the workers of Celery, RQ, Huey, Dramatiq and Django Q, with their equivalents here."""
UNRECOGNIZED = "unrecognized arguments: "


class Command(BaseCommand):
    """Runs workers, and what else the storage needs, under a supervisor or in this process."""

    help = HELP

    own_process = False
    """Whether the process only runs this command."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        """Create a parser that keeps paragraphs and suggests flags."""
        kwargs.setdefault("formatter_class", HelpFormatter)
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        error = parser.error
        parser.error = lambda message: error(message + _flag_hint(message))  # type: ignore[method-assign]
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
            type=file_in_a_folder,
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

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command. Django's checks ask the database which features it has."""
        try:
            return super().execute(*args, **options)
        except Error as error:
            raise unusable_database(error) from error

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the supervisor, or the worker in this process, or the process that reloads either."""
        _check_combination(options)
        if options["reload"]:
            self._reload(options)
            return
        runner = WorkerRunner(
            options, self.stdout, self.stderr, self.style.WARNING, own_process=self.own_process
        )
        if self._is_single(options):
            worker = runner.run_here()
            if worker.abandoned and self.own_process:
                leave(0)
        else:
            runner.supervise()

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
        for flag in _supervisor_flags(options):
            raise CommandError(f"{flag} requires {reason}", returncode=MISUSED)
        return True

    def _storage(self) -> Storage:
        try:
            return get_storage()
        except (ConfigurationError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error

    def _reload(self, options: dict[str, Any]) -> None:
        if os.name != "posix":
            raise CommandError("--reload requires a POSIX system")
        given = options["shutdown_timeout"]
        patience = DEFAULT_RELOAD_TIMEOUT if given is None else given + RELOAD_GRACE
        command = child_command()
        if not any(_supervisor_flags(options)):
            command.append("--single-process")
        code = ReloadingParent(command, patience, self.stdout.write).run()
        if code:
            raise CommandError(f"the worker exited with code {code}", returncode=max(code, 1))


def _supervisor_flags(options: dict[str, Any]) -> Iterator[str]:
    """Yield the given flags that require the supervisor."""
    for name in NEED_SUPERVISOR:
        if options[name] is not None:
            yield _flag(name)


def _check_combination(options: dict[str, Any]) -> None:
    """Raise CommandError if two options exclude each other."""
    if options["single_process"]:
        for flag in _supervisor_flags(options):
            raise _excluded(flag, "--single-process")
    if options["max_jobs"] is None:
        return
    if (options["processes"] or 1) > 1:
        raise _excluded("--max-jobs", "several processes; use --max-jobs-per-process")
    for name in ("max_jobs_per_process", "max_memory_per_process"):
        if options[name] is not None:
            raise _excluded("--max-jobs", _flag(name))


def _excluded(flag: str, other: str) -> CommandError:
    return CommandError(f"{flag} can't be combined with {other}", returncode=MISUSED)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _flag_hint(message: str) -> str:
    """Return what to add to the parser's error about an unknown flag."""
    if not message.startswith(UNRECOGNIZED):
        return ""
    flag = message.removeprefix(UNRECOGNIZED).split()[0].partition("=")[0]
    if not flag.startswith("-"):
        return f". Use --queues {flag} if that is a queue."
    hint = FLAGS.get(flag)
    return f". {hint}" if hint else ""
