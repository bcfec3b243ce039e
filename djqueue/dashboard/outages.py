"""Responds in time while a database is unreachable: status 503, with the database and the time since when.

Sessions and users are stored in the default database, so no page can show data without it. One request
detects the outage, bounded by a watchdog and by `connect_timeout`. Later requests get the response
immediately until a probe succeeds.

A query sent to a frozen PostgreSQL server has no timeout: `statement_timeout` is the server's, and
`connect_timeout` is over. So the watchdog, a thread of the process, shuts down the socket of such a query at
the page's deadline. The driver then raises OperationalError at once in the thread of the request.

Only the time for which that thread waits counts, as a busy machine is no outage. The circuit breaker opens if
a second page in a row waits in vain, or a connection fails.
"""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any
from urllib.parse import quote

from django.contrib.admin import AdminSite
from django.core.signals import setting_changed
from django.db import DEFAULT_DB_ALIAS, Error, InterfaceError, OperationalError, connections
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.template.loader import render_to_string
from django.template.response import SimpleTemplateResponse
from django.utils.translation import gettext as _

from djqueue.core.clock import SYSTEM_CLOCK
from djqueue.core.deadlines import CircuitBreaker, waiting_within
from djqueue.core.errors import DjqueueError
from djqueue.core.logs import Log
from djqueue.core.messages import in_one_line
from djqueue.core.overview import Finding
from djqueue.core.threads import after_fork, start_daemon
from djqueue.core.units import to_datetime
from djqueue.operations.healthchecks import start_bounded
from djqueue.storage.tables.dberrors import LOCKS, WHOLE_TABLE, locked_tables

logger = Log("djqueue.dashboard")
ACTIVE = 1
"""Transaction status of libpq: a query was sent and its result has not arrived."""
RECHECK_INTERVAL = 0.05
"""Seconds between two checks of a request past its deadline."""
IDLE_TIMEOUT = 30.0
"""Seconds after which the idle thread ends."""
QUERY_TIMEOUT = 1.8
"""Seconds for which a page waits for the answers of a database."""
CONNECT_TIMEOUT = 2
"""Seconds for which a page waits for a connection; libpq does not wait for less."""
PROBE = 1.0
"""Seconds that a probe of an unreachable database may take."""
RETRY_AFTER = 5
"""Seconds after which a browser may retry."""
UNAVAILABLE = "Djq-Unavailable"
"""Header: the storage or a database could not be read, and the part shows the last data."""
NOTICE = "Djq-Notice"
"""Header: the banner of an open page, percent-encoded: which data is stale, why, and since when."""
View = Callable[..., HttpResponseBase]


class QueryWatch:
    """Watches the queries of one thread on its PostgreSQL connections until `release`."""

    def __init__(self, owner: "Watchdog", wrappers: list[Any], seconds: float) -> None:
        self._deadline = waiting_within(seconds)
        self.cut: list[str] = []
        """Aliases of the databases whose connections were shut down."""
        self._owner = owner
        self._wrappers = wrappers

    @property
    def left(self) -> float:
        """Seconds for which the thread may still wait."""
        return self._deadline.left() / 1_000

    def release(self) -> None:
        """Stop watching the thread."""
        self._owner.release(self)

    def end_queries(self) -> None:
        """Shut down each connection that waits for the result of a query."""
        for wrapper in self._wrappers:
            if _shut_down(wrapper):
                self.cut.append(wrapper.alias)


class Watchdog:
    """The watched threads of this process, and the thread that watches them."""

    def __init__(self) -> None:
        self._begin()
        after_fork(self._begin)

    def _begin(self) -> None:
        self._changed = threading.Condition()
        self._watches: set[QueryWatch] = set()
        self._thread: threading.Thread | None = None
        self._next: float = 0
        self._current = threading.local()

    @property
    def has_cut(self) -> bool:
        """Whether a connection of this thread was shut down since its watch began."""
        watch: QueryWatch | None = getattr(self._current, "watch", None)
        return watch is not None and bool(watch.cut)

    @contextmanager
    def within(self, seconds: float) -> Iterator[QueryWatch]:
        """End queries of this thread that are not answered within `seconds`."""
        watch = QueryWatch(self, postgresql_connections(), seconds)
        outer: QueryWatch | None = getattr(self._current, "watch", None)
        self._current.watch = watch
        try:
            if watch._wrappers:
                self._add(watch)
            yield watch
        finally:
            self.release(watch)
            self._current.watch = outer

    def release_current(self) -> None:
        """Stop watching the current thread."""
        watch: QueryWatch | None = getattr(self._current, "watch", None)
        if watch is not None:
            watch.release()

    def release(self, watch: QueryWatch) -> None:
        """End a watch. No connection is shut down for it after this returns."""
        with self._changed:
            self._watches.discard(watch)

    def _add(self, watch: QueryWatch) -> None:
        with self._changed:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = start_daemon("djqueue-query-watchdog", self._run)
            elif _now() + watch.left < self._next:
                self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while True:
                wait, is_idle = IDLE_TIMEOUT, not self._watches
                for watch in self._watches:
                    left = watch.left
                    if left <= 0:
                        watch.end_queries()
                    wait = min(wait, max(RECHECK_INTERVAL, left))
                self._next = _now() + wait
                if not self._changed.wait(wait) and is_idle and not self._watches:
                    self._thread = None
                    return


