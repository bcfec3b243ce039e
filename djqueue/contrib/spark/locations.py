"""Create the storage that a URL points to, in any process, without a Django project.

A URL may refer to an environment variable or a file with the URL, which each process resolves by itself, so
that no plan, log or command line shows a password.
"""

import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from djqueue.core.errors import ConfigurationError, OptionError
from djqueue.core.policies import QueuePolicy
from djqueue.storage.base import Storage
from djqueue.storage.staging import Staging

from .options import camel
from .packages import check_packages
from .timeouts import NO_TIMEOUTS, Timeouts, timeouts_in

ENVIRONMENT, FILE = "env:", "file:"
REFERENCES = {"env": "the name of an environment variable", "file": "the path of a file"}
REMEDY = (
    "use url=env:NAME, an environment variable of the driver and the executors, or url=file:/path, a file on "
    "their machines"
)
"""Ways to keep a password out of a URL."""
REDIS = ("redis", "rediss", "unix", "redis+cluster", "rediss+cluster", "redis+sentinel", "rediss+sentinel")
DATABASES = ("postgresql", "postgres", "sqlite")
SETTING = re.compile(r"(URL|CONNECTION):? ")
"""The name of a setting at the start of an error; here, it is the option `url`."""
LIMIT = re.compile(r"(TIMEOUT|SOCKET_TIMEOUT):")
"""The name of a time limit at the start of an error."""


def storage_at(
    url: str,
    prefix: str = "",
    policies: Mapping[str, QueuePolicy] | None = None,
    timeouts: Timeouts = NO_TIMEOUTS,
) -> Storage:
    """Return a new storage, which the caller must close.

    Args:
        url: The address, or a reference to it; see docs/spark-reference.md.
        prefix: The key prefix of a Redis storage.
        policies: Known policies by queue.
        timeouts: Time limits, which take precedence over those in the URL.

    Raises:
        OptionError: The URL is invalid. The message does not contain its password.
        ConfigurationError: This process lacks a package.
    """
    url = resolved(url)
    scheme, sign, _ = url.lower().partition("://")
    known = ", ".join([*(f"{one}://" for one in REDIS + DATABASES), "env:", "file:"])
    if not sign or not scheme:
        # Don't echo the URL: it may contain a password.
        raise OptionError(f"url: must start with one of {known}")
    if "mysql" in scheme or "mariadb" in scheme:
        raise OptionError(f"url: {scheme}:// is not supported; only PostgreSQL and SQLite databases are")
    if scheme not in REDIS + DATABASES:
        raise OptionError(f"url: {scheme}:// is not one of {known}")
    url, in_url = timeouts_in(url)
    timeouts = timeouts.over(in_url)
    if scheme in DATABASES:
        if prefix:
            raise OptionError("keyPrefix: only Redis has a key prefix; remove the option for a database")
        try:
            from .aliases import alias_of
        except ModuleNotFoundError as error:
            raise OptionError(
                f"url: a database needs Django on the driver and every executor: pip install Django ({error})"
            ) from None

        alias = alias_of(url, timeouts)
        # Import late: the models require Django to be set up.
        from .databases import UrlDatabase

        return UrlDatabase(database=alias, policies=policies or None)
    if "{" in prefix or "}" in prefix:
        raise OptionError(f"keyPrefix: expected a string without braces, got {prefix!r}")
    check_packages("redis", "hiredis", "msgpack")
    from djqueue.storage.redis import RedisStorage

    limits = {"timeout": timeouts.call, "socket_timeout": timeouts.socket}
    given: dict[str, Any] = {name: limit for name, limit in limits.items() if limit is not None}
    try:
        return RedisStorage(url=url, prefix=prefix, policies=policies, **given)
    except ConfigurationError as error:
        if limit := LIMIT.match(str(error)):
            raise OptionError(f"{camel(limit[1].lower())}{str(error)[limit.end(1) :]}") from None
        raise OptionError(f"url: {SETTING.sub('', str(error), count=1)}") from None


def staging_of(storage: Storage) -> Staging:
    """Return the storage's staging area. Raises OptionError if it has none."""
    staging = storage.capabilities.staging
    if staging is None:
        # Import late: executors that write to Redis may lack Django.
        from djqueue.storage import sparktables

        raise OptionError(f"url: {storage.describe()} has no tables for bulk writes: {sparktables.REMEDY}")
    return staging


def resolved(url: str) -> str:
    """Return a URL, or the one that an environment variable (`env:NAME`) or a file (`file:/path`) has.

    Raises:
        OptionError: This process lacks the variable or the file.
    """
    if url.startswith((ENVIRONMENT, FILE)) and "://" in url.partition(":")[2]:
        # Don't echo the URL: it may contain a password.
        kind = url.partition(":")[0]
        raise OptionError(
            f"url: {kind}: is followed by a URL; expected {REFERENCES[kind]}: remove {kind}:, or {REMEDY}"
        )
    if url in (ENVIRONMENT, FILE):
        raise OptionError(f"url: {url} is incomplete; expected {REFERENCES[url[:-1]]}")
    if url.startswith(ENVIRONMENT):
        name = url.removeprefix(ENVIRONMENT)
        target = os.environ.get(name, "").strip()
        if not target:
            raise OptionError(
                f"url: {url}: the environment variable {name!r} is not set in process {os.getpid()} on "
                f"{socket.gethostname()}: set it for the driver and for all executors, before Spark starts"
            )
    elif url.startswith(FILE):
        path = Path(url.removeprefix(FILE).replace("//", "", 1) if url.startswith("file://") else url[5:])
        try:
            target = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(
                f"url: {url}: process {os.getpid()} on {socket.gethostname()} cannot read the file: {error}"
            ) from None
        if not target:
            raise OptionError(f"url: {url}: the file is empty; expected a URL")
    else:
        return url
    if target.startswith((ENVIRONMENT, FILE)):
        raise OptionError(f"url: {url}: has another reference; expected a URL such as redis://…")
    return target


def has_password(url: str) -> bool:
    """Return whether a URL itself has a password."""
    if url.startswith((ENVIRONMENT, FILE)):
        return False
    authority, at, _ = url.partition("://")[2].rpartition("@")
    if at and ":" in authority:
        return True
    try:
        query = urlsplit(url).query
    except ValueError:
        return False
    return "password=" in query.lower()
