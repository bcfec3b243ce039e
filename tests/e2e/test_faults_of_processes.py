"""The default storage with the real program on both databases, and faults of its processes and hosts."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import PostgresServer
from tests.support import eventually

from .load import Load, postgresql, sqlite

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture(params=["sqlite", "postgresql"])
def load(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Load]:
    if request.param == "sqlite":
        with Load(tmp_path, sqlite("jobs.sqlite3")) as load:
            yield load
    else:
        with PostgresServer() as server, Load(tmp_path, postgresql(server.create_database())) as load:
            yield load


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


def test_frozen_worker(load: Load) -> None:
    worker = load.workers(load.services[0])[0]
    eventually(lambda: any(note.pid == worker for note in load.running()))
    os.kill(worker, signal.SIGSTOP)
    over = time.monotonic()
    load.outlasts_leases()
    os.kill(worker, signal.SIGCONT)
    load.ends_well("frozen worker", over)


def test_clock_set_back_on_one_host(load: Load) -> None:
    (load.folder / "behind.txt").touch()
    over = time.monotonic()
    load.outlasts_leases()
    load.ends_well("clock set back", over)
    assert not load.repeated()