class DatabaseUnavailableError(Exception):
    """A database does not respond, or its tables are locked."""

    def __init__(self, alias: str, lock: Finding | None = None) -> None:
        super().__init__(alias)
        self.alias = alias
        self.lock = lock


class DatabaseBreakers:
    """A circuit breaker for each database of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._breakers: dict[str, CircuitBreaker] = {}
        self._missed: set[str] = set()

    def missed(self, alias: str) -> bool:
        """Note that a page waited in vain for a database; return whether the page before did, too."""
        with self._lock:
            is_repeated = alias in self._missed
            self._missed.add(alias)
            return is_repeated

    def answered(self, alias: str) -> None:
        """Note that a database answered a page in time."""
        self._missed.discard(alias)

    def of(self, alias: str) -> CircuitBreaker:
        """Return the circuit breaker of a database."""
        breaker = self._breakers.get(alias)
        if breaker is None:
            with self._lock:
                breaker = self._breakers.setdefault(alias, CircuitBreaker())
        return breaker

    def clear(self) -> None:
        """Forget every outage."""
        with self._lock:
            self._breakers.clear()
            self._missed.clear()


def postgresql_connections() -> list[Any]:
    """Return this thread's connections to PostgreSQL, open or not."""
    return [wrapper for wrapper in connections.all() if wrapper.vendor == "postgresql"]


watchdog = Watchdog()
"""The watchdog of this process."""
outages = DatabaseBreakers()
"""The circuit breakers of this process."""


def is_partial(request: HttpRequest) -> bool:
    """Return whether an open page requests its live part."""
    return request.headers.get("HX-Request") == "true"


