"""A job that kills its worker's process each time, among jobs that do not."""

from pathlib import Path

import pytest

from tests import servers
from tests.runtime.project import Project

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
DJQUEUE = {"HEARTBEAT": 0.5, "STORAGE": %s}
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


@pytest.mark.slow
@pytest.mark.parametrize("poisons", [1, 3])
def test_on_redis_a_poison_job_ends_alone(
    tmp_path: Path, redis_server: servers.RedisServer, poisons: int
) -> None:
    redis_server.clean()
    options = {"URL": redis_server.url, "LEASE": 1}
    storage = {"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": options}
    ends_alone(Project(tmp_path, JOBS % 0, SETTINGS % storage), poisons)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0, 0.5], ids=["at once", "after its claim is written"])
@pytest.mark.parametrize("poisons", [1, 3])
def test_on_a_database_a_poison_job_ends_alone(tmp_path: Path, poisons: int, seconds: float) -> None:
    storage = {"BACKEND": "djqueue.storage.database.DatabaseStorage"}
    # The first death may come before the claims are written.
    project = Project(tmp_path, JOBS % seconds, SETTINGS % storage)
    ends_alone(project, poisons, uncounted=int(seconds == 0))


def ends_alone(project: Project, poisons: int, *, uncounted: int = 0) -> None:
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
        with project.start_single("--until-empty", "--concurrency", "10") as workers:
            code_of_end = workers.ends()
        if code_of_end == 0:
            break
        assert code_of_end == 9, workers.output
        deaths += 1
        assert deaths <= 4 * poisons + uncounted, workers.output

    found = project.run(FOUND)
    goods = [row for row in found if row[0] == "shop.jobs.good"]
    bad = [row for row in found if row[0] == "shop.jobs.poison"]
    assert [row[1] for row in goods] == ["completed"] * GOOD
    # A job dies at most once with each of them: no stalled job starts beside another one.
    assert max(row[2] for row in goods) <= poisons
    assert [row[1:3] for row in bad] == [["failed", 4]] * poisons
    for row in bad:
        assert row[3] in ("stalled", "worker_lost")
        assert row[4].startswith("stalled 4 times, last on ")
        assert row[4].count("attempt ") == 4
    assert deaths >= 3 * poisons
