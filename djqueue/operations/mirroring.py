"""The mirror of a process that runs jobs: a thread beside the worker."""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

from django.db import router

from djqueue import models
from djqueue.storage.base import Storage

from .mirror import Mirror


@contextmanager
def mirroring(storage: Storage) -> Iterator[None]:
    """Meanwhile a thread copies what changes, if the storage has a mirror; in the end all that is left."""
    if not is_mirrored(storage):
        yield
        return
    mirror, stop = mirror_of(storage), Event()
    thread = Thread(target=mirror.run, args=(stop,), name="djqueue-mirror", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def is_mirrored(storage: Storage) -> bool:
    """Whether the storage's jobs are copied to the tables."""
    return storage.capabilities.changes is not None


def mirror_of(storage: Storage) -> Mirror:
    """The mirror in the database that the routers name. Raises ConfigurationError if there is none."""
    return Mirror(storage, router.db_for_write(models.Job))
