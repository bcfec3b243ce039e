"""`runworkers` and its mirror, in real processes."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing

import pytest

from tests.runtime.project import ROOT, Project
from tests.support import PATIENCE, eventually

SETTINGS = """
INSTALLED_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "djqueue", "shop"]
DATABASES = {{
    "default": {{
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": "jobs.sqlite3",
        "OPTIONS": {{"transaction_mode": "IMMEDIATE", "timeout": 20}},
    }}
}}
DJQUEUE = {{
    "STORAGE": {{"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": {{"URL": "{url}"}}}},
    "DEFAULTS": {{"backoff": 0}},
}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
"""

JOBS = """
from djqueue import job


@job
def double(number):
    return number * 2


@job(max_attempts=2)
def fail():
    raise ValueError("as it should")
"""

TABLES = """
import json
from djqueue.models import DeadLetter, Job, JobAttempt, JobResult
print(json.dumps({
    "states": sorted(Job.objects.values_list("name", "state", "attempts")),
    "results": JobResult.objects.count(),
    "dead": list(DeadLetter.objects.values_list("reason", flat=True)),
    "attempts": JobAttempt.objects.count(),
}))
"""


@pytest.fixture
def project(tmp_path, redis_url):
    made = Project(tmp_path, JOBS, SETTINGS.format(url=redis_url))
    python(made, "-m", "django", "migrate", "--verbosity", "0")
    return made


def python(project, *arguments: str) -> str:
    """Python in the project, in a process of its own: what it printed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project.folder,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "project_settings",
            "PYTHONPATH": os.pathsep.join([str(project.folder), str(ROOT)]),
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(project, code: str) -> str:
    path = project.folder / "said.py"
    path.write_text(f"import django\ndjango.setup()\n{code}\n")
    return python(project, str(path))


def count(project, table: str) -> int:
    with closing(sqlite3.connect(project.folder / "jobs.sqlite3")) as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


@pytest.mark.slow
def test_ended_workers_leave_their_jobs_in_the_tables(project):
    code = "from shop.jobs import double, fail; [double.enqueue(n) for n in range(50)]; fail.enqueue()"
    run(project, code)
    with project.start("--until-empty", "--concurrency", "4") as workers:
        assert workers.ends() == 0, workers.output

    found = json.loads(run(project, TABLES))
    assert found["states"] == [["shop.jobs.double", "completed", 1]] * 50 + [["shop.jobs.fail", "failed", 2]]
    assert (found["results"], found["dead"], found["attempts"]) == (50, ["max_attempts_exceeded"], 2)


@pytest.mark.slow
def test_worker_continues_the_mirror_of_a_killed_one(project):
    with project.start("--worker-id", "first", log="first.txt") as first:
        run(project, "from shop.jobs import double; double.enqueue(1)")
        eventually(lambda: count(project, "djqueue_job_result") == 1)
        with project.start("--worker-id", "second", log="second.txt") as second:
            second.says("concurrency")
            first.process.kill()
            first.ends()
            run(project, "from shop.jobs import double; double.enqueue(2)")
            eventually(lambda: count(project, "djqueue_job_result") == 2)
            second.process.terminate()
            assert second.ends() == 0, second.output
