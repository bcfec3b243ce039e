"""Commands to a worker in another process: dump, quiet, resume and stop, through the storage."""

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from djqueue._version import __version__
from tests.e2e.test_streams import ON_REDIS, ON_SQLITE
from tests.runtime.project import Project
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.slow

JOBS = """
import time
from pathlib import Path

from djqueue import job


@job
def wait_for(name):
    password = "hunter" + "2"
    Path(f"{name}.begun").touch()
    while not Path(name).exists():
        time.sleep(0.01)
    return len(password)
"""

HEARTBEAT = 10 * PATIENCE
"""Seconds: no test waits for a heartbeat, so that commands must arrive without one."""


@pytest.fixture(params=[pytest.param("sqlite", marks=pytest.mark.thorough), "redis"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    more = f"\nDJQUEUE.update(HEARTBEAT={HEARTBEAT}, VERSION='2026.11')\n"
    more += f"DJQUEUE['QUEUES'] = {{'default': {{'LEASE': {5 * HEARTBEAT}}}}}\n"
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.clean()
        return Project(tmp_path, JOBS, ON_REDIS % server.url + more)
    made = Project(tmp_path, JOBS, ON_SQLITE + more)
    made.migrate()
    return made


class Manager:
    """Operations of another process of the project, such as a web server."""

    def __init__(self, project: Project) -> None:
        self._run = project.run

    def enqueue(self, name: str) -> None:
        self._run(f"from shop import jobs; jobs.wait_for.enqueue({name!r})")

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = self._run("from djqueue import Queue; answer = Queue('default').counts()")
        return counts

    def workers(self) -> list[dict[str, Any]]:
        rows = "[dict(row._asdict(), seen_at=None) for row in get_storage().workers.all()]"
        workers: list[dict[str, Any]] = self._run(f"from djqueue.client import get_storage; answer = {rows}")
        return workers

    def control(self, worker_id: str, command: str) -> str:
        call = f"get_storage().workers.control({worker_id!r}, {command!r})"
        return str(self._run(f"from djqueue.client import get_storage; answer = {call}"))

    def dump(self, worker_id: str) -> str:
        code = f"from djqueue.client import get_storage; dump = get_storage().workers.dump({worker_id!r})"
        return self._run(f"{code}; answer = dump and dump.text") or ""


def test_worker_obeys_dump_quiet_resume_and_stop_commands(project: Project) -> None:
    manager = Manager(project)
    with project.start_single("--worker-id", "w1", "--concurrency", "2") as worker:
        worker.says("Worker w1 started")
        [info] = eventually(manager.workers)
        assert (info["kind"], info["state"]) == ("runworkers", "running")
        assert (info["version"], info["project"]) == (__version__, "2026.11")
        assert info["pid"] == worker.process.pid
        assert info["heartbeat"] == HEARTBEAT * 1_000
        assert info["rss"] > 10_000_000
        manager.enqueue("first")
        eventually((project.folder / "first.begun").exists)

        assert manager.control("w1", "dump") == "asked"
        text = eventually(lambda: manager.dump("w1"))
        assert "in wait_for" in text
        assert "time.sleep(0.01)" in text
        assert "hunter2" not in text
        assert "1 of 2 slots in use" in text

        assert manager.control("w1", "quiet") == "asked"
        eventually(lambda: manager.workers()[0]["state"] == "quiet")
        [[queue, _, name, started]] = manager.workers()[0]["jobs"]
        assert (queue, name) == ("default", "shop.jobs.wait_for")
        assert abs(started - time.time() * 1_000) < 60_000
        manager.enqueue("second")
        (project.folder / "first").touch()
        eventually(lambda: manager.counts()["completed"] == 1)
        assert manager.counts()["waiting"] == 1

        assert manager.control("w1", "resume") == "asked"
        eventually(lambda: manager.counts()["active"] == 1)
        assert manager.control("w1", "stop") == "asked"
        worker.says("Worker w1 is stopping; jobs still running: 1")
        (project.folder / "second").touch()
        assert worker.ends() == 0
        assert "2 completed" in worker.output
        assert manager.workers() == []


def test_command_for_killed_worker_is_not_received_by_next_worker_with_its_id(project: Project) -> None:
    manager = Manager(project)
    with project.start_single("--worker-id", "w1") as worker:
        worker.says("Worker w1 started")
        eventually(manager.workers)
        worker.signal(signal.SIGSTOP)
        assert manager.control("w1", "stop") == "asked"
        worker.signal(signal.SIGKILL)
        worker.ends()
    with project.start_single("--worker-id", "w1", log="second.txt") as again:
        again.says("Worker w1 started")
        assert manager.control("w1", "quiet") == "asked"
        eventually(lambda: manager.workers()[0]["state"] == "quiet")
        assert "received the command: stop" not in again.output
        again.signal()
        assert again.ends() == 0
