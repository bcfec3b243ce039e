"""Test suites of projects that use djqueue: with pytest, and with `manage.py test`."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from djqueue import Queue
from djqueue.storage.redis import RedisStorage

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


APART = """
from unittest import TestCase as PlainTestCase

from django.test import SimpleTestCase, TestCase, TransactionTestCase

from djqueue import Queue
from djqueue.client import get_storage
from djqueue.testing.assertions import assert_enqueued
from shop import greet


class Both:
    def test_one_job(self):
        greet.enqueue(1)
        assert_enqueued(greet, count=1)

    def test_another_job(self):
        self.test_one_job()


class InTransactionTests(Both, TestCase):
    pass


class WithCommitsTests(Both, TransactionTestCase):
    pass


class WithoutDatabaseTests(Both, SimpleTestCase):
    def test_a_wait_names_the_helpers(self):
        for wait in (greet.enqueue_and_wait, Queue("orders").enqueue_and_wait):
            with self.assertRaisesRegex(RuntimeError, "djqueue_immediate, or JobTestMixin"):
                wait(1)
        result = greet.enqueue(1)
        with self.assertRaisesRegex(RuntimeError, "djqueue_immediate, or JobTestMixin"):
            result.wait(1)


class PlainTests(PlainTestCase):
    def test_a_job(self):
        greet.enqueue(1)
        self.assertEqual(type(get_storage()).__name__, "MemoryStorage")
"""
REAL = """
from django.conf import settings
from django.test import SimpleTestCase, override_settings

from djqueue import Queue
from djqueue.client import get_storage


class Both:
    def test_queues_have_a_prefix(self):
        Queue("orders").enqueue(1)
        self.assertIn("RedisStorage", str(type(get_storage())))
        self.assertEqual(Queue("orders").counts()["waiting"], 1)
        Queue("orders").clear()

    def test_overridden_settings_keep_it(self):
        with override_settings(DJQUEUE={"STORAGE": settings.DJQUEUE["STORAGE"]}):
            self.test_queues_have_a_prefix()


class FirstTests(Both, SimpleTestCase):
    pass


class SecondTests(Both, SimpleTestCase):
    pass
"""
PYTEST_APART = """
import pytest

from djqueue.testing.assertions import assert_enqueued
from shop import greet


@pytest.mark.parametrize("number", range(2))
def test_each_test_has_an_empty_storage(number):
    greet.enqueue(number)
    assert_enqueued(greet, args=(number,), count=1)


async def enqueue(number):
    await greet.aenqueue(number)


def test_async_code_uses_the_same_storage():
    from asgiref.sync import async_to_sync

    async_to_sync(enqueue)(1)
    assert_enqueued(greet, count=1)
"""


def on_redis(url: str, test: str = "") -> str:
    storage = f'{{"BACKEND": "djqueue.storage.redis.RedisStorage", "OPTIONS": {{"URL": {url!r}}}}}'
    return f'{SETTINGS}DJQUEUE = {{"STORAGE": {storage}, "ENQUEUE_ON_COMMIT": False{test}}}\n'


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


def run_pytest(folder: Path, *arguments: str) -> str:
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

    return run(
        *(folder, "-m", "pytest", "-q", *plugins, "-W", "error", f"--rootdir={folder}", *arguments, "."),
    )


@pytest.mark.slow
def test_project_tests_run_with_pytest(tmp_path):
    project(tmp_path, test_shop=FIXTURES, test_cases=CASES)

    assert "8 passed" in run_pytest(tmp_path)


@pytest.mark.slow
def test_tests_with_manage_py_leave_the_queues_of_redis_alone(tmp_path, redis_server):
    redis_server.clean()
    project(tmp_path, project_settings=on_redis(redis_server.url), test_shop=APART)

    assert "Ran 8 tests" in run(tmp_path, "-m", "django", "test")
    assert "Ran 8 tests" in run(tmp_path, "-m", "django", "test", "--parallel", "2")
    with redis_server.client() as client:
        assert client.keys() == []


@pytest.mark.slow
def test_tests_with_manage_py_need_no_server(tmp_path):
    project(tmp_path, project_settings=on_redis("redis://127.0.0.1:1/0"), test_shop=APART)

    assert "Ran 8 tests" in run(tmp_path, "-m", "django", "test")


@pytest.mark.slow
def test_tests_with_pytest_leave_the_queues_of_redis_alone(tmp_path, redis_server):
    redis_server.clean()
    modules = {"test_shop": APART, "test_functions": PYTEST_APART}
    project(tmp_path, project_settings=on_redis(redis_server.url), **modules)

    assert "11 passed" in run_pytest(tmp_path)
    assert "11 passed" in run_pytest(tmp_path, "-n", "2")
    with redis_server.client() as client:
        assert client.keys() == []


@pytest.mark.slow
def test_tests_with_the_real_storage_have_queues_of_their_own(tmp_path, redis_server):
    redis_server.clean()
    with closing(RedisStorage(url=redis_server.url)) as live:
        Queue("orders", storage=live).enqueue("real")
    with redis_server.client() as client:
        before = sorted(client.keys())
    settings = on_redis(redis_server.url, ', "TEST": {"STORAGE": "real"}')
    project(tmp_path, project_settings=settings, test_shop=REAL)

    assert "Ran 4 tests" in run(tmp_path, "-m", "django", "test")
    assert "Ran 4 tests" in run(tmp_path, "-m", "django", "test", "--parallel", "2")
    assert "4 passed" in run_pytest(tmp_path)
    with redis_server.client() as client:
        assert sorted(client.keys()) == before


def test_no_tests_run_while_the_test_environment_is_torn_down():
    code = (
        "from django.conf import settings; settings.configure()\n"
        "from django.test.utils import setup_test_environment, teardown_test_environment\n"
        "from djqueue.conf import is_testing\n"
        "from django.core import mail; mail.get_connection('django.core.mail.backends.locmem.EmailBackend')\n"
        "for change in (int, setup_test_environment, teardown_test_environment):\n"
        "    change(); print(is_testing())"
    )

    assert run(ROOT, "-c", code).split() == ["False", "True", "False"]
