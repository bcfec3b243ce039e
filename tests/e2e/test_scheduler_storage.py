"""`runworkers` with the scheduler storage: its processes, killed one by one, and what callers notice."""

import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.runtime.project import Project, WorkerProcess, close_consoles
from tests.support import eventually

pytestmark = [pytest.mark.slow, pytest.mark.scheduler]

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "jobs.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
DJQUEUE = {
    "STORAGE": {
        "BACKEND": "djqueue.storage.scheduler.SchedulerStorage",
        "OPTIONS": {"FOLDER": "%(folder)s"},
    },
    "DEFAULTS": {"max_stalls": 1000, "backoff": 0},
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

JOBS = """
import os
import time

from djqueue import current_job, job

DONE = os.open("done.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@job
def note(number):
    os.write(DONE, f"{number}\\n".encode())
    return number


@job
def long(number):
    os.write(DONE, f"{number}\\n".encode())
    while not os.path.exists("go.txt"):
        time.sleep(0.01)
    return number
"""
COUNTS = """
from djqueue import Queue
answer = {str(state): count for state, count in Queue("default").counts().items()}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path, JOBS, SETTINGS % {"folder": tmp_path / "s"})
    made.migrate()
    return made


def enqueue(project: Project, name: str, count: int, options: str = "") -> list[str]:
    code = f"""
from shop.jobs import {name}
answer = [{name}{options}.enqueue(number).id for number in range({count})]
"""
    ids: list[str] = project.run(code)
    return ids


def counts(project: Project) -> dict[str, int]:
    found: dict[str, int] = project.run(COUNTS)
    return {state: count for state, count in found.items() if count}


def done(project: Project) -> Counter[int]:
    path = project.folder / "done.txt"
    return Counter(int(line) for line in path.read_text().split()) if path.exists() else Counter()


def children(workers: WorkerProcess) -> dict[str, int]:
    """Return the process ids of the supervisor's children, by name."""
    health = json.loads((workers.log.parent / "health.json").read_text())
    return {child["name"]: child["pid"] for child in health["processes"]}


def pid_of(workers: WorkerProcess, name: str, other_than: int = 0) -> int:
    def found() -> int:
        path = workers.log.parent / "health.json"
        pid = children(workers).get(name, 0) if path.exists() else 0
        return pid if pid != other_than else 0

    return eventually(found, message=workers.output)


def test_jobs_enqueued_before_any_scheduler_runs_wait_in_the_outbox(project: Project) -> None:
    enqueue(project, "note", 5)

    with project.start("--until-empty") as workers:
        assert workers.ends() == 0, workers.output

    assert done(project) == Counter(range(5))


def test_jobs_of_a_transaction_run_after_its_commit(project: Project) -> None:
    with project.start() as workers:
        workers.says("Worker")
        project.run(
            "from django.db import transaction\nfrom shop.jobs import note\n"
            "with transaction.atomic():\n    note.enqueue(1)\n"
        )
        eventually(lambda: done(project) == Counter([1]), message=workers.output)


def test_killed_scheduler_is_replaced_and_running_jobs_go_on(project: Project) -> None:
    with project.start("--health-file", "health.json", "--concurrency", "4") as workers:
        scheduler = pid_of(workers, "scheduler")
        enqueue(project, "long", 4)
        eventually(lambda: sum(done(project).values()) == 4, message=workers.output)

        os.kill(scheduler, signal.SIGKILL)
        enqueue(project, "note", 1)  # to the outbox, or to the next scheduler
        pid_of(workers, "scheduler", other_than=scheduler)
        (project.folder / "go.txt").touch()

        eventually(lambda: counts(project) == {"completed": 5}, message=workers.output)
        assert done(project) == Counter([0, 0, 1, 2, 3])
        workers.signal(signal.SIGTERM)
        assert workers.ends() == 0, workers.output


def test_job_of_a_killed_worker_runs_again_at_once(project: Project) -> None:
    with project.start("--health-file", "health.json") as workers:
        worker = pid_of(workers, "worker 1")
        enqueue(project, "long", 1)
        eventually(lambda: done(project) == Counter([0]), message=workers.output)

        os.kill(worker, signal.SIGKILL)
        (project.folder / "go.txt").touch()

        eventually(lambda: counts(project) == {"completed": 1}, message=workers.output)
        assert done(project) == Counter([0, 0])


def test_second_runworkers_is_refused_unless_it_joins(project: Project) -> None:
    with project.start() as workers:
        workers.says("Worker")
        eventually(lambda: project.run("import os; answer = os.path.exists('s/socket')"))
        with project.start(log="second.txt") as second:
            assert second.ends() != 0
            assert "is the scheduler of database 'default'" in second.output
            assert "--join" in second.output
        enqueue(project, "note", 1)
        with project.start("--join", "--until-empty", log="third.txt") as third:
            assert third.ends() == 0, third.output
        eventually(lambda: done(project) == Counter([0]), message=workers.output)


def test_single_process_is_scheduler_and_worker(project: Project) -> None:
    with project.start_single() as workers:
        workers.says("Worker")
        enqueue(project, "note", 3)
        eventually(lambda: counts(project) == {"completed": 3}, message=workers.output)
        workers.signal(signal.SIGTERM)
        assert workers.ends() == 0, workers.output


@pytest.mark.parametrize("kills", [3, pytest.param(15, marks=pytest.mark.thorough)])
def test_schedulers_killed_under_load_lose_no_durable_job_and_run_none_twice(
    project: Project, kills: int
) -> None:
    with project.start("--health-file", "health.json", "--concurrency", "4") as workers:
        scheduler = pid_of(workers, "scheduler")
        ids = []
        for number in range(kills):
            before = sum(done(project).values())
            ids += enqueue(project, "note", 200, ".using(durable=True)")
            eventually(lambda before=before: sum(done(project).values()) > before, message=workers.output)
            os.kill(scheduler, signal.SIGKILL)
            scheduler = pid_of(workers, "scheduler", other_than=scheduler)
            assert len(ids) == 200 * (number + 1)
        eventually(lambda: counts(project) == {"completed": len(ids)}, message=workers.output)
        assert done(project) == Counter(dict.fromkeys(range(200), kills))
        close_consoles()
