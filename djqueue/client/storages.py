"""The storage that the settings name: one for a process."""

import atexit
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from threading import Lock
from typing import Any

from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from djqueue.conf import Settings, get_settings
from djqueue.core.errors import ConfigurationError
from djqueue.core.messages import shown_name
from djqueue.storage.base import Storage
from djqueue.storage.snapshots import Record, ScheduleRows

from .announcing import announce_incidents

IMMEDIATE = "djqueue.runtime.immediate.ImmediateStorage"
"""Storage of the setting IMMEDIATE."""

_lock = Lock()
_storage: Storage | None = None
_make: Callable[[], Storage] | None = None


def get_storage() -> Storage:
    """Return the configured storage, made on first use and shared by all threads."""
    global _storage
    if _storage is None:
        with _lock:
            if _storage is None:
                _storage = _make() if _make is not None else make_storage(get_settings())
    return _storage


def use_storage(make: Callable[[], Storage]) -> None:
    """Let `get_storage` return what `make` returns, in this process and those forked from it."""
    global _make
    close_storage()
    _make = make


def make_storage(settings: Settings) -> Storage:
    """Return a storage as the settings describe it. Raises ConfigurationError naming what is wrong."""
    path = IMMEDIATE if settings.immediate else settings.backend
    try:
        backend = import_string(path)
    except ImportError as error:
        raise ConfigurationError(f"STORAGE: BACKEND {path!r}: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Storage)):
        raise ConfigurationError(f"STORAGE: BACKEND {path!r} is not a Storage")
    options: dict[str, Any] = {} if settings.immediate else dict(settings.storage_options)
    known = inspect.signature(backend).parameters
    if "policies" in known:
        options.setdefault("policies", settings.queues)
    if "limiters" in known:
        options.setdefault("limiters", settings.limiters)
    if "metrics" in known:
        options.setdefault("metrics", settings.metrics)
    for name in options:
        if name not in known and not any(p.kind is p.VAR_KEYWORD for p in known.values()):
            raise ConfigurationError(
                f"STORAGE: OPTIONS: {backend.__name__} has no option {shown_name(name.upper())}"
            )
    storage: Storage = backend(**options)
    storage.on_incidents = announce_incidents
    if storage.capabilities.database is None:
        storage.snapshots.schedules = ProjectSchedules()
    return storage


def close_storage() -> None:
    """Close the process's storage, if there is one; the next use makes another."""
    global _storage
    with _lock:
        storage, _storage = _storage, None
    if storage is not None:
        storage.close()


def close_storage_of(alias: str) -> None:
    """Close the process's storage if its jobs are in this database.

    Its connections would keep a test database from being dropped.
    """
    storage = _storage
    if storage is not None and storage.capabilities.database == alias:
        close_storage()


def _on_setting_changed(*, setting: str, **_: object) -> None:
    if setting in ("DJQUEUE", "DATABASES"):
        close_storage()


def _after_fork() -> None:
    global _lock, _storage
    # The parent's sockets and threads are not this process's to use, or to close.
    _lock, _storage = Lock(), None


class ProjectSchedules(ScheduleRows):
    """The schedules of the project, for snapshots of a storage that does not hold them itself.

    They are in the tables. Their models are imported at the first use: not every project has them.
    """

    def pages(self, size: int) -> Iterator[list[Record]]:
        return self._rows.pages(size)

    def is_empty(self) -> bool:
        return self._rows.is_empty()

    def check(self, records: Sequence[Record]) -> None:
        self._rows.check(records)

    def replacing(self, records: Sequence[Record]) -> AbstractContextManager[None]:
        return self._rows.replacing(records)

    @property
    def _rows(self) -> ScheduleRows:
        from djqueue.storage.tables.schedules import TableSchedules

        return TableSchedules()


setting_changed.connect(_on_setting_changed)
os.register_at_fork(after_in_child=_after_fork)
atexit.register(close_storage)
