"""The storage that a `djqueue://` URL names: one for each URL in a process."""

import atexit
import os
from collections.abc import Mapping
from threading import Lock
from typing import Any, NamedTuple
from urllib.parse import quote

from djqueue.core.errors import ConfigurationError
from djqueue.storage.base import Storage

REDIS_PORT = 6379
STORAGE_OPTIONS = ("lease", "prefix", "timeout", "connection")
"""Transport options that are passed to the storage of a URL with a host."""

_lock = Lock()
_storages: dict["Location", Storage] = {}


class Location(NamedTuple):
    """The parts of a URL that identify a storage. Without a host, it is the storage of the project."""

    host: str = ""
    port: int = 0
    user: str = ""
    password: str = ""
    database: str = ""
    secure: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def url(self) -> str:
        """The URL for the Redis storage."""
        login = f"{quote(self.user, safe='')}:{quote(self.password, safe='')}@" if self.password else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        scheme = "rediss" if self.secure else "redis"
        return f"{scheme}://{login}{host}:{self.port or REDIS_PORT}/{self.database or 0}"


def location(
    host: str | None,
    port: int | str | None,
    user: str | None,
    password: str | None,
    path: str | None,
    options: Mapping[str, Any],
) -> Location:
    """Return the location that the parts of a URL name.

    Args:
        path: Number of the Redis database, with or without a slash before it.
        options: Transport options; those of the storage are used if there is a host.
    """
    if not host:
        return Location()
    database = (path or "").strip("/")
    if database and not database.isdecimal():
        raise ConfigurationError(
            f"djqueue://{host}/{database}: the path must be the number of a Redis database, such as /0"
        )
    storage_options = tuple(sorted((name, options[name]) for name in STORAGE_OPTIONS if name in options))
    return Location(
        host, int(port or 0), user or "", password or "", database, bool(options.get("ssl")), storage_options
    )


def storage_at(place: Location) -> Storage:
    """Return the storage of a location, made on first use and shared by all threads.

    Raises ConfigurationError if Django's settings are needed, and missing.
    """
    if not place.host:
        return _project_storage()
    with _lock:
        storage = _storages.get(place)
        if storage is None:
            from djqueue.storage.redis import RedisStorage

            storage = _storages[place] = RedisStorage(url=place.url, **dict(place.options))
    return storage


def _project_storage() -> Storage:
    import django
    from django.apps import apps
    from django.conf import settings

    if not settings.configured and "DJANGO_SETTINGS_MODULE" not in os.environ:
        raise ConfigurationError(
            "djqueue:// uses the storage of the Django project, and no project is configured: set "
            "DJANGO_SETTINGS_MODULE, or name a Redis server, as in djqueue://localhost:6379/0"
        )
    if not apps.ready:
        django.setup()
    from djqueue.client.storages import get_storage

    return get_storage()


def close_storages() -> None:
    """Close the storages of URLs with a host; the next use makes others."""
    with _lock:
        storages = list(_storages.values())
        _storages.clear()
    for storage in storages:
        storage.close()


def _after_fork() -> None:
    global _lock
    # The parent's sockets and threads are not this process's to use, or to close.
    _lock = Lock()
    _storages.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(close_storages)
