"""`manage.py djqueue dead`: list, count, retry and delete dead letters."""

from argparse import ArgumentParser
from collections import Counter
from typing import Any

from djqueue.client import Queue, get_storage
from djqueue.client.deadletters import FILTERS, DeadLetterCounts, RetriedDead
from djqueue.core.job import DeadLetterRecord
from djqueue.core.messages import numbered
from djqueue.core.units import to_datetime
from djqueue.management.arguments import age, count, duration
from djqueue.models import BulkKind
from djqueue.operations import bulk
from djqueue.operations.bulk import Selection
from djqueue.storage.actions import DONE
from djqueue.storage.base import Storage

from .base import Options, Output, Subcommands, add_confirmation, note, used_queue

DEAD = """List, count, retry and delete dead letters: jobs that failed for good."""
LIST = """List dead letters, oldest first.

    manage.py djqueue dead list --queue emails --error SMTPServerDisconnected
"""
STATS = """Count dead letters by reason, job, and error."""
RETRY = """Retry all dead letters that match.

    manage.py djqueue dead retry --queue emails --newer-than 2h --dry-run
"""
PURGE = """Delete all dead letters that match, with their jobs.

    manage.py djqueue dead purge --queue emails --older-than 30d
"""


def add(subcommands: Subcommands) -> None:
    """Declare the subcommands."""
    dead = subcommands.group("dead", DEAD)
    parser = dead.add("list", listed, LIST)
    _add_filters(parser)
    parser.add_argument("--limit", type=count, default=50, metavar="N", help="Maximum number (default: 50).")
    _add_filters(dead.add("stats", stats, STATS))
    parser = dead.add("retry", retry, RETRY)
    _add_filters(parser)
    parser.add_argument("--limit", type=count, metavar="N", help="Maximum number for each queue.")
    add_confirmation(parser, "retried")
    parser = dead.add("purge", purge, PURGE)
    _add_filters(parser)
    add_confirmation(parser, "deleted")


def listed(options: Options, output: Output) -> None:
    """List dead letters."""
    letters: list[DeadLetterRecord] = []
    for queue in _queues(options):
        letters += queue.dead_letters(limit=options["limit"], **_filters(options))
    letters = sorted(letters, key=lambda letter: letter.entered_at)[: options["limit"]]
    output.document(
        [
            {
                "id": one.id,
                "queue": one.queue,
                "name": one.name,
                "reason": one.reason,
                "failed_at": to_datetime(one.entered_at),
                "error_type": one.error_type,
                "error_message": one.error_message,
            }
            for one in letters
        ]
    )
    output.table(
        ["id", "queue", "name", "reason", "failed", "error"],
        [
            (
                one.id,
                one.queue,
                one.name,
                one.reason,
                to_datetime(one.entered_at),
                f"{one.error_type.rpartition('.')[2]}: {one.error_message.partition(chr(10))[0][:80]}",
            )
            for one in letters
        ],
    )


def stats(options: Options, output: Output) -> None:
    """Count dead letters."""
    counts = {queue.name: queue.count_dead(**_filters(options)) for queue in _queues(options)}
    output.document({name: _counted(found) for name, found in counts.items()})
    for name, found in counts.items():
        output.line(f"{name}: {found.total:,}")
        for kind, numbers in (("reason", found.reasons), ("job", found.names), ("error", found.error_types)):
            for word, number in numbers.items():
                output.line(f"    {number:,}  {kind} {word}")


def retry(options: Options, output: Output) -> None:
    """Retry dead letters."""
    filters, dry_run = _filters(options), options["dry_run"]
    queues = _queues(options)
    if not dry_run:
        total = sum(queue.count_dead(**filters).total for queue in queues)
        if total:
            output.confirm(f"Retry up to {numbered(total, 'dead letter')}?", assume_yes=options["no_input"])
    outcomes: Counter[str] = Counter()
    for queue in queues:

        def progress(so_far: RetriedDead, name: str = queue.name) -> None:
            output.progress(f"{name}: {so_far.retried:,} {'found' if dry_run else 'retried'} so far")

        result = queue.retry_dead(limit=options["limit"], dry_run=dry_run, progress=progress, **filters)
        outcomes.update(result._asdict())
        if not dry_run and result.retried:
            note("errors_retry", queue=queue.name, count=result.retried)
    output.document({"dry_run": dry_run, **outcomes})
    verb = "would be retried" if dry_run else "retried"
    output.line(f"{outcomes.pop('retried', 0):,} {verb}")
    for word, number in outcomes.items():
        if number:
            output.line(f"{number:,} {word.replace('_', ' ')}")


def purge(options: Options, output: Output) -> None:
    """Delete dead letters."""
    storage, filters = get_storage(), _filters(options)
    names = tuple(queue.name for queue in _queues(options))
    total = sum(Queue(name).count_dead(**filters).total for name in names)
    if options["dry_run"] or not total:
        output.document({"matching": total, "deleted": 0})
        output.line(f"{numbered(total, 'matching dead letter')}; nothing was deleted.")
        return
    output.confirm(
        f"Delete {numbered(total, 'dead letter')} with their jobs?", assume_yes=options["no_input"]
    )
    outcomes: Counter[str] = Counter()
    now = storage.reads.overview(names[:1]).at
    for part in bulk.run_now(storage, BulkKind.PURGE, Selection(names, filters), now):
        outcomes += part
        output.progress(f"{outcomes.total():,} of {total:,}")
    deleted = sum(number for word, number in outcomes.items() if word in DONE)
    note("errors_delete", queue=options["queue"] or "", count=deleted)
    output.document({"matching": total, "deleted": deleted})
    output.line(f"Deleted {numbered(deleted, 'dead letter')}.")


def _add_filters(parser: ArgumentParser) -> None:
    parser.add_argument("--queue", metavar="NAME", help="Only this queue (default: all queues).")
    parser.add_argument("--reason", help="Only this reason, such as max_attempts_exceeded.")
    parser.add_argument("--name", help="Only jobs with this name.")
    parser.add_argument("--error", metavar="TYPE", dest="error_type", help="Only this type of exception.")
    parser.add_argument("--fingerprint", help="Only this error; `dead stats --json` lists fingerprints.")
    parser.add_argument("--older-than", type=age, metavar="AGE", help="Failed this long ago or longer.")
    parser.add_argument("--newer-than", type=duration, metavar="AGE", help="Failed more recently than this.")


def _filters(options: Options) -> dict[str, Any]:
    return {name: options[name] for name in FILTERS if options[name] is not None}


def _queues(options: Options) -> list[Queue]:
    storage: Storage = get_storage()
    names = storage.queues.names() if options["queue"] is None else [used_queue(storage, options["queue"])]
    return [Queue(name) for name in names]


def _counted(found: DeadLetterCounts) -> dict[str, Any]:
    prints = {mark: entry._asdict() for mark, entry in found.fingerprints.items()}
    return {**found._asdict(), "fingerprints": prints}
