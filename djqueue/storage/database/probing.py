"""The probe of the health checks: whether the tables can be written, and who has locked them."""

from djqueue.core.errors import StorageUnavailableError
from djqueue.core.overview import Finding
from djqueue.storage.tables.dberrors import LOCKED
from djqueue.storage.tables.locks import locked_file, locked_tables

from .transaction import Database, Tx

WRITE = (
    "INSERT INTO djqueue_observed (name, until) VALUES ('', 0) "
    "ON CONFLICT (name) DO UPDATE SET until = excluded.until"
)
"""Writes a row that has no effect, and that a sweep removes."""


def probe(database: Database) -> list[Finding]:
    """Write to the tables. Return the locks that are held for long; raise what an enqueue would raise."""
    if database.dialect.has_clock:
        found = list(locked_tables(lambda *lock: database.read(lambda tx: tx.rows(*lock), is_single=True)))
        if not found:
            database.write(_write)
        return found
    try:
        database.write(_write)
    except StorageUnavailableError as error:
        if not LOCKED.search(str(error.__cause__)):
            raise
        return list(locked_file(database.alias))
    return []


def _write(tx: Tx) -> None:
    tx.run(WRITE)
