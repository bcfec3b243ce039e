"""The scheduler of `runworkers` restarted, killed and frozen beside other worker processes."""

import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
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
    "QUEUES": {"limited": {"CONCURRENCY": 2}, "brief": {"LEASE": 6}, "kept": {"LEASE": 10}},
    "STORAGE": {
        "BACKEND": "djqueue.storage.journaled.JournaledStorage",
        "OPTIONS": {"ADDRESS": "unix://" + __import__("os").path.abspath("socket")},
    },
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

JOBS = """
import os
import signal
import time
from pathlib import Path

from djqueue import job

LOG = os.open("log.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def say(*words):
    os.write(LOG, (" ".join(map(str, words)) + "\\n").encode())


@job
def note(number):
    say("note", number)


@job
def slow(number, seconds):
    say("begin", number, os.getpid())
    time.sleep(seconds)
    say("end", number)
    return number


def wait_for_go(number):
    say("begin", number, os.getpid())
    while not Path("go").exists():
        time.sleep(0.02)
    say("end", number)


@job(queue="held")
def hold(number):
    wait_for_go(number)


@job(queue="limited")
def limited(number):
    wait_for_go(number)


@job(queue="poison")
def die():
    say("die", os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    made = Project(tmp_path, JOBS, SETTINGS)
    made.migrate()
    yield made
    close_consoles()


def enqueue(project: Project, code: str) -> None:
    project.run(f"from shop.jobs import *; {code}")


def told(project: Project) -> list[list[str]]:
    """What the jobs have said, word by word."""
    path = project.folder / "log.txt"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def begun(project: Project) -> Counter[str]:
    return Counter(words[1] for words in told(project) if words[0] == "begin")


def query(project: Project, statement: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(project.folder / "jobs.sqlite3")
    try:
        return connection.execute(statement).fetchall()
    finally:
        connection.close()


def states(project: Project) -> dict[str, int]:
    return dict(query(project, "SELECT state, COUNT(*) FROM djqueue_job GROUP BY state"))


def start_scheduler(project: Project, number: int, *queues: str) -> WorkerProcess:
    return project.start_single("--queues", ",".join(queues), log=f"scheduler-{number}.txt")


def lines_of(process: WorkerProcess) -> list[str]:
    """What a process has logged on the storage and its place as the scheduler."""
    words = ("scheduler", "storage", "lease", "Traceback", "ERROR", "journal")
    return [line for line in process.output.splitlines() if any(word in line for word in words)]


@pytest.mark.parametrize("restarts", [2, pytest.param(10, marks=pytest.mark.thorough)])
def test_scheduler_restarts_under_load_use_no_attempt_and_repeat_no_job(
    project: Project, restarts: int
) -> None:
    count = 12 * restarts
    enqueue(project, f"slow.enqueue_many([((n, 0.3), {{}}) for n in range({count})])")
    scheduler = start_scheduler(project, 0, "other")
    with scheduler, project.start_single("--standby=work", "--concurrency", "4", log="helper.txt") as helper:
        for number in range(1, restarts + 1):
            reached = 4 * number
            eventually(lambda reached=reached: sum(begun(project).values()) >= reached)
            scheduler.signal(signal.SIGTERM)
            assert scheduler.ends() == 0, scheduler.output
            assert "Traceback" not in scheduler.output
            scheduler = start_scheduler(project, number, "other")
            with_end = scheduler
            with_end.says("This process is the scheduler")
        eventually(lambda: states(project) == {"completed": count})
        helper.signal(signal.SIGTERM)
        assert helper.ends() == 0
        scheduler.signal(signal.SIGTERM)
        assert scheduler.ends() == 0

    assert set(begun(project).values()) == {1}
    counted = "SELECT SUM(attempts), SUM(failures), SUM(stalls) FROM djqueue_job"
    assert query(project, counted) == [(count, 0, 0)]
    assert len(query(project, "SELECT id FROM djqueue_job_attempt")) == 0
    logged = lines_of(helper)
    assert not [line for line in logged if "Traceback" in line or "ERROR" in line], helper.output
    noticed = [line for line in logged if "the storage is available again" in line]
    # Each restart is noticed once at most: the worker may have had nothing to report while it happened.
    assert len(noticed) <= restarts, helper.output


def test_jobs_of_other_process_run_once_when_scheduler_is_killed(project: Project) -> None:
    enqueue(project, "hold.enqueue_many([((n,), {}) for n in range(4)])")
    enqueue(project, "limited.enqueue_many([((n,), {}) for n in range(10, 14)])")
    scheduler = start_scheduler(project, 0, "other")
    helpers = ("--standby=work", "--concurrency", "6", "--queues", "held,limited")
    with scheduler, project.start_single(*helpers, log="helper.txt") as helper:
        eventually(lambda: len(begun(project)) == 6)
        scheduler.signal(signal.SIGKILL)
        scheduler.ends()
        with start_scheduler(project, 1, "held", "limited") as second:
            second.says("This process is the scheduler")
            enqueue(project, "note.using(queue='held').enqueue(99)")
            eventually(lambda: ["note", "99"] in told(project))
            assert len(begun(project)) == 6, "the limit of two is kept, and nothing runs twice"
            (project.folder / "go").touch()
            eventually(lambda: states(project) == {"completed": 9})
            assert set(begun(project).values()) == {1}
            assert query(project, "SELECT SUM(stalls) FROM djqueue_job") == [(0,)]
            for process in (helper, second):
                process.signal(signal.SIGTERM)
                assert process.ends() == 0, process.output


@pytest.mark.thorough
def test_scheduler_killed_five_times_under_load_repeats_no_job(project: Project) -> None:
    """A claim whose answer died with its scheduler costs a stall, for nobody ran it; no job begins twice."""
    enqueue(project, "slow.using(queue='kept').enqueue_many([((n, 0.05), {}) for n in range(300)])")
    scheduler = start_scheduler(project, 0, "other")
    with scheduler, project.start_single("--standby=work", "--concurrency", "4", log="helper.txt") as helper:
        for number in range(1, 6):
            reached = 40 * number
            eventually(lambda reached=reached: sum(begun(project).values()) >= reached)
            scheduler.signal(signal.SIGKILL)
            scheduler.ends()
            scheduler = start_scheduler(project, number, "other")
            scheduler.says("This process is the scheduler")
        eventually(lambda: states(project) == {"completed": 300})
        for process in (helper, scheduler):
            process.signal(signal.SIGTERM)
            assert process.ends() == 0, process.output

    assert set(begun(project).values()) == {1}
    assert "Traceback" not in helper.output
    assert "Lost the lease" not in helper.output


def test_result_finished_while_no_scheduler_runs_is_delivered_to_next_scheduler(project: Project) -> None:
    enqueue(project, "hold.enqueue(1)")
    scheduler = start_scheduler(project, 0, "other")
    with scheduler, project.start_single("--standby=work", "--queues", "held", log="helper.txt") as helper:
        eventually(lambda: begun(project) == {"1": 1})
        scheduler.signal(signal.SIGTERM)
        assert scheduler.ends() == 0
        (project.folder / "go").touch()
        eventually(lambda: ["end", "1"] in told(project))
        with start_scheduler(project, 1, "held") as second:
            eventually(lambda: states(project) == {"completed": 1})
            assert begun(project) == {"1": 1}
            assert query(project, "SELECT attempts, stalls FROM djqueue_job") == [(1, 0)]
            for process in (helper, second):
                process.signal(signal.SIGTERM)
                assert process.ends() == 0, process.output


def test_job_that_ends_during_shutdown_of_all_processes_is_completed(project: Project) -> None:
    enqueue(project, "hold.enqueue(1)")
    scheduler = start_scheduler(project, 0, "other")
    with scheduler, project.start_single("--standby=work", "--queues", "held", log="helper.txt") as helper:
        eventually(lambda: begun(project) == {"1": 1})
        for process in (helper, scheduler):
            process.signal(signal.SIGTERM)
        assert scheduler.ends() == 0, scheduler.output
        (project.folder / "go").touch()
        assert helper.ends() == 0, helper.output
        assert "Traceback" not in helper.output

    assert states(project) == {"completed": 1}
    assert query(project, "SELECT attempts, stalls FROM djqueue_job") == [(1, 0)]


@pytest.mark.thorough
def test_frozen_scheduler_does_not_stall_jobs_when_it_resumes(project: Project) -> None:
    enqueue(project, "hold.using(queue='brief').enqueue_many([((n,), {}) for n in range(3)])")
    scheduler = project.start_single("--queues", "other", log="scheduler.txt")
    arguments = ("--standby=work", "--queues", "brief")
    with scheduler, project.start_single(*arguments, log="helper.txt") as helper:
        eventually(lambda: len(begun(project)) == 3)
        scheduler.signal(signal.SIGSTOP)
        [(before,)] = query(project, "SELECT MAX(leased_until) FROM djqueue_job")
        assert isinstance(before, int)
        now = "SELECT CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER)"
        eventually(lambda: query(project, now)[0][0] > before + 2_000)
        scheduler.signal(signal.SIGCONT)
        scheduler.says("was paused for")
        (project.folder / "go").touch()
        eventually(lambda: states(project) == {"completed": 3})
        assert set(begun(project).values()) == {1}
        assert query(project, "SELECT SUM(stalls) FROM djqueue_job") == [(0,)]
        for process in (helper, scheduler):
            process.signal(signal.SIGTERM)
            assert process.ends() == 0, process.output


@pytest.mark.thorough
def test_job_that_kills_its_worker_immediately_becomes_a_dead_letter(project: Project) -> None:
    enqueue(project, "die.enqueue()")
    deaths = 0
    while states(project) != {"failed": 1}:
        with project.start_single("--queues", "poison", log=f"scheduler-{deaths}.txt") as scheduler:
            eventually(
                lambda scheduler=scheduler: (
                    scheduler.process.poll() is not None or states(project) == {"failed": 1}
                ),
            )
            deaths += 1
            assert deaths <= 6, "the first death may go unnoticed, the next four are counted"

    [(reason,)] = query(project, "SELECT reason FROM djqueue_dead_letter")
    assert reason == "worker_lost"
    assert query(project, "SELECT stalls FROM djqueue_job") == [(4,)]


@pytest.mark.thorough
def test_jobs_of_frozen_and_replaced_scheduler_end_once(project: Project) -> None:
    """It reports their ends to the process that took its place, under the same tokens."""
    enqueue(project, "hold.using(queue='kept').enqueue_many([((n,), {}) for n in range(3)])")
    with project.start_single("--queues", "kept", log="first.txt") as first:
        eventually(lambda: len(begun(project)) == 3)
        with project.start_single("--queues", "kept", log="second.txt") as second:
            second.says("Standing by")
            first.signal(signal.SIGSTOP)
            second.says("This process is the scheduler")
            first.signal(signal.SIGCONT)
            first.says("Another process has taken over as the scheduler")
            (project.folder / "go").touch()
            eventually(lambda: states(project) == {"completed": 3})

            assert first.ends() == 1
            assert "will run again" not in first.output
            assert set(begun(project).values()) == {1}
            assert query(project, "SELECT SUM(stalls), SUM(attempts) FROM djqueue_job") == [(0, 3)]
            second.signal(signal.SIGTERM)
            assert second.ends() == 0, second.output
