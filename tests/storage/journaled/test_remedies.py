"""What errors of the database tell a user to do."""

import psycopg
import pytest
from django.db import OperationalError, ProgrammingError, connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.operations import RunPython
from django.db.migrations.state import ProjectState

from djqueue import Queue, StorageUnavailableError
from djqueue.storage.tables.dberrors import latest_migration, unavailable
from tests.servers import free_port


def refused_by(server, user, **arguments):
    url = server.url.replace(server.user + "@", f"{user}@")
    with pytest.raises(psycopg.Error) as refused:
        psycopg.connect(url, **arguments).close()
    return refused.value


@pytest.fixture
def guarded(postgres_server):
    """A role of PostgreSQL that has to show a password."""
    rules = postgres_server.folder / "data" / "pg_hba.conf"
    before = rules.read_text()
    with psycopg.connect(postgres_server.url, autocommit=True) as admin:
        admin.execute("CREATE ROLE guarded LOGIN PASSWORD 'right'")
        rules.write_text("host all guarded 127.0.0.1/32 scram-sha-256\n" + before)
        admin.execute("SELECT pg_reload_conf()")
    yield postgres_server
    with psycopg.connect(postgres_server.url, autocommit=True) as admin:
        rules.write_text(before)
        admin.execute("SELECT pg_reload_conf()")
        admin.execute("DROP ROLE guarded")


@pytest.mark.parametrize("user", ["guarded:wrong", "guarded", "nobody"])
def test_error_for_rejected_login_suggests_checking_user_and_password(guarded, user):
    error = OperationalError(str(refused_by(guarded, user)))

    text = str(unavailable("other", error))

    assert "Check USER and PASSWORD of DATABASES['other']" in text
    assert "Is it running" not in text


@pytest.mark.parametrize("arguments", [{"options": "-c nowhere=1"}, {"sslmode": "nowhere"}])
def test_error_for_invalid_parameter_suggests_checking_options(postgres_server, arguments):
    error = OperationalError(str(refused_by(postgres_server, postgres_server.user, **arguments)))

    assert "Check OPTIONS of DATABASES['default']" in str(unavailable("default", error))
    assert "Check the parameters after the ? in the URL" in str(unavailable("postgresql://h/shop", error))


def test_error_for_missing_database_suggests_checking_name(postgres_server):
    error = OperationalError(str(refused_by(postgres_server, postgres_server.user, dbname="nowhere")))

    assert "Check NAME of DATABASES['default']" in str(unavailable("default", error))


def test_error_for_refused_connection_asks_whether_server_is_running():
    with pytest.raises(psycopg.OperationalError) as away:
        psycopg.connect(f"postgresql://djqueue@127.0.0.1:{free_port()}/postgres")

    text = str(unavailable("default", OperationalError(str(away.value))))

    assert text.endswith("Is it running?")


@pytest.mark.parametrize("message", ["database is locked", "database table is locked: djqueue_job"])
def test_locked_database_names_write_lock_of_sqlite(message):
    text = str(unavailable("jobs", OperationalError(message)))

    assert "Another connection holds SQLite's write lock" in text
    assert text.endswith("raise 'timeout' in OPTIONS of DATABASES['jobs'].")
    assert "Is it running" not in text


@pytest.mark.parametrize("alias", ["jobs", "sqlite:///srv/shop.db"])
@pytest.mark.parametrize(
    ("message", "remedy"),
    [
        ("database or disk is full", "Free space on the disk of the database."),
        (
            'could not extend file "base/5/2": No space left on device',
            "Free space on the disk of the database.",
        ),
        ("disk I/O error", "Check the disk of the database, which may be full."),
        (
            "attempt to write a readonly database",
            "This process needs write access to the database file and to its folder.",
        ),
        (
            "unable to open database file",
            "This process needs write access to the database file and to its folder.",
        ),
        (
            "cannot execute INSERT in a read-only transaction",
            "Connect to the primary server, with a user who may write.",
        ),
    ],
)
def test_error_names_full_or_read_only_disk(message, remedy, alias):
    assert str(unavailable(alias, OperationalError(message))).endswith(f"{message}. {remedy}")


def test_error_names_postgresql_timeout(postgres_server):
    url = postgres_server.create_database()
    with psycopg.connect(url) as holder, psycopg.connect(url, autocommit=True) as client:
        client.execute("CREATE TABLE held ()")
        holder.execute("LOCK TABLE held")
        for setting, statement, name in (
            ("statement_timeout", "SELECT pg_sleep(60)", "statement timeout"),
            ("lock_timeout", "LOCK TABLE held", "lock timeout"),
        ):
            client.execute(f"SET {setting} = 10")
            with pytest.raises(psycopg.Error) as cancelled, client.transaction():
                client.execute(statement)
            client.execute(f"RESET {setting}")
            for alias in ("jobs", "postgresql://db.example/shop"):
                text = str(unavailable(alias, OperationalError(str(cancelled.value))))
                assert text.endswith(f"Raise the {name} of this connection, or end what keeps it waiting.")


def test_error_names_idle_transaction_timeout():
    error = OperationalError("terminating connection due to idle-in-transaction timeout")

    assert "Raise the idle-in-transaction timeout of this connection" in str(unavailable("jobs", error))


def test_missing_table_of_postgresql_names_command(postgres_server):
    with psycopg.connect(postgres_server.url) as client, pytest.raises(psycopg.Error) as missing:
        client.execute("SELECT * FROM djqueue_job")

    text = str(unavailable("jobs", ProgrammingError(str(missing.value))))

    assert "run manage.py migrate --database jobs." in text
    assert "Is it running" not in text


@pytest.fixture
def _without_tables(settings, transactional_db):
    settings.DJQUEUE = {}
    table = "djqueue_job"
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table} RENAME TO {table}_away")
    yield
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {table}_away RENAME TO {table}")


@pytest.mark.dialect
@pytest.mark.usefixtures("_without_tables")
def test_enqueue_without_tables_names_command():
    with pytest.raises(StorageUnavailableError, match=r"run manage\.py migrate --database default\."):
        Queue("orders").enqueue(1)


@pytest.mark.dialect
@pytest.mark.usefixtures("_without_tables")
def test_enqueue_in_migration_names_dependency_to_add(monkeypatch):
    def enqueue(apps, schema_editor):
        Queue("orders").enqueue(1)

    def apply(self, state, *args, **kwargs):
        with connection.schema_editor(atomic=False) as editor:
            RunPython(enqueue).database_forwards("shop", editor, state, state)
        return state

    executor = MigrationExecutor(connection)
    plan = [(executor.loader.graph.nodes["djqueue", "0001_initial"], False)]
    monkeypatch.setattr("django.db.migrations.migration.Migration.apply", apply)

    with pytest.raises(StorageUnavailableError) as refused:
        executor.apply_migration(ProjectState(), plan[0][0])

    text = str(refused.value)
    assert f"add ('djqueue', '{latest_migration()}') to the dependencies of that migration" in text
    assert "manage.py migrate --database default" in text
