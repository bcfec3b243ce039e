"""The storage that the settings name: one for a process.

In tests it is one in memory, so that no test reaches the queues of a running project: as Django does with
mail. `DJQUEUE["TEST"]` keeps the real one, whose keys get a prefix.
"""

import atexit
import inspect
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from threading import Lock
from typing import Any

from django.apps import apps
from django.core.signals import setting_changed
from django.utils.module_loading import import_string

from djqueue.conf import Settings, get_settings, has_django, is_pytest, is_testing, uses_memory_in_tests
from djqueue.core.errors import ConfigurationError, DjqueueError
from djqueue.core.messages import shown_name
from djqueue.storage.base import Storage
from djqueue.storage.snapshots import Record, ScheduleRows

from .announcing import announce_incidents

IMMEDIATE = "djqueue.runtime.immediate.ImmediateStorage"
"""Storage of the setting IMMEDIATE."""
MEMORY = "djqueue.storage.memory.MemoryStorage"
"""Storage of tests."""
IN_TESTS, REAL_IN_TESTS = "in tests", "real, in tests"

_lock = Lock()
_storage: Storage | None = None
_made_for: object = None
"""The result of `_purpose` for which the storage was made."""
_make: Callable[[], Storage] | None = None
_test_prefix = ""
"""Prefix of the keys of a real storage in the tests of this process."""
_of_tests: dict[str, Storage] = {}
"""Real storages that the tests of this process have used, by description."""


def get_storage() -> Storage:
    """Return the configured storage, made on first use and shared by all threads."""
    storage = _storage
    if storage is None or _made_for is not None or is_testing():
        return _storage_for(_purpose())
    return storage


def use_storage(make: Callable[[], Storage]) -> None:
    """Let `get_storage` return what `make` returns, in this process and those forked from it."""
    global _make
    close_storage()
    _make = make


def _purpose() -> object:
    """Return what the storage is for, compared by identity: None outside tests.

    In Django's test cases it is the list of the current test's mail, which is replaced before each test. So
    each test has an empty storage, and keeps it until the next one begins. The plugin for pytest calls
    `forget_test_jobs` instead: there, a fixture may replace that list after others have used the storage.
    """
    if _make is not None or not is_testing():
        return None
    if not uses_memory_in_tests():
        return REAL_IN_TESTS
    if is_pytest():
        return IN_TESTS
    return getattr(sys.modules.get("django.core.mail"), "outbox", IN_TESTS)


def _storage_for(purpose: object) -> Storage:
    """Return the storage, which is made anew if the last one was for another purpose."""
    global _storage, _made_for
    last = None
    with _lock:
        if _made_for is not purpose:
            last, _storage = _storage, None
        storage = _storage
        if storage is None:
            storage = _storage = _make() if _make is not None else _configured(purpose)
            _made_for = purpose
    if last is not None:
        last.close()
    return storage


def _configured(purpose: object) -> Storage:
    settings = get_settings()
    if settings.backend != MEMORY and not settings.immediate:
        _check_installed()
    if purpose is None:
        return make_storage(settings)
    if purpose is REAL_IN_TESTS:
        return _real_in_tests(settings)
    if not settings.immediate and not issubclass(_backend(settings.backend), _backend(MEMORY)):
        settings = replace(settings, backend=MEMORY, storage_options={})
    return make_storage(settings)


def _check_installed() -> None:
    """Raise ConfigurationError if the project does not have the app, whose tables the storages use."""
    if has_django() and apps.ready and not apps.is_installed("djqueue"):
        raise ConfigurationError(
            "'djqueue' is not in INSTALLED_APPS: add it, and run `manage.py migrate`, before jobs are used"
        )


def _real_in_tests(settings: Settings) -> Storage:
    """Return the storage that the settings name, apart from all other processes unless they name a prefix."""
    global _test_prefix
    prefix = settings.test.prefix
    if prefix is None:
        prefix = _test_prefix = _test_prefix or f"test-{secrets.token_hex(4)}:"
    if not prefix or settings.immediate:
        return make_storage(settings)
    options = _backend(settings.backend).options_in_tests(settings.storage_options, prefix)
    storage = make_storage(replace(settings, storage_options=options))
    if type(storage).discard is Storage.discard:
        return storage
    if not _of_tests:
        from multiprocessing.util import Finalize

        # Unlike a function of `atexit`, it is also called in the processes of parallel tests.
        Finalize(None, _discard, exitpriority=0)
    _of_tests[storage.describe()] = storage
    return storage


def _discard() -> None:
    """Delete what the tests of this process have left in real storages."""
    while _of_tests:
        _, storage = _of_tests.popitem()
        with suppress(DjqueueError):
            storage.discard()
            storage.close()


def _backend(path: str) -> type[Storage]:
    try:
        backend = import_string(path)
    except ImportError as error:
        raise ConfigurationError(f"STORAGE: BACKEND {path!r}: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Storage)):
        raise ConfigurationError(f"STORAGE: BACKEND {path!r} is not a Storage")
    return backend


def make_storage(settings: Settings) -> Storage:
    """Return a storage as the settings describe it. Raises ConfigurationError naming what is wrong."""
    backend = _backend(IMMEDIATE if settings.immediate else settings.backend)
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
    storage = backend(**options)
    storage.on_incidents = announce_incidents
    if storage.capabilities.database is None:
        storage.snapshots.schedules = ProjectSchedules()
    return storage


def forget_test_jobs() -> None:
    """Let the next test begin with an empty storage, if tests have one in memory."""
    if _made_for is not None and _made_for is not REAL_IN_TESTS:
        close_storage()


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
    global _lock, _storage, _test_prefix
    # The parent's sockets and threads are not this process's to use, or to close.
    _lock, _storage, _test_prefix = Lock(), None, ""
    _of_tests.clear()


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
