"""`manage.py djqueue backup`: take, list, verify and restore backups."""

from argparse import ArgumentParser
from contextlib import ExitStack
from threading import Event
from typing import Any

from django.core.management.base import CommandError
from django.db import Error

from djqueue.backup import transfer
from djqueue.backup.archive import Metadata, check_name, started_at
from djqueue.backup.lease import BackupLease
from djqueue.backup.schedule import due_at, is_scheduled
from djqueue.backup.store import BackupStore
from djqueue.backup.transfer import Steps
from djqueue.client import get_storage
from djqueue.conf import get_settings
from djqueue.core.errors import BackupError, DjqueueError, SnapshotTargetError
from djqueue.core.messages import in_one_line, numbered, size
from djqueue.core.states import State
from djqueue.core.units import to_datetime
from djqueue.models import BackupState
from djqueue.runtime.exits import MISUSED
from djqueue.storage.base import Storage

from .base import Options, Output, Subcommands, add_no_input, note, record_progress, shown

SHOWN_QUEUES = 5
"""Maximum number of queues named in a message."""

BACKUP = """Take, list, verify and restore backups of jobs, dead letters, schedules and settings.

The backups are in STORAGES["djqueue_backups"], or in a folder.
"""
NOW = """Take a backup now, and delete the oldest ones beyond DJQUEUE["BACKUP"]["KEEP"].

Workers can keep running.
"""
LIST = """List the complete backups, newest first."""
VERIFY = """Check a backup completely: its checksums, and that all its records are valid.

    manage.py djqueue backup verify --latest

Exit codes: 0 the backup can be restored, 1 it is damaged, or there is none.
"""
RESTORE = """Write a backup to the storage of this project, which may be of another kind than the saved one.

    manage.py djqueue backup restore --latest --dry-run

Verifies the checksum first. Restores everything or, if it fails or is killed, nothing. Stop all workers
before. Jobs come back in the states in which they were saved; those that were active run again.

A storage that is not empty is refused. With --force, everything that it holds is deleted.
"""
STATUS = """Show the last backup, when the next one is due, and the last error.

Exit codes: 0 backups are up to date or turned off, 1 the last attempt failed, or the next backup is overdue.
"""


def add(subcommands: Subcommands) -> None:
    """Declare the subcommands."""
    backup = subcommands.group("backup", BACKUP)
    backup.add("now", now, NOW)
    backup.add("list", listed, LIST)
    _add_name(backup.add("verify", verify, VERIFY))
    parser = backup.add("restore", restore, RESTORE)
    _add_name(parser)
    parser.add_argument("--force", action="store_true", help="Delete everything that the storage holds.")
    parser.add_argument(
        "--dry-run", action="store_true", help="Only verify the backup, and show what would be restored."
    )
    add_no_input(parser)
    backup.add("status", status, STATUS)


def now(_options: Options, output: Output) -> None:
    """Take a backup."""
    storage, settings = _shared_storage(), get_settings().backup
    store, lease = BackupStore.configured(settings), BackupLease(storage)
    progress = record_progress(output, "Saved {0:,} records")
    with ExitStack() as stack:
        steps, is_alone = Steps(progress=progress), lease.has_tables()
        if is_alone:
            held = stack.enter_context(lease.acquire(settings.timeout, Event()))
            steps = Steps(held.check, progress=progress)
            lease.note_start()
        name = ""
        try:
            metadata = transfer.take(storage, store, lease.clock, steps)
            name = metadata.name
            deleted = transfer.prune(store, settings.keep, name, lease.clock, is_alone=is_alone)
        except Exception as error:
            if is_alone:
                lease.note_end(name, error)
            if isinstance(error, OSError):
                raise CommandError(f"the backup failed: {error}") from error
            raise
        if is_alone:
            lease.note_end(name)
    output.document({**metadata.document(), "deleted": deleted})
    output.line(f"Saved backup {name} in {store.describe()}: {_counted(metadata)}, {size(metadata.size)}.")
    if deleted:
        output.line(f"Deleted {numbered(len(deleted), 'older backup')}.")