def answers_without_databases(site: AdminSite, view: View) -> View:
    """Make a view respond with status 503 in time if a PostgreSQL database does not respond."""

    @wraps(view)
    def bounded(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
        return _in_time(site, request, partial(view, request, *args, **kwargs))

    return bounded


def _on_setting_changed(*, setting: str, **_: object) -> None:
    if setting == "DATABASES":
        outages.clear()


setting_changed.connect(_on_setting_changed)


def _shut_down(wrapper: Any) -> bool:
    """Shut down a connection that waits for a result. Called from another thread than the connection's."""
    driver = wrapper.connection
    if driver is None:
        return False
    try:
        if driver.info.transaction_status != ACTIVE:
            return False
        number = driver.fileno()
        copy = socket.socket(fileno=os.dup(number))
    except (OSError, wrapper.Database.Error):
        return False  # closed in the meantime
    with copy:
        try:
            # If the owner closed it before it was duplicated, the number may belong to another file.
            if driver.fileno() != number:
                return False
            copy.shutdown(socket.SHUT_RDWR)
        except (OSError, wrapper.Database.Error):
            return False
    return True


def _now() -> float:
    return SYSTEM_CLOCK.monotonic() / 1_000


def _in_time(site: AdminSite, request: HttpRequest, work: Callable[[], Any]) -> HttpResponseBase:
    watched = [wrapper.alias for wrapper in postgresql_connections()]
    if not watched:
        response: HttpResponseBase = work()
        return response
    try:
        if DEFAULT_DB_ALIAS in watched:
            _probe(DEFAULT_DB_ALIAS)
        with watchdog.within(QUERY_TIMEOUT) as watch:
            try:
                with _connecting_in_time():
                    response = work()
            except (Error, DjqueueError) as error:
                _raise_unavailable(watch.cut, error)
                raise
        if DEFAULT_DB_ALIAS in watch.cut:
            _raise_unavailable(watch.cut, OperationalError("a query was not answered in time"))
        for alias in watched:
            if alias not in watch.cut:
                outages.answered(alias)
    except DatabaseUnavailableError as error:
        return _unavailable(site, request, error)
    if isinstance(response, SimpleTemplateResponse) and not response.is_rendered:
        # Django renders the response later, and reads the user and the messages then.
        render = response.render
        response.__dict__["render"] = partial(_in_time, site, request, render)
    return response


@contextmanager
def _connecting_in_time() -> Iterator[None]:
    """Limit this thread's attempts to connect, unless the project does: a frozen server would not answer."""
    wrappers = [one for one in postgresql_connections() if "pool" not in one.settings_dict["OPTIONS"]]
    for wrapper in wrappers:
        wrapper.get_connection_params = partial(_limited, wrapper.get_connection_params)
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.__dict__.pop("get_connection_params", None)


def _limited(parameters: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return {"connect_timeout": CONNECT_TIMEOUT, **parameters()}


def _probe(alias: str) -> None:
    """Check whether an unreachable database responds again. Raises DatabaseUnavailableError if not."""
    breaker = outages.of(alias)
    if breaker.outage is None:
        return
    if not breaker.enter():
        raise DatabaseUnavailableError(alias)
    try:
        with watchdog.within(PROBE), _connecting_in_time(), connections[alias].cursor() as cursor:
            cursor.execute("SELECT 1")
    except Error as error:
        _note(alias, error)
        raise DatabaseUnavailableError(alias) from error
    except BaseException:
        breaker.gave_up()
        raise
    outage = breaker.outage
    breaker.succeeded()
    if outage is not None:
        logger.info("The database %r responds again; pages show its data.", alias)


def _raise_unavailable(cut: list[str], error: Exception) -> None:
    """Raise DatabaseUnavailableError if an unreachable database caused the error."""
    alias = cut[0] if cut else _broken_alias(error)
    if alias is not None:
        # A connection that was open has waited in vain.
        if connections[alias].connection is not None and (lock := _lock(alias)) is not None:
            connections[alias].close()
            raise DatabaseUnavailableError(alias, lock) from error
        if outages.missed(alias) or not cut:
            _note(alias, error)
        else:
            connections[alias].close()
        raise DatabaseUnavailableError(alias) from error


def _lock(alias: str) -> Finding | None:
    """Return who has locked tables of djqueue in a database that responds; None if it does not respond."""
    found: list[Finding] = []

    def look() -> None:
        with suppress(Error), connections[alias].cursor() as cursor:
            cursor.execute(LOCKS.replace("?", "%s"), [WHOLE_TABLE])
            found.extend(locked_tables(lambda *_: cursor.fetchall(), PROBE))

    with suppress(DjqueueError):  # There is no thread for it.
        start_bounded(look, "djqueue-lock").wait(PROBE)
    return found[0] if found else None


def _broken_alias(error: Exception) -> str | None:
    """Return the alias of the PostgreSQL database whose connection failed with this error."""
    if not isinstance(error, (OperationalError, InterfaceError)):
        return None
    # A failed attempt to connect sets the flag, too.
    failed = (found for found in postgresql_connections() if found.errors_occurred and _is_broken(found))
    return next((wrapper.alias for wrapper in failed), None)


def _is_broken(wrapper: Any) -> bool:
    """Return whether a connection could not be made, or was closed. A failed query closes none."""
    return wrapper.vendor == "postgresql" and (wrapper.connection is None or bool(wrapper.connection.closed))


def _note(alias: str, error: Exception) -> None:
    breaker = outages.of(alias)
    is_new = breaker.outage is None
    breaker.failed(str(error))
    connections[alias].close()
    if is_new:
        logger.warning(
            "The database %r does not respond; pages respond with status 503 until it does: %s",
            alias,
            in_one_line(error),
        )


def _unavailable(site: AdminSite, request: HttpRequest, error: DatabaseUnavailableError) -> HttpResponse:
    """Return the page for an unreachable database, which uses no database, session or user."""
    alias, lock = error.alias, error.lock
    if lock is not None:
        text = _("The database '%(alias)s' responds, but %(problem)s. %(remedy)s.") % {
            "alias": alias,
            "problem": lock.text,
            "remedy": lock.hint,
        }
    else:
        outage = outages.of(alias).outage
        since = f"{to_datetime(SYSTEM_CLOCK.now() if outage is None else outage.since):%H:%M:%S} UTC"
        text = _("The database '%(alias)s' has not responded since %(since)s.") % {
            "alias": alias,
            "since": since,
        }
    for name in ("session", "_messages"):
        # Otherwise the middleware of sessions and messages would write to the database.
        request.__dict__.pop(name, None)
    if is_partial(request):
        response = HttpResponse(status=204)
        response[UNAVAILABLE] = "1"
        response[NOTICE] = quote(text)
    else:
        context = {
            "text": text,
            "retry_after": RETRY_AFTER,
            "site_header": site.site_header,
            "csp_nonce": str(getattr(request, "csp_nonce", "")),
        }
        response = HttpResponse(
            render_to_string("djqueue/dashboard/database_unavailable.html", context), status=503
        )
    response["Retry-After"] = str(RETRY_AFTER)
    response["Cache-Control"] = "no-store"
    return response
