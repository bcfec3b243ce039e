"""The command `manage.py djqueue`."""

from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import Error

from djqueue.client import get_storage
from djqueue.core.errors import DjqueueError
from djqueue.core.shown import in_one_line
from djqueue.core.workercontrol import COMMANDS, DUMP, QUIET, RESUME, STOP
from djqueue.management.commands.runworkers import RunworkersHelpFormatter
from djqueue.management.flags import count
from djqueue.operations import annotations
from djqueue.operations.agenda import agenda
from djqueue.operations.mirror import Mirror
from djqueue.operations.mirroring import is_mirrored, mirror_of
from djqueue.operations.restore import Restoration, RestoreCounts
from djqueue.operations.scheduling import alias_of
from djqueue.operations.workercontrol import control, listing

PROGRESS_EVERY = 10_000
"""Jobs between two progress lines of a queue."""

CONTROL_HELP = {
    QUIET: "Make a worker stop claiming jobs.",
    RESUME: "Make a quiet worker claim jobs again.",
    STOP: "Stop a worker after its running jobs, as SIGTERM does.",
    DUMP: "Print the stacks of a worker's threads and tasks.",
}

HELP = "Manage the jobs, schedules and workers of this project."

SCHEDULES = """List the schedules, each with its job, its last run and its next runs.

Times are in the schedule's time zone and include its jitter. If the first time is in the past, the run is
due: a worker, which checks about once a second, will enqueue it.

A schedule that is declared in code (@job(cron=...), .schedule(...)) is listed after `runworkers` has started
once. To create, change, disable or run a schedule, use the dashboard.
"""

RESYNC = """Make the tables match Redis.

Copies all jobs in Redis to the tables again. Deletes the rows of unfinished jobs that are not in Redis; rows
of finished jobs stay until their RETENTION ends. Workers can keep running.

The mirror does this automatically when it has missed changes. Use this command after the tables were
changed or emptied by hand, or after STATES were added to the settings.

If Redis has lost its data, run restore-from-mirror first.
"""

RESTORE = """Enqueue again the jobs that Redis has lost, after it has come back empty or with old data.

Enqueues every unfinished job (waiting, delayed, blocked, active) that is in the tables and not in Redis,
the oldest first, with its ID, name, payload, options, unique key and due time. Restores the pauses and
limits of queues that are not in Redis.

Jobs that are in Redis are left unchanged, so the command can run more than once, and beside workers.

Restored jobs start again: attempts, failures and stalls are counted from 0, and the enqueue time is new. A
job that was active when Redis was lost runs again, even if a worker has finished or is still running it.

Not restored: failed jobs, whose rows stay with payload and error; finished jobs and their results; and jobs
that were enqueued too shortly before the loss to be mirrored, usually half a second. A job is refused, with
the reason, if its TTL has expired, its unique key is in use, or it depends on a failed or unknown job.
"""


MARK = """Add an annotation to the charts of the dashboard, such as a deploy, a change or an incident.

Workers add one automatically when they start with another VERSION (in the settings) than the last worker.
"""

WORKERS = """List the workers, each with its state, its process and its running jobs; or control one worker.

A worker is a worker process of `runworkers` (--processes starts several), or a Worker in another program.
Below it are the processes in which it runs isolated and subprocess jobs. Its entry begins with the ID that
the options take.

--quiet makes a worker stop claiming and finish its running jobs. --resume makes it claim again. --stop stops
it as SIGTERM does; a service manager may start a new one. --dump prints the stack of each of its threads
and tasks.

A worker usually receives a command at once, and at the latest with its next heartbeat (HEARTBEAT).
"""


