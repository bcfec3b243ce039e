"""`manage.py djqueue`."""

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
from djqueue.management.commands.runworkers import RunworkersHelpFormatter, count
from djqueue.operations import marks
from djqueue.operations.agenda import agenda
from djqueue.operations.mirror import Mirror
from djqueue.operations.mirroring import is_mirrored, mirror_of
from djqueue.operations.restore import Restoration, RestoreCounts
from djqueue.operations.scheduling import alias_of
from djqueue.operations.workercontrol import listing, steer

TELL_EVERY = 10_000
"""Jobs between two lines about a queue."""

STEERING = {
    QUIET: "Have a worker claim no more.",
    RESUME: "Have a quiet worker claim again.",
    STOP: "Have a worker end when its jobs have, or their time is over.",
    DUMP: "Print where the threads and tasks of a worker are.",
}

HELP = "Operations on the jobs of this project: see the help of each."

SCHEDULES = """List the schedules, each with what it enqueues, its last run, and its next ones.

Times are by the clocks of the schedule's time zone, and have its jitter in them. The first one may lie in the
past: then it is due, and is enqueued when a worker looks, which one does about once a second.

A schedule that the code declares (@job(cron=...), .schedule(...)) is in the table from the start of
`runworkers` on. To make, change, switch off or run one now, use the admin.
"""

RESYNC = """Make the tables equal to Redis.

All jobs that Redis knows are copied to the tables again. Rows of unfinished jobs that it does not know
go; those of ended ones stay until their time (RETENTION) is over. Workers may go on meanwhile.

The mirror does this by itself where it finds that it has missed changes: this command is for when the
tables were changed or emptied by hand, or STATES were added to the settings.

Not after Redis has lost its data: then restore-from-mirror comes first.
"""

RESTORE = """Enqueue again what Redis has lost, after it has come back empty or old.

All jobs that the tables know as unfinished (waiting, delayed, blocked, active), and Redis does not know,
are enqueued again, the oldest first, with their ids, names, payloads, options, unique keys and due
times. Queues that were paused or limited, and that Redis does not know, are so again.

Jobs that Redis knows are left alone: the command may be run twice, and beside running workers.

What begins anew: the counts of attempts, failures and stalls; the time of the enqueue; a job that was
active when Redis was lost runs again, whatever it had done, or is doing, where a worker still runs it.

What is not restored: failed jobs (their rows stay, with payload and error); ended jobs and their
results; jobs enqueued so shortly before the loss that the mirror had not copied them, half a second
usually. A job is refused, with the reason, if its ttl is over, its unique key is taken, or it depends
on a job that has failed, or that nobody knows.
"""


MARK = """Mark this moment in the charts of the dashboard, with a label: a deploy, a change, an incident.

Workers mark by themselves when they start with another VERSION (in the settings) than the last one.
"""

WORKERS = """List the workers, each with its state, its process, and what it runs; or tell one something.

--quiet: it claims no more, and finishes what it runs. --resume: it claims again. --stop: it ends as after
SIGTERM; whoever looks after its process may start another one. --dump: it says where each of its threads
and tasks is, which is printed.

The worker hears of it at once as a rule, with its next sign of life (HEARTBEAT) at the latest.
"""


class Command(BaseCommand):
    """Operations on many jobs."""

    help = HELP

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `BaseCommand.add_arguments`."""
        actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
        resync = actions.add_parser(
            "resync",
            help="make the tables equal to Redis",
            description=RESYNC,
            formatter_class=RunworkersHelpFormatter,
        )
        restore = actions.add_parser(
            "restore-from-mirror",
            help="enqueue again what Redis has lost and the tables have",
            description=RESTORE,
            formatter_class=RunworkersHelpFormatter,
        )
        schedules = actions.add_parser(
            "schedules",
            help="list the schedules with their next runs",
            description=SCHEDULES,
            formatter_class=RunworkersHelpFormatter,
        )
        schedules.add_argument("names", metavar="NAME", nargs="*", help="All of them unless some are named.")
        schedules.add_argument(
            "--next", type=count, metavar="N", default=5, help="How many runs of each to list (5)."
        )
        mark = actions.add_parser(
            "mark",
            help="mark this moment in the charts",
            description=MARK,
            formatter_class=RunworkersHelpFormatter,
        )
        mark.add_argument("label", metavar="LABEL", help="What to write there, such as v1.2.")
        workers = actions.add_parser(
            "workers",
            help="list the workers, or tell one what to do",
            description=WORKERS,
            formatter_class=RunworkersHelpFormatter,
        )
        told = workers.add_mutually_exclusive_group()
        for command, meaning in STEERING.items():
            told.add_argument(f"--{command}", metavar="ID", help=meaning)
        for action in (resync, restore):
            action.add_argument("--queue", metavar="NAME", help="One queue; all of them unless given.")
        restore.add_argument(
            "--dry-run", action="store_true", help="Enqueue nothing, and say what would be enqueued."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """See `BaseCommand.handle`."""
        try:
            if options["action"] == "schedules":
                self._schedules(options["names"], options["next"])
                return
            if options["action"] == "mark":
                row = marks.mark(alias_of(get_storage()), options["label"])
                self.stdout.write(f"Marked: {row.label}")
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

    def _workers(self, told: dict[str, str]) -> None:
        storage = get_storage()
        for command, worker_id in told.items():
            self.stdout.write(steer(storage, command, worker_id))
        if not told:
            for line in listing(storage.workers.all()):
                self.stdout.write(line)

    def _mirror(self) -> Mirror:
        storage = get_storage()
        if is_mirrored(storage):
            return mirror_of(storage)
        where = storage.describe()
        if hasattr(storage, "changes"):
            raise CommandError(f"nothing is mirrored of {where}: the settings switch it off (MIRROR, STREAM)")
        raise CommandError(
            f"this is for jobs in Redis, which are mirrored in tables; here they are in {where}"
        )

    # Resync.

    def _resync(self, mirror: Mirror, queue: str | None) -> None:
        counts: dict[str, tuple[int, int]] = {}

        def progress(name: str, copied: int, forgotten: int) -> None:
            before = counts.get(name, (0, 0))[0]
            counts[name] = copied, forgotten
            if copied // TELL_EVERY > before // TELL_EVERY:
                self.stdout.write(f"{name}: {copied:,} jobs so far")
                self.stdout.flush()

        mirror.resync(queue, progress)
        for name, (copied, forgotten) in counts.items():
            self.stdout.write(f"{name}: {copied:,} jobs copied, {forgotten:,} not known to Redis any more")
        if not counts:
            self.stdout.write("There are no queues, neither in Redis nor in the tables.")

    # Restore.

    def _restore(self, mirror: Mirror, queue: str | None, *, dry_run: bool) -> None:
        reports = Restoration(mirror, dry_run=dry_run).run(queue)
        for name, report in reports.items():
            self._report(name, report, "would be restored" if dry_run else "restored")
        if not any(report.restored for report in reports.values()):
            self.stdout.write("There is nothing to restore.")

    def _report(self, queue: str, report: RestoreCounts, verb: str) -> None:
        words = [f"{report.restored.total():,} {verb}"]
        if report.restored:
            states = ", ".join(f"{count:,} {state.value}" for state, count in sorted(report.restored.items()))
            words[0] += f" ({states})"
        words.append(f"{report.there:,} already there")
        words.append(f"{report.refused.total():,} refused")
        self.stdout.write(f"{queue}: {', '.join(words)}")
        for reason, number in report.refused.most_common():
            self.stdout.write(f"    {number:,} refused: {reason}")