def listed(_options: Options, output: Output) -> None:
    """List the backups."""
    store = BackupStore.configured(get_settings().backup)
    rows: list[tuple[Any, ...]] = []
    documents: list[dict[str, Any]] = []
    for name in store.names():
        try:
            metadata = store.metadata(name)
        except BackupError as error:
            at = started_at(name)
            rows.append((name, to_datetime(at or 0), None, None, None, None, str(error)))
            documents.append({"name": name, "error": str(error)})
        else:
            counts = metadata.counts
            rows.append(
                (
                    name,
                    to_datetime(metadata.started_at),
                    counts.all_jobs,
                    counts.dead,
                    counts.schedules,
                    size(metadata.size),
                    f"{metadata.storage}, djqueue {metadata.djqueue}",
                )
            )
            documents.append(metadata.document())
    output.document({"place": store.describe(), "backups": documents})
    if rows:
        output.table(["name", "started", "jobs", "dead letters", "schedules", "size", "from"], rows)
    else:
        output.line(f"There is no backup in {store.describe()}.")


def verify(options: Options, output: Output) -> None:
    """Check a backup."""
    store = BackupStore.configured(get_settings().backup)
    progress = record_progress(output, "Read {0:,} records")
    metadata = transfer.verify(store, _name(store, options), progress)
    output.document({**metadata.document(), "verified": True})
    output.line(f"Backup {metadata.name} is intact: {_counted(metadata)}.")


def restore(options: Options, output: Output) -> None:
    """Write a backup to the storage."""
    storage = _shared_storage()
    store = BackupStore.configured(get_settings().backup)
    name, dry_run, force = _name(store, options), options["dry_run"], options["force"]
    held = ""

    def before(found: Metadata) -> bool:
        nonlocal held
        held = _held(storage)
        if held and not force and not dry_run:
            raise SnapshotTargetError(
                f"{storage.describe()} is not empty: {held}. Restore to an empty storage, or add --force to "
                "delete everything that it holds"
            )
        if dry_run:
            return False
        replaced = f" Everything that it holds will be deleted: {held}." if held else ""
        output.confirm(
            f"Restore {_counted(found)} of backup {name} to {storage.describe()}?{replaced}",
            assume_yes=options["no_input"],
        )
        return True

    progress = record_progress(output, "Restored {0:,} records")
    restored = transfer.restore(store, name, storage, replace=force, progress=progress, before=before)
    metadata, written = restored.metadata, restored.written
    if written is not None:
        note("backup_restore", count=written.jobs, backup=name, **({"replaced": held} if held else {}))
    output.document(
        {
            **metadata.document(),
            "dry_run": dry_run,
            "target": storage.describe(),
            "target_holds": held or None,
            "written": None if written is None else written._asdict(),
        }
    )
    if written is None:
        output.line(
            f"Backup {name} is intact. {_counted(metadata)} would be restored to {storage.describe()}."
        )
        if held:
            output.line(f"The storage is not empty, so this needs --force, which deletes: {held}.")
    else:
        output.line(f"Restored {_counted(metadata)} of backup {name} to {storage.describe()}.")


