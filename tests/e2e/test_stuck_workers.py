"""Workers with a handler that holds the GIL longer than a lease."""

import os
import signal

import pytest

from tests.runtime.project import Project
from tests.support import eventually

pytestmark = pytest.mark.slow

SETTINGS = """
from pathlib import Path
DATABASES = {{
    "default": {{
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": Path(__file__).parent / "jobs.sqlite3",
        "OPTIONS": {{"transaction_mode": "IMMEDIATE", "timeout": 20}},
    }}
}}
DJQUEUE = {{"HEARTBEAT": 1, "STUCK_TIMEOUT": {patience}, "STORAGE": {storage}}}
"""

JOBS = """
import ctypes
import os

from djqueue import job

RUNS = os.open("runs.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@job
def hold(seconds):
    os.write(RUNS, b"hold\\n")
    # Unlike CDLL, PyDLL keeps the interpreter lock during the call.
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))


@job
def note():
    os.write(RUNS, b"note\\n")
"""


@pytest.fixture
def redis_options(redis_server):
    redis_server.clean()
    return redis_server.options


def redis_project(tmp_path, redis_options, patience=60):
    storage = {
        "BACKEND": "djqueue.storage.redis.RedisStorage",
        "OPTIONS": {**redis_options, "LEASE": 5, "MIRROR": False, "TIMEOUT": 1},
    }
    return Project(tmp_path, JOBS, SETTINGS.format(storage=storage, patience=patience))


def runs(tmp_path) -> list[str]:
    file = tmp_path / "runs.txt"
    return file.read_text().split() if file.exists() else []


def enqueue(project, code: str) -> None:
    project.run(f"from shop.jobs import hold, note; {code}")


@pytest.mark.thorough
def test_handler_that_holds_the_gil_beyond_its_lease_runs_once(tmp_path, redis_options):
    project = redis_project(tmp_path, redis_options)
    enqueue(project, "hold.enqueue(8)")

    with project.start_single("--concurrency", "1") as first:
        eventually(lambda: runs(tmp_path) == ["hold"], message="the job runs")
        with project.start_single("--concurrency", "1", log="second.txt") as second:
            first.says("Renewing its 1 leases")
            first.says("responds again and renews its leases itself")
            second.says("started")  # A signal before that would kill it.
            first.signal()
            second.signal()
            assert (first.ends(), second.ends()) == (0, 0)

    assert runs(tmp_path) == ["hold"]
    assert "1 completed, 0 failed" in first.output


@pytest.mark.thorough
def test_leases_of_stuck_worker_expire_after_stuck_timeout(tmp_path, redis_options):
    project = redis_project(tmp_path, redis_options, patience=2)
    enqueue(project, "hold.enqueue(600)")

    with project.start_single("--concurrency", "1") as first:
        eventually(lambda: runs(tmp_path) == ["hold"], message="the job runs")
        with project.start_single("--concurrency", "1", log="second.txt"):
            first.says("its leases are no longer renewed")
            eventually(lambda: runs(tmp_path) == ["hold", "hold"], message="it runs again")


@pytest.mark.thorough
def test_worker_frozen_by_sigstop_loses_its_leases(tmp_path, redis_options):
    project = redis_project(tmp_path, redis_options)
    enqueue(project, "hold.enqueue(0.01); hold.enqueue(600)")

    with project.start_single("--concurrency", "1") as first:
        eventually(lambda: len(runs(tmp_path)) == 2, message="the second job runs")
        os.kill(first.process.pid, signal.SIGSTOP)
        with project.start_single("--concurrency", "1", log="second.txt"):
            eventually(lambda: len(runs(tmp_path)) == 3, message="it runs again")


def test_lease_keeper_ends_with_its_worker(tmp_path, redis_options):
    project = redis_project(tmp_path, redis_options)
    enqueue(project, "hold.enqueue(600)")

    with project.start_single("--concurrency", "1") as worker:
        eventually(lambda: runs(tmp_path) == ["hold"], message="the job runs")
        children = children_of(worker.process.pid)
        os.kill(worker.process.pid, signal.SIGKILL)
        worker.ends()

        assert len(children) == 1
        eventually(lambda: not alive(children[0]), message="the keeper has ended")


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
