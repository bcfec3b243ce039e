"""The default storage on SQLite with the real program, and what happens to the file and to processes."""

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.support import eventually

from .load import TIMEOUT, Load
from .test_faults_on_postgresql import fill, small_disk  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Load]:
    with Load(tmp_path, database("jobs.sqlite3")) as load:
        yield load


def database(name: str) -> dict[str, Any]:
    options = {"transaction_mode": "IMMEDIATE", "timeout": TIMEOUT}
    return {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "OPTIONS": options}


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


def test_locked_file(load: Load) -> None:
    with closing(sqlite3.connect(load.folder / "jobs.sqlite3", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        load.answers()
        load.outlasts_leases()
        other.execute("ROLLBACK")
    load.ends_well("file locked by another program", time.monotonic())


def test_full_disk(small_disk: Path, tmp_path: Path) -> None:  # noqa: F811
    with Load(tmp_path, database(str(small_disk / "jobs.sqlite3"))) as load:
        ballast = fill(small_disk)
        load.answers()
        load.outlasts_leases()
        ballast.unlink()
        load.ends_well("full disk", time.monotonic())


def test_clock_set_back(load: Load) -> None:
    (load.folder / "behind.txt").touch()
    over = time.monotonic()
    load.outlasts_leases()
    load.ends_well("clock set back", over)
    assert not load.repeated()
