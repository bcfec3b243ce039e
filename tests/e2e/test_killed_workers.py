"""`runworkers` on a project's database, killed as `kill -9` kills: what a user finds afterwards."""

import os
import random
import signal
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.runtime.project import Project, WorkerProcess
from tests.support import eventually

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "jobs.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
DJQUEUE = {"HEARTBEAT": 1, "DEFAULTS": {"max_stalls": 1000, "backoff": 0}}
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


def test_a_job_enqueued_by_one_process_is_run_by_another_and_its_result_read_by_a_third(
    project: Project,
) -> None:
    job_id = project.run("from shop.jobs import note; answer = note.enqueue(7).id")
    until_empty(project)

    code = f"from djqueue import Queue; answer = Queue('default').get_result({job_id!r})"
    assert project.run(code) == 7


def test_a_caller_in_another_process_gets_what_the_job_returns(project: Project) -> None:
    with project.start() as workers:
        workers.says("is the scheduler")
        code = "from shop.jobs import note; answer = note.enqueue_and_wait(41, wait=60)"
        assert project.run(code) == 41
        workers.signal(signal.SIGTERM)
        assert workers.ends() == 0


def test_an_interrupted_job_runs_again_and_the_stall_is_counted(project: Project) -> None:
    job_id = project.run("from shop.jobs import hang; answer = hang.enqueue(1).id")
    done = project.folder / "done.txt"
    with project.start() as workers:
        eventually(lambda: done.exists() and done.read_text() == "1\n", message=workers.output)
        # What the engine did is in the tables a moment later.
        eventually(lambda: state_of(project, job_id) == "active")
        workers.signal(signal.SIGKILL)
        workers.ends()
    until_empty(project)

    (row,) = tables(project)["jobs"]
    assert row[2:] == ["completed", 2, 0, 1]
    assert done.read_text() == "1\n1\n"


def state_of(project: Project, job_id: str) -> str:
    code = f"from djqueue.models import Job; answer = Job.objects.get(job_id={job_id!r}).state"
    return project.run(code)


def test_a_worker_process_beside_the_scheduler_goes_on_with_the_next_one(project: Project) -> None:
    done = project.folder / "done.txt"
    with project.start("--standby", "work", log="worker.txt") as worker:
        with project.start("--queues", "others") as scheduler:
            scheduler.says("is the scheduler")
            job_id = project.run("from shop.jobs import note; answer = note.enqueue(1).id")
            # In the tables: what has ended in the moment before the kill alone would run again.
            eventually(lambda: state_of(project, job_id) == "completed", message=worker.output)
            assert size(done) == full_of(1)
            scheduler.signal(signal.SIGKILL)
            scheduler.ends()
        with project.start("--queues", "others") as scheduler:
            scheduler.says("is the scheduler")
            project.run("from shop.jobs import note; answer = note.enqueue(2).id")
            eventually(lambda: size(done) == full_of(1, 2), message=worker.output)
            worker.signal(signal.SIGTERM)
            assert worker.ends() == 0, worker.output

    assert sorted(row[2] for row in tables(project)["jobs"]) == ["completed", "completed"]


def test_a_worker_process_leaves_a_frozen_scheduler_for_the_standby(project: Project) -> None:
    """The lease runs out after ten seconds; the worker, whose old socket stays open, follows the standby."""
    done = project.folder / "done.txt"
    with ExitStack() as running:
        frozen = running.enter_context(project.start_single("--queues", "others"))
        frozen.says("is the scheduler")
        standby = running.enter_context(project.start("--queues", "others", log="standby.txt"))
        worker = running.enter_context(project.start("--standby", "work", log="worker.txt"))
        standby.says("Standing by")
        project.run("from shop.jobs import note; answer = note.enqueue(1).id")
        eventually(lambda: size(done) == full_of(1), message=worker.output)
        frozen.signal(signal.SIGSTOP)
        project.run("from shop.jobs import note; answer = note.enqueue(2).id")
        standby.says("is the scheduler")
        taken_over = time.monotonic()
        eventually(lambda: size(done) == full_of(1, 2), message=worker.output)
        took = time.monotonic() - taken_over
        worker.signal(signal.SIGTERM)
        assert worker.ends() == 0, worker.output

    assert took < 15, f"{took:.1f} s after the takeover: it was 70 s with the old socket"


def test_killed_at_random_instants_no_job_is_lost_and_each_ends_once(project: Project) -> None:
    """Fifteen kills; see `DJQUEUE_TEST_SEED` for the same instants again."""
    instants = random.Random(SEED)
    ids = enqueue(project, notes=1500, fails=60, refusals=60)
    done = project.folder / "done.txt"
    for _ in range(15):
        before = size(done)
        with project.start("--concurrency", "4") as workers:
            wait_for_progress(workers, done, before, more=instants.randrange(400))
            workers.signal(signal.SIGKILL)
            workers.ends()
    until_empty(project)

    found = tables(project)
    states = {job_id: (name, state) for job_id, name, state, *_ in found["jobs"]}
    assert states.keys() == set(ids), f"seed {SEED}"
    assert Counter(states.values()) == {
        ("shop.jobs.note", "completed"): 1500,
        ("shop.jobs.fail", "failed"): 60,
        ("shop.jobs.refuse", "failed"): 60,
    }, f"seed {SEED}"
    assert sorted(found["results"]) == sorted(
        key for key, (_, state) in states.items() if state == "completed"
    )
    assert Counter(reason for _, reason in found["dead"]) == {
        "max_attempts_exceeded": 60,
        "explicit_fail": 60,
    }
    assert len({job_id for job_id, _ in found["dead"]}) == 120
    assert set(found["attempts"]) <= set(ids)
    failures = {job_id: failed for job_id, name, _, _, failed, _ in found["jobs"] if name.endswith("fail")}
    assert set(failures.values()) == {2}
    assert {int(line) for line in done.read_text().split()} == set(range(1500))


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


def wait_for_progress(workers: WorkerProcess, done: Path, before: int, more: int) -> None:
    """Until it has done something; at the end of the work it may have nothing to do."""
    workers.says("is the scheduler")
    eventually(
        lambda: size(done) > before + more or size(done) >= full(1500),
        message=workers.output,
    )


def full(count: int) -> int:
    """Bytes of a file in which each number stands once."""
    return full_of(*range(count))


def full_of(*numbers: int) -> int:
    """Bytes of a file in which these numbers stand."""
    return sum(len(f"{number}\n") for number in numbers)
