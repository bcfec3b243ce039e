"""Locks that keep djqueue's tables from being written: who holds them."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

from django.db import connections

from djqueue.core import procfs
from djqueue.core.overview import Finding

WHOLE_TABLE = ["AccessExclusiveLock", "ExclusiveLock", "ShareRowExclusiveLock", "ShareLock"]
"""Modes of PostgreSQL's locks that keep all others from writing to a table."""
LOCKED_FOR = 10.0
"""Seconds after which a lock that keeps all others from writing is a problem."""
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


def locked_tables(
    rows: Callable[[str, list[str]], Iterable[tuple[Any, ...]]], locked_for: float = LOCKED_FOR
) -> Iterator[Finding]:
    """Yield the sessions of PostgreSQL that keep others from writing for long.

    Args:
        rows: Returns the rows of a statement, in which `?` is a parameter.
        locked_for: Seconds after which that is a problem.
    """
    seen = set()
    for table, pid, application, state, seconds in rows(LOCKS, WHOLE_TABLE):
        if seconds >= locked_for and pid not in seen:
            seen.add(pid)
            about = ", ".join(filter(None, (application, state)))
            yield problem(
                f"the table {table} has been locked for {float(seconds):.0f} s by the session {pid}"
                + (f" ({about})" if about else ""),
                f"End its transaction, or the session: SELECT pg_terminate_backend({pid})",
            )


def locked_file(alias: str) -> Iterator[Finding]:
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
    yield problem(
        f"the database {alias!r} is locked{by}, and nothing has been written for {seconds:.0f} s",
        "End the transaction that writes, or its process.",
    )


def problem(text: str, remedy: str) -> Finding:
    """Return a finding of the health check of the storage."""
    return Finding("health.storage", "error", text, remedy)