def status(_options: Options, output: Output) -> None:
    """Show the state of backups."""
    storage, settings = get_storage(), get_settings().backup
    lease = BackupLease(storage)
    scheduled = is_scheduled(storage, settings)
    state, running, problem = _last_attempt(lease)
    store = names = None
    try:
        store = BackupStore.configured(settings)
        names = store.names()
    except DjqueueError as error:
        problem = str(error)
    clock = lease.clock
    due = due_at(names, settings, clock.now()) if names is not None and scheduled else None
    if not problem and due is not None and names and clock.now() > due + (settings.every or 0):
        problem = "the next backup is overdue: is runworkers running?"
    latest = names[0] if names else None
    document = {
        "scheduled": scheduled,
        "every": None if settings.every is None or not scheduled else settings.every / 1_000,
        "keep": settings.keep,
        "place": None if store is None else store.describe(),
        "backups": None if names is None else len(names),
        "latest": latest,
        "latest_at": None if latest is None else to_datetime(started_at(latest) or 0),
        "next_at": None if due is None else to_datetime(due),
        "running": running or None,
        "last_attempt_at": None if state is None else state.started_at,
        "problem": problem or None,
    }
    output.document(document)
    for label, value in _lines(document):
        output.line(f"{label + ':':<16}{value}")
    if problem:
        raise CommandError(problem)


def _lines(document: dict[str, Any]) -> list[tuple[str, str]]:
    every = document["every"]
    latest = document["latest"]
    number = (
        "unknown" if document["backups"] is None else f"{document['backups']:,} (keeps {document['keep']:,})"
    )
    return [
        ("Schedule", "off" if every is None else f"every {every / 3_600:g} h"),
        ("Place", document["place"] or "none"),
        ("Backups", number),
        ("Last backup", "none" if latest is None else f"{shown(document['latest_at'])} ({latest})"),
        ("Next backup", "-" if document["next_at"] is None else shown(document["next_at"])),
        (
            "Last attempt",
            "none" if document["last_attempt_at"] is None else shown(document["last_attempt_at"]),
        ),
        ("Running", document["running"] or "no"),
    ]


def _last_attempt(lease: BackupLease) -> tuple[BackupState | None, str, str]:
    """Return the last attempt, the process that takes a backup now, and what went wrong."""
    try:
        if not lease.has_tables():
            return None, "", ""
        state, running = lease.last(), lease.holder()
    except Error as error:
        return None, "", f"the database cannot be used: {in_one_line(error)}"
    if state is None or running:
        return state, running, ""
    if state.ended_at is None:
        return state, "", f"process {state.pid} on {state.host} ended while it took the last backup"
    return state, "", f"the last attempt failed: {state.error}" if state.error else ""


def _add_name(parser: ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("name", nargs="?", metavar="NAME", help="Name of the backup.")
    which.add_argument("--latest", action="store_true", help="The newest backup.")


def _name(store: BackupStore, options: Options) -> str:
    return store.latest() if options["latest"] else check_name(options["name"])


def _shared_storage() -> Storage:
    storage = get_storage()
    if storage.capabilities.in_process:
        raise CommandError(
            f"the jobs of {storage.describe()} are only in the process that runs them, which this command is "
            "not: set DJQUEUE['BACKUP'] to {'EVERY': seconds} to let runworkers back them up",
            returncode=MISUSED,
        )
    return storage


def _held(storage: Storage) -> str:
    """Return what a storage holds, as text; empty if it is empty."""
    if storage.snapshots.is_empty():
        return ""
    rows = storage.reads.overview().queues
    jobs = {row.name: sum(row.counts[state] for state in State) for row in rows}
    jobs = {queue: number for queue, number in jobs.items() if number}
    if not jobs:
        return "schedules or settings of queues"
    largest = sorted(jobs, key=lambda queue: (-jobs[queue], queue))
    named = ", ".join(f"{queue} {jobs[queue]:,}" for queue in largest[:SHOWN_QUEUES])
    more = f", and {len(jobs) - SHOWN_QUEUES:,} more queues" if len(jobs) > SHOWN_QUEUES else ""
    return f"{numbered(sum(jobs.values()), 'job')} ({named}{more})"


def _counted(metadata: Metadata) -> str:
    counts = metadata.counts
    return (
        f"{numbered(counts.all_jobs, 'job')}, {numbered(counts.dead, 'dead letter')} and "
        f"{numbered(counts.schedules, 'schedule')}"
    )
