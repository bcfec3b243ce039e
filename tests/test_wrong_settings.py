"""A wrong `DJQUEUE` is an error of `manage.py check` (E001), whatever a project imports first."""

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).resolve().parents[1]

SETTINGS = """
SECRET_KEY = "not a secret"
INSTALLED_APPS = [
    "django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes", "django.contrib.messages",
    "django.contrib.sessions", {apps}
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [{{
    "BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True,
    "OPTIONS": {{"context_processors": [
        "django.template.context_processors.request", "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]}},
}}]
DATABASES = {{"default": {{"ENGINE": "django.db.backends.sqlite3", "NAME": "unused.sqlite3"}}}}
ROOT_URLCONF = "project_urls"
USE_TZ = True
DJQUEUE = {given}
"""
URLS = """
from django.contrib import admin
from django.urls import path

import djqueue.dashboard.urls
import shop.views

urlpatterns = [path("admin/", admin.site.urls)]
"""
JOBS = """
from djqueue import Limiter, Queue, job

@job(queue="emails", max_attempts=5, cron="@daily")
def send(): ...

@job
def other(): ...

emails = Queue("emails", priority=3)
urgent = send.using(priority=9)
"""
WRONG = {
    "an unknown key": ({"STORGE": {}}, "djqueue.E001"),
    "a wrong value": ({"QUEUES": {"emails": {"RATE": "fast"}}}, "djqueue.E001"),
    "no dict": (["emails"], "djqueue.E001"),
    "none": (None, "djqueue.E001"),
    "wrong defaults": ({"DEFAULTS": {"max_attempts": 0}}, "djqueue.E001"),
    "wrong modules": ({"MODULES": "tasks"}, "djqueue.E001"),
    "odd keys": ({1: 2, None: 3}, "djqueue.E001"),
    "an unknown limiter": ({"QUEUES": {"emails": {"LIMITER": "stripe"}}}, "djqueue.E008"),
    "an odd limiter": ({"QUEUES": {"emails": {"LIMITER": ["stripe"]}}}, "djqueue.E001"),
    "odd limiters": ({"LIMITERS": 5, "QUEUES": {"emails": {"LIMITER": "stripe"}}}, "djqueue.E001"),
    "a closed list of queues": ({"STRICT_QUEUES": True, "QUEUES": ["mails"]}, "djqueue.E009"),
    "a missing module": ({"MODULES": ["shop.nothing"]}, "djqueue.E010"),
    "an unknown storage": ({"STORAGE": {"BACKEND": "nowhere.Storage"}}, "djqueue.E002"),
}
APPS = {"djqueue first": '"djqueue", "shop"', "djqueue last": '"shop", "djqueue"'}
IMPORTED_BY = ["nothing", "models", "views", "apps"]


@pytest.fixture
def manage(tmp_path):
    """Runs a command of a project with these settings; a module of its app imports its jobs."""

    def run(given, apps, imported_by, *command):
        shop = tmp_path / "shop"
        shop.mkdir()
        files = dict.fromkeys(("__init__", "models", "views"), "")
        files["jobs"] = JOBS
        files["apps"] = "from django.apps import AppConfig\n\nclass Shop(AppConfig):\n    name = 'shop'\n"
        if imported_by == "apps":
            files["apps"] += "    def ready(self):\n        import shop.jobs\n"
        elif imported_by != "nothing":
            files[imported_by] += "import shop.jobs\n"
        for name, text in files.items():
            (shop / f"{name}.py").write_text(text)
        (tmp_path / "project_settings.py").write_text(dedent(SETTINGS.format(apps=apps, given=repr(given))))
        (tmp_path / "project_urls.py").write_text(URLS)
        path = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
        return subprocess.run(
            [sys.executable, "-m", "django", *command],
            cwd=tmp_path,
            env={**os.environ, "DJANGO_SETTINGS_MODULE": "project_settings", "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_setting_is_an_error_of_check(manage, wrong):
    given, expected = WRONG[wrong]

    found = manage(given, APPS["djqueue last"], "models", "check")

    assert found.returncode == 1
    assert f"({expected})" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("apps", APPS)
@pytest.mark.parametrize("imported_by", IMPORTED_BY)
def test_it_is_one_whatever_is_imported_first(manage, apps, imported_by):
    given, expected = WRONG["an unknown key"]

    found = manage(given, APPS[apps], imported_by, "check")

    assert found.returncode == 1
    assert f"({expected})" in found.stderr
    assert "'STORGE' is not" in found.stderr.replace("DJQUEUE['STORGE']", "'STORGE'")
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize("command", ["runworkers", "migrate", "djqueue"])
@pytest.mark.parametrize(
    "wrong",
    ["an unknown key", "no dict", "an unknown limiter", "a closed list of queues", "a missing module"],
)
def test_other_commands_say_the_same(manage, command, wrong):
    given, expected = WRONG[wrong]
    arguments = ["workers"] if command == "djqueue" else []

    found = manage(given, APPS["djqueue last"], "views", command, *arguments)

    assert found.returncode != 0
    assert f"({expected})" in found.stderr
    assert "Traceback" not in found.stderr


def test_a_job_outside_the_closed_list_of_queues_is_named(manage):
    given, _ = WRONG["a closed list of queues"]

    found = manage(given, APPS["djqueue first"], "nothing", "check")

    assert "Job 'shop.jobs.send': queue 'emails' is not in DJQUEUE['QUEUES']" in found.stderr
    assert "did you mean 'mails'?" in found.stderr


def test_a_missing_module_is_named_with_its_setting(manage):
    given, _ = WRONG["a missing module"]

    found = manage(given, APPS["djqueue first"], "nothing", "check")

    assert "DJQUEUE['MODULES']: 'shop.nothing' cannot be imported" in found.stderr
