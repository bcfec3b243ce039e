"""The probe of the health checks: whether the tables can be written, and who has locked them."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress

from django.db import connections

from djqueue.core import procfs
from djqueue.core.errors import StorageUnavailableError
from djqueue.core.overview import Finding
from djqueue.storage.tables.dberrors import LOCKED

from .dialects import WHOLE_TABLE
from .transaction import Database, Tx

LOCKED_FOR = 10.0
"""Seconds after which a lock that keeps all others from writing is a problem."""
WRITE = (
    "INSERT INTO djqueue_observed (name, until) VALUES ('', 0) "
    "ON CONFLICT (name) DO UPDATE SET until = excluded.until"
)
"""Writes a row that has no effect, and that a sweep removes."""
LOCKS = """
    SELECT k.name, k.pid, a.application_name, a.state, COALESCE(
        k.waited, EXTRACT(EPOCH FROM clock_timestamp() - a.xact_start), (
            SELECT MAX(EXTRACT(EPOCH FROM clock_timestamp() - w.waitstart))
            FROM pg_locks w WHERE NOT w.granted AND w.relation = k.relation
        ), 0
    ) AS seconds
    FROM (
        SELECT l.relation, c.relname AS name,
            CASE WHEN l.granted THEN l.pid ELSE (pg_blocking_pids(l.pid))[1] END AS pid,
            CASE WHEN NOT l.granted THEN EXTRACT(EPOCH FROM clock_timestamp() - l.waitstart) END AS waited
        FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
        WHERE l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
            AND left(c.relname, 8) = 'djqueue_' AND l.pid <> pg_backend_pid()
            AND l.mode = ANY(?)
    ) k LEFT JOIN pg_stat_activity a ON a.pid = k.pid
    ORDER BY seconds DESC
"""
"""Tables of djqueue that cannot be written, because a session has locked them, or waits for a lock of the
whole table behind another session."""
WRITE_BYTE = 120
"""Byte of the file DATABASE-shm that SQLite locks while a transaction writes."""


def probe(database: Database) -> list[Finding]:
    """Write to the tables. Return the locks that are held for long; raise what an enqueue would raise."""
    if database.dialect.has_clock:
        found = list(_locked_tables(database))
        if not found:
            database.write(_write)
        return found
    try:
        database.write(_write)
    except StorageUnavailableError as error:
        if not LOCKED.search(str(error.__cause__)):
            raise
        return list(_locked_file(database.alias))
    return []


def _write(tx: Tx) -> None:
    tx.run(WRITE)


def _locked_tables(database: Database) -> Iterator[Finding]:
    seen = set()
    locks = database.read(lambda tx: tx.rows(LOCKS, WHOLE_TABLE), is_single=True)
    for table, pid, application, state, seconds in locks:
        if seconds >= LOCKED_FOR and pid not in seen:
            seen.add(pid)
            about = ", ".join(filter(None, (application, state)))
            yield _locked(
                f"the table {table} has been locked for {float(seconds):.0f} s by the session {pid}"
                + (f" ({about})" if about else ""),
                f"End its transaction, or the session: SELECT pg_terminate_backend({pid})",
            )


def _locked_file(alias: str) -> Iterator[Finding]:
    """Yield that SQLite is locked, if nothing has been written for long: workers write every few seconds."""
    path = str(connections[alias].settings_dict["NAME"])
    written = []
    for name in (path, f"{path}-wal"):
        with suppress(FileNotFoundError):
            written.append(os.stat(name).st_mtime)
    # The system's times of files, by the system's clock.
    seconds = time.time_ns() / 1e9 - max(written, default=0)
    if seconds < LOCKED_FOR:
        return
    holders = procfs.lock_holders(f"{path}-shm", WRITE_BYTE) or procfs.lock_holders(path)
    by = f" by the process {' and '.join(holders)}" if holders else ""
    yield _locked(
        f"the database {alias!r} is locked{by}, and nothing has been written for {seconds:.0f} s",
        "End the transaction that writes, or its process.",
    )


def _locked(text: str, remedy: str) -> Finding:
    return Finding("health.storage", "error", text, remedy)
