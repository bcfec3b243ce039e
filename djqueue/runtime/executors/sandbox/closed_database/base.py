"""The module that Django loads as the backend."""

from typing import Any, NoReturn

from django.db.backends.dummy import base


class _Closed:
    """A part of the backend that refuses to work."""

    connection: Any

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        refuse(self.connection.alias)


class DatabaseOperations(_Closed, base.DatabaseOperations):
    """Refuses to quote names, which is the first step of a query."""

    quote_name = _Closed._refuse


class DatabaseClient(_Closed, base.DatabaseClient):
    """Refuses to open a shell."""

    runshell = _Closed._refuse


class DatabaseIntrospection(_Closed, base.DatabaseIntrospection):
    """Refuses to look at tables."""

    get_table_list = _Closed._refuse
    get_table_description = _Closed._refuse
    get_relations = _Closed._refuse
    get_indexes = _Closed._refuse


class DatabaseWrapper(base.DatabaseWrapper):
    """A connection that refuses to open. Closing it and rolling it back does nothing, as it never opens."""

    display_name = "a database that the permissions of the job do not include"
    client_class = DatabaseClient
    introspection_class = DatabaseIntrospection
    ops_class = DatabaseOperations

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        refuse(self.alias)

    _cursor = _refuse
    ensure_connection = _refuse
    _commit = _refuse
    _savepoint_commit = _refuse
    _set_autocommit = _refuse


def refuse(alias: str) -> NoReturn:
    """Raise the error of a database that is not permitted."""
    raise PermissionError(
        f"the permissions of this job do not include the database {alias!r}: to allow it, add "
        f'Permissions(db=["{alias}"]) to the job type'
    )
