"""`runworkers` on the project's database, killed with SIGKILL."""

import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.runtime.project import Project, WorkerProcess, close_consoles
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
DJQUEUE = {
    # No test waits for a lease: what was killed on this machine needs none.
    "QUEUES": {"default": {"LEASE": 600}},
    "DEFAULTS": {"max_stalls": 1000, "backoff": 0},
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

JOBS = """
import os
import threading

from djqueue import UnrecoverableError, current_job, job

DONE = os.open("done.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@job
def note(number):
    os.write(DONE, f"{number}\\n".encode())
    return number


@job(max_attempts=2)
def fail(number):
    raise ValueError(number)


@job
def refuse(number):
    raise UnrecoverableError(str(number))


@job
def hang(number):
    os.write(DONE, f"{number}\\n".encode())
    if current_job().stalls == 0:
        threading.Event().wait()
    return "at last"
"""

TABLES = """
from djqueue.models import DeadLetter, Job, JobAttempt, JobResult
jobs = list(Job.objects.values_list("job_id", "name", "state", "attempts", "failures", "stalls"))
answer = {
    "jobs": jobs,
    "results": list(JobResult.objects.values_list("job_id", flat=True)),
    "dead": list(DeadLetter.objects.values_list("job_id", "reason")),
    "attempts": list(JobAttempt.objects.values_list("job_id", flat=True)),
}
"""

WORKERS = """
from djqueue.client import get_storage
answer = [(info.pid, info.leads) for info in get_storage().workers.all()]
"""

SEED = int(os.environ.get("DJQUEUE_TEST_SEED", "0")) or random.SystemRandom().randrange(1 << 30)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path, JOBS, SETTINGS)
    made.migrate()
    return made


def tables(project: Project) -> dict[str, list[list[object]]]:
    found: dict[str, list[list[object]]] = project.run(TABLES)
    return found


def until_empty(project: Project) -> None:
    with project.start("--until-empty", "--concurrency", "4") as workers:
        assert workers.ends() == 0, workers.output


def test_job_result_is_read_by_the_caller_and_by_a_third_process(
    project: Project,
) -> None:
    job_id = project.run("from shop.jobs import note; answer = note.enqueue(7).id")
    with project.start() as workers:
        code = "from shop.jobs import note; answer = note.enqueue_and_wait(41, wait=60)"
        assert project.run(code) == 41
        workers.signal(signal.SIGTERM)
        assert workers.ends() == 0

    close_consoles()
    assert project.run(f"from djqueue import Queue; answer = Queue('default').get_result({job_id!r})") == 7


def test_job_of_killed_worker_runs_again_and_counts_one_stall(project: Project) -> None:
    job_id = project.run("from shop.jobs import hang; answer = hang.enqueue(1).id")
    done = project.folder / "done.txt"
    with project.start() as workers:
        eventually(lambda: done.exists() and done.read_text() == "1\n", message=workers.output)
        assert state_of(project, job_id) == "active"
        workers.signal(signal.SIGKILL)
        workers.ends()
    until_empty(project)

    (row,) = tables(project)["jobs"]
    assert row[2:] == ["completed", 2, 0, 1]
    assert done.read_text() == "1\n1\n"


def test_job_runs_again_at_once_after_the_supervisor_has_lost_its_worker(project: Project) -> None:
    job_id = project.run("from shop.jobs import hang; answer = hang.enqueue(1).id")
    done = project.folder / "done.txt"
    with project.start() as workers:
        eventually(lambda: done.exists() and done.read_text() == "1\n", message=workers.output)
        [(first, leads)] = project.run(WORKERS)
        os.kill(first, signal.SIGKILL)

        eventually(lambda: state_of(project, job_id) == "completed", message=workers.output)
        eventually(lambda: project.run(WORKERS) not in ([], [[first, leads]]))
        workers.says("was killed; took back its active jobs (1)")
    assert done.read_text() == "1\n1\n"


@pytest.mark.thorough
def test_two_groups_of_processes_have_one_leader_which_is_replaced_when_it_is_killed(
    project: Project,
) -> None:
    with project.start("--processes", "2"), project.start("--processes", "2", log="other.txt"):
        eventually(lambda: sorted(leads for _, leads in project.run(WORKERS)) == [False] * 3 + [True])
        [leader] = [pid for pid, leads in project.run(WORKERS) if leads]
        os.kill(leader, signal.SIGKILL)

        eventually(
            lambda: (
                sorted(leads for pid, leads in project.run(WORKERS) if pid != leader) == [False] * 3 + [True]
            )
        )


def state_of(project: Project, job_id: str) -> str:
    code = f"from djqueue.models import Job; answer = Job.objects.get(job_id={job_id!r}).state"
    return project.run(code)


@pytest.mark.parametrize("kills", [3, pytest.param(15, marks=pytest.mark.thorough)])
def test_workers_killed_at_random_times_lose_no_job_and_end_each_once(project: Project, kills: int) -> None:
    """`DJQUEUE_TEST_SEED` repeats the instants of a run."""
    notes, others = 100 * kills, 4 * kills
    instants = random.Random(SEED)
    ids = enqueue(project, notes=notes, fails=others, refusals=others)
    done = project.folder / "done.txt"
    for _ in range(kills):
        before = size(done)
        with project.start("--concurrency", "4") as workers:
            wait_for_progress(workers, done, before + instants.randrange(400), full(notes))
            workers.signal(signal.SIGKILL)
            workers.ends()
    until_empty(project)

    found = tables(project)
    states = {job_id: (name, state) for job_id, name, state, *_ in found["jobs"]}
    assert states.keys() == set(ids), f"seed {SEED}"
    assert Counter(states.values()) == {
        ("shop.jobs.note", "completed"): notes,
        ("shop.jobs.fail", "failed"): others,
        ("shop.jobs.refuse", "failed"): others,
    }, f"seed {SEED}"
    assert sorted(found["results"]) == sorted(
        key for key, (_, state) in states.items() if state == "completed"
    )
    assert Counter(reason for _, reason in found["dead"]) == {
        "max_attempts_exceeded": others,
        "explicit_fail": others,
    }
    assert len({job_id for job_id, _ in found["dead"]}) == 2 * others
    assert set(found["attempts"]) <= set(ids)
    failures = {job_id: failed for job_id, name, _, _, failed, _ in found["jobs"] if name.endswith("fail")}
    assert set(failures.values()) == {2}
    assert {int(line) for line in done.read_text().split()} == set(range(notes))


def enqueue(project: Project, *, notes: int, fails: int, refusals: int) -> list[str]:
    code = f"""
from django.db import transaction
from shop.jobs import fail, note, refuse
with transaction.atomic():
    results = note.enqueue_many([((n,), {{}}) for n in range({notes})])
    results += fail.enqueue_many([((n,), {{}}) for n in range({fails})])
results += refuse.using(durable=True).enqueue_many([((n,), {{}}) for n in range({refusals})])
answer = [result.id for result in results]
"""
    ids: list[str] = project.run(code)
    return ids


def size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def wait_for_progress(workers: WorkerProcess, done: Path, more_than: int, at_most: int) -> None:
    """Until it has done something; at the end of the work it may have nothing to do."""
    eventually(
        lambda: size(done) > more_than or size(done) >= at_most,
        message=workers.output,
    )


def full(count: int) -> int:
    """Bytes of a file in which each number stands once."""
    return full_of(*range(count))


def full_of(*numbers: int) -> int:
    """Bytes of a file in which these numbers stand."""
    return sum(len(f"{number}\n") for number in numbers)
