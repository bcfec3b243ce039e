"""The default storage on PostgreSQL with the real program, and faults of servers and connections."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.servers import PgBouncer, PostgresServer
from tools.chaos.project import _postgresql

from .load import LIMITS, Load, postgresql

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def load(server: PostgresServer, tmp_path: Path) -> Iterator[Load]:
    with Load(tmp_path, postgresql(server.create_database())) as load:
        yield load


@contextmanager
def session(server: PostgresServer, name: str = "scratch_1") -> Iterator["psycopg.Connection[Any]"]:
    with closing(psycopg.connect(server.database_url(name), autocommit=True)) as connection:
        yield connection


def terminate_backends(admin: "psycopg.Connection[Any]") -> None:
    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'scratch_1'")


def test_immediate_stop_and_restart(server: PostgresServer, load: Load) -> None:
    for pause in (load.answers, load.outlasts_leases):
        server.stop()
        pause()
        server.start()
        over = time.monotonic()
        load.goes_on()
    load.ends_well("immediate stop and restart", over)


def test_terminated_backends(server: PostgresServer, load: Load) -> None:
    with session(server, "postgres") as admin:
        for _ in range(10):
            terminate_backends(admin)
            load.goes_on(2)
    load.ends_well("terminated backends", time.monotonic())


def test_exhausted_connections(server: PostgresServer, load: Load) -> None:
    with ExitStack() as others:

        def take_all() -> None:
            try:
                terminate_backends(admin)
                while True:
                    others.enter_context(session(server, "postgres"))
            except psycopg.OperationalError:
                pass

        admin = others.enter_context(session(server, "postgres"))
        load.answers(meanwhile=take_all)
        load.outlasts_leases()
    load.ends_well("exhausted connections", time.monotonic())


@pytest.mark.parametrize("table", ["djqueue_job", "djqueue_ready", "djqueue_claim"])
def test_locked_table(server: PostgresServer, load: Load, table: str) -> None:
    with session(server) as other, other.transaction():
        other.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
        # An enqueue does not use claims.
        load.answers("timeout" if table == "djqueue_claim" else "unavailable")
        load.outlasts_leases()
    load.ends_well(f"locked {table}", time.monotonic())


def test_full_disk(server: PostgresServer, small_disk: Path, tmp_path: Path) -> None:
    tables = small_disk / "tables"
    tables.mkdir()
    for folder in (tmp_path, *list(tmp_path.parents)[:-2]):  # the server's account has to pass
        folder.chmod(folder.stat().st_mode | 0o111)
    server.give(tables)
    url = server.create_database()
    with session(server, "postgres") as connection:
        connection.execute(f"CREATE TABLESPACE small LOCATION '{tables}'")
        connection.execute("ALTER DATABASE scratch_1 SET TABLESPACE small")
    with Load(tmp_path, postgresql(url)) as load:
        load.outlasts_full_disk(small_disk)


def test_promoted_replica(server: PostgresServer, tmp_path: Path) -> None:
    url = server.create_database()
    with PostgresServer(server) as replica:
        with session(server, "postgres") as connection:
            # An acknowledged commit is on both servers.
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        ports = f"{server.port},{replica.port}"
        options = {**LIMITS, "target_session_attrs": "read-write"}
        both = postgresql(url, HOST="127.0.0.1,127.0.0.1", PORT=ports, OPTIONS=options)
        with Load(tmp_path, both) as load:
            server.stop()
            load.answers()
            with session(replica, "postgres") as connection:
                connection.execute("SELECT pg_promote()")
            load.ends_well("promoted replica", time.monotonic())


def test_pooler_in_transaction_mode(server: PostgresServer, tmp_path: Path) -> None:
    server.create_database()
    with PgBouncer(server) as pooler:
        behind = {**_postgresql(pooler.database_url("scratch_1")), "OPTIONS": {"connect_timeout": 2}}
        behind["DISABLE_SERVER_SIDE_CURSORS"] = True
        with Load(tmp_path, behind, NOTIFY=False) as load:
            code = "answer = len(work.enqueue_many([((-number,), {}) for number in range(1000)]))"
            assert load.project.run(f"from shop.jobs import work; {code}") == 1_000
            for pause in (load.answers, load.answers, load.outlasts_leases):
                pooler.stop()
                pause()
                pooler.start()
                over = time.monotonic()
                load.goes_on()
            load.ends_well("restarted pooler", over)
