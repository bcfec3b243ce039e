"""A worker in a process of its own is made quiet, asked where it is, and stopped, by way of its storage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from djqueue._version import __version__
from tests.e2e.test_streams import ON_REDIS, ON_SQLITE
from tests.runtime.project import ROOT, Project
from tests.support import eventually

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

HEARTBEAT = 60
"""Seconds: what is heard sooner has not waited for the sign of life."""

MANAGE = """
import json, sys
import django
django.setup()
from djqueue import Queue
from djqueue.client import get_storage
from shop import jobs
storage = get_storage()
for line in sys.stdin:
    verb, *args = json.loads(line)
    if verb == "enqueue":
        answer = jobs.wait_for.enqueue(*args).id
    elif verb == "counts":
        answer = Queue("default").counts()
    elif verb == "workers":
        answer = [dict(one._asdict(), seen_at=None) for one in storage.workers.all()]
    elif verb == "dump":
        dump = storage.workers.dump(*args)
        answer = dump and dump.text
    else:
        answer = storage.workers.control(*args)
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture(params=["sqlite", "redis"])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    version = f"\nDJQUEUE.update(HEARTBEAT={HEARTBEAT}, VERSION='2026.11')\n"
    lease = "DJQUEUE['STORAGE']['OPTIONS']['LEASE'] = 300\n"
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.clean()
        return Project(tmp_path, JOBS, ON_REDIS % server.url + version + lease)
    made = Project(tmp_path, JOBS, ON_SQLITE + version)
    subprocess.run(
        [sys.executable, "-m", "django", "migrate", "--verbosity", "0"],
        cwd=tmp_path,
        env=environment(made),
        check=True,
        timeout=120,
    )
    return made


def environment(project: Project) -> dict[str, str]:
    path = os.pathsep.join([str(project.folder), str(ROOT)])
    return {**os.environ, "DJANGO_SETTINGS_MODULE": "project_settings", "PYTHONPATH": path}


class Manager:
    """Another process of the project, a web server for example."""

    def __init__(self, project: Project) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MANAGE],
            cwd=project.folder,
            env=environment(project),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


@pytest.mark.slow
def test_a_worker_is_made_quiet_dumped_and_stopped(project: Project) -> None:
    with (
        project.start_single("--worker-id", "w1", "--concurrency", "2") as worker,
        Manager(project) as manager,
    ):
        worker.says("Worker w1 started")
        [info] = eventually_some(lambda: manager("workers"))
        assert (info["kind"], info["state"]) == ("runworkers", "running")
        assert (info["version"], info["project"]) == (__version__, "2026.11")
        assert info["pid"] == worker.process.pid
        assert info["heartbeat"] == HEARTBEAT * 1_000
        assert info["rss"] > 10_000_000
        manager("enqueue", "first")
        eventually((project.folder / "first.begun").exists, timeout=20)

        assert manager("steer", "w1", "dump") == "asked"
        text = eventually_some(lambda: manager("dump", "w1"))
        assert "in wait_for" in text
        assert "time.sleep(0.01)" in text
        assert "hunter2" not in text
        assert "1 of 2 slots in use" in text

        begun = time.monotonic()
        assert manager("steer", "w1", "quiet") == "asked"
        eventually(lambda: manager("workers")[0]["state"] == "quiet", timeout=20)
        assert time.monotonic() - begun < HEARTBEAT / 2
        [[queue, _, name, started]] = manager("workers")[0]["jobs"]
        assert (queue, name) == ("default", "shop.jobs.wait_for")
        assert abs(started - time.time() * 1_000) < 60_000
        manager("enqueue", "second")
        (project.folder / "first").touch()
        eventually(lambda: manager("counts")["completed"] == 1, timeout=20)
        assert manager("counts")["waiting"] == 1

        assert manager("steer", "w1", "resume") == "asked"
        eventually(lambda: manager("counts")["active"] == 1, timeout=20)
        assert manager("steer", "w1", "stop") == "asked"
        worker.says("Worker w1 is stopping; 1 jobs are still running")
        (project.folder / "second").touch()
        assert worker.ends() == 0
        assert "2 completed" in worker.output
        assert manager("workers") == []


@pytest.mark.slow
def test_what_a_killed_worker_has_not_heard_is_nothing_for_the_next_of_its_name(project: Project) -> None:
    with Manager(project) as manager:
        with project.start_single("--worker-id", "w1") as worker:
            worker.says("Worker w1 started")
            eventually_some(lambda: manager("workers"))
            worker.signal(signal.SIGSTOP)
            if "redis" in project.folder.joinpath("project_settings.py").read_text():
                # Where the worker is the scheduler, too, nobody else could be told meanwhile.
                assert manager("steer", "w1", "stop") == "asked"
            worker.signal(signal.SIGKILL)
            worker.ends()
        with project.start_single("--worker-id", "w1", log="second.txt") as again:
            again.says("Worker w1 started")
            assert manager("steer", "w1", "quiet") == "asked"
            eventually(lambda: manager("workers")[0]["state"] == "quiet", timeout=20)
            assert "received the command: stop" not in again.output
            again.signal()
            assert again.ends() == 0


def eventually_some(read: Any) -> Any:
    found: list[Any] = []

    def look() -> bool:
        found[:] = [read()]
        return bool(found[0])

    eventually(look, timeout=20)
    return found[0]
