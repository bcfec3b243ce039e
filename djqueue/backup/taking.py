"""Take a backup: write everything that the storage holds to a file, and save that with its checksum."""

import logging
from collections.abc import Callable
from typing import NamedTuple

from djqueue._version import __version__
from djqueue.core.clock import Clock
from djqueue.storage.base import Storage

from .archive import ArchiveWriter
from .metadata import Metadata, new_name, started_at
from .store import BackupStore

logger = logging.getLogger("djqueue.backup")

DAY = 86_400_000


class Steps(NamedTuple):
    """Callbacks of a backup while it is taken."""

    check: Callable[[], None] = lambda: None
    """Called often; raises an exception to stop."""
    rest: Callable[[], None] = lambda: None
    """Called after each part, to let other threads work."""
    progress: Callable[[int], None] = lambda _: None
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
