"""Test suites of projects that use djqueue: with pytest, and with `manage.py test`."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = """
SECRET_KEY = "not a secret"
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "djqueue"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "project.sqlite3"}}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "shop"
USE_TZ = True
"""
SHOP = """
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.urls import path

from djqueue import job


@job
def greet(pk):
    return "Hello " + User.objects.get(pk=pk).username


def view(request, pk):
    return HttpResponse(greet.enqueue_and_wait(pk))


urlpatterns = [path("<int:pk>/", view)]
"""
CASES = """
from django.contrib.auth.models import User
from django.test import TestCase

from djqueue.testing.cases import JobTestMixin
from shop import greet


class ViewTests(JobTestMixin, TestCase):
    immediate_jobs = True

    def test_a_view_that_waits(self):
        user = User.objects.create(username="joe")
        self.assertEqual(self.client.get(f"/{user.pk}/").content, b"Hello joe")

    async def test_a_view_that_waits_async(self):
        user = await User.objects.acreate(username="joe")
        self.assertEqual((await self.async_client.get(f"/{user.pk}/")).content, b"Hello joe")


class DrainTests(JobTestMixin, TestCase):
    use_job_clock = True

    def test_a_drain(self):
        user = User.objects.create(username="joe")
        answer = greet.using(delay=60).enqueue(user.pk)
        self.assertEnqueued(greet, args=[user.pk], count=1)
        self.job_clock.advance(60)
        self.assertEqual(self.drain_jobs().completed, 1)
        self.assertEqual(answer.wait(0), "Hello joe")
"""
FIXTURES = """
import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User

from djqueue.client import get_storage
from shop import greet


@pytest.fixture
def user(db):
    return User.objects.create(username="joe")


def test_a_view_that_waits(djqueue_immediate, client, user):
    assert client.get(f"/{user.pk}/").content == b"Hello joe"


def test_a_failure(djqueue_immediate, db):
    with pytest.raises(User.DoesNotExist):
        greet.enqueue(1)


def test_a_drain(djqueue_memory, djqueue_clock, djqueue_drain, user):
    answer = greet.using(delay=60).enqueue(user.pk)
    djqueue_clock.advance(60)
    assert djqueue_drain().completed == 1
    assert answer.wait(0) == "Hello joe"


def test_other_settings(settings, djqueue_immediate):
    settings.LANGUAGE_CODE = "de"
    assert type(get_storage()).__name__ == "ImmediateStorage"


def test_the_settings_of_the_project_are_back():
    assert "ImmediateStorage" not in str(getattr(django_settings, "DJQUEUE", {}))
"""


def project(folder: Path, **modules: str) -> None:
    for name, text in {"project_settings": SETTINGS, "shop": SHOP, **modules}.items():
        (folder / f"{name}.py").write_text(text)


def run(folder: Path, *arguments: str) -> str:
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{ROOT}", "DJANGO_SETTINGS_MODULE": "project_settings"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    return finished.stdout


@pytest.mark.slow
def test_project_tests_run_with_manage_py(tmp_path):
    project(tmp_path, test_shop=CASES)

    output = run(tmp_path, "-W", "error::ResourceWarning", "-m", "django", "test")

    assert "Ran 3 tests" in output


@pytest.mark.slow
def test_project_tests_run_with_pytest(tmp_path):
    project(tmp_path, test_shop=FIXTURES, test_cases=CASES)
    # By its module, whether djqueue is installed (then its name is taken) or not.
    plugins = [
        "-p",
        "no:djqueue",
        "-p",
        "djqueue.testing.plugin",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:asyncio",
        "-p",
        "no:randomly",
    ]

    output = run(tmp_path, "-m", "pytest", "-q", *plugins, "-W", "error", f"--rootdir={tmp_path}", ".")

    assert "8 passed" in output
