"""`manage.py djqueue health` beside real workers and servers: killed, frozen, and running again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests import servers
from tests.chaos.project import POSTGRESQL, REDIS, SQLITE, _postgresql
from tests.runtime.project import ROOT, Project, WorkerProcess
from tests.support import eventually

pytestmark = pytest.mark.slow

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {{"default": {database!r}}}
DJQUEUE = {{
    "HEARTBEAT": 0.5,
    "QUEUES": {{"default": {{"LEASE": 2}}}},
    "STORAGE": {storage!r},
    "HEALTH": {{"MAX_WAIT": 0.5, "LEASE_GRACE": 1}},
}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""
JOBS = """
import os
import time

from djqueue import job


@job
def add(a, b):
    return a + b


@job
def hold():
    open("started.txt", "w").close()
    time.sleep(600)
"""


class CheckedProject:
    """A project, its server if it has one, and its health."""

    def __init__(self, folder: Path, storage: str, server: Any = None) -> None:
        self.storage = storage
        self.server = server
        database: dict[str, Any] = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": "jobs.sqlite3",
            "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        }
        backend: dict[str, Any] = {
            "BACKEND": "djqueue.storage.database.DatabaseStorage",
            "OPTIONS": {"SCHEDULER_LEASE": 2},
        }
        if storage == POSTGRESQL:
            database = _postgresql(server.create_database())
        elif storage == REDIS:
            backend = {
                "BACKEND": "djqueue.storage.redis.RedisStorage",
                "OPTIONS": {**server.options, "MIRROR": False},
            }
        self._project = Project(folder, JOBS, SETTINGS.format(database=database, storage=backend))
        self.folder = folder
        self.manage("migrate", "--verbosity", "0")

    def manage(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run `manage.py`."""
        return subprocess.run(
            [sys.executable, "-m", "django", *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "project_settings",
                "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def worker(self) -> WorkerProcess:
        """Start a worker."""
        return self._project.start_single("--concurrency", "2")

    def enqueue(self, name: str, *options: str) -> str:
        """Enqueue a job, and return its id."""
        done = self.manage("djqueue", "enqueue", name, *options, "--json")
        assert done.returncode == 0, done.stderr
        job_id: str = json.loads(done.stdout)["id"]
        return job_id

    def failed(self) -> set[str]:
        """Return the names of the failed checks."""
        done = self.manage("djqueue", "health", "--json")
        assert done.returncode in (0, 1), done.stderr
        checks = json.loads(done.stdout)["checks"]
        found = {name for name, status in checks.items() if status == "failed"}
        assert bool(found) == (done.returncode == 1), done.stdout
        return found

    def becomes(self, *names: str) -> None:
        """Wait until exactly these checks fail."""
        eventually(lambda: self.failed() == set(names), timeout=60, message=f"{names} fail")


@pytest.fixture(params=[SQLITE, POSTGRESQL, REDIS])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckedProject]:
    if request.param == SQLITE:
        yield CheckedProject(tmp_path, SQLITE)
        return
    server = servers.PostgresServer() if request.param == POSTGRESQL else servers.RedisServer()
    with server:
        yield CheckedProject(tmp_path, request.param, server)


def test_a_killed_worker_fails_checks_until_another_one_runs(project: CheckedProject) -> None:
    with project.worker():
        project.becomes()
        project.enqueue("shop.jobs.hold")
        eventually((project.folder / "started.txt").exists, timeout=30)
    # Killed. Its job is active without a lease that anyone renews or takes back.
    found = eventually(lambda: {"leases"} <= (failed := project.failed()) and failed, timeout=60)
    assert found == ({"leases"} if project.storage == REDIS else {"leases", "scheduler"})

    with project.worker():
        project.becomes()


def test_jobs_without_a_worker_fail_a_check(project: CheckedProject) -> None:
    assert project.failed() == set()
    project.enqueue("shop.jobs.add", "--args", "[1, 2]")
    project.becomes("workers")

    with project.worker():
        project.becomes()


def test_jobs_that_a_frozen_worker_does_not_claim_fail_a_check(project: CheckedProject) -> None:
    with project.worker() as worker:
        project.becomes()
        frozen_at = time.monotonic()
        worker.signal(signal.SIGSTOP)
        try:
            if project.storage == REDIS:
                project.enqueue("shop.jobs.add", "--args", "[1, 2]")
            found = eventually(project.failed, timeout=60)
        finally:
            worker.signal(signal.SIGCONT)
        # Once its heartbeats have been missing for long enough, the worker no longer counts.
        assert time.monotonic() - frozen_at < 60
        expected = {"claims", "workers"} if project.storage == REDIS else {"scheduler"}
        assert found & expected
        project.becomes()


def test_a_frozen_server_fails_the_first_check_in_time(project: CheckedProject) -> None:
    if project.server is None:
        pytest.skip("SQLite has no server")
    frozen: AbstractContextManager[None] = project.server.frozen()
    assert project.failed() == set()
    imported = time.monotonic()
    project.failed()
    usual = time.monotonic() - imported
    with frozen:
        began = time.monotonic()
        assert project.failed() == {"storage"}
        took = time.monotonic() - began
    assert took < 2 + 3 * usual + 5
    assert project.failed() == set()


def test_the_doctor_explains_what_a_frozen_server_does(project: CheckedProject) -> None:
    if project.server is None:
        pytest.skip("SQLite has no server")
    with project.server.frozen():
        done = project.manage("djqueue", "doctor", "--json")
    findings = json.loads(done.stdout)["findings"]

    assert done.returncode == 1
    assert "health.storage" in {finding["id"] for finding in findings}
    assert all(finding["fix"] for finding in findings)


def test_jobs_that_no_live_worker_knows_fail_a_check(project: CheckedProject) -> None:
    code = (
        "import django; django.setup(); from djqueue import Queue; "
        "Queue('default').enqueue('shop.jobs.removed')"
    )
    with project.worker():
        project.becomes()
        done = project.manage("shell", "--no-imports", "-c", code)
        assert done.returncode == 0, done.stderr
        project.becomes("handlers")

        done = project.manage("djqueue", "cancel", "--all", "--queue", "default", "--no-input")
        assert done.returncode == 0, done.stderr
        project.becomes()
