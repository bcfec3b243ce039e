"""Streams reach a caller in another process, even if the worker is killed in the middle."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.project import Project
from tests.support import PATIENCE, eventually

pytestmark = pytest.mark.slow

ON_SQLITE = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "jobs.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
DJQUEUE = {"HEARTBEAT": 1}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

ON_REDIS = """
DJQUEUE = {
    "STORAGE": {
        "BACKEND": "djqueue.storage.redis.RedisStorage",
        "OPTIONS": {"URL": %r, "TIMEOUT": 1, "LEASE": 5, "MIRROR": False},
    },
    "HEARTBEAT": 1,
}
"""

JOBS = """
import asyncio
import threading
from pathlib import Path

from djqueue import job


def run_number():
    # Not the job's stalls: a worker may be killed before it is written down that the job has begun.
    for number in range(10):
        try:
            Path(f"run.{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        return number


@job
def count(many, *, hang_at=None):
    run = run_number()
    for number in range(many):
        if number == hang_at and run == 0:
            threading.Event().wait()
        yield run, number
    return f"{many} in all"


@job
async def acount(many, *, hang_at=None):
    run = run_number()
    for number in range(many):
        if number == hang_at and run == 0:
            await asyncio.Event().wait()
        yield run, number
"""

COMBINATIONS = pytest.mark.parametrize(
    ("project", "name"),
    [
        ("redis", "acount"),
        *(
            pytest.param(storage, name, marks=pytest.mark.thorough)
            for storage, name in (("redis", "count"), ("sqlite", "count"), ("sqlite", "acount"))
        ),
    ],
    indirect=["project"],
)
READY = " started"
"""What a worker says when it claims jobs."""
READER = """
import json
import django
django.setup()
from shop import jobs
stream = jobs.{job}.enqueue_and_stream({arguments}, wait=60, on_restart={on_restart!r})
try:
    while True:
        print(json.dumps(next(stream)), flush=True)
except StopIteration as end:
    print(json.dumps(end.value), flush=True)
except Exception as error:
    print(json.dumps(type(error).__name__), flush=True)
"""


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Project:
    if request.param == "redis":
        server = request.getfixturevalue("redis_server")
        server.clean()
        return Project(tmp_path, JOBS, ON_REDIS % server.url)
    made = Project(tmp_path, JOBS, ON_SQLITE)
    made.migrate()
    return made


class Reader:
    """A caller in a process of its own."""

    def __init__(self, folder: Path, process: "subprocess.Popen[bytes]") -> None:
        self._folder = folder
        self._process = process

    def has(self) -> list[Any]:
        """What it was given so far."""
        assert self._process.poll() in (None, 0), (self._folder / "read.err").read_text()
        return [json.loads(line) for line in (self._folder / "read.txt").read_text().splitlines()]

    def ends(self) -> list[Any]:
        """All that it was given; last, the result, or the name of an error."""
        assert self._process.wait(PATIENCE) == 0, (self._folder / "read.err").read_text()
        return self.has()


@contextmanager
def reading(project: Project, job: str, arguments: str, on_restart: str = "raise") -> Iterator[Reader]:
    code = READER.format(job=job, arguments=arguments, on_restart=on_restart)
    with (project.folder / "read.txt").open("wb") as out, (project.folder / "read.err").open("wb") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=project.folder,
            env=project.variables,
            stdout=out,
            stderr=err,
        )
        try:
            yield Reader(project.folder, process)
        finally:
            process.kill()
            process.wait()


@COMBINATIONS
def test_stream_returns_all_items_and_the_result(project: Project, name: str) -> None:
    with project.start() as workers:
        workers.says(READY)
        with reading(project, name, "2500") as reader:
            found = reader.ends()
        workers.signal(signal.SIGTERM)
        assert workers.ends() == 0, workers.output

    assert found == [*([0, number] for number in range(2500)), "2500 in all" if name == "count" else None]


def killed_in_the_middle(project: Project, name: str, on_restart: str) -> list[Any]:
    """What a caller is given whose job is run by a worker that is killed, and then by another one."""
    with project.start(log="first.txt") as workers:
        workers.says(READY)
        with reading(project, name, "40, hang_at=7", on_restart) as reader:
            eventually(lambda: len(reader.has()) == 7, message=str(reader.has()))
            workers.signal(signal.SIGKILL)
            workers.ends()
            with project.start(log="second.txt"):
                return reader.ends()


@COMBINATIONS
def test_stream_continues_with_next_attempt_after_worker_was_killed(project: Project, name: str) -> None:
    found = killed_in_the_middle(project, name, "continue")

    assert found[:-1] == [*([0, number] for number in range(7)), *([1, number] for number in range(40))]
    assert found[-1] == ("40 in all" if name == "count" else None)


@pytest.mark.parametrize(
    "project", ["redis", pytest.param("sqlite", marks=pytest.mark.thorough)], indirect=True
)
def test_stream_raises_on_restart_by_default_after_worker_was_killed(project: Project) -> None:
    found = killed_in_the_middle(project, "count", "raise")

    assert found == [*([0, number] for number in range(7)), "StreamRestartedError"]
