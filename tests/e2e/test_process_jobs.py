"""Isolated and subprocess jobs under `runworkers`: kills, shutdown, and stuck handlers."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from djqueue.core.procfs import descendants
from tests.e2e.test_supervisor import ON_SQLITE, Shop, lives
from tests.support import eventually

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

JOBS = """
import os, re, time
from pathlib import Path
from djqueue import current_job, job
from django.contrib.auth.models import User

@job(executor="isolated", limits={"grace": 0.2})
def sleeps(name, seconds):
    Path(name).write_text(str(os.getpid()))
    time.sleep(seconds)
    return os.getpid()

@job(executor="isolated")
def asks_the_database(name):
    User.objects.create(username=name)
    return User.objects.count()

@job(executor="subprocess")
def enqueues():
    return add.enqueue(1, 2).id

@job
def add(one, two):
    return one + two

@job(executor="isolated", queue="heavy")
def backtracks():
    re.match(r"(a+)+$", "a" * 64 + "b")

@job(timeout=0.2, max_attempts=2, backoff=0)
def stuck(name):
    with open(name, "a") as file:
        file.write(f"{os.getpid()} {current_job().attempts}\\n")
    if current_job().attempts == 1:
        time.sleep(600)
    return "second"
"""


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    shop = Shop(
        tmp_path,
        ON_SQLITE
        + 'INSTALLED_APPS += ["django.contrib.auth", "django.contrib.contenttypes"]\n'
        + 'DJQUEUE["QUEUES"] = {"default": {"LEASE": 5}}',
    )
    shop.project.write_jobs(JOBS)
    return shop


def written(path: Path) -> int:
    return int(eventually(lambda: path.exists() and path.read_text()))


def ended(shop: Shop, job_id: str) -> Any:
    text = f"""
from djqueue import Queue
found = Queue("default").get_job({job_id!r})
answer = [found.state, found.attempts, found.failures]
"""
    return shop.run(text)


def test_isolated_and_subprocess_jobs_query_the_database_and_enqueue_jobs(shop: Shop) -> None:
    with shop.start() as workers:
        shop.is_up()
        assert shop.call("asks_the_database.enqueue_and_wait('ann', wait=60)") == 1
        assert shop.call("asks_the_database.enqueue_and_wait('bob', wait=60)") == 2
        job_id = shop.call("enqueues.enqueue_and_wait(wait=60)")
        eventually(lambda: ended(shop, job_id)[0] == "completed")
        workers.signal()
        assert workers.ends() == 0


@pytest.mark.parametrize("victim", ["worker 1", pytest.param("supervisor", marks=pytest.mark.thorough)])
def test_job_processes_end_when_worker_or_supervisor_is_killed(
    shop: Shop, tmp_path: Path, victim: str
) -> None:
    with shop.start() as workers:
        shop.is_up()
        job_id = shop.call("sleeps.enqueue('pid', 600).id")
        pid = written(tmp_path / "pid")
        killed = workers.process.pid if victim == "supervisor" else shop.pids()[victim]
        below = descendants(killed)
        assert pid in below

        os.kill(killed, signal.SIGKILL)
        eventually(lambda: not any(map(lives, below)))

        if victim != "supervisor":
            eventually(lambda: (tmp_path / "pid").read_text() != str(pid))
            assert ended(shop, job_id)[2] == 0


@pytest.mark.thorough
def test_running_isolated_job_completes_when_all_processes_are_signaled(shop: Shop, tmp_path: Path) -> None:
    with shop.start() as workers:
        shop.is_up()
        job_id = shop.call("sleeps.enqueue('pid', 2).id")
        written(tmp_path / "pid")

        for pid in [workers.process.pid, *descendants(workers.process.pid)]:
            with suppress(ProcessLookupError):  # the backups' process ends at once
                os.kill(pid, signal.SIGTERM)

        assert workers.ends() == 0
    assert ended(shop, job_id) == ["completed", 1, 0]


@pytest.mark.thorough
def test_shutdown_timeout_of_zero_releases_isolated_job_without_using_an_attempt(
    shop: Shop, tmp_path: Path
) -> None:
    with shop.start("--shutdown-timeout", "0") as workers:
        shop.is_up()
        job_id = shop.call("sleeps.enqueue('pid', 600).id")
        pid = written(tmp_path / "pid")
        workers.signal()
        assert workers.ends() == 0
        assert not lives(pid)
    assert ended(shop, job_id) == ["waiting", 0, 0]


@pytest.mark.thorough
def test_isolated_handlers_that_hold_the_gil_do_not_delay_other_jobs(shop: Shop) -> None:
    with shop.start():
        shop.is_up()
        shop.call("add.enqueue_and_wait(1, 2, wait=60)")
        shop.call("[backtracks.enqueue().id for _ in range(2)]")
        text = """
import time
from shop.jobs import add
from djqueue import Queue
while Queue("heavy").counts()["active"] < 2:
    time.sleep(0.01)
answer = [add.enqueue_and_wait(1, 2, wait=60) for _ in range(20)]
"""
        assert shop.run(text) == [3] * 20


@pytest.mark.thorough
def test_stuck_job_runs_again_only_after_its_worker_process_ended(shop: Shop, tmp_path: Path) -> None:
    with shop.start() as workers:
        shop.is_up()
        first = shop.pids()["worker 1"]

        assert shop.call("stuck.enqueue_and_wait('attempts', wait=60)") == "second"

        attempts = [line.split() for line in (tmp_path / "attempts").read_text().splitlines()]
        assert [attempt for _, attempt in attempts] == ["1", "2"]
        assert attempts[0][0] == str(first)
        assert not lives(first)
        assert "is still running" in workers.output
        assert shop.state()["restarts"] == 0
