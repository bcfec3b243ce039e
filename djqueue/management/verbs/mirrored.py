"""`manage.py djqueue resync` and `restore-from-mirror`."""

from django.core.management.base import CommandError

from djqueue.client import get_storage
from djqueue.core.messages import numbered
from djqueue.operations.mirror import Mirror
from djqueue.operations.mirroring import is_mirrored, mirror_of
from djqueue.operations.restore import Restoration, RestoreCounts

from .base import Options, Output, Verbs

PROGRESS_EVERY = 10_000
"""Jobs between two progress lines of a queue."""

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


def add(verbs: Verbs) -> None:
    """Declare the verbs."""
    resyncing = verbs.add("resync", resync, RESYNC)
    restoring = verbs.add("restore-from-mirror", restore, RESTORE)
    for parser in (resyncing, restoring):
        parser.add_argument("--queue", metavar="NAME", help="Name of one queue (default: all queues).")
    resyncing.add_argument(
        "--dry-run", action="store_true", help="Only show what would be copied and deleted."
    )
    restoring.add_argument("--dry-run", action="store_true", help="Only show what would be enqueued.")


def resync(options: Options, output: Output) -> None:
    """Make the tables match Redis."""
    counts: dict[str, tuple[int, int]] = {}

    def progress(name: str, copied: int, forgotten: int) -> None:
        before = counts.get(name, (0, 0))[0]
        counts[name] = copied, forgotten
        if copied // PROGRESS_EVERY > before // PROGRESS_EVERY:
            output.progress(f"{name}: {copied:,} jobs so far")

    mirror, dry_run = _mirror(), options["dry_run"]
    (mirror.count_resync if dry_run else mirror.resync)(options["queue"], progress)
    output.document(
        [{"name": name, "copied": copied, "removed": removed} for name, (copied, removed) in counts.items()]
    )
    would = " would be" if dry_run else ""
    for name, (copied, forgotten) in counts.items():
        jobs, removed = numbered(copied, "job"), numbered(forgotten, "unfinished job")
        output.line(f"{name}: {jobs}{would} copied, {removed} no longer in Redis{would} removed")
    if not counts:
        output.line("No queues exist, neither in Redis nor in the tables.")


def restore(options: Options, output: Output) -> None:
    """Enqueue again the jobs that Redis has lost."""
    dry_run = options["dry_run"]
    reports = Restoration(_mirror(), dry_run=dry_run).run(options["queue"])
    output.document(
        [
            {
                "name": name,
                "restored": {state.value: number for state, number in report.restored.items()},
                "unchanged": report.unchanged,
                "refused": dict(report.refused),
            }
            for name, report in reports.items()
        ]
    )
    for name, report in reports.items():
        _report(output, name, report, "would be restored" if dry_run else "restored")
    if not any(report.restored for report in reports.values()):
        output.line("Nothing to restore.")


def _report(output: Output, queue: str, report: RestoreCounts, verb: str) -> None:
    words = [f"{report.restored.total():,} {verb}"]
    if report.restored:
        states = ", ".join(f"{count:,} {state.value}" for state, count in sorted(report.restored.items()))
        words[0] += f" ({states})"
    words.append(f"{report.unchanged:,} already in Redis")
    words.append(f"{report.refused.total():,} refused")
    output.line(f"{queue}: {', '.join(words)}")
    for reason, number in report.refused.most_common():
        output.line(f"    {number:,} refused: {reason}")


def _mirror() -> Mirror:
    storage = get_storage()
    if is_mirrored(storage):
        return mirror_of(storage)
    where = storage.describe()
    if storage.capabilities.database is None and not storage.capabilities.in_process:
        raise CommandError(f"{where} is not mirrored: MIRROR or STREAM is off in the settings")
    raise CommandError(
        f"this command requires the Redis storage, whose jobs are mirrored in tables; the storage is {where}"
    )
