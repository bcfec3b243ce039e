"""Diagnose the database, its tables and the scheduler."""

from collections.abc import Iterator
from typing import Any

from django.db import connections
from django.db.models import Model

from djqueue import models
from djqueue.core.diagnostics import BAD, OK, WARN, DiagnosticLine, size, workers_line
from djqueue.core.durations import to_milliseconds
from djqueue.storage.tables.inspector import DatabaseInspector

from .journal import BACKLOG
from .lease import NAME

LATE = 10_000
"""Milliseconds without activity after which a component is considered stuck."""


def of_database(alias: str, now: int) -> list[DiagnosticLine]:
    """Return the facts that every process can read."""
    return [*_server(alias), *_scheduler(alias, now), *_tables(alias), workers_line(_workers(alias, now))]


def of_journal(backlog: int, flushed_at: int | None, ticked_at: int | None, now: int) -> list[DiagnosticLine]:
    """Return the facts that only the scheduler has: unwritten jobs, and its last write and sweep."""
    level = BAD if backlog > BACKLOG else WARN if backlog > BACKLOG // 2 else OK
    note = "Enqueue calls wait until the database has caught up." if backlog > BACKLOG else ""
    return [
        DiagnosticLine("journal.backlog", "Journal", "Unwritten jobs", f"{backlog:,}", level, note),
        _ago("journal.flushed", "Journal", "Last write", flushed_at, now),
        _ago("scheduler.tick", "Scheduler", "Last sweep", ticked_at, now),
    ]


def _ago(key: str, group: str, label: str, at: int | None, now: int) -> DiagnosticLine:
    if at is None:
        return DiagnosticLine(key, group, label, "not yet")
    seconds = max(0, now - at) / 1_000
    is_late = now - at > LATE
    value = "just now" if seconds < 1 else f"{seconds:.1f} s ago"
    return DiagnosticLine(key, group, label, value, BAD if is_late else OK)


def _server(alias: str) -> Iterator[DiagnosticLine]:
    connection: Any = connections[alias]
    connection.ensure_connection()
    version = ".".join(map(str, connection.get_database_version()))
    yield DiagnosticLine("server.version", "Server", "Version", f"{connection.display_name} {version}")
    if connection.vendor == "sqlite":
        pages, length = (_one(alias, f"PRAGMA {word}") for word in ("page_count", "page_size"))
        yield DiagnosticLine("server.size", "Server", "File size", size(pages * length))
        mode = str(_one(alias, "PRAGMA journal_mode"))
        is_slow = mode not in ("wal", "memory")
        note = "Reads and writes block each other. The scheduler enables WAL mode when started."
        yield DiagnosticLine(
            "server.journal_mode",
            "Server",
            "Journal mode",
            mode,
            WARN if is_slow else OK,
            note if is_slow else "",
        )
    elif connection.vendor == "postgresql":
        yield DiagnosticLine(
            "server.size",
            "Server",
            "Database size",
            size(_one(alias, "SELECT pg_database_size(current_database())")),
        )


def _scheduler(alias: str, now: int) -> Iterator[DiagnosticLine]:
    row = models.SchedulerLease.objects.using(alias).filter(name=NAME).first()
    if row is None or (to_milliseconds(row.expires_at) or 0) <= now:
        note = "Jobs are accepted but not run: start a worker with `manage.py runworkers`."
        yield DiagnosticLine("scheduler.holder", "Scheduler", "Process", "not running", BAD, note)
        return
    who = f"process {row.pid} on {row.host.partition('/')[0]}"
    yield DiagnosticLine("scheduler.holder", "Scheduler", "Process", who)
    yield DiagnosticLine("scheduler.address", "Scheduler", "Address", row.address or "none yet")
    yield _ago("scheduler.lease", "Scheduler", "Lease renewed", to_milliseconds(row.renewed_at), now)


def _tables(alias: str) -> Iterator[DiagnosticLine]:
    known = [kind for kind in vars(models).values() if isinstance(kind, type) and issubclass(kind, Model)]
    kinds = [kind for kind in known if kind._meta.managed]
    for table in sorted(kind._meta.db_table for kind in kinds):
        rows, length = _estimate(alias, table)
        if rows is None and length is None:
            continue
        parts = [f"about {rows:,} rows"] if rows is not None else []
        parts += [size(length)] if length is not None else []
        yield DiagnosticLine(f"tables.{table}", "Tables", table, ", ".join(parts))


def _estimate(alias: str, table: str) -> tuple[int | None, int | None]:
    """Return the planner's estimate of rows, and the bytes including indexes; None if unknown."""
    connection: Any = connections[alias]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(
                "SELECT reltuples::bigint, pg_total_relation_size(oid) "
                "FROM pg_class WHERE oid = to_regclass(%s)",
                [connection.ops.quote_name(table)],
            )
            found = cursor.fetchone()
            return (None, None) if found is None else (max(0, found[0]), found[1])
        if connection.vendor == "sqlite":
            cursor.execute("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'")
            if cursor.fetchone():
                cursor.execute("SELECT stat FROM sqlite_stat1 WHERE tbl = %s LIMIT 1", [table])
                found = cursor.fetchone()
                return (None if found is None else int(found[0].split()[0])), None
    return None, None


def _workers(alias: str, now: int) -> int:
    return len(DatabaseInspector(alias).workers(now))


def _one(alias: str, statement: str) -> Any:
    with connections[alias].cursor() as cursor:
        cursor.execute(statement)
        return cursor.fetchone()[0]
