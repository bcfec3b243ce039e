"""Projects that install djqueue alone: no other app, no `djqueue.contrib.spark`, no setting."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import PATIENCE

ROOT = Path(__file__).resolve().parents[1]

SETTINGS = """
SECRET_KEY = "not a secret"
INSTALLED_APPS = {apps!r}
DATABASES = {{"default": {{
    "ENGINE": "django.db.backends.sqlite3", "NAME": "project.sqlite3",
    "OPTIONS": {{"transaction_mode": "IMMEDIATE"}},
}}}}
USE_TZ = True
DJQUEUE = {{"MODULES": ["shop.tasks"]}}
"""
TASKS = """
from djqueue import job

@job
def double(number):
    return number * 2
"""
ADMIN = ["admin", "auth", "contenttypes", "messages", "sessions"]


@pytest.fixture
def manage(tmp_path):
    """Runs a command of a project with these apps."""
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop" / "__init__.py").touch()
    (tmp_path / "shop" / "tasks.py").write_text(TASKS)

    def run(apps, *command):
        (tmp_path / "project_settings.py").write_text(SETTINGS.format(apps=apps))
        finished = subprocess.run(
            [sys.executable, "-W", "error", "-m", "django", *command],
            cwd=tmp_path,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "project_settings",
                "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
            },
            capture_output=True,
            text=True,
            timeout=5 * PATIENCE,
            check=False,
        )
        assert finished.returncode == 0, finished.stdout + finished.stderr
        return finished.stdout

    return run


@pytest.mark.slow
def test_project_with_djqueue_as_its_only_app_passes_all_checks(manage):
    assert "no issues" in manage(["djqueue"], "check", "--fail-level", "WARNING")
    manage(["djqueue"], "makemigrations", "--check", "--dry-run")


@pytest.mark.slow
def test_project_with_djqueue_as_its_only_app_runs_jobs(manage):
    apps = ["djqueue"]

    manage(apps, "migrate", "--verbosity", "0")
    manage(apps, "shell", "-c", "from shop.tasks import double; double.enqueue(21)")
    manage(apps, "runworkers", "--until-empty")

    code = (
        "from djqueue.models import Job; from djqueue.client import get_storage; job = Job.objects.get();"
        "print(job.state, get_storage().reads.jobs(job.queue, [job.job_id])[0].state.value)"
    )
    assert manage(apps, "shell", "-c", code).split()[-2:] == ["completed", "completed"]


@pytest.mark.slow
def test_bulk_writes_require_the_spark_app(manage):
    apps = [*(f"django.contrib.{name}" for name in ADMIN), "djqueue"]
    manage(apps, "migrate", "--skip-checks", "--verbosity", "0")

    code = (
        "from djqueue.client import get_storage\n"
        "from djqueue.contrib.spark.locations import staging_of\n"
        "from djqueue.core.errors import OptionError\n"
        "from djqueue.dashboard.views import jobtypes\n"
        "from djqueue.dashboard.urls import PAGES\n"
        "storage = get_storage()\n"
        "try:\n"
        "    staging_of(storage)\n"
        "except OptionError as error:\n"
        "    print(error)\n"
        "print([page.name for page in PAGES if page.route.startswith('bulk-writes')])\n"
        "print(storage.capabilities.bulk_writes, jobtypes.rollups_within(0, 10**9, 1, ['emails']))\n"
    )
    error, pages, reports = manage(apps, "shell", "-v", "0", "-c", code).splitlines()

    assert error.endswith(
        "has no tables for bulk writes: add 'djqueue.contrib.spark' to INSTALLED_APPS of the Django "
        "project and run manage.py migrate"
    )
    assert pages == "[]"
    assert reports == "None None"
