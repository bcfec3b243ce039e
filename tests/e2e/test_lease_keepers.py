"""The process that renews a worker's leases: its resources and its end."""

import os
import signal

import pytest

from tests.e2e.test_stuck_workers import (
    JOBS,
    SETTINGS,
    children_of,
    enqueue,
    redis_project,
    runs,
)
from tests.runtime.project import Project
from tests.support import eventually

pytestmark = pytest.mark.slow

OPEN = """
import socket

LISTENING = socket.create_server(("127.0.0.1", 0))
CONNECTED = socket.create_connection(LISTENING.getsockname())
"""
NO_PROCESSES = """
import os


def refuse():
    raise BlockingIOError(11, "Resource temporarily unavailable")


os.fork = refuse
"""


@pytest.fixture
def redis_options(redis_server):
    redis_server.clean()
    return redis_server.options


def database_project(tmp_path, jobs=JOBS, **queue):
    storage = {"BACKEND": "djqueue.storage.database.DatabaseStorage"}
    settings = SETTINGS.format(storage=storage, patience=60)
    project = Project(tmp_path, jobs, settings + f'DJQUEUE["QUEUES"] = {{"default": {queue}}}\n')
    project.migrate()
    return project


@pytest.mark.thorough
def test_lease_keeper_renews_leases_of_busy_worker_on_database_storage(tmp_path):
    project = database_project(tmp_path, LEASE=5)

    with project.start_single("--concurrency", "1", log="first.txt") as first:
        enqueue(project, "hold.enqueue(8)")
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


def test_worker_continues_and_logs_when_its_lease_keeper_is_killed(tmp_path, redis_options):
    project = redis_project(tmp_path, redis_options)

    with project.start_single("--concurrency", "1") as worker:
        worker.says("started")
        [keeper] = children_of(worker.process.pid)
        os.kill(keeper, signal.SIGKILL)
        worker.says("The lease keeper exited (status 9).")
        enqueue(project, "note.enqueue()")
        eventually(lambda: runs(tmp_path) == ["note"], message="the job runs")
        worker.signal()
        assert worker.ends() == 0


def test_lease_keeper_closes_inherited_connections_and_ports_of_its_worker(tmp_path):
    project = database_project(tmp_path, OPEN + JOBS)

    with project.start_single() as worker:
        worker.says("started")
        [keeper] = children_of(worker.process.pid)
        eventually(lambda: not sockets_of(keeper), message="the keeper has let go of them")

        assert len(sockets_of(worker.process.pid)) > 2


def test_worker_runs_without_lease_keeper_if_fork_fails(tmp_path, redis_options):
    project = redis_project(tmp_path, redis_options)
    project.write_jobs(NO_PROCESSES + JOBS)
    enqueue(project, "note.enqueue()")

    with project.start_single("--until-empty") as worker:
        assert worker.ends() == 0

    assert runs(tmp_path) == ["note"]
    assert "No lease keeper could be started" in worker.output


def sockets_of(pid: int) -> list[str]:
    folder = f"/proc/{pid}/fd"
    links = []
    for name in os.listdir(folder):
        try:
            links.append(os.readlink(f"{folder}/{name}"))
        except FileNotFoundError:
            continue  # It was closed since.
    return [link for link in links if link.startswith("socket:")]
