"""Poison jobs, which kill their worker at every attempt, among other jobs."""

from pathlib import Path

import pytest

from tests import servers
from tests.runtime.project import Project

pytestmark = pytest.mark.slow

GOOD = 30

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "jobs.sqlite3",
        "OPTIONS": {"transaction_mode": "IMMEDIATE", "timeout": 20},
    }
}
DJQUEUE = {"HEARTBEAT": 1, "DEFAULTS": {"max_stalls": %d}, "STORAGE": %r}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

JOBS = """
import os
import time

from djqueue import job


@job
def good(number):
    time.sleep(0.2)
    return number


@job
def poison():
    time.sleep(%s)
    os._exit(9)
"""

FOUND = """
from djqueue import Queue
jobs = Queue("default").storage.reads.page("default", None, 100)
answer = [
    [job.name, str(job.state), job.stalls, job.reason, job.error.message if job.error else ""] for job in jobs
]
"""


@pytest.mark.thorough
@pytest.mark.parametrize("poisons", [1, 3])
def test_poison_job_fails_without_failing_other_jobs_on_redis(
    tmp_path: Path, redis_server: servers.RedisServer, poisons: int
) -> None:
    redis_server.clean()
    options = {"URL": redis_server.url, "LEASE": 5}
    storage = {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": options}
    ends_alone(Project(tmp_path, JOBS % 0, SETTINGS % (3, storage)), poisons, stalls=4)


@pytest.mark.parametrize(
    ("poisons", "seconds", "max_stalls"),
    [
        (1, 0.5, 1),
        *(
            pytest.param(poisons, seconds, 3, marks=pytest.mark.thorough)
            for poisons in (1, 3)
            for seconds in (0, 0.5)
        ),
    ],
)
def test_poison_job_fails_without_failing_other_jobs_on_database(
    tmp_path: Path, poisons: int, seconds: float, max_stalls: int
) -> None:
    storage = {"BACKEND": "djqueue.storage.database.DatabaseStorage"}
    settings = SETTINGS % (max_stalls, storage) + 'DJQUEUE["QUEUES"] = {"default": {"LEASE": 3}}\n'
    ends_alone(Project(tmp_path, JOBS % seconds, settings), poisons, stalls=max_stalls + 1)


def ends_alone(project: Project, poisons: int, *, stalls: int) -> None:
    project.migrate()
    code = f"""
from shop.jobs import good, poison
for number in range({GOOD}):
    if number % 10 == 5 and number // 10 < {poisons}:
        poison.enqueue()
    good.using(durable=True).enqueue(number)
"""
    project.run(code)
    deaths = 0
    while True:
        with project.start_single("--until-empty", "--concurrency", "5") as workers:
            code_of_end = workers.ends()
        if code_of_end == 0:
            break
        assert code_of_end == 9, workers.output
        deaths += 1
        assert deaths <= stalls * poisons, workers.output

    found = project.run(FOUND)
    goods = [row for row in found if row[0] == "shop.jobs.good"]
    bad = [row for row in found if row[0] == "shop.jobs.poison"]
    assert [row[1] for row in goods] == ["completed"] * GOOD
    # A job dies at most once with each of them: no stalled job starts beside another one.
    assert max(row[2] for row in goods) <= poisons
    assert [row[1:3] for row in bad] == [["failed", stalls]] * poisons
    for row in bad:
        assert row[3] in ("stalled", "worker_lost")
        assert row[4].startswith(f"stalled {stalls} times, last on ")
        assert row[4].count("attempt ") == stalls
    assert deaths >= (stalls - 1) * poisons
