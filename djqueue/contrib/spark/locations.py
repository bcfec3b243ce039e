"""The storage that a URL names: made anew in every process, without a Django project."""

from collections.abc import Mapping

from djqueue.core.errors import OptionError, StorageError
from djqueue.core.queue import QueuePolicy
from djqueue.storage.base import Storage
from djqueue.storage.staging import Staging

REDIS = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel")
DATABASES = ("postgresql", "postgres", "sqlite")


def storage_at(url: str, prefix: str = "", policies: Mapping[str, QueuePolicy] | None = None) -> Storage:
    """A storage for the caller alone, who closes it. Raises OptionError, without the URL's password.

    policies: of queues of which more is known than that they are there.
    """
    scheme, sign, _ = url.lower().partition("://")
    known = ", ".join(f"{one}://" for one in REDIS + DATABASES)
    if not sign or not scheme:
        # What is there instead may have a password in it.
        raise OptionError(f"url: must start with one of {known}")
    if "mysql" in scheme or "mariadb" in scheme:
        raise OptionError(f"url: {scheme}:// is not supported; only PostgreSQL and SQLite databases are")
    if scheme not in REDIS + DATABASES:
        raise OptionError(f"url: {scheme}:// is not one of {known}")
    if scheme in DATABASES:
        if prefix:
            raise OptionError("keyPrefix: only Redis has a key prefix; remove the option for a database")
        from .aliases import alias_of

        alias = alias_of(url)
        # Only now: its models want Django to be set up.
        from .databases import UrlDatabase

        return UrlDatabase(database=alias, policies=policies or None)
    from djqueue.storage.redis import RedisStorage

    try:
        return RedisStorage(url=url, prefix=prefix, policies=policies)
    except StorageError as error:
        raise OptionError(f"url: {error}") from None


def staging_of(storage: Storage) -> Staging:
    """Where jobs can be put aside. Raises OptionError if there is no such place."""
    if storage.capabilities.staging is None:
        raise OptionError(f"url: {storage.describe()} does not support bulk writes")
    return storage.capabilities.staging
