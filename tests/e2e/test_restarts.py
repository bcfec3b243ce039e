"""Workers that are restarted, killed and frozen beside other workers."""

import signal
import sqlite3
from collections import Counter
from functools import partial
from pathlib import Path

import pytest

from tests.runtime.project import Project, WorkerProcess
from tests.support import eventually

pytestmark = pytest.mark.slow

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "jobs.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
DJQUEUE = {"HEARTBEAT": 1, "QUEUES": {"limited": {"CONCURRENCY": 2, "LEASE": 5}, "held": {"LEASE": 5}}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

JOBS = """
import os
import time
from pathlib import Path

from djqueue import job

LOG = os.open("log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def say(*words):
    os.write(LOG, (" ".join(map(str, words)) + "\\n").encode())


@job
def slow(number):
    say("begin", number, os.getpid())
    time.sleep(0.3)
    say("end", number)


@job(queue="held")
def hold(number):
    say("begin", number, os.getpid())
    while not Path("go").exists():
        time.sleep(0.02)
    say("end", number)
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path, JOBS, SETTINGS)
    made.migrate()
    return made


def enqueue(project: Project, code: str) -> None:
    project.run(f"from shop.jobs import *; {code}")


def told(project: Project) -> list[list[str]]:
    """What the jobs have said, word by word."""
    path = project.folder / "log.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def begun(project: Project) -> Counter[str]:
    return Counter(words[1] for words in told(project) if words[0] == "begin")


def begun_by(project: Project, process: WorkerProcess) -> set[str]:
    return {
        words[1] for words in told(project) if words[0] == "begin" and words[2] == str(process.process.pid)
    }


def has_begun_or_lacks_jobs(project: Project, process: WorkerProcess) -> bool:
    return bool(begun_by(project, process)) or "waiting" not in states(project)


def query(project: Project, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(project.folder / "jobs.sqlite3")
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def states(project: Project) -> dict[object, object]:
    return dict(query(project, "SELECT state, COUNT(*) FROM djqueue_job GROUP BY state"))


@pytest.mark.parametrize("restarts", [1, pytest.param(10, marks=pytest.mark.thorough)])
def test_worker_restarts_under_load_use_no_attempt_and_repeat_no_job(project: Project, restarts: int) -> None:
    count = 20 * restarts
    enqueue(project, f"slow.enqueue_many([((n,), {{}}) for n in range({count})])")
    with project.start_single("--concurrency", "2", log="beside.txt") as beside:
        for number in range(restarts):
            with project.start_single("--concurrency", "2", log=f"{number}.txt") as restarted:
                restarted.says("started")
                eventually(partial(has_begun_or_lacks_jobs, project, restarted))
                while not begun_by(project, restarted):  # The other worker was faster.
                    more = range(count, count + 20)
                    enqueue(project, f"slow.enqueue_many([((n,), {{}}) for n in {more}])")
                    count += 20
                    eventually(partial(has_begun_or_lacks_jobs, project, restarted))
                restarted.signal(signal.SIGTERM)
                assert restarted.ends() == 0, restarted.output
                assert "Traceback" not in restarted.output
        eventually(lambda: states(project) == {"completed": count})
        beside.signal(signal.SIGTERM)
        assert beside.ends() == 0
        assert "Traceback" not in beside.output

    assert set(begun(project).values()) == {1}
    assert query(project, "SELECT SUM(attempts), SUM(failures), SUM(stalls) FROM djqueue_job") == [
        (count, 0, 0)
    ]
    assert query(project, "SELECT id FROM djqueue_job_attempt") == []


def test_jobs_of_killed_worker_run_again_in_another_worker_within_the_limit(project: Project) -> None:
    """They hold their slots until their leases have expired; the jobs of the other worker run once."""
    enqueue(project, "hold.using(queue='limited').enqueue_many([((n,), {}) for n in range(4)])")
    with project.start_single("--queues", "limited", log="killed.txt") as killed:
        eventually(lambda: len(begun(project)) == 2)
        lost = begun_by(project, killed)
        with project.start_single("--queues", "held,limited", log="other.txt") as other:
            enqueue(project, "hold.enqueue(10)")
            eventually(lambda: begun(project)["10"] == 1)
            assert len(begun(project)) == 3, "the limit of two is kept"
            killed.signal(signal.SIGKILL)
            killed.ends()
            # A job that has stalled runs again beside none that has.
            eventually(lambda: len(begun_by(project, other)) == 3)
            assert begun_by(project, other) & lost
            (project.folder / "go").touch()
            eventually(lambda: states(project) == {"completed": 5})
            other.signal(signal.SIGTERM)
            assert other.ends() == 0, other.output

    assert {name: times for name, times in begun(project).items() if times > 1} == dict.fromkeys(lost, 2)
    assert query(project, "SELECT SUM(stalls), MAX(stalls) FROM djqueue_job") == [(2, 1)]


@pytest.mark.thorough
def test_frozen_worker_loses_its_jobs_and_continues_with_others(project: Project) -> None:
    enqueue(project, "hold.enqueue(1)")
    with project.start_single("--queues", "held", log="frozen.txt") as frozen:
        eventually(lambda: begun(project) == {"1": 1})
        frozen.signal(signal.SIGSTOP)
        with project.start_single("--queues", "held", log="other.txt") as other:
            eventually(lambda: begun_by(project, other) == {"1"})
            (project.folder / "go").touch()
            eventually(lambda: states(project) == {"completed": 1})
            frozen.signal(signal.SIGCONT)
            frozen.says("Lost the lease")
            other.signal(signal.SIGTERM)
            assert other.ends() == 0, other.output
        enqueue(project, "hold.enqueue(2)")
        eventually(lambda: states(project) == {"completed": 2})
        assert begun_by(project, frozen) == {"1", "2"}
        frozen.signal(signal.SIGTERM)
        assert frozen.ends() == 0, frozen.output

    assert query(project, "SELECT SUM(stalls), SUM(attempts) FROM djqueue_job") == [(1, 3)]
