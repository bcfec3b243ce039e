"""Compares the tables of an earlier development version, which has its first migration, with this one's."""

from typing import Any

from django.db import connections, models
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.migrations import Migration
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.questioner import MigrationQuestioner
from django.db.migrations.state import ModelState, ProjectState

APP = "djqueue"
DEFINITIONS = {
    "postgresql": "SELECT indexname, indexdef FROM pg_indexes WHERE tablename = %s",
    "sqlite": "SELECT name, coalesce(sql, '') FROM sqlite_schema WHERE type = 'index' AND tbl_name = %s",
}
RENAMED = {"group": "concurrency_key"}
"""Columns of earlier versions that have another name now."""
FORMER_TABLES = {"djqueue_leader_lease": "djqueue_scheduler_lease"}
"""Names that tables had in earlier versions."""
Indexes = dict[str, tuple[list[str], bool]]
"""Columns of indexes, and whether they have a condition, by name."""


class Renames(MigrationQuestioner):
    """Answers that the columns of `RENAMED` keep their values."""

    def ask_rename(self, model_name: str, old_name: str, new_name: str, field_instance: Any) -> bool:
        """Return whether a column got another name."""
        return RENAMED.get(old_name) == new_name


def changes(alias: str) -> tuple[ProjectState, Migration | None]:
    """Compare the tables with the migrations; return the tables as a state, and a migration to apply to it.

    None: the tables are up to date.
    """
    connection = connections[alias]
    loader = MigrationLoader(connection)
    wanted = loader.project_state([node for node in loader.graph.leaf_nodes() if node[0] == APP])
    found = _found(connection, wanted)
    detected = MigrationAutodetector(found, wanted, Renames()).changes(loader.graph, trim_to_apps={APP})
    return found, next(iter(detected.get(APP, ())), None)


def table_name(alias: str, table: str) -> str:
    """Return the name that a table has in a database, which is that of an earlier version until `apply`."""
    return table if table in connections[alias].introspection.table_names() else FORMER_TABLES[table]


def apply(alias: str, state: ProjectState, migration: Migration) -> None:
    """Change the tables: all of them, or none."""
    with connections[alias].schema_editor(atomic=True) as editor:
        migration.apply(state, editor)


def _found(connection: BaseDatabaseWrapper, wanted: ProjectState) -> ProjectState:
    """Return the state of the app's tables, as far as they exist."""
    found = ProjectState()
    with connection.cursor() as cursor:
        tables = set(connection.introspection.table_names(cursor))
        for model in wanted.models.values():
            table = model.options.get("db_table", "")
            if table not in tables:
                table = FORMER_TABLES.get(table, "")
            if not model.options.get("managed", True):
                found.add_model(model.clone())
            elif table in tables:
                columns = connection.introspection.get_table_description(cursor, table)
                names = [column.name for column in columns]
                found.add_model(_model(model, table, names, indexes(connection, cursor, table)))
    return found


def indexes(connection: BaseDatabaseWrapper, cursor: Any, table: str) -> Indexes:
    """Return the indexes of a table, without those of its constraints and of its text keys (`_like`)."""
    cursor.execute(DEFINITIONS[connection.vendor], [table])
    definitions = dict(cursor.fetchall())
    return {
        name: (index["columns"], " WHERE " in definitions[name])
        for name, index in connection.introspection.get_constraints(cursor, table).items()
        if index["index"]
        and not index["unique"]
        and name.startswith(f"{APP}_")
        and not name.endswith("_like")
    }


def _model(wanted: ModelState, table: str, columns: list[str], found: Indexes) -> ModelState:
    """Return a model as its table is; a column or an index that it should not have is only a name."""
    there = wanted.clone()
    there.options["db_table"] = table
    there.fields = {name: field for name, field in wanted.fields.items() if name in columns}
    for name in (name for name in columns if name not in wanted.fields):
        renamed = wanted.fields.get(RENAMED.get(name, ""))
        there.fields[name] = models.TextField(null=True) if renamed is None else renamed
    same = [
        index
        for index in wanted.options["indexes"]
        if found.get(index.name) == (index.fields, index.condition is not None)
    ]
    others = {name: columns for name, (columns, _) in found.items()}
    for index in same:
        del others[index.name]
    there.options["indexes"] = [*same, *(models.Index(fields=one, name=name) for name, one in others.items())]
    return there