class Command(BaseCommand):
    """Operates on the jobs, schedules and workers of a project."""

    help = HELP

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add a subcommand for each operation."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        resync = actions.add_parser(
            "resync",
            help="make the tables match Redis",
            description=RESYNC,
            formatter_class=RunworkersHelpFormatter,
        )
        restore = actions.add_parser(
            "restore-from-mirror",
            help="enqueue again the jobs that Redis has lost",
            description=RESTORE,
            formatter_class=RunworkersHelpFormatter,
        )
        schedules = actions.add_parser(
            "schedules",
            help="list the schedules with their next runs",
            description=SCHEDULES,
            formatter_class=RunworkersHelpFormatter,
        )
        schedules.add_argument(
            "names", metavar="NAME", nargs="*", help="Names of the schedules (default: all)."
        )
        schedules.add_argument(
            "--next",
            type=count,
            metavar="N",
            default=5,
            help="Number of next runs to list for each schedule (default: 5).",
        )
        mark = actions.add_parser(
            "mark",
            help="add an annotation to the charts",
            description=MARK,
            formatter_class=RunworkersHelpFormatter,
        )
        mark.add_argument("label", metavar="LABEL", help="Text of the annotation, such as v1.2.")
        workers = actions.add_parser(
            "workers",
            help="list the workers, or control one",
            description=WORKERS,
            formatter_class=RunworkersHelpFormatter,
        )
        control = workers.add_mutually_exclusive_group()
        for command, meaning in CONTROL_HELP.items():
            control.add_argument(f"--{command}", metavar="ID", help=meaning)
        for action in (resync, restore):
            action.add_argument("--queue", metavar="NAME", help="Name of one queue (default: all queues).")
        restore.add_argument("--dry-run", action="store_true", help="Only show what would be enqueued.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run one operation."""
        try:
            if options["action"] == "schedules":
                self._schedules(options["names"], options["next"])
                return
            if options["action"] == "mark":
                row = annotations.annotate(alias_of(get_storage()), options["label"])
                self.stdout.write(f"Added annotation: {row.label}")
                return
            if options["action"] == "workers":
                self._workers({command: options[command] for command in COMMANDS if options[command]})
                return
            mirror = self._mirror()
            if options["action"] == "resync":
                self._resync(mirror, options["queue"])
            else:
                self._restore(mirror, options["queue"], dry_run=options["dry_run"])
        except (DjqueueError, ImproperlyConfigured) as error:
            raise CommandError(str(error)) from error
        except Error as error:
            raise CommandError(f"the database cannot be used: {in_one_line(error)}") from error

    def _schedules(self, names: Sequence[str], runs: int) -> None:
        for line in agenda(alias_of(get_storage()), names, runs):
            self.stdout.write(line)

    def _workers(self, commands: dict[str, str]) -> None:
        storage = get_storage()
        for command, worker_id in commands.items():
            self.stdout.write(control(storage, command, worker_id))
        if not commands:
            for line in listing(storage.workers.all()):
                self.stdout.write(line)

    def _mirror(self) -> Mirror:
        storage = get_storage()
        if is_mirrored(storage):
            return mirror_of(storage)
        where = storage.describe()
        if storage.capabilities.database is None and not storage.capabilities.in_process:
            raise CommandError(f"{where} is not mirrored: MIRROR or STREAM is off in the settings")
        raise CommandError(
            "this command requires the Redis storage, whose jobs are mirrored in tables; "
            f"the storage is {where}"
        )

    # Resync.

    def _resync(self, mirror: Mirror, queue: str | None) -> None:
        counts: dict[str, tuple[int, int]] = {}

        def progress(name: str, copied: int, forgotten: int) -> None:
            before = counts.get(name, (0, 0))[0]
            counts[name] = copied, forgotten
            if copied // PROGRESS_EVERY > before // PROGRESS_EVERY:
                self.stdout.write(f"{name}: {copied:,} jobs so far")
                self.stdout.flush()

        mirror.resync(queue, progress)
        for name, (copied, forgotten) in counts.items():
            self.stdout.write(f"{name}: {copied:,} jobs copied, {forgotten:,} no longer in Redis")
        if not counts:
            self.stdout.write("No queues exist, neither in Redis nor in the tables.")

    # Restore.

    def _restore(self, mirror: Mirror, queue: str | None, *, dry_run: bool) -> None:
        reports = Restoration(mirror, dry_run=dry_run).run(queue)
        for name, report in reports.items():
            self._report(name, report, "would be restored" if dry_run else "restored")
        if not any(report.restored for report in reports.values()):
            self.stdout.write("Nothing to restore.")

    def _report(self, queue: str, report: RestoreCounts, verb: str) -> None:
        words = [f"{report.restored.total():,} {verb}"]
        if report.restored:
            states = ", ".join(f"{count:,} {state.value}" for state, count in sorted(report.restored.items()))
            words[0] += f" ({states})"
        words.append(f"{report.unchanged:,} already in Redis")
        words.append(f"{report.refused.total():,} refused")
        self.stdout.write(f"{queue}: {', '.join(words)}")
        for reason, number in report.refused.most_common():
            self.stdout.write(f"    {number:,} refused: {reason}")
