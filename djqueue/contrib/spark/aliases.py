"""Find or add the Django database alias for a URL, in processes with or without a project."""

import math
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

import django
from django.apps import apps
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from djqueue.core.errors import OptionError
from djqueue.core.messages import in_one_line

from .project import has_project
from .timeouts import NO_TIMEOUTS, Timeouts, timeouts_in

POSTGRESQL, SQLITE = "django.db.backends.postgresql", "django.db.backends.sqlite3"
VENDORS = {POSTGRESQL: "postgresql", SQLITE: "sqlite"}
SQLITE_PATIENCE, CONNECT_TIMEOUT = 60, 10
"""Seconds that a task waits: for other writers of an SQLite file; for a connection to a server."""
SETTINGS_BY_PARAMETER = {"host": "HOST", "port": "PORT", "user": "USER", "dbname": "NAME"}
"""Django settings by the libpq parameters that may follow the `?`."""
COMPARED = ("NAME", "USER", "PASSWORD", "HOST", "PORT")

_lock = threading.Lock()
_added: dict[str, dict[str, Any]] = {}
"""Settings of the added aliases."""


def alias_of(url: str, timeouts: Timeouts = NO_TIMEOUTS) -> str:
    """Return the project's alias for a database, or add one named by the URL without its credentials.

    With time limits, an alias is added in any case.

    Raises:
        OptionError: The URL is invalid, or its database driver is missing.
    """
    wanted = parse(url, timeouts)
    with _lock:
        _set_up()
        alias = _project_alias(wanted) if timeouts == NO_TIMEOUTS else None
        if alias is None:
            alias = _add(wanted)
    try:
        connections[alias]
    except ImproperlyConfigured as error:
        reason = in_one_line(error)
        raise OptionError(
            f"url: {location_of(wanted)} needs psycopg: pip install psycopg[binary] ({reason})"
        ) from None
    return alias


def is_added(alias: str) -> bool:
    """Return whether an alias was added here rather than configured by the project."""
    return alias in _added


def parse(url: str, timeouts: Timeouts = NO_TIMEOUTS) -> dict[str, Any]:
    """Convert a URL to an entry of `DATABASES`. Raises OptionError, without the URL's password."""
    url, in_url = timeouts_in(url)
    parts = _split(url)
    if parts.fragment:
        raise OptionError("url: percent-encode # as %23")
    wanted = _parse_sqlite(parts) if parts.scheme.lower() == "sqlite" else _parse_postgresql(parts)
    _limit(wanted, timeouts.over(in_url))
    return wanted


def location_of(wanted: dict[str, Any]) -> str:
    """Return a URL without user, password and options, for messages."""
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
    for name, _ in parse_qsl(parts.query, keep_blank_values=True):
        raise OptionError(f"url: SQLite supports only the parameter timeout; got {name!r}")
    return {
        "ENGINE": SQLITE,
        "NAME": path,
        "USER": "",
        "PASSWORD": "",
        "HOST": "",
        "PORT": "",
        "OPTIONS": options,
    }


def _split(url: str) -> SplitResult:
    with suppress(ValueError):  # Its message may quote a part of the password, so it is no context either.
        parts = urlsplit(url)
        _ = parts.port
        return parts
    raise OptionError(
        "url: the port is not a number; percent-encode special characters in the password (a slash as %2F)"
    )


def _parse_postgresql(parts: SplitResult) -> dict[str, Any]:
    wanted: dict[str, Any] = {
        "ENGINE": POSTGRESQL,
        "NAME": unquote(parts.path.removeprefix("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": str(parts.port or ""),
        "OPTIONS": {"connect_timeout": CONNECT_TIMEOUT},
    }
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name == "password":
            raise OptionError("url: put the password before the host: postgresql://user:password@host/name")
        if name in SETTINGS_BY_PARAMETER:
            wanted[SETTINGS_BY_PARAMETER[name]] = value
        else:
            wanted["OPTIONS"][name] = value
    if not wanted["NAME"]:
        raise OptionError(
            "url: the database name is missing; expected postgresql://user:password@host:port/name"
        )
    return wanted


def _limit(wanted: dict[str, Any], timeouts: Timeouts) -> None:
    """Set the time limits of a database's connections."""
    call, socket, options = *timeouts, wanted["OPTIONS"]
    if wanted["ENGINE"] == SQLITE:
        if socket is not None:
            raise OptionError("socketTimeout: SQLite uses no connections to a server: remove it")
        if call is not None:
            options["timeout"] = call
        return
    if call is not None:
        limit = f"-c statement_timeout={max(1, round(call * 1_000))}"
        options["options"] = f"{options.get('options', '')} {limit}".strip()
    if socket is not None:
        options["connect_timeout"] = math.ceil(socket)
        options["tcp_user_timeout"] = max(1, round(socket * 1_000))


def _set_up() -> None:
    """Set up Django, with the project's settings if available."""
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


def _project_alias(wanted: dict[str, Any]) -> str | None:
    engine = wanted["ENGINE"]
    for alias, configured in connections.settings.items():
        is_same = alias not in _added and _compared(configured, engine) == _compared(wanted, engine)
        if is_same and connections[alias].vendor == VENDORS[engine]:
            return str(alias)
    return None


def _compared(configured: dict[str, Any], engine: str) -> tuple[str, ...]:
    values = {name: str(configured.get(name) or "") for name in COMPARED}
    if engine == SQLITE:
        return (os.path.realpath(values["NAME"]),)
    return (*(values[name] for name in COMPARED[:-1]), values["PORT"] or "5432")


def _add(wanted: dict[str, Any]) -> str:
    location = location_of(wanted)
    alias, number = location, 1
    while _added.get(alias, wanted) != wanted:
        number += 1
        alias = f"{location} ({number})"
    if alias not in _added:
        _added[alias] = wanted
        connections.settings[alias] = connections.configure_settings({"default": {}, alias: dict(wanted)})[
            alias
        ]
    return alias
