"""`manage.py djqueue health` beside real workers and servers: killed, frozen, and running again."""

import json
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.project import Project, WorkerProcess
from tests.support import PATIENCE, eventually
from tools.chaos.project import POSTGRESQL, REDIS, SQLITE, _postgresql

pytestmark = pytest.mark.slow

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {{"default": {database!r}}}
DJQUEUE = {{
    "HEARTBEAT": 0.5,
    "QUEUES": {{"default": {{"LEASE": 2}}}},
    "STORAGE": {storage!r},
    "HEALTH": {{"MAX_WAIT": 0.5, "LEASE_GRACE": 1, "TIMEOUT": 1}},
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


CHECK = """
from djqueue.conf import get_settings

from djqueue.operations.healthchecks import HealthRun
answer = HealthRun(get_settings().health).report().document()
"""
SHORT_SILENCE = "from djqueue.core import workers; workers.SILENT_AFTER = 2_000; answer = None"
"""Lets the checks count a worker as silent after four heartbeats, instead of 15 seconds."""
COUNT_ACTIVE = "from djqueue.models import Job; answer = Job.objects.filter(state='active').count()"


class CheckedProject:
    """A project, its server if it has one, and its health."""

    def __init__(
        self, folder: Path, storage: str, server: Any = None, backend: dict[str, Any] | None = None
    ) -> None:
        self.storage = storage
        self.server = server
        database: dict[str, Any] = {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": "jobs.sqlite3",
            "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
        }
        backend = backend or {"BACKEND": "djqueue.storage.database.DatabaseStorage"}
        if storage == POSTGRESQL:
            database = _postgresql(server.create_database())
        elif storage == REDIS:
            backend = {
                "BACKEND": "djqueue.storage.redis.RedisStorage",
                "OPTIONS": {**server.options, "MIRROR": False},
            }
        self.project = Project(folder, JOBS, SETTINGS.format(database=database, storage=backend))
        self.project.migrate()
        self.folder = folder

    def worker(self) -> WorkerProcess:
        """Start a worker."""
        return self.project.start_single("--concurrency", "2")

    def enqueue(self, name: str, *arguments: object) -> None:
        """Enqueue a job of `shop.jobs`."""
        self.failed(f"from shop.jobs import {name}; {name}.enqueue(*{arguments!r})")

    def failed(self, code: str = "") -> set[str]:
        """Run code in the project, and return the names of the failed checks."""
        checks = self.project.run(f"{code}\n{CHECK}")["checks"]
        return {name for name, status in checks.items() if status == "failed"}

    def has_active_job(self) -> bool:
        """Return whether the tables show that a job is active."""
        return bool(self.project.run(COUNT_ACTIVE) == 1)

    def becomes(self, *names: str) -> None:
        """Wait until exactly these checks fail."""
        seen: set[str] = set()

        def matches() -> bool:
            nonlocal seen
            seen = self.failed()
            return seen == set(names)

        try:
            eventually(matches)
        except AssertionError as error:
            error.add_note(f"expected {set(names)}, and saw {seen}")
            raise


@pytest.fixture
def project(request: pytest.FixtureRequest, tmp_path: Path) -> CheckedProject:
    storage = request.param
    names = {POSTGRESQL: "postgres_server", REDIS: "redis_server"}
    server = request.getfixturevalue(names[storage]) if storage in names else None
    if storage == REDIS:
        server.clean()
    return CheckedProject(tmp_path, storage, server)


def on(*storages: str, thorough: tuple[str, ...]) -> pytest.MarkDecorator:
    """Run a test on some storages, and on further ones in the thorough lane."""
    further = [pytest.param(storage, marks=pytest.mark.thorough) for storage in thorough]
    return pytest.mark.parametrize("project", [*storages, *further], indirect=True)


@on(SQLITE, thorough=(POSTGRESQL, REDIS))
def test_health_checks_fail_after_worker_is_killed_until_another_worker_runs(project: CheckedProject) -> None:
    with project.worker():
        project.becomes()
        project.enqueue("hold")
        eventually((project.folder / "started.txt").exists)
        assert project.storage == REDIS or project.has_active_job()
    # Killed. Its job is active, with a lease that nobody renews, and that nobody takes back.
    project.becomes("leases")

    with project.worker():
        project.becomes()


@on(SQLITE, thorough=(POSTGRESQL, REDIS))
def test_health_check_fails_for_waiting_jobs_without_worker(project: CheckedProject) -> None:
    project.becomes()
    project.enqueue("add", 1, 2)
    project.becomes("workers")

    with project.worker():
        project.becomes()


@on(REDIS, thorough=(SQLITE, POSTGRESQL))
def test_health_check_fails_for_jobs_that_frozen_worker_does_not_claim(project: CheckedProject) -> None:
    if project.storage == REDIS:  # The thorough lane waits as long as the product does.
        project.project.run(SHORT_SILENCE)
    with project.worker() as worker:
        worker.says("started")  # Before that, the checks find nothing, either: nothing has been enqueued.
        project.becomes()
        worker.signal(signal.SIGSTOP)
        try:
            project.enqueue("add", 1, 2)
            # The worker counts as live until it has been silent for long enough; a busy machine may miss that
            # time.
            expected = {"claims", "workers"}
            eventually(lambda: expected & project.failed(), message=f"one of {expected} fails")
            eventually(lambda: "workers" in project.failed(), message="workers fails")
        finally:
            worker.signal(signal.SIGCONT)
        project.becomes()


@on(REDIS, thorough=(POSTGRESQL,))
def test_health_check_reports_frozen_storage_server_within_its_timeout(project: CheckedProject) -> None:
    assert project.project.manage("djqueue", "health").returncode == 0
    frozen: AbstractContextManager[None] = project.server.frozen()
    with frozen:
        began = time.monotonic()
        assert project.failed() == {"storage"}
        assert time.monotonic() - began < PATIENCE
        explained = project.project.manage("djqueue", "doctor", "--timeout", "1", "--json")
    project.becomes()
    findings = json.loads(explained.stdout)["findings"]

    assert explained.returncode == 1
    assert "health.storage" in {finding["id"] for finding in findings}
    assert all(finding["fix"] for finding in findings)


@on(SQLITE, thorough=(POSTGRESQL, REDIS))
def test_health_check_fails_for_jobs_without_handler_in_live_workers(project: CheckedProject) -> None:
    with project.worker():
        project.becomes()
        project.failed("from djqueue import Queue; Queue('default').enqueue([1], name='shop.jobs.removed')")
        project.becomes("handlers")

        done = project.project.manage("djqueue", "cancel", "--all", "--queue", "default", "--no-input")
        assert done.returncode == 0, done.stderr
        project.becomes()
