"""`manage.py djqueue health` beside real workers and servers: killed, frozen, and running again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import servers
from tests.runtime.project import ROOT, Project, WorkerProcess
from tests.support import eventually
from tools.chaos.project import POSTGRESQL, REDIS, SQLITE, _postgresql

pytestmark = pytest.mark.slow

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {{"default": {database!r}}}
DJQUEUE = {{
    "HEARTBEAT": 0.5,
    "QUEUES": {{"default": {{"LEASE": 2}}}},
    "STORAGE": {storage!r},
    "HEALTH": {{"MAX_WAIT": 0.5, "LEASE_GRACE": 1, "TIMEOUT": 5}},
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


PROBE = """
import json, sys
import django
django.setup()
from djqueue.conf import get_settings
from djqueue.health import document
from djqueue.operations.healthrun import HealthRun
for line in sys.stdin:
    found = None
    exec(json.loads(line))
    print(json.dumps({**document(HealthRun(get_settings().health).report()), "found": found}), flush=True)
"""
"""A process that runs a line of code, which may set `found`, and then the checks, as a web server does."""
ACTIVE = "from djqueue.models import Job; found = Job.objects.filter(state='active').count()"


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
        self._probe: subprocess.Popen[str] | None = None
        self.manage("migrate", "--verbosity", "0")

    def manage(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run `manage.py`."""
        return subprocess.run(
            [sys.executable, "-m", "django", *arguments],
            cwd=self.folder,
            env=self._environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "project_settings",
            "PYTHONPATH": os.pathsep.join([str(self.folder), str(ROOT)]),
        }

    def worker(self) -> WorkerProcess:
        """Start a worker."""
        return self._project.start_single("--concurrency", "2")

    def enqueue(self, name: str, *arguments: object) -> None:
        """Enqueue a job of `shop.jobs`."""
        self.failed(f"from shop.jobs import {name}; {name}.enqueue(*{arguments!r})")

    def failed(self, code: str = "") -> set[str]:
        """Run code in the project, and return the names of the failed checks."""
        checks = self._answer(code)["checks"]
        return {name for name, status in checks.items() if status == "failed"}

    def has_written_an_active_job(self) -> bool:
        """Return whether the tables show that a job is active; the scheduler writes them a moment later."""
        return self.storage == REDIS or self._answer(ACTIVE)["found"] == 1

    def _answer(self, code: str) -> Any:
        if self._probe is None:
            self._probe = subprocess.Popen(
                [sys.executable, "-c", PROBE],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        assert self._probe.stdin is not None
        assert self._probe.stdout is not None
        print(json.dumps(code), file=self._probe.stdin, flush=True)
        return json.loads(self._probe.stdout.readline())

    def close(self) -> None:
        """End the process of the checks."""
        if self._probe is not None:
            self._probe.kill()
            self._probe.communicate()

    def becomes(self, *names: str) -> None:
        """Wait until exactly these checks fail."""
        seen: set[str] = set()

        def matches() -> bool:
            nonlocal seen
            seen = self.failed()
            return seen == set(names)

        try:
            eventually(matches, timeout=60)
        except AssertionError as error:
            error.add_note(f"expected {set(names)}, and saw {seen}")
            raise


@pytest.fixture(params=[SQLITE, POSTGRESQL, REDIS])
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckedProject]:
    makers = {POSTGRESQL: servers.PostgresServer, REDIS: servers.RedisServer}
    with ExitStack() as stack:
        server = stack.enter_context(makers[request.param]()) if request.param in makers else None
        made = CheckedProject(tmp_path, request.param, server)
        stack.callback(made.close)
        yield made


def test_a_killed_worker_fails_checks_until_another_one_runs(project: CheckedProject) -> None:
    with project.worker():
        project.becomes()
        project.enqueue("hold")
        eventually((project.folder / "started.txt").exists, timeout=60)
        eventually(project.has_written_an_active_job, timeout=60)
    # Killed. Its job is active, with a lease that nobody renews, and that nobody takes back.
    project.becomes(*({"leases"} if project.storage == REDIS else {"leases", "scheduler"}))

    with project.worker():
        project.becomes()


def test_jobs_without_a_worker_fail_a_check(project: CheckedProject) -> None:
    project.becomes()
    project.enqueue("add", 1, 2)
    project.becomes("workers")

    with project.worker():
        project.becomes()


def test_jobs_that_a_frozen_worker_does_not_claim_fail_a_check(project: CheckedProject) -> None:
    with project.worker() as worker:
        worker.says("started")  # Before that, the checks find nothing, either: nothing has been enqueued.
        project.becomes()
        worker.signal(signal.SIGSTOP)
        try:
            project.enqueue("add", 1, 2)
            # The worker counts as live until it has been silent for long enough; a busy machine may miss that
            # time. With the database storage, it is the scheduler, too.
            expected = {"claims", "workers"} if project.storage == REDIS else {"scheduler"}
            eventually(lambda: expected & project.failed(), timeout=60, message=f"one of {expected} fails")
            eventually(lambda: "workers" in project.failed(), timeout=60, message="workers fails")
        finally:
            worker.signal(signal.SIGCONT)
        project.becomes()


def test_a_frozen_server_fails_the_first_check_in_time(project: CheckedProject) -> None:
    if project.server is None:
        pytest.skip("SQLite has no server")
    project.becomes()
    frozen: AbstractContextManager[None] = project.server.frozen()
    with frozen:
        for _ in range(2):
            began = time.monotonic()
            assert project.failed() == {"storage"}
            assert time.monotonic() - began < 5 + 3
        done = project.manage("djqueue", "health", "--timeout", "2")
        explained = project.manage("djqueue", "doctor", "--timeout", "2", "--json")
    project.becomes()
    findings = json.loads(explained.stdout)["findings"]

    assert done.returncode == explained.returncode == 1
    assert "health.storage" in done.stdout
    assert "health.storage" in {finding["id"] for finding in findings}
    assert all(finding["fix"] for finding in findings)
    assert project.manage("djqueue", "health").returncode == 0


def test_jobs_that_no_live_worker_knows_fail_a_check(project: CheckedProject) -> None:
    with project.worker():
        project.becomes()
        project.failed("from djqueue import Queue; Queue('default').enqueue([1], name='shop.jobs.removed')")
        project.becomes("handlers")

        done = project.manage("djqueue", "cancel", "--all", "--queue", "default", "--no-input")
        assert done.returncode == 0, done.stderr
        project.becomes()
