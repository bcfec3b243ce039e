"""Django's alias of the database that a URL names, in a process that may have no project."""

import os
import threading
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import django
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from djqueue.core.errors import OptionError
from djqueue.core.shown import in_one_line

from .project import has_project

POSTGRESQL, SQLITE = "django.db.backends.postgresql", "django.db.backends.sqlite3"
VENDORS = {POSTGRESQL: "postgresql", SQLITE: "sqlite"}
SQLITE_PATIENCE, CONNECT_TIMEOUT = 60, 10
"""Seconds for which a task waits: while others write to its SQLite; for a server."""
PLACES = {"host": "HOST", "port": "PORT", "user": "USER", "dbname": "NAME"}
"""What may be said behind the `?` instead, as libpq has it."""
COMPARED = ("NAME", "USER", "PASSWORD", "HOST", "PORT")

_lock = threading.Lock()
_added: dict[str, dict[str, Any]] = {}
"""What was said of aliases that are no project's."""


def alias_of(url: str) -> str:
    """The project's alias of a database, if it has one; else a further one, named by the URL without secrets.

    Raises OptionError.
    """
    wanted = parse(url)
    with _lock:
        _set_up()
        alias = _of_project(wanted)
        if alias is None:
            alias = _add(wanted)
    try:
        connections[alias]
    except ImproperlyConfigured as error:
        reason = in_one_line(error)
        raise OptionError(
            f"url: {place_of(wanted)} needs psycopg: pip install psycopg[binary] ({reason})"
        ) from None
    return alias


def is_added(alias: str) -> bool:
    """Whether an alias is no project's."""
    return alias in _added


def parse(url: str) -> dict[str, Any]:
    """What Django's `DATABASES` would say. Raises OptionError, without the URL's password."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise OptionError(
            "url: the port is not a number; percent-encode special characters in the password (a slash "
            "as %2F)"
        ) from None
    if parts.fragment:
        raise OptionError("url: percent-encode # as %23")
    if parts.scheme.lower() == "sqlite":
        return _parse_sqlite(parts)
    return _parse_postgresql(parts, port)


def place_of(wanted: dict[str, Any]) -> str:
    """Where a database is, for messages: a URL without user, password and options."""
    if wanted["ENGINE"] == SQLITE:
        return f"sqlite://{wanted['NAME']}"
    host = f"[{wanted['HOST']}]" if ":" in wanted["HOST"] else wanted["HOST"]
    port = f":{wanted['PORT']}" if wanted["PORT"] else ""
    return f"postgresql://{host}{port}/{wanted['NAME']}"


def _parse_sqlite(parts: SplitResult) -> dict[str, Any]:
    path = "/" + unquote(parts.path).lstrip("/")
    if parts.netloc or path in ("/", "/:memory:"):
        raise OptionError("url: SQLite requires an absolute path, such as sqlite:///srv/shop/db.sqlite3")
    if not Path(path).is_file():
        raise OptionError(
            f"url: the file {path} does not exist on this machine; with SQLite, the driver and executors "
            "must run on one machine"
        )
    options: dict[str, Any] = {"timeout": SQLITE_PATIENCE, "transaction_mode": "IMMEDIATE"}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name != "timeout" or not value.isdecimal():
            raise OptionError(
                f"url: SQLite supports only the parameter timeout, in whole seconds; got {name!r}"
            )
        options["timeout"] = int(value)
    return {
        "ENGINE": SQLITE,
        "NAME": path,
        "USER": "",
        "PASSWORD": "",
        "HOST": "",
        "PORT": "",
        "OPTIONS": options,
    }


def _parse_postgresql(parts: SplitResult, port: int | None) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        "ENGINE": POSTGRESQL,
        "NAME": unquote(parts.path.removeprefix("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": str(port or ""),
        "OPTIONS": {"connect_timeout": CONNECT_TIMEOUT},
    }
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "password":
            raise OptionError("url: put the password before the host: postgresql://user:password@host/name")
        if name in PLACES:
            wanted[PLACES[name]] = value
        else:
            wanted["OPTIONS"][name] = value
    if not wanted["NAME"]:
        raise OptionError(
            "url: the database name is missing; expected postgresql://user:password@host:port/name"
        )
    return wanted


def _set_up() -> None:
    """Have Django ready, with the project's settings if there are such."""
    if not settings.configured and not has_project():
        settings.configure(
            INSTALLED_APPS=["djqueue", "djqueue.contrib.spark"],
            DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
            USE_TZ=True,
            TIME_ZONE="UTC",
            LOGGING_CONFIG=None,
        )
    if not apps.ready:
        django.setup()
    if not apps.is_installed("djqueue"):
        raise OptionError("url: the Django settings of this process do not have djqueue in INSTALLED_APPS")


def _of_project(wanted: dict[str, Any]) -> str | None:
    engine = wanted["ENGINE"]
    for alias, said in connections.settings.items():
        is_same = alias not in _added and _compared(said, engine) == _compared(wanted, engine)
        if is_same and connections[alias].vendor == VENDORS[engine]:
            return str(alias)
    return None


def _compared(said: dict[str, Any], engine: str) -> tuple[str, ...]:
    found = {name: str(said.get(name) or "") for name in COMPARED}
    if engine == SQLITE:
        return (os.path.realpath(found["NAME"]),)
    return (*(found[name] for name in COMPARED[:-1]), found["PORT"] or "5432")


def _add(wanted: dict[str, Any]) -> str:
    place = place_of(wanted)
    alias, number = place, 1
    while _added.get(alias, wanted) != wanted:
        number += 1
        alias = f"{place} ({number})"
    if alias not in _added:
        _added[alias] = wanted
        connections.settings[alias] = connections.configure_settings({"default": {}, alias: dict(wanted)})[
            alias
        ]
    return alias
