"""Makes databases as the former storage left them: its tables, and 205 jobs that it wrote, of every state.

`former.json` has the rows, and what the former storage did with them afterwards: it claimed jobs in `order`,
each as soon as possible, for three minutes; then it had `counts`.
"""

import json
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.db import DEFAULT_DB_ALIAS, connections
from django.db.migrations.operations import CreateModel
from django.db.migrations.recorder import MigrationRecorder
from django.db.migrations.state import ProjectState
from django.db.utils import ConnectionHandler

from .migrations.former import Migration

FORMER: dict[str, Any] = json.loads((Path(__file__).parent / "former.json").read_text())
ALIAS = DEFAULT_DB_ALIAS
KEYED = ("djqueue_job", "djqueue_job_result", "djqueue_dead_letter", "djqueue_job_attempt", "djqueue_job_log")
"""Tables whose rows belong to a queue and are multiplied."""


@contextmanager
def using(settings: dict[str, Any]) -> Iterator[None]:
    """Use another database as the default one."""
    usual, connection = connections.databases[ALIAS], connections[ALIAS]
    connections.databases[ALIAS] = ConnectionHandler({ALIAS: settings}).settings[ALIAS]
    del connections[ALIAS]
    try:
        yield
    finally:
        connections[ALIAS].close()
        connections.databases[ALIAS] = usual
        connections[ALIAS] = connection


def make_former(times: int = 1) -> None:
    """Make the tables in an empty database, with the jobs in this many copies of their queues."""
    connection = connections[ALIAS]
    with connection.schema_editor() as editor:
        Migration("0001_initial", "djqueue").apply(ProjectState(), editor)
    MigrationRecorder(connection).record_applied("djqueue", "0001_initial")
    call_command("migrate", "djqueue_spark", verbosity=0)
    models = [one for one in Migration.operations if isinstance(one, CreateModel)]
    kinds = {
        one.options["db_table"]: {name: field.get_internal_type() for name, field in one.fields}
        for one in models
        if "db_table" in one.options
    }
    with connection.cursor() as cursor:
        for table, found in FORMER["tables"].items():
            names = found["columns"]
            rows = [
                [_value(kinds[table], *pair) for pair in zip(names, row, strict=True)]
                for row in found["rows"]
            ]
            columns = ", ".join(f'"{name}"' for name in names)
            cursor.executemany(
                f"INSERT INTO {table} ({columns}) VALUES ({', '.join(['%s'] * len(names))})", rows
            )
            if connection.vendor == "postgresql" and "id" in names:
                cursor.execute(
                    f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), (SELECT max(id) FROM {table}))"
                )
            columns = ", ".join(f'"{name}"' for name in names if name not in ("id", "queue"))
            for number in range(1, times if table in KEYED else 1):
                cursor.execute(
                    f"INSERT INTO {table} (queue, {columns}) SELECT queue || %s, {columns} FROM {table} "
                    f"WHERE id <= %s ORDER BY id",
                    [f"-{number}", max(row[names.index("id")] for row in rows)],
                )


def _value(kinds: dict[str, str], name: str, value: Any) -> Any:
    if isinstance(value, dict):
        return b64decode(value["b"])
    if kinds[name] == "DurationField" and connections[ALIAS].vendor == "postgresql" and value is not None:
        return timedelta(microseconds=value)
    return bool(value) if kinds[name] == "BooleanField" else value
