"""Diagnostics of the database and its tables."""

from collections.abc import Iterator
from typing import Any

from django.db import connections

from djqueue.core.diagnostics import BAD, OK, WARN, DiagnosticLine, Diagnostics, size, workers_line

from . import queues
from .transaction import Tx

OLD = 60_000
"""Age in milliseconds of an open transaction from which it slows claims down."""
BACKLOG = 100_000
"""New rows of tallies above which sweeps seem to be missing."""
HORIZON = (
    "SELECT CAST(extract(epoch FROM clock_timestamp() - MIN(xact_start)) * 1000 AS bigint) "
    "FROM pg_stat_activity WHERE datname = current_database() AND backend_xmin IS NOT NULL "
    "AND pid <> pg_backend_pid()"
)
"""Age of the oldest visible transaction whose snapshot keeps VACUUM from removing dead rows."""
ESTIMATES = (
    "SELECT c.relname, CAST(c.reltuples AS bigint), pg_total_relation_size(c.oid), s.n_dead_tup "
    "FROM pg_class c LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid "
    "WHERE c.relkind = 'r' AND c.relname LIKE 'djqueue\\_%' AND pg_table_is_visible(c.oid) ORDER BY c.relname"
)


def diagnose(tx: Tx) -> Diagnostics:
    """Describe the database, its tables and workers."""
    lines = [
        DiagnosticLine("storage.where", "Storage", "Location", tx.storage.describe()),
        DiagnosticLine("storage.queues", "Storage", "Queues", f"{len(queues.names(tx)):,}"),
        *_server(tx),
        _sweeps(tx),
        *_tables(tx),
        workers_line(len(tx.storage.workers.alive(tx))),
    ]
    return Diagnostics("database", tx.now, lines)


def _server(tx: Tx) -> Iterator[DiagnosticLine]:
    connection: Any = connections[tx.storage.alias]
    version = ".".join(map(str, connection.get_database_version()))
    yield DiagnosticLine("server.version", "Server", "Version", f"{connection.display_name} {version}")
    if tx.dialect.has_clock:
        length = tx.value("SELECT pg_database_size(current_database())")
        yield DiagnosticLine("server.size", "Server", "Database size", size(length))
        yield _horizon(tx.value(HORIZON) or 0)
        return
    pages, length = tx.value("PRAGMA page_count"), tx.value("PRAGMA page_size")
    yield DiagnosticLine("server.size", "Server", "File size", size(pages * length))
    mode = str(tx.value("PRAGMA journal_mode"))
    note = "" if mode in ("wal", "memory") else "Reads and writes block each other; use WAL mode."
    yield DiagnosticLine("server.journal_mode", "Server", "Journal mode", mode, WARN if note else OK, note)


def _horizon(age: int) -> DiagnosticLine:
    note = "" if age < OLD else "While it is open, VACUUM cannot remove the rows of ended jobs."
    shown = f"{age / 1_000:.0f} s"
    return DiagnosticLine(
        "server.oldest_snapshot", "Server", "Oldest snapshot", shown, WARN if note else OK, note
    )


def _sweeps(tx: Tx) -> DiagnosticLine:
    """Return how many changes the next sweep has to add up."""
    counted = "SELECT COUNT(*) FROM (SELECT 1 FROM djqueue_tally LIMIT ?) new"
    rows = tx.value(counted, BACKLOG + 1)
    note = "" if rows <= BACKLOG else "Nothing sweeps: start a worker with `manage.py runworkers`."
    value = f"{rows:,}" if rows <= BACKLOG else f"more than {BACKLOG:,}"
    return DiagnosticLine("sweep.backlog", "Sweep", "Changes to add up", value, BAD if note else OK, note)


def _tables(tx: Tx) -> Iterator[DiagnosticLine]:
    if tx.dialect.has_clock:
        for table, rows, length, dead in tx.rows(ESTIMATES):
            value = f"about {max(0, rows):,} rows, {size(length)}"
            if dead:
                value += f", about {dead:,} dead rows"
            yield DiagnosticLine(f"tables.{table}", "Tables", table, value)
        return
    if tx.row("SELECT 1 FROM sqlite_master WHERE name = 'sqlite_stat1'") is None:
        return
    estimates = (
        "SELECT tbl, stat FROM sqlite_stat1 WHERE tbl LIKE 'djqueue%' AND stat IS NOT NULL ORDER BY tbl"
    )
    found = {table: int(stat.split()[0]) for table, stat in tx.rows(estimates)}
    for table, rows in found.items():
        yield DiagnosticLine(f"tables.{table}", "Tables", table, f"about {rows:,} rows")
