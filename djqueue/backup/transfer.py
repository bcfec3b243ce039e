"""Take backups of a storage, verify them, and write them back to a storage."""

import hashlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from django.core.files.base import File

from djqueue._version import __version__
from djqueue.core.clock import Clock
from djqueue.core.errors import BackupDamagedError, OptionError
from djqueue.core.logs import Log
from djqueue.storage.base import Storage
from djqueue.storage.snapshotchecks import check_part
from djqueue.storage.snapshots import DEAD, JOB, LIMITER, QUEUE, SCHEDULE, Part, SnapshotCounts

from .archive import READ_SIZE, ArchiveWriter, Metadata, new_name, read_archive, started_at
from .store import BackupStore

logger = Log("djqueue.backup")

DAY = 86_400_000

Progress = Callable[[int], None]
"""Called with the number of records so far."""


class Steps(NamedTuple):
    """Callbacks of a backup while it is taken."""

    check: Callable[[], None] = lambda: None
    """Called often; raises an exception to stop."""
    rest: Callable[[], None] = lambda: None
    """Called after each part, to let other threads work."""
    progress: Progress = lambda _: None
    """Called after each part, with the number of records so far."""


def take(storage: Storage, store: BackupStore, clock: Clock, steps: Steps = Steps()) -> Metadata:  # noqa: B008
    """Take a backup, and return its description. Until it is complete, the store does not list it.

    Raises the errors of the storage and of the file storage, and what `steps.check` raises.
    """
    began = clock.now()
    name = new_name(began)
    with store.new_file(name) as file:
        archive = ArchiveWriter(file, __version__)
        with storage.snapshots.read() as parts:
            for part in parts:
                steps.check()
                archive.write(part)
                steps.progress(archive.records)
                steps.rest()
        archive.finish()
        metadata = Metadata(
            name=name,
            djqueue=__version__,
            storage=type(storage).__name__,
            started_at=began,
            ended_at=clock.now(),
            counts=archive.counts,
            size=archive.size,
            raw_size=archive.raw_size,
            sha256=archive.sha256,
        )
        store.save(metadata, file, steps.check)
    logger.info("Backup %s was saved: %d jobs, %d bytes.", name, metadata.counts.all_jobs, metadata.size)
    return metadata


def prune(store: BackupStore, keep: int, taken: str, clock: Clock, *, is_alone: bool) -> list[str]:
    """Delete all but the newest backups, and the files of incomplete ones; return the deleted backups.

    Args:
        store: Where they are.
        keep: Number of backups to keep, including the one that was just taken.
        taken: That backup, which is kept even if the clock was set back.
        clock: The source of time.
        is_alone: No other process can be taking a backup. Otherwise files may belong to one, and are deleted
            only if they are more than a day old.
    """
    others = [name for name in store.names() if name != taken]
    surplus = others[max(keep - 1, 0) :]
    for name in surplus:
        store.delete(name)
    for name, files in store.leftovers().items():
        if is_alone or (started_at(name) or 0) < clock.now() - DAY:
            store.delete_files(files)
            logger.info("Deleted the files of the incomplete backup %s.", name)
    return surplus


class RestoredBackup(NamedTuple):
    """A backup that was verified, and what of it was written."""

    metadata: Metadata
    written: SnapshotCounts | None
    """Numbers of written records; None if nothing was to be written."""


def verify(store: BackupStore, name: str, progress: Progress = lambda _: None) -> Metadata:
    """Check a backup completely: its checksums, and that all its records are valid.

    Raises:
        BackupNotFoundError: There is no such backup.
        BackupDamagedError: It is damaged.
        BackupError: A later version of djqueue has written it.
    """
    metadata = store.metadata(store.check(name))
    with store.open(name) as file:
        _check_sum(file, metadata)
        try:
            for part in _counted(_parts(file, metadata), progress):
                check_part(part)
        except OptionError as error:
            raise BackupDamagedError(f"backup {name} is damaged ({error}): use another backup") from error
    return metadata


def restore(
    store: BackupStore,
    name: str,
    storage: Storage,
    *,
    replace: bool = False,
    progress: Progress = lambda _: None,
    before: Callable[[Metadata], bool] = lambda _: True,
) -> RestoredBackup:
    """Write a backup to a storage: all of it, or nothing. The checksum is verified first.

    Args:
        replace: Delete everything that the storage holds.
        before: Called when the checksum is verified, before anything is changed; returns whether to go on.

    Raises what `verify` raises, and the errors of `storage.snapshots.write`.
    """
    metadata = store.metadata(store.check(name))
    with store.open(name) as file:
        _check_sum(file, metadata)
        if not before(metadata):
            return RestoredBackup(metadata, None)
        # The same open file, which nobody can have replaced in between.
        parts = _counted(_parts(file, metadata), progress)
        return RestoredBackup(metadata, storage.snapshots.write(parts, replace=replace))


def _check_sum(file: "File[bytes]", metadata: Metadata) -> None:
    digest, size = hashlib.sha256(), 0
    while data := file.read(READ_SIZE):
        digest.update(data)
        size += len(data)
    if size != metadata.size:
        raise BackupDamagedError(
            f"backup {metadata.name} is damaged: its data has {size:,} bytes, expected {metadata.size:,}. "
            "Use another backup"
        )
    if digest.hexdigest() != metadata.sha256:
        raise BackupDamagedError(
            f"backup {metadata.name} is damaged: the SHA-256 of its data is {digest.hexdigest()}, expected "
            f"{metadata.sha256}. Use another backup"
        )
    file.seek(0)


def _parts(file: "File[bytes]", metadata: Metadata) -> Iterator[Part]:
    """Yield the parts, and check that they are as many as the metadata say."""
    numbers = dict.fromkeys((JOB, DEAD, QUEUE, LIMITER, SCHEDULE), 0)
    for part in read_archive(file, metadata.name):
        yield part  # Who receives it checks its kind.
        numbers[part.kind] += len(part.records)
    counts = metadata.counts
    expected = {
        JOB: counts.all_jobs,
        DEAD: counts.dead,
        QUEUE: counts.queues,
        LIMITER: counts.limiters,
        SCHEDULE: counts.schedules,
    }
    if numbers != expected:
        raise BackupDamagedError(
            f"backup {metadata.name} is damaged: it has {numbers}, expected {expected}. Use another backup"
        )


def _counted(parts: Iterator[Part], progress: Progress) -> Iterator[Part]:
    total = 0
    for part in parts:
        yield part
        total += len(part.records)
        progress(total)
