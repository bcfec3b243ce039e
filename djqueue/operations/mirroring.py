"""Run the mirror of a process that runs jobs, on a thread beside the worker."""

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import router

from djqueue import models
from djqueue.core.threads import beside
from djqueue.storage.base import Storage

from .mirror import Mirror


@contextmanager
def mirroring(storage: Storage) -> Iterator[None]:
    """Copy changes on a thread within the block, if the storage has a mirror; finish copying at the end."""
    if not is_mirrored(storage):
        yield
        return
    with beside(mirror_of(storage).run, "djqueue-mirror"):
        yield


def is_mirrored(storage: Storage) -> bool:
    """Return whether the storage's jobs are copied to the tables."""
    return storage.capabilities.changes is not None


def mirror_of(storage: Storage) -> Mirror:
    """Return the mirror in the database that the routers name. Raises ConfigurationError if there is none."""
    return Mirror(storage, router.db_for_write(models.Job))
