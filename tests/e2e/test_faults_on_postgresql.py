"""The default storage on PostgreSQL with the real program, and what happens to servers and processes."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.servers import PgBouncer, PostgresServer
from tests.support import eventually
from tools.chaos.project import _postgresql

from .load import TIMEOUT, Load

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

LIMITS = {"connect_timeout": 2, "options": f"-c lock_timeout={TIMEOUT}s -c statement_timeout={2 * TIMEOUT}s"}


@pytest.fixture
def server() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture
def load(server: PostgresServer, tmp_path: Path) -> Iterator[Load]:
    with Load(tmp_path, database(server.create_database())) as load:
        yield load


def database(url: str, **more: Any) -> dict[str, Any]:
    return {**_postgresql(url), "OPTIONS": LIMITS, **more}


@contextmanager
def session(server: PostgresServer, name: str = "scratch_1") -> Iterator["psycopg.Connection[Any]"]:
    with closing(psycopg.connect(server.database_url(name), autocommit=True)) as connection:
        yield connection


def terminate_backends(admin: "psycopg.Connection[Any]") -> None:
    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'scratch_1'")


def test_killed_worker(load: Load) -> None:
    worker = load.workers(load.services[0])[0]
    eventually(lambda: any(note.pid == worker for note in load.running()))
    os.kill(worker, signal.SIGKILL)
    load.ends_well("kill -9 of a worker", time.monotonic())


def test_killed_runworkers(load: Load) -> None:
    pids = load.workers(load.services[0])
    eventually(lambda: any(note.pid in pids for note in load.running()))
    os.killpg(load.services[0].process.pid, signal.SIGKILL)
    load.ends_well("kill -9 of all of runworkers", time.monotonic())


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


def test_frozen_worker(load: Load) -> None:
    worker = load.workers(load.services[0])[0]
    eventually(lambda: any(note.pid == worker for note in load.running()))
    os.kill(worker, signal.SIGSTOP)
    over = time.monotonic()
    load.outlasts_leases()
    os.kill(worker, signal.SIGCONT)
    load.ends_well("frozen worker", over)


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


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of few MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("this account may not mount a file system")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """Write a file until no space is left."""
    ballast = disk / "ballast"
    done = subprocess.run(["dd", "if=/dev/zero", f"of={ballast}", "bs=4k"], capture_output=True, check=False)
    assert b"No space left" in done.stderr
    return ballast


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
    with Load(tmp_path, database(url)) as load:
        ballast = fill(small_disk)
        load.answers()
        load.outlasts_leases()
        ballast.unlink()
        load.ends_well("full disk", time.monotonic())


def test_clock_set_back_on_one_host(load: Load) -> None:
    (load.folder / "behind.txt").touch()
    over = time.monotonic()
    load.outlasts_leases()
    load.ends_well("clock set back", over)
    assert not load.repeated()


def test_promoted_replica(server: PostgresServer, tmp_path: Path) -> None:
    url = server.create_database()
    with PostgresServer(server) as replica:
        with session(server, "postgres") as connection:
            # An acknowledged commit is on both servers.
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        ports = f"{server.port},{replica.port}"
        options = {**LIMITS, "target_session_attrs": "read-write"}
        both = database(url, HOST="127.0.0.1,127.0.0.1", PORT=ports, OPTIONS=options)
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
